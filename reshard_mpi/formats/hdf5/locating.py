"""The tensors of an HDF5 file: by its index where this program wrote it, else by the library in another process."""

from __future__ import annotations

from collections.abc import Mapping

from reshard_mpi.formats import files
from reshard_mpi.formats.hdf5 import index, superblock
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.protocol import OnBytes, uncounted


def locate(path: str, like: Manifest | None = None) -> Manifest:
    """Return the tensors and strings of the HDF5 file at `path` without reading any payload.

    Raises ShardError if the file is empty, truncated, over-long, damaged or not HDF5, if it refers to other files, or
    if a dataset has a type that no tensor has.
    """
    with files.opened(path) as (fd, size_bytes):
        manifest = index.locate(fd, path, superblock.end_of_file(fd, path, size_bytes))
        if manifest is None:
            from reshard_mpi.formats.hdf5 import isolation  # for files that this program did not write

            return isolation.locate(path, size_bytes)
        return manifest


def stored_sums(path: str) -> Mapping[str, int]:
    """Return the sums of its tensors that the shard at `path` keeps; none if it keeps none. Raises ShardError."""
    with files.opened(path) as (fd, size_bytes):
        sums = index.stored_sums(fd, path, superblock.end_of_file(fd, path, size_bytes))
        if sums is None:
            from reshard_mpi.formats.hdf5 import isolation

            return isolation.stored_sums(path)
        return sums


def read_back(meant: Manifest) -> None:
    """Read the structure of a native shard that was just written. Raises ShardError if it is not that of `meant`."""
    with files.opened(meant.path) as (fd, size_bytes):
        if index.locate(fd, meant.path, superblock.end_of_file(fd, meant.path, size_bytes)) != meant:
            raise files.not_as_written(meant.path)


def check_crc(path: str, on_bytes: OnBytes = uncounted) -> bool:
    """Return False: HDF5 has no checksum of a whole file."""
    return False
