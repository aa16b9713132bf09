"""Locate the tensors of an HDF5 file with the library (`locate`).

The library is given hard links only; soft links are resolved here, part by part. External and user-defined links, and
soft links that lead nowhere, are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from h5py import h5, h5d, h5g, h5l, h5o, h5p, h5s, h5t

from reshard_mpi.errors import ShardError
from reshard_mpi.filesystem.source_files import SourceFile
from reshard_mpi.formats import structure
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.hdf5 import datasets, native_shard, types
from reshard_mpi.formats.hdf5.native_shard import GroupPath
from reshard_mpi.formats.locations import ByteRanges
from reshard_mpi.formats.manifest import Manifest, ShardIdentity
from reshard_mpi.formats.tensor_table import TensorEntry, TensorTable

# In a row, as in HDF5 itself.
_MAX_SOFT_LINKS = 16
# Of groups in groups: the route to each of them is kept.
_MAX_DEPTH = 1024
# This number of names beyond one for each object may lead to objects that were reached before: groups that share
# members, and soft links through soft links, make endless names of a few bytes.
_MAX_AGAIN = 1000


class Link(NamedTuple):
    """A link of a group. address: of a hard link, its object's address."""

    name: str
    kind: int
    address: int


class Node(NamedTuple):
    """An object of the file. path: the links that were followed to it. route: hard links to it. address: its header."""

    path: GroupPath
    route: GroupPath
    handle: Any
    address: int


class Walk:
    """A walk through the file `path`; it counts its steps, so that no file can make it endless.

    Attributes:
        top: the root group of the file.
        on_progress: called for every link.
    """

    def __init__(self, path: str, on_progress: Callable[[], None]) -> None:
        handle = h5g.open(datasets.open_file(path), b"/")
        self.path = path
        self.top = Node((), (), handle, h5o.get_info(handle).addr)
        self._on_progress = on_progress
        self._met = 0
        self._seen: set[int] = set()
        self._again = 0
        self._hops = 0

    def datasets(self, start: Node, *, skip: GroupPath = ()) -> Iterator[Node]:
        """Yield the datasets below the group `start`, in creation order where the file keeps it, else by name.

        Args:
            skip: the path of a group to leave out.

        Raises ShardError for a link out of the file, and for too many objects.
        """
        # A group that holds itself is not entered again.
        entered = {start.address}
        open_groups = [(start, iter(self._links(start)))]
        while open_groups:
            group, links = open_groups[-1]
            link = next(links, None)
            if link is None:
                open_groups.pop()
                entered.discard(group.address)
                continue
            self._on_progress()
            node = self._node(group, link)
            if node.path == skip:
                continue
            if isinstance(node.handle, h5d.DatasetID):
                yield node
            elif isinstance(node.handle, h5g.GroupID) and node.address not in entered:
                entered.add(node.address)
                open_groups.append((node, iter(self._links(node))))

    def child(self, group: Node, name: str) -> Node:
        """Return the object `name` of `group`. Raises ShardError if there is none."""
        for link in self._links(group):
            if link.name == name:
                return self._node(group, link)
        raise self._error("an object is missing from an HDF5 shard", (*group.path, name))

    def _links(self, group: Node) -> list[Link]:
        entries: list[tuple[bytes, int, int]] = []
        room = structure.MAX_TENSORS - self._met

        def note(name: bytes, info: Any) -> bool:
            self._on_progress()
            entries.append((name, info.type, info.u))
            return len(entries) > room

        in_creation_order = group.handle.get_create_plist().get_link_creation_order() & h5p.CRT_ORDER_INDEXED
        index = h5.INDEX_CRT_ORDER if in_creation_order else h5.INDEX_NAME
        group.handle.links.iterate(note, info=True, idx_type=index)
        self._met += len(entries)
        if self._met > structure.MAX_TENSORS:
            raise self._error("an HDF5 shard holds too many objects", group.path)
        links = []
        for name, kind, address in entries:
            try:
                links.append(Link(name.decode(), kind, address))
            except UnicodeDecodeError as error:
                raise self._error(f"the name {name!r} in an HDF5 shard is not UTF-8", group.path) from error
        return links

    def _node(self, group: Node, link: Link) -> Node:
        path = (*group.path, link.name)
        if len(path) > _MAX_DEPTH:
            raise self._error("groups of an HDF5 shard are nested too deep", path[-3:])
        if len("/".join(path).encode()) > 3 * structure.MAX_NAME_BYTES:
            raise self._error("a name in an HDF5 shard is too long", (path[-1][:1000],))
        return self._open(group, link, path)

    def _open(self, group: Node, link: Link, path: GroupPath, hops: int = 0) -> Node:
        """Return the object that `link` of `group` leads to. path: its name. hops: soft links followed so far."""
        if link.kind == h5l.TYPE_HARD:
            self._visit(link.address, path)
            handle = h5o.open(group.handle, link.name.encode())
            return Node(path, (*group.route, link.name), handle, link.address)
        if link.kind != h5l.TYPE_SOFT:
            kind = "external" if link.kind == h5l.TYPE_EXTERNAL else "user-defined"
            raise self._error(f"a link in an HDF5 shard leaves the file ({kind} link)", path)
        self._hops += 1
        if self._hops > _MAX_AGAIN + _MAX_SOFT_LINKS * self._met:
            raise self._error("an HDF5 shard holds too many objects", path)
        if hops == _MAX_SOFT_LINKS:
            raise self._error("a soft link in an HDF5 shard leads round in circles", path)
        return self._resolve(group, group.handle.links.get_val(link.name.encode()), path, hops + 1)

    def _resolve(self, group: Node, target: bytes, path: GroupPath, hops: int) -> Node:
        """Return the object that a soft link of `group` to `target` leads to; `path` is its name."""
        node = self.top if target.startswith(b"/") else group
        for part in target.split(b"/"):
            if part in (b"", b"."):
                continue
            if not isinstance(node.handle, h5g.GroupID) or not node.handle.links.exists(part):
                raise self._error(f"a soft link in an HDF5 shard leads nowhere: {target[:200]!r}", path)
            info = node.handle.links.get_info(part)
            node = self._open(node, Link(part.decode(), info.type, info.u), path, hops)
        return node._replace(path=path)

    def _visit(self, address: int, path: GroupPath) -> None:
        if address in self._seen:
            self._again += 1
            if self._again > _MAX_AGAIN + len(self._seen):
                raise self._error("an HDF5 shard holds too many objects", path)
        self._seen.add(address)

    def _error(self, problem: str, path: GroupPath) -> ShardError:
        return ShardError(
            problem,
            where=native_shard.where(self.path, path),
            remedy="copy what is needed into one plain file (h5repack, h5copy)",
        )


