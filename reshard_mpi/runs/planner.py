"""Plan a process's targets and check the source: the first phase (`Planner`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from reshard_mpi import formats
from reshard_mpi.checkpoints.comparison import compare, comparing_bytes
from reshard_mpi.checkpoints.opening import moments_of
from reshard_mpi.checkpoints.source import LEFT_OUT
from reshard_mpi.errors import CoverageError, DisagreementError, ReshardError, ShardError, TransformError
from reshard_mpi.errors import told as error_told
from reshard_mpi.journal.commit import EarlierTarget, commit_if_complete
from reshard_mpi.journal.provenance import FirstLooks, Sources
from reshard_mpi.journal.records import TargetInputs
from reshard_mpi.journal.targets import Journal
from reshard_mpi.planning.losses import UnusableShard
from reshard_mpi.planning.model import RankPlan, SharedFact
from reshard_mpi.planning.replicas import ReplicaGroup
from reshard_mpi.planning.summary import RankSummary, ShownRule
from reshard_mpi.processes.comm import Comm
from reshard_mpi.runs.memory import RunMemory, checking_bytes
from reshard_mpi.runs.messages import ComparisonReport, PlanReport, Totals, record_of
from reshard_mpi.runs.outcome import Outcome, TargetReport, attempt
from reshard_mpi.runs.overlap import refuse_removing
from reshard_mpi.runs.preflight import (
    SpaceEstimate,
    SpaceNeed,
    lying_beside,
    may_share,
    require_countable,
    require_no_strangers,
    require_readable_structure,
    require_readable_types,
    require_short_names,
    stranger_notes,
)
from reshard_mpi.runs.progress import Progress, SliceCounter, Stage
from reshard_mpi.runs.request import Request, Strategies
from reshard_mpi.runs.run import Run
from reshard_mpi.runs.scheduling import Assignment, PendingTargets, divide, target_weights
from reshard_mpi.runs.write import Writer
from reshard_mpi.sharding.placement import Shape

if TYPE_CHECKING:
    from reshard_mpi.journal.targets import Unrecorded
    from reshard_mpi.runs.verify_checksums import Summing

_NOT_VERIFIED = (
    "targets that were complete already were not verified when they were made: reshard-mpi verify SRC DST does it now"
)


class _PlanningState(NamedTuple):
    """What planning has opened: the run, its journal, the work of each process, and the targets this one writes."""

    run: Run
    journal: Journal | Unrecorded
    works: list[Assignment]
    due: PendingTargets
    choice: tuple[SharedFact, ...]  # which of several checkpoints the source is


class Planner:
    """Plans what one process of a run is going to write; nothing is written before `begin`."""

    def __init__(
        self,
        request: Request,
        comm: Comm,
        strategies: Strategies | None,
        memory: RunMemory,
        progress: Progress,
        known_damage: Mapping[int, ReshardError],
        *,
        lists_tensors: bool = False,
    ) -> None:
        self.source = request.source
        self.accumulated = request.accumulated
        self.summaries: list[RankSummary] = []
        self.listed: dict[str, TargetTensor] = {}
        self._lists_tensors = lists_tensors
        self._listed_stages: set[int] = set()
        self.outcome = Outcome()
        self._request = request
        self._strategies = strategies
        self._known_damage = known_damage
        self._memory = memory
        self._progress = progress
        self._comm = comm
        self._opened: _PlanningState | None = None
        self._first_looks = FirstLooks(request.source)
        self._needs = SpaceEstimate(request)
        self._placed: dict[str, tuple[int, int, dict[str, str]]] = {}
        self._due_bytes: dict[int, int] = {}

    def plan(self) -> PlanReport | Outcome:
        """Plan this process's part of the targets. A failure in the result refuses the run."""
        return attempt(self._planned, self._comm)

    def _planned(self) -> PlanReport:
        request = self._request
        governor = self._memory.open()
        files = (request.src_strategy, request.dst_strategy) if self._strategies is None else ()
        self._memory.reserve_for_reading(files, self._purpose)
        before_shards = partial(self._memory.reserve_for_reading, files, self._purpose)
        before_filling = partial(self._memory.reserve_for_planning, purpose=self._purpose, verify=request.verify)
        run = Run.open(request, self._strategies, self._known_damage, before_shards, before_filling)
        due = PendingTargets(run.conversion, request.source)
        self._memory.on_memory_released(run.conversion.forget, due.forget_plans)
        targets = len(run.targets)
        self._memory.reserve_for_planning(
            run.conversion, run.format, self._purpose, targets=targets, verify=request.verify
        )
        run.conversion.require_fitting_strategies()
        journal = run.journal()
        for rank in run.targets[-1:]:  # the one with the longest number
            require_short_names(journal.paths(rank, run.path(rank)))
        journal.check()
        works = divide(target_weights(run.conversion, run.targets), self._comm.hosts)
        opened = self._opened = _PlanningState(run, journal, works, due, moments_of(run.conversion.source.files))
        work = works[self._comm.rank]
        ranks = (*((rank, True) for rank in work.leads), *((rank, False) for rank in work.assists))
        planned_ranks = sum(len(each.leads) + len(each.assists) for each in works)
        self._progress.begin(Stage("planning", units=planned_ranks, unit="rank"))
        plans = []
        for rank, leads in ranks:
            plans.append(attempt(partial(self._plan_target, opened, rank, leads), self._comm, rank))
            self._progress.completed()
        rooms = self._rooms(run)
        own_paths = [run.path(rank) for rank in work.leads]
        folder, every_path = Path(request.target), map(run.path, range(run.conversion.target.world_size))
        strange: tuple[str, ...] = ()
        if request.recorded:
            removed = journal.leftovers()
            refuse_removing(run.conversion.source.files, folder, removed)
            require_no_strangers(folder, run.format, every_path, own_paths, removed)
        else:
            index = formats.index_of(run.format)
            strange = stranger_notes(lying_beside(folder, run.format, index, every_path, own_paths))
        begun = Outcome.begun(run.conversion, (*governor.notes, *run.target_notes, *strange))
        planned = PlanReport(begun, opened.choice).joined(record_of(PlanReport, plan) for plan in plans)
        self.outcome = planned.outcome
        return planned._replace(rooms=rooms, due=Totals(self.led_bytes, len(self.summaries), len(self.outcome.targets)))

    @property
    def _purpose(self) -> str:
        return f"planning {self._request.target} from {self.source}"

    def compare(self, mine: Sequence[ReplicaGroup], progress: Progress) -> ComparisonReport | Outcome:
        """Compare the copies `mine`, and this process's share of a sample. A failure refuses the run."""
        return attempt(partial(self._compared, mine, progress), self._comm)

    def _compared(self, mine: Sequence[ReplicaGroup], progress: Progress) -> ComparisonReport:
        opened = self._require_opened()
        conversion = opened.run.conversion
        lost: tuple[UnusableShard, ...] = ()
        projection = self._memory.reserve_for_planning(
            conversion,
            opened.run.format,
            f"copies in {self.source}",
            targets=len(opened.run.targets),
            verify=self._request.verify,
        )
        if mine:
            peak_bytes = projection.base_bytes + comparing_bytes(conversion.limits)
            self._memory.reserve_for_copying(peak_bytes, f"copies in {self.source}")
            counted = SliceCounter(progress.moved, sum(alike.size_bytes for alike in mine))
            lost = compare(conversion.source.unmapped, mine, conversion.limits, counted.add)
            counted.end()
        drift = conversion.drifted_tensors(
            damaged_are_replaced=self._request.verify, process=self._comm.rank, processes=self._comm.size
        )
        return ComparisonReport(Outcome(lost=lost), *drift)

    def shown_rules(self) -> tuple[ShownRule, ...]:
        """Return the effects of the rules of the source's spec on its tensors."""
        planned_rank = self.summaries[0].rank if self.summaries else None
        return self._require_opened().run.conversion.shown_rules(planned_rank)

    def origins(self) -> dict[str, str]:
        """Return the map's derived tensors by name, with their sources; empty without a map."""
        return dict(self._require_opened().run.conversion.source.origins(self._request.accumulated))

    @property
    def led_bytes(self) -> int:
        """How many bytes the targets hold together that this process begins and completes."""
        return sum(self._due_bytes.get(rank, 0) for rank in self._own_work.leads)

    @property
    def own_bytes(self) -> int:
        """About how many bytes of targets this process is to write, alone and with others."""
        alone = sum(self._due_bytes.get(rank, 0) for rank in self._own_work.whole)
        shares = self._own_work.shares
        return alone + sum(share.bytes_of(self._due_bytes.get(share.target, 0)) for share in shares)

    @property
    def _own_work(self) -> Assignment:
        return self._require_opened().works[self._comm.rank]

    @property
    def described_source(self) -> str:
        """The source in one line of words."""
        return self._require_opened().run.conversion.source.summary_text

    def read_bytes(self) -> dict[int, int]:
        """Return the source ranks that this process's targets are taken from, each with the size of its files."""
        opened = self._require_opened()
        files = opened.run.conversion.source.files
        ranks = {rank for target in opened.due.evidence.values() for rank in target.read_ranks}
        there = {rank: [path for path in files.by_rank[rank] if Path(path).exists()] for rank in ranks}
        return {
            rank: sum(file.size_bytes for file in self._first_looks.sources(paths).files)
            for rank, paths in there.items()
        }

    def check_sources(self, sizes: Mapping[int, int], progress: Progress) -> dict[int, ReshardError] | Outcome:
        """Return, by rank, the errors of those source shards that do not fit their own checksums. sizes: by rank."""
        from reshard_mpi.runs.verify_checksums import damage_of

        conversion = self._require_opened().run.conversion
        before_sums = partial(self._before_sums, conversion.source.files.format)
        errors: dict[int, ReshardError] = {}

        def check() -> dict[int, ReshardError]:
            for rank, size_bytes in sizes.items():
                error = damage_of(
                    conversion.source.unmapped, rank, size_bytes, conversion.limits, before_sums, progress
                )
                if error is not None:
                    errors[rank] = error
                progress.completed()
            return errors

        return attempt(check, self._comm)

    def check_committed(self, progress: Progress) -> Outcome:
        """Check this process's share of the source's whole tensors against the sums in their commit.

        A failure refuses the run. Nothing is read if each shard has sums of its own, by which it has been checked.
        """
        from reshard_mpi.runs.verify_checksums import committed_tensors, require_as_committed

        def check() -> Outcome:
            source = self._require_opened().run.conversion.source
            limits = self._require_opened().run.conversion.limits
            committed = committed_tensors(source.unmapped)
            if committed is not None:
                record, tensors = committed
                needed = [tensor for tensor in tensors if source.needs(tensor.spec.name)]
                mine = needed[self._comm.rank :: self._comm.size]
                size_bytes, own_bytes = (sum(tensor.spec.size_bytes for tensor in of) for of in (needed, mine))
                progress.begin(Stage("checking sources", size_bytes), own_bytes)
                self._memory.reserve_for_copying(self._memory.projection.gathering_bytes, f"checking {self.source}")
                require_as_committed(record, mine, self.source, limits, progress.moved)
            return Outcome()

        return attempt(check, self._comm)

    def _before_sums(self, format_name: str, summing: Summing) -> None:
        peak_bytes = max(self._memory.projection.gathering_bytes, checking_bytes(format_name, summing))
        self._memory.reserve_for_copying(peak_bytes, f"checking {self.source}")

    def begin(self, progress: Progress) -> Outcome:
        """Make the target folder ready if this process has anything to write. A failure refuses the run."""
        return attempt(partial(self._begun, progress), self._comm)

    def _begun(self, progress: Progress) -> Outcome:
        opened = self._require_opened()
        if opened.due.evidence:
            # A process alone asks for all that it will need: once something is written it cannot start over.
            if self._comm.size == 1:
                self._memory.reserve_for_copying(
                    max(opened.due.peak_bytes.values()), f"targets of {self._request.target}"
                )
            self._memory.forbid_starting_over()
            opened.journal.begin(progress.say)
        return Outcome()

    def writer(self, progress: Progress) -> Writer:
        """Return the writer of what has been planned."""
        run, journal, works, due, _ = self._require_opened()
        return Writer(run, journal, works, self._comm, due, self._memory, progress)

    def commit(self, outcome: Outcome) -> Outcome:
        """Commit the targets if all of the run are complete now; return notes and failures of that.

        Args:
            outcome: the outcome of all processes.
        """
        return attempt(lambda: self._commit(outcome), self._comm)

    def placed(self, stage: int) -> dict[int, dict[str, str]]:
        """Return what strategies place on target ranks of `stage` (see `RankPlan.placed`); of equal ranks, only one."""
        return {rank: placed for of_stage, rank, placed in self._placed.values() if of_stage == stage}

    def _plan_target(self, opened: _PlanningState, rank: int, leads: bool) -> PlanReport:
        run, path = opened.run, opened.run.path(rank)
        if opened.journal.is_done(rank, path):
            return PlanReport(self._skipped(opened, rank) if leads else Outcome())
        plan = run.conversion.plan(rank, checked=leads)
        peak_bytes = self._memory.require_possible(plan)
        evidence = TargetInputs.of(plan, self._sources(run, plan), opened.choice)
        if self._earlier_target is not None:
            self._earlier_target.require_same_state(rank, evidence.sources)
        if leads:
            as_is = run.conversion.original is None and run.conversion.source.files.format == run.format
            require_readable_types(plan.tensors.specs, run.format, as_is=as_is)
            require_readable_structure(plan.shard, run.format)
            if self._request.crc and formats.by_name(run.format).TRAITS.crc_counts_scalars:
                require_countable(run.conversion, plan)
            self._needs.add(plan, evidence, run.format, path, opened.journal.left_bytes(path))
        opened.due.add(plan, evidence, peak_bytes)
        self._due_bytes[rank] = plan.written_bytes
        if not leads:
            return PlanReport()
        self.summaries.append(RankSummary.of(plan, peak_bytes))
        self._list_tensors(run, plan)
        if evidence.held.digest not in self._placed:
            self._placed[evidence.held.digest] = (plan.stage, rank, plan.placed)
        return PlanReport.of(plan)

    @cached_property
    def _earlier_target(self) -> EarlierTarget | None:
        """A complete target of this run, if others are to be made of the same state of the source beside it."""
        journal = self._require_opened().journal
        if self._comm.rank > 0 or self._request.overwrite or not isinstance(journal, Journal):
            return None
        return EarlierTarget.of(journal.folder, journal.identity)

    def _list_tensors(self, run: Run, plan: RankPlan) -> None:
        """Keep the listing of a target's tensors; targets of a stage have the same, unless they share them out."""
        are_shared_out = run.conversion.once or formats.by_name(run.format).TRAITS.split_by_size
        if self._lists_tensors and (are_shared_out or plan.stage not in self._listed_stages):
            self._listed_stages.add(plan.stage)
            for name, tensor in listed_tensors(plan).items():
                self.listed.setdefault(name, tensor)

    def _sources(self, run: Run, plan: RankPlan) -> Sources:
        """Return the source files of `plan`, each as it was when this run first looked at it.

        Of a folder with an index those that are there: for one that is missing others may hold the same.
        """
        files = run.conversion.source.files
        paths = (path for source_rank in plan.read_ranks for path in files.by_rank[source_rank])
        return self._first_looks.sources(path for path in paths if not files.is_folder or Path(path).exists())

    def _rooms(self, run: Run) -> tuple[SpaceNeed, ...]:
        """Return the room that this process needs."""

        def shares() -> bool:
            return may_share(run.conversion.source.files, run.format, run.path(run.targets[0]))

        reported = len(run.targets) if self._comm.rank == 0 else 0
        strategy = run.conversion.target if self._comm.rank == 0 and run.records_strategy else None
        return self._needs.rooms(reported, self._comm.size, shares, strategy)

    def _commit(self, outcome: Outcome) -> Outcome:
        run, journal, *_ = self._require_opened()
        if not isinstance(journal, Journal):
            return Outcome()
        made_ranks = {target.rank for target in outcome.targets}
        any_written = any(not target.skipped for target in outcome.targets)
        try:
            remarks = commit_if_complete(
                journal.folder,
                journal.identity,
                made_here=made_ranks,
                any_written=any_written,
                already_told=(*outcome.notes, *outcome.other_warnings),
            )
            return Outcome(notes=remarks.notes, other_warnings=remarks.warnings)
        except (CoverageError, DisagreementError) as error:
            if len(made_ranks) == run.conversion.target.world_size or not self._request.overwrite:
                raise
            note = f"not committed yet, as targets that are still to be replaced may be why: {error.problem}"
            return Outcome(notes=(note,))
        except (OSError, ShardError) as error:  # a ShardError is about a target, which the index is made of
            raise TransformError(
                "the targets are complete, but the commit record could not be written",
                got=str(error) if isinstance(error, OSError) else error_told(error),
                where=str(journal.folder),
                remedy="mend the cause, then reshard-mpi commit",
            ) from error

    def _skipped(self, opened: _PlanningState, rank: int) -> Outcome:
        path = opened.run.path(rank)
        unverified = self._request.verify and not opened.journal.is_verified(rank)
        report = TargetReport(rank, str(path), (), path.stat().st_size, process=self._comm.rank, skipped=True)
        return Outcome((report,), notes=(_NOT_VERIFIED,) if unverified else ())

    def _require_opened(self) -> _PlanningState:
        if self._opened is None:
            raise RuntimeError("a run is begun and written after it has been planned")
        return self._opened


