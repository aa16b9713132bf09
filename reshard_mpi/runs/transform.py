"""A run: which process makes which target, and what happens when one of them cannot.

Every process of a run executes `convert` (alone, as MPI rank, or as local worker): it plans its targets, learns
whether any process found a reason to refuse, and only then writes. Errors are caught target by target and gathered,
so the outcome is the same on every process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from reshard_mpi.errors import (
    ReshardError,
)
from reshard_mpi.planning.agreement import (
    differing_beginnings,
    differing_stages,
    require_one_moment,
    require_same_names,
    require_same_shapes,
)
from reshard_mpi.planning.fit import drift_warning, require_no_drift
from reshard_mpi.planning.replicas import Replicas
from reshard_mpi.planning.summary import Plan
from reshard_mpi.processes.comm import Comm
from reshard_mpi.runs.memory import RunMemory
from reshard_mpi.runs.outcome import Compared, Outcome, Planned, record_of
from reshard_mpi.runs.planner import Planner
from reshard_mpi.runs.preflight import require_room
from reshard_mpi.runs.progress import Plain, Progress, Silent
from reshard_mpi.runs.request import Request, Strategies

T = TypeVar("T")


def convert(request: Request, comm: Comm, progress: Progress, strategies: Strategies | None = None) -> Outcome:
    """Make the targets of `request` that fall to this process; return what all processes of `comm` did.

    strategies: what the request's files say, where that has been read already. Every process of `comm` must call it
    with the same request. Raises, on every process alike, the error that refused the run before anything was written.
    Targets that failed while they were written are in the outcome.
    """
    with RunMemory(lambda: request.allowance, comm, progress.waiting) as memory:
        return _convert(request, comm, progress, strategies, memory)


def _convert(
    request: Request, comm: Comm, progress: Progress, strategies: Strategies | None, memory: RunMemory
) -> Outcome:
    planner, planned = _planned(request, comm, progress, strategies, memory)
    _refuse(comm.allgather(planner.begin(progress)), comm)
    if comm.rank == 0:
        progress.reading(planner.described_source)  # not before: a process alone may have started over until here
    written = planner.writer(progress).write()
    said = Outcome(
        notes=planned.notes,
        lost=planned.lost,
        missing=planned.missing,
        other_warnings=planned.other_warnings,
        processes=comm.size,
    )
    outcome = said.joined(comm.allgather(planner.outcome.joined([written])))
    if not request.recorded:
        return outcome
    # Also where targets have failed: a run like this one may have made them, and left it to this one to commit.
    committed, *_ = comm.allgather(planner.commit(outcome) if comm.rank == 0 else Outcome())
    failures, notes = (*outcome.failures, *committed.failures), (*outcome.notes, *committed.notes)
    return outcome._replace(failures=failures, notes=notes)


def plan_targets(request: Request, comm: Comm) -> tuple[Plan, Outcome]:
    """Plan the targets of `request` without writing; return the plan and what the user should be told.

    Raises, on every process alike, what `convert` would refuse.
    """
    with RunMemory(lambda: request.allowance, comm, Plain().waiting) as memory:
        return _plan_targets(request, comm, memory)


def _plan_targets(request: Request, comm: Comm, memory: RunMemory) -> tuple[Plan, Outcome]:
    planner, planned = _planned(request, comm, Silent(), None, memory)
    shares = _gather(comm, planner.summaries)
    targets = [target for share in shares for target in share]
    planned = planned._replace(notes=(*planned.notes, *planner.shown_rules()))
    return Plan(tuple(sorted(targets, key=lambda target: target.rank)), planner.described_source), planned


def _planned(
    request: Request, comm: Comm, progress: Progress, strategies: Strategies | None, memory: RunMemory
) -> tuple[Planner, Outcome]:
    """Have every process plan its targets and compare what must be the same; raise what refuses the run, on all alike.

    Returns what has planned, and what is to be said of the plans.
    """
    planner, planned = _plan_with_sound_sources(request, comm, strategies, memory)
    outcome = planned.outcome
    if planned.alike or request.replicas is not Replicas.ANY:
        compared = [record_of(Compared, value) for value in comm.allgather(planner.compare(planned.alike))]
        _refuse([one.outcome for one in compared], comm)
        outcome = outcome.joined(one.outcome for one in compared)
        drifted = tuple(dict.fromkeys(name for one in compared for name in one.drifted))
        if request.strict:
            require_no_drift(drifted, request.source)
        if drifted:
            outcome = outcome._replace(other_warnings=(*outcome.other_warnings, drift_warning(drifted)))
    return planner, outcome


def _plan_with_sound_sources(
    request: Request, comm: Comm, strategies: Strategies | None, memory: RunMemory
) -> tuple[Planner, Planned]:
    """Have every process plan its targets, to verify from shards that fit the checksums they have of their own.

    Shards that do not are lost, so what they hold is planned from others; raises, as `_plan_together` does, if no
    other has it. Returns what has planned, and what is to be said of the plans.
    """
    checked: set[int] = set()
    damage: dict[int, ReshardError] = {}
    while True:
        planner = Planner(request, comm, strategies, damage, memory)
        planned = _plan_together(planner, comm)
        if not request.verify:
            return planner, planned
        read = {rank for ranks in _gather(comm, planner.read_ranks()) for rank in ranks}
        to_check = sorted(read - checked)
        found = _gather(comm, planner.check_sources(to_check[comm.rank :: comm.size]))
        if not any(found):
            return planner, planned
        checked |= read
        damage = damage | {rank: error for damaged in found for rank, error in damaged.items()}


def _plan_together(planner: Planner, comm: Comm) -> Planned:
    """Have every process plan its targets; raise what refuses the run, on every process alike.

    Returns what is to be said of the plans together.
    """
    every = [record_of(Planned, value) for value in comm.allgather(planner.plan())]
    _refuse([one.outcome for one in every], comm)
    require_one_moment(moment for one in every for moment in one.moments)
    require_room(one.rooms for one in every)
    for stage in differing_stages(held for one in every for held in one.held):
        shares = _gather(comm, planner.placed(stage))
        placed = {rank: held for share in shares for rank, held in share.items()}
        require_same_names(placed, planner.source)
        require_same_shapes(placed, planner.source)
    together = Planned().joined(every)
    notes = together.outcome.notes
    notes = (*notes, *differing_beginnings(together.beginnings, notes))
    return together._replace(outcome=together.outcome._replace(notes=notes))


def _gather(comm: Comm, value: T | Outcome) -> list[T]:
    """Return the values of all processes; raise, on all alike, what kept one of them from having its own."""
    values = comm.allgather(value)
    _refuse([failed for failed in values if isinstance(failed, Outcome)], comm)
    return [value for value in values if not isinstance(value, Outcome)]


def _refuse(outcomes: Sequence[Outcome], comm: Comm) -> None:
    """Raise the first of the errors that the processes found while planning, if any."""
    failures = [failure for outcome in outcomes for failure in outcome.failures]
    if not failures:
        return
    first = failures[0]
    # What is wrong for some processes only may be wrong on their hosts, as where a file system is not mounted.
    everywhere = len({failure.process for failure in failures}) == comm.size
    error = first.named(alone=everywhere or len(set(comm.hosts)) == 1)
    others = {failure.rank for failure in failures} - {first.rank, None}
    if others:
        error.problem += f" (and {len(others)} more {'target is' if len(others) == 1 else 'targets are'} refused)"
    raise error
