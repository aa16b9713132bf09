"""Opening HDF5 files with h5py: read-only, without locks, and with every failure as a ShardError."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from h5py import h5d, h5f, h5g, h5o, h5p

from reshard_mpi.errors import ReshardError, ShardError


@contextmanager
def failures_named(where: str) -> Iterator[None]:
    """Turn what h5py raises on a damaged file into a ShardError that names `where`."""
    try:
        yield
    except ReshardError:
        raise
    except (OSError, LookupError, RuntimeError, ValueError, TypeError, ArithmeticError) as error:
        raise ShardError(
            "an HDF5 shard cannot be read: it is damaged, or needs an HDF5 library with other features",
            got=f"{type(error).__name__}: {error}"[:500],
            where=where,
            remedy="check it with h5dump; save or copy it again",
        ) from error


def open_file(path: str) -> Any:
    """Open the file at `path` for reading. It stays open as long as any object of it is held."""
    access = h5p.create(h5p.FILE_ACCESS)
    # Some cluster file systems refuse locks, and nobody writes a source.
    access.set_file_locking(False, True)
    access.set_fclose_degree(h5f.CLOSE_WEAK)
    return h5f.open(os.fsencode(path), h5f.ACC_RDONLY, access)


def follow(file: Any, route: tuple[str, ...], access: Any = None) -> Any:
    """Return the object at `route`, the names of hard links from the root, opened link by link.

    access: properties to open a dataset with. Given a whole path, HDF5 follows links even out of the file.
    """
    node = h5g.open(file, b"/")
    for depth, name in enumerate(route, 1):
        if access is not None and depth == len(route):
            return h5d.open(node, name.encode(), access)
        node = h5o.open(node, name.encode())
    return node
