"""Line up processes for leases on the memory of a scope, first come first served (`Ledger`).

A ledger is one file. Each process has a record in it, and keeps that record locked from the moment it joins the line
until it gives its lease back. The kernel removes the lock when the process ends, whatever its PID namespace: a record
that is not locked is free, whatever it says. The head of the file is locked while a record is taken, or a lease is
granted or grows. All are open file description locks: unlike those of a process, they hold between threads, and they do
not go when another descriptor of the file is closed. A fork shares them with its parent, and would hold them after the
parent has ended; so a fork closes its copies of these files as it begins, and the parent keeps the locks.

Processes in line look again and again, and the more seldom the further behind they are. Only the first asks whether its
claim fits, and it does so without the lock of the head. One that is stopped is passed by those behind it; when it goes
on it has its place again. So two may take themselves for the first for a moment, and whoever is admitted makes sure,
with the head locked, that nobody is ahead of it and that no lease has come or grown since it asked. A lease grows in
its place, or not at all: its holder does not wait.

The file comes with the first process and goes with the last. It may also be removed from outside at any time, as when
the end of a login session clears what its user has in shared memory.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol, Self

from reshard_mpi.errors import ReshardError
from reshard_mpi.processes import host
from reshard_mpi.processes.ledger_folder import open_ledger_file

# Between two looks of the first in line and of the one behind it; of others as many times that as processes are ahead,
# since a line does not move faster, and so that a long one takes no more of the processors than a short one.
_LOOK_SECONDS = 0.02
_LONGEST_LOOK_SECONDS = 2.0
# If no lease has changed, the first in line waits this many times as long as asking takes before it asks again.
_ASK_SHARE = 10
_LONGEST_ASK_SECONDS = 0.5
# A lease that comes or grows between asking and being admitted is rare, and does not happen eight times in a row.
_MAX_TRIES = 8
_SHORTEST_NAP_SECONDS = 0.0001
_LONGEST_NAP_SECONDS = 0.02
# The head is locked for milliseconds, so a process that has it locked for so long has been stopped in the middle.
PATIENCE_SECONDS = 1.0
_REPEAT_SECONDS = 30.0

# struct flock: type, whence, start, length (0: to the end of the file), pid
_FLOCK = struct.Struct("hhqqi4x")
# The process that has locked the head last, and the PID namespace in which that is its number.
_HEAD = struct.Struct("<QQ")
# Kind, number, size, ceiling, used before, pid, its namespace, since; scope and purpose in UTF-8, cut if need be.
_RECORD = struct.Struct("<8sQQQQQQd128s320s")
_NUMBER = struct.Struct("<8xQ")
_MAX_SIZE = (1 << 64) - 1
# How the record of a process begins: in line, with a lease, or with a lease for what it uses in any case.
_WAITING, _LEASE, _FLOOR = b"waiting1", b"lease..1", b"floor..1"
# More than anybody has processes on a host; a file that is larger has been made by somebody else.
_MAX_FILE_BYTES = 8192 * _RECORD.size


class LedgerEntry(NamedTuple):
    """A process in a ledger: it waits for `size_bytes` of the scope, or holds them."""

    size_bytes: int
    pid: int
    pid_namespace: int  # the one in which `pid` is valid
    purpose: str
    scope: str
    ceiling_bytes: int  # of the scope, as its user allows
    since: float  # when the process joined the line, or was admitted (seconds since the epoch)
    used_before_bytes: int = 0  # what the process used before, for which it has no lease
    # the lease stands for memory that the process uses in any case and keeps while it waits for more, so nobody waits
    # for its end
    is_floor: bool = False
    holds: bool = False  # it has been admitted
    number: int = 0  # of its place in line: who has a lower one comes first

    @classmethod
    def unpack(cls, data: bytes, offset: int) -> Self:
        """Return the entry of the record at `offset`."""
        kind, number, size, ceiling, used_before, pid, namespace, since, *texts = _RECORD.unpack_from(data, offset)
        scope, purpose = (text.rstrip(b"\0").decode(errors="ignore") for text in texts)
        is_floor, holds = kind == _FLOOR, kind != _WAITING
        return cls(size, pid, namespace, purpose, scope, ceiling, since, used_before, is_floor, holds, number)

    def pack(self) -> bytes:
        kind = _FLOOR if self.is_floor else _LEASE if self.holds else _WAITING
        sizes = (min(size, _MAX_SIZE) for size in (self.size_bytes, self.ceiling_bytes, self.used_before_bytes))
        texts = (text.encode(errors="backslashreplace") for text in (self.scope, self.purpose))
        return _RECORD.pack(kind, self.number, *sizes, self.pid, self.pid_namespace, self.since, *texts)

    @property
    def is_here(self) -> bool:
        """Whether this process is in the same PID namespace, so `pid` is valid here."""
        return self.pid_namespace == host.pid_namespace()

    @property
    def is_stopped(self) -> bool:
        """Whether the process is known to be stopped."""
        return self.is_here and host.is_stopped(self.pid)

    @property
    def state(self) -> str:
        """The state of the process in a word or a few; empty if it is in another PID namespace."""
        return host.pid_state(self.pid) if self.is_here else ""

    def told(self, now: float) -> str:
        """Describe this process and its state, for people."""
        state = self.state
        return f"pid {self.pid} ({f'{state}, ' if state else ''}for {max(0.0, now - self.since):.0f} s)"


# Says in words what an entry lacks to fit beside the leases of others (the argument); None if it fits.
Judge = Callable[[Sequence[LedgerEntry]], "str | None"]


class WaitReporter(Protocol):
    """Reports the reason for waiting; the next report comes when no seconds are left."""

    def left_seconds(self) -> float: ...

    def tell(self, ahead: int, lacking: str | None, whom: Sequence[LedgerEntry]) -> None:
        """Say how many are ahead in line or, for the first, how much is lacking. whom: the processes waited for."""
        ...

    def tell_locked(self, pids: Sequence[int]) -> None:
        """Say that these processes have the ledger locked."""
        ...


class BusyError(Exception):
    """Another process has had the head of a ledger locked for a long time."""


class Ledger:
    """The line and the leases of one scope. All processes that share the file share them; its folder is private."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def enter(self, entry: LedgerEntry, judge: Judge | None, reporter: WaitReporter, number: int = 0) -> Ticket:
        """Wait in line until `judge` finds that `entry` fits, and return the lease.

        Args:
            judge: None for memory that is in use in any case: it is granted at once, even if it does not fit.
            number: of the place that the process had in line before, if it had one.

        Raises FileNotFoundError if the file is removed by others meanwhile, or the folder that it lies in is not there;
        ReshardError if something other than a file of this user's is in its place.
        """
        ticket = Ticket(_LedgerFile(self.path), entry._replace(holds=judge is None))
        try:
            ticket.join(reporter, number)
            if judge is not None:
                ticket.wait(judge, reporter)
        except BaseException:
            ticket.leave()
            raise
        return ticket

    def entries(self) -> list[LedgerEntry]:
        """Return who holds leases, and then who waits, in the order of the line. Nothing is changed."""
        with self._opened() as file:
            # Of one reading: nobody is missed who is admitted meanwhile.
            entries = [] if file is None else file.entries(_WAITING, _LEASE, _FLOOR)
        return sorted(entries, key=lambda entry: not entry.holds)

    def lock_holders(self) -> tuple[int, ...]:
        """Return the process that is changing the ledger now, or has been stopped while it did."""
        with self._opened() as file:
            return () if file is None else file.lock_holders()

    def is_waited_for(self) -> bool:
        """Tell whether anybody is in line who could be admitted."""
        return any(not entry.holds and not entry.is_stopped for entry in self.entries())

    @contextmanager
    def _opened(self) -> Iterator[_LedgerFile | None]:
        """Open the file to look at it; None if there is none."""
        try:
            file = _LedgerFile(self.path, os.O_RDONLY)
        except (OSError, ReshardError):
            yield None
            return
        try:
            yield file
        finally:
            file.close()


