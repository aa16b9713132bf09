"""Locating the tensors of an HDF5 file: by its index where this program wrote it, else by the library, apart."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from reshard_mpi.formats import files
from reshard_mpi.formats.hdf5 import index, superblock
from reshard_mpi.formats.manifest import Manifest


def locate(path: str, like: Manifest | None = None) -> Manifest:
    """Find the tensors and strings of the HDF5 file at `path` without reading any payload.

    Raises ShardError if the file is empty, truncated, over-long, damaged or not HDF5, if anything in it lies in
    another file, or if a dataset's type is none that tensors have.
    """
    with files.opened(path) as (fd, size_bytes):
        found = index.locate(fd, path, superblock.end_of_file(fd, path, size_bytes))
        return found if found is not None else _isolation().locate(path, size_bytes)


def stored_sums(path: str) -> Mapping[str, int]:
    """Return the sums of its tensors that the shard at `path` keeps; none if it keeps none. Raises ShardError."""
    with files.opened(path) as (fd, size_bytes):
        found = index.stored_sums(fd, path, superblock.end_of_file(fd, path, size_bytes))
        return found if found is not None else _isolation().stored_sums(path)


def read_back(meant: Manifest) -> None:
    """Look at the structure of a native shard that was just written. Raises ShardError if it is not what was meant."""
    with files.opened(meant.path) as (fd, size_bytes):
        found = index.locate(fd, meant.path, superblock.end_of_file(fd, meant.path, size_bytes))
    if found != meant:
        raise files.not_as_written(meant.path)


def check_crc(path: str) -> bool:
    """Return False: HDF5 has no checksum of a whole file."""
    return False


def _isolation() -> ModuleType:
    # Needed only for files that this program did not make.
    from reshard_mpi.formats.hdf5 import isolation

    return isolation
