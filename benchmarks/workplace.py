"""Where a benchmark keeps what it makes, and that nothing of it stays."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

_MEMORY = Path("/dev/shm")
# Beside what is written, in a memory file system: the processes themselves.
_PROCESSES_BYTES = 1 << 30
_ROUNDING = 1.02


class NoRoomError(Exception):
    """There is no place for what a benchmark would write."""


@contextmanager
def workplace(folder: Path | None, needed_bytes: int) -> Iterator[Path]:
    """Yield an empty folder with room for `needed_bytes`; it is removed at the end.

    folder: where to make it (None: in memory if there is room, else where temporary files go). Raises NoRoomError.
    """
    with tempfile.TemporaryDirectory(prefix="reshard-mpi-", dir=_with_room(folder, needed_bytes)) as name:
        yield Path(name)


def _with_room(folder: Path | None, needed_bytes: int) -> Path:
    needed_bytes = int(needed_bytes * _ROUNDING)
    if folder is not None:
        candidates = [folder]
    else:
        available = psutil.virtual_memory().available
        roomy = _MEMORY.is_dir() and available > needed_bytes + _PROCESSES_BYTES
        candidates = [*([_MEMORY] if roomy else []), Path(tempfile.gettempdir())]
    for candidate in candidates:
        if candidate != folder and candidate != _MEMORY:
            print(f"no room in memory for {needed_bytes / 1e9:.1f} GB: using {candidate}", file=sys.stderr)
        if shutil.disk_usage(candidate).free > needed_bytes:
            return candidate
    raise NoRoomError(f"no room for {needed_bytes / 1e9:.1f} GB in {candidates[-1]}: choose another --folder")
