"""All bytes of a file that are no payload, so that files of the same structure are told without parsing.

The ranks of a training that hold shards of one shape write files that differ in nothing but payloads, and in the
checksums of these: they count as zeros.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from reshard_mpi.errors import ShardError
from reshard_mpi.formats import files
from reshard_mpi.formats.columns import Tensors
from reshard_mpi.formats.manifest import Structure
from reshard_mpi.formats.torch import archive
from reshard_mpi.formats.torch.layout import DESCRIPTOR_MARK

_CRC_AT, _CRC_BYTES, _NO_CRC = archive.DESCRIPTOR_CRC_AT, 4, bytes(4)


def of_file(fd: int, size_bytes: int, tensors: Tensors) -> Structure | None:
    """Return the structure of an archive if its tensors lie as these do; None if they cannot."""
    digest, last = hashlib.blake2b(), 0
    try:
        start, length_bytes, _ = archive.directory(fd, tensors.path, size_bytes)
        spans = list[files.Span]()
        for payload_start, payload_end in _payloads(tensors):
            spans.append((last, payload_start))
            last = payload_end
        if last > start:
            return None
        spans.append((last, start))
        for number, part in enumerate(files.contents(fd, spans)):
            if number and part.startswith(DESCRIPTOR_MARK):
                part = part[:_CRC_AT] + _NO_CRC + part[_CRC_AT + _CRC_BYTES :]
            digest.update(part)
        directory = bytearray(next(files.contents(fd, [(start, start + length_bytes)])))
        for at in archive.storage_entries(directory):
            directory[at + archive.ENTRY_CRC_AT : at + archive.ENTRY_CRC_AT + _CRC_BYTES] = _NO_CRC
        digest.update(bytes(directory))
        digest.update(next(files.contents(fd, [(start + length_bytes, size_bytes)])))
    except (ShardError, ValueError, OSError):  # it is no archive, has just become shorter, or cannot be read
        return None
    return Structure(size_bytes, digest.digest())


def _payloads(tensors: Tensors) -> Iterator[files.Span]:
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
    last: files.Span | None = None
    for span in sorted(spans):
        if last is not None and span[0] < last[1]:
            last = last[0], max(last[1], span[1])
            continue
        if last is not None:
            yield last
        last = span
    if last is not None:
        yield last
