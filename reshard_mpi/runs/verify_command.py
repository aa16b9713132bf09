"""Do the command `verify`: a checkpoint against its source, or alone (`verify_pair`, `verify_alone`).

Each process checks a share of the shards. Damage is reported for each tensor; a damaged shard does not stop the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from reshard_mpi import formats
from reshard_mpi.checkpoints import discovery, shard_files
from reshard_mpi.checkpoints.opening import open_source, require_same_choice
from reshard_mpi.checkpoints.shard_opener import ShardShare
from reshard_mpi.checkpoints.source import DAMAGE, SourceCheckpoint
from reshard_mpi.engine.first_difference import difference_from_source
from reshard_mpi.engine.open_files import Files
from reshard_mpi.errors import DamageError, ReshardError, SourceError, as_reshard_error
from reshard_mpi.filesystem import source_files
from reshard_mpi.filesystem.paths import require_reachable
from reshard_mpi.formats.manifest import NEST, Manifest
from reshard_mpi.formats.nest.nodes import agree
from reshard_mpi.formats.protocol import OnBytes, Packed
from reshard_mpi.journal.record_files import COMMIT_RECORD
from reshard_mpi.journal.record_finder import RecordFinder, damage_besides, modified_shards, type_and_shape
from reshard_mpi.planning.gradient_joining import notes_on
from reshard_mpi.planning.rank_plan import RankPlan
from reshard_mpi.planning.target_tensors import Policy
from reshard_mpi.processes.governor import Governor
from reshard_mpi.runs.check_commit import check_together, commit_of, damage_of_indexes, files_by_record
from reshard_mpi.runs.check_sums import (
    BY_RECORD,
    Summing,
    check_shard,
    damage_of,
    damaged_record,
)
from reshard_mpi.runs.maps_and_packing import files_of_run, packing_to_compare, planner_with_maps
from reshard_mpi.runs.open_run import chosen_targets
from reshard_mpi.runs.outcome import Checked, Failure, Outcome, agreed, attempt
from reshard_mpi.runs.planner import LIMITS, Planner
from reshard_mpi.runs.process_memory import RunMemory, RunProcess, Workload, checking_bytes
from reshard_mpi.runs.progress import Progress, ProgressStage, SliceCounter, Words, complain
from reshard_mpi.runs.recorded_runs import (
    accumulated_as_made,
    as_made,
    made_otherwise,
    recorded_run,
    say_if_source_changed,
    strategy_to_drop_by,
)
from reshard_mpi.runs.scheduling import assign, target_weights
from reshard_mpi.sharding.strategy import Strategy, Unlisted, unsharded
from reshard_mpi.text import counted

# Damaged tensors located in one shard; if there are more, one line says so.
_MAX_LOCATED = 20
_MAX_QUOTED = 200
# Memory enough to sum a shard with numpy is enough to read its structure.
_BEFORE_LOCATING = Summing(0, is_native=False, decoding_bytes=0, with_numpy=True)


class _ComparedCheckpoints(NamedTuple):
    """The expected result of a transform, and the checkpoint to compare with it."""

    planner: Planner
    target: SourceCheckpoint
    ranks: Sequence[int]  # target ranks to verify
    governor: Governor
    notes: tuple[str, ...]  # what is to be said of the comparison
    # the error for options other than the target was made with, if any are
    otherwise: ReshardError | None
    committed: Mapping[str, str]  # digests of files besides their tensors, by path, for files without records

    def check(self, rank: int, size_bytes: int, process: RunProcess) -> Outcome:
        """Compare the shard of a target rank with its sources. Raises DamageError if it cannot be compared."""
        planner, target = self.planner, self.target
        comm, memory, progress = process.comm, process.memory, process.progress
        purpose = f"target rank {rank} of {target.files.path}"
        memory.reserve_for_planning(Workload(planner, target.files.format, also_read=target), purpose)
        plan = planner.plan(rank, checked=False)
        planner.require_none_left_behind(plan, ShardShare(rank, planner.target.world_size))
        if rank not in target:
            raise DamageError(
                "a shard is missing",
                expected=f"one of target rank {rank}",
                where=target.files.path,
                remedy="run the transform that made the others once more, with --resume",
            )
        peak_bytes = memory.possible_peak_bytes(plan)
        while not memory.reserve_peak(peak_bytes, purpose):
            plan = planner.plan(rank, checked=False)
        shard = target.manifest(rank)
        _require_same_tensors(plan, shard)
        shard_progress = SliceCounter(progress.moved, size_bytes, plan.written_bytes)
        damage = _compare(plan, shard, shard_progress.add)
        shard_progress.end()
        paths = target.files.shards if target.files.is_folder else target.files.by_rank[rank]
        finder = RecordFinder()
        rest = [error for path in paths for error in self._damaged_rest(finder, path, rank)]
        rest += [] if damage or rest else self._differing_copies()
        notes = tuple(notes_on(planner.policy.accumulated, plan.gradients))
        unfit: dict[int, ReshardError] = {}
        while damage and (errors := self._unfit(plan, unfit, memory)):  # the sources may be what is damaged
            unfit |= errors
            plan = planner.without(unfit).plan(rank, checked=False)
            damage = _compare(plan, shard, lambda _: None)
        by = () if damage or rest else ("the source",)
        checked = Checked(rank, shard.path, len(plan.tensors), plan.written_bytes, by)
        failures = tuple(Failure.here(rank, comm, error) for error in (*damage, *rest))
        return Outcome((), failures, notes=notes, lost=plan.lost, other_warnings=plan.left_out, checked=(checked,))

    def _differing_copies(self) -> Iterator[ReshardError]:
        """Yield the error for copies of a tensor that differ in the files of a target that packs, such as fp32 copies.

        What is compared is one of them; they are held against each other as when the target is read.
        """
        files = self.target.files
        if not (files.is_folder and formats.info(files.format).packs):
            return
        own = Planner(self.target, unsharded(), Policy(replicas=self.planner.policy.replicas))
        try:
            own.with_values_compared(own.plan(0, checked=False))
        except DAMAGE as error:
            yield as_reshard_error(error, Path(files.path))

    def _damaged_rest(self, finder: RecordFinder, path: str, rank: int) -> list[ReshardError]:
        """Return damage of a target file besides what was compared, by its record or commit, and by its checksum.

        A format that packs keeps more in its files than it is read as: copies of weights from which a training goes on.
        """
        if not source_files.exists(path):
            return []
        record = finder.find(path, rank)
        damage: list[ReshardError] = []
        digest, whose = self.committed.get(path, ""), COMMIT_RECORD
        if record is not None:
            digest, whose = record.besides, "its record"
        if digest:
            damage += damage_besides(path, self.target.files.locate(path).tensors, digest, whose)
        if not damage and formats.info(self.target.files.format).packs:
            try:
                formats.by_name(self.target.files.format).check_crc(path, lambda _: None)
            except DAMAGE as error:
                return [as_reshard_error(error, Path(path))]
        return damage

    def _unfit(self, plan: RankPlan, looked_at: Collection[int], memory: RunMemory) -> dict[int, ReshardError]:
        """Return the errors of shards of `plan` that do not fit their kept sums, without those in `looked_at`."""
        source = self.planner.source
        before_sums = partial(memory.reserve_for_checking, source.files.format, f"checking {source.files.path}")
        silent = Progress(Words(complain))
        ranks = [rank for rank in plan.read_ranks if rank not in looked_at]
        errors = {rank: damage_of(source, rank, 0, before_sums, silent) for rank in ranks}
        return {rank: error for rank, error in errors.items() if error is not None}


def verify_pair(process: RunProcess) -> Outcome:
    """Verify that the target of the request equals a fresh transform of its source.

    Damage is in the outcome's failures. Raises a ReshardError, the same on every process, if the two cannot be
    compared.
    """
    comm, progress = process.comm, process.progress
    progress.begin(ProgressStage("planning"))
    pair = agreed(lambda: _opened_pair(process), comm)
    source, target = pair.planner.source, pair.target
    require_same_choice(comm, source.files, target.files)
    if comm.rank == 0:
        progress.display.reading(source.summary_text)
    weights = target_weights(pair.planner, pair.ranks)
    checked = _each(target.files, weights, process, partial(pair.check, process=process), pair.notes)
    if checked.failures and pair.otherwise is not None:
        raise pair.otherwise
    for failure in checked.failures:
        say_if_source_changed(failure.error, target.files, failure.rank)
    # A target that equals what the source gives is the one that was meant.
    checked = checked._replace(modified=source.files.modified)
    return _with_notes(checked, pair.governor, source.files, target.files)


def _opened_pair(process: RunProcess) -> _ComparedCheckpoints:
    """Open both checkpoints, with memory enough to plan."""
    request, comm, memory, *_ = process
    purpose = f"verifying {request.target}"
    governor = memory.lease().governor
    process.reserve_for_reading(purpose)
    read = process.read_strategies()
    require_reachable(request.target)
    files, target_files = request.shard_files(), discovery.find_shards(request.target, role="target")
    process.reserve_for_reading(purpose, files.format, target_files.format)
    source = open_source(files, read.source)
    run = recorded_run(target_files)
    request, made_so = as_made(request, run, target_files.path)
    given = None if request.dst_strategy is None else read.target
    # The index of a folder does not say what was to be left out.
    drops_in_folder = target_files.is_folder and request.unlisted is Unlisted.DROP
    target = open_source(target_files, None if drops_in_folder else given)
    lists = (given or strategy_to_drop_by(run, target_files.path)) if drops_in_folder else None
    accumulated = accumulated_as_made(request, run)
    planner = Planner(
        source,
        target.strategy if lists is None else lists.whole(),
        Policy(request.unlisted, replicas=request.replicas, accumulated=accumulated),
        keeps_strings=formats.info(target_files.format).keeps_strings,
    )
    packing = files_of_run(request, source, run, target_files.format)
    by_file = packing is not None
    packing = packing or packing_to_compare(request, source, target_files.format)
    planner, digests = planner_with_maps(request, planner, packing)
    if by_file:
        assert planner.mapped is not None
        packed = planner.mapped.packed
        target = _packed_target(target_files, packed)
        planner = planner.changed(target=target.strategy)
    otherwise = made_otherwise(request, read, digests, planner.source, run, target_files.path)
    for damage in damage_of_indexes(target_files):
        raise damage
    memory.free_with(planner.forget, target.forget)
    memory.reserve_for_planning(Workload(planner, target_files.format, also_read=target), purpose)
    planner.sample_findings(damaged_are_replaced=True, process=comm.rank, processes=comm.size)
    notes: tuple[str, ...] = ()
    if comm.rank == 0:
        if planner.mapped is not None:
            planner.mapped.check_values()
        notes = made_so if planner.mapped is None else (*made_so, *planner.mapped.notes())
        if accumulated is not request.accumulated:
            joined = f"the {accumulated} of the replicas, as {target_files.path} says"
            notes = (*notes, f"accumulated gradients are compared with {joined}")
    ranks, committed = chosen_targets(request, planner), commit_of(target.files).besides
    return _ComparedCheckpoints(planner, target, ranks, governor, notes, otherwise, committed)


def _packed_target(files: shard_files.ShardFiles, packed: Packed) -> SourceCheckpoint:
    """Return the files that a checkpoint is packed into, each by itself."""
    module = formats.folder_by_name(files.format)
    assert module is not None
    root, count = Path(files.path).parent, len(packed.files)
    paths = {rank: str(root / module.file_name(rank, count, packed.prefix)) for rank in range(count)}
    by_rank = {rank: (path,) for rank, path in paths.items() if source_files.is_file(Path(path))}
    return SourceCheckpoint(files._replace(by_rank=by_rank, is_folder=False), Strategy(count, 1, {}))


def verify_alone(process: RunProcess) -> Outcome:
    """Verify the source of the request against the sums that it keeps.

    Where the request names ranks, only their shards are verified, each by itself. Damage is in the outcome's failures.
    Raises a ReshardError, the same on every process, if it cannot be verified, for instance since it keeps no sums.
    """
    request = process.request
    files, outcome = verify_by_sums(process)
    checked = outcome.checked
    if formats.info(files.format).packs and request.rank is None and not outcome.failures:
        # Such a folder has no list of its files: they tell together whether one of them is missing.
        process.reserve_for_reading(f"verifying {request.source}", files.format)
        given = process.read_strategies().source
        opened = agreed(lambda: open_source(request.shard_files(), given), process.comm)
        warnings = dict.fromkeys((*outcome.other_warnings, *opened.files.warnings))
        outcome = outcome._replace(other_warnings=tuple(warnings))
    unheld = _note_on_unheld_sums(files, checked) if request.rank is None else ()
    if not outcome.failures and not any(shard.by for shard in checked):
        raise _no_sums(files.path, unheld)
    unknown = [shard.rank for shard in checked if not shard.by]
    if unknown:
        note = f"{len(unknown)} of {len(checked)} shards keep no sums, that of rank {unknown[0]} the first"
        outcome = outcome._replace(notes=(*outcome.notes, note))
    return outcome._replace(notes=(*outcome.notes, *unheld))


def verify_by_sums(process: RunProcess) -> tuple[shard_files.ShardFiles, Outcome]:
    """Verify shards against the sums that are kept of them, if any are; return the files and the outcome.

    Args and errors as for `verify_alone`, but that no sums are no error.
    """
    request, comm, memory, progress, _ = process
    progress.begin(ProgressStage("planning"))
    files, governor = agreed(lambda: (request.shard_files(), memory.lease().governor), comm)
    require_same_choice(comm, files)
    files = agreed(lambda: files_by_record(files), comm) if files.is_folder else files
    ranks = tuple(files.by_rank) if request.rank is None else sorted(set(request.rank))
    for rank in ranks:
        if rank not in files.by_rank:
            raise shard_files.no_such_rank(files, rank)
    commit = agreed(lambda: commit_of(files), comm)
    is_foreign = not commit.sums and not commit.besides

    def check(rank: int, _: int) -> Outcome:
        def before_sums(summing: Summing) -> None:
            memory.reserve_peak(checking_bytes(files.format, summing), f"rank {rank} of {request.source}")

        before_sums(_BEFORE_LOCATING)
        checked, damage = check_shard(files, rank, before_sums, progress, commit.besides, is_foreign=is_foreign)
        errors = (*damaged_record(files, rank), *damage)
        return Outcome((), tuple(Failure.here(rank, comm, error) for error in errors), checked=(checked,))

    weights = dict.fromkeys(ranks, 1)
    outcome = _with_notes(_each(files, weights, process, check), governor, files)
    all_checked = request.rank is None

    def joined() -> Outcome:
        damage = check_together(files, outcome.checked, sound=not outcome.failures) if all_checked else ()
        failures = (*outcome.failures, *(Failure.here(None, comm, error) for error in damage))
        by_others = [checked.rank for checked in outcome.checked if BY_RECORD not in checked.by]
        modified = modified_shards({rank: files.by_rank[rank] for rank in by_others})
        return outcome._replace(failures=failures, modified=modified)

    return files, agreed(joined, comm)


def _each(
    files: shard_files.ShardFiles,
    weights: Mapping[int, int],
    process: RunProcess,
    check: Callable[[int, int], Outcome],
    notes: tuple[str, ...] = (),
) -> Outcome:
    """Check this process's share of the ranks; return the outcome of all processes.

    Args:
        files: those to check.
        check: takes a rank and the size of its files.
        notes: what this process has to say besides.
    """
    comm, progress, outcomes = process.comm, process.progress, list[Outcome]()
    sizes = {rank: _size_bytes(files, rank) for rank in assign(weights, range(comm.size))[comm.rank]}
    size_bytes = sum(comm.allgather(sum(sizes.values())))
    progress.begin(ProgressStage("verifying", size_bytes, len(weights), "shard"), sum(sizes.values()))
    for rank, own_bytes in sizes.items():
        outcome = attempt(partial(check, rank, own_bytes), comm, rank)
        outcomes.append(outcome)
        for shard in outcome.checked:
            progress.completed()
            if shard.by and not outcome.failures:
                tensors = counted(shard.tensors, "tensor")
                progress.display.detail(f"shard of rank {rank}: {tensors} sound by {', '.join(shard.by)}")
    outcome = Outcome(processes=comm.size).joined(comm.allgather(Outcome(notes=notes).joined(outcomes)))
    return outcome._replace(failures=tuple(sorted(outcome.failures, key=lambda failure: failure.rank or 0)))


def _size_bytes(files: shard_files.ShardFiles, rank: int) -> int:
    """Return the size of the files of a rank, as far as they are there."""
    return sum(source_files.size_if_there(path) or 0 for path in files.by_rank.get(rank, ()))


def _with_notes(outcome: Outcome, governor: Governor, *read: shard_files.ShardFiles) -> Outcome:
    """Return `outcome` with the notes and warnings on the files that were read, and on memory."""
    notes = dict.fromkeys((*(note for files in read for note in files.notes), *governor.notes, *outcome.notes))
    warnings = dict.fromkeys((*(text for files in read for text in files.warnings), *outcome.other_warnings))
    return outcome._replace(notes=tuple(notes), other_warnings=tuple(warnings))


def _require_same_tensors(plan: RankPlan, shard: Manifest) -> None:
    """Raise DamageError if the shard does not hold exactly the planned tensors with their types and shapes."""
    planned = {name: (group.kind.dtype, group.kind.shape) for group in plan.tensors.groups for name in group.names}
    kinds = ((kind.dtype, kind.shape) for kind in map(shard.tensors.kinds.__getitem__, shard.tensors.kind_ids))
    present = dict(zip(shard.tensors, kinds))
    for name in [*planned, *(name for name in present if name not in planned)]:
        if planned.get(name) != present.get(name):
            raise DamageError(
                f"{name!r} is not what the source holds",
                expected=type_and_shape(planned.get(name)),
                got=type_and_shape(present.get(name)),
                where=shard.path,
                remedy="give the options it was made with (reshard-mpi inspect DST shows them), or make it anew with"
                " --overwrite",
            )


def _quoted(text: str | None) -> str:
    if text is None:
        return "no such text"
    return repr(text) if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]!r}..."


def _compare(plan: RankPlan, shard: Manifest, on_bytes: OnBytes) -> list[ReshardError]:
    """Compare a shard with its sources; return its damage.

    A format that packs has settings of its own beside the tensors, which are not those of the source.

    Args:
        on_bytes: called with the number of bytes just compared.
    """
    damage: list[ReshardError] = []
    compared = plan.strings.keys() | shard.strings.keys() if not formats.info(shard.format).packs else ()
    for name in sorted(compared):
        expected, got = (strings.get(name) for strings in (plan.strings, shard.strings))
        is_same = agree(expected, got) if name == NEST else expected == got
        if not is_same:
            problem = f"{name!r} is not the text that the source holds"
            damage.append(
                DamageError(
                    problem,
                    expected=_quoted(expected),
                    got=_quoted(got),
                    where=shard.path,
                    remedy="make the target anew with --overwrite",
                )
            )
    with Files() as files:
        for tensor in plan.tensors:
            difference = difference_from_source(files, tensor, shard, LIMITS, on_bytes)
            if difference is not None and len(damage) == _MAX_LOCATED:
                damage.append(DamageError("more tensors of this shard differ", where=shard.path))
                break
            damage += [difference] if difference is not None else []
    return damage


def _note_on_unheld_sums(files: shard_files.ShardFiles, checked: Iterable[Checked]) -> tuple[str, ...]:
    """Return a note if a commit record has sums of tensors that these shards were not held against.

    They were not if a checksum alone tells that each file is sound, and no record says which part of a tensor it holds.
    Whether all files are of the one checkpoint that was committed is not known then.
    """
    summed = {tensor.name for shard in checked for tensor in shard.sums}
    commit = commit_of(files)
    unheld = commit.sums.keys() - summed
    if not unheld:
        return commit.warnings
    wholes = counted(len(unheld), "whole tensor")
    held_by = "transform --verify holds the tensors against them"
    return (f"{COMMIT_RECORD} has sums of {wholes} that are not looked at here: {held_by}",)


def _no_sums(path: str, unheld: Iterable[str]) -> SourceError:
    return SourceError(
        "no shard keeps sums to verify it against",
        expected="HDF5 shards or records made by transform --verify, or files with a checksum (--crc)",
        got="; ".join(("none of them", *unheld)),
        where=path,
        remedy="give its source as well: reshard-mpi verify SRC DST",
    )
