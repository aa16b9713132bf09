"""Locate members of the zip archives that torch saves (`Archive`), and lay them out as its writer does (`placed`).

All members are stored as they are, in one folder of the archive. What other zip tools make is read too, as long as
nothing is compressed: sizes and places come from the central directory, and every local header must agree with it.

In what is written, payloads begin at multiples of 64, reached by padding in the local header. A local header has
neither sizes nor CRC: they follow the payload, and stand in the directory. Whoever computes places from
`.format_version`, as torch does without reading the file, finds them.

The ranks of a training that hold shards of one shape write files that differ in nothing but payloads, and in the
checksums of these: they count as zeros.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from itertools import islice
from struct import Struct
from typing import NamedTuple

from reshard_mpi.errors import ShardError
from reshard_mpi.filesystem.source_files import SourceFile
from reshard_mpi.formats import structure
from reshard_mpi.formats.manifest import HeaderDigest
from reshard_mpi.formats.tensor_table import TensorTable
from reshard_mpi.text import MIB

_END = Struct("<4s4H2IH")
_END64 = Struct("<4sQ2H2I4Q")
_LOCATOR = Struct("<4sIQI")
_ENTRY = Struct("<4s6H3I5H2I")
_LOCAL = Struct("<4s5H3I2H")
_END_MARK, _END64_MARK, _LOCATOR_MARK = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_ENTRY_MARK, _LOCAL_MARK = b"PK\x01\x02", b"PK\x03\x04"
# Where a number of 2 or 4 bytes is too small, this stands in its place.
_FULL_2, _FULL_4 = 0xFFFF, 0xFFFFFFFF
_ZIP64_EXTRA = 1
_ENCRYPTED, _HAS_DESCRIPTOR, _MASKED = 0x41, 0x08, 0x2000
_STORED = 0
# Where the checksum stands in an entry, and in what follows a payload.
ENTRY_CRC_AT, DESCRIPTOR_CRC_AT = 16, 4
# Of an entry: its flags, and the lengths of name, extra field and comment.
_OF_ENTRY = Struct("<8xH18x3H")
# In the attributes of a member, as DOS has them (APPNOTE.TXT 4.4.15): it is a folder.
_FOLDER = 0x10
# Members besides storages: a dozen.
_MAX_MEMBERS = structure.MAX_TENSORS + 1000
_MAX_DIRECTORY_BYTES = 32 * MIB
# A local header follows the sizes of the member before it.
_BEFORE_HEADER_BYTES = 64
# Of this number of entries an object store is asked for all local headers at once.
_FORESEEN_ENTRIES = 1024
# The headers of small members are as close together; then as much is read at once.
_NEAR_BYTES, _READ_BYTES = 1 << 10, 64 << 10


class Member(NamedTuple):
    """The bytes of one member: where they begin, how many there are, and their CRC-32 (0 if it was left out)."""

    offset_bytes: int
    size_bytes: int
    crc: int


def is_archive(start: bytes) -> bool:
    """Tell whether a file that begins so is a zip archive."""
    return start.startswith((_LOCAL_MARK, _END_MARK))


def entries(directory: bytes | bytearray) -> Iterator[int]:
    """Yield where the entries of a directory begin."""
    return (offset for offset, _, _ in _outlines(directory))


def _storage_entries(directory: bytes | bytearray) -> Iterator[int]:
    """Yield where the entries of storages begin whose checksums stand in no local header."""
    for offset, flags, name_bytes in _outlines(directory):
        name_at = offset + _ENTRY.size
        if flags & _HAS_DESCRIPTOR and directory.find(b"/data/", name_at, name_at + name_bytes) >= 0:
            yield offset


def _outlines(directory: bytes | bytearray, offset: int = 0) -> Iterator[tuple[int, int, int]]:
    """Yield of each entry from byte `offset` on where it begins, its flags, and how long its name is."""
    last = len(directory) - _ENTRY.size
    while offset <= last:
        flags, name_bytes, extra_bytes, comment_bytes = _OF_ENTRY.unpack_from(directory, offset)
        yield offset, flags, name_bytes
        offset += _ENTRY.size + name_bytes + extra_bytes + comment_bytes


def program(path: str) -> ShardError:
    """Return the error for an archive that torch.jit.save has written."""
    return ShardError(
        "an archive is a TorchScript program",
        expected="a file of torch.save",
        where=path,
        remedy="load it with torch.jit.load, and save its state_dict()",
    )


class Archive:
    """An archive, whose structure is read when it is asked for.

    Offsets are counted from its first byte, but members have offsets in the file.
    """

    def __init__(self, file: SourceFile, first_byte: int = 0, size_bytes: int | None = None) -> None:
        """Look at the archive that begins at `first_byte` of a file. size_bytes: None: it goes on to the file's end."""
        self.file = file
        self._first_byte = first_byte
        self._size_bytes = file.size_bytes - first_byte if size_bytes is None else size_bytes
        # The header that was read last, and what has been read from a header on.
        self._last_header_start = 0
        self._headers_start, self._headers = 0, b""

    def members(self) -> dict[str, Member]:
        """Return the members by name.

        Raises ShardError if the archive is cut short, damaged or compressed, or members overlap or have the same name.
        """
        start, directory, count = self.directory()
        by_name: dict[str, Member] = {}
        extents: list[tuple[int, int]] = []
        offset = 0
        for number in range(count):
            if self.file.is_far and number % _FORESEEN_ENTRIES == 0:
                self.file.will_read(self._header_spans(directory, offset))
            offset, name, local_start, member = self._member(directory, offset, start)
            if name in by_name:
                raise self._damage("two members of a shard have the same name", start + offset, got=repr(name))
            by_name[name] = member
            extents.append((local_start, member.offset_bytes + member.size_bytes - self._first_byte))
        if offset != len(directory):
            raise self._damage("the directory of a shard has another length than it says", start + offset)
        self._require_disjoint(extents)
        return by_name

    def _header_spans(self, directory: bytes, first: int) -> Iterator[tuple[int, int]]:
        """Yield where the local headers of the next entries lie in the file; only as far as entries are sound."""
        for offset, _, name_bytes in islice(_outlines(directory, first), _FORESEEN_ENTRIES):
            *_, extra_bytes, _, _, _, _, start = _ENTRY.unpack_from(directory, offset)
            extra_at = offset + _ENTRY.size + name_bytes
            if start == _FULL_4:  # behind the sizes, where these are too large as well
                start = int.from_bytes(directory[extra_at : extra_at + extra_bytes][-8:], "little")
            start += self._first_byte
            # What follows the payload before it is part of the structure, too.
            yield max(start - _BEFORE_HEADER_BYTES, 0), start + _LOCAL.size + name_bytes

    def directory(self) -> tuple[int, bytes, int]:
        """Return where the central directory begins, its bytes, and how many members it lists.

        Raises ShardError if the archive is cut short or damaged.
        """
        end_start = self._size_bytes - _END.size
        end = self._read(end_start, _END.size) if end_start >= 0 else b""
        if not end.startswith(_END_MARK):
            raise self._damage(
                "a shard does not end as an archive does: it is truncated, or something follows it", max(end_start, 0)
            )
        _, disk, directory_disk, here, count, length_bytes, start, comment_bytes = _END.unpack(end)
        directory_end = end_start
        locator_start = end_start - _LOCATOR.size
        locator = self._read(locator_start, _LOCATOR.size) if locator_start >= 0 else b""
        if locator.startswith(_LOCATOR_MARK):
            _, _, end64_start, _ = _LOCATOR.unpack(locator)
            if end64_start + _END64.size != locator_start:
                raise self._damage("a shard's archive has its parts at other places than it says", locator_start)
            values = _END64.unpack(self._read(end64_start, _END64.size))
            mark, _, _, _, disk64, directory_disk64, here64, count64, length64, start64 = values
            short = (disk, directory_disk, here, count, length_bytes, start)
            wide = (disk64, directory_disk64, here64, count64, length64, start64)
            if mark != _END64_MARK or any(
                value not in (true, full) for value, true, full in zip(short, wide, (*[_FULL_2] * 4, *[_FULL_4] * 2))
            ):
                raise self._damage("the ends of a shard's archive contradict each other", end64_start)
            disk, directory_disk, here, count, length_bytes, start = wide
            directory_end = end64_start
        if disk or directory_disk or here != count or comment_bytes:
            raise self._damage("a shard's archive has several parts or a comment", end_start)
        if start + length_bytes != directory_end:
            raise self._damage(
                "the directory of a shard is not where its archive says",
                end_start,
                expected=f"its end at byte {directory_end}",
                got=f"byte {start + length_bytes}",
            )
        if count > _MAX_MEMBERS or length_bytes > _MAX_DIRECTORY_BYTES:
            raise self._damage("a shard has too many members", end_start, expected=f"{_MAX_MEMBERS} at most")
        return start, self._read(start, length_bytes), count

    def _member(self, directory: bytes, offset: int, start: int) -> tuple[int, str, int, Member]:
        """Read the entry at byte `offset` of the directory.

        Returns where it ends, the member's name, where its local header begins, and the member.
        """
        if offset + _ENTRY.size > len(directory):
            raise self._damage("the directory of a shard ends in the middle of an entry", start + offset)
        fields = _ENTRY.unpack_from(directory, offset)
        mark, _, _, flags, method, _, _, crc, *lengths, disk, _, attributes, local_start = fields
        stored_bytes, size_bytes, name_bytes, extra_bytes, comment_bytes = lengths
        name_at = offset + _ENTRY.size
        extra_at = name_at + name_bytes
        end = extra_at + extra_bytes + comment_bytes
        if mark != _ENTRY_MARK or end > len(directory) or disk:
            raise self._damage("an entry in the directory of a shard is damaged", start + offset)
        raw_name = directory[name_at:extra_at]
        if size_bytes == _FULL_4 or stored_bytes == _FULL_4 or local_start == _FULL_4:
            extra = directory[extra_at : extra_at + extra_bytes]
            short = size_bytes, stored_bytes, local_start
            size_bytes, stored_bytes, local_start = self._wide(extra, short, start + offset)
        try:
            name = raw_name.decode()
        except UnicodeDecodeError:
            raise self._damage("a member of a shard has a name that is no UTF-8", start + offset) from None
        if attributes & _FOLDER and not name.endswith("/"):
            raise self._damage("a member of a shard is marked as a folder, which torch would not read", start + offset)
        if flags & _ENCRYPTED or flags & _MASKED:
            raise self._damage("a member of a shard is encrypted", start + offset, got=repr(name))
        if method != _STORED or stored_bytes != size_bytes:
            if "/code/" in name:
                raise program(self.file.path)
            raise self._damage(
                "a member of a shard is compressed",
                start + offset,
                expected="members as they are, as torch.save writes them",
                got=repr(name),
                remedy="load it with torch, and save it again",
            )
        payload_start = self._payload_start(local_start, raw_name, flags, (crc, size_bytes))
        if payload_start + size_bytes > start:
            raise self._damage("a member of a shard runs into the directory", local_start, got=repr(name))
        return end, name, local_start, Member(self._first_byte + payload_start, size_bytes, crc)

    def _wide(self, extra: bytes, short: tuple[int, int, int], offset: int) -> tuple[int, ...]:
        """Return the three numbers of an entry; large ones come from its extra field."""
        field_at = 0
        while field_at + 4 <= len(extra):
            kind = int.from_bytes(extra[field_at : field_at + 2], "little")
            length_bytes = int.from_bytes(extra[field_at + 2 : field_at + 4], "little")
            if kind == _ZIP64_EXTRA:
                content = extra[field_at + 4 : field_at + 4 + length_bytes]
                wanted = 8 * short.count(_FULL_4)
                if len(content) < wanted:
                    break
                numbers = iter(Struct(f"<{wanted // 8}Q").unpack_from(content))
                return tuple(next(numbers) if number == _FULL_4 else number for number in short)
            field_at += 4 + length_bytes
        raise self._damage("an entry of a large member has no sizes", offset)

    def _payload_start(self, local_start: int, name: bytes, flags: int, facts: tuple[int, int]) -> int:
        """Return the offset of a member's data. Raises ShardError if its local header contradicts the directory."""
        header = self._header(local_start, _LOCAL.size + len(name)) if local_start < self._size_bytes else b""
        if not header.startswith(_LOCAL_MARK):
            raise self._damage("a member of a shard is not where its directory says", local_start)
        fields = _LOCAL.unpack_from(header)
        _, _, own_flags, method, _, _, crc, stored_bytes, size_bytes, name_bytes, extra_bytes = fields
        is_same = (method, name_bytes, own_flags) == (_STORED, len(name), flags) and header[_LOCAL.size :] == name
        if not own_flags & _HAS_DESCRIPTOR:
            is_same = is_same and crc == facts[0] and (stored_bytes, size_bytes) in ((facts[1],) * 2, (_FULL_4,) * 2)
        if not is_same:
            raise self._damage("a member of a shard contradicts its directory", local_start, got=repr(name[:200]))
        return local_start + _LOCAL.size + int(name_bytes) + int(extra_bytes)

    def _header(self, offset: int, length_bytes: int) -> bytes:
        """Return the bytes of a local header; neighbouring headers are read together."""
        begin = offset - self._headers_start
        if begin < 0 or begin + length_bytes > len(self._headers):
            is_near = 0 < offset - self._last_header_start <= _NEAR_BYTES
            room_bytes = max(length_bytes, min(_READ_BYTES, self._size_bytes - offset) if is_near else 0)
            self._headers_start, self._headers, begin = offset, self._read(offset, room_bytes), 0
        self._last_header_start = offset
        return self._headers[begin : begin + length_bytes]

    def _require_disjoint(self, extents: list[tuple[int, int]]) -> None:
        previous_end = 0
        for local_start, end in sorted(extents):
            if local_start < previous_end:
                raise self._damage("two members of a shard overlap", local_start)
            previous_end = end

    def _read(self, offset: int, length_bytes: int) -> bytes:
        if offset + length_bytes > self._size_bytes:
            raise self._damage("a shard ends in the middle of its structure", offset)
        content = self.file.read(self._first_byte + offset, length_bytes)
        if len(content) != length_bytes:
            raise self._damage("a shard ends in the middle of its structure", offset)
        return content

    def _damage(self, problem: str, offset: int, *, expected: str = "", got: str = "", remedy: str = "") -> ShardError:
        where = f"{self.file.path}, byte {self._first_byte + offset}"
        return ShardError(problem, expected=expected, got=got, where=where, remedy=remedy)


