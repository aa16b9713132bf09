"""Refuse targets that would overwrite or pose as the source (`refuse_overlap`)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from reshard_mpi.checkpoints.shard_files import ShardFiles, both_ways
from reshard_mpi.errors import TargetError
from reshard_mpi.filesystem.paths import rank_of_folder, real_path

_OUTSIDE = "choose a target outside the source; a source is never written to"


def refuse_overlap(files: ShardFiles, target: str, target_files: Iterable[Path]) -> None:
    """Raise TargetError if targets are the source or lie in one of its rank folders, or the source in one of theirs.

    Args:
        files: of the source.
        target: the folder of all targets.
        target_files: their final paths.
    """
    (source_ways, target_ways), shards = map(both_ways, (Path(files.path), Path(target))), _shards(files)
    real_shards, source_folders = _followed(shards)
    real_targets, target_folders = _followed(list(target_files))
    sources, folders = {*real_shards, *source_folders.values()}, set(target_folders.values())
    if source_ways[1] == target_ways[1] or sources & {*folders, *real_targets}:
        raise TargetError(
            "the target is the source", expected="another folder", got=target, where=files.path, remedy=_OUTSIDE
        )
    roots = _above_rank_folders(real_shards, source_folders) | set(source_ways)
    if any(_lies_in_rank_folder(place, roots) for place in (*target_ways, *folders)):
        raise TargetError(
            "the target lies in a rank folder of the source",
            expected="a folder that is not read with the source",
            got=target,
            where=files.path,
            remedy=_OUTSIDE,
        )
    if any(_lies_in_rank_folder(place, set(target_ways)) for place in (*source_ways, *sources)):
        raise TargetError(
            "the source lies in a rank folder of the target",
            expected="a target folder without the source in it",
            got=target,
            where=files.path,
            remedy="choose a target beside the source; what it is made of must not lie among its shards",
        )


def refuse_removing(files: ShardFiles, folder: Path, removed: Iterable[str]) -> None:
    """Raise TargetError if a run would remove its source: a file that an earlier run has left in the target folder.

    Args:
        removed: the paths, relative to the target folder, of what the run removes before it writes.
    """
    left = {identity: name for name in removed if (identity := _identity(folder / name)) is not None}
    for shard in _shards(files) if left else ():
        identity = _identity(shard)
        if identity in left:
            raise TargetError(
                "the source is a target of an earlier run in this folder, which --overwrite removes",
                expected="a source that no earlier run has put into the target folder",
                got=f"{shard}, which is {left[identity]} there",
                where=str(folder),
                remedy=_OUTSIDE,
            )


def refuse_posing(files: ShardFiles, target_file: Path) -> None:
    """Raise TargetError if the file is a source shard, or lies in a rank folder of the source (to be read with it).

    Args:
        files: the listed shards of the source.
    """
    real_shards, source_folders = _followed(_shards(files))
    if real_path(target_file) in real_shards:
        raise TargetError(
            "the target is one of the sources",
            expected="another file",
            where=str(target_file),
            remedy="choose another file for the target",
        )
    roots = _above_rank_folders(real_shards, source_folders)
    for path in both_ways(target_file):
        rank = _rank_of(path)
        if rank is not None and path.parent.parent in roots:
            raise TargetError(
                "the target would be taken for a shard of the source",
                expected="a file in another folder",
                got=f"one in the folder of rank {rank} of the source",
                where=str(target_file),
                remedy=_OUTSIDE,
            )


def refuse_replacing(target_file: Path, strategies: Iterable[str | None]) -> None:
    """Raise TargetError if a target would replace a strategy file, or one in a folder of these."""
    replaced = real_path(target_file)
    given = {real_path(strategy) for strategy in strategies if strategy is not None}
    if given & {replaced, replaced.parent} and target_file.exists():
        raise TargetError(
            "the target is one of the strategies",
            expected="another file",
            where=str(target_file),
            remedy="save it under another name",
        )


def _identity(path: Path) -> tuple[int, int, Path | None] | None:
    """Return what tells a name of a file from all others, whatever links lead there; None if it is not there.

    A file of several names (hard links) is lost only with the last, so there the name counts.
    """
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, real_path(path) if status.st_nlink > 1 else None


def _shards(files: ShardFiles) -> list[Path]:
    return [Path(path) for paths in files.by_rank.values() for path in paths]


def _followed(paths: Sequence[Path]) -> tuple[list[Path], dict[Path, Path]]:
    """Return the real paths of files, and the real paths of their folders by folder: each is followed once."""
    folders = {folder: real_path(folder) for folder in {path.parent for path in paths}}
    places = (folders[path.parent] / path.name for path in paths)
    return [real_path(place) if _is_link(place) else place for place in places], folders


def _above_rank_folders(real_files: Iterable[Path], folders: Mapping[Path, Path]) -> set[Path]:
    """Return where the rank folders lie that files are in, both as these were named and as links lead to them.

    Args:
        real_files, folders: as `_followed` returns them.
    """
    named = (Path(os.path.abspath(folder)) for folder in folders)  # noqa: PTH100 - without following links
    every = {*named, *folders.values(), *(file.parent for file in real_files)}
    return {folder.parent for folder in every if rank_of_folder(folder.name) is not None}


def _is_link(path: Path) -> bool:
    try:
        return path.is_symlink()
    except OSError:  # no name that a file could have; for targets, a later check raises the error
        return False


def _rank_of(shard: Path) -> int | None:
    return rank_of_folder(both_ways(shard)[0].parent.name)


def _lies_in_rank_folder(path: Path, roots: set[Path]) -> bool:
    """Tell whether `path` is, or lies in, a rank folder of one of `roots`."""
    below = (path, *path.parents)
    return any(folder.parent in roots and rank_of_folder(folder.name) is not None for folder in below)
