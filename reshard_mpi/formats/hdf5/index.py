"""The index of a native shard: where everything lies in it, in one piece behind the end of the HDF5 file.

It repeats what HDF5's own structures say, so that they need not be walked, and is tied to them by a checksum of every
byte of the HDF5 file that is no payload. Where it is not there or does not fit, as in a file that other programs have
edited or packed anew, the library reads the file.

The end of the HDF5 file is what its superblock says. Behind it: a head (the mark; CRC-32 of the body, of the structure,
and of the sums; the length of the body), and the body, which is JSON. Its `tensors` are the number of a way and the
first byte of the payload, in turns; its `ways` are element type, shape, first element of the box, and whole shape.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from struct import Struct
from typing import Any, NamedTuple

from zlib_ng.zlib_ng import crc32

from reshard_mpi.formats import files
from reshard_mpi.formats.columns import Kind, Tensors
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.hdf5 import schema
from reshard_mpi.formats.manifest import Manifest, ShardIdentity
from reshard_mpi.formats.specs import ShardSpec
from reshard_mpi.sharding.box import Box

MARK = b"\x89RSX\r\n\x1a\n"
_HEAD = Struct("<8sIIIQ")
_SUM = Struct("<I")
_READ_BYTES = 1 << 20
# What makes JSON large when it is parsed: numbers, of which a tensor has two, and a way three for each dimension.
_MAX_NUMBERS = 8 * files.MAX_TENSORS
_LONGEST = (1 << 63) - 1
# What the body holds besides its ways and tensors, and a tensor: a number of a way, the place of a payload.
_BODY_BYTES = 320
_TENSOR_BYTES = 6 + 1 + 19 + 1
_WAY_BYTES = 64

# The first byte and the length of something in the file.
Place = tuple[int, int]


class Places(NamedTuple):
    """Where in the HDF5 file that lies which is no tensor. sums: None if there is no place for them."""

    strategy: Place
    contents: Place
    sums: Place | None


def size_at_most_bytes(spec: ShardSpec) -> int:
    """Return what the index of a shard can take at most."""
    ways_bytes = sum(_WAY_BYTES + 2 * len(str(whole)) + len(str(box.start)) for _, whole, box in spec.specs.kinds)
    return _HEAD.size + _BODY_BYTES + ways_bytes + _TENSOR_BYTES * len(spec.tensors)


def write(fd: int, scratch: int, manifest: Manifest, places: Places) -> None:
    """Write the index of an HDF5 file behind its end, without sums. Raises OSError.

    scratch: holds the same HDF5 file, without payloads.
    """
    assert manifest.identity is not None
    kinds, tensors = manifest.tensors.kinds, manifest.tensors
    facts = {
        "rank": manifest.identity.rank,
        "world_size": manifest.identity.world_size,
        **places._asdict(),
        "ways": [(kind.dtype.name, kind.shape, _box(kind).start, kind.global_shape) for kind in kinds],
        "tensors": [number for tensor in zip(tensors.kind_of, tensors.starts) for number in tensor],
    }
    body = json.dumps(facts, separators=(",", ":")).encode()
    end = os.fstat(scratch).st_size
    structure = _checksum(scratch, _structure(_payloads(tensors), places.sums, end))
    files.write_all(fd, _HEAD.pack(MARK, crc32(body), structure, 0, len(body)) + body, end)


def write_sums(fd: int, path: str, end: int, sums: Sequence[int]) -> None:
    """Write the sums of all tensors to their place, and to the index that they are there.

    Raises ShardError if the index is not what was written a moment ago, OSError if they cannot be written.
    """
    try:
        index = _Index.read(fd, path, end)
        place = index.places.sums
        if place is None or place[1] != _SUM.size * len(sums):
            raise ValueError("no place for the sums")
    except _NOT_OURS as error:
        raise files.not_as_written(path) from error
    content = Struct(f"<{len(sums)}I").pack(*sums)
    if sums:
        files.write_all(fd, content, place[0])
    files.write_all(fd, index.head(crc32(content)), end)


def locate(fd: int, path: str, end: int) -> Manifest | None:
    """Return what the native shard behind `fd`, an HDF5 file of so many bytes and its index, holds.

    None if the index is not there or does not fit: then the library must look at the file.
    """
    try:
        return _Index.read(fd, path, end).manifest()
    except _NOT_OURS:
        return None


def stored_sums(fd: int, path: str, end: int) -> Mapping[str, int] | None:
    """Return the sums that the native shard behind `fd` keeps; None if the library must look at it."""
    try:
        return _Index.read(fd, path, end).sums()
    except _NOT_OURS:
        return None


def length_bytes(fd: int, end: int) -> int | None:
    """Return how long a file is whose HDF5 part ends at `end`, with the index that begins there; None if none does."""
    head = os.pread(fd, _HEAD.size, end)
    if not head.startswith(MARK):
        return None
    return end + _HEAD.size + (_HEAD.unpack(head)[4] if len(head) == _HEAD.size else 0)


# What JSON and text raise that is not what was written.
_NOT_OURS = (ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError, OSError)


class _Index(NamedTuple):
    """An index as it was read: `facts` are what its body says, not yet compared with the file."""

    fd: int
    path: str
    end: int
    structure: int
    sums_checksum: int
    body: bytes
    facts: dict[str, Any]

    @classmethod
    def read(cls, fd: int, path: str, end: int) -> _Index:
        head = _exactly(fd, end, _HEAD.size)
        mark, own, structure, sums_checksum, body_bytes = _HEAD.unpack(head)
        if mark != MARK or end + _HEAD.size + body_bytes != os.fstat(fd).st_size:
            raise ValueError("no index")
        body = _exactly(fd, end + _HEAD.size, body_bytes)
        if crc32(body) != own or body.count(b",") > _MAX_NUMBERS:
            raise ValueError("a damaged index")
        return cls(fd, path, end, structure, sums_checksum, body, json.loads(body))

    def head(self, sums_checksum: int) -> bytes:
        return _HEAD.pack(MARK, crc32(self.body), self.structure, sums_checksum, len(self.body))

    @property
    def places(self) -> Places:
        sums = self.facts["sums"]
        return Places(
            self._place(self.facts["strategy"]),
            self._place(self.facts["contents"]),
            self._place(sums) if sums is not None else None,
        )

    def _place(self, place: Sequence[int]) -> Place:
        offset_bytes, size_bytes = place
        _require(_whole(offset_bytes) >= 0 and 0 <= _whole(size_bytes) <= files.MAX_TEXT_BYTES)
        _require(offset_bytes + size_bytes <= self.end)
        return offset_bytes, size_bytes

    def manifest(self) -> Manifest:
        places, names = self.places, self._contents()
        rank, world_size = (_whole(self.facts[name]) for name in ("rank", "world_size"))
        _require(0 <= rank < world_size <= _LONGEST)
        strategy = _exactly(self.fd, *places.strategy).decode()
        tensors = self._tensors(names[0])
        structure = _structure(_payloads(tensors), places.sums, self.end)
        _require(_checksum(self.fd, structure) == self.structure)
        return Manifest(self.path, schema.NAME, tensors, names[1], ShardIdentity(rank, world_size, strategy))

    def sums(self) -> dict[str, int]:
        place = self.places.sums
        if place is None:
            return {}
        content, (names, _) = _exactly(self.fd, *place), self._contents()
        _require(crc32(content) == self.sums_checksum and len(content) == _SUM.size * len(names))
        return {name: number for name, (number,) in zip(names, _SUM.iter_unpack(content))}

    def _contents(self) -> tuple[list[str], dict[str, str]]:
        return schema.contents(_exactly(self.fd, *self.places.contents))

    def _tensors(self, names: Sequence[str]) -> Tensors:
        kinds, numbers = [_kind(*way) for way in self.facts["ways"]], self.facts["tensors"]
        sizes, tensors = [kind.size_bytes for kind in kinds], Tensors(self.path)
        _require(isinstance(numbers, list) and len(numbers) == 2 * len(names) and len(names) <= files.MAX_TENSORS)
        own: dict[int, int] = {}
        for name, way, start in zip(names, numbers[::2], numbers[1::2]):
            _require(0 < len(name.encode()) <= files.MAX_NAME_BYTES and _whole(way) >= 0 and name not in tensors)
            _require(_whole(start) >= 0 and start + sizes[way] <= self.end)
            kind = own.get(way)
            if kind is None:
                kind = own[way] = tensors.kind(kinds[way])
            tensors.add(sys.intern(name), kind, start if sizes[way] else 0)
        return tensors


def _kind(name: str, shape: list[int], start: list[int], global_shape: list[int]) -> Kind:
    _require(len(shape) == len(start) == len(global_shape) <= files.MAX_DIMENSIONS)
    for length, low, whole in zip(shape, start, global_shape):
        _require(_whole(length) >= 0 and _whole(low) >= 0 and low + length <= _whole(whole) <= _LONGEST)
    box = Box(tuple(start), tuple(low + length for low, length in zip(start, shape)))
    return Kind(BY_NAME[name], tuple(shape), box, tuple(global_shape))


def _box(kind: Kind) -> Box:
    assert kind.box is not None
    return kind.box


def _payloads(tensors: Tensors) -> Iterator[Place]:
    sizes = [kind.size_bytes for kind in tensors.kinds]
    return ((start, sizes[kind]) for start, kind in zip(tensors.starts, tensors.kind_of) if sizes[kind])


def _structure(payloads: Iterable[Place], sums: Place | None, end: int) -> Iterator[Place]:
    """Yield where the bytes are that are neither payloads nor sums. Raises ValueError if those overlap."""
    last = 0
    for offset_bytes, size_bytes in sorted((*payloads, *([sums] if sums else []), (end, 0))):
        if size_bytes or offset_bytes == end:
            _require(last <= offset_bytes)
            if last < offset_bytes:
                yield last, offset_bytes
            last = offset_bytes + size_bytes


def _checksum(fd: int, spans: Iterable[Place]) -> int:
    found = 0
    for start, stop in spans:
        for at in range(start, stop, _READ_BYTES):
            found = crc32(_exactly(fd, at, min(_READ_BYTES, stop - at)), found)
    return found


def _exactly(fd: int, offset_bytes: int, size_bytes: int) -> bytes:
    content = os.pread(fd, size_bytes, offset_bytes)
    _require(len(content) == size_bytes)
    return content


def _whole(value: object) -> int:
    """Return a number of JSON that is a whole one."""
    _require(type(value) is int)
    return value  # type: ignore[return-value]


def _require(fits: bool) -> None:
    if not fits:
        raise ValueError("not what this program has written")