ALIGNMENT_BYTES = 64
TOP = "archive/"
_UTF8 = 0x0800
_DESCRIPTOR_MARK = b"PK\x07\x08"
_MADE_BY, _NEEDED = 798, 45

# What a member takes at most besides its payload and its name, which stands there twice: local header, zip64 sizes,
# padding, descriptor, entry with zip64 sizes. And the ends of the archive.
MEMBER_BYTES = _LOCAL.size + 28 + 4 + ALIGNMENT_BYTES + 24 + _ENTRY.size + 28
ENDS_BYTES = _END64.size + _LOCATOR.size + _END.size


class Placed(NamedTuple):
    """A member in the archive. crc: 0 until its payload is there."""

    name: bytes
    header_start: int
    payload_start: int
    size_bytes: int
    crc: int = 0

    @property
    def flags(self) -> int:
        return _UTF8 | _HAS_DESCRIPTOR if self.size_bytes else _UTF8

    @property
    def is_large(self) -> bool:
        return self.size_bytes >= _FULL_4 or self.header_start >= _FULL_4

    @property
    def end(self) -> int:
        """Where what belongs to it ends: with its descriptor."""
        if not self.size_bytes:
            return self.payload_start
        return self.payload_start + self.size_bytes + (24 if self.is_large else 16)


