"""A run: which process makes which target, and what happens when one of them cannot.

Every process of a run executes `convert` (alone, as MPI rank, or as local worker): it plans its targets, learns
whether any process found a reason to refuse, and only then writes. Errors are caught target by target and gathered,
so the outcome is the same on every process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from reshard_mpi.checkpoints.comparison import compare, comparing_bytes
from reshard_mpi.errors import (
    CoverageError,
    DisagreementError,
    ReshardError,
    ShardError,
    TransformError,
    as_reshard_error,
)
from reshard_mpi.journal.commit import commit_if_complete
from reshard_mpi.journal.provenance import SourceFile, Sources
from reshard_mpi.journal.records import Evidence
from reshard_mpi.journal.targets import Journal, Unrecorded
from reshard_mpi.planning.agreement import (
    differing_beginnings,
    differing_stages,
    require_one_moment,
    require_same_names,
    require_same_shapes,
)
from reshard_mpi.planning.copies import Alike, dealt
from reshard_mpi.planning.fit import drift_warning, require_no_drift
from reshard_mpi.planning.losses import Lost, named, warnings_of
from reshard_mpi.planning.model import RankPlan
from reshard_mpi.planning.replicas import Replicas
from reshard_mpi.planning.summary import Plan, RankSummary
from reshard_mpi.processes.comm import Comm
from reshard_mpi.runs.bookkeeping import Needs
from reshard_mpi.runs.division import Work, divide
from reshard_mpi.runs.memory import RunMemory
from reshard_mpi.runs.outcome import Compared, Failure, Outcome, Planned, TargetReport, attempt, record_of
from reshard_mpi.runs.preflight import Room, may_share, require_room, require_short_names, stranger_notes
from reshard_mpi.runs.prepared import Run
from reshard_mpi.runs.progress import Plain, Progress, Silent
from reshard_mpi.runs.projection import MAX_KEPT_PLANS, MAX_KEPT_PLANS_BYTES
from reshard_mpi.runs.request import Request, Strategies

from reshard_mpi import formats
from reshard_mpi.runs.write import Plans, Writer

T = TypeVar("T")

_NOT_VERIFIED = (
    "targets that were complete already were not verified when they were made: reshard-mpi verify SRC DST does it now"
)


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
    return Plan(tuple(sorted(targets, key=lambda target: target.rank))), planned


def _planned(
    request: Request, comm: Comm, progress: Progress, strategies: Strategies | None, memory: RunMemory
) -> tuple[_Planner, Outcome]:
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
) -> tuple[_Planner, Planned]:
    """Have every process plan its targets, to verify from shards that fit the checksums they have of their own.

    Shards that do not are lost, so what they hold is planned from others; raises, as `_plan_together` does, if no
    other has it. Returns what has planned, and what is to be said of the plans.
    """
    checked: set[int] = set()
    damage: dict[int, ReshardError] = {}
    while True:
        planner = _Planner(request, comm, strategies, damage, memory)
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


def _plan_together(planner: _Planner, comm: Comm) -> Planned:
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


class _Opened(NamedTuple):
    """What planning begins with: the run, its journal, and the work of every process."""

    run: Run
    journal: Journal | Unrecorded
    works: list[Work]


class _Planner:
    """The first phase of a run in one process: what it will write is planned and nothing is written yet."""

    def __init__(
        self,
        request: Request,
        comm: Comm,
        strategies: Strategies | None,
        known_damage: Mapping[int, ReshardError],
        memory: RunMemory,
    ) -> None:
        self.source = request.source
        self.summaries: list[RankSummary] = []
        self.outcome = Outcome()
        self._request = request
        self._strategies = strategies
        self._known_damage = known_damage
        self._memory = memory
        self._comm = comm
        self._opened: _Opened | None = None
        self._due: dict[int, Evidence] = {}
        self._peak_bytes: dict[int, int] = {}
        self._seen: dict[str, SourceFile] = {}
        self._needs = Needs(request)
        self._plans: dict[int, RankPlan] = {}
        self._kept_bytes = 0
        self._placed: dict[str, tuple[int, int, dict[str, str]]] = {}

    def plan(self) -> Planned | Outcome:
        """Plan this process's part of the targets; failures in what it returns refuse the run."""
        return attempt(self._planned, self._comm)

    def _planned(self) -> Planned:
        request = self._request
        governor = self._memory.open()
        files = (request.src_strategy, request.dst_strategy) if self._strategies is None else ()
        self._memory.to_open(files, self._purpose)
        before_shards = partial(self._memory.to_open, files, self._purpose)
        run = Run.open(request, self._strategies, self._known_damage, before_shards)
        self._memory.on_giving_way(run.conversion.forget, self._forget)
        targets = len(run.targets)
        self._memory.to_plan(run.conversion, run.format, self._purpose, targets=targets, verify=request.verify)
        run.conversion.require_fitting_strategies()
        journal = run.journal()
        for rank in run.targets[-1:]:  # whose number is the longest
            require_short_names(journal.paths(rank, run.path(rank)))
        journal.check()
        works = divide(run.conversion.target_weights(run.targets), self._comm.hosts)
        opened = self._opened = _Opened(run, journal, works)
        work = works[self._comm.rank]
        ranks = (*((rank, True) for rank in work.leads), *((rank, False) for rank in work.helps))
        plans = [attempt(partial(self._plan_target, opened, rank, leads), self._comm, rank) for rank, leads in ranks]
        rooms, together = self._rooms(run), formats.folder_by_name(run.format) is not None
        strange = () if together else stranger_notes(map(run.path, work.leads))
        source = run.conversion.source
        notes = (*run.conversion.notes, *governor.notes, *strange)
        begun = Outcome(notes=notes, other_warnings=source.files.warnings, missing=source.missing)
        planned = Planned(begun).joined(record_of(Planned, plan) for plan in plans)
        self.outcome = planned.outcome
        return planned._replace(rooms=rooms)

    @property
    def _purpose(self) -> str:
        return f"planning {self._request.target} from {self.source}"

    def _forget(self) -> None:
        """Let go of the plans; they are made again when they are needed."""
        self._plans.clear()
        self._kept_bytes = 0

    def compare(self, every: Sequence[Alike]) -> Compared | Outcome:
        """Compare this process's share of the copies that must be the same, and of a sample; refuse what differs."""
        return attempt(partial(self._compared, every), self._comm)

    def _compared(self, every: Sequence[Alike]) -> Compared:
        opened = self._require_opened()
        conversion = opened.run.conversion
        mine = list(dealt(every, self._comm.rank, self._comm.size))
        lost: tuple[Lost, ...] = ()
        projection = self._memory.to_plan(
            conversion,
            opened.run.format,
            f"copies in {self.source}",
            targets=len(opened.run.targets),
            verify=self._request.verify,
        )
        if mine:
            peak_bytes = projection.base_bytes + comparing_bytes(conversion.limits)
            self._memory.to_move(peak_bytes, f"copies in {self.source}")
            lost = compare(conversion.source, mine, conversion.limits)
        drifted = conversion.drifted_tensors(
            damaged_are_replaced=self._request.verify, process=self._comm.rank, processes=self._comm.size
        )
        return Compared(Outcome(lost=lost), drifted)

    def shown_rules(self) -> tuple[str, ...]:
        """Return what rules of the source's spec make of its tensors, in words."""
        return self._require_opened().run.conversion.shown_rules()

    def read_ranks(self) -> set[int]:
        """Return the source ranks that this process's targets are taken from."""
        return {rank for evidence in self._due.values() for rank in evidence.read_ranks}

    def check_sources(self, ranks: Iterable[int]) -> dict[int, ReshardError] | Outcome:
        """Return what is wrong with those of the source shards that do not fit the checksum of their own."""
        source = self._require_opened().run.conversion.source
        try:
            found = [(rank, source.check_crc(rank)) for rank in ranks]
        except MemoryError as error:
            return Outcome(failures=(Failure.here(None, self._comm, as_reshard_error(error)),))
        return {rank: error for rank, error in found if error is not None}

    def begin(self, progress: Progress) -> Outcome:
        """Make the target folder ready, if this process has anything to write; failures refuse the run."""
        return attempt(partial(self._begun, progress), self._comm)

    def _begun(self, progress: Progress) -> Outcome:
        if self._due:
            # A process alone asks for all that it will need: once something is written it cannot start over.
            if self._comm.size == 1:
                self._memory.to_move(max(self._peak_bytes.values()), f"targets of {self._request.target}")
            self._memory.settle()
            self._require_opened().journal.begin(progress.waiting)
        return Outcome()

    def writer(self, progress: Progress) -> Writer:
        """Return what writes that has been planned."""
        opened = self._require_opened()
        plans = Plans(self._plan_of, self._peak_bytes, self._due)
        return Writer(opened.run, opened.journal, opened.works, self._comm, plans, self._memory, progress)

    def commit(self, made: Outcome) -> Outcome:
        """Commit what all processes have made, if that completes the run; return what is to be said of it."""
        return attempt(lambda: Outcome(notes=self._commit(made)), self._comm)

    def placed(self, stage: int) -> dict[int, dict[str, str]]:
        """Return what strategies place on the target ranks of `stage`; of ranks that have the same, one."""
        return {rank: placed for at, rank, placed in self._placed.values() if at == stage}

    def _plan_target(self, opened: _Opened, rank: int, leads: bool) -> Planned:
        run, path = opened.run, opened.run.path(rank)
        if opened.journal.is_done(rank, path):
            return Planned(self._skipped(opened, rank) if leads else Outcome())
        plan = run.conversion.plan(rank, checked=leads)
        peak_bytes = self._memory.require_possible(plan)
        evidence = Evidence.of(plan, self._sources(run, plan))
        if leads:
            self._needs.add(plan, evidence, run.format, path, opened.journal.left_bytes(path))
        self._due[rank], self._peak_bytes[rank] = evidence, peak_bytes
        self._keep(plan)
        if not leads:
            return Planned()
        self.summaries.append(RankSummary.of(plan, peak_bytes))
        if evidence.held.digest not in self._placed:
            self._placed[evidence.held.digest] = (plan.stage, rank, plan.placed)
        outcome = Outcome(absent=plan.absent, notes=plan.notes, lost=plan.lost, other_warnings=plan.warnings)
        return Planned(outcome, plan.moments, (evidence.held,), plan.beginnings, plan.alike)

    def _sources(self, run: Run, plan: RankPlan) -> Sources:
        """Look at the files that tensors of `plan` lie in; each is known by what it was at the first look."""
        by_rank = run.conversion.source.files.by_rank
        paths = [path for source_rank in plan.read_ranks for path in by_rank[source_rank]]
        return Sources.look(self._request.source, paths, self._seen)

    def _rooms(self, run: Run) -> tuple[Room, ...]:
        """Return the room that this process needs."""

        def shares() -> bool:
            return may_share(run.conversion.source.files, run.format, run.path(run.targets[0]))

        reported = len(run.targets) if self._comm.rank == 0 else 0
        return self._needs.rooms(reported, self._comm.size, shares)

    def _commit(self, made: Outcome) -> tuple[str, ...]:
        run, journal, *_ = self._require_opened()
        if not isinstance(journal, Journal):
            return ()
        all_made = len(made.targets) == run.conversion.target.world_size
        any_written = any(not target.skipped for target in made.targets)
        try:
            return commit_if_complete(
                journal.folder, journal.identity, all_made=all_made, any_written=any_written, told=made.notes
            )
        except (CoverageError, DisagreementError) as error:
            if all_made or not self._request.overwrite:
                raise
            return (f"not committed yet, as targets that are still to be replaced may be why: {error.problem}",)
        except OSError as error:
            raise TransformError(
                "the targets are complete, but the commit record could not be written",
                got=str(error),
                where=str(journal.folder),
                remedy="mend the cause, then reshard-mpi commit",
            ) from error

    def _keep(self, plan: RankPlan) -> None:
        """Keep a plan for when the target is written, if that takes little memory."""
        if len(self._plans) < MAX_KEPT_PLANS and self._kept_bytes + plan.kept_bytes <= MAX_KEPT_PLANS_BYTES:
            self._plans[plan.target_rank] = plan
            self._kept_bytes += plan.kept_bytes

    def _plan_of(self, rank: int) -> RankPlan:
        """Return a plan that has been kept, or make it again."""
        kept = self._plans.get(rank)
        if kept is not None:
            return kept
        plan = self._require_opened().run.conversion.plan(rank, checked=False)
        if plan.read_ranks != self._due[rank].read_ranks:
            raise ShardError(
                "source shards have changed since the run began",
                expected=f"target rank {rank} taken from {named(self._due[rank].read_ranks)}, as planned",
                got="; ".join(warnings_of(plan.lost)) or named(plan.read_ranks),
                where=self.source,
                remedy="restore the shards, or remove those that are damaged if others hold the same, and run the same"
                " command with --resume",
            )
        return plan

    def _skipped(self, opened: _Opened, rank: int) -> Outcome:
        path = opened.run.path(rank)
        unverified = self._request.verify and not opened.journal.is_verified(rank)
        report = TargetReport(
            rank=rank,
            path=str(path),
            read_ranks=(),
            written_bytes=path.stat().st_size,
            needed_bytes=0,
            requested_bytes=0,
            mapped_bytes=0,
            seconds=0.0,
            engine_seconds=0.0,
            waited_seconds=0.0,
            leased_bytes=0,
            process=self._comm.rank,
            processes=0,
            skipped=True,
        )
        return Outcome((report,), notes=(_NOT_VERIFIED,) if unverified else ())

    def _require_opened(self) -> _Opened:
        if self._opened is None:
            raise RuntimeError("a run is begun and written after it has been planned")
        return self._opened
