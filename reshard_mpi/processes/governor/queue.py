"""Line up processes for leases, first come first served (`Ledger`).

A process in line has a file (`ledger_files`) and a pipe on which the next one sleeps, so only the head of the line
looks again and again whether its claim fits. The file `lock` is locked while the line changes.

A process in line that is stopped is passed by those behind it; when it goes on it has its place again. So two may take
themselves for the head for a moment, and whoever is admitted makes sure, with the lock held, that it is the first and
that no lease has come since it looked. A lease grows in its place, or not at all: its holder does not wait.

The folder comes with the first process and goes with the last. It may also be removed from outside at any time, as when
the end of a login session clears what its user has in shared memory.

A process in line keeps a pipe of its own open for writing; the next one in line sleeps until that is closed, for
whatever reason. The bell is a pipe that is written to when a lease is given back; the head of the line sleeps on it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from reshard_mpi.processes.governor import ledger_files
from reshard_mpi.processes.governor.ledger_files import (
    LEASE,
    LINE,
    WAITING,
    Claim,
    Judge,
    LedgerFiles,
    Occupant,
    WaitReporter,
)

_PRIVATE = 0o600
_MAX_RINGS = 1 << 16


def make_line(path: Path) -> int:
    """Make the pipe of a process in line and return its descriptor, open until the process leaves the line."""
    os.mkfifo(path, _PRIVATE)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


def close_line(fd: int) -> None:
    """Wake the next in line, even where a fork of this process has the pipe open as well."""
    with contextlib.suppress(OSError):
        os.write(fd, b".")
    os.close(fd)


def wait_for_line(path: Path, seconds: float) -> bool:
    """Sleep until the pipe of another process is closed, at most so long; tell whether it could be opened."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.read(fd, 1)
    except BlockingIOError:  # open at its other end, so its closing will be noticed
        _wait_to_read(fd, max(0.0, seconds))
    finally:
        os.close(fd)
    return True


@contextlib.contextmanager
def opened_bell(path: Path) -> Iterator[int | None]:
    """Open the bell, made if it is not there; None if something else is in its place."""
    with contextlib.suppress(FileExistsError):
        os.mkfifo(path, _PRIVATE)
    bell = _open_pipe(path, os.O_RDWR)
    try:
        yield bell
    finally:
        if bell is not None:
            os.close(bell)


def wait_for_bell(bell: int | None, seconds: float) -> None:
    """Sleep until the bell is rung, at most so long."""
    if bell is None:
        time.sleep(seconds)
    elif _wait_to_read(bell, seconds):
        with contextlib.suppress(BlockingIOError):
            os.read(bell, _MAX_RINGS)


def ring(path: Path) -> None:
    """Wake whoever sleeps on the bell."""
    bell = _open_pipe(path, os.O_WRONLY)
    if bell is None:
        return  # nobody listens
    try:
        with contextlib.suppress(OSError):  # rung more often than anybody has listened
            os.write(bell, b".")
    finally:
        os.close(bell)


