"""Hold a source against the sums that are kept of it, before anything is made of it (`require_as_committed`).

A shard is held against its checksum, and against the sums of its tensors in itself and in its record. Where shards have
none, whole tensors are held against those in the commit record of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from reshard_mpi.checkpoints.discovery import ShardFiles
from reshard_mpi.checkpoints.source import DAMAGE, SourceCheckpoint
from reshard_mpi.engine.crc import sum_of_whole
from reshard_mpi.engine.files import OnBytes
from reshard_mpi.engine.sums import sum_sources
from reshard_mpi.errors import ReshardError, ShardError, as_reshard_error
from reshard_mpi.journal.commit_record import CommitRecord
from reshard_mpi.journal.records import COMMIT_RECORD
from reshard_mpi.planning.model import Limits, TensorPlan
from reshard_mpi.planning.replicas import Replicas
from reshard_mpi.runs.conversion import Conversion
from reshard_mpi.runs.progress import Counted, Progress
from reshard_mpi.runs.selfcheck import Summing, check_shard, keeps_sums
from reshard_mpi.sharding.placement import unsharded


def damage_of(
    source: SourceCheckpoint,
    rank: int,
    size_bytes: int,
    limits: Limits,
    before_sums: Callable[[Summing], None],
    progress: Progress,
) -> ReshardError | None:
    """Return what is wrong with the shard of `rank` by its checksum and by the sums of its tensors; the first of it.

    size_bytes: of its files. before_sums: called with what summing a file takes, before it is summed. progress: told of
    the bytes of the files.
    """
    for files, own_rank in _one_by_one(source.files, rank):
        if not keeps_sums(files, own_rank):
            continue
        try:
            _, damage = check_shard(files, own_rank, limits, before_sums, progress)
        except DAMAGE as error:
            return as_reshard_error(error, Path(files.by_rank[own_rank][0]))
        for first in damage:  # which refuses the run, if no other shard holds the same
            said = {name: getattr(first, name) for name in ("expected", "got", "where", "remedy")}
            return ShardError(first.problem, **said)
    counted = Counted(progress.moved, size_bytes)
    unfit = source.check_crc(rank, counted.add)
    counted.end()
    return unfit


def committed_tensors(source: SourceCheckpoint) -> tuple[CommitRecord, list[TensorPlan]] | None:
    """Return the commit record of a source, and the tensors to be held against it, by whole ones.

    None if there is nothing to hold: it has no sums, is about other files, or each shard has sums of its own.
    """
    record = CommitRecord.read(Path(source.files.path))
    committed = set() if record is None else {Path(source.files.path, file) for file in record.files.values()}
    if record is None or not record.sums or not committed.issuperset(map(Path, source.files.shards)):
        return None
    of_shards = (each for rank in source.files.by_rank for each in _one_by_one(source.files, rank))
    if all(keeps_sums(files, rank) for files, rank in of_shards):
        return None
    whole = Conversion(source, unsharded(), replicas=Replicas.ANY, allows_holes=True)
    tensors = whole.plan(0, checked=False).tensors
    return record, [tensor for tensor in tensors if tensor.spec.name in record.sums]


def require_as_committed(
    record: CommitRecord, tensors: list[TensorPlan], source: str, limits: Limits, on_bytes: OnBytes
) -> None:
    """Raise ShardError for the first of these tensors of a source whose sum is not that in its commit record."""
    for summed in sum_sources(tensors, limits=limits, on_bytes=on_bytes):
        spec, expected = summed.tensor, record.sums[summed.tensor.name]
        got = f"{sum_of_whole([summed.found], spec.size_bytes):08x}"
        if got != expected:
            raise ShardError(
                f"{spec.name!r} is not what the source was committed with",
                expected=f"CRC-32 {expected}, as its {COMMIT_RECORD} says",
                got=got,
                where=source,
                remedy="the source has changed since: reshard-mpi verify it, and restore it from a copy",
            )


def _one_by_one(files: ShardFiles, rank: int) -> Iterator[tuple[ShardFiles, int]]:
    """Yield the files of a rank as they are verified: those of a folder with an index by their target ranks."""
    if not files.is_folder:
        yield files, rank
        return
    alone = files.one_by_one()
    yield from ((alone, own) for own, paths in alone.by_rank.items() if Path(paths[0]).exists())