class TargetTensor(NamedTuple):
    """A tensor of a target. dtype: name of its type. shape: of the whole; piece: of what target `rank` holds of it."""

    dtype: str
    shape: Shape
    piece: Shape
    rank: int


def listed_tensors(plan: RankPlan) -> dict[str, TargetTensor]:
    """Return the tensors of a target by name, in file order."""
    names, kinds, kind_of = plan.tensors.specs.names, plan.tensors.specs.kinds, plan.tensors.specs.kind_ids
    rank = plan.target_rank
    listed = [TargetTensor(kind.dtype.name, kind.global_shape, kind.box.shape, rank) for kind in kinds]
    return {name: listed[number] for name, number in zip(names, kind_of)}


def tensor_lines(shares: Iterable[Mapping[str, TargetTensor]], origins: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each tensor of the targets; then one for each that is left out.

    Args:
        shares: the tensors that each process has met.
        origins: by name, what a map makes of tensors and makes them of.
    """
    tensors: dict[str, TargetTensor] = {}
    for share in shares:
        for name, tensor in share.items():
            tensors.setdefault(name, tensor)
    for name, tensor in tensors.items():
        piece = "" if tensor.piece == tensor.shape else f", on rank {tensor.rank} {list(tensor.piece)}"
        origin = f": {origins[name]}" if name in origins else ""
        yield f"{name} {tensor.dtype} {list(tensor.shape)}{piece}{origin}"
    yield from (f"{name}: {LEFT_OUT}" for name, origin in origins.items() if name not in tensors and origin == LEFT_OUT)
