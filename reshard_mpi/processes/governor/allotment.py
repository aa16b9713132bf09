"""What a process may use of memory, from its start to its end.

A process that was started for a run takes a lease while it has loaded next to nothing, and then never waits with
memory in its hands: its lease grows in its place, or it starts over (`Start`), as small as it was at first, and waits
for all that it knows by then to need.

Others cannot become small again: a rank of an MPI job, a worker, a program that calls the functions. What such a
process uses for being there is its floor. That is counted but not waited for by anybody, so that nobody waits in a ring
with floors in their hands. What it needs beyond is a lease of its own: one that cannot grow is given back, with all
that stood on it (`on_giving_way`), before the process waits for a larger one. While it waits for the other processes of
its run, which may be waiting for memory, it gives way to whoever is in line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from reshard_mpi.errors import ReshardError
from reshard_mpi.processes.governor.admission import Governor, Lease, Say, open_governor
from reshard_mpi.processes.governor.allowance import Allowance
from reshard_mpi.processes.governor.usage import resident_bytes
from reshard_mpi.units import MIB

# An interpreter that has loaded what plans and moves bytes: nothing is planned or moved with less.
BASE_BYTES = 43 * MIB
# The same, forked from a process that has loaded it.
WORKER_BYTES = 34 * MIB
# A program that calls the functions has at least so much of that already.
_CALLER_BYTES = 22 * MIB
# The least that is asked for beyond a floor.
_LEAST_BYTES = MIB


class Start(NamedTuple):
    """The lease with which a process of this program has started, and how it starts over, if it can.

    over: replaces this process by one that waits for so much (the argument); None if that is not possible. least_bytes:
    what this one is known to need by what came before it.
    """

    pid: int
    governor: Governor
    lease: Lease
    over: Callable[[int], None] | None
    waited_seconds: float = 0.0
    least_bytes: int = 0


_start: Start | None = None


def started(start: Start) -> None:
    """Tell with which lease this process has started."""
    global _start  # noqa: PLW0603 - a fact of the process
    _start = start


def own_start() -> Start | None:
    """Return the lease with which this process has started; None if it has none, as a fork of one that has."""
    return _start if _start is not None and _start.pid == os.getpid() else None


def register_worker(governor: Governor) -> None:
    """Tell that this process is a fork of one that has held memory for it until now."""
    with suppress(ReshardError, OSError):  # as where there is no place for it any more; it is asked for again
        started(Start(os.getpid(), governor, governor.register(WORKER_BYTES, "a worker"), None))


def finish() -> None:
    """Give back what this process has started with: it is about to end."""
    start = own_start()
    if start is not None:
        start.lease.give_back()


class Allotment:
    """What this process may use, until it is closed.

    on_giving_way: let go of all that the lease is for.
    """

    def __init__(self, governor: Governor, say: Say, *, floor_bytes: int, floor: Lease | None, start: Start | None):
        self.governor = governor
        self.on_giving_way: list[Callable[[], None]] = []
        self.waited_seconds = start.waited_seconds if start is not None else 0.0
        self._say = say
        self._turns = 0
        self._floor_bytes = floor_bytes
        self._floor = floor
        self._start = start
        self._lease = start.lease if start is not None else None
        self._used_before_bytes = 0 if start is not None or floor_bytes else resident_bytes(os.getpid())
        self._there_bytes = min(self._used_before_bytes, _CALLER_BYTES)
        self._may_start_over = start is not None and start.over is not None

    @classmethod
    def open(cls, allowance: Allowance, environment: Mapping[str, str], say: Say, *, alone: bool) -> Allotment:
        """Return what this process has, by its start or from now on.

        alone: no other process of the run waits for this one, or is waited for by it.
        """
        start = own_start()
        if start is None:  # a program that calls the functions
            return cls(open_governor(allowance, environment), say, floor_bytes=0, floor=None, start=None)
        if alone:
            return cls(start.governor, say, floor_bytes=0, floor=None, start=start)
        start.lease.restate(start.lease.size_bytes, is_floor=True)
        return cls(start.governor, say, floor_bytes=start.lease.size_bytes, floor=start.lease, start=None)

    def close(self) -> None:
        """Give back what is leased; what a process of this program has for being there is its own to its end."""
        if self._lease is not None and self._start is None:
            self._lease.give_back()
        if self._floor is not None and own_start() is None:
            self._floor.give_back()
        self._lease = self._floor = None

    @property
    def leased_bytes(self) -> int:
        return self._floor_bytes + (self._lease.size_bytes if self._lease is not None else 0)

    def stay(self) -> None:
        """Start over no more: from now on there is something that would be lost by it."""
        self._may_start_over = False

    def need(self, peak_bytes: int, purpose: str) -> bool:
        """Have a lease of `peak_bytes` for all that this process uses from now on, waiting for it where that must be.

        Tells whether nothing had to be let go of for that. If it had to, that has to be done again.
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
        self._let_go()
        self._wait(self._beyond_floor(peak_bytes), purpose)
        return False

    def be_floor(self) -> None:
        """From now on what this process holds is for its being there: others of its run wait while it holds it."""
        if self._lease is None:
            return
        self._lease.restate(self._lease.size_bytes, is_floor=True)
        self._floor, self._floor_bytes = self._lease, self._lease.size_bytes
        self._lease = self._start = None
        self._may_start_over = False

    def hand_over(self, size_bytes: int) -> None:
        """Hold so much less: another process holds it now."""
        if self._floor is not None:
            self._floor_bytes -= size_bytes
            self._floor.restate(self._floor_bytes, is_floor=True)

    def give_way(self) -> None:
        """Let go of everything if others wait for memory: this process waits for something else."""
        if self._lease is not None and self._start is None and self.governor.is_waited_for():
            self._let_go()

    def take_waited_seconds(self) -> float:
        """Return how long was waited since this was asked last."""
        waited_seconds, self.waited_seconds = self.waited_seconds, 0.0
        return waited_seconds

    def _beyond_floor(self, peak_bytes: int) -> int:
        return max(peak_bytes - self._floor_bytes - self._there_bytes, _LEAST_BYTES)

    def _let_go(self) -> None:
        for let_go in self.on_giving_way:
            let_go()
        in_use_bytes = resident_bytes(os.getpid())
        if self._start is not None:  # what it has loaded it will have until its end
            self._floor, self._start = self._lease, None
            self._floor_bytes = BASE_BYTES
        elif self._lease is not None:
            self._lease.give_back()
        self._lease = None
        if self._floor is not None:
            self._floor_bytes = max(self._floor_bytes, in_use_bytes)
            self._floor.restate(self._floor_bytes, is_floor=True)

    def _wait(self, size_bytes: int, purpose: str) -> None:
        # Behind those that were there before this process, and before those that came later. No number is used twice.
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
