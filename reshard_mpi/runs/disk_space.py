"""Estimate the disk space for targets, and refuse a run without room (`SpaceEstimate`, `require_room`)."""

from __future__ import annotations

import fcntl
import os
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from reshard_mpi import formats
from reshard_mpi.checkpoints.shard_files import ShardFiles
from reshard_mpi.errors import TargetError
from reshard_mpi.formats.manifest import ShardSpec
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
        folder = nearest_folder(path.parent)
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
