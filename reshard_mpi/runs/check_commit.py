"""Check a whole checkpoint: its shards together (`check_together`), and against what was committed (`commit_of`).

Tensors are held against the commit where the files have no records of their own (`is_to_be_held`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from reshard_mpi import formats
from reshard_mpi.checkpoints.join_files import names_in_branches
from reshard_mpi.checkpoints.shard_files import ShardFiles
from reshard_mpi.checkpoints.source import SourceCheckpoint, locate
from reshard_mpi.engine.checksums import sum_of_whole, sum_tensors
from reshard_mpi.errors import DamageError, DisagreementError, ShardError, of_parts
from reshard_mpi.filesystem.paths import absolute_path, rank_of_folder, real_path
from reshard_mpi.filesystem.source_files import exists, is_folder, is_taken
from reshard_mpi.formats.manifest import TensorSpec
from reshard_mpi.formats.protocol import OnBytes
from reshard_mpi.journal.commit import is_of_these_targets
from reshard_mpi.journal.record_files import COMMIT_RECORD, STATE, recorded_ranks
from reshard_mpi.journal.record_finder import (
    RunOfFiles,
    damage_besides,
    damage_of_index,
    folder_of_records,
    holds_another,
    ranks_by_file,
    require_one_run,
)
from reshard_mpi.journal.run_records import CommitRecord, RunIdentity, strategy_of_run
from reshard_mpi.journal.target_records import RecordHead, TensorSum, sums_of_wholes
from reshard_mpi.planning.chunk_reads import held_tensor
from reshard_mpi.planning.rank_choice import Replicas, is_partial_sum
from reshard_mpi.planning.rank_plan import TensorPlan
from reshard_mpi.planning.target_tensors import Policy
from reshard_mpi.runs.check_sums import are_recorded, one_by_one
from reshard_mpi.runs.outcome import Checked
from reshard_mpi.runs.planner import LIMITS, Planner
from reshard_mpi.sharding import strategy_table
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.strategy import unsharded
from reshard_mpi.text import counted, shortened


class CommittedSums(NamedTuple):
    """What commit records say of the files of a checkpoint; empty where there is none, or it has no sums."""

    sums: Mapping[str, str]  # CRC-32 of whole tensors in hexadecimal, by their names in the checkpoint
    # digests of all but the tensors in a file, by its path: of files without sums of tensors, as DeepSpeed's, whose
    # checksums are in it
    besides: Mapping[str, str]
    packs: bool = False  # whether `sums` are of the parts of tensors in the files of a format that packs
    are_all: bool = False  # whether these files are all that were committed
    is_of_others: bool = False  # whether records say that other targets were committed, as where a copy has stopped
    warnings: tuple[str, ...] = ()  # of a record that may be of these files and is not used


def commit_of(files: ShardFiles) -> CommittedSums:
    """Return what was committed of files: by the record in their folder, or above a file or the folder of a rank.

    Where links lead to files, it may be beside these. Each of several folders that are branches has one of its own,
    with sums of tensors: no format that packs is read so.

    Raises DisagreementError if links lead to files of several commits.
    """
    commits = {part.path: _commit_of_folder(part) for part in files.folder_by_folder()}
    if len(commits) == 1:
        return commits[files.path]
    sums: dict[str, str] = {}
    if any(commit.sums for commit in commits.values()):
        branches = [locate(part, 0) for part in files.folder_by_folder()]
        for path, new_names in names_in_branches(branches, files.path).items():
            own = commits[path]
            sums |= {new_names.get(name, name): own.sums[name] for name in own.sums if own.are_all or name in new_names}
    warnings = tuple(chain.from_iterable(each.warnings for each in commits.values()))
    return CommittedSums(sums, {}, are_all=True, warnings=warnings)


def _commit_of_folder(files: ShardFiles) -> CommittedSums:
    """Return what was committed of files that are no branches in several folders."""
    folder, own = folder_of_records(files.path, files.format), {absolute_path(path): path for path in files.shards}
    commit = _commit_in((folder, *_folders_above(files)), own, folder)
    real = own if commit is not None else {real_path(path): path for path in files.shards}
    if real.keys() != own.keys():
        above = dict.fromkeys(above for path in real for above in path.parents[:2])
        own, commit = real, _commit_in(above, real)
        if commit is None:
            return CommittedSums({}, {}, warnings=(*_warnings_of_renamed(folder), *_warnings_of_links(above, real)))
    if commit is None:
        return CommittedSums({}, {}, warnings=tuple(_warnings_of_renamed(folder)))
    place, record, paths = commit
    besides = {
        own[path]: record.besides[rank] for rank, path in paths.items() if path in own and rank in record.besides
    }
    are_all, sums = own.keys() >= {*paths.values()}, record.sums
    if files.by_branch and sums:  # their tensors have the names of the branch before their own
        of_ranks = (map(files.locate, of_rank) for of_rank in files.by_rank.values())
        of_files = [names_in_branches([*branches], files.path) for branches in of_ranks]
        committed = {own[path] for path in paths.values() if path in own}
        names = {old: new for of in of_files for path in of.keys() & committed for old, new in of[path].items()}
        sums = {names.get(name, name): value for name, value in sums.items()}
    is_of_others = not is_of_these_targets(place, record)
    return CommittedSums(sums, besides, formats.info(record.run.format).packs, are_all, is_of_others)


def _warnings_of_renamed(folder: Path) -> Iterator[str]:
    """Yield a warning if a folder has a commit record with sums, and none of the files that this names.

    The folder of a format that packs lies in the one with the record, and may be renamed itself.
    """
    for place in (folder, absolute_path(folder).parent):
        record, paths = _committed_in(place)
        if record is None or not (record.sums or record.besides):
            continue
        is_meant = place == folder or formats.info(record.run.format).packs
        if is_meant and not any(map(exists, paths.values())):
            named = shortened(list(record.files.values()), 1)
            yield (
                f"{place / COMMIT_RECORD} has sums of files that are not there ({named}): nothing is held against them;"
                " if the files have been renamed, give them these names again"
            )


def _warnings_of_links(folders: Iterable[Path], own: Container[Path]) -> Iterator[str]:
    """Yield a warning for each commit record with sums in some folders that names some of some files, and not all."""
    for folder in folders:
        record, paths = _committed_in(folder)
        if record is not None and (record.sums or record.besides) and any(path in own for path in paths.values()):
            yield (
                f"{folder / COMMIT_RECORD} has sums of some of these files, which links lead to: nothing is held"
                " against them; give the folder that it is in"
            )


def _committed_in(folder: Path) -> tuple[CommitRecord | None, Mapping[int, Path]]:
    """Return the commit record of a folder, unless it holds another checkpoint by now, and its files by rank."""
    record = None if holds_another(folder) else CommitRecord.read(folder)
    files = {} if record is None else record.files
    return record, {rank: absolute_path(folder / file) for rank, file in files.items()}


def _commit_in(
    folders: Iterable[Path], own: Mapping[Path, str], whole: Path | None = None
) -> tuple[Path, CommitRecord, Mapping[int, Path]] | None:
    """Return the first of some folders whose commit record is of all of some files, that record, its files by rank.

    Args:
        own: the files.
        whole: their own folder. A commit there is theirs also if it does not name all: what it does not may be renamed,
            or of another checkpoint, and files of two are none.

    Raises DisagreementError if several commits are of some of them.
    """
    holders = []
    for folder in folders:
        record, paths = _committed_in(folder)
        held = sum(path in own for path in paths.values())
        if record is None or not held:
            continue
        # Some of the files have only parts of the tensors, unless each file has whole ones; so has a rank that is read
        # by itself, which is a full checkpoint, or else none of the tensors that were committed.
        are_whole = held == len(paths) or len(own) == 1 or formats.info(record.run.format).split_by_size
        if folder == whole or (held == len(own) and are_whole):
            return folder, record, paths
        if held < len(own):
            holders.append(folder)
    if len(holders) > 1:
        raise DisagreementError(
            "files of several commits lie in one checkpoint",
            expected=f"those that one {COMMIT_RECORD} names",
            got=f"some of {holders[0]} and some of {holders[1]}",
            where=str(next(iter(own.values()))),
            remedy="give the files of one checkpoint alone",
        )
    return None


def _folders_above(files: ShardFiles) -> Iterator[Path]:
    """Yield the folders that a file or the folder of a rank, which was given by itself, may be a target in."""
    path = absolute_path(files.path)
    if any(absolute_path(own) == path for own in files.shards):
        yield path.parent
        path = path.parent
    if rank_of_folder(path.name) is not None:
        yield path.parent


def is_to_be_held(commit: CommittedSums, files: ShardFiles) -> bool:
    """Tell whether the whole tensors of a source are to be held against its commit.

    They are if a shard has no record with sums of its own, or the records are of other targets than the commit. Sums in
    a shard fit it wherever it lies, so they do not tell that it is the one that was committed.
    """
    of_shards = (each for rank in files.by_rank for each in one_by_one(files, rank))
    has_sums = bool(commit.sums or commit.besides)
    return has_sums and (commit.is_of_others or not all(are_recorded(alone, rank) for alone, rank in of_shards))


def committed_tensors(
    commit: CommittedSums, source: SourceCheckpoint, needs: Callable[[str], bool]
) -> list[TensorPlan]:
    """Return the whole tensors of a source that were committed with sums, each from any of its copies.

    Of a format that packs these are the parts of tensors in its files, by the names that they have there: all of them.

    Args:
        needs: tells whether a tensor of the source is used.

    Raises ShardError if the source lacks one, though it has all files that were committed.
    """
    if commit.packs:  # in whatever form the files are read
        tensors = [
            held_tensor(TensorSpec(name, entry.dtype, entry.shape, Box.whole(entry.shape)), shard)
            for shard in map(source.files.locate, source.files.shards)
            for name, entry in shard.tensors.items()
        ]
        needs = commit.sums.__contains__
    else:
        whole = Planner(source, unsharded(), Policy(replicas=Replicas.ANY, allows_holes=True))
        tensors = [*whole.plan(0, checked=False).tensors]
    names = {tensor.spec.name: None for tensor in tensors}
    for name in missing_from(names, commit):
        others = [other for other in names if other not in commit.sums]
        raise ShardError(
            f"{name!r} was committed, and is not in the source",
            expected=f"all tensors that {COMMIT_RECORD} has sums of",
            got=f"no such tensor, and others that it has none of: {shortened(others)}" if others else "no such tensor",
            where=source.files.path,
            remedy="the source has changed since: reshard-mpi verify it, and restore it from a copy",
        )
    return [tensor for tensor in tensors if tensor.spec.name in commit.sums and needs(tensor.spec.name)]


def missing_from(names: Container[str], commit: CommittedSums) -> Iterator[str]:
    """Yield the tensors that were committed, and that a source with all of the files lacks."""
    for name in commit.sums if commit.are_all else ():
        if name not in names and not is_partial_sum(name):
            yield name


def changed_since_commit(
    commit: CommittedSums, tensors: list[TensorPlan], source: str, on_bytes: OnBytes
) -> Iterator[tuple[str, ShardError]]:
    """Yield the tensors, by name, whose sum is not the one they were committed with. source: what errors call it."""
    for summed in sum_tensors(tensors, limits=LIMITS, on_bytes=on_bytes):
        spec, expected = summed.tensor, commit.sums[summed.tensor.name]
        got = f"{sum_of_whole([summed.found], spec.size_bytes):08x}"
        if got != expected:
            yield (
                spec.name,
                ShardError(
                    f"{spec.name!r} is not what the source was committed with",
                    expected=f"CRC-32 {expected}, as its {COMMIT_RECORD} says",
                    got=got,
                    where=source,
                    remedy="the source has changed since: reshard-mpi verify it, and restore it from a copy",
                ),
            )


def require_as_committed_besides(files: ShardFiles, digests: Iterable[tuple[str, str]]) -> None:
    """Raise DamageError for the first of some files that was committed with other bytes besides its tensors.

    Args:
        digests: of these files, by path.
    """
    for path, digest in digests:
        for damage in damage_besides(path, files.locate(path).tensors, digest, COMMIT_RECORD):
            raise damage


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
    if are_others and _is_whole(folder, resolved, paths):
        yield from _missing_of_run(files, folder, run, shards)
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


def _is_whole(folder: Path, resolved: Callable[[Path], Path], paths: Collection[Path]) -> bool:
    """Tell whether shards are all of a checkpoint's folder, and not the folder of one rank, or files in several."""
    if is_folder(folder / STATE):
        return True
    whole = resolved(folder)
    are_loose = rank_of_folder(whole.name) is None and all(path.parent == whole for path in paths)
    return are_loose or all(path.parent.parent == whole for path in paths)


def _missing_of_run(
    files: ShardFiles, folder: Path, run: RunOfFiles | None, shards: Iterable[Checked]
) -> Iterator[DamageError]:
    """Yield the damage of shards that are not committed and lack others of their run, or are of another run.

    Args:
        run: the one that has made them, if records say so.
    """
    if run is not None:
        yield from _not_of_begun_run(files, run.digest)
    heads = [RecordHead.read(folder / STATE, rank) for rank in recorded_ranks(folder / STATE)]
    of_run = (head.rank + 1 for head in heads if head and run is not None and head.digest == run.digest)
    world_size = max((*(shard.world_size for shard in shards), *of_run), default=0)
    yield from _missing(files.by_rank, world_size, "the others say", files.path)


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
