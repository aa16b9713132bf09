"""Run the phases of a transform, in each of its processes: plan, check, compare, write, commit (`convert`).

A process is alone, an MPI rank, or a local worker. All do the same steps at the same time. One of the steps 1 to 4 that
fails in one of them raises the same error in all (`together`); failures of steps 5 and 6 are in the outcome that all
return. Nothing is written before step 4.

1. `checked_plans`: each process opens the run and plans its targets (`runs/target_plans`); all check that they agree.
2. In it, with --verify: read the source's sums. A damaged shard is lost, and all is planned once more without it.
3. `compare_within_source`: compare replicas that must be the same, a sample, which shows if the strategy fits, and what
   a format that packs must find the same.
4. `_begin`: make the target folder ready.
5. `write_targets`: write this process's targets. A target that fails does not stop the others.
6. `_commit`, in process 0: commit the targets if all are complete.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial, reduce
from typing import TYPE_CHECKING, NamedTuple

from reshard_mpi import formats
from reshard_mpi.checkpoints.compare_replicas import compare, comparing_bytes
from reshard_mpi.errors import ReshardError
from reshard_mpi.planning.comparison_choice import ReplicaGroup, partition_for
from reshard_mpi.planning.rank_choice import Accumulated, Replicas
from reshard_mpi.planning.rank_plan import CHOSEN_FILES, RankPlan, SharedFact
from reshard_mpi.planning.shared_facts import (
    differing_stages,
    require_one_checkpoint,
    require_same_names,
    require_same_shapes,
)
from reshard_mpi.planning.source_flaws import UnusableShard, difference_messages
from reshard_mpi.planning.strategy_check import NOTHING_FOUND, SampleFindings, drift_warning, require_no_drift
from reshard_mpi.processes.comm import Comm
from reshard_mpi.runs.check_places import require_room
from reshard_mpi.runs.outcome import Outcome, attempt, raise_first_failure, report_of, together
from reshard_mpi.runs.planner import Planner
from reshard_mpi.runs.process_memory import RunProcess
from reshard_mpi.runs.progress import CLOSED, MOVED, PHASES, Progress, ProgressStage, SliceCounter
from reshard_mpi.runs.target_plans import PlanReport, TargetPlans
from reshard_mpi.runs.write_targets import write_targets

if TYPE_CHECKING:
    from reshard_mpi.runs.mapped_source import MappedCheckpoint


class ComparisonReport(NamedTuple):
    """The result of comparing replicas in one process."""

    lost: tuple[UnusableShard, ...]  # source shards that could not be read
    findings: SampleFindings  # tensors that differ from rank to rank


def convert(process: RunProcess) -> Outcome:
    """Make this process's part of the targets of its request; return the outcome of all processes of the run.

    Every process of the run must call it with the same request.

    Raises the same error on every process if the run is refused, before anything is written. Targets that fail later
    are in the outcome.
    """
    request, comm, progress = process.request, process.comm, process.progress
    plans, planned = checked_plans(partial(TargetPlans.make, process), comm, progress)
    outcome = compare_within_source(plans, planned)
    together(comm, partial(_begin, plans))
    if comm.rank == 0:  # not earlier, since a process alone may have started over until now
        progress.display.reading(plans.run.planner.source.summary_text)
    name, phases = ("writing and verifying", PHASES) if request.verify else ("writing", (MOVED, CLOSED))
    due = planned.due
    stage = ProgressStage(name, due.size_bytes, due.targets, ready=due.ready, phases=phases)
    progress.begin(stage, plans.own_bytes, plans.led_bytes)
    written = comm.allgather(write_targets(plans))
    outcome = outcome._replace(processes=comm.size).joined(written)
    if not request.keeps_journal and request.files is None:
        return outcome
    # Even if targets have failed: another run may have made them meanwhile, and left it to this one to commit.
    commit = partial(_commit, plans, outcome) if comm.rank == 0 else Outcome
    committed, *_ = comm.allgather(attempt(commit, comm))
    return outcome.joined([committed])


def checked_plans(
    make: Callable[[Mapping[int, ReshardError]], TargetPlans], comm: Comm, progress: Progress
) -> tuple[TargetPlans, PlanReport]:
    """Plan, and under --verify check the source, until no shard is lost (steps 1 and 2).

    Returns this process's plans, and what all processes say about theirs. If the targets will be verified, they are
    planned only from shards that fit their own checksums: one that does not is lost, and all is planned again without
    it. A shard in an object store is not read for this check if all tensors are copied unchanged: the sums that the
    store tells of its copies are compared instead.

    Args:
        make: plans this process's targets; called once in each round, with what is known by then to be wrong with
            source shards.

    Raises the same error on every process if the run is refused, also if no other shard holds what a lost one held.
    """
    damage: dict[int, ReshardError] = {}
    checked: set[int] = set()
    chosen: list[SharedFact] = []
    while True:
        progress.begin(ProgressStage("planning"))
        plans, planned = _plan(partial(make, damage), comm)
        chosen += (fact for fact in planned.shared_facts if fact.name == CHOSEN_FILES)
        require_one_checkpoint(chosen)  # in the second round another checkpoint may be the newest
        if not plans.run.request.verify:
            return plans, planned
        sizes = {rank: size for share in together(comm, plans.size_by_read_rank) for rank, size in share.items()}
        to_read = set[int]().union(*comm.allgather(plans.unrecorded_ranks))
        to_check = {rank: sizes[rank] for rank in sorted(sizes.keys() - checked)}
        shares = together(comm, partial(_check_sources, plans, to_check, to_read))
        if not any(shares):
            together(comm, partial(_check_committed, plans))
            return plans, planned
        checked |= to_read & sizes.keys()
        damage = damage | {rank: error for errors in shares for rank, error in errors.items()}


def _plan(make: Callable[[], TargetPlans], comm: Comm) -> tuple[TargetPlans, PlanReport]:
    """Plan the targets of all processes, and check that the plans agree (step 1)."""
    plans = attempt(make, comm)
    gathered = comm.allgather(plans if isinstance(plans, Outcome) else plans.report)
    reports = [report_of(PlanReport, report) for report in gathered]
    raise_first_failure([report.outcome for report in reports], comm)
    assert not isinstance(plans, Outcome)
    require_room(report.space_needs for report in reports)

    def placed_in(stage: int) -> dict[int, dict[str, str]]:
        shares = together(comm, partial(plans.placed, stage))
        return {rank: tensors for share in shares for rank, tensors in share.items()}

    return plans, _agreeing(reports, placed_in, plans.run.request.source, plans.run.request.accumulated)


def _agreeing(
    reports: Sequence[PlanReport],
    placed_in: Callable[[int], Mapping[int, Mapping[str, str]]],
    source: str,
    accumulated: Accumulated,
) -> PlanReport:
    """Join the processes' reports, if these agree in all shared facts.

    Args:
        placed_in: returns what strategies place on the target ranks of a stage.

    Raises a ReshardError if the run is refused.
    """
    require_one_checkpoint(fact for report in reports for fact in report.shared_facts)
    for stage in differing_stages(held for report in reports for held in report.held):
        of_stage = placed_in(stage)
        require_same_names(of_stage, source)
        require_same_shapes(of_stage, source)
    joined = PlanReport().joined(reports)
    if joined.held and not joined.gradients and accumulated is not Accumulated.REFUSE:
        from reshard_mpi.planning.gradient_joining import note_on_none

        noted = Outcome(notes=(note_on_none(accumulated),))
        joined = joined._replace(outcome=joined.outcome.joined([noted]))
    return joined


def _check_sources(plans: TargetPlans, sizes: Mapping[int, int], to_read: Collection[int]) -> dict[int, ReshardError]:
    """Return, by rank, the errors of this process's share of the source shards that do not fit their own sums (step 2).

    Args:
        sizes: of all shards to check, in bytes by rank.
        to_read: the ranks whose tensors are summed; of others, all else is checked.
    """
    from reshard_mpi.runs.check_sums import damage_of

    planner, progress = plans.run.planner, plans.progress
    source, purpose = planner.source, f"checking {plans.run.request.source}"
    before_sums = partial(plans.memory.reserve_for_checking, source.files.format, purpose)
    mine = dict(list(sizes.items())[plans.comm.rank :: plans.comm.size])
    all_bytes, own_bytes = (sum(of[rank] for rank in of if rank in to_read) for of in (sizes, mine))
    progress.begin(ProgressStage("checking sources", all_bytes, len(sizes), "shard"), own_bytes)
    errors: dict[int, ReshardError] = {}
    for rank, size_bytes in mine.items():
        is_read = rank in to_read
        error = damage_of(source, rank, size_bytes, before_sums, progress, is_read=is_read)
        if error is not None:
            errors[rank] = error
        progress.completed()
    return errors


def _check_committed(plans: TargetPlans) -> None:
    """Check this process's share of the source's whole tensors against the sums in their commit (step 2).

    Nothing is read if each shard has a record with sums, by which it has been checked. Raises ShardError.
    """
    from reshard_mpi.runs.check_commit import (
        changed_since_commit,
        committed_tensors,
        damage_of_indexes,
        require_as_committed_besides,
    )

    source, path, comm = plans.run.planner.source, plans.run.request.source, plans.comm
    for damage in damage_of_indexes(source.files):
        raise damage
    commit = plans.run.source_commit
    if commit is None:
        return
    require_as_committed_besides(source.files, [*commit.besides.items()][comm.rank :: comm.size])
    needed = committed_tensors(commit, source, plans.run.planner.needs)
    mine = needed[comm.rank :: comm.size]
    size_bytes, own_bytes = (sum(tensor.spec.size_bytes for tensor in of) for of in (needed, mine))
    plans.progress.begin(ProgressStage("checking sources", size_bytes), own_bytes)
    plans.memory.reserve_peak(plans.memory.projection.gathering_bytes, f"checking {path}")
    for _, error in changed_since_commit(commit, mine, path, plans.progress.moved):
        raise error


def compare_within_source(plans: TargetPlans, planned: PlanReport) -> Outcome:
    """Compare replicas that must be the same; return the outcome of planning with what that shows (step 3)."""
    request, comm = plans.run.request, plans.comm
    compared: Sequence[ComparisonReport] = ()
    if planned.to_compare or request.replicas is not Replicas.ANY:
        mine = list(partition_for(planned.to_compare, comm.rank, comm.size))
        if planned.to_compare:
            size_bytes, own_bytes = (sum(alike.size_bytes for alike in groups) for groups in (planned.to_compare, mine))
            plans.progress.begin(ProgressStage("comparing copies", size_bytes), own_bytes)
        compared = together(comm, partial(_compare, plans, planned, mine))
    mapped = plans.run.planner.mapped
    if mapped is not None and request.replicas is not Replicas.ANY and _compares_parts(mapped):
        _compare_parts(mapped, plans)
    return _judged(planned, compared, request.source, strict=request.strict)


def _compare(plans: TargetPlans, planned: PlanReport, mine: Sequence[ReplicaGroup]) -> ComparisonReport:
    """Compare the replicas `mine`, and this process's share of a sample."""
    run, request, comm, memory = plans.run, plans.run.request, plans.comm, plans.memory
    planner, purpose = run.planner, f"copies in {request.source}"
    lost: tuple[UnusableShard, ...] = ()
    projection = memory.reserve_for_planning(run.workload, purpose)
    if mine:
        memory.reserve_peak(projection.base_bytes + comparing_bytes(planner.limits), purpose)
        counted = SliceCounter(plans.progress.moved, sum(alike.size_bytes for alike in mine))
        lost = compare(planner.source, mine, planner.limits, counted.add)
        counted.end()
    planner.require_one_of_stages(planned.all_differing)
    findings = planner.sample_findings(damaged_are_replaced=request.verify, process=comm.rank, processes=comm.size)
    return ComparisonReport(lost, findings)


