"""Files in memory that the library can open by a name: it follows no link to one that has none."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

# A file system in memory; where there is none, or no room in it, what is for temporary files.
_SHARED_MEMORY = "/dev/shm"
_PREFIX = "reshard_mpi-"


class Scratch:
    """An empty file of this user alone, open for reading and writing, which goes with the block."""

    def __init__(self, size_bytes: int) -> None:
        """Make it where there is room for so much. Raises OSError."""
        self.descriptor, self.path = tempfile.mkstemp(prefix=_PREFIX, dir=_folder(size_bytes))

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, *_: object) -> None:
        self.forget_name()
        os.close(self.descriptor)

    def forget_name(self) -> None:
        """Remove the name, so that nothing is left of the file even where this process is killed."""
        Path(self.path).unlink(missing_ok=True)


def _folder(size_bytes: int) -> str:
    for folder in (_SHARED_MEMORY, tempfile.gettempdir()):
        if os.access(folder, os.W_OK | os.X_OK):
            status = os.statvfs(folder)
            if not status.f_blocks or status.f_bavail * status.f_frsize >= size_bytes:
                return folder
    raise OSError(errno.ENOSPC, "no room for the structure of a shard", f"{_SHARED_MEMORY} or {tempfile.gettempdir()}")
