"""Plans several targets in one process, for the functions that need no run."""

from __future__ import annotations

from collections.abc import Iterable

from reshard_mpi.checkpoints.comparison import compare
from reshard_mpi.planning.agreement import (
    differing_stages,
    require_one_moment,
    require_same_names,
    require_same_shapes,
)
from reshard_mpi.planning.copies import dealt
from reshard_mpi.planning.differing import between_targets, told_of
from reshard_mpi.planning.fit import drift_warning, require_no_drift
from reshard_mpi.planning.model import RankPlan
from reshard_mpi.planning.partial_sums import Accumulated, note_on_none
from reshard_mpi.runs.conversion import Conversion
from reshard_mpi.runs.outcome import Outcome, Planned


def plan_together(
    conversion: Conversion, targets: Iterable[int], notes: tuple[str, ...] = ()
) -> tuple[list[RankPlan], Outcome]:
    """Return the plans of targets, and an outcome with the notes and warnings on them.

    What targets must have in common is checked, and copies are compared. notes: further notes for the outcome. Raises
    a ReshardError if a run would be refused.
    """
    plans = [conversion.plan(rank) for rank in targets]
    files = conversion.source.files
    require_one_moment(moment for plan in plans for moment in plan.moments)
    for stage in differing_stages(plan.held for plan in plans):
        placed = {plan.target_rank: plan.placed for plan in plans if plan.stage == stage}
        require_same_names(placed, files.path)
        require_same_shapes(placed, files.path)
    all_alike = tuple(dict.fromkeys(alike for plan in plans for alike in plan.alike))
    lost = compare(conversion.source.stored, dealt(all_alike, 0, 1), conversion.limits, lambda _: None)
    drifted, unlisted = conversion.drifted_tensors()
    if conversion.strict:
        require_no_drift(drifted, files.path)
    compared = Outcome(lost=lost, other_warnings=(drift_warning(drifted),) if drifted else ())
    begun = Outcome(notes=(*conversion.notes, *notes), other_warnings=files.warnings, missing=conversion.source.missing)
    planned = Planned(begun).joined([*map(_planned, plans), Planned(compared)])
    notes = planned.outcome.notes
    differing = (*planned.differing, *between_targets(planned.beginnings), *unlisted)
    told = told_of(differing, files.path, strict=conversion.strict)
    notes = (*notes, *told.notes)
    if plans and not planned.sums and conversion.accumulated is not Accumulated.REFUSE:
        notes = (*notes, note_on_none(conversion.accumulated))
    warnings = (*planned.outcome.other_warnings, *told.warnings)
    return plans, planned.outcome._replace(notes=notes, other_warnings=warnings)


def outcome_of(plan: RankPlan) -> Outcome:
    """Return an outcome with the notes and warnings on a plan."""
    warnings = (*plan.warnings, *plan.left_out)
    return Outcome(absent=plan.absent, notes=plan.notes, lost=plan.lost, other_warnings=warnings)


def _planned(plan: RankPlan) -> Planned:
    return Planned(outcome_of(plan), beginnings=plan.beginnings, differing=plan.differing, sums=plan.sums)
