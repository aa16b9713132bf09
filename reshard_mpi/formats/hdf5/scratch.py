"""Files in memory that the HDF5 library can open: they need a name, as it follows no link to a file without one."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

# A file system in memory; without room in it, the folder for temporary files is used.
_SHARED_MEMORY = "/dev/shm"
_PREFIX = "reshard_mpi-"


class Scratch:
    """A file, empty at first, that only this user may open; it is open for reading and writing until the block ends."""

    def __init__(self, size_bytes: int) -> None:
        """Make the file where there is room for `size_bytes`. Raises OSError."""
        self.descriptor, self.path = tempfile.mkstemp(prefix=_PREFIX, dir=_folder(size_bytes))

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, *_: object) -> None:
        self.forget_name()
        os.close(self.descriptor)

    def forget_name(self) -> None:
        """Remove the name, so that nothing is left of the file even if this process is killed."""
        Path(self.path).unlink(missing_ok=True)


def _folder(size_bytes: int) -> str:
    for folder in (_SHARED_MEMORY, tempfile.gettempdir()):
        if os.access(folder, os.W_OK | os.X_OK):
            status = os.statvfs(folder)
            if not status.f_blocks or status.f_bavail * status.f_frsize >= size_bytes:
                return folder
    raise OSError(errno.ENOSPC, "no room for the structure of a shard", f"{_SHARED_MEMORY} or {tempfile.gettempdir()}")
