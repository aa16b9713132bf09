"""Every dataset of an HDF5 file, without following a link out of the file.

The library is given hard links only; soft links are resolved here, part by part. External and user-defined links, and
soft links that lead nowhere, are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from h5py import h5, h5d, h5g, h5l, h5o, h5p

from reshard_mpi.errors import ShardError
from reshard_mpi.formats import files
from reshard_mpi.formats.hdf5 import schema
from reshard_mpi.formats.hdf5.schema import Route

# In a row, as in HDF5 itself.
_MAX_SOFT_LINKS = 16
# Of groups in groups: the route to each of them is kept.
_MAX_DEPTH = 1024
# So many names beyond one for each object may lead to objects that were reached before: groups that share members, and
# soft links through soft links, make endless names of a few bytes.
_MAX_AGAIN = 1000


class Link(NamedTuple):
    """A link of a group. address: of a hard link, that of its object."""

    name: str
    kind: int
    address: int


class Node(NamedTuple):
    """An object of the file. path: the links that were followed to it. route: hard links to it. address: its header."""

    path: Route
    route: Route
    handle: Any
    address: int


def root(file: Any) -> Node:
    """Return the root group of an open file."""
    handle = h5g.open(file, b"/")
    return Node((), (), handle, h5o.get_info(handle).addr)


class Walk:
    """A walk through the file `path`; it counts what it meets, so that no file can make it endless.

    top: the root group. on_progress: called for every link.
    """

    def __init__(self, path: str, top: Node, on_progress: Callable[[], None] = lambda: None) -> None:
        self._path = path
        self._top = top
        self._on_progress = on_progress
        self._met = 0
        self._seen: set[int] = set()
        self._again = 0
        self._hops = 0

    def datasets(self, start: Node, *, skip: Route = ()) -> Iterator[Node]:
        """Yield the datasets below the group `start`, in creation order where the file keeps it, else by name.

        skip: the path of a group to leave out. Raises ShardError for a link out of the file, and for too many objects.
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
        room = files.MAX_TENSORS - self._met

        def note(name: bytes, info: Any) -> bool:
            self._on_progress()
            entries.append((name, info.type, info.u))
            return len(entries) > room

        in_creation_order = group.handle.get_create_plist().get_link_creation_order() & h5p.CRT_ORDER_INDEXED
        index = h5.INDEX_CRT_ORDER if in_creation_order else h5.INDEX_NAME
        group.handle.links.iterate(note, info=True, idx_type=index)
        self._met += len(entries)
        if self._met > files.MAX_TENSORS:
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
        if len("/".join(path).encode()) > 3 * files.MAX_NAME_BYTES:
            raise self._error("a name in an HDF5 shard is too long", (path[-1][:1000],))
        return self._open(group, link, path)

    def _open(self, group: Node, link: Link, path: Route, hops: int = 0) -> Node:
        """Return the object that `link` of `group` leads to. path: what it is called. hops: soft links so far."""
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

    def _resolve(self, group: Node, target: bytes, path: Route, hops: int) -> Node:
        """Return the object that a soft link of `group` to `target` leads to; `path` is what it is called."""
        node = self._top if target.startswith(b"/") else group
        for part in target.split(b"/"):
            if part in (b"", b"."):
                continue
            if not isinstance(node.handle, h5g.GroupID) or not node.handle.links.exists(part):
                raise self._error(f"a soft link in an HDF5 shard leads nowhere: {target[:200]!r}", path)
            info = node.handle.links.get_info(part)
            node = self._open(node, Link(part.decode(), info.type, info.u), path, hops)
        return node._replace(path=path)

    def _visit(self, address: int, path: Route) -> None:
        if address in self._seen:
            self._again += 1
            if self._again > _MAX_AGAIN + len(self._seen):
                raise self._error("an HDF5 shard holds too many objects", path)
        self._seen.add(address)

    def _error(self, problem: str, path: Route) -> ShardError:
        return ShardError(
            problem,
            where=schema.where(self._path, path),
            remedy="copy what is needed into one plain file (h5repack, h5copy)",
        )
