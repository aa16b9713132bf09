"""The phases of a run, and how its processes agree on errors.

Every process of a run calls `convert`: alone, as an MPI rank, or as a local worker. It plans its targets, learns
whether any process has an error that refuses the run, and only then writes. Errors are caught for each target and
gathered, so the outcome is the same on every process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from reshard_mpi.errors import (
    ReshardError,
)
from reshard_mpi.planning.agreement import (
    differing_stages,
    require_one_moment,
    require_same_names,
    require_same_shapes,
)
from reshard_mpi.planning.copies import dealt
from reshard_mpi.planning.differing import between_targets, told_of
from reshard_mpi.planning.fit import drift_warning, require_no_drift
from reshard_mpi.planning.model import CHOSEN_FILES, Moment
from reshard_mpi.planning.partial_sums import Accumulated, note_on_none
from reshard_mpi.planning.replicas import Replicas
from reshard_mpi.planning.summary import Plan
from reshard_mpi.processes.comm import Comm
from reshard_mpi.runs.listing import tensor_lines
from reshard_mpi.runs.memory import RunMemory
from reshard_mpi.runs.outcome import Compared, Due, Outcome, Planned, attempt, record_of
from reshard_mpi.runs.planner import Planner
from reshard_mpi.runs.preflight import require_room
from reshard_mpi.runs.progress import Progress, Silent, complain
from reshard_mpi.runs.request import Request, Strategies
from reshard_mpi.runs.status import CLOSED, MOVED, PHASES, Stage

T = TypeVar("T")


def convert(request: Request, comm: Comm, progress: Progress, strategies: Strategies | None = None) -> Outcome:
    """Make this process's part of the targets of `request`; return the outcome of all processes of `comm`.

    Every process of `comm` must call it with the same request. strategies: those of the request, if they have been read
    already. Raises the same error on every process if the run is refused, before anything is written. Targets that fail
    later are in the outcome.
    """
    with RunMemory(lambda: request.allowance, comm, progress) as memory:
        return _convert(request, comm, progress, strategies, memory)


def _convert(
    request: Request, comm: Comm, progress: Progress, strategies: Strategies | None, memory: RunMemory
) -> Outcome:
    planner, planned, due = _planned(request, comm, progress, strategies, memory)
    _refuse(comm.allgather(planner.begin(progress)), comm)
    if comm.rank == 0:
        progress.reading(planner.described_source)  # not earlier, since a process alone may have started over until now
    stage = Stage("writing", due.size_bytes, due.targets, ready=due.ready, phases=(MOVED, CLOSED))
    if request.verify:
        stage = stage._replace(name="writing and verifying", phases=PHASES)
    progress.begin(stage, planner.own_bytes, planner.led_bytes)
    written = planner.writer(progress).write()
    plans_outcome = Outcome(
        notes=planned.notes,
        lost=planned.lost,
        missing=planned.missing,
        other_warnings=planned.other_warnings,
        processes=comm.size,
    )
    outcome = plans_outcome.joined(comm.allgather(planner.outcome.joined([written])))
    if not request.recorded:
        return outcome
    # Even if targets have failed: another run may have made them meanwhile, and left it to this one to commit.
    committed, *_ = comm.allgather(planner.commit(outcome) if comm.rank == 0 else Outcome())
    return outcome._replace(
        failures=(*outcome.failures, *committed.failures),
        notes=(*outcome.notes, *committed.notes),
        other_warnings=(*outcome.other_warnings, *committed.other_warnings),
    )


def plan_targets(
    request: Request, comm: Comm, progress: Progress | None = None, *, lists_tensors: bool = False
) -> tuple[Plan, Outcome]:
    """Plan the targets of `request` without writing; return the plan, and an outcome with notes and warnings.

    lists_tensors: whether the plan has a line for each tensor. Raises, the same on every process, the errors for which
    `convert` refuses a run.
    """
    shown = Silent(complain) if progress is None else progress
    with RunMemory(lambda: request.allowance, comm, shown) as memory:
        return _plan_targets(request, comm, shown, memory, lists_tensors=lists_tensors)


def _plan_targets(
    request: Request, comm: Comm, progress: Progress, memory: RunMemory, *, lists_tensors: bool
) -> tuple[Plan, Outcome]:
    planner, planned, _ = _planned(request, comm, progress, None, memory, lists_tensors=lists_tensors)
    shares = _gather(comm, planner.summaries)
    targets = [target for share in shares for target in share]
    listed = tensor_lines(_gather(comm, planner.listed), planner.origins()) if lists_tensors else ()
    in_order = tuple(sorted(targets, key=lambda target: target.rank))
    return Plan(in_order, planner.described_source, tuple(listed), planner.shown_rules()), planned


def _planned(
    request: Request,
    comm: Comm,
    progress: Progress,
    strategies: Strategies | None,
    memory: RunMemory,
    *,
    lists_tensors: bool = False,
) -> tuple[Planner, Outcome, Due]:
    """Plan the targets of all processes and compare the copies that must be the same.

    Returns this process's planner, and of all processes the outcome, and what they are to write. Raises the same error
    on every process if it refuses the run.
    """
    planner, planned = _plan_with_sound_sources(
        request, comm, progress, strategies, memory, lists_tensors=lists_tensors
    )
    outcome = planned.outcome
    differing = [*planned.differing, *between_targets(planned.beginnings)]
    if planned.alike or request.replicas is not Replicas.ANY:
        mine = list(dealt(planned.alike, comm.rank, comm.size))
        if planned.alike:
            size_bytes, own_bytes = (sum(alike.size_bytes for alike in copies) for copies in (planned.alike, mine))
            progress.begin(Stage("comparing copies", size_bytes), own_bytes)
        compared = [record_of(Compared, value) for value in comm.allgather(planner.compare(mine, progress))]
        _refuse([share.outcome for share in compared], comm)
        outcome = outcome.joined(share.outcome for share in compared)
        drifted = tuple(dict.fromkeys(name for share in compared for name in share.drifted))
        if request.strict:
            require_no_drift(drifted, request.source)
        if drifted:
            outcome = outcome._replace(other_warnings=(*outcome.other_warnings, drift_warning(drifted)))
        differing += [tensor for share in compared for tensor in share.unlisted]
    told = told_of(differing, request.source, strict=request.strict)
    outcome = outcome._replace(
        notes=(*outcome.notes, *told.notes), other_warnings=(*outcome.other_warnings, *told.warnings)
    )
    return planner, outcome, planned.due


def _plan_with_sound_sources(
    request: Request,
    comm: Comm,
    progress: Progress,
    strategies: Strategies | None,
    memory: RunMemory,
    *,
    lists_tensors: bool,
) -> tuple[Planner, Planned]:
    """Plan the targets of all processes; if they will be verified, only from shards that fit their own checksums.

    A shard that does not fit is lost, and all is planned again without it. Returns this process's planner, and what all
    say about their plans. Raises as `_plan_together` does, also if no other shard holds what a lost one held.
    """
    checked: set[int] = set()
    chosen: list[Moment] = []
    damage: dict[int, ReshardError] = {}
    while True:
        progress.begin(Stage("planning"))
        planner = Planner(request, comm, strategies, damage, memory, progress, lists_tensors=lists_tensors)
        planned = _plan_together(planner, comm)
        chosen += (moment for moment in planned.moments if moment.name == CHOSEN_FILES)
        require_one_moment(chosen)  # in the second round another checkpoint may be the newest
        if not request.verify:
            return planner, planned
        read = {
            rank: size for sizes in _gather(comm, attempt(planner.read_bytes, comm)) for rank, size in sizes.items()
        }
        to_check = {rank: read[rank] for rank in sorted(read.keys() - checked)}
        mine = dict(list(to_check.items())[comm.rank :: comm.size])
        stage = Stage("checking sources", sum(to_check.values()), len(to_check), "shard")
        progress.begin(stage, sum(mine.values()))
        errors = _gather(comm, planner.check_sources(mine, progress))
        if not any(errors):
            return planner, planned
        checked |= read.keys()
        damage = damage | {rank: error for share in errors for rank, error in share.items()}


def _plan_together(planner: Planner, comm: Comm) -> Planned:
    """Plan the targets of all processes; return what all say about their plans.

    Raises the same error on every process if the run is refused.
    """
    all_planned = [record_of(Planned, value) for value in comm.allgather(planner.plan())]
    _refuse([planned.outcome for planned in all_planned], comm)
    require_one_moment(moment for planned in all_planned for moment in planned.moments)
    require_room(planned.rooms for planned in all_planned)
    for stage in differing_stages(held for planned in all_planned for held in planned.held):
        shares = _gather(comm, planner.placed(stage))
        placed = {rank: described for share in shares for rank, described in share.items()}
        require_same_names(placed, planner.source)
        require_same_shapes(placed, planner.source)
    together = Planned().joined(all_planned)
    notes = together.outcome.notes
    if together.held and not together.sums and planner.accumulated is not Accumulated.REFUSE:
        notes = (*notes, note_on_none(planner.accumulated))
    return together._replace(outcome=together.outcome._replace(notes=notes))


def _gather(comm: Comm, value: T | Outcome) -> list[T]:
    """Return the values of all processes; raise the same error on all if one has an outcome with a failure instead."""
    values = comm.allgather(value)
    _refuse([failed for failed in values if isinstance(failed, Outcome)], comm)
    return [value for value in values if not isinstance(value, Outcome)]


def _refuse(outcomes: Sequence[Outcome], comm: Comm) -> None:
    """Raise the first failure of the outcomes, if any; the same on every process."""
    failures = [failure for outcome in outcomes for failure in outcome.failures]
    if not failures:
        return
    first = failures[0]
    # An error of only some processes may be due to their hosts, for instance a file system that is not mounted.
    everywhere = len({failure.process for failure in failures}) == comm.size
    error = first.named(alone=everywhere or len(set(comm.hosts)) == 1)
    others = {failure.rank for failure in failures} - {first.rank, None}
    if others:
        error.problem += f" (and {len(others)} more {'target is' if len(others) == 1 else 'targets are'} refused)"
    raise error