class Ticket:
    """The record of a process in a ledger: its place in line, and then its lease."""

    def __init__(self, file: _LedgerFile, entry: LedgerEntry) -> None:
        self.entry = entry
        self._file = file

    def join(self, reporter: WaitReporter, number: int) -> None:
        """Take a record, at the end of the line or at the place `number` if nobody has that."""
        with self._file.changing(reporter):
            entries = self._file.entries(_WAITING, _LEASE, _FLOOR)
            if not number or number in (entry.number for entry in entries):
                # A clock, so that no number is used again even where the file has been removed and made anew.
                number = max([time.monotonic_ns(), *(entry.number + 1 for entry in entries if not entry.holds)])
            self._file.take_record()
            self._write(self.entry._replace(number=number))

    def wait(self, judge: Judge, reporter: WaitReporter) -> None:
        """Wait until nobody is ahead in line who could be admitted, and then until the entry fits."""
        asked_about: list[LedgerEntry] | None = None
        lacking, ask_again = None, 0.0
        while True:
            self._file.require_in_place()
            ahead = self._file.count_ahead(self.entry.number)
            if ahead:
                if reporter.left_seconds() <= 0:
                    stopped = [lease for lease in self._file.entries(_LEASE, _FLOOR) if lease.is_stopped]
                    in_line = self._ahead()
                    reporter.tell(len(in_line), None, [*stopped, *in_line[:1]])
            else:
                leases = self._leases_of_others()
                if leases != asked_about or time.monotonic() >= ask_again:
                    begin = time.monotonic()
                    asked_about, lacking = leases, judge(leases)
                    end = time.monotonic()
                    ask_again = end + min(_ASK_SHARE * (end - begin), _LONGEST_ASK_SECONDS)
                    if lacking is None:
                        if self._admit(leases, reporter):
                            return
                        asked_about = None
                        continue
                if reporter.left_seconds() <= 0:
                    reporter.tell(0, lacking, leases)
            time.sleep(min(_LOOK_SECONDS * max(1, ahead), _LONGEST_LOOK_SECONDS))

    def resize(self, size_bytes: int, judge: Judge | None, *, is_floor: bool | None = None) -> bool:
        """Have the lease hold `size_bytes` from now on if `judge` finds that they fit now; tell whether it does.

        Nothing is waited for.

        Args:
            judge: None if nobody is to be asked.
            is_floor: whether the lease stands from now on for what is in use in any case; None leaves that as it is.
        """
        is_floor = self.entry.is_floor if is_floor is None else is_floor
        entry = self.entry._replace(size_bytes=size_bytes, is_floor=is_floor)
        with suppress(BusyError, OSError):  # as where the folder is full, or has been removed
            for _ in range(_MAX_TRIES):
                leases = self._leases_of_others()
                if judge is not None and judge(leases) is not None:
                    return False
                with self._file.changing(None):
                    if judge is None or self._are_all(leases):
                        self._write(entry)
                        return True
        return False

    def leave(self) -> None:
        """Give back the lease or the place in line, without waiting for a process that was stopped."""
        try:
            self._file.free_record()
            with suppress(BusyError, OSError), self._file.changing(None):
                self._file.remove_if_unused()
        finally:
            self._file.close()

    def _admit(self, leases: Sequence[LedgerEntry], reporter: WaitReporter) -> bool:
        """Take the lease if nobody is ahead and `leases`, which were asked about, are all there are; tell whether."""
        with self._file.changing(reporter):
            if self._file.count_ahead(self.entry.number) or not self._are_all(leases):
                return False
            self._write(self.entry._replace(holds=True, since=time.time()))
        return True

    def _are_all(self, leases: Sequence[LedgerEntry]) -> bool:
        """Tell whether no lease of others has come or grown since these were listed; some may be gone."""
        return set(self._leases_of_others()) <= set(leases)

    def _leases_of_others(self) -> list[LedgerEntry]:
        return [lease for lease in self._file.entries(_LEASE, _FLOOR) if lease.number != self.entry.number]

    def _ahead(self) -> list[LedgerEntry]:
        return [entry for entry in self._file.entries(_WAITING) if entry.number < self.entry.number]

    def _write(self, entry: LedgerEntry) -> None:
        self._file.write(entry)
        self.entry = entry


