"""Locating the tensors of an HDF5 file, native or foreign, through the library.

This is done in a process of its own (`child`): a file that is made to harm may bring the library down.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

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
    """Find the tensors and strings of the HDF5 file at `path` without reading any payload.

    on_progress: called for every link and dataset. Raises ShardError if the file is damaged or not HDF5, if anything in
    it lies in another file, or if a dataset's type is none that tensors have.
    """
    with files.opened(path) as (fd, _), library.failures_named(path):
        shard = Shard(path, fd, datasets.Stamp.of(os.fstat(fd)))
        top = root(library.open_file(path))
        walk = Walk(path, top, on_progress)
        return (_native if native.is_native(top, path) else _foreign)(shard, walk, top)


def stored_sums(path: str, on_progress: Callable[[], None] = lambda: None) -> dict[str, int]:
    """Return the sums of the tensors of the shard at `path`; none if it keeps none. Raises ShardError."""
    with files.opened(path), library.failures_named(path):
        top = root(library.open_file(path))
        if not native.is_native(top, path):
            return {}
        walk = Walk(path, top, on_progress)
        reserved = walk.child(top, schema.RESERVED)
        if not reserved.handle.links.exists(schema.SUMS.encode()):
            return {}
        names = native.describe(walk, top, path).names
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


def _native(shard: Shard, walk: Walk, top: Node) -> Manifest:
    path = shard.path
    description = native.describe(walk, top, path)
    names = set(description.names)
    found: dict[str, TensorEntry] = {}
    spans = _Spans(path)
    for name, node in _native_datasets(walk, top):
        if name not in names:
            raise _not_in_contents(path, len(names), [name])
        where = _where(path, node)
        if name in found:
            raise ShardError("two datasets of a native HDF5 shard have the same name", got=repr(name), where=where)
        stored, shape, source = datasets.content(node.handle, shard, node.route, where)
        place = native.place(node.handle, stored, shape, where)
        if not isinstance(source, Segments) and node.handle.get_storage_size() == 0:
            raise ShardError("a tensor of a native HDF5 shard was never written", where=where)
        found[name] = TensorEntry(name, place.dtype, shape, source, place.box, place.global_shape)
        spans.add(found[name], node)
    spans.check()
    if len(found) != len(description.names):
        raise _not_in_contents(path, len(description.names), sorted(names - found.keys())[:3])
    tensors = Tensors(path, (found[name] for name in description.names))
    return Manifest(path, schema.NAME, tensors, description.strings, description.identity)


def _not_in_contents(path: str, expected: int, odd: list[str]) -> ShardError:
    return ShardError(
        "the tensors of a native HDF5 shard are not those in its list of contents",
        expected=f"{expected} tensors, each listed once",
        got=f"in one but not the other: {odd}" if odd else "a name that is listed twice",
        where=path,
    )


def _native_datasets(walk: Walk, top: Node) -> Iterator[tuple[str, Node]]:
    for node in walk.datasets(top, skip=(schema.RESERVED,)):
        yield "/".join(node.path), node
    escaped = walk.child(walk.child(top, schema.RESERVED), schema.ESCAPED)
    for node in walk.datasets(escaped):
        yield schema.unescape(node.path[-1]), node


def _foreign(shard: Shard, walk: Walk, top: Node) -> Manifest:
    tensors = Tensors(shard.path)
    strings: dict[str, str] = {}
    spans = _Spans(shard.path)
    kept_bytes = 0
    for node in walk.datasets(top):
        name = "/".join(node.path)
        where = _where(shard.path, node)
        if datasets.is_text(node.handle, where):
            strings[name] = datasets.read_text(node.handle, shard, where)
            kept_bytes += files.kept_bytes(strings[name])
        else:
            stored, shape, source = datasets.content(node.handle, shard, node.route, where)
            entry = TensorEntry(name, BY_NAME[stored.name], shape, source)
            tensors.add_entry(entry)
            spans.add(entry, node)
        kept_bytes += files.kept_bytes(name)
        if kept_bytes > files.MAX_KEPT_BYTES:
            raise ShardError(
                "a shard's names and strings take too much memory",
                expected=f"{files.MAX_KEPT_BYTES} bytes at most",
                where=where,
            )
    spans.check()
    return Manifest(shard.path, schema.NAME, tensors, strings)


class _Spans:
    """The bytes of a file that its datasets have: those of different ones must not be the same."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._spans: list[tuple[int, int, int, str]] = []

    def add(self, entry: TensorEntry, node: Node) -> None:
        if isinstance(entry.source, Segments):
            for part in entry.source.ranges:
                self._spans.append((part.offset_bytes, part.length_bytes, node.address, entry.name))

    def check(self) -> None:
        """Raise ShardError if two datasets share bytes; one dataset may have many names."""
        last = (0, 0, -1, "")
        for span in sorted(self._spans):
            if span[0] < last[0] + last[1] and span[2] != last[2]:
                raise ShardError(
                    "two datasets of an HDF5 shard share bytes of the file",
                    expected="elements of their own for each",
                    got=f"{last[3]!r} and {span[3]!r}, both with byte {span[0]}",
                    where=self._path,
                    remedy="the shard is damaged: save or copy it again",
                )
            last = max(last, span, key=lambda span: span[0] + span[1])


def _where(path: str, node: Node) -> str:
    return f"{path}, /{'/'.join(node.path)}"
