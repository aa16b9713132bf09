"""Keep one locked file for each process in line, and its claim (`Claim`).

A file is called after the number of its place: `<n>.waiting` of a process in line, `<n>.lease` once it has been
admitted. It says in JSON what it is for. What else lies in the folder is left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from reshard_mpi.errors import ReshardError
from reshard_mpi.processes import host
from reshard_mpi.processes.governor import scopes
from reshard_mpi.processes.host import holders_of_lock

LOCK = "lock"

_SHORTEST_NAP_SECONDS = 0.0001
_LONGEST_NAP_SECONDS = 0.02
# It is held for milliseconds, so a process that holds it for so long has been stopped in the middle.
PATIENCE_SECONDS = 1.0
_REPEAT_SECONDS = 30.0


class BusyError(Exception):
    """Another process has held the lock for a long time."""


def open_lock(path: Path) -> int:
    """Open the file that is locked, which is made if it is not there, and return its descriptor.

    Raises FileNotFoundError if its folder is not there, ReshardError if it is not a regular file of this user's.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, _PRIVATE)
    except (IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise strange_entry(path, error.strerror or str(error)) from None
    except OSError:
        if path.is_symlink():
            raise strange_entry(path, "a symbolic link") from None
        raise
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(fd)
        raise strange_entry(path, "no file" if status.st_uid == os.geteuid() else f"a file of user {status.st_uid}")
    return fd


def strange_entry(path: Path, got: str) -> ReshardError:
    """Return the error for something other than a file of this user's at `path`, in a ledger."""
    return ReshardError(
        "what memory processes use cannot be kept: something else is in the place of a file for it",
        expected=f"a file of user {os.geteuid()}, or none",
        got=got,
        where=str(path),
        remedy="remove it",
    )


def take(fd: int, tell: Callable[[Sequence[int]], None] | None) -> None:
    """Lock the open file.

    The lock is never broken: its holder may be stopped while it looks who is there, and once continued would admit
    itself beside whoever was admitted meanwhile, or remove the folder that they use. Only the user can continue or kill
    it. So `tell` is called with the holders after a moment and then now and then; without it, BusyError is raised.
    """
    nap_seconds = _SHORTEST_NAP_SECONDS
    due = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        if time.monotonic() >= due:
            if tell is None:
                raise BusyError
            tell(holders_of_lock(fd))
            due = time.monotonic() + _REPEAT_SECONDS
        time.sleep(nap_seconds)
        nap_seconds = min(2 * nap_seconds, _LONGEST_NAP_SECONDS)


def unlock(fd: int) -> None:
    """Unlock and close a file; it is unlocked even if a fork of this process has it open."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def is_free(fd: int) -> bool:
    """Tell whether nobody holds the lock of the open file, which the caller must close soon."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(folder: Path, tell: Callable[[Sequence[int]], None] | None) -> Iterator[None]:
    """Hold the lock of the ledger `folder`, which is made if it is not there.

    Raises FileNotFoundError if what the folder is in is not there, and what `open_lock` and `take` do.
    """
    path = folder / LOCK
    while True:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        try:
            fd = open_lock(path)
        except FileNotFoundError:
            if folder.is_symlink():
                raise strange_entry(folder, "a symbolic link that leads nowhere") from None
            continue  # the last one has just left and removed the folder
        try:
            take(fd, tell)
            if os.fstat(fd).st_nlink:
                yield
                return
        finally:
            unlock(fd)


def holders_of(folder: Path) -> list[int]:
    """Return the processes that hold the lock of the ledger `folder` now, as far as this one can see them."""
    try:
        fd = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return []
    try:
        return holders_of_lock(fd)
    finally:
        os.close(fd)


class Claim(NamedTuple):
    """The purpose of a lease: process `pid` wants `size_bytes` in a scope."""

    size_bytes: int
    pid: int
    pid_namespace: str  # the one in which `pid` is valid
    purpose: str
    scope: str
    ceiling_bytes: int  # of the scope, as its user allows
    since: float  # when the process joined the line (seconds since the epoch)
    # it stands for memory that the process uses in any case and keeps while it waits for more, so nobody waits for its
    # end
    is_floor: bool = False
    used_before_bytes: int = 0  # what the process used before, for which it has no lease

    @classmethod
    def loads(cls, text: bytes) -> Claim | None:
        """Return the claim in the text of a file; None if there is none, as in a file of another version."""
        try:
            claim = cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            return None
        kinds: tuple[type | tuple[type, ...], ...] = (int, int, str, str, str, int, (int, float), bool, int)
        if not all(isinstance(value, kind) for value, kind in zip(claim, kinds)) or claim.size_bytes < 0:
            return None
        return claim

    def dumps(self) -> bytes:
        return json.dumps(self._asdict()).encode()

    @property
    def is_here(self) -> bool:
        """Whether this process is in the same PID namespace, so `pid` is valid here."""
        return self.pid_namespace == own_pid_namespace()

    @property
    def is_stopped(self) -> bool:
        """Whether the process is known to be stopped."""
        return self.is_here and host.is_stopped(self.pid)

    @property
    def state(self) -> str:
        """The state of the process in a word or a few; empty if it is in another PID namespace."""
        return host.state_of(self.pid) if self.is_here else ""


class Occupant(NamedTuple):
    """A process in a ledger. since: when it was admitted, or joined the line. inode: of its file."""

    number: int
    claim: Claim
    holds: bool
    since: float
    inode: int = 0

    def told(self, now: float) -> str:
        """Describe this process and its state, for people."""
        state = self.claim.state
        return f"pid {self.claim.pid} ({f'{state}, ' if state else ''}for {max(0.0, now - self.since):.0f} s)"


# Says in words what a claim lacks to fit beside the claims of leases (the argument); None if it fits.
Judge = Callable[[Sequence[Claim]], "str | None"]


class WaitReporter(Protocol):
    """Reports the reason for waiting; the next report comes when no seconds are left."""

    def left_seconds(self) -> float: ...

    def tell(self, ahead: int, lacking: str | None, whom: Sequence[Occupant]) -> None:
        """Say how many are ahead in line or, at its head, how much is lacking. whom: the processes waited for."""
        ...

    def tell_locked(self, pids: Sequence[int]) -> None:
        """Say that these processes have the line locked."""
        ...


_pid_namespace: dict[int, str] = {}


def own_pid_namespace() -> str:
    """Return the name of the PID namespace of this process."""
    pid = os.getpid()
    if pid not in _pid_namespace:
        try:
            _pid_namespace[pid] = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - pathlib is not light
        except OSError:
            _pid_namespace[pid] = ""
    return _pid_namespace[pid]


def leased_bytes(claims: Iterable[Claim]) -> Counter[int]:
    """Return by process the sum of its claims, for processes of this PID namespace.

    Claims of a process that used memory before its first one count only as far as it has used more since.
    """
    leased: Counter[int] = Counter()
    used_before: Counter[int] = Counter()
    for claim in claims:
        if claim.is_here:
            leased[claim.pid] += claim.size_bytes
            used_before[claim.pid] = max(used_before[claim.pid], claim.used_before_bytes)
    for pid, before_bytes in used_before.items():
        if before_bytes:
            leased[pid] = min(leased[pid], max(0, scopes.resident_bytes(pid) - before_bytes))
    return leased


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
            if fd is None or is_free(fd):
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
            return fd is not None and not is_free(fd)

    def bury(self, number: int, kind: str) -> None:
        """Remove the files of a process that has died. Numbers are not used again, so they are nobody else's."""
        with self._opened(number, kind) as fd:
            if fd is not None and is_free(fd):
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
            if path.name != LOCK:
                with contextlib.suppress(OSError):  # what others have put there
                    path.unlink()
        (self.folder / LOCK).unlink()  # last: from now on somebody else may come
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
