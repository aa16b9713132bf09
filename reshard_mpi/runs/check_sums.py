"""Compare a target with its source, for `--verify` (`sums_as_planned`), and shards with kept sums (`check_shard`).

A shard is held against its checksum, and against the sums of its tensors in itself and in its record. Where shards have
no record, whole tensors are held against those in the commit record of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from reshard_mpi import formats
from reshard_mpi.checkpoints.shard_files import ShardFiles
from reshard_mpi.checkpoints.source import DAMAGE, SourceCheckpoint
from reshard_mpi.engine.checksums import Shown, sum_shard, sum_tensors, takes_numpy
from reshard_mpi.engine.first_difference import where_it_differs
from reshard_mpi.errors import DamageError, DisagreementError, ReshardError, ShardError, as_reshard_error, of_parts
from reshard_mpi.filesystem.paths import absolute_path, rank_of_folder, real_path
from reshard_mpi.filesystem.source_files import exists, is_folder, is_taken, version_of
from reshard_mpi.formats.locations import Span
from reshard_mpi.formats.manifest import Manifest, TensorSpec
from reshard_mpi.formats.protocol import OnBytes
from reshard_mpi.journal.record_files import COMMIT_RECORD, STATE, recorded_ranks
from reshard_mpi.journal.record_finder import (
    RecordFinder,
    damage_besides,
    damage_by_record,
    damage_of_index,
    fits_record,
    folder_of_records,
    holds_another,
    ranks_by_file,
    require_one_run,
)
from reshard_mpi.journal.run_records import CommitRecord, RunIdentity, strategy_of_run
from reshard_mpi.journal.target_records import RecordHead, TensorSum, sums_of_wholes
from reshard_mpi.planning.chunk_reads import held_tensor
from reshard_mpi.planning.rank_choice import is_partial_sum
from reshard_mpi.planning.rank_plan import Limits, RankPlan
from reshard_mpi.runs.outcome import Checked
from reshard_mpi.runs.planner import LIMITS
from reshard_mpi.runs.progress import Progress, SliceCounter
from reshard_mpi.sharding import strategy_table
from reshard_mpi.text import counted

NO_DIGESTS: Mapping[str, str] = {}
# With what a shard was compared whose record has sums.
BY_RECORD = "the record of its run"


def sums_as_planned(
    plan: RankPlan, target: Manifest, span: Span | None, limits: Limits, on_bytes: OnBytes, shown: Shown
) -> tuple[TensorSum, ...]:
    """Return the sums of the tensors in the shard `target`, which are also the sums of their sources.

    Args:
        span: only of elements that begin in this range of the file; None: all.
        on_bytes: called with the number of bytes just summed.
        shown: as for `sum_shard`.

    Raises DamageError for the first tensor that differs from its sources, with the element and its place in the files.
    """
    sums = []
    for summed in sum_shard(plan, target, span=span, limits=limits, on_bytes=on_bytes, shown=shown):
        if summed.expected != summed.found:
            raise where_it_differs(plan, target, summed.tensor.name, limits)
        sums.append(tensor_sum(summed.tensor, summed.found, may_differ=summed.tensor.name in plan.unlisted))
    return tuple(sums)


def tensor_sum(spec: TensorSpec, value: int, *, may_differ: bool) -> TensorSum:
    """Return the record of a tensor's sum. may_differ: whether no strategy places it, so that copies may differ."""
    may_differ = may_differ or is_partial_sum(spec.name)
    return TensorSum(spec.name, spec.dtype.name, spec.global_shape, spec.box.start, spec.box.shape, value, may_differ)


class Summing(NamedTuple):
    """What summing the tensors of a shard takes."""

    tensors: int  # how many
    is_native: bool  # whether the shard describes itself, and so is read in this process
    decoding_bytes: int  # the most memory that decoding one tensor takes
    with_numpy: bool  # whether numpy is loaded


