"""The files of a ledger: one for each process that waits or holds a lease, locked by it as long as it lives.

A file is called after the number of its place: `<n>.waiting` of a process in line, `<n>.lease` once it has been
admitted. It says in JSON what it is for. What else lies in the folder is left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from reshard_mpi.processes.governor import ledger_lock
from reshard_mpi.processes.governor.claims import Claim, Occupant

WAITING, LEASE, LINE, _NEW = ".waiting", ".lease", ".line", ".new"
_PRIVATE = 0o600
_NUMBER = re.compile(r"[0-9]{1,19}", re.ASCII)
_MAX_CLAIM_BYTES = 1 << 16


class LedgerFiles:
    """The files in the folder of a ledger. A kind is the ending of a name: WAITING, LEASE or LINE."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, number: int, kind: str) -> Path:
        return self.folder / f"{number}{kind}"

    def numbers(self, kind: str) -> list[int]:
        """Return the numbers of all files of a kind, ascending."""
        try:
            names = [path.name for path in self.folder.iterdir()]
        except OSError:
            return []
        stems = (name.removesuffix(kind) for name in names if name.endswith(kind))
        return sorted(int(stem) for stem in stems if _NUMBER.fullmatch(stem))

    def occupant(self, number: int, kind: str) -> Occupant | None:
        """Return who has the place `number`; None if it has left, has died, or its file is of another version."""
        with self._opened(number, kind) as fd:
            if fd is None or ledger_lock.is_free(fd):
                return None
            status = os.fstat(fd)
            claim = Claim.loads(os.pread(fd, min(status.st_size, _MAX_CLAIM_BYTES), 0))
            if claim is None:
                return None
            # The kernel notes when the name was changed, which is when the lease was granted.
            since = status.st_ctime if kind == LEASE else claim.since
            return Occupant(number, claim, kind == LEASE, since, status.st_ino)

    def occupants(self) -> list[Occupant]:
        """Return who holds leases, and then who waits, in the order of the line."""
        # In the order in which files are renamed: nobody is missed who is admitted meanwhile.
        numbers = sorted({number for kind in (WAITING, LEASE) for number in self.numbers(kind)})
        occupants = (self.occupant(number, WAITING) or self.occupant(number, LEASE) for number in numbers)
        return sorted(filter(None, occupants), key=lambda occupant: not occupant.holds)

    def is_held(self, number: int, kind: str) -> bool:
        """Tell whether a live process has the place `number`."""
        with self._opened(number, kind) as fd:
            return fd is not None and not ledger_lock.is_free(fd)

    def bury(self, number: int, kind: str) -> None:
        """Remove the files of a process that has died. Numbers are not used again, so they are nobody else's."""
        with self._opened(number, kind) as fd:
            if fd is not None and ledger_lock.is_free(fd):
                self.path(number, kind).unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    self.path(number, LINE).unlink()

    def write(self, number: int, kind: str, claim: Claim) -> int:
        """Write a new file and return its descriptor, with which it is locked."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self.path(number, kind), flags, _PRIVATE)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.write(fd, claim.dumps())
        except BaseException:
            os.close(fd)
            raise
        return fd

    def replace_lease(self, number: int, claim: Claim) -> int:
        """Replace the file of a lease, so that all see either the old or the new one; return as `write` does."""
        self.path(number, _NEW).unlink(missing_ok=True)
        fd = self.write(number, _NEW, claim)
        self.path(number, _NEW).rename(self.path(number, LEASE))
        return fd

    def remove(self, number: int) -> None:
        """Remove all files of a place, and the folder if nobody is left: scopes come and go with jobs."""
        for kind in (WAITING, LEASE, LINE):
            self.path(number, kind).unlink(missing_ok=True)
        if any(self.numbers(kind) for kind in (WAITING, LEASE)):
            return
        for path in self.folder.iterdir():
            if path.name != ledger_lock.LOCK:
                with contextlib.suppress(OSError):  # what others have put there
                    path.unlink()
        (self.folder / ledger_lock.LOCK).unlink()  # last: from now on somebody else may come
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    @contextlib.contextmanager
    def _opened(self, number: int, kind: str) -> Iterator[int | None]:
        """Open the file of a place; None if there is none, or it is not a regular file of this user's."""
        try:
            fd = os.open(self.path(number, kind), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            yield None
            return
        try:
            status = os.fstat(fd)
            yield fd if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() else None
        finally:
            os.close(fd)
