"""A line of processes and the leases they hold, kept as files in one folder, first come first served.

`<n>.waiting` is the n-th process in line, `<n>.lease` the same once it has been admitted; either is locked by its owner
as long as that lives, and says in JSON what it is for. `<n>.line` is a pipe that a waiting process keeps open: the next
one in line sleeps on it, and is woken when it closes, for whatever reason. So only the head of the line has to look
again and again. `bell` is a pipe by which a lease that is given back wakes the head at once. `lock` is locked while the
line changes.

The folder comes with the first process and goes with the last. It may also be removed from outside at any time, as
where the end of a login session clears what its user has in shared memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

_WAITING, _LEASE, _LINE = ".waiting", ".lease", ".line"
_LOCK, _BELL = "lock", "bell"
_PRIVATE = 0o600
# How often the head of the line looks whether memory has become free otherwise than by a lease that was given back:
# often enough for a lease whose holder died to be noticed at once, seldom enough for looking to cost nothing.
_LOOK_SECONDS = 0.05
_LOOK_SHARE = 10
_LONGEST_LOOK_SECONDS = 0.5


class Claim(NamedTuple):
    """What a lease is for: so many bytes, wanted by a process for a purpose, in the scope that allows no more than so.

    pid_namespace: in which `pid` is the process's number. since: when it joined the line (seconds since the epoch).
    """

    size_bytes: int
    pid: int
    pid_namespace: str
    purpose: str
    scope: str
    ceiling_bytes: int
    since: float


class Occupant(NamedTuple):
    """Somebody in a ledger. since: when it was admitted, or joined the line."""

    number: int
    claim: Claim
    holds: bool
    since: float


# Says, in words, what a claim lacks to fit beside those that are held (the argument); None if it fits.
Judge = Callable[[Sequence[Claim]], str | None]


class Notices(Protocol):
    """What a process that waits says of it, and when: as soon as no seconds are left."""

    def left_seconds(self) -> float: ...

    def tell(self, ahead: int, lacking: str | None) -> None:
        """Say that so many are ahead in line or, at its head, what is lacking."""
        ...


def own_pid_namespace() -> str:
    """Return what names the PID namespace of this process."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


