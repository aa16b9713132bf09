"""Plan the targets of one process of a run (`TargetPlans`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from reshard_mpi import formats
from reshard_mpi.checkpoints.opening import moments_of
from reshard_mpi.checkpoints.shard_files import strangers
from reshard_mpi.engine.open_files import Files
from reshard_mpi.engine.read import only_element, takes_numpy
from reshard_mpi.errors import ReshardError, ShardError, TargetError
from reshard_mpi.filesystem.paths import is_object_path
from reshard_mpi.filesystem.source_files import version_of
from reshard_mpi.formats.manifest import NotChecksummableError, ShardSpec, Specs, counted_bytes, is_in_crc
from reshard_mpi.formats.structure import MAX_KEPT_BYTES, MAX_TENSORS, kept_bytes, kept_kind_bytes
from reshard_mpi.journal.commit import EarlierTarget
from reshard_mpi.journal.provenance import TargetInputs
from reshard_mpi.journal.record_files import STATE, recorded_ranks
from reshard_mpi.journal.target_journal import Journal
from reshard_mpi.planning.rank_plan import RankPlan
from reshard_mpi.planning.source_flaws import between_targets, named, warnings_of
from reshard_mpi.runs.check_places import (
    SpaceEstimate,
    SpaceNeed,
    lying_beside,
    may_share,
    refuse_removing,
    require_no_strangers,
    require_short_names,
    stranger_notes,
)
from reshard_mpi.runs.open_run import Run, open_run
from reshard_mpi.runs.outcome import Outcome, TargetReport, attempt, merge, report_of
from reshard_mpi.runs.planner import Planner
from reshard_mpi.runs.process_memory import MAX_KEPT_PLANS, MAX_KEPT_PLANS_BYTES, RunProcess
from reshard_mpi.runs.progress import ProgressStage
from reshard_mpi.runs.scheduling import divide, target_weights

if TYPE_CHECKING:
    from reshard_mpi.planning.comparison_choice import ReplicaGroup
    from reshard_mpi.planning.rank_plan import AccumulatedGradients, SharedFact, StageDigest
    from reshard_mpi.planning.source_flaws import Differing, PrefixDigest
    from reshard_mpi.runs.recorded_runs import RecordedSums

OnPlanned = Callable[[Run, RankPlan, int], None]
# With more targets side by side, what is read ahead for them would not fit into memory.
_MOST_SIDE_BY_SIDE = 8
_NOT_VERIFIED = (
    "targets that were complete already were not verified when they were made: reshard-mpi verify SRC DST does it now"
)


class Totals(NamedTuple):
    """How much is to be written: payload bytes, and targets. ready: how many targets are complete already."""

    size_bytes: int = 0
    targets: int = 0
    ready: int = 0


class PlanReport(NamedTuple):
    """A process's plans, sent to all others before anything is written."""

    outcome: Outcome = Outcome()  # notes, warnings, and failures that refuse the run
    # shared_facts, held, prefix_digests: what targets must have in common (see `RankPlan`)
    shared_facts: tuple[SharedFact, ...] = ()
    held: tuple[StageDigest, ...] = ()
    prefix_digests: tuple[PrefixDigest, ...] = ()
    differing: tuple[Differing, ...] = ()  # what shards do not hold alike
    to_compare: tuple[ReplicaGroup, ...] = ()  # replicas that must be the same
    space_needs: tuple[SpaceNeed, ...] = ()
    due: Totals = Totals()  # what it leads the writing of
    gradients: tuple[AccumulatedGradients, ...] = ()  # the accumulated gradients of its targets

    @property
    def all_differing(self) -> tuple[Differing, ...]:
        """What shards do not hold alike, in one target or in several."""
        return (*self.differing, *(between_targets(self.prefix_digests) if self.prefix_digests else ()))

    @classmethod
    def of(cls, plan: RankPlan) -> PlanReport:
        """Return what there is to tell of the plan of one target."""
        held, differences = (plan.held,), (plan.prefix_digests, plan.differing, plan.to_compare)
        return cls(Outcome.of(plan), plan.shared_facts, held, *differences, gradients=plan.gradients)

    def joined(self, others: Iterable[PlanReport]) -> PlanReport:
        """Join this and the `others`; of digests of the same, the first is kept."""
        parts = [self, *others]
        merged = merge(parts)
        held = {(digest.stage, digest.digest): digest for digest in reversed(merged.held)}
        prefix_digests = {(digest.name, digest.digest): digest for digest in reversed(merged.prefix_digests)}
        return merged._replace(
            outcome=self.outcome.joined(part.outcome for part in parts[1:]),
            held=tuple(held.values()),
            prefix_digests=tuple(prefix_digests.values()),
            due=Totals(*map(sum, zip(*(part.due for part in parts)))),
        )


