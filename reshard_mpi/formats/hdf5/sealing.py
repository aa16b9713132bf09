"""The last step of writing a native shard: the sums of its tensors, in a dataset in the order of its contents."""

from __future__ import annotations

import os
from collections.abc import Mapping

from reshard_mpi.errors import UsageError
from reshard_mpi.formats.hdf5 import index, superblock
from reshard_mpi.formats.protocol import NO_SUMS


def seal(fd: int, path: str, sums: Mapping[str, int] = NO_SUMS, *, crc: bool = False) -> None:
    """Write the sums of all tensors, in the order of the list of contents, to the place reserved for them.

    Raises UsageError for `crc`, as HDF5 has no checksum of a whole file, OSError if the sums cannot be written.
    """
    if crc:
        raise UsageError(
            "an HDF5 shard has no checksum of the whole file", expected="no --crc", got="--crc", where=path
        )
    if sums:
        end = superblock.end_of_file(fd, path, os.fstat(fd).st_size)
        index.write_sums(fd, path, end, list(sums.values()))
