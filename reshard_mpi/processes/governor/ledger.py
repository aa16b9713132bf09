"""A line of processes and the leases they hold, kept as files in one folder, first come first served.

`<n>.waiting` is the n-th process in line, `<n>.lease` the same once it has been admitted; either is locked by its owner
as long as that lives, and says in JSON what it is for. `<n>.line` is a pipe that a waiting process keeps open: the next
one in line sleeps on it, and is woken when it closes, for whatever reason. So only the head of the line has to look
again and again. `bell` is a pipe by which a lease that is given back wakes the head at once. `lock` is locked while the
line changes.

A process in line that is stopped is passed by those behind it; when it goes on it has its place again. So there may be
two for a moment that take themselves for the head, and who is admitted makes sure, with the lock held, that it is the
first and that no lease has come since it looked. A lease grows in its place, or not at all: who holds it does not wait.

The folder comes with the first process and goes with the last. It may also be removed from outside at any time, as
where the end of a login session clears what its user has in shared memory. What else lies in it is left alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import select
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from reshard_mpi.processes.governor import ledger_lock
from reshard_mpi.processes.governor.claims import Claim, Judge, Notices, Occupant, own_pid_namespace

__all__ = ["Claim", "Judge", "Ledger", "Notices", "Occupant", "Position", "own_pid_namespace"]

_WAITING, _LEASE, _LINE, _NEW = ".waiting", ".lease", ".line", ".new"
_BELL = "bell"
_PRIVATE = 0o600
_NUMBER = re.compile(r"[0-9]{1,19}", re.ASCII)
# How often the head of the line looks whether memory has become free otherwise than by a lease that was given back:
# often enough for a lease whose holder died to be noticed at once, seldom enough for looking to cost nothing.
_LOOK_SECONDS = 0.05
_LOOK_SHARE = 10
_LONGEST_LOOK_SECONDS = 0.5
# How often who is behind in line looks whether the one before it has been stopped.
WATCH_SECONDS = 10.0
_MAX_CLAIM_BYTES = 1 << 16
# A lease that comes or grows between looking and being admitted is rare; so often in a row it does not happen.
_MAX_TRIES = 8


class Position:
    """A process's own place in a ledger: `line` and `descriptor` are its open pipe and its locked file."""

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.number = 0
        self.line: int | None = None
        self.descriptor: int | None = None

    def leave_line(self) -> None:
        """Wake the next in line, also where a fork of this process has the pipe open."""
        if self.line is not None:
            line, self.line = self.line, None
            with contextlib.suppress(OSError):
                os.write(line, b".")
            os.close(line)

    def close(self) -> None:
        self.leave_line()
        if self.descriptor is not None:
            descriptor, self.descriptor = self.descriptor, None
            ledger_lock.unlock(descriptor)