class TargetPlans:
    """The targets of one process of a run, planned. Nothing has been written.

    Attributes:
        run: what has been opened.
        comm, memory, progress: of all processes of the run, of this one, and its reports.
        journal: keeps the state of the run in the target folder.
        assignments: the work of each process of the run; own: that of this one.
        inputs: for each target to write, by rank, what its record says of its sources.
        peak_bytes: for each of them, the memory that writing it is projected to take.
        further_bytes: for each that reads short parts of objects, the memory that it adds when it is written beside
            others.
        unrecorded_ranks: source ranks from which its verified targets take more than tensors with recorded sums.
        report: what the other processes are told of the plans.
    """

    def __init__(self, run: Run, process: RunProcess, on_planned: OnPlanned) -> None:
        self.run = run
        _, self.comm, self.memory, self.progress, _ = process
        self.journal = run.make_journal()
        for rank in run.targets[-1:]:  # the one with the longest number
            require_short_names(self.journal.paths(rank, run.path(rank)))
        self.journal.check()
        self.assignments = divide(target_weights(run.planner, run.targets), run.hosts(self.comm))
        self.own = self.assignments[self.comm.rank]
        self.inputs: dict[int, TargetInputs] = {}
        self.peak_bytes: dict[int, int] = {}
        self.further_bytes: dict[int, int] = {}
        self.unrecorded_ranks: set[int] = set()
        self.report = PlanReport()
        self._choice = moments_of(run.planner.source.files)  # which of several checkpoints the source is
        self._space = SpaceEstimate()
        self._written_bytes: dict[int, int] = {}  # by target
        self._placed: dict[str, tuple[int, int, dict[str, str]]] = {}  # by digest: stage, rank, `RankPlan.placed`
        self._on_planned = on_planned
        self._kept: dict[int, RankPlan] = {}
        self._kept_bytes = 0

    @classmethod
    def make(
        cls,
        process: RunProcess,
        known_damage: Mapping[int, ReshardError],
        on_planned: OnPlanned = lambda run, plan, peak_bytes: None,
    ) -> TargetPlans:
        """Open the run and plan this process's targets. Failures of single targets are in the report.

        Args:
            known_damage: what is known to be wrong with source shards, by rank.
            on_planned: called for each target that this process leads, with the memory that writing it takes.

        Raises a ReshardError if the run cannot be opened, or its target folder not be used.
        """
        run = open_run(process, known_damage)
        plans = cls(run, process, on_planned)
        plans.memory.free_with(run.planner.forget, plans.forget)
        plans._plan_all()
        return plans

    @property
    def to_write(self) -> KeysView[int]:
        """The targets that are to be written: those planned that were not complete."""
        return self.inputs.keys()

    def _plan_all(self) -> None:
        ranks = (*((rank, True) for rank in self.own.leads), *((rank, False) for rank in self.own.assists))
        planned_ranks = sum(len(each.leads) + len(each.assists) for each in self.assignments)
        self.progress.begin(ProgressStage("planning", units=planned_ranks, unit="rank"))
        planned = []
        for rank, leads in ranks:
            planned.append(attempt(partial(self._plan_and_check, rank, leads), self.comm, rank))
            self.progress.completed()
        space = self._space_needs()
        beside = self._strangers()
        notes = (*self.memory.lease().governor.notes, *self.run.target_notes, *beside)
        begun = PlanReport(Outcome.begun(self.run.planner, notes), self._choice)
        joined = begun.joined(report_of(PlanReport, report) for report in planned)
        led = sum(rank in self.to_write for rank in self.own.leads)
        due = Totals(self.led_bytes, led, ready=len(joined.outcome.targets))
        self.report = joined._replace(space_needs=space, due=due)

    def _plan_and_check(self, rank: int, leads: bool) -> PlanReport:
        run, request, path = self.run, self.run.request, self.run.path(rank)
        if self.journal.skips(rank, path):
            return PlanReport(self._skipped(rank) if leads else Outcome())
        plan = run.planner.plan(rank, checked=leads)
        peak_bytes = self.memory.possible_peak_bytes(plan)
        inputs = TargetInputs.of(plan, run.planner.source.files.sources(plan.read_ranks), self._choice)
        if self._earlier_target is not None:
            self._earlier_target.require_same_state(rank, inputs.sources)
        if leads:
            as_is = run.planner.mapped is None and run.planner.source.files.format == run.format
            require_readable_types(plan.tensors.specs, run.format, as_is=as_is)
            require_readable_structure(plan.shard, run.format)
            if request.crc and formats.info(run.format).crc_counts_scalars:
                require_countable(run.planner, plan)
            shard, left_bytes = plan.shard._replace(with_sums=request.verify), self.journal.left_bytes(path)
            self._space.add(path, run.format, shard, crc=request.crc, left_bytes=left_bytes)
        self.inputs[rank], self.peak_bytes[rank] = inputs, peak_bytes
        if rank in self.own.whole and is_object_path(request.source):
            from reshard_mpi.engine.source_ranges import shares_blocks

            if shares_blocks(plan.tensors):
                self.further_bytes[rank] = self.memory.projection.further_bytes(plan)
        if request.verify:
            sums = self.recorded_sums
            self.unrecorded_ranks |= {*plan.read_ranks} if sums is None else sums.unknown_ranks(plan)
        self._keep(plan)
        self._written_bytes[rank] = plan.written_bytes
        if not leads:
            return PlanReport()
        self._on_planned(run, plan, peak_bytes)
        if inputs.held.digest not in self._placed:
            self._placed[inputs.held.digest] = (plan.stage, rank, plan.placed)
        return PlanReport.of(plan)

    def side_by_side(self) -> Iterator[list[int]]:
        """Yield the targets to write that this process makes alone, in groups that are each written side by side.

        A group is of targets that read short parts of the same objects, as many as memory allows. Any other target is
        a group by itself.
        """
        ceiling_bytes, alike = self.memory.lease().governor.ceiling_bytes, dict[tuple[int, ...], list[int]]()
        for rank in (rank for rank in self.own.whole if rank in self.to_write):
            if rank not in self.further_bytes:
                yield [rank]
                continue
            ranks = alike.setdefault(self.inputs[rank].read_ranks, [])
            is_full = len(ranks) == _MOST_SIDE_BY_SIDE or self.peak_bytes_of([*ranks, rank]) > ceiling_bytes
            if ranks and is_full:
                yield ranks.copy()
                ranks.clear()
            ranks.append(rank)
        yield from (ranks for ranks in alike.values() if ranks)

    def peak_bytes_of(self, ranks: Sequence[int]) -> int:
        """Return the memory that writing targets side by side is projected to take."""
        further_bytes = sum(self.further_bytes.get(rank, 0) for rank in ranks[1:])
        return max(self.peak_bytes[rank] for rank in ranks) + further_bytes

    def plan(self, rank: int) -> RankPlan:
        """Return the plan of a target to write: the one that was kept, or one made again.

        Raises ShardError if a plan made again would read other shards than before.
        """
        kept = self._kept.get(rank)
        if kept is not None:
            return kept
        plan, planned_ranks = self.run.planner.plan(rank, checked=False), self.inputs[rank].read_ranks
        if plan.read_ranks != planned_ranks:
            raise ShardError(
                "source shards have changed since the run began",
                expected=f"target rank {rank} taken from {named(planned_ranks)}, as planned",
                got="; ".join(warnings_of(plan.lost)) or named(plan.read_ranks),
                where=self.run.request.source,
                remedy="restore the shards, or remove those that are damaged if others hold the same, and run the same"
                " command with --resume",
            )
        return plan

    def _keep(self, plan: RankPlan) -> None:
        """Keep a plan if that takes little memory."""
        if len(self._kept) < MAX_KEPT_PLANS and self._kept_bytes + plan.kept_bytes <= MAX_KEPT_PLANS_BYTES:
            self._kept[plan.target_rank] = plan
            self._kept_bytes += plan.kept_bytes

    def forget(self) -> None:
        """Free the plans, and recorded sums; they are made and read again when they are needed."""
        self._kept.clear()
        self._kept_bytes = 0
        if self.recorded_sums is not None:
            self.recorded_sums.forget()

    @property
    def led_bytes(self) -> int:
        """How many bytes the targets hold together that this process begins and completes."""
        return sum(self._written_bytes.get(rank, 0) for rank in self.own.leads)

    @property
    def own_bytes(self) -> int:
        """About how many bytes of targets this process is to write, alone and with others."""
        alone = sum(self._written_bytes.get(rank, 0) for rank in self.own.whole)
        return alone + sum(each.bytes_of(self._written_bytes.get(each.target, 0)) for each in self.own.slices)

    def size_by_read_rank(self) -> dict[int, int]:
        """Return the source ranks that this process's targets are taken from, each with the size of its files."""
        files = self.run.planner.source.files
        ranks = {rank for inputs in self.inputs.values() for rank in inputs.read_ranks}
        return {rank: sum(file.size_bytes for file in files.sources([rank]).files) for rank in ranks}

    @cached_property
    def recorded_sums(self) -> RecordedSums | None:
        """The sums that records have of sources in an object store, if targets there are verified by them."""
        request, packs = self.run.request, formats.info(self.run.format).packs
        if packs or not (request.verify and is_object_path(request.source) and is_object_path(request.target)):
            return None
        from reshard_mpi.runs.recorded_runs import RecordedSums

        return RecordedSums(self.run.planner.source.files)

    def placed(self, stage: int) -> dict[int, dict[str, str]]:
        """Return what strategies place on target ranks of `stage` (see `RankPlan.placed`); of equal ranks, only one."""
        return {rank: placed for of_stage, rank, placed in self._placed.values() if of_stage == stage}

    @cached_property
    def _earlier_target(self) -> EarlierTarget | None:
        """A complete target of this run, if others are to be made of the same state of the source beside it."""
        if self.comm.rank > 0 or self.run.request.overwrite or not isinstance(self.journal, Journal):
            return None
        folder = self.journal.folder
        return EarlierTarget.of(folder, self.journal.identity) if recorded_ranks(folder / STATE) else None

    def _space_needs(self) -> tuple[SpaceNeed, ...]:
        """Return the room that this process needs on file systems."""
        run = self.run

        def shares_blocks() -> bool:
            return may_share(run.planner.source.files, run.format, run.path(run.targets[0]))

        return self._space.needs(self.comm.size, shares_blocks)

    def _strangers(self) -> tuple[str, ...]:
        """Return notes on files in the target folder that are no part of this run. Raises TargetError for some."""
        run = self.run
        if run.request.target_file is not None:
            # In another folder than the rank's own, shards of other ranks are no strangers.
            path, own_folder = Path(run.request.target_file), f"rank_{run.targets[0]}"
            return stranger_notes(strangers(path) if path.parent.name == own_folder else ())
        own_paths = [run.path(rank) for rank in self.own.leads]
        folder, every_path = Path(run.request.target), map(run.path, range(run.planner.target.world_size))
        if run.request.files is not None:
            files = run.request.files
            return stranger_notes(lying_beside(folder, files.read_as, (files.index_name,), every_path, ()))
        index_names = formats.info(run.format).index_names(run.request.prefix)
        lying = lying_beside(folder, run.format, index_names, every_path, own_paths)
        if not run.request.keeps_journal:
            return stranger_notes(lying)
        removed = self.journal.leftovers()
        refuse_removing(run.planner.source.files, folder, removed)
        require_no_strangers(folder, lying, removed)
        return ()

    def _skipped(self, rank: int) -> Outcome:
        path = self.run.path(rank)
        is_unverified = self.run.request.verify and not self.journal.is_verified(rank)
        report = TargetReport(rank, str(path), (), version_of(path).size_bytes, process=self.comm.rank, skipped=True)
        return Outcome((report,), notes=(_NOT_VERIFIED,) if is_unverified else ())


