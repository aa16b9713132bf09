"""Locate the elements of one HDF5 dataset (`content`)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from h5py import h5d, h5f, h5fd, h5g, h5o, h5p, h5s, h5t, h5z

from reshard_mpi.errors import ReshardError, ShardError
from reshard_mpi.filesystem import source_files
from reshard_mpi.filesystem.paths import is_object_path
from reshard_mpi.filesystem.source_files import FileVersion, SourceFile
from reshard_mpi.formats import structure
from reshard_mpi.formats.dtypes import BY_NAME, DType
from reshard_mpi.formats.hdf5 import native_shard, types
from reshard_mpi.formats.hdf5.native_shard import GroupPath
from reshard_mpi.formats.locations import ByteRange, ByteRanges, LibraryRead
from reshard_mpi.sharding.box import Box


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
    if is_object_path(path):
        access.set_fileobj_driver(h5fd.fileobj_driver, source_files.open_stream(path))
    return h5f.open(os.fsencode(path), h5f.ACC_RDONLY, access)


def follow(file: Any, route: tuple[str, ...], access: Any = None) -> Any:
    """Return the object at `route`, the names of hard links from the root, opened link by link.

    Args:
        access: properties to open a dataset with. Given a whole path, HDF5 follows links even out of the file.
    """
    node = h5g.open(file, b"/")
    for depth, name in enumerate(route, 1):
        if access is not None and depth == len(route):
            return h5d.open(node, name.encode(), access)
        node = h5o.open(node, name.encode())
    return node


_RAW = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "V16"}
_MAX_PAYLOAD_BYTES = 1 << 63
# A chunk is decoded whole, whatever is wanted of it; programs make chunks of a few MiB at most.
MAX_CHUNK_BYTES = 256 << 20
# As much as HDF5 keeps of a dataset's chunks by itself.
_CHUNK_CACHE_BYTES = 1 << 20
# Memory for decoding a chunk, in multiples of its size, without and with filters. Measured with 8, 16 and 32 MiB.
_PLAIN_SHARE, _FILTERED_SHARE = 1.1, 2.1
# Filters that HDF5 has itself. What others do with a hostile file nobody knows, and HDF5 would look for them in
# whatever folder the environment names.
_FILTERS = {
    h5z.FILTER_DEFLATE,
    h5z.FILTER_SHUFFLE,
    h5z.FILTER_FLETCHER32,
    h5z.FILTER_SZIP,
    h5z.FILTER_NBIT,
    h5z.FILTER_SCALEOFFSET,
    h5z.FILTER_LZF,
}


class DatasetContent(NamedTuple):
    """A dataset that holds a tensor."""

    stored: types.Stored
    shape: tuple[int, ...]
    source: ByteRanges | LibraryRead


def shape_of(handle: Any, properties: Any, where: str) -> tuple[int, ...]:
    """Return the shape of a dataset. Raises ShardError if its elements are in other files, or it has no shape.

    Args:
        properties: those of its creation. They tell the kind of storage, which is checked first: asking a virtual
            dataset for its shape can open the files that it is made of.
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


def content(handle: Any, file: SourceFile, route: GroupPath, where: str) -> DatasetContent:
    """Return the type and shape of a dataset and where its elements lie. Raises ShardError if it is not a tensor's."""
    properties = handle.get_create_plist()
    shape = shape_of(handle, properties, where)
    kind = handle.get_type()
    stored = types.recognise(kind)
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
        return DatasetContent(stored, shape, ByteRanges((), stored.swapped))
    offset = handle.get_offset()
    if offset is not None and properties.get_layout() == h5d.CONTIGUOUS:
        stored_bytes = handle.get_storage_size()
        if stored_bytes != size_bytes or offset + size_bytes > file.size_bytes:
            raise ShardError(
                "the elements of a dataset do not lie in its file",
                expected=f"{size_bytes} bytes at byte {offset}",
                got=f"storage of {stored_bytes} bytes in a file of {file.size_bytes}",
                where=where,
                remedy="the shard is damaged: save or copy it again",
            )
        return DatasetContent(stored, shape, ByteRanges((ByteRange(file.path, offset, size_bytes),), stored.swapped))
    _check_filters(properties, where)
    chunk = _decoded_shape(properties, shape, dtype, where)
    decode = partial(read, file.path, file.version, route, dtype, stored.swapped)
    chunk_bytes = _whole_chunk_bytes(properties, dtype, chunk)
    decoding_bytes = int(chunk_bytes * (_FILTERED_SHARE if properties.get_nfilters() else _PLAIN_SHARE))
    kept_bytes = chunk_bytes if math.prod(chunk) < math.prod(shape) else 0
    return DatasetContent(stored, shape, LibraryRead(file.path, decode, chunk, decoding_bytes, kept_bytes))


def read_text(handle: Any, file: SourceFile, where: str) -> str:
    """Return the string that a dataset holds (see `is_text`). Raises ShardError if it is too long."""
    kind = handle.get_type()
    length_bytes = _variable_length(handle, file, where) if kind.is_variable_str() else kind.get_size()
    if length_bytes > structure.MAX_STRING_BYTES:
        raise ShardError(
            "a string in an HDF5 shard is too long",
            expected=f"{structure.MAX_STRING_BYTES} bytes at most",
            got=f"{length_bytes} bytes",
            where=where,
        )
    if kind.is_variable_str():
        cell = np.empty((), dtype=handle.dtype)
        handle.read(h5s.ALL, h5s.ALL, cell)
        text = cell.item()
        return text.decode() if isinstance(text, bytes) else str(text or "")
    fixed = np.zeros((), dtype=f"S{length_bytes}")
    handle.read(h5s.ALL, h5s.ALL, fixed, mtype=kind)
    return bytes(fixed.item()).decode()