class Description(NamedTuple):
    """A shard as a whole: its identity, the names of its tensors in order, its strings."""

    identity: ShardIdentity
    names: tuple[str, ...]
    strings: dict[str, str]


def is_native(walk: Walk) -> bool:
    """Tell whether a file is a native shard. Raises ShardError if it is one of an unknown version."""
    top, path = walk.top.handle, walk.path
    if types.read_text(top, "format") != native_shard.FORMAT:
        return False
    version = types.read_number(top, "version", path)
    if version < native_shard.VERSION:
        raise ShardError(
            "a native HDF5 shard is of an earlier form, which is no longer read",
            expected=f"version {native_shard.VERSION}, which has the boxes of all tensors in one table",
            got=f"version {version}, which has them in attributes of each dataset",
            where=path,
            remedy="convert it to another format (--to) with the reshard_mpi that wrote it; that can be read here",
        )
    if version > native_shard.VERSION:
        raise ShardError(
            "a native HDF5 shard has a version that this program does not know",
            expected=f"version {native_shard.VERSION}",
            got=f"version {version}",
            where=path,
            remedy="use the reshard_mpi that wrote it, or a newer one",
        )
    return True


def describe(walk: Walk) -> Description:
    """Return the description of a native shard. Raises ShardError if any of it is missing or damaged."""
    path, reserved = walk.path, walk.child(walk.top, native_shard.RESERVED)
    strategy = _read_bytes(walk.child(reserved, native_shard.STRATEGY), path).decode()
    names, strings = native_shard.contents(_read_bytes(walk.child(reserved, native_shard.CONTENTS), path))
    if not all(0 < len(name.encode()) <= structure.MAX_NAME_BYTES for name in names):
        raise ValueError("a name of an impossible length")
    rank, world_size = (types.read_number(walk.top.handle, name, path) for name in ("rank", "world_size"))
    identity = ShardIdentity(rank, world_size, strategy)
    if identity.rank >= identity.world_size:
        raise ShardError(
            "the rank of a native HDF5 shard is not among its ranks",
            expected=f"less than {identity.world_size}",
            got=str(identity.rank),
            where=path,
        )
    return Description(identity, tuple(names), strings)


def _read_bytes(node: Node, path: str) -> bytes:
    where = native_shard.where(path, node.path)
    shape = _shape(node, where)
    stored = types.recognise(node.handle.get_type())
    if len(shape) != 1 or stored is None or stored.name != "uint8" or shape[0] > structure.MAX_TEXT_BYTES:
        raise ShardError(
            "a text of a native HDF5 shard is damaged or too long",
            expected=f"at most {structure.MAX_TEXT_BYTES} bytes in one dimension",
            got=f"shape {list(shape)}",
            where=where,
        )
    content = np.zeros(shape, dtype=np.uint8)
    if content.size:
        node.handle.read(h5s.ALL, h5s.ALL, content, mtype=h5t.NATIVE_UINT8)
    return content.tobytes()


def _shape(node: Node, where: str) -> tuple[int, ...]:
    """Return the shape of a dataset. Raises ShardError if the object is none."""
    if not isinstance(node.handle, h5d.DatasetID):
        raise ShardError("an object of a native HDF5 shard is no dataset", where=where)
    return datasets.shape_of(node.handle, node.handle.get_create_plist(), where)


