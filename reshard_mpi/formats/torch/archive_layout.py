"""Lay out the members of an archive as torch's own writer does (`placed`).

Payloads begin at multiples of 64, reached by padding in the local header. A local header has neither sizes nor CRC:
they follow the payload, and stand in the directory. Whoever computes places from `.format_version`, as torch does
without reading the file, finds them.

The ranks of a training that hold shards of one shape write files that differ in nothing but payloads, and in the
checksums of these: they count as zeros.
"""

from __future__ import annotations

import hashlib
import sys
from typing import NamedTuple

from reshard_mpi.errors import ShardError
from reshard_mpi.filesystem.source_files import SourceFile
from reshard_mpi.formats import structure
from reshard_mpi.formats.manifest import HeaderDigest
from reshard_mpi.formats.tensor_table import TensorTable
from reshard_mpi.formats.torch import archive
from reshard_mpi.formats.torch.archive import (
    END,
    END64,
    END64_MARK,
    END_MARK,
    ENTRY,
    ENTRY_MARK,
    FULL_2,
    FULL_4,
    LOCAL,
    LOCAL_MARK,
    LOCATOR,
    LOCATOR_MARK,
    ZIP64_EXTRA,
)

ALIGNMENT_BYTES = 64
TOP = "archive/"
_UTF8, _DESCRIPTOR = 0x0800, 0x0008
DESCRIPTOR_MARK = b"PK\x07\x08"
_MADE_BY, _NEEDED = 798, 45

# What a member takes at most besides its payload and its name, which stands there twice: local header, zip64 sizes,
# padding, descriptor, entry with zip64 sizes. And the ends of the archive.
MEMBER_BYTES = LOCAL.size + 28 + 4 + ALIGNMENT_BYTES + 24 + ENTRY.size + 28
ENDS_BYTES = END64.size + LOCATOR.size + END.size


class Placed(NamedTuple):
    """A member in the archive. crc: 0 until its payload is there."""

    name: bytes
    header_start: int
    payload_start: int
    size_bytes: int
    crc: int = 0

    @property
    def flags(self) -> int:
        return _UTF8 | _DESCRIPTOR if self.size_bytes else _UTF8

    @property
    def is_large(self) -> bool:
        return self.size_bytes >= FULL_4 or self.header_start >= FULL_4

    @property
    def end(self) -> int:
        """Where what belongs to it ends: with its descriptor."""
        if not self.size_bytes:
            return self.payload_start
        return self.payload_start + self.size_bytes + (24 if self.is_large else 16)


def placed(name: str, size_bytes: int, offset: int, crc: int = 0) -> Placed:
    """Return where a member lies whose local header begins at byte `offset`."""
    encoded = (TOP + name).encode()
    wide_bytes = 16 * (size_bytes >= FULL_4) + 8 * (offset >= FULL_4)
    start = offset + LOCAL.size + len(encoded) + (4 + wide_bytes if wide_bytes else 0) + 4
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
    padding = member.payload_start - member.header_start - LOCAL.size - len(member.name) - len(wide)
    fields = (0, member.flags, 0, 0, 0, 0, 0, 0, len(member.name), len(wide) + padding)
    filling = b"FB" + (padding - 4).to_bytes(2, "little") + b"Z" * (padding - 4)
    return LOCAL.pack(LOCAL_MARK, *fields) + member.name + wide + filling


def descriptor(member: Placed) -> bytes:
    """Return what follows the payload of a member."""
    if not member.size_bytes:
        return b""
    width = 8 if member.is_large else 4
    size = member.size_bytes.to_bytes(width, "little")
    return DESCRIPTOR_MARK + member.crc.to_bytes(4, "little") + size + size


def ends(members: list[Placed], start: int) -> bytes:
    """Return the directory of an archive, which begins at byte `start`, and what follows it."""
    directory = b"".join(map(_entry, members))
    count, length_bytes = len(members), len(directory)
    end64 = END64.pack(END64_MARK, END64.size - 12, _MADE_BY, _NEEDED, 0, 0, count, count, length_bytes, start)
    locator = LOCATOR.pack(LOCATOR_MARK, 0, start + length_bytes, 1)
    short = min(count, FULL_2)
    end = END.pack(END_MARK, 0, 0, short, short, min(length_bytes, FULL_4), min(start, FULL_4), 0)
    return directory + end64 + locator + end


def _entry(member: Placed) -> bytes:
    wide = _wide(member)
    sizes = (min(member.size_bytes, FULL_4),) * 2
    fields = (0, 0, member.flags, 0, 0, 0, member.crc, *sizes, len(member.name), len(wide), 0, 0, 0, 0)
    return ENTRY.pack(ENTRY_MARK, *fields, min(member.header_start, FULL_4)) + member.name + wide


def _wide(member: Placed) -> bytes:
    """Return the extra field with numbers that are too large for 4 bytes; nothing if none is."""
    numbers = [member.size_bytes] * 2 if member.size_bytes >= FULL_4 else []
    if member.header_start >= FULL_4:
        numbers.append(member.header_start)
    content = b"".join(number.to_bytes(8, "little") for number in numbers)
    return ZIP64_EXTRA.to_bytes(2, "little") + len(content).to_bytes(2, "little") + content if content else b""


_CRC_AT, _CRC_BYTES, _NO_CRC = archive.DESCRIPTOR_CRC_AT, 4, bytes(4)


def of_file(file: SourceFile, tensors: TensorTable) -> HeaderDigest | None:
    """Return the structure of an archive if its tensors lie as these do; None if they cannot."""
    digest, payloads = hashlib.blake2b(), tensors.payload_spans()
    behind_payloads = {end for _, end in payloads}
    try:
        start, directory, _ = archive.Archive(file).directory()
        spans = structure.spans_besides(file, payloads, start)
        for (first, _), part in zip(spans, structure.contents(file, spans)):
            if first in behind_payloads and part.startswith(DESCRIPTOR_MARK):
                part = part[:_CRC_AT] + _NO_CRC + part[_CRC_AT + _CRC_BYTES :]
            digest.update(part)
        unsummed = bytearray(directory)
        for offset in archive.storage_entries(directory):
            unsummed[offset + archive.ENTRY_CRC_AT : offset + archive.ENTRY_CRC_AT + _CRC_BYTES] = _NO_CRC
        digest.update(unsummed)
        end = start + len(directory)
        digest.update(file.read_exactly(end, file.size_bytes - end))
    except ShardError:  # it is no archive, has just become shorter, or cannot be read
        return None
    return HeaderDigest(file.size_bytes, digest.digest())
