"""A digest of all bytes of a checkpoint file but the payloads: files with the same one need not all be parsed.

Ranks of a training that hold shards of the same shape write files that differ only in payloads.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator

from reshard_mpi.formats.ckpt.values import CRC_BYTES, CRC_MARK
from reshard_mpi.formats.columns import Tensors
from reshard_mpi.formats.manifest import Structure
from reshard_mpi.formats.places import Segments

# Spans with so little between them are read by one call, which reads no more than so much.
_CLOSE_BYTES, _READ_BYTES = 512, 64 << 10
# The first byte, and the one after the last.
_Span = tuple[int, int]


def of_file(fd: int, tensors: Tensors) -> Structure | None:
    """Return the structure of a file whose tensors lie where `tensors` says; None if they cannot lie so in it."""
    payloads = list(_payloads(tensors))
    size_bytes = _without_checksum(fd, payloads[-1][1] if payloads else 0)
    spans, last = list[_Span](), 0
    for start, stop in (*payloads, (size_bytes, size_bytes)):
        if not last <= start <= stop <= size_bytes:
            return None
        spans.append((last, start))
        last = stop
    try:
        return of_parts(_contents(fd, spans), size_bytes)
    except (ValueError, OSError):  # it has just become shorter, or cannot be read
        return None


def of_parts(parts: Iterable[bytes], size_bytes: int) -> Structure:
    """Return the structure of a file of `size_bytes` bytes. parts: all of it but the payloads, in order."""
    return Structure(size_bytes, hashlib.blake2b(b"".join(parts)).digest())


def _without_checksum(fd: int, end: int) -> int:
    """Return the length of a file without the checksum that may be at its end. end: of its last payload."""
    size_bytes = os.fstat(fd).st_size
    shorter_bytes = size_bytes - CRC_BYTES
    has_checksum = shorter_bytes >= max(end, 1) and os.pread(fd, len(CRC_MARK), shorter_bytes) == CRC_MARK
    return shorter_bytes if has_checksum else size_bytes


def _payloads(tensors: Tensors) -> Iterator[_Span]:
    """Yield the spans of the payloads, in the order of the tensors."""
    sizes = [kind.size_bytes for kind in tensors.kinds]
    if not tensors.elsewhere:
        return ((start, start + sizes[kind]) for start, kind in zip(tensors.starts, tensors.kind_of) if sizes[kind])
    return (
        (part.offset_bytes, part.offset_bytes + part.length_bytes)
        for number in range(len(tensors))
        if isinstance(source := tensors.source(number), Segments)
        for part in source.ranges
    )


def _contents(fd: int, spans: list[_Span]) -> Iterator[bytes]:
    """Yield the bytes of ascending spans of a file; those close to each other are read by one call.

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
        if last == number + 1:
            yield content
        else:
            yield from [content[start - base : stop - base] for start, stop in spans[number:last]]
        number = last