class Ledger:
    """The line and the leases of one scope. All processes that share `folder` share them; it must be private."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextlib.contextmanager
    def lease(self, claim: Claim, judge: Judge, notices: Notices) -> Iterator[None]:
        """Wait in line until `judge` finds that `claim` fits, and hold it as long as the block lasts.

        Raises FileNotFoundError if the folder is removed by others before that, or what it is in is not there.
        """
        place = _Position()
        try:
            self._join(place, claim)
            self._advance(place, notices)
            self._be_admitted(place, judge, notices)
            yield
        finally:
            self._leave(place)

    def occupants(self) -> list[Occupant]:
        """Return who holds leases, and then who waits, in the order of the line. Nothing is changed."""
        if not (self._folder / _LOCK).exists():
            return []
        # In the order in which files are renamed: nobody is missed who is admitted meanwhile.
        numbers = sorted({number for kind in (_WAITING, _LEASE) for number in self._numbers(kind)})
        found = [self._occupant(number, _WAITING) or self._occupant(number, _LEASE) for number in numbers]
        return sorted(filter(None, found), key=lambda occupant: not occupant.holds)

    def _join(self, place: _Position, claim: Claim) -> None:
        with self._locked():
            # A clock, so that no number is used again even where the folder has been removed and made anew.
            place.number = max([time.monotonic_ns(), *(number + 1 for number in self._numbers(_WAITING))])
            line = self._path(place.number, _LINE)
            os.mkfifo(line, _PRIVATE)
            place.line = os.open(line, os.O_RDWR | os.O_NONBLOCK)
            place.descriptor = os.open(self._path(place.number, _WAITING), os.O_RDWR | os.O_CREAT | os.O_EXCL, _PRIVATE)
            fcntl.flock(place.descriptor, fcntl.LOCK_EX)
            os.write(place.descriptor, json.dumps(claim._asdict()).encode())

    def _advance(self, place: _Position, notices: Notices) -> None:
        """Wait until nobody is ahead in line."""
        while True:
            with self._locked():
                line = self._numbers(_WAITING)
            if place.number not in line:
                raise FileNotFoundError(f"{self._folder} has been removed by others")
            ahead = line[: line.index(place.number)]
            if not ahead:
                return
            if notices.left_seconds() <= 0:
                notices.tell(len(ahead), None)
            if not self._sleep_until_gone(ahead[-1], notices.left_seconds()):
                self._bury(ahead[-1], _WAITING)

    def _sleep_until_gone(self, number: int, seconds: float) -> bool:
        """Sleep until the process `number` in line has left it, at most so long. Tells whether it was there at all."""
        try:
            line = os.open(self._path(number, _LINE), os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        try:
            os.read(line, 1)
        except BlockingIOError:  # open at its other end, so its closing will be noticed
            poll = select.poll()
            poll.register(line, select.POLLIN)
            poll.poll(max(0.0, seconds) * 1000)
            return True
        finally:
            os.close(line)
        return False

    def _be_admitted(self, place: _Position, judge: Judge, notices: Notices) -> None:
        """Look until the claim fits. Only one process at a time is here, so what others hold can only become less."""
        with self._bell() as bell:
            while True:
                begin = time.monotonic()
                lacking = judge(self._held())
                if lacking is None:
                    break
                if notices.left_seconds() <= 0:
                    notices.tell(0, lacking)
                looked_seconds = time.monotonic() - begin
                _sleep_until_rung(bell, min(max(_LOOK_SECONDS, looked_seconds * _LOOK_SHARE), _LONGEST_LOOK_SECONDS))
        with self._locked():
            self._path(place.number, _WAITING).rename(self._path(place.number, _LEASE))
        self._path(place.number, _LINE).unlink(missing_ok=True)
        place.leave_line()

    def _held(self) -> list[Claim]:
        with self._locked():
            numbers = self._numbers(_LEASE)
        occupants = [(number, self._occupant(number, _LEASE)) for number in numbers]
        for number, occupant in occupants:
            if occupant is None:
                self._bury(number, _LEASE)
        return [occupant.claim for _, occupant in occupants if occupant is not None]

    def _occupant(self, number: int, kind: str) -> Occupant | None:
        """Return who has the place `number`; None if it has left, or has died."""
        try:
            descriptor = os.open(self._path(number, kind), os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            if _is_free(descriptor):
                return None
            status = os.fstat(descriptor)
            claim = Claim(**json.loads(os.pread(descriptor, status.st_size, 0)))
            # The kernel notes when the name was changed, which is when the lease was granted.
            return Occupant(number, claim, kind == _LEASE, status.st_ctime if kind == _LEASE else claim.since)
        except (ValueError, TypeError):  # of another version of this program
            return None
        finally:
            os.close(descriptor)

    def _bury(self, number: int, kind: str) -> None:
        """Remove what somebody who died has left. Numbers are not used again, so it is nobody else's."""
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(self._path(number, kind), os.O_RDONLY)
            try:
                if _is_free(descriptor):
                    self._path(number, kind).unlink()
                    self._path(number, _LINE).unlink()
            finally:
                os.close(descriptor)

    def _leave(self, place: _Position) -> None:
        try:
            # There is nothing to leave where the folder has been removed.
            with contextlib.suppress(FileNotFoundError), self._locked():
                for kind in (_WAITING, _LEASE, _LINE):
                    self._path(place.number, kind).unlink(missing_ok=True)
                if not any(self._numbers(kind) for kind in (_WAITING, _LEASE)):
                    self._remove_folder()
            self._ring()
        finally:
            place.close()

    def _remove_folder(self) -> None:
        """Remove what nobody is in: scopes come and go with jobs. Who waits for its lock begins again."""
        for left in self._folder.iterdir():
            if left.name != _LOCK:
                left.unlink()
        (self._folder / _LOCK).unlink()  # last: from now on somebody else may come
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        while True:
            with contextlib.suppress(FileExistsError):
                self._folder.mkdir(mode=0o700)
            try:
                lock = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT, _PRIVATE)
            except FileNotFoundError:
                continue  # the last one has just left and removed the folder
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if os.fstat(lock).st_nlink:
                    yield
                    return
            finally:
                _unlock(lock)

    @contextlib.contextmanager
    def _bell(self) -> Iterator[int]:
        path = self._folder / _BELL
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, _PRIVATE)
        bell = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        try:
            yield bell
        finally:
            os.close(bell)

    def _ring(self) -> None:
        try:
            bell = os.open(self._folder / _BELL, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno not in (errno.ENXIO, errno.ENOENT):  # nobody listens
                raise
            return
        try:
            os.write(bell, b".")
        except OSError:
            pass  # rung more often than anybody has listened
        finally:
            os.close(bell)

    def _numbers(self, kind: str) -> list[int]:
        try:
            names = [path.name for path in self._folder.iterdir()]
        except FileNotFoundError:
            return []
        return sorted(int(name.removesuffix(kind)) for name in names if name.endswith(kind))

    def _path(self, number: int, kind: str) -> Path:
        return self._folder / f"{number}{kind}"


class _Position:
    """A process's own place in a ledger: `line` and `descriptor` are its open pipe and its locked file."""

    def __init__(self) -> None:
        self.number = 0
        self.line: int | None = None
        self.descriptor: int | None = None

    def leave_line(self) -> None:
        """Wake the next in line, also where a fork of this process has the pipe open."""
        if self.line is not None:
            with contextlib.suppress(OSError):
                os.write(self.line, b".")
            os.close(self.line)
            self.line = None

    def close(self) -> None:
        self.leave_line()
        if self.descriptor is not None:
            _unlock(self.descriptor)
            self.descriptor = None


def _unlock(descriptor: int) -> None:
    """Close a locked file, and drop the lock also where a fork of this process has it open."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _is_free(descriptor: int) -> bool:
    """Tell whether nobody holds the lock of the open file; what asks this must close it soon."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sleep_until_rung(bell: int, seconds: float) -> None:
    poll = select.poll()
    poll.register(bell, select.POLLIN)
    if poll.poll(seconds * 1000):
        with contextlib.suppress(BlockingIOError):
            os.read(bell, 1 << 16)
