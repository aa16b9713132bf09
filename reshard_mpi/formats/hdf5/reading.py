"""The tensors of an HDF5 file, native or foreign, located with the library.

This runs in a process of its own (`child`): a hostile file may crash the library.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from h5py import h5d, h5s, h5t

from reshard_mpi.errors import ShardError
from reshard_mpi.formats import files
from reshard_mpi.formats.columns import TensorEntry, Tensors
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.hdf5 import datasets, library, native, schema
from reshard_mpi.formats.hdf5.datasets import Shard
from reshard_mpi.formats.hdf5.walking import Node, Walk, root
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.places import Segments


def locate(path: str, on_progress: Callable[[], None] = lambda: None) -> Manifest:
    """Return the tensors and strings of the HDF5 file at `path` without reading any payload.

    on_progress: called for every link. Raises ShardError if the file is damaged or not HDF5, if it refers to other
    files, or if a dataset has a type that no tensor has.
    """
    with files.opened(path) as (fd, _), library.failures_named(path):
        shard = Shard(path, fd, datasets.Stamp.of(os.fstat(fd)))
        root_group = root(library.open_file(path))
        walk = Walk(path, root_group, on_progress)
        return (_native if native.is_native(root_group, path) else _foreign)(shard, walk, root_group)


def stored_sums(path: str, on_progress: Callable[[], None] = lambda: None) -> dict[str, int]:
    """Return the sums of the tensors of the shard at `path`; none if it keeps none. Raises ShardError."""
    with files.opened(path), library.failures_named(path):
        root_group = root(library.open_file(path))
        if not native.is_native(root_group, path):
            return {}
        walk = Walk(path, root_group, on_progress)
        reserved = walk.child(root_group, schema.RESERVED)
        if not reserved.handle.links.exists(schema.SUMS.encode()):
            return {}
        names = native.describe(walk, root_group, path).names
        node = walk.child(reserved, schema.SUMS)
        properties = node.handle.get_create_plist()
        shape = datasets.shape_of(node.handle, properties, path)
        if shape != (len(names),) or properties.get_layout() != h5d.CONTIGUOUS:
            raise ShardError(
                "the sums of a native HDF5 shard are not one a tensor",
                expected=f"{len(names)} numbers",
                got=f"shape {list(shape)}",
                where=path,
            )
        numbers = np.zeros(shape, np.uint32)
        if numbers.size:
            node.handle.read(h5s.ALL, h5s.ALL, numbers, mtype=h5t.NATIVE_UINT32)
        return dict(zip(names, map(int, numbers)))


def _native(shard: Shard, walk: Walk, root_group: Node) -> Manifest:
    path = shard.path
    description = native.describe(walk, root_group, path)
    names = set(description.names)
    entries: dict[str, TensorEntry] = {}
    spans: list[_Span] = []
    for name, node in _native_datasets(walk, root_group):
        if name not in names:
            raise _not_in_contents(path, len(names), [name])
        where = schema.where(path, node.path)
        if name in entries:
            raise ShardError("two datasets of a native HDF5 shard have the same name", got=repr(name), where=where)
        stored, shape, source = datasets.content(node.handle, shard, node.route, where)
        place = native.place(node.handle, stored, shape, where)
        if not isinstance(source, Segments) and node.handle.get_storage_size() == 0:
            raise ShardError("a tensor of a native HDF5 shard was never written", where=where)
        entries[name] = TensorEntry(name, place.dtype, shape, source, place.box, place.global_shape)
        spans += _spans(entries[name], node)
    _require_apart(path, spans)
    if len(entries) != len(description.names):
        raise _not_in_contents(path, len(description.names), sorted(names - entries.keys())[:3])
    tensors = Tensors(path, (entries[name] for name in description.names))
    return Manifest(path, schema.NAME, tensors, description.strings, description.identity)


def _not_in_contents(path: str, expected: int, odd: list[str]) -> ShardError:
    return ShardError(
        "the tensors of a native HDF5 shard are not those in its list of contents",
        expected=f"{expected} tensors, each listed once",
        got=f"in one but not the other: {odd}" if odd else "a name that is listed twice",
        where=path,
    )


def _native_datasets(walk: Walk, root_group: Node) -> Iterator[tuple[str, Node]]:
    for node in walk.datasets(root_group, skip=(schema.RESERVED,)):
        yield "/".join(node.path), node
    escaped = walk.child(walk.child(root_group, schema.RESERVED), schema.ESCAPED)
    for node in walk.datasets(escaped):
        yield schema.unescape(node.path[-1]), node


def _foreign(shard: Shard, walk: Walk, root_group: Node) -> Manifest:
    tensors = Tensors(shard.path)
    strings: dict[str, str] = {}
    spans: list[_Span] = []
    kept_bytes = 0
    for node in walk.datasets(root_group):
        name = "/".join(node.path)
        where = schema.where(shard.path, node.path)
        if datasets.is_text(node.handle, where):
            strings[name] = datasets.read_text(node.handle, shard, where)
            kept_bytes += files.kept_bytes(strings[name])
        else:
            stored, shape, source = datasets.content(node.handle, shard, node.route, where)
            entry = TensorEntry(name, BY_NAME[stored.name], shape, source)
            tensors.add_entry(entry)
            spans += _spans(entry, node)
        kept_bytes += files.kept_bytes(name)
        if kept_bytes > files.MAX_KEPT_BYTES:
            raise ShardError(
                "a shard's names and strings take too much memory",
                expected=f"{files.MAX_KEPT_BYTES} bytes at most",
                where=where,
            )
    _require_apart(shard.path, spans)
    return Manifest(shard.path, schema.NAME, tensors, strings)


class _Span(NamedTuple):
    """A byte range that a dataset has. address: of the dataset, which may have several names."""

    start: int
    stop: int
    address: int
    name: str


def _spans(entry: TensorEntry, node: Node) -> Iterator[_Span]:
    if isinstance(entry.source, Segments):
        for part in entry.source.ranges:
            yield _Span(part.offset_bytes, part.offset_bytes + part.length_bytes, node.address, entry.name)


def _require_apart(path: str, spans: list[_Span]) -> None:
    """Raise ShardError if different datasets share bytes of the file."""
    last = _Span(0, 0, -1, "")
    for span in sorted(spans):
        if span.start < last.stop and span.address != last.address:
            raise ShardError(
                "two datasets of an HDF5 shard share bytes of the file",
                expected="elements of their own for each",
                got=f"{last.name!r} and {span.name!r}, both with byte {span.start}",
                where=path,
                remedy="the shard is damaged: save or copy it again",
            )
        last = max(last, span, key=lambda span: span.stop)
