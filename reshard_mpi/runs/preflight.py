"""Check room, names and files in the way before anything is created (`require_room`)."""

from __future__ import annotations

import fcntl
import json
import os
import struct
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from reshard_mpi import formats
from reshard_mpi.checkpoints.discovery import ShardFiles, shards_in, strangers
from reshard_mpi.checkpoints.opening import moments_of
from reshard_mpi.engine.open_files import Files
from reshard_mpi.engine.read import only_element, takes_numpy
from reshard_mpi.errors import TargetError
from reshard_mpi.formats.files import MAX_KEPT_BYTES, MAX_TENSORS, kept_bytes, kept_kind_bytes
from reshard_mpi.formats.manifest import NotChecksummableError, ShardSpec, Specs, counted_bytes, is_in_crc
from reshard_mpi.journal.identity import STRATEGY_RECORD
from reshard_mpi.journal.records import COMMIT_RECORD, STATE, TargetInputs, TargetRecord, rank_of_folder, record_path
from reshard_mpi.planning.rank_plan import RankPlan
from reshard_mpi.planning.shared_facts import require_one_checkpoint
from reshard_mpi.processes.comm import Comm
from reshard_mpi.runs.conversion import Conversion
from reshard_mpi.runs.request import Request
from reshard_mpi.sharding.placement import Strategy
from reshard_mpi.text import format_bytes

# To share blocks of two files (`struct file_clone_range`): the source's descriptor, its offset, a length, an offset.
_CLONE_RANGE = 0x4020940D
_BLOCK_BYTES = 4096
# For a file of at least this size, a file system keeps the list of its pieces in blocks of their own, one for each 64
# MiB: ext4 has 340 pieces in a block, and in a file that several processes fill these may be smaller than a MiB.
_LISTED_FROM_BYTES = 1 << 20
_LISTED_BYTES = 64 << 20
# The entries of a file in its folder: its own, its lock, and the temporary ones.
_DIRECTORY_ENTRY_BYTES = 512


class SpaceNeed(NamedTuple):
    """The most space that one process of a run takes on a file system, and the free space there."""

    mount: str  # the top folder of that file system, by which the processes of a run know it
    needed_bytes: int
    free_bytes: int


class SpaceByFilesystem:
    """Adds up, by file system, the room for what one process is going to write, target after target."""

    def __init__(self) -> None:
        self._held_bytes: defaultdict[str, int] = defaultdict(int)
        self._peak_bytes: defaultdict[str, int] = defaultdict(int)
        self._record_bytes: defaultdict[str, int] = defaultdict(int)

    def add(self, path: Path, size_bytes: int, *, left_bytes: int) -> None:
        """Add a target. The file that it replaces is freed after it is written, leftovers of earlier runs before that.

        Args:
            size_bytes: the most that the file takes, with its structure.
            left_bytes: size of the leftovers.
        """
        mount = _mount_of(path.parent)
        folder_bytes = 0 if path.parent.exists() else _BLOCK_BYTES
        held_bytes = self._held_bytes[mount] - left_bytes + on_disk_bytes(size_bytes, mount) + folder_bytes
        self._peak_bytes[mount] = max(self._peak_bytes[mount], held_bytes)
        self._held_bytes[mount] = held_bytes - _replaced_bytes(path)

    def add_record(self, path: Path, size_bytes: int) -> None:
        """Add a small file that the run keeps and may write anew: then the old and the new one exist for a moment."""
        mount = _mount_of(path.parent)
        record_bytes = on_disk_bytes(size_bytes + _DIRECTORY_ENTRY_BYTES, mount)
        self._record_bytes[mount] = max(self._record_bytes[mount], record_bytes)
        self._held_bytes[mount] += record_bytes
        self._peak_bytes[mount] = max(self._peak_bytes[mount], self._held_bytes[mount])

    def rooms(self, processes: int, shares: Callable[[], bool]) -> tuple[SpaceNeed, ...]:
        """Return the room that is needed; empty if targets may share blocks with the source, and so take none.

        Args:
            processes: how many the run has, each of which may need as much.
            shares: tells whether blocks may be shared; called only if there is not enough room.

        Raises OSError if a file system cannot be asked what is free.
        """
        needed = ((mount, peak + self._record_bytes[mount]) for mount, peak in self._peak_bytes.items())
        with_free = ((mount, needed_bytes, _free_bytes(mount)) for mount, needed_bytes in needed)
        rooms = tuple(SpaceNeed(mount, needed, free) for mount, needed, free in with_free if free is not None)
        if any(room.needed_bytes * processes > room.free_bytes for room in rooms) and shares():
            return ()
        return rooms


