"""The plans of several targets in one process, for the functions that need no run."""

from __future__ import annotations

from collections.abc import Iterable

from reshard_mpi.comparison import compare
from reshard_mpi.conversion import Conversion
from reshard_mpi.planning.agreement import (
    differing_stages,
    require_one_moment,
    require_same_names,
    require_same_shapes,
)
from reshard_mpi.planning.copies import dealt
from reshard_mpi.planning.fit import drift_warning, require_no_drift
from reshard_mpi.planning.losses import merged, warnings_of
from reshard_mpi.planning.model import RankPlan


def plan_together(conversion: Conversion, targets: Iterable[int]) -> list[RankPlan]:
    """Plan targets, check what they must have in common, compare copies, and warn of shards that cannot be used.

    Raises what a run would refuse.
    """
    plans = [conversion.plan(rank) for rank in targets]
    files = conversion.source.files
    require_one_moment(moment for plan in plans for moment in plan.moments)
    for stage in differing_stages(plan.held for plan in plans):
        placed = {plan.target_rank: plan.placed for plan in plans if plan.stage == stage}
        require_same_names(placed, files.path)
        require_same_shapes(placed, files.path)
    every = tuple(dict.fromkeys(alike for plan in plans for alike in plan.alike))
    lost = [*compare(conversion.source, dealt(every, 0, 1), conversion.limits)]
    lost += [one for plan in plans for one in plan.lost]
    own = dict.fromkeys(warning for plan in plans for warning in plan.warnings)
    drifted = conversion.drifted_tensors()
    if conversion.strict:
        require_no_drift(drifted, files.path)
    drift = (drift_warning(drifted),) if drifted else ()
    warn((*files.warnings, *warnings_of(merged(lost), conversion.source.missing), *own, *drift))
    return plans


def warn(warnings: Iterable[str]) -> None:
    """Tell the log that a caller of the functions may listen to."""
    for warning in warnings:
        import logging

        logging.getLogger("reshard_mpi").warning("%s", warning)