def _compares_parts(mapped: MappedCheckpoint) -> bool:
    """Tell whether parts are compared: targets are packed, or no reader of a format that packs has looked at some."""
    return mapped.has_files or not formats.info(mapped.files.format).packs


def _compare_parts(mapped: MappedCheckpoint, plans: TargetPlans) -> None:
    """Compare parts of tensors that the source has twice and that targets have once (step 3)."""
    memory, progress = plans.memory, plans.progress
    files = [rank for rank in plans.own.leads if rank in plans.to_write]
    own_bytes = mapped.compared_bytes(files)
    size_bytes = sum(together(plans.comm, lambda: own_bytes))
    if size_bytes:
        progress.begin(ProgressStage("comparing weights", size_bytes), own_bytes)

    def compare_own() -> None:
        if own_bytes:
            memory.reserve_peak(memory.projection.gathering_bytes, f"comparing in {plans.run.request.source}")
        counted = SliceCounter(progress.moved, own_bytes)
        mapped.require_same_parts(files, counted.add)
        counted.end()

    together(plans.comm, compare_own)


def _begin(plans: TargetPlans) -> None:
    """Make the target folder ready, if this process has anything to write (step 4)."""
    if not plans.to_write:
        return
    # A process alone asks for all that it will need: once something is written it cannot start over.
    if plans.comm.size == 1:
        plans.memory.reserve_peak(max(plans.peak_bytes.values()), f"targets of {plans.run.request.target}")
    plans.memory.lease().forbid_starting_over()
    plans.journal.begin(plans.progress.display.say)