def check_shard(
    files: ShardFiles,
    rank: int,
    before_sums: Callable[[Summing], None],
    progress: Progress,
    committed: Mapping[str, str] = NO_DIGESTS,
    *,
    is_foreign: bool = False,
) -> tuple[Checked, list[ReshardError]]:
    """Check the files of one rank against their checksums, their sums, and their record, as far as they have these.

    Args:
        before_sums: called for each file with what summing it takes, before it is summed.
        progress: told of the bytes of the files.
        committed: digests by path as of `check_commit.CommittedSums.besides`, for files that have no record.
        is_foreign: whether another program may have written them, whose files need not be anything by themselves.

    Returns the damage as errors; raises a ReshardError if a file cannot be checked.
    """
    module, finder = formats.by_name(files.format), RecordFinder()
    damage: list[ReshardError] = []
    by: dict[str, None] = {}
    sums: list[TensorSum] = []
    tensors = read_bytes = world_size = 0
    for path in files.by_rank[rank]:
        record = finder.find(path, rank)
        size_bytes = version_of(path).size_bytes
        try:
            shard = files.locate(path)
        except ShardError:
            if record is not None or not is_foreign or not formats.info(files.format).packs:
                raise
            counter = SliceCounter(progress.moved, size_bytes, size_bytes)
            if module.check_crc(path, counter.add):
                by["its checksum"] = None
                read_bytes += size_bytes
            counter.end()
            continue
        recorded = {} if record is None else {tensor.name: tensor for tensor in record.sums}
        listed = (
            strategy_table.stated(shard.identity.strategy, shard.path).parameters if shard.identity is not None else ()
        )
        with_numpy = any(takes_numpy(spec, shard.tensors[spec.name]) for spec, _ in _placed(shard, recorded, listed))
        before_sums(Summing(len(shard.tensors), shard.identity is not None, shard.decoding_bytes, with_numpy))
        if shard.identity is not None:
            world_size = shard.identity.world_size
            if shard.identity.rank != rank:
                damage.append(_elsewhere(shard.identity.rank, rank, path))
        stored, placed = module.stored_sums(path), dict(_placed(shard, recorded, listed))
        specs = [spec for spec in placed if spec.name in stored or spec.name in recorded]
        summed_bytes = sum(spec.size_bytes for spec in specs)
        counter = SliceCounter(progress.moved, size_bytes, size_bytes + summed_bytes)
        has_crc = module.check_crc(path, counter.add)
        if has_crc:
            by["its checksum"] = None
        if stored:
            by["its own sums"] = None
        if record is not None:
            damage += damage_by_record(shard, record, recorded)
        # Earlier versions kept no sums of tensors in Megatron's files, which have no checksum either.
        if record is not None and record.is_verified and (has_crc or recorded or not shard.tensors):
            by[BY_RECORD] = None
        # A checksum is of all of the file; what is summed besides is not counted again.
        tensors += len(shard.tensors if has_crc else specs)
        read_bytes += size_bytes if has_crc else summed_bytes
        counter = counter if has_crc else SliceCounter(progress.moved, size_bytes, summed_bytes)
        held = (held_tensor(spec, shard) for spec in specs)
        for summed in sum_tensors(held, limits=LIMITS, on_bytes=counter.add):
            name = summed.tensor.name
            sums.append(tensor_sum(summed.tensor, summed.found, may_differ=placed[summed.tensor]))
            written = {stored[name]} if name in stored else set()
            written |= {recorded[name].value} if name in recorded else set()
            damage += [_damaged(shard, name, value, summed.found) for value in written - {summed.found}]
        counter.end()
        if not damage:
            digest = (committed.get(path, ""), COMMIT_RECORD) if record is None else (record.besides, "its record")
            damage += damage_besides(path, shard.tensors, *digest)
    path = files.by_rank[rank][0]
    return Checked(rank, path, tensors, read_bytes, tuple(by), tuple(sums), world_size=world_size), damage


def damaged_record(files: ShardFiles, rank: int) -> Iterator[DamageError]:
    """Yield the damage of the records of a rank's files, if they cannot be read."""
    finder = RecordFinder()
    for path in files.by_rank[rank]:
        found = finder.find_head(path, rank)
        if found is not None and finder.find(path, rank) is None:
            remedy = "reshard-mpi verify SRC DST, if there is a source; transform with --resume makes the target anew"
            yield DamageError("the record of a shard is damaged", where=str(found.path), remedy=remedy)