def placed(name: str, size_bytes: int, offset: int, crc: int = 0) -> Placed:
    """Return where a member lies whose local header begins at byte `offset`."""
    encoded = (TOP + name).encode()
    wide_bytes = 16 * (size_bytes >= _FULL_4) + 8 * (offset >= _FULL_4)
    start = offset + _LOCAL.size + len(encoded) + (4 + wide_bytes if wide_bytes else 0) + 4
    return Placed(encoded, offset, -(-start // ALIGNMENT_BYTES) * ALIGNMENT_BYTES, size_bytes, crc)


def first_members(pickle: bytes) -> dict[str, bytes]:
    """Return the members of an archive before its payloads, by name."""
    return {
        "data.pkl": pickle,
        ".format_version": b"1",
        ".storage_alignment": str(ALIGNMENT_BYTES).encode(),
        "byteorder": sys.byteorder.encode(),
    }


def local_header(member: Placed) -> bytes:
    wide = _wide(member)
    padding = member.payload_start - member.header_start - _LOCAL.size - len(member.name) - len(wide)
    fields = (0, member.flags, 0, 0, 0, 0, 0, 0, len(member.name), len(wide) + padding)
    filling = b"FB" + (padding - 4).to_bytes(2, "little") + b"Z" * (padding - 4)
    return _LOCAL.pack(_LOCAL_MARK, *fields) + member.name + wide + filling


def descriptor(member: Placed) -> bytes:
    """Return what follows the payload of a member."""
    if not member.size_bytes:
        return b""
    width = 8 if member.is_large else 4
    size = member.size_bytes.to_bytes(width, "little")
    return _DESCRIPTOR_MARK + member.crc.to_bytes(4, "little") + size + size


def ends(members: list[Placed], start: int) -> bytes:
    """Return the directory of an archive, which begins at byte `start`, and what follows it."""
    directory = b"".join(map(_entry, members))
    count, length_bytes = len(members), len(directory)
    end64 = _END64.pack(_END64_MARK, _END64.size - 12, _MADE_BY, _NEEDED, 0, 0, count, count, length_bytes, start)
    locator = _LOCATOR.pack(_LOCATOR_MARK, 0, start + length_bytes, 1)
    short = min(count, _FULL_2)
    end = _END.pack(_END_MARK, 0, 0, short, short, min(length_bytes, _FULL_4), min(start, _FULL_4), 0)
    return directory + end64 + locator + end


def _entry(member: Placed) -> bytes:
    wide = _wide(member)
    sizes = (min(member.size_bytes, _FULL_4),) * 2
    fields = (0, 0, member.flags, 0, 0, 0, member.crc, *sizes, len(member.name), len(wide), 0, 0, 0, 0)
    return _ENTRY.pack(_ENTRY_MARK, *fields, min(member.header_start, _FULL_4)) + member.name + wide


def _wide(member: Placed) -> bytes:
    """Return the extra field with numbers that are too large for 4 bytes; nothing if none is."""
    numbers = [member.size_bytes] * 2 if member.size_bytes >= _FULL_4 else []
    if member.header_start >= _FULL_4:
        numbers.append(member.header_start)
    content = b"".join(number.to_bytes(8, "little") for number in numbers)
    return _ZIP64_EXTRA.to_bytes(2, "little") + len(content).to_bytes(2, "little") + content if content else b""


_CRC_BYTES, _NO_CRC = 4, bytes(4)


def of_file(file: SourceFile, tensors: TensorTable) -> HeaderDigest | None:
    """Return the structure of an archive if its tensors lie as these do; None if they cannot."""
    digest, payloads = hashlib.blake2b(), tensors.payload_spans()
    behind_payloads = {end for _, end in payloads}
    try:
        start, directory, _ = Archive(file).directory()
        spans = structure.spans_besides(file, payloads, start)
        for (first, _), part in zip(spans, structure.contents(file, spans)):
            if first in behind_payloads and part.startswith(_DESCRIPTOR_MARK):
                part = part[:DESCRIPTOR_CRC_AT] + _NO_CRC + part[DESCRIPTOR_CRC_AT + _CRC_BYTES :]
            digest.update(part)
        unsummed = bytearray(directory)
        for offset in _storage_entries(directory):
            unsummed[offset + ENTRY_CRC_AT : offset + ENTRY_CRC_AT + _CRC_BYTES] = _NO_CRC
        digest.update(unsummed)
        end = start + len(directory)
        digest.update(file.read_exactly(end, file.size_bytes - end))
    except ShardError:  # it is no archive, has just become shorter, or cannot be read
        return None
    return HeaderDigest(file.size_bytes, digest.digest())
