"""All bytes of a file that are no payload, so that files of the same structure are told without parsing.

The ranks of a training that hold shards of one shape write files that differ in nothing but payloads, and in the
checksums of these: they count as zeros.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator

from reshard_mpi.errors import ShardError
from reshard_mpi.formats.columns import Tensors
from reshard_mpi.formats.manifest import Structure
from reshard_mpi.formats.torch import archive
from reshard_mpi.formats.torch.layout import DESCRIPTOR_MARK

# What is so close together is read by one call, and as much at once.
_CLOSE_BYTES, _READ_BYTES = 512, 64 << 10
_CRC_BYTES, _NO_CRC = 4, bytes(4)
# From one byte to another.
_Span = tuple[int, int]


def of_file(fd: int, size_bytes: int, tensors: Tensors) -> Structure | None:
    """Return the structure of an archive if its tensors lie as these do; None if they cannot."""
    digest, last = hashlib.blake2b(), 0
    try:
        start, length_bytes, _ = archive.directory(fd, tensors.path, size_bytes)
        spans = list[_Span]()
        for payload_start, payload_end in _payloads(tensors):
            spans.append((last, payload_start))
            last = payload_end
        if last > start:
            return None
        spans.append((last, start))
        for number, part in enumerate(_contents(fd, spans)):
            digest.update(_without_crc(part, archive.DESCRIPTOR_CRC_AT) if number and _is_descriptor(part) else part)
        directory = bytearray(next(_contents(fd, [(start, start + length_bytes)])))
        for at in archive.storage_entries(directory):
            directory[at + archive.ENTRY_CRC_AT : at + archive.ENTRY_CRC_AT + _CRC_BYTES] = _NO_CRC
        digest.update(bytes(directory))
        digest.update(next(_contents(fd, [(start + length_bytes, size_bytes)])))
    except (ShardError, ValueError, OSError):  # it is no archive, has just become shorter, or cannot be read
        return None
    return Structure(size_bytes, digest.digest())


def _is_descriptor(part: bytes) -> bool:
    return part.startswith(DESCRIPTOR_MARK)


def _without_crc(part: bytes, at: int) -> bytes:
    return part[:at] + _NO_CRC + part[at + _CRC_BYTES :]


def _payloads(tensors: Tensors) -> Iterator[_Span]:
    """Yield where payloads lie, in the order of the file; those that several tensors share as one."""
    sizes = [kind.size_bytes for kind in tensors.kinds]
    spans = {
        (start, start + sizes[kind])
        for number, (start, kind) in enumerate(zip(tensors.starts, tensors.kind_of))
        if sizes[kind] and number not in tensors.elsewhere
    }
    for name in tensors if tensors.elsewhere else ():
        entry = tensors[name]
        if entry.stored is not None:
            spans.update((part.offset_bytes, part.offset_bytes + part.length_bytes) for part in entry.stored.ranges)
    last: _Span | None = None
    for span in sorted(spans):
        if last is not None and span[0] < last[1]:
            last = last[0], max(last[1], span[1])
            continue
        if last is not None:
            yield last
        last = span
    if last is not None:
        yield last


def _contents(fd: int, spans: list[_Span]) -> Iterator[bytes]:
    """Yield the bytes of spans of a file, which ascend; those close to each other are read together.

    Raises ValueError if the file ends before, OSError if it cannot be read.
    """
    number = 0
    while number < len(spans):
        base, end = spans[number]
        last = number + 1
        while last < len(spans) and spans[last][0] - end <= _CLOSE_BYTES and spans[last][1] - base <= _READ_BYTES:
            end = spans[last][1]
            last += 1
        content = os.pread(fd, end - base, base)
        if len(content) < end - base:
            raise ValueError("the file has become shorter")
        yield from (content[start - base : stop - base] for start, stop in spans[number:last])
        number = last