def on_disk_bytes(size_bytes: int, mount: str) -> int:
    """Return the most bytes that a file of a given size takes on a file system: its blocks, and the list of these."""
    block_bytes = max(_BLOCK_BYTES, os.statvfs(mount).f_frsize)
    blocks = -(-size_bytes // block_bytes)
    lists = -(-size_bytes // _LISTED_BYTES) if size_bytes >= _LISTED_FROM_BYTES else 0
    return (blocks + lists) * block_bytes


def require_room(shares: Iterable[Sequence[SpaceNeed]]) -> None:
    """Raise TargetError if the processes of a run together need more space than a file system has.

    Args:
        shares: what each of them needs. Equal shares give the same result on every process.
    """
    needed_bytes: defaultdict[str, int] = defaultdict(int)
    free_bytes: dict[str, int] = {}
    for share in shares:
        for room in share:
            needed_bytes[room.mount] += room.needed_bytes
            free_bytes[room.mount] = min(room.free_bytes, free_bytes.get(room.mount, room.free_bytes))
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
    lying = lying_beside(folder, format_name, formats.index_of(format_name), every_path, own_paths)
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
    folder: Path, format_name: str, index: str | None, every_path: Iterable[Path], own_paths: Iterable[Path]
) -> list[Path]:
    """Return files in a target folder that may be taken for a part of the checkpoint written there, or for another one.

    Args:
        index: the name of the file that is to make the folder a checkpoint, if there is to be one.
        every_path: of the targets of all processes.
        own_paths: of those whose folders this process looks into.
    """
    if not folder.is_dir():
        return []
    targets = set(every_path)
    marks = (folder / name for name in formats.marks_in(str(folder)) if name != index)
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
        endings = formats.by_name(format_name).SUFFIXES
        yield from (path for path in shards_in(folder, None) if path.name.endswith(endings))
    else:
        for path in own_paths:
            yield from strangers(path)
    for name in os.listdir(folder):  # noqa: PTH208 - of names alone
        if rank_of_folder(name) is not None and name not in target_folders and (folder / name).is_dir():
            yield from shards_in(folder / name, None)


def may_share(files: ShardFiles, format_name: str, target: Path) -> bool:
    """Tell whether a target of a format at the path `target` can share blocks with source files."""
    aligned = files.format == format_name and formats.by_name(format_name).TRAITS.shares_blocks
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
    while not os.path.exists(folder):  # noqa: PTH110 - Path.exists raises where a name is too long
        folder = folder.parent
    return folder


def _mount_of(folder: Path) -> str:
    folder = _nearest(folder).resolve()
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
    if formats.by_name(format_name).TRAITS.own_loader_refuses_empty and not specs.names and not strings:
        raise TargetError(
            f"a target would hold nothing, and nobody reads that from {formats.title(format_name)} files",
            expected="a tensor or a text at least on every rank",
            got=f"nothing on rank {spec.identity.rank}",
            remedy="write it as safetensors or hdf5 (--to), or leave this rank out (--rank)",
        )
    count = len(specs.names) + len(strings)
    names_bytes = sum(map(kept_bytes, (*specs.names, *strings, *strings.values())))
    kinds_bytes = sum(kept_kind_bytes(len(kind.global_shape)) for kind in set(specs.kinds))
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
    unread = () if as_is else formats.by_name(format_name).TRAITS.types_own_loader_refuses
    if not any(kind.dtype.name in unread for kind in specs.kinds):
        return
    name, dtype = next(
        (name, specs.kinds[kind].dtype)
        for name, kind in zip(specs.names, specs.kind_ids)
        if specs.kinds[kind].dtype.name in unread
    )
    able = [
        other for other in formats.TARGETS if dtype.name not in formats.by_name(other).TRAITS.types_own_loader_refuses
    ]
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
    groups = (group for group in plan.tensors.groups if is_in_crc(group.kind.dtype, group.kind.global_shape))
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


# A number in JSON, with its separator.
_NUMBER_BYTES = 24
# The name of an element type, a sum and a flag in JSON, with their separators.
_SUM_BYTES = 48
# The identity of a run, with paths and options; keys of a record; a digest.
_IDENTITY_BYTES = 16384
_LINE_BYTES = 256
# A placement in the table of a strategy.
_PLACEMENT_BYTES = 1024
# What the report says of a target, and of each rank that it was read from, on a line of its own.
_REPORTED_TARGET_BYTES = 640
_REPORTED_RANK_BYTES = 16
# What the report says of the run as a whole; warnings and notes are few.
_REPORT_BYTES = 65536


class SpaceEstimate:
    """Adds up the room that one process needs for what `request` asks of it."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._tally = SpaceByFilesystem()
        self._read_ranks: dict[str, tuple[int, ...]] = {}
        self._sources: set[str] = set()
        self._stage_digests: set[str] = set()
        self._summed: set[str] = set()

    def add(self, plan: RankPlan, evidence: TargetInputs, format_name: str, path: Path, left_bytes: int) -> None:
        """Add the target of `plan` and its record.

        Args:
            path: of the target file.
            left_bytes: size of what an earlier run has left of it.
        """
        request = self._request
        self._read_ranks[str(path)] = plan.read_ranks
        if request.recorded:
            file = str(path.relative_to(request.target))
            record_bytes = record_at_most_bytes(plan, evidence, file, sums=request.verify)
            self._tally.add_record(record_path(Path(request.target, STATE), plan.target_rank), record_bytes)
            self._sources.update(source.path for source in evidence.sources.files)
            if request.verify and evidence.held.digest not in self._stage_digests:
                self._stage_digests.add(evidence.held.digest)
                self._summed.update(plan.tensors.specs.names)
        module = formats.by_name(format_name)
        size_bytes = module.size_at_most_bytes(plan.shard._replace(with_sums=request.verify), crc=request.crc)
        self._tally.add(path, size_bytes, left_bytes=left_bytes)

    def _add_strategy(self, target: Strategy) -> None:
        """Add the record of how the targets are cut: their placement table, escaped once more as one text."""
        names = (*target.parameters, *(glob for glob, _ in target.rules))
        size_bytes = _IDENTITY_BYTES + sum(2 * _text_bytes(name) + 2 * _NUMBER_BYTES for name in names)
        placements = {placement for held in target.parameters.values() for placement in held}
        size_bytes += _PLACEMENT_BYTES * (len(placements) + len(target.rules))
        path = Path(self._request.target, STATE, STRATEGY_RECORD)
        if not path.exists():
            self._tally.add_record(path, size_bytes)

    def rooms(
        self, reported: int, processes: int, shares: Callable[[], bool], strategy: Strategy | None
    ) -> tuple[SpaceNeed, ...]:
        """Return the room that is needed on each file system, as `SpaceByFilesystem.rooms` does.

        Args:
            reported: how many targets are in the report that this process writes, if any.
            processes, shares: see there.
            strategy: of the targets, if this process is to record it.
        """
        request = self._request
        if request.recorded and self._read_ranks:
            commit_bytes = commit_record_at_most_bytes(self._read_ranks.items(), self._sources, self._summed)
            self._tally.add_record(Path(request.target, COMMIT_RECORD), commit_bytes)
            if strategy is not None:
                self._add_strategy(strategy)
        if request.report is not None and reported:
            longest_path = max(self._read_ranks, key=len, default="")
            most_ranks = max(map(len, self._read_ranks.values()), default=0)
            self._tally.add_record(Path(request.report), report_at_most_bytes(reported, longest_path, most_ranks))
        return self._tally.rooms(processes, shares)


def record_at_most_bytes(plan: RankPlan, evidence: TargetInputs, file: str, *, sums: bool) -> int:
    """Return the most bytes that the record of a target can take. sums: whether it has the sums of the tensors."""
    record = TargetRecord("0" * 64, plan.target_rank, file, 0, evidence, announced=(0, 0))
    size_bytes = len(record.as_text()) + 4 * _NUMBER_BYTES
    if sums:
        for group in plan.tensors.groups:
            tensor_bytes = 3 * len(group.kind.global_shape) * _NUMBER_BYTES + _SUM_BYTES
            size_bytes += sum(tensor_bytes + _text_bytes(name) for name in group.names)
    return size_bytes


def commit_record_at_most_bytes(
    targets: Iterable[tuple[str, Sequence[int]]], sources: Iterable[str], summed: Collection[str]
) -> int:
    """Return the most bytes that a commit record can take.

    Args:
        targets: of each, its path and the ranks it is read from.
        sources: paths.
        summed: names of tensors with a sum.
    """
    size_bytes = _IDENTITY_BYTES
    size_bytes += sum(_LINE_BYTES + _text_bytes(file) + _NUMBER_BYTES * len(ranks) for file, ranks in targets)
    size_bytes += sum(_LINE_BYTES + _text_bytes(path) for path in sources)
    return size_bytes + sum(_text_bytes(name) + _SUM_BYTES for name in summed)


def report_at_most_bytes(targets: int, longest_path: str, most_ranks: int) -> int:
    """Return the largest size of a report on a number of targets, each read from `most_ranks` source ranks."""
    target_bytes = _REPORTED_TARGET_BYTES + _text_bytes(longest_path) + _REPORTED_RANK_BYTES * most_ranks
    return _REPORT_BYTES + targets * target_bytes


def _text_bytes(text: str) -> int:
    """Return how many bytes a text takes in JSON, which escapes all but ASCII characters."""
    return len(json.dumps(text)) + 2
