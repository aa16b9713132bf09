"""Hold the memory of this process (`ProcessLease`), and list the leases on memory of its host (`host_state`).

A process that was started for a run takes a lease while it has loaded next to nothing, and never holds memory while it
waits: its lease grows in its place, or the process starts over (`Start`), as small as at first, and waits for all that
it knows by then to need.

Others cannot become small again: a rank of an MPI job, a worker, a program that calls the functions. What such a
process always uses is its floor, which is counted but not waited for by anybody, so processes with floors cannot wait
for each other. What it needs beyond is another lease. If that cannot grow, it is given back, and all that it was for
is freed (`on_memory_released`) before the process waits for a larger one. While the process waits for others of its
run, which may be waiting for memory, it gives way to whoever is in line.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from reshard_mpi.errors import ReshardError
from reshard_mpi.processes.governor import Allowance, Governor, Lease, leased_bytes, open_governor
from reshard_mpi.processes.host import is_stopped, pid_state
from reshard_mpi.processes.ledger import Ledger, LedgerEntry
from reshard_mpi.processes.ledger_folder import LEDGER_SUFFIX, LedgerFolder, find_place
from reshard_mpi.processes.memory_scopes import find_scopes, resident_bytes
from reshard_mpi.text import MIB, Say, format_bytes, one_line

# An interpreter with all modules for planning and moving bytes.
BASE_BYTES = 43 * MIB
# What MPI adds, as measured with MPICH and Open MPI.
MPI_BYTES = 18 * MIB
# A worker that is forked from such an interpreter, without the pages that both share.
WORKER_BYTES = 34 * MIB
# The part of that which any program that calls the functions has already.
_CALLER_BYTES = 22 * MIB
# The smallest lease beyond a floor.
_LEAST_BYTES = MIB


class Start(NamedTuple):
    """The lease with which process `pid` has started, and how it starts over, if it can."""

    pid: int
    governor: Governor
    lease: Lease
    # replaces this process by one that waits for as many bytes as its argument says; None if that is impossible
    over: Callable[[int], None] | None
    waited_seconds: float = 0.0
    least_bytes: int = 0  # what the process is known to need since it started over


_start: Start | None = None


def set_start(start: Start) -> None:
    """Record with which lease this process has started."""
    global _start  # noqa: PLW0603 - a fact of the process
    _start = start


def own_start() -> Start | None:
    """Return how this process has started; None if it has no lease of its own, like a fork of one that has."""
    return _start if _start is not None and _start.pid == os.getpid() else None


def register_worker(governor: Governor) -> None:
    """Take a lease for this process, a fork of one that has held the memory for it until now."""
    with suppress(ReshardError, OSError):  # such as a full disk; the next lease meets it again
        set_start(Start(os.getpid(), governor, governor.register(WORKER_BYTES, "a worker"), None))


def give_back_start() -> None:
    """Give back the lease with which this process has started, which is about to end."""
    start = own_start()
    if start is not None:
        start.lease.give_back()


class ProcessLease:
    """What memory this process may use, until it is closed.

    Attributes:
        on_memory_released: called to free all that the lease is for.
    """

    def __init__(self, governor: Governor, say: Say, *, floor: Lease | None = None, start: Start | None = None) -> None:
        self.governor = governor
        self.on_memory_released: Callable[[], None] = lambda: None
        self.waited_seconds = start.waited_seconds if start is not None else 0.0
        self._say = say
        self._turns = 0
        self._floor = floor
        self._start = start
        self._lease = start.lease if start is not None else None
        self._used_before_bytes = 0 if start is not None or floor is not None else resident_bytes(os.getpid())
        self._there_bytes = min(self._used_before_bytes, _CALLER_BYTES)
        self._may_start_over = start is not None and start.over is not None

    @classmethod
    def open(cls, allowance: Allowance, environment: Mapping[str, str], say: Say, *, alone: bool) -> ProcessLease:
        """Return the memory of this process, with the lease that it has started with, if any.

        Args:
            alone: no other process of the run waits for this one, and it waits for none.
        """
        start = own_start()
        if start is None:  # a program that calls the functions
            return cls(open_governor(allowance, environment), say)
        if alone:
            return cls(start.governor, say, start=start)
        start.lease.restate(start.lease.size_bytes, is_floor=True)
        return cls(start.governor, say, floor=start.lease)

    def close(self) -> None:
        """Give the lease back, except the floor of a process of this program, which stays until its end."""
        if self._lease is not None and self._start is None:
            self._lease.give_back()
        if self._floor is not None and own_start() is None:
            self._floor.give_back()
        self._lease = self._floor = None

    @property
    def _floor_bytes(self) -> int:
        return self._floor.size_bytes if self._floor is not None else 0

    def forbid_starting_over(self) -> None:
        """Never start over from now on, since something would be lost."""
        self._may_start_over = False

    def need(self, peak_bytes: int, purpose: str) -> bool:
        """Have a lease of `peak_bytes` for all that this process uses from now on; wait for it if need be.

        Return False if memory had to be freed for that (`on_memory_released`): the work with it must be done again.
        """
        wanted_bytes = self._beyond_floor(peak_bytes)
        if self._lease is None:
            self._wait(wanted_bytes, purpose)
            return True
        if self._start is not None:
            wanted_bytes = max(wanted_bytes, self._start.least_bytes)
        if self._lease.size_bytes >= wanted_bytes:
            # Once it cannot start over, a process keeps what it may need again.
            if self._lease.size_bytes > wanted_bytes and (self._start is None or self._may_start_over):
                self._lease.restate(wanted_bytes, is_floor=False)
            return True
        if self._lease.grow(wanted_bytes):
            return True
        if self._may_start_over and self._start is not None and self._start.over is not None:
            self._start.over(wanted_bytes)
        self._release_all()
        self._wait(self._beyond_floor(peak_bytes), purpose)
        return False

    def be_floor(self) -> None:
        """Make the lease of this process its floor, since others of its run wait while it is held."""
        if self._lease is None:
            return
        self._lease.restate(self._lease.size_bytes, is_floor=True)
        self._floor, self._lease, self._start = self._lease, None, None
        self._may_start_over = False

    def worker_is_there(self) -> None:
        """Give up the memory that was held for one worker, which asks for its own."""
        if self._floor is not None:
            self._floor.restate(self._floor.size_bytes - WORKER_BYTES, is_floor=True)

    def release_if_contended(self) -> None:
        """Free all memory if others wait for some, while this process waits for something else."""
        if self._lease is not None and self._start is None and self.governor.is_waited_for():
            self._release_all()

    def take_waited_seconds(self) -> float:
        """Return how long this process has waited since the last call."""
        waited_seconds, self.waited_seconds = self.waited_seconds, 0.0
        return waited_seconds

    def _beyond_floor(self, peak_bytes: int) -> int:
        return max(peak_bytes - self._floor_bytes - self._there_bytes, _LEAST_BYTES)

    def _release_all(self) -> None:
        self.on_memory_released()
        floor_bytes = max(self._floor_bytes, resident_bytes(os.getpid()))
        if self._start is not None:  # what it has loaded it will have until its end
            self._floor, self._start = self._lease, None
            floor_bytes = max(BASE_BYTES, floor_bytes)
        elif self._lease is not None:
            self._lease.give_back()
        self._lease = None
        if self._floor is not None:
            self._floor.restate(floor_bytes, is_floor=True)

    def _wait(self, size_bytes: int, purpose: str) -> None:
        # Behind numbers from before this process, and before later ones. No number is used twice.
        self._turns += 1
        floor = self._floor.numbers if self._floor is not None else {}
        self._lease = self.governor.take(
            size_bytes,
            purpose,
            self._say,
            numbers={key: number + self._turns for key, number in floor.items()},
            used_before_bytes=self._used_before_bytes,
        )
        self.waited_seconds += self._lease.waited_seconds


class ScopeState(NamedTuple):
    """One scope and its line."""

    name: str
    ceiling_bytes: int
    allowed_bytes: int | None  # what its leases may hold together now; None for a scope that this process is not in
    entries: tuple[LedgerEntry, ...]
    locked_by: tuple[int, ...] = ()  # the processes that are changing its line now, or have been stopped while they did

    @property
    def leases(self) -> tuple[LedgerEntry, ...]:
        return tuple(entry for entry in self.entries if entry.holds)

    @property
    def waiting(self) -> tuple[LedgerEntry, ...]:
        """In the order of the line."""
        return tuple(entry for entry in self.entries if not entry.holds)

    @property
    def held_bytes(self) -> int:
        return sum(lease.size_bytes for lease in self.leases)


class HostState(NamedTuple):
    """The scopes of this process, the host first, and all others that this user's processes use on this host."""

    place: LedgerFolder
    scopes: tuple[ScopeState, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the state as plain values; sizes in bytes, times in seconds since the epoch."""
        return {
            "version": 1,
            "folder": str(self.place.folder),
            "private": self.place.private or None,
            "scopes": [
                {
                    "name": scope.name,
                    "ceiling_bytes": _size_or_none(scope.ceiling_bytes),
                    "allowed_bytes": scope.allowed_bytes,
                    "held_bytes": scope.held_bytes,
                    "locked_by": [{"pid": pid, "state": pid_state(pid)} for pid in scope.locked_by],
                    "leases": [_entry_as_json(entry) for entry in scope.leases],
                    "waiting": [_entry_as_json(entry) for entry in scope.waiting],
                }
                for scope in self.scopes
            ],
        }

    def as_text(self) -> str:
        """Return the state as lines for people."""
        lines = [line for scope in self.scopes for line in _scope_lines(scope, time.time())]
        if self.place.private:
            lines.append(f"Only processes that see {self.place.folder} are listed: {self.place.private}.")
        return "\n".join(map(one_line, lines))


def host_state(allowance: Allowance, environment: Mapping[str, str]) -> HostState:
    """Return who holds leases on this host now and who waits, and how much `allowance` allows them."""
    place = find_place(environment)
    scopes = {}
    for scope in reversed(find_scopes(environment, allowance.memory_bytes, allowance.max_active)):
        ledger = Ledger(place.path_of(scope.key))
        entries = tuple(ledger.entries())
        allowed_bytes = max(0, scope.allowed_bytes(leased_bytes(entry for entry in entries if entry.holds)))
        state = ScopeState(scope.name, scope.ceiling_bytes, allowed_bytes, entries, ledger.lock_holders())
        scopes[ledger.path] = state
    for path in sorted(place.folder.glob(f"*{LEDGER_SUFFIX}")):
        ledger = Ledger(path)
        entries = tuple(ledger.entries()) if path not in scopes else ()
        if entries:
            scopes[path] = ScopeState(entries[0].scope, entries[0].ceiling_bytes, None, entries, ledger.lock_holders())
    return HostState(place, tuple(scopes.values()))


def _scope_lines(scope: ScopeState, now: float) -> list[str]:
    allowed_bytes = scope.ceiling_bytes if scope.allowed_bytes is None else scope.allowed_bytes
    held = f"{len(scope.leases)} {'lease holds' if len(scope.leases) == 1 else 'leases hold'}"
    head = f"{scope.name}: {held} {format_bytes(scope.held_bytes)} of {format_bytes(allowed_bytes)}"
    head += f", {len(scope.waiting)} waiting" if scope.waiting else ""
    rows = [("", *_entry_cells(lease, scope, now)) for lease in scope.leases]
    rows += [(f"{place}.", *_entry_cells(entry, scope, now)) for place, entry in enumerate(scope.waiting, 1)]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    locked = [
        f"  pid {pid} ({pid_state(pid)}) keeps its line locked: nobody comes or goes until it is continued or ended"
        for pid in scope.locked_by
        if is_stopped(pid)
    ]
    return [
        head,
        *locked,
        *("  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths)) + f"  {row[4]}" for row in rows),
    ]


def _entry_cells(entry: LedgerEntry, scope: ScopeState, now: float) -> tuple[str, str, str, str]:
    what = f"{'holds' if entry.holds else 'waits for'} {format_bytes(entry.size_bytes)}"
    if entry.ceiling_bytes < scope.ceiling_bytes:  # its user allows it less
        what += f" within {format_bytes(entry.ceiling_bytes)}"
    seconds = f"{max(0.0, now - entry.since):.0f} s"
    stopped = "stopped: " if entry.is_stopped else ""
    return f"pid {entry.pid}", what, seconds, f"{stopped}{entry.purpose}"


def _entry_as_json(entry: LedgerEntry) -> dict[str, Any]:
    return {
        "pid": entry.pid,
        "size_bytes": entry.size_bytes,
        "ceiling_bytes": _size_or_none(entry.ceiling_bytes),
        "purpose": entry.purpose,
        "state": entry.state or None,
        "is_floor": entry.is_floor,
        "since": entry.since,
    }


def _size_or_none(size_bytes: int) -> int | None:
    return None if size_bytes == sys.maxsize else size_bytes
