"""What makes two files the same but for payloads: their headers, apart from the checksum that these may hold.

The ranks of a training that hold shards of one shape write files with the same header, so one of them is parsed.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator

from reshard_mpi.formats.manifest import Structure
from reshard_mpi.formats.safetensors.header import LENGTH_BYTES, MAX_HEADER_BYTES
from reshard_mpi.formats.safetensors.metadata import CRC, METADATA

# Behind this `sealing` adds the checksum of a file to its metadata, and takes as much from the spaces at the end.
START = f'{{"{METADATA}":{{'.encode()
_CRC = re.compile(rb'"%b":"[0-9 ]{0,20}",?' % CRC.encode())
_READ_BYTES = 1 << 20


def of_file(fd: int, size_bytes: int) -> Structure | None:
    """Return the structure of a file of so many bytes; None if it has no header, or cannot be read."""
    try:
        length = os.pread(fd, LENGTH_BYTES, 0)
        length_bytes = int.from_bytes(length, "little")
        if length_bytes > min(size_bytes - LENGTH_BYTES, MAX_HEADER_BYTES):
            return None
        return of_header(length_bytes, _chunks(fd, length_bytes), size_bytes)
    except OSError:
        return None


def of_header(length_bytes: int, chunks: Iterable[bytes], size_bytes: int) -> Structure:
    """Return the structure of a file. chunks: its header, of so many bytes. size_bytes: of all of the file."""
    digest = hashlib.blake2b(length_bytes.to_bytes(LENGTH_BYTES, "little"))
    spaces = 0
    for number, chunk in enumerate(chunks):
        if number == 0:
            chunk = without_crc(chunk)
        text = chunk.rstrip(b" ")
        if text:
            digest.update(b" " * spaces)
            digest.update(text)
            spaces = 0
        spaces += len(chunk) - len(text)
    return Structure(size_bytes, digest.digest())


def without_crc(header: bytes) -> bytes:
    """Return a header, or the beginning of one, without a checksum that is the first of its metadata."""
    found = _CRC.match(header, len(START)) if header.startswith(START) else None
    return header[: found.start()] + header[found.end() :] if found else header


def _chunks(fd: int, length_bytes: int) -> Iterator[bytes]:
    for at in range(0, length_bytes, _READ_BYTES):
        yield os.pread(fd, min(_READ_BYTES, length_bytes - at), LENGTH_BYTES + at)
