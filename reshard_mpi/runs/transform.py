"""Run the phases of a transform: plan, agree, check, write, commit (`convert`).

Every process of a run calls `convert`: alone, as an MPI rank, or as a local worker. It plans its targets, learns
whether any process has an error that refuses the run, and only then writes. Errors are caught for each target and
gathered, so the outcome is the same on every process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from reshard_mpi.checkpoints.comparison import compare
from reshard_mpi.errors import ReshardError
from reshard_mpi.planning.agreement import (
    differing_stages,
    require_one_checkpoint,
    require_same_names,
    require_same_shapes,
)
from reshard_mpi.planning.fit import drift_warning, require_no_drift
from reshard_mpi.planning.model import CHOSEN_FILES, Differing, RankPlan, SharedFact
from reshard_mpi.planning.parameters import Accumulated, note_on_none
from reshard_mpi.planning.replicas import Replicas, partition_for
from reshard_mpi.planning.shard_faults import between_targets, told_of
from reshard_mpi.planning.summary import Plan
from reshard_mpi.processes.comm import Comm
from reshard_mpi.runs.conversion import Conversion
from reshard_mpi.runs.memory import RunMemory
from reshard_mpi.runs.messages import ComparisonReport, PlanReport, Totals, record_of
from reshard_mpi.runs.outcome import Outcome, attempt
from reshard_mpi.runs.planner import Planner
from reshard_mpi.runs.preflight import require_room
from reshard_mpi.runs.progress import CLOSED, MOVED, PHASES, Progress, Silent, Stage, complain
from reshard_mpi.runs.request import Request, Strategies

T = TypeVar("T")
# Given what is known to be wrong with source shards, returns what plans the targets of this process.
NewPlanner = Callable[[Mapping[int, ReshardError]], Planner]


def convert(
    request: Request, comm: Comm, progress: Progress, memory: RunMemory, strategies: Strategies | None
) -> Outcome:
    """Make this process's part of the targets of `request`; return the outcome of all processes of `comm`.

    Every process of `comm` must call it with the same request.

    Args:
        strategies: those of the request, if they have been read already.

    Raises the same error on every process if the run is refused, before anything is written. Targets that fail later
    are in the outcome.
    """
    new_planner = partial(Planner, request, comm, strategies, memory, progress)
    planner, planned, due = _planned(new_planner, request, comm, progress)
    _refuse(comm.allgather(planner.begin(progress)), comm)
    if comm.rank == 0:  # not earlier, since a process alone may have started over until now
        progress.reading(planner.described_source)
    stage = Stage("writing", due.size_bytes, due.targets, ready=due.ready, phases=(MOVED, CLOSED))
    if request.verify:
        stage = stage._replace(name="writing and verifying", phases=PHASES)
    progress.begin(stage, planner.own_bytes, planner.led_bytes)
    own = planner.outcome.joined([planner.writer(progress).write()])
    outcome = planned._replace(targets=(), processes=comm.size).joined(comm.allgather(own))
    if not request.recorded:
        return outcome
    # Even if targets have failed: another run may have made them meanwhile, and left it to this one to commit.
    committed, *_ = comm.allgather(planner.commit(outcome) if comm.rank == 0 else Outcome())
    return outcome.joined([committed._replace(targets=())])  # for a process that has died, what it had made comes again


def plan_targets(
    request: Request, comm: Comm, progress: Progress | None = None, *, lists_tensors: bool = False
) -> tuple[Plan, Outcome]:
    """Plan the targets of `request` without writing; return the plan, and an outcome with notes and warnings.

    Args:
        lists_tensors: whether the plan has a line for each tensor. Raises, the same on every process, the errors for
            which `convert` refuses a run.
    """
    shown = Silent(complain) if progress is None else progress
    with RunMemory(lambda: request.allowance, comm, shown) as memory:
        new_planner = partial(Planner, request, comm, None, memory, shown, lists_tensors=lists_tensors)
        planner, planned, _ = _planned(new_planner, request, comm, shown)
        shares = _gather(comm, planner.summaries)
        in_order = sorted((target for share in shares for target in share), key=lambda target: target.rank)
        listed: Iterable[str] = ()
        if lists_tensors:
            from reshard_mpi.runs.planner import tensor_lines

            listed = tensor_lines(_gather(comm, planner.listed), planner.origins())
        return Plan(tuple(in_order), planner.described_source, tuple(listed), planner.shown_rules()), planned


def _planned(
    new_planner: NewPlanner, request: Request, comm: Comm, progress: Progress
) -> tuple[Planner, Outcome, Totals]:
    """Plan the targets of all processes and compare the copies that must be the same.

    Returns this process's planner, and of all processes the outcome, and what they are to write. Raises the same error
    on every process if it refuses the run.
    """
    planner, planned = _plan_with_sound_sources(new_planner, request, comm, progress)
    outcome = planned.outcome
    differing = [*planned.differing, *between_targets(planned.beginnings)]
    if planned.alike or request.replicas is not Replicas.ANY:
        mine = list(partition_for(planned.alike, comm.rank, comm.size))
        if planned.alike:
            size_bytes, own_bytes = (sum(alike.size_bytes for alike in copies) for copies in (planned.alike, mine))
            progress.begin(Stage("comparing copies", size_bytes), own_bytes)
        compared = [record_of(ComparisonReport, value) for value in comm.allgather(planner.compare(mine, progress))]
        _refuse([share.outcome for share in compared], comm)
        outcome = outcome.joined(share.outcome for share in compared)
        drifted = tuple(dict.fromkeys(name for share in compared for name in share.drifted))
        if request.strict:
            require_no_drift(drifted, request.source)
        if drifted:
            outcome = outcome.joined([Outcome(other_warnings=(drift_warning(drifted),))])
        differing += [tensor for share in compared for tensor in share.unlisted]
    return planner, told_differing(outcome, differing, request.source, strict=request.strict), planned.due


def told_differing(outcome: Outcome, differing: Iterable[Differing], source: str, *, strict: bool) -> Outcome:
    """Return an outcome with messages on differing tensors. Raises DisagreementError if `strict`."""
    remarks = told_of(differing, source, strict=strict)
    return outcome.joined([Outcome(notes=remarks.notes, other_warnings=remarks.warnings)])


def _plan_with_sound_sources(
    new_planner: NewPlanner, request: Request, comm: Comm, progress: Progress
) -> tuple[Planner, PlanReport]:
    """Plan the targets of all processes; if they will be verified, only from shards that fit their own checksums.

    A shard that does not fit is lost, and all is planned again without it. Returns this process's planner, and what all
    say about their plans. Raises as `_plan_together` does, also if no other shard holds what a lost one held.
    """
    checked: set[int] = set()
    chosen: list[SharedFact] = []
    damage: dict[int, ReshardError] = {}
    while True:
        progress.begin(Stage("planning"))
        planner = new_planner(damage)
        planned = _plan_together(planner, comm)
        chosen += (moment for moment in planned.moments if moment.name == CHOSEN_FILES)
        require_one_checkpoint(chosen)  # in the second round another checkpoint may be the newest
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
            _refuse(comm.allgather(planner.check_committed(progress)), comm)
            return planner, planned
        checked |= read.keys()
        damage = damage | {rank: error for share in errors for rank, error in share.items()}


def _plan_together(planner: Planner, comm: Comm) -> PlanReport:
    """Plan the targets of all processes; return what all say about their plans.

    Raises the same error on every process if the run is refused.
    """
    all_planned = [record_of(PlanReport, value) for value in comm.allgather(planner.plan())]
    _refuse([planned.outcome for planned in all_planned], comm)
    require_room(planned.rooms for planned in all_planned)

    def placed(stage: int) -> dict[int, dict[str, str]]:
        shares = _gather(comm, planner.placed(stage))
        return {rank: described for share in shares for rank, described in share.items()}

    return agreeing(all_planned, placed, planner.source, planner.accumulated)


def agreeing(
    all_planned: Sequence[PlanReport],
    placed: Callable[[int], Mapping[int, Mapping[str, str]]],
    source: str,
    accumulated: Accumulated,
) -> PlanReport:
    """Join the processes' plans, if these agree in all shared facts.

    Args:
        placed: returns what strategies place on the target ranks of a stage.

    Raises a ReshardError if the run is refused.
    """
    require_one_checkpoint(moment for planned in all_planned for moment in planned.moments)
    for stage in differing_stages(held for planned in all_planned for held in planned.held):
        of_stage = placed(stage)
        require_same_names(of_stage, source)
        require_same_shapes(of_stage, source)
    together = PlanReport().joined(all_planned)
    if together.held and not together.sums and accumulated is not Accumulated.REFUSE:
        noted = Outcome(notes=(note_on_none(accumulated),))
        together = together._replace(outcome=together.outcome.joined([noted]))
    return together


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


def plan_together(
    conversion: Conversion, targets: Iterable[int], notes: tuple[str, ...] = ()
) -> tuple[list[RankPlan], Outcome]:
    """Return the plans of targets, and an outcome with the notes and warnings on them.

    What targets must have in common is checked, and copies are compared.

    Args:
        notes: further notes for the outcome.

    Raises a ReshardError if a run would be refused.
    """
    plans = [conversion.plan(rank) for rank in targets]
    path = conversion.source.files.path

    def placed(stage: int) -> dict[int, dict[str, str]]:
        return {plan.target_rank: plan.placed for plan in plans if plan.stage == stage}

    begun = PlanReport(Outcome.begun(conversion, notes))
    planned = agreeing([begun, *map(PlanReport.of, plans)], placed, path, conversion.accumulated)
    lost = compare(conversion.source.unmapped, partition_for(planned.alike, 0, 1), conversion.limits, lambda _: None)
    drifted, unlisted = conversion.drifted_tensors()
    if conversion.strict:
        require_no_drift(drifted, path)
    compared = Outcome(lost=lost, other_warnings=(drift_warning(drifted),) if drifted else ())
    differing = (*planned.differing, *between_targets(planned.beginnings), *unlisted)
    return plans, told_differing(planned.outcome.joined([compared]), differing, path, strict=conversion.strict)