def keeps_sums(files: ShardFiles, rank: int) -> bool:
    """Tell whether there are sums of the tensors in the files of a rank: in these, or in records that are theirs."""
    module = formats.by_name(files.format)
    return are_recorded(files, rank) or (
        formats.info(files.format).keeps_sums and any(module.stored_sums(path) for path in files.by_rank[rank])
    )


def are_recorded(files: ShardFiles, rank: int) -> bool:
    """Tell whether records have sums of the tensors in files of a rank; they tell which run has made these, too."""
    finder = RecordFinder()
    records = (finder.find(path, rank) for path in files.by_rank[rank])
    return any(record is not None and record.is_verified for record in records)


def damage_of_indexes(files: ShardFiles) -> Iterator[DamageError]:
    """Yield the damage of the indexes of a checkpoint, one in each of its folders.

    It is told by the digests of commits, and by the checksums of files that belong to an index.
    """
    for part in files.folder_by_folder():
        yield from damage_of_index(folder_of_records(part.path, part.format))
    yield from damage_before_indexes(files)


def damage_before_indexes(files: ShardFiles) -> Iterator[DamageError]:
    """Yield the damage of files that belong to an index and keep checksums, such as Megatron's `common.pt`."""
    for part in files.folder_by_folder():
        named = (Path(part.path, name) for name in formats.info(part.format).before_index)
        for path in filter(exists, named):
            try:
                formats.by_name(part.format).check_crc(str(path))
            except ShardError as error:
                yield of_parts(DamageError, *error.parts)


def check_together(files: ShardFiles, checked: Iterable[Checked], *, sound: bool) -> Iterator[DamageError]:
    """Yield the damage that all shards together show: copies differ, shards are missing, or sums are not as committed.

    Args:
        checked: all shards.
        sound: whether each of them is sound by itself.
    """
    shards = tuple(checked)
    folder = folder_of_records(files.path, files.format)
    is_kept = not holds_another(folder)
    record = CommitRecord.read(folder) if is_kept else None
    resolved = absolute_path if absolute_path(files.path).is_relative_to(absolute_path(folder)) else real_path
    paths = {resolved(path) for rank_paths in files.by_rank.values() for path in rank_paths}
    committed = set() if record is None else {resolved(folder / file) for file in record.files.values()}
    are_committed, are_others = committed.issuperset(paths), committed.isdisjoint(paths)
    alike = record.sums.keys() if record is not None and are_committed else ()
    sums: dict[str, int] = {}
    try:
        sums.update(sums_of_wholes({shard.rank: _held_alike(shard.sums, alike) for shard in shards if sound}))
    except DamageError as error:
        error.where = files.path
        yield error
    yield from damage_of_indexes(files)
    if record is None and is_kept and is_taken(folder / COMMIT_RECORD):
        remedy = "reshard-mpi commit writes it anew, if the records of the run are there"
        yield DamageError("the commit record is damaged", where=str(folder / COMMIT_RECORD), remedy=remedy)
    if not are_committed and not are_others:
        yield from _missing_beside_others(committed.difference(paths), files)
    try:
        run = require_one_run(files.by_target_rank, files.path)
    except DisagreementError as error:
        yield of_parts(DamageError, *error.parts)
        return
    # Not if it is a file or the folder of a rank by itself.
    whole = resolved(folder)
    are_loose = rank_of_folder(whole.name) is None and all(path.parent == whole for path in paths)
    is_whole = is_folder(folder / STATE) or are_loose or all(path.parent.parent == whole for path in paths)
    if are_others and is_whole:
        if run is not None:
            yield from _not_of_begun_run(files, run.digest)
        heads = [RecordHead.read(folder / STATE, rank) for rank in recorded_ranks(folder / STATE)]
        of_run = (head.rank + 1 for head in heads if head and run is not None and head.digest == run.digest)
        world_size = max((*(shard.world_size for shard in shards), *of_run), default=0)
        yield from _missing(files.by_rank, world_size, "the others say", files.path)
    if record is None or not are_committed:
        return
    there = {rank for rank, file in record.files.items() if resolved(folder / file) in paths}
    yield from _missing(there, len(record.files), f"{COMMIT_RECORD} says", files.path)
    for name, value in record.sums.items():
        if name in sums and value != f"{sums[name]:08x}":
            yield DamageError(
                f"{name!r} is not what was committed",
                expected=f"CRC-32 {value}, as {COMMIT_RECORD} says",
                got=f"{sums[name]:08x}",
                where=files.path,
                remedy="restore the checkpoint from a copy",
            )


