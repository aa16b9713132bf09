"""Check the places of targets: against the source, other checkpoints there, limits of names, and room on disk."""

from __future__ import annotations

import fcntl
import os
import struct
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from reshard_mpi import formats
from reshard_mpi.checkpoints.discovery import pointers_in
from reshard_mpi.checkpoints.file_names import branch_of_name
from reshard_mpi.checkpoints.shard_files import ShardFiles, both_ways, shards_in, strangers
from reshard_mpi.errors import TargetError
from reshard_mpi.filesystem.paths import absolute_path, is_object_path, rank_of_folder, real_path
from reshard_mpi.filesystem.source_files import exists, is_folder, names
from reshard_mpi.formats.manifest import ShardSpec
from reshard_mpi.text import format_bytes, shortened

_OUTSIDE = "choose a target outside the source; a source is never written to"
# To share blocks of two files (`struct file_clone_range`): the source's descriptor, its offset, a length, an offset.
_CLONE_RANGE = 0x4020940D
_BLOCK_BYTES = 4096
# What a run takes besides its shards: records, the report, folders, lists of blocks. That is little beside any payload,
# and a disk that is full in the middle fails no more than the target that is written.
_KEPT_BYTES = 1 << 20
_KEPT_BYTES_A_TARGET = 2 * _BLOCK_BYTES
# The sum of a tensor in the record of its target, with the name.
_RECORDED_SUM_BYTES = 256


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
    if files.folders and any(way.parent in source_ways and branch_of_name(way.name) for way in target_ways):
        raise TargetError(
            "the target would be read with the source, as a branch of it",
            expected="a folder elsewhere, or one whose name has no word of a branch",
            got=target,
            where=files.path,
            remedy=_OUTSIDE,
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
        rank = rank_of_folder(both_ways(path)[0].parent.name)
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


def stranger_notes(lying: Sequence[Path]) -> tuple[str, ...]:
    """Return a note on files of other checkpoints that a run leaves beside its targets, if there are any."""
    if not lying:
        return ()
    return (f"{shortened(lying, 1)} will lie beside the new targets: of another checkpoint, and left as it is",)


def require_no_strangers(folder: Path, lying: Iterable[Path], removed: Iterable[str]) -> None:
    """Raise TargetError if a folder has foreign files that would be taken for a part of the checkpoint written there.

    Args:
        lying: as `lying_beside` returns them.
        removed: the paths, relative to the folder, of files that are going to be removed.
    """
    expected = {folder / name for name in removed}
    strangers = [path.relative_to(folder) for path in lying if path not in expected]
    if strangers:
        raise TargetError(
            "the target folder holds files that are no part of the checkpoint, and may be taken for one",
            expected="a folder without other checkpoint files",
            got=shortened(strangers, 3),
            where=str(folder),
            remedy="choose another folder, or remove them if nobody needs them",
        )


def lying_beside(
    folder: Path, format_name: str, index_names: Collection[str], every_path: Iterable[Path], own_paths: Iterable[Path]
) -> list[Path]:
    """Return files in a target folder that may be taken for a part of the checkpoint written there, or for another one.

    Args:
        index_names: the names of the files that are to make the folder a checkpoint.
        every_path: of the targets of all processes.
        own_paths: of those whose folders this process looks into.
    """
    if not is_folder(folder):
        return []
    targets = set(every_path)
    marks = (folder / name for name in formats.marks_in(str(folder)) if name not in index_names)
    pointers = (folder / name for name in pointers_in(str(folder)) if name not in index_names)  # which readers follow
    lying = (*marks, *pointers, *_shards_beside(folder, format_name, targets, own_paths))
    own = targets.union(folder / name for name in index_names)
    return [path for path in dict.fromkeys(lying) if path not in own]


def _shards_beside(
    folder: Path, format_name: str, targets: Collection[Path], own_paths: Iterable[Path]
) -> Iterator[Path]:
    """Yield the shards that are read with the targets in `folder`, if they are no targets: see `lying_beside`.

    Those are shards in the folder itself if its files make up one checkpoint, and shards in any rank folder.
    """
    target_folders = {path.parent.name for path in targets if path.parent != folder}
    if formats.folder_by_name(format_name) is not None:
        endings = formats.info(format_name).suffixes
        for place in {folder, *(path.parent for path in targets)}:
            lying = shards_in(place, None) if is_folder(place) else []
            yield from (path for path in lying if path.name.endswith(endings))
    else:
        for path in own_paths:
            yield from strangers(path)
    for name in names(folder):
        if rank_of_folder(name) is not None and name not in target_folders and is_folder(folder / name):
            yield from shards_in(folder / name, None)


def require_short_names(paths: Iterable[Path]) -> None:
    """Raise TargetError if a path, or a name in it, is longer than the file system allows."""
    for path in paths:
        most_name_bytes, most_path_bytes = _longest(nearest_folder(path.parent))
        name = max(path.parts, key=_length)
        if _length(name) > most_name_bytes:
            raise TargetError(
                "a file name of the target would be too long",
                expected=f"at most {most_name_bytes} bytes",
                got=f"{_length(name)} bytes: {name[:80]}{'...' * (len(name) > 80)}",
                where=str(path.parent),
                remedy="take a shorter --prefix" if name == path.name else "take a target with a shorter name",
            )
        if _length(str(path)) >= most_path_bytes:  # the limit counts a byte for its end
            raise TargetError(
                "a path in the target would be too long",
                expected=f"less than {most_path_bytes} bytes",
                got=f"{_length(str(path))} bytes: .../{path.parent.name}/{path.name}",
                where=str(path.parent),
                remedy="take a target with a shorter path, or go there and take a relative one",
            )


def _length(text: str) -> int:
    return len(os.fsencode(text))


@lru_cache(maxsize=16)
def _longest(folder: Path) -> tuple[int, int]:
    return os.pathconf(folder, "PC_NAME_MAX"), os.pathconf(folder, "PC_PATH_MAX")


def _identity(path: Path) -> tuple[int, int, Path | None] | None:
    """Return what tells a name of a file from all others, whatever links lead there; None if it is not there.

    A file of several names (hard links) is lost only with the last, so there the name counts.
    """
    if is_object_path(path):
        return (0, 0, path) if exists(path) else None
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
    named = map(absolute_path, folders)
    every = {*named, *folders.values(), *(file.parent for file in real_files)}
    return {folder.parent for folder in every if rank_of_folder(folder.name) is not None}


def _is_link(path: Path) -> bool:
    try:
        return path.is_symlink()
    except OSError:  # no name that a file could have; for targets, a later check raises the error
        return False


def _lies_in_rank_folder(path: Path, roots: set[Path]) -> bool:
    """Tell whether `path` is, or lies in, a rank folder of one of `roots`."""
    below = (path, *path.parents)
    return any(folder.parent in roots and rank_of_folder(folder.name) is not None for folder in below)


class SpaceNeed(NamedTuple):
    """The most space that one process of a run takes on a file system for its targets, and the free space there."""

    mount: str  # the top folder of that file system, by which the processes of a run know it
    needed_bytes: int
    free_bytes: int


class SpaceEstimate:
    """Adds up, by file system, the room for what one process is going to write, target after target."""

    def __init__(self) -> None:
        self._held_bytes: defaultdict[str, int] = defaultdict(int)
        self._peak_bytes: defaultdict[str, int] = defaultdict(int)
        self._mounts: dict[Path, str] = {}

    def add(self, path: Path, format_name: str, spec: ShardSpec, *, crc: bool = False, left_bytes: int) -> None:
        """Add a target. The file that it replaces is freed after it is written, leftovers of earlier runs before that.

        Args:
            left_bytes: size of the leftovers.
        """
        if is_object_path(path):
            return  # a store has room
        folder = nearest_folder(path.parent)
        mount = self._mounts.get(folder) or self._mounts.setdefault(folder, _mount_of(folder))
        size_bytes = formats.by_name(format_name).size_at_most_bytes(spec, crc=crc) + _KEPT_BYTES_A_TARGET
        size_bytes += _RECORDED_SUM_BYTES * len(spec.specs) if spec.with_sums else 0
        held_bytes = self._held_bytes[mount] - left_bytes + size_bytes
        self._peak_bytes[mount] = max(self._peak_bytes[mount], held_bytes)
        self._held_bytes[mount] = held_bytes - _replaced_bytes(path)

    def needs(self, processes: int, shares: Callable[[], bool]) -> tuple[SpaceNeed, ...]:
        """Return the room that is needed; empty if targets may share blocks with the source, and so take none.

        Args:
            processes: how many the run has, each of which may need as much.
            shares: tells whether blocks may be shared; called only if there is not enough room.

        Raises OSError if a file system cannot be asked what is free.
        """
        with_free = ((mount, peak_bytes, _free_bytes(mount)) for mount, peak_bytes in self._peak_bytes.items())
        needs = tuple(SpaceNeed(mount, peak, free) for mount, peak, free in with_free if free is not None)
        if any(need.needed_bytes * processes + _KEPT_BYTES > need.free_bytes for need in needs) and shares():
            return ()
        return needs


def require_room(shares: Iterable[Sequence[SpaceNeed]]) -> None:
    """Raise TargetError if the processes of a run together need more space than a file system has.

    Args:
        shares: what each of them needs. Equal shares give the same result on every process.
    """
    needed_bytes: defaultdict[str, int] = defaultdict(lambda: _KEPT_BYTES)
    free_bytes: dict[str, int] = {}
    for share in shares:
        for need in share:
            needed_bytes[need.mount] += need.needed_bytes
            free_bytes[need.mount] = min(need.free_bytes, free_bytes.get(need.mount, need.free_bytes))
    for mount, needed in needed_bytes.items():
        if needed > free_bytes[mount]:
            raise TargetError(
                "there is no room for the targets",
                expected=f"{format_bytes(needed)} ({needed} bytes) free for what this run is to write",
                got=f"{format_bytes(free_bytes[mount])} ({free_bytes[mount]} bytes)",
                where=f"the file system at {mount}",
                remedy="make room, choose a target elsewhere, or make fewer targets at a time (--rank, --part)",
            )


def may_share(files: ShardFiles, format_name: str, target: Path) -> bool:
    """Tell whether a target of a format at the path `target` can share blocks with source files."""
    aligned = files.format == format_name and formats.info(format_name).shares_blocks
    return aligned and _can_share(Path(next(iter(files.by_rank.values()))[0]), target)


def _can_share(source: Path, target: Path) -> bool:
    """Tell whether the file system shares blocks, tried with a file without a name."""
    try:
        trial = os.open(nearest_folder(target.parent), os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        return False
    try:
        with source.open("rb") as stream:
            fcntl.ioctl(trial, _CLONE_RANGE, struct.pack("=qQQQ", stream.fileno(), 0, _BLOCK_BYTES, 0))
    except OSError:
        return False
    finally:
        os.close(trial)
    return True


def nearest_folder(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    while folder != folder.parent and not os.path.exists(folder):  # noqa: PTH110 - Path.exists raises where a name is too long
        folder = folder.parent
    return folder


def _mount_of(folder: Path) -> str:
    folder = folder.resolve()
    device = folder.stat().st_dev
    while folder.parent != folder and folder.parent.stat().st_dev == device:
        folder = folder.parent
    return str(folder)


def _free_bytes(mount: str) -> int | None:
    """Return how much is free for this user; None if the file system does not count blocks."""
    status = os.statvfs(mount)
    free_blocks = status.f_bfree if os.geteuid() == 0 else status.f_bavail
    return free_blocks * status.f_frsize if status.f_blocks else None


def _replaced_bytes(path: Path) -> int:
    try:
        status = path.lstat()
    except OSError:
        return 0
    return status.st_blocks * 512 if status.st_nlink == 1 else 0
