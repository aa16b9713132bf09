"""Where an HDF5 file ends, as its superblock says, read before the library opens the file.

HDF5 File Format Specification, "Format Signature and Superblock": the signature stands at byte 0, 512, 1024, 2048 and
so on; versions 0 and 1 have the addresses after 24 and 28 bytes, versions 2 and 3 after 12. The end-of-file address
counts from the start of the file.
"""

from __future__ import annotations

import os

from reshard_mpi.errors import ShardError
from reshard_mpi.filesystem.file_kinds import START_BYTES
from reshard_mpi.formats import files
from reshard_mpi.formats.hdf5 import index

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_HEAD_BYTES = 128
# version -> (byte with the size of addresses, first byte of the first address, number of the end-of-file address)
_LAYOUTS = {0: (13, 24, 2), 1: (13, 28, 2), 2: (9, 12, 2), 3: (9, 12, 2)}


def end_of_file(fd: int, path: str, size_bytes: int) -> int:
    """Return where the HDF5 file ends: at the end of the file, or where the index of a native shard begins.

    Raises ShardError if it is not HDF5, or not as long as it says.
    """
    offset = _signature(fd, size_bytes)
    if offset is None:
        raise files.other_kind(os.pread(fd, START_BYTES, 0), path, "an HDF5 file") or ShardError(
            "a shard is not an HDF5 file",
            expected="the signature of HDF5",
            got=repr(os.pread(fd, 8, 0)),
            where=f"{path}, byte 0",
            remedy="save or copy it again",
        )
    end = _end_of_file(os.pread(fd, _HEAD_BYTES, offset))
    if end is None:
        return size_bytes
    expected_bytes = end if size_bytes <= end else index.length_bytes(fd, end) or end
    if expected_bytes != size_bytes:
        problem = "is truncated" if size_bytes < expected_bytes else "goes on after its end"
        raise ShardError(
            f"an HDF5 shard {problem}",
            expected=f"{expected_bytes} bytes, as its {'superblock' if expected_bytes == end else 'index'} says",
            got=f"{size_bytes} bytes",
            where=f"{path}, superblock at byte {offset}",
            remedy="save or copy it again",
        )
    return end


def _signature(fd: int, size_bytes: int) -> int | None:
    offset = 0
    while offset < size_bytes:
        if os.pread(fd, len(_SIGNATURE), offset) == _SIGNATURE:
            return offset
        offset = offset * 2 or 512
    return None


def _end_of_file(head: bytes) -> int | None:
    """Return the end-of-file address in the superblock `head`; None if only the library can read it."""
    layout = _LAYOUTS.get(head[8]) if len(head) > 8 else None
    if layout is None:
        return None
    size_at, base_at, number = layout
    if len(head) <= size_at:
        return None
    width = head[size_at]
    address = head[base_at + number * width : base_at + (number + 1) * width]
    return int.from_bytes(address, "little") if width in (2, 4, 8) and len(address) == width else None
