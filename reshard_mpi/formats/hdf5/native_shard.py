"""Name the objects of a native HDF5 shard (`routes`), and read and write the index behind it (`locate`, `write`).

The index repeats what HDF5's own structures say, so that they need not be read, and holds a checksum of every byte of
the HDF5 file that is no payload. Where the index is missing or its checksum is wrong, as after other programs have
edited or repacked the file, the library reads the file.

The superblock says where the HDF5 file ends. There the index begins with a head (the mark; CRC-32 of the body, of the
structure, and of the sums; the length of the body). Then comes the body, which is JSON. Its `tensors` alternate between
the number of a way and the first byte of a payload; each of its `ways` has an element type, the shape and first element
of a box, and the whole shape.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from struct import Struct
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

from zlib_ng.zlib_ng import crc32

from reshard_mpi.filesystem.source_files import SourceFile
from reshard_mpi.formats import structure
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.manifest import Manifest, ShardIdentity
from reshard_mpi.formats.structure import require_own
from reshard_mpi.formats.tensor_table import TensorTable, TensorType
from reshard_mpi.sharding.box import Box

NAME = "hdf5"
FORMAT = "reshard_mpi"
VERSION = 2
# The group that holds what is not a tensor, and in it: the placement table, order and strings, types
# and boxes, escaped tensors, sums.
RESERVED = "__reshard_mpi__"
STRATEGY = "strategy"
CONTENTS = "contents"
BOXES = "boxes"
ESCAPED = "tensors"
SUMS = "sums"

# What makes JSON large when it is parsed: three of them for each name, twice as many as tensors may have.
_MARKS = (b'"', b"[", b"{", b",")
_MAX_MARKS = 6 * structure.MAX_TENSORS
# A dataset is found by walking these link names from the root, one by one.
GroupPath = tuple[str, ...]
_UNESCAPED = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")


def routes(names: Iterable[str]) -> dict[str, GroupPath]:
    """Return by name the route of each tensor's dataset: its parts between `/`, or an escaped name where need be.

    HDF5 has no empty names, takes `.` for the group itself, ends a name at NUL, and cannot have a dataset with the name
    of a group. Routes of different names are different, whatever their order.
    """
    plain = {name: tuple(name.split("/")) for name in names}
    folders = {route[:depth] for route in plain.values() if _holdable(route) for depth in range(1, len(route))}
    return {
        name: route if _holdable(route) and route not in folders else (RESERVED, ESCAPED, escape(name))
        for name, route in plain.items()
    }


def where(path: str, route: Iterable[str]) -> str:
    """Return how errors name the object at `route` of the file `path`."""
    return f"{path}, /{'/'.join(route)}"


def escape(name: str) -> str:
    """Return `name` with every byte but letters, digits, `_` and `-` written as `%XX`."""
    return "".join(chr(byte) if byte in _UNESCAPED else f"%{byte:02X}" for byte in name.encode())


def unescape(link: str) -> str:
    """Return the name that `escape` makes `link` of. Raises ValueError if there is none."""
    name = unquote_to_bytes(link).decode(errors="replace")
    if escape(name) != link:
        raise ValueError(f"an escaped tensor name that is damaged: {link!r}")
    return name


def contents_text(names: list[str], strings: Mapping[str, str]) -> bytes:
    """Return the list of contents as JSON: the names of the tensors in order, and the strings."""
    return json.dumps({"tensors": names, "strings": strings}, ensure_ascii=False, separators=(",", ":")).encode()


def contents(data: bytes) -> tuple[list[str], dict[str, str]]:
    """Return the names and strings of a list of contents. Raises ValueError or RecursionError for anything else."""
    if sum(map(data.count, _MARKS)) > _MAX_MARKS:
        raise ValueError("more than names and strings")
    content = json.loads(data)
    names, strings = (content.get(key) for key in ("tensors", "strings")) if isinstance(content, dict) else (None, None)
    if not isinstance(names, list) or not isinstance(strings, dict):
        raise ValueError("no lists of tensors and strings")
    if not all(isinstance(text, str) for text in (*names, *strings, *strings.values())):
        raise ValueError("names and strings that are no text")
    return names, strings


def _holdable(route: GroupPath) -> bool:
    return route[0] != RESERVED and all(part not in ("", ".") and "\0" not in part for part in route)


MARK = b"\x89RSX\r\n\x1a\n"
_HEAD = Struct("<8sIIIQ")
_SUM = Struct("<I")
_READ_BYTES = 1 << 20
# Numbers make JSON large when it is parsed. A tensor has two of them, a way three for each dimension.
_MAX_NUMBERS = 8 * structure.MAX_TENSORS
_LONGEST = (1 << 63) - 1

# A byte range of the file: first byte and length.
FileRange = tuple[int, int]


class TextPlaces(NamedTuple):
    """Where the texts and the sums of a shard lie in its HDF5 file. sums: None if no place was reserved for them."""

    strategy: FileRange
    contents: FileRange
    sums: FileRange | None


def write(fd: int, scratch: SourceFile, manifest: Manifest, places: TextPlaces) -> None:
    """Write the index of an HDF5 file behind its end, for a shard without sums. Raises OSError.

    Args:
        scratch: a copy of the HDF5 file without payloads, from which the checksum is made.
    """
    assert manifest.identity is not None
    kinds, tensors = manifest.tensors.kinds, manifest.tensors
    facts = {
        "version": VERSION,
        "rank": manifest.identity.rank,
        "world_size": manifest.identity.world_size,
        **places._asdict(),
        "ways": [(kind.dtype.name, kind.shape, kind.own_box.start, kind.global_shape) for kind in kinds],
        "tensors": [number for tensor in zip(tensors.kind_ids, tensors.offsets) for number in tensor],
    }
    body = json.dumps(facts, separators=(",", ":")).encode()
    end = scratch.size_bytes
    checksum = _checksum(scratch, [*_structure(_payloads(tensors), places.sums, end)])
    structure.write_all(fd, _HEAD.pack(MARK, crc32(body), checksum, 0, len(body)) + body, end)


def write_sums(fd: int, file: SourceFile, end: int, sums: Sequence[int]) -> None:
    """Write the sums of all tensors to the place reserved for them, and their checksum to the index at byte `end`.

    Args:
        file: the same, to read from.

    Raises ShardError if the index is not what was written a moment ago, OSError if they cannot be written.
    """
    try:
        index = _Index.read(file, end)
        place = index.places.sums
        if place is None or place[1] != _SUM.size * len(sums):
            raise ValueError("no place for the sums")
    except _NOT_OURS as error:
        raise structure.not_as_written(file.path) from error
    content = Struct(f"<{len(sums)}I").pack(*sums)
    if sums:
        structure.write_all(fd, content, place[0])
    structure.write_all(fd, index.head(crc32(content)), end)


def locate(file: SourceFile, end: int) -> Manifest | None:
    """Return the manifest of a native shard by its index at byte `end`.

    None if there is no index or its checksum is wrong: then the library must read the file.
    """
    try:
        return _Index.read(file, end).manifest()
    except _NOT_OURS:
        return None


def stored_sums(file: SourceFile, end: int) -> Mapping[str, int] | None:
    """Return the sums that a native shard keeps; None if the library must read them."""
    try:
        return _Index.read(file, end).sums()
    except _NOT_OURS:
        return None


def length_bytes(file: SourceFile, end: int) -> int | None:
    """Return the length of a file with the index that begins at byte `end`; None if none begins there."""
    head = file.read(end, _HEAD.size)
    if not head.startswith(MARK):
        return None
    return end + _HEAD.size + (_HEAD.unpack(head)[4] if len(head) == _HEAD.size else 0)


# Raised on reading an index that this program has not written.
_NOT_OURS = (ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError)


class _Index(NamedTuple):
    """An index as it was read. facts: the values in its body, which are checked when they are used."""

    file: SourceFile
    end: int
    structure_checksum: int
    sums_checksum: int
    body: bytes
    facts: dict[str, Any]

    @classmethod
    def read(cls, file: SourceFile, end: int) -> _Index:
        head = file.read_exactly(end, _HEAD.size)
        mark, own, structure_checksum, sums_checksum, body_bytes = _HEAD.unpack(head)
        if mark != MARK or end + _HEAD.size + body_bytes != file.size_bytes:
            raise ValueError("no index")
        body = file.read_exactly(end + _HEAD.size, body_bytes)
        if crc32(body) != own or body.count(b",") > _MAX_NUMBERS:
            raise ValueError("a damaged index")
        facts = json.loads(body)
        require_own(facts["version"] == VERSION)
        return cls(file, end, structure_checksum, sums_checksum, body, facts)

    def head(self, sums_checksum: int) -> bytes:
        return _HEAD.pack(MARK, crc32(self.body), self.structure_checksum, sums_checksum, len(self.body))

    @property
    def places(self) -> TextPlaces:
        strategy, contents, sums = (self.facts[name] for name in TextPlaces._fields)
        return TextPlaces(self._place(strategy), self._place(contents), None if sums is None else self._place(sums))

    def _place(self, place: Sequence[int]) -> FileRange:
        offset_bytes, size_bytes = place
        require_own(_whole(offset_bytes) >= 0 and 0 <= _whole(size_bytes) <= structure.MAX_TEXT_BYTES)
        require_own(offset_bytes + size_bytes <= self.end)
        return offset_bytes, size_bytes

    def manifest(self) -> Manifest:
        places = self.places
        self.file.will_read([(start, start + length) for start, length in (places.strategy, places.contents)])
        names = self._contents()
        rank, world_size = (_whole(self.facts[name]) for name in ("rank", "world_size"))
        require_own(0 <= rank < world_size <= _LONGEST)
        strategy = self.file.read_exactly(*places.strategy).decode()
        tensors = self._tensors(names[0])
        own = [*_structure(_payloads(tensors), places.sums, self.end)]
        require_own(_checksum(self.file, own) == self.structure_checksum)
        return Manifest(self.file.path, NAME, tensors, names[1], ShardIdentity(rank, world_size, strategy))

    def sums(self) -> dict[str, int]:
        place = self.places.sums
        if place is None:
            return {}
        content, (names, _) = self.file.read_exactly(*place), self._contents()
        require_own(crc32(content) == self.sums_checksum and len(content) == _SUM.size * len(names))
        return {name: number for name, (number,) in zip(names, _SUM.iter_unpack(content))}

    def _contents(self) -> tuple[list[str], dict[str, str]]:
        return contents(self.file.read_exactly(*self.places.contents))

    def _tensors(self, names: Sequence[str]) -> TensorTable:
        kinds, numbers = [_kind(*way) for way in self.facts["ways"]], self.facts["tensors"]
        sizes, tensors = [kind.size_bytes for kind in kinds], TensorTable(self.file.path)
        require_own(isinstance(numbers, list) and len(numbers) == 2 * len(names) <= 2 * structure.MAX_TENSORS)
        own: dict[int, int] = {}
        for name, way, start in zip(names, numbers[::2], numbers[1::2]):
            require_own(0 < len(name.encode()) <= structure.MAX_NAME_BYTES and _whole(way) >= 0 and name not in tensors)
            require_own(_whole(start) >= 0 and start + sizes[way] <= self.end)
            kind = own.get(way)
            if kind is None:
                kind = own[way] = tensors.kind(kinds[way])
            tensors.add(sys.intern(name), kind, start if sizes[way] else 0)
        return tensors


def _kind(name: str, shape: list[int], start: list[int], global_shape: list[int]) -> TensorType:
    require_own(len(shape) == len(start) == len(global_shape) <= structure.MAX_DIMENSIONS)
    for length, low, whole in zip(shape, start, global_shape):
        require_own(_whole(length) >= 0 and _whole(low) >= 0 and low + length <= _whole(whole) <= _LONGEST)
    return TensorType(BY_NAME[name], tuple(shape), Box.at(start, shape), tuple(global_shape))


def _payloads(tensors: TensorTable) -> Iterator[FileRange]:
    sizes = [kind.size_bytes for kind in tensors.kinds]
    return ((start, sizes[kind]) for start, kind in zip(tensors.offsets, tensors.kind_ids) if sizes[kind])


def _structure(payloads: Iterable[FileRange], sums: FileRange | None, end: int) -> Iterator[FileRange]:
    """Yield start and end of the spans that are neither payloads nor sums. Raises ValueError if those overlap."""
    last = 0
    for offset_bytes, size_bytes in sorted((*payloads, *([sums] if sums else []), (end, 0))):
        if size_bytes or offset_bytes == end:
            require_own(last <= offset_bytes)
            if last < offset_bytes:
                yield last, offset_bytes
            last = offset_bytes + size_bytes


def _checksum(file: SourceFile, spans: Sequence[FileRange]) -> int:
    checksum = 0
    for start, stop in structure.foreseen(file, spans):
        for offset in range(start, stop, _READ_BYTES):
            checksum = crc32(file.read_exactly(offset, min(_READ_BYTES, stop - offset)), checksum)
    return checksum


def _whole(value: object) -> int:
    """Return `value`, a number of JSON. Raises ValueError if it is not a whole number."""
    require_own(type(value) is int)
    return value  # type: ignore[return-value]