def require_readable_structure(spec: ShardSpec, format_name: str) -> None:
    """Raise TargetError for a target that could not be read again.

    It has more or longer names than shards are read with, or nothing where its format's own framework wants something.
    """
    specs, strings = spec.specs, spec.strings
    if formats.info(format_name).own_loader_refuses_empty and not specs.names and not strings:
        raise TargetError(
            f"a target would hold nothing, and nobody reads that from {formats.title(format_name)} files",
            expected="a tensor or a text at least on every rank",
            got=f"nothing on rank {spec.identity.rank}",
            remedy="write it as safetensors or hdf5 (--to), or leave this rank out (--rank)",
        )
    count = len(specs.names) + len(strings)
    names_bytes = sum(map(kept_bytes, (*specs.names, *strings, *strings.values())))
    kinds_bytes = sum(kept_kind_bytes(len(kind.shape)) for kind in set(specs.kinds))
    if count > MAX_TENSORS or names_bytes + kinds_bytes > MAX_KEPT_BYTES:
        raise TargetError(
            "a target would hold more than it could be read with again",
            expected=f"at most {MAX_TENSORS} tensors and texts, which take {MAX_KEPT_BYTES} bytes of memory with names"
            " and shapes",
            got=f"{count} tensors and texts, {names_bytes + kinds_bytes} bytes",
            remedy="divide it over more stages, make it in several runs (--include), or choose shorter names",
        )