class _LedgerFile:
    """The open file of a ledger: its locks, and what its records say."""

    def __init__(self, path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> None:
        self.fd = open_ledger_file(path, flags)
        self._path = path
        self._own = 0  # offset of the record that this process has locked; 0 if it has none
        _OPEN_FILES.add(self)

    def close(self) -> None:
        """Unlock everything and close the file."""
        with suppress(OSError):  # a file system without such locks
            self._unlock(0, 0)
        _OPEN_FILES.discard(self)
        os.close(self.fd)

    @contextmanager
    def changing(self, reporter: WaitReporter | None) -> Iterator[None]:
        """Have the head of the file locked.

        The lock is never broken: its holder may be stopped while it looks who is there, and once continued would admit
        itself beside whoever was admitted meanwhile. Only the user can continue or kill it. So `reporter` is told of
        the holder after a moment and then now and then; without it, BusyError is raised.

        Raises FileNotFoundError if the file has been removed.
        """
        nap_seconds, due = _SHORTEST_NAP_SECONDS, time.monotonic() + PATIENCE_SECONDS
        while not self._lock(0, _RECORD.size):
            if time.monotonic() >= due:
                if reporter is None:
                    raise BusyError
                reporter.tell_locked(self.lock_holders())
                due = time.monotonic() + _REPEAT_SECONDS
            time.sleep(nap_seconds)
            nap_seconds = min(2 * nap_seconds, _LONGEST_NAP_SECONDS)
        try:
            with suppress(OSError):  # a full folder: then it cannot be told who has the file locked
                os.pwrite(self.fd, _HEAD.pack(os.getpid(), host.pid_namespace()), 0)
            self.require_in_place()
            yield
        finally:
            self._unlock(0, _RECORD.size)

    def require_in_place(self) -> None:
        """Raise FileNotFoundError if this file has been removed, or another has come in its place."""
        if not os.path.samestat(self._path.lstat(), os.fstat(self.fd)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._path)

    def lock_holders(self) -> tuple[int, ...]:
        """Return the process that has the head locked, if it is another one that can be seen from here."""
        pid, namespace = _HEAD.unpack(os.pread(self.fd, _HEAD.size, 0).ljust(_HEAD.size, b"\0"))
        is_seen = pid and namespace == host.pid_namespace() and self._is_locked(0, _RECORD.size)
        return (pid,) if is_seen else ()

    def entries(self, *kinds: bytes) -> list[LedgerEntry]:
        """Return the entries of these kinds whose processes live, in the order of their numbers."""
        data = self._read()
        return [LedgerEntry.unpack(data, offset) for _, offset in _places(data, kinds) if self._is_alive(offset)]

    def count_ahead(self, number: int) -> int:
        """Return how many are in line before the place `number`; 0 if none of them is alive and not stopped.

        Those that have died count as well if anybody else is there: this is asked often, and looks at one process only.
        """
        data = self._read()
        ahead = [offset for other, offset in _places(data, (_WAITING,)) if other < number]
        for offset in reversed(ahead):
            if self._is_alive(offset) and not LedgerEntry.unpack(data, offset).is_stopped:
                return len(ahead)
        return 0

    def take_record(self) -> None:
        """Lock a record that nobody has."""
        offsets = range(_RECORD.size, _MAX_FILE_BYTES, _RECORD.size)
        own = next((offset for offset in offsets if self._lock(offset, _RECORD.size)), None)
        if own is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)
        self._own = own

    def write(self, entry: LedgerEntry) -> None:
        """Write the own record."""
        os.pwrite(self.fd, entry.pack(), self._own)

    def free_record(self) -> None:
        """Free the own record, if there is one."""
        if self._own:
            own, self._own = self._own, 0
            with suppress(OSError):
                os.pwrite(self.fd, bytes(_RECORD.size), own)
            self._unlock(own, _RECORD.size)

    def remove_if_unused(self) -> None:
        """Remove the file if nobody has a record in it: scopes come and go with jobs."""
        if not self._is_locked(_RECORD.size, 0):
            self._path.unlink()

    def _read(self) -> bytes:
        return os.pread(self.fd, min(os.fstat(self.fd).st_size, _MAX_FILE_BYTES), 0)

    def _is_alive(self, offset: int) -> bool:
        return offset == self._own or self._is_locked(offset, _RECORD.size)

    def _lock(self, start: int, length: int) -> bool:
        """Lock bytes of the file, to its end if `length` is 0; tell whether nobody else has any of them locked."""
        try:
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _unlock(self, start: int, length: int) -> None:
        fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, start, length, 0))

    def _is_locked(self, start: int, length: int) -> bool:
        """Tell whether somebody else has any of these bytes locked."""
        lock = fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0))
        kind, *_ = _FLOCK.unpack(lock)
        return bool(kind != fcntl.F_UNLCK)


_OPEN_FILES: set[_LedgerFile] = set()


def _leave_locks_to_parent() -> None:
    """Let go of the files that the parent of this process has open, since locks hold as long as any fork has these.

    The parent may be killed while it has the head locked. Its descriptors stay in use, for nothing.
    """
    if _OPEN_FILES:
        nothing = os.open(os.devnull, os.O_RDWR)
        for file in _OPEN_FILES:
            os.dup2(nothing, file.fd, inheritable=False)
        os.close(nothing)
        _OPEN_FILES.clear()


os.register_at_fork(after_in_child=_leave_locks_to_parent)


def _places(data: bytes, kinds: tuple[bytes, ...]) -> list[tuple[int, int]]:
    """Return number and offset of all records of these kinds, in the order of the numbers."""
    offsets = range(_RECORD.size, len(data) - _RECORD.size + 1, _RECORD.size)
    return sorted(
        (_NUMBER.unpack_from(data, offset)[0], offset) for offset in offsets if data.startswith(kinds, offset)
    )
