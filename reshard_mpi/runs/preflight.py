"""Check room, names and files in the way before anything is created (`require_room`)."""

from __future__ import annotations

import fcntl
import os
import struct
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from reshard_mpi import formats
from reshard_mpi.checkpoints.opening import moments_of
from reshard_mpi.checkpoints.shard_files import ShardFiles, shards_in, strangers
from reshard_mpi.engine.open_files import Files
from reshard_mpi.engine.read import only_element, takes_numpy
from reshard_mpi.errors import TargetError
from reshard_mpi.filesystem.paths import rank_of_folder
from reshard_mpi.formats.files import MAX_KEPT_BYTES, MAX_TENSORS, kept_bytes, kept_kind_bytes
from reshard_mpi.formats.manifest import NotChecksummableError, ShardSpec, Specs, counted_bytes, is_in_crc
from reshard_mpi.planning.rank_plan import RankPlan
from reshard_mpi.planning.shared_facts import require_one_checkpoint
from reshard_mpi.processes.comm import Comm
from reshard_mpi.runs.plan_conversion import Conversion
from reshard_mpi.text import format_bytes

# To share blocks of two files (`struct file_clone_range`): the source's descriptor, its offset, a length, an offset.
_CLONE_RANGE = 0x4020940D
_BLOCK_BYTES = 4096
# What a run takes besides its shards: records, the report, folders, lists of blocks. That is little beside any payload,
# and a disk that is full in the middle fails no more than the target that is written.
_KEPT_BYTES = 1 << 20
_KEPT_BYTES_A_TARGET = 2 * _BLOCK_BYTES
# The sum of a tensor in the record of its target, with the name.
_SUM_BYTES = 256


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
        folder = _nearest(path.parent)
        mount = self._mounts.get(folder) or self._mounts.setdefault(folder, _mount_of(folder))
        size_bytes = formats.by_name(format_name).size_at_most_bytes(spec, crc=crc) + _KEPT_BYTES_A_TARGET
        size_bytes += _SUM_BYTES * len(spec.specs) if spec.with_sums else 0
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


def stranger_notes(lying: Sequence[Path]) -> tuple[str, ...]:
    """Return a note on files of other checkpoints that a run leaves beside its targets, if there are any."""
    if not lying:
        return ()
    more = f" and {len(lying) - 1} more" if len(lying) > 1 else ""
    return (f"{lying[0]}{more} will lie beside the new targets: of another checkpoint, and left as it is",)


def require_no_strangers(
    folder: Path, format_name: str, every_path: Iterable[Path], own_paths: Iterable[Path], removed: Iterable[str]
) -> None:
    """Raise TargetError if a folder has foreign files that would be taken for a part of the checkpoint written there.

    Args:
        every_path, own_paths: as for `lying_beside`.
        removed: the paths, relative to the folder, of files that are going to be removed.
    """
    expected = {folder / name for name in removed}
    lying = lying_beside(folder, format_name, formats.info(format_name).index_files, every_path, own_paths)
    strangers = [path.relative_to(folder) for path in lying if path not in expected]
    if strangers:
        raise TargetError(
            "the target folder holds files that are no part of the checkpoint, and may be taken for one",
            expected="a folder without other checkpoint files",
            got=", ".join(map(str, strangers[:3])) + (f" and {len(strangers) - 3} more" if len(strangers) > 3 else ""),
            where=str(folder),
            remedy="choose another folder, or remove them if nobody needs them",
        )


def lying_beside(
    folder: Path, format_name: str, index_files: Collection[str], every_path: Iterable[Path], own_paths: Iterable[Path]
) -> list[Path]:
    """Return files in a target folder that may be taken for a part of the checkpoint written there, or for another one.

    Args:
        index_files: the names of the files that are to make the folder a checkpoint.
        every_path: of the targets of all processes.
        own_paths: of those whose folders this process looks into.
    """
    if not folder.is_dir():
        return []
    targets = set(every_path)
    marks = (folder / name for name in formats.marks_in(str(folder)) if name not in index_files)
    lying = (*marks, *_shards_beside(folder, format_name, targets, own_paths))
    return [path for path in dict.fromkeys(lying) if path not in targets]


def _shards_beside(
    folder: Path, format_name: str, targets: Collection[Path], own_paths: Iterable[Path]
) -> Iterator[Path]:
    """Yield the shards that are read with the targets in `folder`, if they are no targets: see `lying_beside`.

    Those are shards in the folder itself if its files make up one checkpoint, and shards in any rank folder.
    """
    target_folders = {path.parent.name for path in targets if path.parent != folder}
    if formats.folder_by_name(format_name) is not None:
        endings = formats.info(format_name).suffixes
        yield from (path for path in shards_in(folder, None) if path.name.endswith(endings))
    else:
        for path in own_paths:
            yield from strangers(path)
    for name in os.listdir(folder):  # noqa: PTH208 - of names alone
        if rank_of_folder(name) is not None and name not in target_folders and (folder / name).is_dir():
            yield from shards_in(folder / name, None)


def may_share(files: ShardFiles, format_name: str, target: Path) -> bool:
    """Tell whether a target of a format at the path `target` can share blocks with source files."""
    aligned = files.format == format_name and formats.info(format_name).shares_blocks
    return aligned and _can_share(Path(next(iter(files.by_rank.values()))[0]), target)


def _can_share(source: Path, target: Path) -> bool:
    """Tell whether the file system shares blocks, tried with a file without a name."""
    try:
        trial = os.open(_nearest(target.parent), os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
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


def require_short_names(paths: Iterable[Path]) -> None:
    """Raise TargetError if a path, or a name in it, is longer than the file system allows."""
    for path in paths:
        most_name_bytes, most_path_bytes = _longest(_nearest(path.parent))
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


def _nearest(folder: Path) -> Path:
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


def require_same_choice(comm: Comm, *checkpoints: ShardFiles) -> None:
    """Raise DisagreementError, the same on every process, unless all have chosen the same files of each checkpoint.

    Every process looks for them itself, and another one may become the newest meanwhile. All processes must call this.
    """
    for of_one in zip(*comm.allgather(tuple(map(moments_of, checkpoints))), strict=True):
        require_one_checkpoint(moment for moments in of_one for moment in moments)


def require_countable(conversion: Conversion, plan: RankPlan) -> None:
    """Raise TargetError for the first whole number of a target that has no place in the checksum of its file."""
    groups = (group for group in plan.tensors.groups if is_in_crc(group.kind.dtype, group.kind.shape))
    tensors = (group.tensor(place) for group in groups for place in range(len(group.names)))
    with Files() as files:
        for tensor in tensors:
            if any(takes_numpy(copy, tensor.spec.box, conversion.limits.buffer_bytes) for copy in tensor.copies):
                conversion.before_gathering()
            content = only_element(files, tensor, conversion.limits)
            try:
                counted_bytes(tensor.spec.name, content, tensor.spec.dtype)
            except NotChecksummableError as error:
                raise error.refusal(conversion.source.files.path) from None
