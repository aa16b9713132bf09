"""Where the elements of one dataset are: a byte range of the file, or something only the library can decode."""

from __future__ import annotations

import math
import os
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from h5py import h5d, h5s, h5t, h5z

from reshard_mpi.box import Box
from reshard_mpi.dtypes import BY_NAME, DType
from reshard_mpi.errors import ShardError
from reshard_mpi.formats import files
from reshard_mpi.formats.hdf5 import elements, library
from reshard_mpi.formats.hdf5.schema import Route
from reshard_mpi.manifest import ByteRange, Decoded, Segments

_RAW = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "V16"}
_MAX_PAYLOAD_BYTES = 1 << 63


class Stamp(NamedTuple):
    """What tells that a file is still the one that was located."""

    inode: int
    size_bytes: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)


class Content(NamedTuple):
    """What a dataset holds."""

    stored: elements.Stored
    shape: tuple[int, ...]
    source: Segments | Decoded


def shape_of(handle: Any, properties: Any, where: str) -> tuple[int, ...]:
    """Return the shape of a dataset. Raises ShardError if its elements are in other files, or it has no shape.

    The storage, in the dataset's creation `properties`, is looked at first: asking a virtual dataset for its shape can
    open the files it is made of.
    """
    layout = properties.get_layout()
    external = layout == h5d.CONTIGUOUS and properties.get_external_count() > 0
    if external or layout == h5d.VIRTUAL:
        raise ShardError(
            "a dataset keeps its elements in other files, which is not followed",
            expected="elements in the file itself",
            got="external storage" if external else "a virtual dataset",
            where=where,
            remedy="copy it into one plain file (h5repack)",
        )
    space = handle.get_space()
    if space.get_simple_extent_type() == h5s.NULL:
        raise ShardError("a dataset has no shape and no elements (a null dataspace)", where=where)
    shape: tuple[int, ...] = space.get_simple_extent_dims()
    return shape


def content(handle: Any, path: str, route: Route, stamp: Stamp, where: str) -> Content:
    """Return what a dataset holds and where. Raises ShardError if that cannot be read bit by bit."""
    properties = handle.get_create_plist()
    shape = shape_of(handle, properties, where)
    kind = handle.get_type()
    stored = elements.recognise(kind)
    if stored is None:
        raise ShardError(
            "a dataset has a type that no tensor has",
            expected="integers, floats, booleans or complex numbers as h5py stores them",
            got=f"HDF5 type of class {kind.get_class()} and {kind.get_size()} bytes",
            where=where,
            remedy="leave it out of the file",
        )
    dtype = BY_NAME[stored.name]
    if dtype.itemsize_bytes * math.prod(length for length in shape if length) >= _MAX_PAYLOAD_BYTES:
        raise ShardError("the shape of a dataset is impossibly large", got=str(list(shape)), where=where)
    size_bytes = dtype.itemsize_bytes * math.prod(shape)
    if size_bytes == 0:
        return Content(stored, shape, Segments((), stored.swapped))
    offset = handle.get_offset()
    if offset is not None and properties.get_layout() == h5d.CONTIGUOUS:
        stored_bytes = handle.get_storage_size()
        if stored_bytes != size_bytes or offset + size_bytes > stamp.size_bytes:
            raise ShardError(
                "the elements of a dataset do not lie in its file",
                expected=f"{size_bytes} bytes at byte {offset}",
                got=f"storage of {stored_bytes} bytes in a file of {stamp.size_bytes}",
                where=where,
                remedy="the shard is damaged: save or copy it again",
            )
        return Content(stored, shape, Segments((ByteRange(path, offset, size_bytes),), stored.swapped))
    _check_filters(properties, where)
    read = partial(_read, path, stamp, route, dtype, stored.swapped)
    return Content(stored, shape, Decoded(path, read, _decoded_shape(properties, shape)))


def read_text(handle: Any, path: str, where: str) -> str:
    """Return a scalar string dataset. Raises ShardError if it is too long."""
    kind = handle.get_type()
    length_bytes = _variable_length(handle, path, where) if kind.is_variable_str() else kind.get_size()
    if length_bytes > files.MAX_STRING_BYTES:
        raise ShardError(
            "a string in an HDF5 shard is too long",
            expected=f"{files.MAX_STRING_BYTES} bytes at most",
            got=f"{length_bytes} bytes",
            where=where,
        )
    if kind.is_variable_str():
        found = np.empty((), dtype=handle.dtype)
        handle.read(h5s.ALL, h5s.ALL, found)
        text = found.item()
        return text.decode() if isinstance(text, bytes) else str(text or "")
    fixed = np.zeros((), dtype=f"S{length_bytes}")
    handle.read(h5s.ALL, h5s.ALL, fixed, mtype=kind)
    return bytes(fixed.item()).decode()


def is_text(handle: Any, where: str) -> bool:
    """Tell whether a dataset is a single string."""
    if handle.get_type().get_class() != h5t.STRING:
        return False
    return shape_of(handle, handle.get_create_plist(), where) == ()


def _variable_length(handle: Any, path: str, where: str) -> int:
    """Return the length of a variable-length string, from the file itself, before the library makes room for it.

    HDF5 File Format Specification, "Variable-length" data: a 4-byte length, then the place in a global heap.
    """
    offset = handle.get_offset()
    if offset is None:
        raise ShardError("a string in an HDF5 shard is stored in a way that is not read", where=where)
    with files.opened(path) as (fd, _):
        return int.from_bytes(os.pread(fd, 4, offset), "little")


def _decoded_shape(properties: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the least that is decoded at once: a chunk, all of a compact dataset, one element of an unwritten one."""
    layout = properties.get_layout()
    if layout == h5d.CHUNKED:
        return tuple(min(chunk, length) for chunk, length in zip(properties.get_chunk(), shape))
    return shape if layout == h5d.COMPACT else (1,) * len(shape)


def _check_filters(properties: Any, where: str) -> None:
    for index in range(properties.get_nfilters()):
        code, _, _, name = properties.get_filter(index)
        if not h5z.filter_avail(code):
            raise ShardError(
                "a dataset is compressed by a method that is not installed",
                got=f"filter {code} {name!r}",
                where=where,
                remedy="install its HDF5 plugin (pip install hdf5plugin), or copy the file with h5repack -f NONE",
            )


def _read(path: str, stamp: Stamp, route: Route, dtype: DType, swapped: bool, box: Box) -> np.ndarray[Any, Any]:
    """Read a box through the library, with no conversion by it: the elements come out as they are in the file."""
    where = f"{path}, /{'/'.join(route)}"
    out = np.empty(box.shape, dtype=_RAW[dtype.itemsize_bytes])
    if out.size == 0:
        return out
    with library.failures_named(where):
        _, handle = _open(path, stamp, route)
        space = handle.get_space()
        if not box.shape:
            memory = h5s.create(h5s.SCALAR)
        else:
            space.select_hyperslab(box.start, box.shape)
            memory = h5s.create_simple(box.shape)
        handle.read(memory, space, out, mtype=handle.get_type())
    if swapped:
        out.reshape(-1).view(f"u{dtype.part_bytes}").byteswap(inplace=True)
    return out


# A few stay open, with their chunk caches, since a dataset is read box after box.
@lru_cache(maxsize=4)
def _open(path: str, stamp: Stamp, route: Route) -> tuple[Any, Any]:
    if Stamp.of(Path(path).stat()) != stamp:
        raise ShardError("a shard has changed since it was opened", where=path, remedy="run again")
    file = library.open_file(path)
    handle = library.follow(file, route)
    shape_of(handle, handle.get_create_plist(), path)
    return file, handle