def files_by_record(files: ShardFiles) -> ShardFiles:
    """Return the files of a folder, each by itself: by target ranks if all are a run's, with what no index names.

    An index does not name a file without tensors, and a damaged one does not say what it is.
    """
    folder = folder_of_records(files.path, files.format)
    of_run = {} if holds_another(folder) else ranks_by_file(folder)
    ranks = {real_path(folder / file): rank for file, rank in of_run.items()}
    path_of = {real_path(path): path for path in files.shards}
    if not path_of.keys() <= ranks.keys():
        return files.one_by_one()
    there = {rank: path_of.get(path, str(path)) for path, rank in ranks.items() if path in path_of or exists(path)}
    return files._replace(by_rank={rank: (there[rank],) for rank in sorted(there)}, is_folder=False)


def _held_alike(sums: Iterable[TensorSum], alike: Container[str]) -> list[TensorSum]:
    """Return the sums of a shard; for some tensors they must be the same in all ranks that hold the same part.

    Args:
        alike: their names; a commit has the sum of a whole tensor only if all copies of it were the same then.
    """
    return [tensor._replace(may_differ=False) if tensor.name in alike else tensor for tensor in sums]


def _not_of_begun_run(files: ShardFiles, digest: str) -> Iterator[DamageError]:
    """Yield what keeps the shards of a run that has not been committed from being one checkpoint.

    Args:
        digest: of the run that has made them.
    """
    folder = folder_of_records(files.path, files.format)
    run = RunIdentity.recorded(folder / STATE)
    if run is not None and digest != run.digest:
        yield DamageError(
            "the shards are of another run than the one that has begun to replace them",
            expected="the targets of one run",
            got=f"{STATE}/run.json of another",
            where=files.path,
            remedy="let that run finish (transform with --resume), or verify one by --rank",
        )
    elif run is not None:
        yield from _missing(files.by_target_rank.keys(), run.target_ranks, "run.json says", files.path)
    elif (table := strategy_of_run(folder, digest)) is not None:
        world_size = strategy_table.loads(*table).world_size
        yield from _missing(files.by_target_rank.keys(), world_size, "strategy.json says", files.path)


def _missing_beside_others(missing: Collection[Path], files: ShardFiles) -> Iterator[DamageError]:
    """Yield the damage of a committed checkpoint that lacks files, while files of others lie among its own."""
    if missing:
        yield DamageError(
            f"{counted(len(missing), 'committed shard')} {'is' if len(missing) == 1 else 'are'} missing",
            expected=f"{min(missing)}, as {COMMIT_RECORD} says",
            got="files of others beside those that are there",
            where=files.path,
            remedy="restore them; reshard-mpi transform with --resume makes them anew, if there is a source",
        )


def _missing(ranks: Collection[int], world_size: int, who_says: str, where: str) -> Iterator[DamageError]:
    """Yield the damage of a checkpoint that has the shards of these ranks alone. who_says: that it has `world_size`."""
    count = world_size - sum(rank < world_size for rank in ranks)
    if count > 0:
        first = next(rank for rank in range(world_size) if rank not in ranks)
        yield DamageError(
            f"{count} shards are missing, that of rank {first} the first" if count > 1 else "a shard is missing",
            expected=f"those of {world_size} ranks, as {who_says}",
            got="all others" if count > 1 else f"all but that of rank {first}",
            where=where,
            remedy="restore them; reshard-mpi transform with --resume makes them anew, if there is a source",
        )


