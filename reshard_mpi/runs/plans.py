"""Plans several targets in one process, for the functions that need no run."""

from __future__ import annotations

from collections.abc import Iterable

from reshard_mpi.checkpoints.comparison import compare
from reshard_mpi.planning.copies import dealt
from reshard_mpi.planning.differing import between_targets
from reshard_mpi.planning.fit import drift_warning, require_no_drift
from reshard_mpi.planning.model import RankPlan
from reshard_mpi.runs.conversion import Conversion
from reshard_mpi.runs.exchanged import Planned
from reshard_mpi.runs.outcome import Outcome
from reshard_mpi.runs.transform import agreeing, told_differing


def plan_together(
    conversion: Conversion, targets: Iterable[int], notes: tuple[str, ...] = ()
) -> tuple[list[RankPlan], Outcome]:
    """Return the plans of targets, and an outcome with the notes and warnings on them.

    What targets must have in common is checked, and copies are compared. notes: further notes for the outcome. Raises
    a ReshardError if a run would be refused.
    """
    plans = [conversion.plan(rank) for rank in targets]
    path = conversion.source.files.path

    def placed(stage: int) -> dict[int, dict[str, str]]:
        return {plan.target_rank: plan.placed for plan in plans if plan.stage == stage}

    begun = Planned(Outcome.begun(conversion, notes))
    planned = agreeing([begun, *map(Planned.of, plans)], placed, path, conversion.accumulated)
    lost = compare(conversion.source.stored, dealt(planned.alike, 0, 1), conversion.limits, lambda _: None)
    drifted, unlisted = conversion.drifted_tensors()
    if conversion.strict:
        require_no_drift(drifted, path)
    compared = Outcome(lost=lost, other_warnings=(drift_warning(drifted),) if drifted else ())
    differing = (*planned.differing, *between_targets(planned.beginnings), *unlisted)
    return plans, told_differing(planned.outcome.joined([compared]), differing, path, strict=conversion.strict)