class Ledger:
    """The line and the leases of one scope. All processes that share `folder` share them; it must be private."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextlib.contextmanager
    def lease(self, claim: Claim, judge: Judge, notices: Notices) -> Iterator[None]:
        """Wait in line until `judge` finds that `claim` fits, and hold it as long as the block lasts.

        Raises FileNotFoundError if the folder is removed by others before that, or what it is in is not there.
        """
        position = self.enter(claim, judge, notices)
        try:
            yield
        finally:
            self.leave(position)

    def enter(self, claim: Claim, judge: Judge, notices: Notices, number: int = 0) -> Position:
        """Wait in line until `judge` finds that `claim` fits; return the lease. Raises what `lease` does.

        number: that of the place that the process had in line before, if it had one.
        """
        position = Position(claim)
        try:
            self._join(position, number, notices)
            self._wait(position, judge, notices)
        except BaseException:
            self.leave(position)
            raise
        return position

    def register(self, claim: Claim, notices: Notices | None = None) -> Position:
        """Return a lease for what is in use already, or will be whatever anybody says: nobody is asked."""
        position = Position(claim)
        try:
            with self._locked(notices):
                position.number = self._new_number()
                position.descriptor = self._write(self._path(position.number, _LEASE), claim)
        except BaseException:
            self.leave(position)
            raise
        return position

    def resize(self, position: Position, size_bytes: int, judge: Judge | None, *, is_floor: bool | None = None) -> bool:
        """Have a lease hold `size_bytes` from now on, if that fits now by `judge` (None: nobody is asked).

        is_floor: whether it stands from now on for what is in use anyway; None leaves that as it is. Tells whether it
        does; nothing is waited for.
        """
        floor = position.claim.is_floor if is_floor is None else is_floor
        claim = position.claim._replace(size_bytes=size_bytes, is_floor=floor)
        try:
            for _ in range(_MAX_TRIES):
                others = [one for one in self._held(None) if one.number != position.number]
                if judge is not None and judge([one.claim for one in others]) is not None:
                    return False
                with self._locked(None):
                    if not self._path(position.number, _LEASE).exists():
                        return False  # removed by others
                    if judge is not None and not self._are_all(others, position):
                        continue
                    self._replace(position, claim)
                    break
            else:
                return False
        except (ledger_lock.BusyError, OSError):  # as where the folder is full, or has been removed
            return False
        self._ring()
        return True

    def leave(self, position: Position) -> None:
        """Give a lease, or a place in line, back. Whoever is stopped with the lock in its hands does not keep us."""
        try:
            if position.number:
                # There is nothing to leave where the folder has been removed. What cannot be removed counts no more,
                # as it is not locked any longer, and others remove it.
                with contextlib.suppress(FileNotFoundError, ledger_lock.BusyError), self._locked(None):
                    for kind in (_WAITING, _LEASE, _LINE):
                        self._path(position.number, kind).unlink(missing_ok=True)
                    if not any(self._numbers(kind) for kind in (_WAITING, _LEASE)):
                        self._remove_folder()
                self._ring()
        finally:
            position.close()

    def occupants(self) -> list[Occupant]:
        """Return who holds leases, and then who waits, in the order of the line. Nothing is changed."""
        if not (self._folder / ledger_lock.LOCK).is_file():
            return []
        # In the order in which files are renamed: nobody is missed who is admitted meanwhile.
        numbers = sorted({number for kind in (_WAITING, _LEASE) for number in self._numbers(kind)})
        found = [self._occupant(number, _WAITING) or self._occupant(number, _LEASE) for number in numbers]
        return sorted(filter(None, found), key=lambda occupant: not occupant.holds)

    def lock_holders(self) -> tuple[int, ...]:
        """Return who is changing the line just now, or has been stopped while doing it."""
        return tuple(ledger_lock.holders_of(self._folder))

    def is_waited_for(self) -> bool:
        """Tell whether anybody is in line who could be admitted."""
        found = (self._occupant(number, _WAITING) for number in self._numbers(_WAITING))
        return any(occupant is not None and not occupant.claim.is_stopped for occupant in found)

    def _join(self, position: Position, number: int, notices: Notices) -> None:
        with self._locked(notices):
            taken = any(self._path(number, kind).exists() for kind in (_WAITING, _LEASE, _LINE))
            position.number = number if number and not taken else self._new_number()
            line = self._path(position.number, _LINE)
            os.mkfifo(line, _PRIVATE)
            position.line = os.open(line, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            position.descriptor = self._write(self._path(position.number, _WAITING), position.claim)

    def _new_number(self) -> int:
        """Return a number for the end of the line.

        A clock, so that no number is used again even where the folder has been removed and made anew.
        """
        now = time.monotonic_ns()
        later = (n for n in self._numbers(_WAITING) if n >= now and self._is_held(n, _WAITING))
        return max([now, *(number + 1 for number in later)])

    def _wait(self, position: Position, judge: Judge, notices: Notices) -> None:
        """Wait until nobody is ahead in line who could be admitted, and then until the claim fits."""
        with self._bell() as bell:
            while True:
                line = self._line(position, notices)
                ahead = self._nearest_awake(line)
                if ahead is not None:
                    if notices.left_seconds() <= 0:
                        first = self._occupant(line[0], _WAITING)
                        notices.tell(len(line), None, [first] if first else [])
                    self._sleep_until_gone(ahead, min(WATCH_SECONDS, notices.left_seconds()))
                    continue
                begin = time.monotonic()
                held = self._held(notices)
                lacking = judge([occupant.claim for occupant in held])
                if lacking is None:
                    if self._admit(position, held, notices):
                        return
                    continue
                if notices.left_seconds() <= 0:
                    notices.tell(0, lacking, held)
                looked_seconds = time.monotonic() - begin
                _sleep_until_rung(bell, min(max(_LOOK_SECONDS, looked_seconds * _LOOK_SHARE), _LONGEST_LOOK_SECONDS))

    def _line(self, position: Position, notices: Notices) -> list[int]:
        """Return who is ahead. Raises FileNotFoundError if the line is no more."""
        with self._locked(notices):
            line = self._numbers(_WAITING)
        if position.number not in line:
            raise FileNotFoundError(f"{self._folder} has been removed by others")
        return line[: line.index(position.number)]

    def _nearest_awake(self, line: Sequence[int]) -> int | None:
        """Return the last one in `line` that is there and not stopped; bury the dead."""
        for number in reversed(line):
            if not self._is_held(number, _WAITING):
                self._bury(number, _WAITING)
                continue
            occupant = self._occupant(number, _WAITING)
            if occupant is None or not occupant.claim.is_stopped:
                return number
        return None

    def _sleep_until_gone(self, number: int, seconds: float) -> None:
        """Sleep until the process `number` in line has left it, at most so long."""
        try:
            line = os.open(self._path(number, _LINE), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            time.sleep(_LOOK_SECONDS if self._is_held(number, _WAITING) else 0.0)
            return
        try:
            os.read(line, 1)
        except BlockingIOError:  # open at its other end, so its closing will be noticed
            poll = select.poll()
            poll.register(line, select.POLLIN)
            poll.poll(max(0.0, seconds) * 1000)
        finally:
            os.close(line)

    def _admit(self, position: Position, held: Sequence[Occupant], notices: Notices) -> bool:
        """Admit the head of the line, if that is what it still is, and no lease has come or grown since it looked."""
        with self._locked(notices):
            waiting = self._path(position.number, _WAITING)
            if not waiting.exists():
                raise FileNotFoundError(f"{self._folder} has been removed by others")
            ahead = [number for number in self._numbers(_WAITING) if number < position.number]
            if self._nearest_awake(ahead) is not None or not self._are_all(held, position):
                return False
            waiting.rename(self._path(position.number, _LEASE))
        self._path(position.number, _LINE).unlink(missing_ok=True)
        position.leave_line()
        return True

    def _are_all(self, known: Sequence[Occupant], but: Position) -> bool:
        """Tell whether all leases besides that of `but` are `known`, as they were; some of those may have gone."""
        inodes = {occupant.number: occupant.inode for occupant in known}
        for number in self._numbers(_LEASE):
            if number == but.number:
                continue
            with contextlib.suppress(FileNotFoundError):
                if self._path(number, _LEASE).lstat().st_ino != inodes.get(number) and self._occupant(number, _LEASE):
                    return False
        return True

    def _held(self, notices: Notices | None) -> list[Occupant]:
        with self._locked(notices):
            numbers = self._numbers(_LEASE)
        occupants = [(number, self._occupant(number, _LEASE)) for number in numbers]
        for number, occupant in occupants:
            if occupant is None:
                self._bury(number, _LEASE)
        return [occupant for _, occupant in occupants if occupant is not None]

    def _occupant(self, number: int, kind: str) -> Occupant | None:
        """Return who has the place `number`; None if it has left, or has died, or nobody knows what this is."""
        with self._opened(number, kind) as descriptor:
            if descriptor is None or ledger_lock.is_free(descriptor):
                return None
            status = os.fstat(descriptor)
            claim = Claim.loads(os.pread(descriptor, min(status.st_size, _MAX_CLAIM_BYTES), 0))
            if claim is None:
                return None
            # The kernel notes when the name was changed, which is when the lease was granted.
            since = status.st_ctime if kind == _LEASE else claim.since
            return Occupant(number, claim, kind == _LEASE, since, status.st_ino)

    @contextlib.contextmanager
    def _opened(self, number: int, kind: str) -> Iterator[int | None]:
        """Open the file of a place; None if there is none, or what is there is no file of this user's."""
        try:
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(self._path(number, kind), flags)
        except OSError:
            yield None
            return
        try:
            status = os.fstat(descriptor)
            yield descriptor if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() else None
        finally:
            os.close(descriptor)

    def _is_held(self, number: int, kind: str) -> bool:
        """Tell whether somebody alive has the place `number`."""
        with self._opened(number, kind) as descriptor:
            return descriptor is not None and not ledger_lock.is_free(descriptor)

    def _bury(self, number: int, kind: str) -> None:
        """Remove what somebody who died has left. Numbers are not used again, so it is nobody else's."""
        with self._opened(number, kind) as descriptor:
            if descriptor is not None and ledger_lock.is_free(descriptor):
                self._path(number, kind).unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    self._path(number, _LINE).unlink()

    def _write(self, path: Path, claim: Claim) -> int:
        """Write a new file that this process locks; return its descriptor."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, _PRIVATE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.write(descriptor, claim.dumps())
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _replace(self, position: Position, claim: Claim) -> None:
        """Put another claim in the place of one that is held, so that everybody sees either the one or the other."""
        new = self._path(position.number, _NEW)
        new.unlink(missing_ok=True)
        descriptor = self._write(new, claim)
        new.rename(self._path(position.number, _LEASE))
        # Before the old one is closed: a signal may end this anywhere.
        old, position.descriptor, position.claim = position.descriptor, descriptor, claim
        if old is not None:
            ledger_lock.unlock(old)

    def _remove_folder(self) -> None:
        """Remove what nobody is in: scopes come and go with jobs. Who waits for its lock begins again."""
        for left in self._folder.iterdir():
            if left.name != ledger_lock.LOCK:
                with contextlib.suppress(OSError):  # what others have put there
                    left.unlink()
        (self._folder / ledger_lock.LOCK).unlink()  # last: from now on somebody else may come
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    def _locked(self, notices: Notices | None = None) -> contextlib.AbstractContextManager[None]:
        """Hold the lock of the line. Who has `notices` says whom it waits for; who has none gives up (BusyError)."""
        return ledger_lock.locked(self._folder, None if notices is None else notices.tell_locked)

    @contextlib.contextmanager
    def _bell(self) -> Iterator[int | None]:
        """Open the pipe that is written to when a lease is given back; None if something else is in its place."""
        path = self._folder / _BELL
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, _PRIVATE)
        bell = _open_pipe(path, os.O_RDWR)
        try:
            yield bell
        finally:
            if bell is not None:
                os.close(bell)

    def _ring(self) -> None:
        bell = _open_pipe(self._folder / _BELL, os.O_WRONLY)
        if bell is None:
            return  # nobody listens
        try:
            os.write(bell, b".")
        except OSError:
            pass  # rung more often than anybody has listened
        finally:
            os.close(bell)

    def _numbers(self, kind: str) -> list[int]:
        """Return the numbers of all entries of a kind. What has no number is none of them."""
        try:
            names = [path.name for path in self._folder.iterdir()]
        except OSError:
            return []
        stems = (name.removesuffix(kind) for name in names if name.endswith(kind))
        return sorted(int(stem) for stem in stems if _NUMBER.fullmatch(stem))

    def _path(self, number: int, kind: str) -> Path:
        return self._folder / f"{number}{kind}"


def _open_pipe(path: Path, how: int) -> int | None:
    """Open a pipe; None if there is none, something else is there, or nobody is at its other end."""
    try:
        if not stat.S_ISFIFO(path.lstat().st_mode):
            return None
        return os.open(path, how | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return None


def _sleep_until_rung(bell: int | None, seconds: float) -> None:
    if bell is None:
        time.sleep(seconds)
        return
    poll = select.poll()
    poll.register(bell, select.POLLIN)
    if poll.poll(seconds * 1000):
        with contextlib.suppress(BlockingIOError):
            os.read(bell, 1 << 16)