def _elsewhere(own: int, rank: int, path: str) -> DamageError:
    return DamageError(
        "a shard says it belongs elsewhere",
        expected=f"rank {rank}",
        got=f"rank {own}",
        where=path,
        remedy="put every shard into the folder of its own rank",
    )


def _placed(
    shard: Manifest, recorded: Mapping[str, TensorSum], listed: Container[str]
) -> Iterator[tuple[TensorSpec, bool]]:
    """Yield the tensors of a shard whose place in the whole tensor is known, and whether copies of each may differ.

    The place is known from the shard itself, or from its record if that fits.

    Args:
        listed: names that the strategy in the shard places. Copies of a tensor may differ if its record says so, or
            without a record, if it is not among these.
    """
    for name, entry in shard.tensors.items():
        tensor = recorded.get(name)
        may_differ = name not in listed if tensor is None else tensor.may_differ
        if entry.box is not None and entry.global_shape is not None:
            yield TensorSpec(name, entry.dtype, entry.global_shape, entry.box), may_differ
        elif tensor is not None and fits_record(tensor, entry):
            yield TensorSpec(name, entry.dtype, tensor.global_shape, tensor.box), may_differ


def _damaged(shard: Manifest, name: str, expected: int, actual: int) -> DamageError:
    stored = shard.tensors[name].stored
    place = ""
    if stored is not None and stored.ranges:
        first, last = stored.ranges[0], stored.ranges[-1]
        place = f", bytes {first.offset_bytes} to {last.offset_bytes + last.length_bytes}"
    return DamageError(
        f"{name!r} is damaged",
        expected=f"the sum {expected:08x}, as it was written",
        got=f"{actual:08x}",
        where=f"{shard.path}{place}",
        remedy="restore the file; reshard-mpi verify SRC DST says which byte, if there is a source",
    )


def damage_of(
    source: SourceCheckpoint,
    rank: int,
    size_bytes: int,
    before_sums: Callable[[Summing], None],
    progress: Progress,
    *,
    is_read: bool = True,
) -> ReshardError | None:
    """Return the first error in the shard of `rank`, by its checksum and by the sums of its tensors.

    Args:
        size_bytes: of its files.
        before_sums: called with what summing a file takes, before it is summed.
        progress: told of the bytes of the files.
        is_read: whether the tensors are summed; else all but these is held against the record of the shard.
    """
    for files, own_rank in one_by_one(source.files, rank):
        try:
            if is_read and keeps_sums(files, own_rank):
                _, damage = check_shard(files, own_rank, before_sums, progress)
            else:
                damage = list(_unlike_its_record(files, own_rank))
        except DAMAGE as error:
            return as_reshard_error(error, Path(files.by_rank[own_rank][0]))
        for first in damage:  # which refuses the run, if no other shard holds the same
            return of_parts(ShardError, *first.parts)
    if not is_read:
        return None
    counter = SliceCounter(progress.moved, size_bytes)
    unfit = source.check_crc(rank, counter.add)
    counter.end()
    return unfit


def _unlike_its_record(files: ShardFiles, rank: int) -> Iterator[DamageError]:
    """Yield how the files of a rank differ from their records, besides the bytes of tensors."""
    finder = RecordFinder()
    for path in files.by_rank[rank]:
        record = finder.find(path, rank)
        if record is not None:
            shard = files.locate(path)
            yield from damage_by_record(shard, record, {tensor.name: tensor for tensor in record.sums})
            yield from damage_besides(path, shard.tensors, record.besides)


def one_by_one(files: ShardFiles, rank: int) -> Iterator[tuple[ShardFiles, int]]:
    """Yield the files of a rank as they are verified: for a folder with an index, by target rank."""
    if not files.is_folder:
        yield files, rank
        return
    alone = files.one_by_one()
    yield from ((alone, own) for own, paths in alone.by_rank.items() if exists(paths[0]))
