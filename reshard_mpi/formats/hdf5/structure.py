"""The structure of HDF5 files in the form that native shards have, read byte by byte, without the library.

Object headers of version 2, and groups whose links are hard ones, in the header or in a fractal heap. Whatever has
another form raises `Unusual`: then the library must look at the file. (HDF5 File Format Specification, "Version 2 Data
Object Header", "Fractal Heap", "Version 2 B-trees", "Link Message".)
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple

from reshard_mpi.formats import files
from reshard_mpi.formats.hdf5 import checksums

DATASPACE, LINK_INFO, DATATYPE, FILL, LINK, LAYOUT, GROUP_INFO, ATTRIBUTE, ATTRIBUTE_INFO = (
    *(0x01, 0x02, 0x03, 0x05, 0x06, 0x08, 0x0A, 0x0C),
    0x15,
)
_NIL, _CONTINUATION = 0x00, 0x10
# What flags a message must have, besides the one that says whether it is constant: 4 is not shareable.
_FLAGS = dict.fromkeys((DATASPACE, LINK_INFO, DATATYPE, FILL, LINK, LAYOUT, GROUP_INFO, ATTRIBUTE, ATTRIBUTE_INFO), 0)
_FLAGS[ATTRIBUTE_INFO] = 4
_CONSTANT = 0x01
UNDEFINED = (1 << 64) - 1
_ADDRESS = Struct("<Q")
_PLACE = Struct("<QQ")
_MESSAGE = Struct("<BHB")
_SUPERBLOCK = Struct("<8sBBBBQQQQ")
_SUPERBLOCK_BYTES = _SUPERBLOCK.size + checksums.CHECKSUM_BYTES
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
# One read brings the headers of many datasets: the library writes them side by side.
_WINDOW_BYTES = 16384
# Pieces of one header; attributes that do not fit make the second.
_MAX_PIECES = 16
# What all heaps and trees of a file may take: a hundred bytes a tensor, and as much again for room in blocks.
_MAX_READ_BYTES = 256 * files.MAX_TENSORS
# Blocks that name other blocks cost so much more, and there are few.
_INDIRECTION = 8
_HEAP = Struct("<4sBHHBI12QHQQHHQH")
_HEAP_ID = Struct("<BIH")
_HEAP_OFFSET_BITS = 32
_TREE = Struct("<4sBBIHHBBQHQ")
_LINKS_BY_NAME = 5
_RECORD_BYTES = 4 + _HEAP_ID.size
_NODE_HEAD_BYTES = 6


class Unusual(Exception):
    """The file is not of the form that is read here; it may be sound all the same."""


class Message(NamedTuple):
    """One message of an object header."""

    code: int
    body: bytes


class Structure:
    """Reads the structure of the file behind `fd`. What it returns is to be believed when `verify` has been passed."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._base = 0
        self._window = b""
        self._read_bytes = 0
        self._blocks: list[bytes] = []

    def root(self) -> int:
        """Return the address of the root group's header."""
        head = self.read(0, _SUPERBLOCK_BYTES)
        signature, version, offset_bytes, length_bytes, _, base, extension, _, address = _SUPERBLOCK.unpack_from(head)
        if (signature, version, offset_bytes, length_bytes, base) != (_SIGNATURE, 2, 8, 8, 0) or extension != UNDEFINED:
            raise Unusual
        self._blocks.append(head)
        return int(address)

    def verify(self) -> None:
        """Raise Unusual if the checksum of a header that has been read is wrong."""
        blocks, self._blocks = self._blocks, []
        if not checksums.all_right(blocks):
            raise Unusual

    def read(self, at: int, length_bytes: int) -> bytes:
        """Return the bytes from `at` on. Raises Unusual if the file does not have them all."""
        first = at - self._base
        if not 0 <= first <= len(self._window) - length_bytes:
            self._base, first = at, 0
            try:
                self._window = os.pread(self._fd, max(length_bytes, _WINDOW_BYTES), at)
            except (OSError, OverflowError) as error:
                raise Unusual from error
            if len(self._window) < length_bytes:
                raise Unusual
        return self._window[first : first + length_bytes]

    def messages(self, address: int) -> Iterator[Message]:
        """Yield the messages of the object header at `address`, all pieces of it."""
        head = self.read(address, 8)
        flags = head[5]
        # Two bits say how long the length is; times, and attributes in order of creation, are not what we write.
        if head[:5] != b"OHDR\x02" or flags > 1:
            raise Unusual
        start = 7 + flags
        length_bytes = int.from_bytes(head[6:start], "little")
        pieces = [(address, start, start + length_bytes + checksums.CHECKSUM_BYTES)]
        for at, first, piece_bytes in pieces:
            block = self.read(at, piece_bytes)
            self._blocks.append(block)
            end = piece_bytes - checksums.CHECKSUM_BYTES
            while end - first >= _MESSAGE.size:
                code, body_bytes, message_flags = _MESSAGE.unpack_from(block, first)
                first += _MESSAGE.size
                body = block[first : first + body_bytes]
                first += body_bytes
                if first > end:
                    raise Unusual
                if code == _CONTINUATION and not message_flags:
                    pieces.append(self._continued(body, len(pieces)))
                elif _FLAGS.get(code) == message_flags & ~_CONSTANT:
                    yield Message(code, body)
                elif code != _NIL or message_flags:
                    raise Unusual

    def _continued(self, body: bytes, count: int) -> tuple[int, int, int]:
        if len(body) != _PLACE.size or count >= _MAX_PIECES:
            raise Unusual
        address, piece_bytes = _PLACE.unpack(body)
        # Nothing that this program writes needs more than a block of structure.
        if not 8 <= piece_bytes <= _WINDOW_BYTES or self.read(address, 4) != b"OCHK":
            raise Unusual
        return address, 4, piece_bytes

    def links(self, info: bytes) -> Iterator[tuple[str, int]]:
        """Yield name and address of every object whose link a group keeps apart, as its link info message says."""
        if len(info) != 18 or info[:2] != b"\0\0":
            raise Unusual
        heap_at, tree_at = _PLACE.unpack_from(info, 2)
        if heap_at == UNDEFINED:
            return
        blocks = dict(self._heap_blocks(heap_at))
        starts = sorted(blocks)
        for offset, length_bytes in self._records(tree_at):
            at = bisect_right(starts, offset) - 1
            if at < 0:
                raise Unusual
            first = offset - starts[at]
            yield link(blocks[starts[at]][first : first + length_bytes])

    def _heap_blocks(self, address: int) -> Iterator[tuple[int, bytes]]:
        """Yield the blocks that hold the objects of the fractal heap at `address`, by where each begins in the heap."""
        head = self.read(address, _HEAP.size)
        mark, version, id_bytes, filters_bytes, *_, width, start, largest, bits, _, root, rows = _HEAP.unpack(head)
        usual = (b"FRHP", 0, _HEAP_ID.size, 0, _HEAP_OFFSET_BITS)
        if (mark, version, id_bytes, filters_bytes, bits) != usual:
            raise Unusual
        if rows:
            yield from self._children(root, rows, 0, _Heap(width, start, largest))
        else:
            yield 0, self._bulk(root, start, b"FHDB")

    def _children(self, address: int, rows: int, at: int, heap: _Heap) -> Iterator[tuple[int, bytes]]:
        """Yield the blocks below an indirect block of `rows` rows that begins at `at` in the heap."""
        head_bytes = 4 + 1 + _ADDRESS.size + _HEAP_OFFSET_BITS // 8
        block = self._bulk(address, head_bytes + rows * heap.width * _ADDRESS.size, b"FHIB")
        for number, (child,) in enumerate(_ADDRESS.iter_unpack(block[head_bytes:])):
            row = number // heap.width
            block_bytes = heap.start << max(0, row - 1)
            if child != UNDEFINED and block_bytes <= heap.largest:
                yield at, self._bulk(child, block_bytes, b"FHDB")
            elif child != UNDEFINED:
                inner_rows = (block_bytes // (heap.start * heap.width)).bit_length()
                yield from self._children(child, inner_rows, at, heap)
            at += block_bytes

    def _records(self, address: int) -> Iterator[tuple[int, int]]:
        """Yield place in the heap and length of the links that the version 2 B-tree at `address` lists."""
        mark, version, kind, node_bytes, record_bytes, depth, _, _, root, count, total = _TREE.unpack(
            self.read(address, _TREE.size)
        )
        if (mark, version, kind, record_bytes) != (b"BTHD", 0, _LINKS_BY_NAME, _RECORD_BYTES):
            raise Unusual
        if total > files.MAX_TENSORS:
            raise Unusual
        found = 0
        for record in self._node(root, count, depth, _Tree.of(node_bytes, depth)) if total else ():
            found += 1
            kind, offset, length_bytes = _HEAP_ID.unpack_from(record, 4)
            if kind or found > total:  # an object that is no part of a block
                raise Unusual
            yield offset, length_bytes
        if found != total:
            raise Unusual

    def _node(self, address: int, count: int, depth: int, tree: _Tree) -> Iterator[bytes]:
        block = self._bulk(address, tree.node_bytes, b"BTIN" if depth else b"BTLF")
        records_end = _NODE_HEAD_BYTES + count * _RECORD_BYTES
        children_end = records_end + (count + 1) * tree.child_bytes(depth) if depth else records_end
        if not count or children_end > tree.node_bytes:
            raise Unusual
        for at in range(_NODE_HEAD_BYTES, records_end, _RECORD_BYTES):
            yield block[at : at + _RECORD_BYTES]
        if depth:
            for at in range(records_end, children_end, tree.child_bytes(depth)):
                (child,) = _ADDRESS.unpack_from(block, at)
                child_count = block[at + _ADDRESS.size : at + _ADDRESS.size + tree.count_bytes]
                yield from self._node(child, int.from_bytes(child_count, "little"), depth - 1, tree)

    def _bulk(self, at: int, length_bytes: int, mark: bytes) -> bytes:
        """Return a block of a heap or tree, which is counted: blocks may be huge, and named again and again."""
        self._read_bytes += length_bytes * (_INDIRECTION if mark == b"FHIB" else 1)
        if self._read_bytes > _MAX_READ_BYTES:
            raise Unusual
        block = self.read(at, length_bytes)
        if not block.startswith(mark):
            raise Unusual
        return block


class _Heap(NamedTuple):
    """How large the blocks of a fractal heap are: `width` in a row, two rows of `start` bytes, then doubled."""

    width: int
    start: int
    largest: int


class _Tree(NamedTuple):
    """How the nodes of a B-tree of links are laid out. totals_bytes: by depth, what counts all records below takes."""

    node_bytes: int
    count_bytes: int
    totals_bytes: tuple[int, ...]

    @classmethod
    def of(cls, node_bytes: int, depth: int) -> _Tree:
        """Return the layout; it follows from the size of nodes, as the library computes it (`H5B2__hdr_init`)."""
        room = node_bytes - _NODE_HEAD_BYTES - checksums.CHECKSUM_BYTES
        most = below = room // _RECORD_BYTES
        count_bytes = _bytes_for(most)
        totals_bytes = [0]
        for _ in range(depth):
            pointer_bytes = _ADDRESS.size + count_bytes + totals_bytes[-1]
            most = (room - pointer_bytes) // (_RECORD_BYTES + pointer_bytes)
            below = (most + 1) * below + most
            totals_bytes.append(_bytes_for(below))
        return cls(node_bytes, count_bytes, tuple(totals_bytes))

    def child_bytes(self, depth: int) -> int:
        return _ADDRESS.size + self.count_bytes + self.totals_bytes[depth - 1]


def _bytes_for(number: int) -> int:
    return max(1, -(-max(number, 0).bit_length() // 8))


def link(body: bytes) -> tuple[str, int]:
    """Return name and address of a hard link. Raises Unusual if it is another kind of link."""
    # Version 1; two bits say how long the length of the name is, another that a byte names its encoding.
    if len(body) < 4 or body[0] != 1 or body[1] & ~0x13:
        raise Unusual
    at = 3 if body[1] & 0x10 else 2
    name_at = at + (1 << (body[1] & 3))
    name_end = name_at + int.from_bytes(body[at:name_at], "little")
    if name_end + _ADDRESS.size != len(body):
        raise Unusual
    try:
        name = body[name_at:name_end].decode()
    except UnicodeDecodeError as error:
        raise Unusual from error
    return name, _ADDRESS.unpack_from(body, name_end)[0]
