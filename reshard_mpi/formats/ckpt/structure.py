"""A digest of all bytes of a checkpoint file but the payloads: files with the same one need not all be parsed.

Ranks of a training that hold shards of the same shape write files that differ only in payloads.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator

from reshard_mpi.formats import files
from reshard_mpi.formats.ckpt.values import CRC_BYTES, CRC_MARK
from reshard_mpi.formats.columns import Tensors
from reshard_mpi.formats.manifest import Structure
from reshard_mpi.formats.places import Segments


def of_file(fd: int, tensors: Tensors) -> Structure | None:
    """Return the structure of a file whose tensors lie where `tensors` says; None if they cannot lie so in it."""
    payloads = list(_payloads(tensors))
    size_bytes = _without_checksum(fd, payloads[-1][1] if payloads else 0)
    spans, last = list[files.Span](), 0
    for start, stop in (*payloads, (size_bytes, size_bytes)):
        if not last <= start <= stop <= size_bytes:
            return None
        spans.append((last, start))
        last = stop
    try:
        return Structure(size_bytes, hashlib.blake2b(b"".join(files.contents(fd, spans))).digest())
    except (ValueError, OSError):  # it has just become shorter, or cannot be read
        return None


def _without_checksum(fd: int, end: int) -> int:
    """Return the length of a file without the checksum that may be at its end. end: of its last payload."""
    size_bytes = os.fstat(fd).st_size
    shorter_bytes = size_bytes - CRC_BYTES
    has_checksum = shorter_bytes >= max(end, 1) and os.pread(fd, len(CRC_MARK), shorter_bytes) == CRC_MARK
    return shorter_bytes if has_checksum else size_bytes


def _payloads(tensors: Tensors) -> Iterator[files.Span]:
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