def locate(path: str, on_progress: Callable[[], None] = lambda: None) -> Manifest:
    """Return the tensors and strings of the HDF5 file at `path` without reading any payload.

    Args:
        on_progress: called for every link.

    Raises ShardError if the file is damaged or not HDF5, if it refers to other files, or if a dataset has a type that
    no tensor has.
    """
    with structure.opened(path) as file, datasets.failures_named(path):
        walk = Walk(path, on_progress)
        return (_native if is_native(walk) else _foreign)(file, walk)


def stored_sums(path: str, on_progress: Callable[[], None] = lambda: None) -> dict[str, int]:
    """Return the sums of the tensors of the shard at `path`; none if it keeps none. Raises ShardError."""
    with structure.opened(path), datasets.failures_named(path):
        walk = Walk(path, on_progress)
        if not is_native(walk):
            return {}
        reserved = walk.child(walk.top, native_shard.RESERVED)
        if not reserved.handle.links.exists(native_shard.SUMS.encode()):
            return {}
        names = describe(walk).names
        node = walk.child(reserved, native_shard.SUMS)
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


def _native(file: SourceFile, walk: Walk) -> Manifest:
    path = file.path
    description = describe(walk)
    rows = _rows(walk, description.names)
    entries: dict[str, TensorEntry] = {}
    spans: list[_DatasetRange] = []
    for name, node in _native_datasets(walk):
        if name not in rows:
            raise _not_in_contents(path, len(rows), [name])
        where = native_shard.where(path, node.path)
        if name in entries:
            raise ShardError("two datasets of a native HDF5 shard have the same name", got=repr(name), where=where)
        stored, shape, source = datasets.content(node.handle, file, node.route, where)
        dtype, global_shape, box = types.located(rows[name], stored, shape, where)
        if not isinstance(source, ByteRanges) and node.handle.get_storage_size() == 0:
            raise ShardError("a tensor of a native HDF5 shard was never written", where=where)
        entries[name] = TensorEntry(name, dtype, shape, source, box, global_shape)
        spans += _spans(entries[name], node)
    _require_apart(path, spans)
    if len(entries) != len(description.names):
        raise _not_in_contents(path, len(description.names), sorted(rows.keys() - entries.keys())[:3])
    tensors = TensorTable(path, (entries[name] for name in description.names))
    return Manifest(path, native_shard.NAME, tensors, description.strings, description.identity)


def _rows(walk: Walk, names: Sequence[str]) -> dict[str, types.Row]:
    """Return the rows of the table of boxes, which are in the order of the list of contents, by name."""
    node = walk.child(walk.child(walk.top, native_shard.RESERVED), native_shard.BOXES)
    where = native_shard.where(walk.path, node.path)
    return dict(zip(names, types.read_table(node.handle, _shape(node, where), len(names), where)))


def _not_in_contents(path: str, expected: int, odd: list[str]) -> ShardError:
    return ShardError(
        "the tensors of a native HDF5 shard are not those in its list of contents",
        expected=f"{expected} tensors, each listed once",
        got=f"in one but not the other: {odd}" if odd else "a name that is listed twice",
        where=path,
    )


def _native_datasets(walk: Walk) -> Iterator[tuple[str, Node]]:
    for node in walk.datasets(walk.top, skip=(native_shard.RESERVED,)):
        yield "/".join(node.path), node
    escaped = walk.child(walk.child(walk.top, native_shard.RESERVED), native_shard.ESCAPED)
    for node in walk.datasets(escaped):
        yield native_shard.unescape(node.path[-1]), node


def _foreign(file: SourceFile, walk: Walk) -> Manifest:
    tensors = TensorTable(file.path)
    strings: dict[str, str] = {}
    spans: list[_DatasetRange] = []
    kept_bytes = 0
    for node in walk.datasets(walk.top):
        name = "/".join(node.path)
        where = native_shard.where(file.path, node.path)
        if datasets.is_text(node.handle, where):
            strings[name] = datasets.read_text(node.handle, file, where)
            kept_bytes += structure.kept_bytes(strings[name])
        else:
            stored, shape, source = datasets.content(node.handle, file, node.route, where)
            entry = TensorEntry(name, BY_NAME[stored.name], shape, source)
            tensors.add_entry(entry)
            spans += _spans(entry, node)
        kept_bytes += structure.kept_bytes(name)
        if kept_bytes > structure.MAX_KEPT_BYTES:
            raise ShardError(
                "a shard's names and strings take too much memory",
                expected=f"{structure.MAX_KEPT_BYTES} bytes at most",
                where=where,
            )
    _require_apart(file.path, spans)
    return Manifest(file.path, native_shard.NAME, tensors, strings)


class _DatasetRange(NamedTuple):
    """A byte range that a dataset has. address: of the dataset, which may have several names."""

    start: int
    stop: int
    address: int
    name: str


def _spans(entry: TensorEntry, node: Node) -> Iterator[_DatasetRange]:
    if isinstance(entry.source, ByteRanges):
        for part in entry.source.ranges:
            yield _DatasetRange(part.offset_bytes, part.offset_bytes + part.length_bytes, node.address, entry.name)


def _require_apart(path: str, spans: list[_DatasetRange]) -> None:
    """Raise ShardError if different datasets share bytes of the file."""
    last = _DatasetRange(0, 0, -1, "")
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
