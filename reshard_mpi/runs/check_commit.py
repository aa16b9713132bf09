"""Hold checkpoints against the commit record beside them, where their files have no records (`commit_to_hold`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from reshard_mpi import formats
from reshard_mpi.checkpoints.shard_files import ShardFiles
from reshard_mpi.checkpoints.source import SourceCheckpoint
from reshard_mpi.engine.checksums import sum_of_whole, sum_tensors
from reshard_mpi.engine.open_files import OnBytes
from reshard_mpi.errors import ShardError
from reshard_mpi.filesystem.paths import absolute_path, rank_of_folder
from reshard_mpi.formats.manifest import TensorSpec
from reshard_mpi.journal.record_files import COMMIT_RECORD
from reshard_mpi.journal.record_finder import damage_besides, folder_of_records, holds_another
from reshard_mpi.journal.run_records import CommitRecord
from reshard_mpi.planning.chunk_reads import held_tensor
from reshard_mpi.planning.rank_choice import Replicas
from reshard_mpi.planning.rank_plan import Limits, TensorPlan
from reshard_mpi.planning.target_tensors import Policy
from reshard_mpi.runs.check_sums import are_recorded, one_by_one
from reshard_mpi.runs.plan_conversion import Conversion
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.strategy import unsharded


def commit_about(files: ShardFiles) -> CommitRecord | None:
    """Return the commit record about files: in their folder, or above a file or the folder of a rank by itself."""
    commit, _ = _commit_and_folder(files)
    return commit


def _commit_and_folder(files: ShardFiles) -> tuple[CommitRecord | None, Path]:
    """Return the commit record about files, and the folder that it is in."""
    folder, own = folder_of_records(files.path, files.format), set(map(absolute_path, files.shards))
    for place in (folder, *_folders_above(files)):
        record = None if holds_another(place) else CommitRecord.read(place)
        committed = () if record is None else record.files.values()
        others = set(map(absolute_path, (place / file for file in committed))) - own
        if record is None or len(committed) - len(others) < len(own):
            continue
        # Some of the files have only parts of the tensors, unless each file has whole ones.
        if place == folder or not others or formats.info(record.run.format).split_by_size:
            return record, place
    return None, folder


def _folders_above(files: ShardFiles) -> Iterator[Path]:
    """Yield the folders that a file or the folder of a rank, which was given by itself, may be a target in."""
    path = absolute_path(files.path)
    if any(absolute_path(own) == path for own in files.shards):
        yield path.parent
        path = path.parent
    if rank_of_folder(path.name) is not None:
        yield path.parent


def commit_to_hold(files: ShardFiles) -> CommitRecord | None:
    """Return the commit record of a source whose whole tensors are to be held against its sums; None: none are.

    They are if a shard has no record with sums of its own. Sums in a shard fit it wherever it lies, so they do not tell
    that it is the one that was committed.
    """
    record = commit_about(files)
    if record is None or not (record.sums or record.besides):
        return None
    of_shards = (each for rank in files.by_rank for each in one_by_one(files, rank))
    return None if all(are_recorded(alone, rank) for alone, rank in of_shards) else record


def committed_tensors(record: CommitRecord, source: SourceCheckpoint, needs: Callable[[str], bool]) -> list[TensorPlan]:
    """Return the whole tensors of a source that a commit record has sums for, each from any of its copies.

    Of a format that packs these are the parts of tensors in its files, by the names that they have there: all of them.

    Args:
        needs: tells whether a tensor of the source is used.
    """
    if formats.info(record.run.format).packs:  # in whatever form the files are read
        return [
            held_tensor(TensorSpec(name, entry.dtype, entry.shape, Box.whole(entry.shape)), shard)
            for shard in map(source.files.locate, source.files.shards)
            for name, entry in shard.tensors.items()
            if name in record.sums
        ]
    whole = Conversion(source, unsharded(), Policy(replicas=Replicas.ANY, allows_holes=True))
    tensors = whole.plan(0, checked=False).tensors
    return [tensor for tensor in tensors if tensor.spec.name in record.sums and needs(tensor.spec.name)]


def require_as_committed(
    record: CommitRecord, tensors: list[TensorPlan], source: str, limits: Limits, on_bytes: OnBytes
) -> None:
    """Raise ShardError for the first of these tensors of a source whose sum is not that in its commit record."""
    for summed in sum_tensors(tensors, limits=limits, on_bytes=on_bytes):
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


def committed_sums(files: ShardFiles) -> Mapping[str, str]:
    """Return the CRC-32 of whole tensors by name, in hexadecimal, in the commit record about files; none if unknown.

    Of a format that packs it has sums of the parts of tensors in files instead.
    """
    record = commit_about(files)
    return {} if record is None or formats.info(record.run.format).packs else record.sums


def committed_digests(files: ShardFiles) -> Mapping[str, str]:
    """Return the digests that the commit record about files has of all but the tensors in each, by path.

    Only files without sums of tensors have one, as DeepSpeed's: their checksums are in it.
    """
    record, folder = _commit_and_folder(files)
    if record is None or not record.besides:
        return {}
    rank_of = {absolute_path(folder / file): rank for rank, file in record.files.items()}
    ranks = {path: rank_of[absolute_path(path)] for path in files.shards}
    return {path: record.besides[rank] for path, rank in ranks.items() if rank in record.besides}


def require_as_committed_besides(files: ShardFiles, digests: Iterable[tuple[str, str]]) -> None:
    """Raise DamageError for the first of some files that was committed with other bytes besides its tensors.

    Args:
        digests: of these files, by path.
    """
    for path, digest in digests:
        for damage in damage_besides(path, files.locate(path).tensors, digest, COMMIT_RECORD):
            raise damage
