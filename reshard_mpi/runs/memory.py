"""What one process of a run may use of memory: asked for before it is used, step by step as more becomes known."""

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
from reshard_mpi.runs.projection import INTERPRETER_BYTES, Projection, opening_bytes
from reshard_mpi.units import KIB, MIB

# What at least one of several workers needs besides for being there, so that any of them comes to an end.
_WORK_BYTES = 24 * MIB
# What a worker does not give back any more of what it has read and planned of a tensor.
_PLANNED_BYTES = 3 * KIB


class RunMemory:
    """What a process holds of memory as long as the block lasts.

    Where there is no room for more, what was read and planned is let go of, or the process starts over; so whoever has
    asked for memory looks whether what it needs is still there. While the process waits for others of its run it gives
    way to those in line.
    """

    def __init__(self, allowance: Callable[[], Allowance], comm: Comm, say: Callable[[str], None]) -> None:
        self._allowance = allowance
        self._comm = comm
        self._say = say
        self._allotment: Allotment | None = None
        self._projection: Projection | None = None
        self._on_giving_way: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._comm.meanwhile(lambda: None)
        if self._allotment is not None:
            self._allotment.close()

    def open(self) -> Governor:
        """Find out how much memory there may be; return what grants it. Raises a ReshardError."""
        if self._allotment is None:
            self._allotment = Allotment.open(self._allowance(), os.environ, self._say, alone=self._comm.size == 1)
            self._allotment.on_giving_way.append(self._let_go)
            self._comm.meanwhile(self._allotment.give_way)
        return self._allotment.governor

    def on_giving_way(self, *let_go: Callable[[], None]) -> None:
        """Have what was read and planned be let go of so, from now on, where others need the memory."""
        self._on_giving_way = list(let_go)

    def to_open(self, strategies: Iterable[str | os.PathLike[str] | None], purpose: str, *source_formats: str) -> None:
        """Have the memory to read strategies and, where formats are known, the first shards."""
        self._need(opening_bytes(strategies, *source_formats), purpose)

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
        """Have the memory to read the shards of a conversion and to plan its targets; return what is projected.

        targets: how many are planned at the most. verify: what is written is compared with its sources. also_read: a
        checkpoint that is only compared with them.
        """
        self._projection = Projection.of(conversion, target_format, targets=targets, verify=verify, also_read=also_read)
        self._need(self._projection.planning_bytes, purpose)
        conversion.before_gathering = partial(self._need, self._projection.gathering_bytes, purpose)
        return self._projection

    @property
    def projection(self) -> Projection:
        """What has been projected when targets were planned."""
        if self._projection is None:
            raise RuntimeError("targets are planned before anything is moved")
        return self._projection

    def require_possible(self, plan: RankPlan) -> int:
        """Return what the target of `plan` is projected to take. Raises BudgetError if there can never be so much."""
        peak_bytes = self.projection.peak_bytes(plan)
        if not self._allowance().unlimited:  # as for a script for other hosts, though this process holds a lease here
            self.open().require_possible(peak_bytes, INTERPRETER_BYTES)
        return peak_bytes

    def to_move(self, peak_bytes: int, purpose: str) -> bool:
        """Have `peak_bytes` in all, to move bytes or to compare them. Tells whether what was planned is still there."""
        return self._need(peak_bytes, purpose)

    def turn(self) -> None:
        """Let others have their turn between two targets, if this process has a floor to stay on."""
        if self._allotment is not None:
            self._allotment.give_way()

    def settle(self) -> None:
        """From now on there is something to lose: this process does not start over."""
        if self._allotment is not None:
            self._allotment.stay()

    def share_out(self, jobs: int, parameters: int, *, least: int) -> int:
        """Have the memory to fork workers; return how many, `jobs` or as many as can ever be there at once.

        From now on this process stays as it is. parameters: how many the strategies have, so many tensors each of them
        is going to plan. least: so many workers are there in any case.
        """
        governor = self.open()
        assert self._allotment is not None
        room_bytes = governor.ceiling_bytes - INTERPRETER_BYTES - _WORK_BYTES
        size = max(least, min(jobs, room_bytes // (WORKER_BYTES + parameters * _PLANNED_BYTES)))
        self._allotment.need(INTERPRETER_BYTES + size * WORKER_BYTES, "starting workers")
        self._allotment.be_floor()
        return size

    def worker_is_there(self) -> None:
        """Leave to a worker what was held for it: it says itself what it takes."""
        assert self._allotment is not None
        self._allotment.hand_over(WORKER_BYTES)

    def take_waited_seconds(self) -> float:
        """Return how long was waited since this was asked last."""
        return self._allotment.take_waited_seconds() if self._allotment is not None else 0.0

    def _need(self, peak_bytes: int, purpose: str) -> bool:
        self.open()
        assert self._allotment is not None
        return self._allotment.need(peak_bytes, purpose)

    def _let_go(self) -> None:
        for let_go in self._on_giving_way:
            let_go()
        gc.collect()