def require_readable_types(specs: Specs, format_name: str, *, as_is: bool) -> None:
    """Raise TargetError for a tensor of a type that the target format's own framework would not read again.

    Args:
        as_is: whether the tensors are taken over as they are from shards of the same format.
    """
    unread = () if as_is else formats.info(format_name).types_own_loader_refuses
    if not any(kind.dtype.name in unread for kind in specs.kinds):
        return
    name, dtype = next(
        (name, specs.kinds[kind].dtype)
        for name, kind in zip(specs.names, specs.kind_ids)
        if specs.kinds[kind].dtype.name in unread
    )
    able = [other for other in formats.targets() if dtype.name not in formats.info(other).types_own_loader_refuses]
    raise TargetError(
        f"{name!r} is of a type that nobody reads from {formats.title(format_name)} files",
        expected="a type that they are read with",
        got=str(dtype),
        remedy=f"write it as {' or '.join(able)} (--to), or give it another type (--dtype)",
    )


def require_countable(planner: Planner, plan: RankPlan) -> None:
    """Raise TargetError for the first whole number of a target that has no place in the checksum of its file."""
    groups = (group for group in plan.tensors.groups if is_in_crc(group.kind.dtype, group.kind.shape))
    tensors = (group.tensor(place) for group in groups for place in range(len(group.names)))
    with Files() as files:
        for tensor in tensors:
            if any(takes_numpy(item, tensor.spec.box, planner.limits.buffer_bytes) for item in tensor.reads):
                planner.before_gathering()
            content = only_element(files, tensor, planner.limits)
            try:
                counted_bytes(tensor.spec.name, content, tensor.spec.dtype)
            except NotChecksummableError as error:
                raise error.refusal(planner.source.files.path) from None
