"""Reserve the memory of one process of a run step by step (`RunMemory`)."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType
from typing import Self

from reshard_mpi.planning.rank_plan import RankPlan
from reshard_mpi.processes.comm import Comm
from reshard_mpi.processes.governor import Allowance, Governor
from reshard_mpi.processes.process_lease import WORKER_BYTES, ProcessLease
from reshard_mpi.runs.progress import Progress
from reshard_mpi.runs.target_needs import INTERPRETER_BYTES, Projection, Workload, opening_bytes
from reshard_mpi.text import KIB, MIB

# At least one of several workers needs this much besides its own size, or none could finish.
_WORK_BYTES = 24 * MIB
# How much memory for a tensor that a worker has planned it never gives back.
_PLANNED_BYTES = 3 * KIB


class RunMemory:
    """Holds memory for this process as long as the `with` block lasts.

    If there is not enough for a request, what was read and planned is freed, or the process starts over; so after a
    request callers must see whether what they need is still there. While the process waits for others of its run, it
    gives way to processes that wait for memory.
    """

    def __init__(self, allowance: Callable[[], Allowance], comm: Comm, progress: Progress) -> None:
        self._allowance = allowance
        self._comm = comm
        self._progress = progress
        self._no_longer_meanwhile: Callable[[], None] = lambda: None
        self._lease: ProcessLease | None = None
        self._projection: Projection | None = None
        self._on_memory_released: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._no_longer_meanwhile()
        if self._lease is not None:
            self._lease.close()

    def open(self) -> Governor:
        """Return the governor of this host's memory; the first call opens it. Raises a ReshardError."""
        if self._lease is None:
            say, alone = self._progress.waiting, self._comm.size == 1
            self._lease = ProcessLease.open(self._allowance(), os.environ, say, alone=alone)
            self._lease.on_memory_released.append(self._free)
            self._no_longer_meanwhile = self._comm.meanwhile(self._lease.release_if_contended)
        return self._lease.governor

    def on_memory_released(self, *free: Callable[[], None]) -> None:
        """Set the functions that free what was read and planned, for when other processes need memory."""
        self._on_memory_released = list(free)

    def reserve_for_reading(
        self, strategies: Iterable[str | os.PathLike[str] | None], purpose: str, *source_formats: str
    ) -> None:
        """Wait for the memory to read strategies and, for given source formats, the first shards."""
        self.reserve_for_copying(opening_bytes(strategies, *source_formats), purpose)

    def reserve_for_planning(self, work: Workload, purpose: str) -> Projection:
        """Wait for the memory to read the shards of a conversion and to plan its targets; return the projection."""
        conversion = work.conversion
        if conversion.view is not None:  # what the map makes tells how much memory planning takes
            self.reserve_for_copying(Projection.of(work).planning_bytes, purpose)
            conversion.view.manifest(0)
        self._projection = Projection.of(work)
        self.reserve_for_copying(self._projection.planning_bytes, purpose)
        conversion.before_gathering = partial(self.reserve_for_copying, self._projection.gathering_bytes, purpose)
        return self._projection

    @property
    def projection(self) -> Projection:
        """The projection made by `reserve_for_planning`."""
        if self._projection is None:
            raise RuntimeError("targets are planned before anything is moved")
        return self._projection

    def require_possible(self, plan: RankPlan) -> int:
        """Return the bytes needed for the target of `plan`. Raises BudgetError if they can never be had."""
        peak_bytes = self.projection.peak_bytes(plan)
        if not self._allowance().unlimited:  # for a script for other hosts it is, though this process holds a lease
            self.open().require_possible(peak_bytes, INTERPRETER_BYTES)
        return peak_bytes

    def reserve_for_copying(self, peak_bytes: int, purpose: str) -> bool:
        """Wait for `peak_bytes` of memory in all, to move or compare bytes; tell whether plans have not been freed."""
        self.open()
        assert self._lease is not None
        is_kept = self._lease.need(peak_bytes + self._progress.display.memory_bytes, purpose)
        self._progress.admitted()
        return is_kept

    def yield_if_contended(self) -> None:
        """Free memory beyond the floor if others are in line for it; a process alone keeps its first lease."""
        if self._lease is not None:
            self._lease.release_if_contended()

    def forbid_starting_over(self) -> None:
        """From now on, do not start this process over: it has something to lose."""
        if self._lease is not None:
            self._lease.stay()

    def share_out(self, jobs: int, parameters: int) -> int:
        """Wait for the memory to fork workers; return how many: `jobs`, or as many as fit, but one at least.

        This process keeps its memory from now on.

        Args:
            parameters: how many the strategies list, which is how many tensors each worker plans.
        """
        governor = self.open()
        assert self._lease is not None
        room_bytes = governor.ceiling_bytes - INTERPRETER_BYTES - _WORK_BYTES
        size = max(1, min(jobs, room_bytes // (WORKER_BYTES + parameters * _PLANNED_BYTES)))
        self.reserve_for_copying(INTERPRETER_BYTES + size * WORKER_BYTES, "starting workers")
        self._lease.be_floor()
        return size

    def worker_is_there(self) -> None:
        """Give up the memory that was held for one worker, which asks for its own."""
        assert self._lease is not None
        self._lease.hand_over(WORKER_BYTES)

    def take_waited_seconds(self) -> float:
        """Return for how long this process has waited for memory since the last call."""
        return self._lease.take_waited_seconds() if self._lease is not None else 0.0

    def _free(self) -> None:
        for free in self._on_memory_released:
            free()
        gc.collect()