def _wait_to_read(fd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _open_pipe(path: Path, mode: int) -> int | None:
    """Open a pipe; None if there is none, something else is there, or nobody is at its other end."""
    try:
        if not stat.S_ISFIFO(path.lstat().st_mode):
            return None
        return os.open(path, mode | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return None


_BELL = "bell"
# How often the head of the line looks whether memory has become free otherwise than by a lease that was given back:
# often enough for a lease whose holder died to be noticed at once, seldom enough for looking to cost nothing.
_LOOK_SECONDS = 0.05
_LOOK_SHARE = 10
_LONGEST_LOOK_SECONDS = 0.5
# How often a process behind in line looks whether the one before it has been stopped.
WATCH_SECONDS = 10.0
# A lease that comes or grows between looking and being admitted is rare; so often in a row it does not happen.
_MAX_TRIES = 8


class Ticket:
    """A process's place in a ledger. line: the descriptor of its pipe. fd: of its locked file."""

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.number = 0
        self.line: int | None = None
        self.fd: int | None = None

    def leave_line(self) -> None:
        """Wake the next in line."""
        if self.line is not None:
            line, self.line = self.line, None
            close_line(line)

    def exchange(self, fd: int, claim: Claim) -> None:
        """Have another file and claim from now on."""
        # Before the old file is closed: a signal may end this anywhere.
        old_fd, self.fd, self.claim = self.fd, fd, claim
        if old_fd is not None:
            ledger_files.unlock(old_fd)

    def close(self) -> None:
        self.leave_line()
        if self.fd is not None:
            fd, self.fd = self.fd, None
            ledger_files.unlock(fd)


class Ledger:
    """The line and the leases of one scope. All processes that share `folder` share them; it must be private."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = LedgerFiles(folder)

    def enter(self, claim: Claim, judge: Judge, notices: WaitReporter, number: int = 0) -> Ticket:
        """Wait in line until `judge` finds that `claim` fits, and return the lease.

        Args:
            number: that of the place that the process had in line before, if it had one.

        Raises FileNotFoundError if the folder is removed by others meanwhile, or the folder that it lies in is not
        there.
        """
        position = Ticket(claim)
        try:
            self._join(position, number, notices)
            self._wait(position, judge, notices)
        except BaseException:
            self.leave(position)
            raise
        return position

    def register(self, claim: Claim, notices: WaitReporter | None = None) -> Ticket:
        """Return a lease for memory in use in any case: it is granted even if it does not fit."""
        position = Ticket(claim)
        try:
            with self._locked(notices):
                position.number = self._new_number()
                position.fd = self._files.write(position.number, LEASE, claim)
        except BaseException:
            self.leave(position)
            raise
        return position

    def resize(self, position: Ticket, size_bytes: int, judge: Judge | None, *, is_floor: bool | None = None) -> bool:
        """Have a lease hold `size_bytes` from now on if `judge` finds that they fit now; tell whether it does.

        Args:
            judge: None if nobody is to be asked.
            is_floor: whether the lease stands from now on for what is in use in any case; None leaves that as it is.
                Nothing is waited for.
        """
        floor = position.claim.is_floor if is_floor is None else is_floor
        claim = position.claim._replace(size_bytes=size_bytes, is_floor=floor)
        try:
            for _ in range(_MAX_TRIES):
                others = [occupant for occupant in self._leases(None) if occupant.number != position.number]
                if judge is not None and judge([occupant.claim for occupant in others]) is not None:
                    return False
                with self._locked(None):
                    if not self._files.path(position.number, LEASE).exists():
                        return False  # removed by others
                    if judge is not None and not self._are_all(others, position):
                        continue
                    position.exchange(self._files.replace_lease(position.number, claim), claim)
                    break
            else:
                return False
        except (ledger_files.BusyError, OSError):  # as where the folder is full, or has been removed
            return False
        self._ring()
        return True

    def leave(self, position: Ticket) -> None:
        """Give back a lease or a place in line, without waiting for a process that was stopped with the lock held."""
        try:
            if position.number:
                # There is nothing to leave where the folder has been removed. What cannot be removed counts no more,
                # as it is not locked any longer, and others remove it.
                with contextlib.suppress(FileNotFoundError, ledger_files.BusyError), self._locked(None):
                    self._files.remove(position.number)
                self._ring()
        finally:
            position.close()

    def occupants(self) -> list[Occupant]:
        """Return who holds leases, and then who waits, in the order of the line. Nothing is changed."""
        return self._files.occupants() if (self._folder / ledger_files.LOCK).is_file() else []

    def lock_holders(self) -> tuple[int, ...]:
        """Return the processes that are changing the line now, or have been stopped while they did."""
        return tuple(ledger_files.holders_of(self._folder))

    def is_waited_for(self) -> bool:
        """Tell whether anybody is in line who could be admitted."""
        occupants = (self._files.occupant(number, WAITING) for number in self._files.numbers(WAITING))
        return any(occupant is not None and not occupant.claim.is_stopped for occupant in occupants)

    def _join(self, position: Ticket, number: int, notices: WaitReporter) -> None:
        with self._locked(notices):
            taken = any(self._files.path(number, kind).exists() for kind in (WAITING, LEASE, LINE))
            position.number = number if number and not taken else self._new_number()
            position.line = make_line(self._files.path(position.number, LINE))
            position.fd = self._files.write(position.number, WAITING, position.claim)

    def _new_number(self) -> int:
        """Return a number for the end of the line.

        A clock, so that no number is used again even where the folder has been removed and made anew.
        """
        now = time.monotonic_ns()
        numbers = self._files.numbers(WAITING)
        later = (number for number in numbers if number >= now and self._files.is_held(number, WAITING))
        return max([now, *(number + 1 for number in later)])

    def _wait(self, position: Ticket, judge: Judge, notices: WaitReporter) -> None:
        """Wait until nobody is ahead in line who could be admitted, and then until the claim fits."""
        with opened_bell(self._folder / _BELL) as bell:
            while True:
                ahead = self._ahead_of(position, notices)
                awake = self._nearest_awake(ahead)
                if awake is not None:
                    if notices.left_seconds() <= 0:
                        first = self._files.occupant(ahead[0], WAITING)
                        stopped = [occupant for occupant in self._leases(notices) if occupant.claim.is_stopped]
                        notices.tell(len(ahead), None, [*stopped, *([first] if first else [])])
                    self._sleep_until_gone(awake, min(WATCH_SECONDS, notices.left_seconds()))
                    continue
                begin = time.monotonic()
                leases = self._leases(notices)
                lacking = judge([occupant.claim for occupant in leases])
                if lacking is None:
                    if self._admit(position, leases, notices):
                        return
                    continue
                if notices.left_seconds() <= 0:
                    notices.tell(0, lacking, leases)
                seconds = max(_LOOK_SECONDS, (time.monotonic() - begin) * _LOOK_SHARE)
                wait_for_bell(bell, min(seconds, _LONGEST_LOOK_SECONDS))

    def _ahead_of(self, position: Ticket, notices: WaitReporter) -> list[int]:
        """Return the numbers of all ahead in line. Raises FileNotFoundError if the place is gone."""
        with self._locked(notices):
            line = self._files.numbers(WAITING)
        if position.number not in line:
            raise FileNotFoundError(f"{self._folder} has been removed by others")
        return line[: line.index(position.number)]

    def _nearest_awake(self, line: Sequence[int]) -> int | None:
        """Return the last number in `line` whose process lives and is not stopped; None if there is none.

        The files of the dead that it meets are removed.
        """
        for number in reversed(line):
            if not self._files.is_held(number, WAITING):
                self._files.bury(number, WAITING)
                continue
            occupant = self._files.occupant(number, WAITING)
            if occupant is None or not occupant.claim.is_stopped:
                return number
        return None

    def _sleep_until_gone(self, number: int, seconds: float) -> None:
        """Sleep until the process `number` has left the line, at most so long."""
        if not wait_for_line(self._files.path(number, LINE), seconds):
            time.sleep(_LOOK_SECONDS if self._files.is_held(number, WAITING) else 0.0)

    def _admit(self, position: Ticket, leases: Sequence[Occupant], notices: WaitReporter) -> bool:
        """Admit a process if it is the head of the line, and all leases are those it has looked at; tell whether."""
        with self._locked(notices):
            waiting = self._files.path(position.number, WAITING)
            if not waiting.exists():
                raise FileNotFoundError(f"{self._folder} has been removed by others")
            ahead = [number for number in self._files.numbers(WAITING) if number < position.number]
            if self._nearest_awake(ahead) is not None or not self._are_all(leases, position):
                return False
            waiting.rename(self._files.path(position.number, LEASE))
        self._files.path(position.number, LINE).unlink(missing_ok=True)
        position.leave_line()
        return True

    def _are_all(self, occupants: Sequence[Occupant], besides: Ticket) -> bool:
        """Tell whether no lease but `besides` was added or resized since `occupants` was listed; some may be gone."""
        inodes = {occupant.number: occupant.inode for occupant in occupants}
        for number in self._files.numbers(LEASE):
            if number == besides.number:
                continue
            with contextlib.suppress(FileNotFoundError):
                inode = self._files.path(number, LEASE).lstat().st_ino
                if inode != inodes.get(number) and self._files.occupant(number, LEASE):
                    return False
        return True

    def _leases(self, notices: WaitReporter | None) -> list[Occupant]:
        """Return who holds leases; the files of the dead are removed."""
        with self._locked(notices):
            numbers = self._files.numbers(LEASE)
        occupants = []
        for number in numbers:
            occupant = self._files.occupant(number, LEASE)
            if occupant is None:
                self._files.bury(number, LEASE)
            else:
                occupants.append(occupant)
        return occupants

    def _locked(self, notices: WaitReporter | None = None) -> contextlib.AbstractContextManager[None]:
        """Hold the lock of the line. With `notices` it is said who is waited for; without, BusyError is raised."""
        return ledger_files.locked(self._folder, None if notices is None else notices.tell_locked)

    def _ring(self) -> None:
        ring(self._folder / _BELL)