def is_text(handle: Any, where: str) -> bool:
    """Tell whether a dataset is a single string."""
    if handle.get_type().get_class() != h5t.STRING:
        return False
    return shape_of(handle, handle.get_create_plist(), where) == ()


def _variable_length(handle: Any, file: SourceFile, where: str) -> int:
    """Return the length of a variable-length string, read from the file before the library allocates memory for it.

    HDF5 File Format Specification, "Variable-length" data: a 4-byte length, then a reference into a global heap.
    """
    offset = handle.get_offset()
    if offset is None:
        raise ShardError("a string in an HDF5 shard is stored in a way that is not read", where=where)
    return int.from_bytes(file.read(offset, 4), "little")


def _decoded_shape(properties: Any, shape: tuple[int, ...], dtype: DType, where: str) -> tuple[int, ...]:
    """Return the shape that is decoded at once: a chunk, all of a compact dataset, one element of an unwritten one."""
    layout = properties.get_layout()
    if layout != h5d.CHUNKED:
        return shape if layout == h5d.COMPACT else (1,) * len(shape)
    chunk = properties.get_chunk()
    size_bytes = _whole_chunk_bytes(properties, dtype, chunk)
    if size_bytes > MAX_CHUNK_BYTES:
        raise ShardError(
            "a dataset is stored in chunks that are too large",
            expected=f"at most {MAX_CHUNK_BYTES} bytes, as a chunk is decoded whole",
            got=f"{size_bytes} bytes: chunks of shape {list(chunk)}",
            where=where,
            remedy="copy it with smaller chunks, or none (h5repack -l CONTI)",
        )
    return tuple(min(chunk, length) for chunk, length in zip(chunk, shape))


def _whole_chunk_bytes(properties: Any, dtype: DType, chunk: tuple[int, ...]) -> int:
    """Return the size of a whole chunk; for a dataset without chunks, of the part decoded at once (shape `chunk`)."""
    lengths = properties.get_chunk() if properties.get_layout() == h5d.CHUNKED else chunk
    return dtype.itemsize_bytes * math.prod(lengths)


def _check_filters(properties: Any, where: str) -> None:
    for index in range(properties.get_nfilters()):
        code, _, _, name = properties.get_filter(index)
        if code not in _FILTERS or not h5z.filter_avail(code):
            raise ShardError(
                "a dataset is compressed by a method that is not read here",
                expected="a filter that HDF5 itself has: gzip, lzf, szip, shuffle, fletcher32, n-bit, scale-offset",
                got=f"filter {code} {name!r}",
                where=where,
                remedy="copy the file with h5repack -f NONE",
            )


def read(
    path: str, version: FileVersion, route: GroupPath, dtype: DType, swapped: bool, box: Box
) -> np.ndarray[Any, Any]:
    """Return the elements of a box. swapped: they are in the other byte order in the file, and are converted here."""
    where = native_shard.where(path, route)
    values = np.empty(box.shape, dtype=_RAW[dtype.itemsize_bytes])
    if values.size == 0:
        return values
    with failures_named(where):
        handle = _open(path, version, route)
        space = handle.get_space()
        if not box.shape:
            memory = h5s.create(h5s.SCALAR)
        else:
            space.select_hyperslab(box.start, box.shape)
            memory = h5s.create_simple(box.shape)
        handle.read(memory, space, values, mtype=handle.get_type())
    if swapped:
        values.reshape(-1).view(f"u{dtype.part_bytes}").byteswap(inplace=True)
    return values


def forget() -> None:
    """Close the file and datasets that `read` keeps open."""
    _open.cache_clear()
    _open_file.cache_clear()


# A dataset is read box after box, with a chunk cache of its own.
@lru_cache(maxsize=4)
def _open(path: str, version: FileVersion, route: GroupPath) -> Any:
    handle = follow(_open_file(path, version), route)
    properties = handle.get_create_plist()
    shape_of(handle, properties, path)
    if properties.get_layout() != h5d.CHUNKED:
        return handle
    # Else a chunk that is larger than what HDF5 keeps is decoded again for every part of it. A dataset that is open
    # already is not opened with a cache of another size, so it is closed before. Large chunks are kept of one alone.
    chunk_bytes = handle.get_type().get_size() * math.prod(properties.get_chunk())
    del handle
    if chunk_bytes > _CHUNK_CACHE_BYTES:
        _open.cache_clear()
    access = h5p.create(h5p.DATASET_ACCESS)
    access.set_chunk_cache(521, min(max(chunk_bytes, _CHUNK_CACHE_BYTES), MAX_CHUNK_BYTES), 0.75)
    return follow(_open_file(path, version), route, access)


@lru_cache(maxsize=1)
def _open_file(path: str, version: FileVersion) -> Any:
    _open.cache_clear()
    if source_files.version_of(path).is_later_than(version):
        raise ShardError("a shard has changed since it was opened", where=path, remedy="run again")
    return open_file(path)
