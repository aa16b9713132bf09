"""Locating the tensors of an HDF5 file, native or foreign."""

from __future__ import annotations

import os
from collections.abc import Iterator

from reshard_mpi.dtypes import BY_NAME
from reshard_mpi.errors import ShardError
from reshard_mpi.formats import files
from reshard_mpi.formats.hdf5 import datasets, library, native, schema, superblock
from reshard_mpi.formats.hdf5.headers import Header, Headers
from reshard_mpi.formats.hdf5.walking import Node, Walk, root
from reshard_mpi.manifest import ByteRange, Manifest, Segments, TensorEntry


def locate(path: str) -> Manifest:
    """Find the tensors and strings of the HDF5 file at `path` without reading any payload.

    Raises ShardError if the file is empty, truncated, over-long, damaged or not HDF5, if anything in it lies in
    another file, or if a dataset's type is none that tensors have.
    """
    with files.opened(path) as (fd, size_bytes):
        superblock.check_length(fd, path, size_bytes)
        stamp = datasets.Stamp.of(os.fstat(fd))
        with library.failures_named(path):
            file = library.open_file(path)
            top = root(file)
            if native.is_native(top, path):
                return _native(path, top, stamp, Headers(fd, size_bytes, file))
            return _foreign(path, top, stamp)


def _native(path: str, top: Node, stamp: datasets.Stamp, headers: Headers) -> Manifest:
    walk = Walk(path, top)
    description = native.describe(walk, top, path)
    found: dict[str, TensorEntry] = {}
    for name, node in _native_datasets(walk, top, path, headers):
        entry = _from_header(name, path, node.header) if node.header else _from_handle(name, path, node, stamp)
        if name in found:
            where = _where(path, node)
            raise ShardError("two datasets of a native HDF5 shard have the same name", got=repr(name), where=where)
        found[name] = entry
    if found.keys() != set(description.names) or len(found) != len(description.names):
        odd = sorted(found.keys() ^ set(description.names))[:3]
        raise ShardError(
            "the tensors of a native HDF5 shard are not those in its list of contents",
            expected=f"{len(description.names)} tensors",
            got=f"{len(found)} tensors; in one but not the other: {odd}",
            where=path,
        )
    tensors = {name: found[name] for name in description.names}
    return Manifest(path, schema.NAME, tensors, description.strings, description.identity)


def _from_header(name: str, path: str, header: Header) -> TensorEntry:
    source = Segments((ByteRange(path, header.offset_bytes, header.size_bytes),))
    return TensorEntry(name, header.dtype, header.shape, source, header.box, header.global_shape)


def _from_handle(name: str, path: str, node: Node, stamp: datasets.Stamp) -> TensorEntry:
    where = _where(path, node)
    stored, shape, source = datasets.content(node.handle, path, node.route, stamp, where)
    place = native.place(node.handle, stored, shape, where)
    if not isinstance(source, Segments) and node.handle.get_storage_size() == 0:
        raise ShardError("a tensor of a native HDF5 shard was never written", where=where)
    return TensorEntry(name, place.dtype, shape, source, place.box, place.global_shape)


def _where(path: str, node: Node) -> str:
    return f"{path}, /{'/'.join(node.path)}"


def _native_datasets(walk: Walk, top: Node, path: str, headers: Headers) -> Iterator[tuple[str, Node]]:
    for node in walk.datasets(top, skip=(schema.RESERVED,), headers=headers):
        yield "/".join(node.path), node
    escaped = walk.child(walk.child(top, schema.RESERVED), schema.ESCAPED)
    for node in walk.datasets(escaped):
        yield schema.unescape(node.path[-1], path), node


def _foreign(path: str, top: Node, stamp: datasets.Stamp) -> Manifest:
    tensors: dict[str, TensorEntry] = {}
    strings: dict[str, str] = {}
    text_bytes = 0
    for node in Walk(path, top).datasets(top):
        name = "/".join(node.path)
        where = f"{path}, /{name}"
        if datasets.is_text(node.handle, where):
            strings[name] = datasets.read_text(node.handle, path, where)
            text_bytes += len(strings[name])
        else:
            stored, shape, source = datasets.content(node.handle, path, node.route, stamp, where)
            tensors[name] = TensorEntry(name, BY_NAME[stored.name], shape, source)
        text_bytes += len(name)
        if text_bytes > files.MAX_TEXT_BYTES:
            raise ShardError(
                "a shard's names and strings take too much memory",
                expected=f"{files.MAX_TEXT_BYTES} bytes at most",
                where=where,
            )
    return Manifest(path, schema.NAME, tensors, strings)
