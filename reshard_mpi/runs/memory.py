"""The memory of one process of a run: asked for before it is used, step by step as it becomes known how much."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType
from typing import Self

from reshard_mpi.checkpoints.source import SourceCheckpoint
from reshard_mpi.planning.model import RankPlan
from reshard_mpi.processes.comm import Comm
from reshard_mpi.processes.governor.admission import Governor
from reshard_mpi.processes.governor.allotment import WORKER_BYTES, Allotment
from reshard_mpi.processes.governor.allowance import Allowance
from reshard_mpi.runs.conversion import Conversion
from reshard_mpi.runs.progress import Progress
from reshard_mpi.runs.projection import INTERPRETER_BYTES, Projection, opening_bytes
from reshard_mpi.units import KIB, MIB

# At least one of several workers needs so much besides its own size, or none could finish.
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
        self._allotment: Allotment | None = None
        self._projection: Projection | None = None
        self._on_giving_way: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._no_longer_meanwhile()
        if self._allotment is not None:
            self._allotment.close()

    def open(self) -> Governor:
        """Return the governor of this host's memory; the first call opens it. Raises a ReshardError."""
        if self._allotment is None:
            say, alone = self._progress.waiting, self._comm.size == 1
            self._allotment = Allotment.open(self._allowance(), os.environ, say, alone=alone)
            self._allotment.on_giving_way.append(self._free)
            self._no_longer_meanwhile = self._comm.meanwhile(self._allotment.give_way)
        return self._allotment.governor

    def on_giving_way(self, *free: Callable[[], None]) -> None:
        """Set the functions that free what was read and planned, for when other processes need memory."""
        self._on_giving_way = list(free)

    def to_open(self, strategies: Iterable[str | os.PathLike[str] | None], purpose: str, *source_formats: str) -> None:
        """Wait for the memory to read strategies and, for given source formats, the first shards."""
        self.to_move(opening_bytes(strategies, *source_formats), purpose)

    def to_plan(
        self,
        conversion: Conversion,
        target_format: str,
        purpose: str,
        *,
        targets: int = 1,
        verify: bool = False,
        also_read: SourceCheckpoint | None = None,
    ) -> Projection:
        """Wait for the memory to read the shards of a conversion and to plan its targets; return the projection.

        targets: how many are planned at most. verify: whether targets are compared with their sources afterwards.
        also_read: another checkpoint that is read to be compared.
        """
        project = partial(Projection.of, conversion, target_format, targets=targets, verify=verify, also_read=also_read)
        if conversion.original is not None:  # what the map makes tells how much memory planning takes
            self.to_move(project().planning_bytes, purpose)
            conversion.source.manifest(0)
        self._projection = project()
        self.to_move(self._projection.planning_bytes, purpose)
        conversion.before_gathering = partial(self.to_move, self._projection.gathering_bytes, purpose)
        return self._projection

    @property
    def projection(self) -> Projection:
        """The projection made by `to_plan`."""
        if self._projection is None:
            raise RuntimeError("targets are planned before anything is moved")
        return self._projection

    def require_possible(self, plan: RankPlan) -> int:
        """Return the bytes that making the target of `plan` takes. Raises BudgetError if there can never be so many."""
        peak_bytes = self.projection.peak_bytes(plan)
        if not self._allowance().unlimited:  # for a script for other hosts it is, though this process holds a lease
            self.open().require_possible(peak_bytes, INTERPRETER_BYTES)
        return peak_bytes

    def to_move(self, peak_bytes: int, purpose: str) -> bool:
        """Wait for `peak_bytes` of memory in all, to move or compare bytes; tell whether plans have not been freed."""
        self.open()
        assert self._allotment is not None
        is_kept = self._allotment.need(peak_bytes + self._progress.shown_bytes, purpose)
        self._progress.admitted()
        return is_kept

    def turn(self) -> None:
        """Give way to other processes between two targets, if this process keeps enough memory to go on."""
        if self._allotment is not None:
            self._allotment.give_way()

    def settle(self) -> None:
        """From now on, do not start this process over: it has something to lose."""
        if self._allotment is not None:
            self._allotment.stay()

    def share_out(self, jobs: int, parameters: int) -> int:
        """Wait for the memory to fork workers; return how many: `jobs`, or as many as there can be memory for, but one.

        This process keeps its memory from now on. parameters: how many the strategies list, which is how many tensors
        each worker plans.
        """
        governor = self.open()
        assert self._allotment is not None
        room_bytes = governor.ceiling_bytes - INTERPRETER_BYTES - _WORK_BYTES
        size = max(1, min(jobs, room_bytes // (WORKER_BYTES + parameters * _PLANNED_BYTES)))
        self.to_move(INTERPRETER_BYTES + size * WORKER_BYTES, "starting workers")
        self._allotment.be_floor()
        return size

    def worker_is_there(self) -> None:
        """Give up the memory that was held for one worker, which asks for its own."""
        assert self._allotment is not None
        self._allotment.hand_over(WORKER_BYTES)

    def take_waited_seconds(self) -> float:
        """Return for how long this process has waited for memory since the last call."""
        return self._allotment.take_waited_seconds() if self._allotment is not None else 0.0

    def _free(self) -> None:
        for free in self._on_giving_way:
            free()
        gc.collect()