def _commit(plans: TargetPlans, outcome: Outcome) -> Outcome:
    """Commit the targets if all of the run are complete now; return an outcome with remarks on that (step 6).

    Args:
        outcome: of all processes.
    """
    remarks = plans.journal.commit_if_complete(
        {target.rank for target in outcome.targets},
        any_written=any(not target.skipped for target in outcome.targets),
        any_failed=bool(outcome.failures),
        already_told=(*outcome.notes, *outcome.other_warnings),
    )
    return Outcome(notes=remarks.notes, other_warnings=remarks.warnings)


def _judged(planned: PlanReport, compared: Sequence[ComparisonReport], source: str, *, strict: bool) -> Outcome:
    """Return the outcome of planning, with messages on replicas that differ. Raises DisagreementError if `strict`."""
    findings = reduce(SampleFindings.joined, (report.findings for report in compared), NOTHING_FOUND)
    if strict:
        require_no_drift(findings.drifted, source)
    lost = (Outcome(lost=report.lost) for report in compared)
    drifted = Outcome(other_warnings=(drift_warning(findings.drifted),) if findings.drifted else ())
    outcome = planned.outcome.joined([*lost, drifted])
    differing = (*planned.all_differing, *findings.unlisted)
    if not differing:
        return outcome
    remarks = difference_messages(differing, source, strict=strict)
    return outcome.joined([Outcome(notes=remarks.notes, other_warnings=remarks.warnings)])


def plan_alone(planner: Planner, targets: Iterable[int], notes: tuple[str, ...] = ()) -> tuple[list[RankPlan], Outcome]:
    """Do steps 1 and 3 in one process, without a run: return the plans of targets, and an outcome with remarks on them.

    Args:
        notes: further notes for the outcome.

    Raises a ReshardError if a run would be refused.
    """
    plans = [planner.plan(rank) for rank in targets]
    path = planner.source.files.path

    def placed_in(stage: int) -> dict[int, dict[str, str]]:
        return {plan.target_rank: plan.placed for plan in plans if plan.stage == stage}

    begun = PlanReport(Outcome.begun(planner, notes))
    planned = _agreeing([begun, *map(PlanReport.of, plans)], placed_in, path, planner.policy.accumulated)
    lost = compare(planner.source, partition_for(planned.to_compare, 0, 1), planner.limits, lambda _: None)
    planner.require_one_of_stages(planned.all_differing)
    compared = ComparisonReport(lost, planner.sample_findings())
    return plans, _judged(planned, [compared], path, strict=planner.policy.strict)
