"""Native shards read byte by byte, without the HDF5 library.

The library is fast to write with, and slow and not safe to read with what somebody else has written. A shard that this
program wrote has one form, which is read here. Any other file, be it foreign, edited, repacked or damaged, is left to
the library (`isolation`): what is returned here is what that would have told.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import pairwise
from operator import itemgetter
from struct import Struct
from struct import error as StructError  # noqa: N812
from typing import NamedTuple

from reshard_mpi.errors import ReshardError, ShardError
from reshard_mpi.formats import files
from reshard_mpi.formats.hdf5 import headers, schema
from reshard_mpi.formats.hdf5.headers import Header
from reshard_mpi.formats.hdf5.schema import Route
from reshard_mpi.formats.hdf5.structure import LINK_INFO, Message, Structure, Unusual
from reshard_mpi.formats.manifest import ByteRange, Manifest, Segments, ShardIdentity, TensorEntry

# What JSON and text raise that is not what was written.
_NOT_OURS = (Unusual, StructError, ValueError, RecursionError, KeyError, TypeError)
_ADDRESS = itemgetter(1)
_SUM = Struct("<I")


def locate(fd: int, path: str, size_bytes: int) -> Manifest | None:
    """Return what the native shard behind `fd` holds; None if the library must look at it."""
    try:
        return _Shard(fd, path, size_bytes).manifest()
    except ReshardError:
        raise
    except _NOT_OURS:
        return None


def stored_sums(fd: int, path: str, size_bytes: int) -> Mapping[str, int] | None:
    """Return the sums that the native shard behind `fd` keeps; None if the library must look at it."""
    try:
        return _Shard(fd, path, size_bytes).sums()
    except ReshardError:
        raise
    except _NOT_OURS:
        return None


def place_of_sums(fd: int, path: str, size_bytes: int) -> int:
    """Return at which byte the sums of a native shard begin, which this program has just written with a place for them.

    Raises ShardError if that is not what lies there now.
    """
    try:
        return _Shard(fd, path, size_bytes).place_of_sums()
    except _NOT_OURS as error:
        raise ShardError("a shard is not what was written a moment ago", where=path) from error


class _Described(NamedTuple):
    """What a shard says of itself, and the links of its root and of the reserved group."""

    identity: ShardIdentity
    names: list[str]
    strings: dict[str, str]
    links: dict[str, int]
    reserved: dict[str, int]


class _Shard:
    def __init__(self, fd: int, path: str, size_bytes: int) -> None:
        self._structure = Structure(fd)
        self._path = path
        self._size_bytes = size_bytes
        self._met = 0

    def manifest(self) -> Manifest:
        described = self._describe()
        names = described.names
        headed = {"/".join(route): header for route, header in self._datasets(described.links, set(names))}
        escaped, _ = self._group(self._messages(described.reserved[schema.ESCAPED]))
        for link, address in sorted(escaped.items(), key=_ADDRESS):
            header = headers.tensor(self._messages(address), self._size_bytes)
            if headed.setdefault(schema.unescape(link), header) is not header:
                raise Unusual
        if len(headed) != len(names) or headed.keys() != set(names) or _overlap(headed.values()):
            raise Unusual
        self._structure.verify()
        tensors = {name: self._entry(name, headed[name]) for name in names}
        return Manifest(self._path, schema.NAME, tensors, described.strings, described.identity)

    def sums(self) -> dict[str, int]:
        described = self._describe()
        if schema.SUMS not in described.reserved:
            self._structure.verify()
            return {}
        content = self._content(described.reserved[schema.SUMS], "uint32")
        self._structure.verify()
        if len(content) != 4 * len(described.names):
            raise Unusual
        return {name: number for name, (number,) in zip(described.names, _SUM.iter_unpack(content))}

    def place_of_sums(self) -> int:
        described = self._describe()
        messages = self._messages(described.reserved[schema.SUMS])
        at, length_bytes = headers.content(messages, self._size_bytes, "uint32")
        self._structure.verify()
        if length_bytes != _SUM.size * len(described.names):
            raise Unusual
        return at

    def _describe(self) -> _Described:
        links, attributes = self._group(self._messages(self._structure.root()))
        if headers.text(attributes, b"format") != schema.FORMAT:
            raise Unusual
        if headers.number(attributes, b"version") != schema.VERSION:
            raise Unusual
        rank, world_size = (headers.number(attributes, name) for name in (b"rank", b"world_size"))
        reserved, _ = self._group(self._messages(links.pop(schema.RESERVED)))
        if rank >= world_size:
            raise Unusual
        strategy = self._content(reserved[schema.STRATEGY], "uint8").decode()
        names, strings = schema.contents(self._content(reserved[schema.CONTENTS], "uint8"))
        return _Described(ShardIdentity(rank, world_size, strategy), names, strings, links, reserved)

    def _datasets(self, links: dict[str, int], names: Set[str]) -> Iterator[tuple[Route, Header]]:
        """Yield route and header of every dataset below the root, whose links are given; all must be in `names`."""
        route: Route = ()
        # In the order of addresses one read brings the headers of many.
        open_groups = [iter(sorted(links.items(), key=_ADDRESS))]
        while open_groups:
            name, address = next(open_groups[-1], ("", -1))
            if address < 0:
                open_groups.pop()
                route = route[:-1]
                continue
            messages = self._messages(address)
            here = (*route, name)
            if any(message.code == LINK_INFO for message in messages):
                if len(here) > files.MAX_NAME_BYTES:
                    raise Unusual
                open_groups.append(iter(sorted(self._group(messages)[0].items(), key=_ADDRESS)))
                route = here
            elif "/".join(here) in names:
                yield here, headers.tensor(messages, self._size_bytes)
            else:
                raise Unusual

    def _messages(self, address: int) -> list[Message]:
        # Groups that share members make names without end.
        self._met += 1
        if self._met > files.MAX_TENSORS:
            raise Unusual
        return list(self._structure.messages(address))

    def _group(self, messages: list[Message]) -> tuple[dict[str, int], dict[bytes, bytes]]:
        info, links, attributes = headers.group(messages)
        links += self._structure.links(info)
        found = dict(links)
        if len(found) != len(links):
            raise Unusual
        return found, attributes

    def _content(self, address: int, dtype_name: str) -> bytes:
        """Return the elements of a dataset that is no tensor."""
        at, length_bytes = headers.content(self._messages(address), self._size_bytes, dtype_name)
        if length_bytes > files.MAX_TEXT_BYTES:
            raise Unusual
        return self._structure.read(at, length_bytes) if length_bytes else b""

    def _entry(self, name: str, header: Header) -> TensorEntry:
        ranges = (ByteRange(self._path, header.offset_bytes, header.size_bytes),) if header.size_bytes else ()
        return TensorEntry(name, header.dtype, header.shape, Segments(ranges), header.box, header.global_shape)


def _overlap(headers: Iterable[Header]) -> bool:
    """Tell whether two tensors share bytes of the file."""
    spans = sorted((header.offset_bytes, header.size_bytes) for header in headers if header.size_bytes)
    return any(offset + size > following for (offset, size), (following, _) in pairwise(spans))
