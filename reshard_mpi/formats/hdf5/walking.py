"""Every dataset of an HDF5 file, found without ever leaving the file.

Only hard links are given to the library; soft links are resolved here, part by part. External and user-defined links,
and soft links that lead nowhere, are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from h5py import h5, h5d, h5g, h5l, h5o, h5p

from reshard_mpi.errors import ShardError
from reshard_mpi.formats import files
from reshard_mpi.formats.hdf5.headers import Header, Headers
from reshard_mpi.formats.hdf5.schema import Route

# As many as HDF5 itself follows in a row.
_MAX_SOFT_LINKS = 16


class Link(NamedTuple):
    """A link of a group: its kind, and for a hard one the address it leads to."""

    name: str
    kind: int
    address: int


class Node(NamedTuple):
    """An object of the file: `path` as it was reached, `route` the hard links that lead to it."""

    path: Route
    route: Route
    # None for a dataset whose header is known: it need not be opened.
    handle: Any
    # Addresses of the groups from the root to here: a group that holds itself is not entered again.
    ancestors: frozenset[int]
    header: Header | None = None


def root(file: Any) -> Node:
    """Return the root group of an open file."""
    handle = h5g.open(file, b"/")
    return Node((), (), handle, frozenset({h5o.get_info(handle).addr}))


class Walk:
    """A walk through the file called `where`; it counts what it meets, so that no file can make it endless."""

    def __init__(self, where: str, top: Node) -> None:
        self._where = where
        self._top = top
        self._met = 0

    def datasets(self, start: Node, *, skip: Route = (), headers: Headers | None = None) -> Iterator[Node]:
        """Yield the datasets under the group `start`, in creation order where that is kept, else by name.

        skip: the path of a group that is not entered. headers: if given, datasets are not opened where it knows them.
        """
        open_groups = [(start, iter(self._links(start)))]
        while open_groups:
            group, links = open_groups[-1]
            link = next(links, None)
            if link is None:
                open_groups.pop()
                continue
            node = self._node(group, link, headers)
            if node.path == skip:
                continue
            if node.header or isinstance(node.handle, h5d.DatasetID):
                yield node
            elif isinstance(node.handle, h5g.GroupID):
                address = h5o.get_info(node.handle).addr
                if address not in node.ancestors:
                    inside = Node(node.path, node.route, node.handle, node.ancestors | {address})
                    open_groups.append((inside, iter(self._links(inside))))

    def child(self, group: Node, name: str) -> Node:
        """Return the object `name` of `group`. Raises ShardError if there is none."""
        for link in self._links(group):
            if link.name == name:
                return self._node(group, link)
        raise self._error("an object is missing from an HDF5 shard", (*group.path, name))

    def _links(self, group: Node) -> list[Link]:
        found: list[tuple[bytes, int, int]] = []
        room = files.MAX_TENSORS - self._met

        def note(name: bytes, info: Any) -> bool:
            found.append((name, info.type, info.u))
            return len(found) > room

        in_creation_order = group.handle.get_create_plist().get_link_creation_order() & h5p.CRT_ORDER_INDEXED
        index = h5.INDEX_CRT_ORDER if in_creation_order else h5.INDEX_NAME
        group.handle.links.iterate(note, info=True, idx_type=index)
        self._count(len(found), group.path)
        links = []
        for name, kind, address in found:
            try:
                links.append(Link(name.decode(), kind, address))
            except UnicodeDecodeError as error:
                raise self._error(f"the name {name!r} in an HDF5 shard is not UTF-8", group.path) from error
        return links

    def _node(self, group: Node, link: Link, headers: Headers | None = None) -> Node:
        path = (*group.path, link.name)
        if len("/".join(path).encode()) > 3 * files.MAX_NAME_BYTES:
            raise self._error("a name in an HDF5 shard is too long", path)
        if headers and link.kind == h5l.TYPE_HARD:
            header = headers.dataset(group.handle, link.name.encode(), link.address)
            if header:
                return Node(path, (*group.route, link.name), None, group.ancestors, header)
        return self._open(group, link.name, link.kind, path)

    def _open(self, group: Node, name: str, kind: int, path: Route, hops: int = 0) -> Node:
        """Open the link `name` of `group`; `path` is what the object is called."""
        if kind == h5l.TYPE_HARD:
            handle = h5o.open(group.handle, name.encode())
            return Node(path, (*group.route, name), handle, group.ancestors)
        if kind != h5l.TYPE_SOFT:
            raise self._error("a link in an HDF5 shard leaves the file (external link)", path)
        if hops == _MAX_SOFT_LINKS:
            raise self._error("a soft link in an HDF5 shard leads round in circles", path)
        return self._resolve(group, group.handle.links.get_val(name.encode()), path, hops + 1)

    def _resolve(self, group: Node, target: bytes, path: Route, hops: int) -> Node:
        at = self._top if target.startswith(b"/") else group
        for part in target.split(b"/"):
            if part in (b"", b"."):
                continue
            # Soft links through soft links can multiply; what they cost is counted like everything else.
            self._count(1, path)
            if not isinstance(at.handle, h5g.GroupID) or not at.handle.links.exists(part):
                raise self._error(f"a soft link in an HDF5 shard leads nowhere: {target[:200]!r}", path)
            at = self._open(at, part.decode(), at.handle.links.get_info(part).type, path, hops)
        return Node(path, at.route, at.handle, group.ancestors)

    def _count(self, number: int, path: Route) -> None:
        self._met += number
        if self._met > files.MAX_TENSORS:
            raise self._error("an HDF5 shard holds too many objects", path)

    def _error(self, problem: str, path: Route) -> ShardError:
        return ShardError(
            problem,
            where=f"{self._where}, {'/' + '/'.join(path)}",
            remedy="copy what is needed into one plain file (h5repack, h5copy)",
        )
