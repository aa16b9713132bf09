"""Compare a target with its source, for `--verify` (`sums_as_planned`), and shards with kept sums (`check_shard`).

A shard is held against its checksum, and against the sums of its tensors in itself and in its record.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from reshard_mpi import formats
from reshard_mpi.checkpoints.shard_files import ShardFiles
from reshard_mpi.checkpoints.source import DAMAGE, SourceCheckpoint
from reshard_mpi.engine.checksums import Shown, sum_shard, sum_tensors, takes_numpy
from reshard_mpi.engine.first_difference import where_it_differs
from reshard_mpi.errors import DamageError, ReshardError, ShardError, as_reshard_error, of_parts
from reshard_mpi.filesystem.source_files import exists, version_of
from reshard_mpi.formats.locations import Span
from reshard_mpi.formats.manifest import Manifest, TensorSpec
from reshard_mpi.formats.protocol import OnBytes
from reshard_mpi.journal.record_files import COMMIT_RECORD
from reshard_mpi.journal.record_finder import (
    RecordFinder,
    damage_besides,
    damage_by_record,
    fits_record,
)
from reshard_mpi.journal.target_records import TargetRecord, TensorSum
from reshard_mpi.planning.chunk_reads import held_tensor
from reshard_mpi.planning.rank_choice import is_partial_sum
from reshard_mpi.planning.rank_plan import Limits, RankPlan
from reshard_mpi.runs.outcome import Checked
from reshard_mpi.runs.planner import LIMITS
from reshard_mpi.runs.progress import Progress, SliceCounter
from reshard_mpi.sharding import strategy_table

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
    check = _ShardCheck(files, rank, before_sums, progress, committed)
    for path in files.by_rank[rank]:
        record = check.finder.find(path, rank)
        try:
            shard = files.locate(path)
        except ShardError:
            if record is not None or not is_foreign or not formats.info(files.format).packs:
                raise
            check.add_unreadable(path)
        else:
            check.add(path, shard, record)
    return check.checked(), check.damage


class _ShardCheck:
    """Checks the files of one rank, one after another, and keeps its findings. Arguments are as of `check_shard`."""

    def __init__(
        self,
        files: ShardFiles,
        rank: int,
        before_sums: Callable[[Summing], None],
        progress: Progress,
        committed: Mapping[str, str],
    ) -> None:
        self._rank = rank
        self._path = files.by_rank[rank][0]
        self._module = formats.by_name(files.format)
        self._before_sums = before_sums
        self._progress = progress
        self._committed = committed
        self.finder = RecordFinder()
        self.damage: list[ReshardError] = []
        self._by: dict[str, None] = {}
        self._sums: list[TensorSum] = []
        self._tensors = self._read_bytes = self._world_size = 0

    def checked(self) -> Checked:
        by, sums = tuple(self._by), tuple(self._sums)
        return Checked(self._rank, self._path, self._tensors, self._read_bytes, by, sums, world_size=self._world_size)

    def add_unreadable(self, path: str) -> None:
        """Check a file that is no shard by itself: by its checksum alone."""
        size_bytes = version_of(path).size_bytes
        counter = SliceCounter(self._progress.moved, size_bytes, size_bytes)
        if self._module.check_crc(path, counter.add):
            self._by["its checksum"] = None
            self._read_bytes += size_bytes
        counter.end()

    def add(self, path: str, shard: Manifest, record: TargetRecord | None) -> None:
        """Check a file, with its record if it has one."""
        identity = shard.identity
        recorded = {} if record is None else {tensor.name: tensor for tensor in record.sums}
        listed = strategy_table.stated(identity.strategy, path).parameters if identity is not None else ()
        placed = dict(_placed(shard, recorded, listed))
        with_numpy = any(takes_numpy(spec, shard.tensors[spec.name]) for spec in placed)
        self._before_sums(Summing(len(shard.tensors), identity is not None, shard.decoding_bytes, with_numpy))
        if identity is not None:
            self._world_size = identity.world_size
            if identity.rank != self._rank:
                self.damage.append(_elsewhere(identity.rank, self._rank, path))
        stored = self._module.stored_sums(path)
        specs = [spec for spec in placed if spec.name in stored or spec.name in recorded]
        summed_bytes, size_bytes = sum(spec.size_bytes for spec in specs), version_of(path).size_bytes
        counter = SliceCounter(self._progress.moved, size_bytes, size_bytes + summed_bytes)
        has_crc = self._module.check_crc(path, counter.add)
        if has_crc:
            self._by["its checksum"] = None
        if stored:
            self._by["its own sums"] = None
        if record is not None:
            self.damage += damage_by_record(shard, record, recorded)
        # Earlier versions kept no sums of tensors in Megatron's files, which have no checksum either.
        if record is not None and record.is_verified and (has_crc or recorded or not shard.tensors):
            self._by[BY_RECORD] = None
        # A checksum is of all of the file; what is summed besides is not counted again.
        self._tensors += len(shard.tensors if has_crc else specs)
        self._read_bytes += size_bytes if has_crc else summed_bytes
        counter = counter if has_crc else SliceCounter(self._progress.moved, size_bytes, summed_bytes)
        held = (held_tensor(spec, shard) for spec in specs)
        for summed in sum_tensors(held, limits=LIMITS, on_bytes=counter.add):
            name = summed.tensor.name
            self._sums.append(tensor_sum(summed.tensor, summed.found, may_differ=placed[summed.tensor]))
            written = {stored[name]} if name in stored else set()
            written |= {recorded[name].value} if name in recorded else set()
            self.damage += [_damaged(shard, name, value, summed.found) for value in written - {summed.found}]
        counter.end()
        if not self.damage:
            besides = (
                (self._committed.get(path, ""), COMMIT_RECORD) if record is None else (record.besides, "its record")
            )
            self.damage += damage_besides(path, shard.tensors, *besides)


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
