"""The targets that one process of a run is to write. Their plans are kept, or made again when they are written."""

from __future__ import annotations

from reshard_mpi.errors import ShardError
from reshard_mpi.journal.records import Evidence
from reshard_mpi.planning.losses import named, warnings_of
from reshard_mpi.planning.model import RankPlan
from reshard_mpi.runs.conversion import Conversion
from reshard_mpi.runs.projection import MAX_KEPT_PLANS, MAX_KEPT_PLANS_BYTES


class DueTargets:
    """The targets that are to be written.

    evidence: by rank, what the target's record says of its sources. peak_bytes: by rank, the memory that writing it is
    projected to take. source: path of the source checkpoint, as the user named it.
    """

    def __init__(self, conversion: Conversion, source: str) -> None:
        self.evidence: dict[int, Evidence] = {}
        self.peak_bytes: dict[int, int] = {}
        self._conversion = conversion
        self._source = source
        self._plans: dict[int, RankPlan] = {}
        self._kept_bytes = 0

    def add(self, plan: RankPlan, evidence: Evidence, peak_bytes: int) -> None:
        """Add a target; its plan is kept if that takes little memory."""
        self.evidence[plan.target_rank], self.peak_bytes[plan.target_rank] = evidence, peak_bytes
        if len(self._plans) < MAX_KEPT_PLANS and self._kept_bytes + plan.kept_bytes <= MAX_KEPT_PLANS_BYTES:
            self._plans[plan.target_rank] = plan
            self._kept_bytes += plan.kept_bytes

    def forget_plans(self) -> None:
        """Free the plans; they are made again when they are needed."""
        self._plans.clear()
        self._kept_bytes = 0

    def plan(self, rank: int) -> RankPlan:
        """Return the plan of a target. Raises ShardError if a plan made again would read other shards than before."""
        kept = self._plans.get(rank)
        if kept is not None:
            return kept
        plan, planned_ranks = self._conversion.plan(rank, checked=False), self.evidence[rank].read_ranks
        if plan.read_ranks != planned_ranks:
            raise ShardError(
                "source shards have changed since the run began",
                expected=f"target rank {rank} taken from {named(planned_ranks)}, as planned",
                got="; ".join(warnings_of(plan.lost)) or named(plan.read_ranks),
                where=self._source,
                remedy="restore the shards, or remove those that are damaged if others hold the same, and run the same"
                " command with --resume",
            )
        return plan
