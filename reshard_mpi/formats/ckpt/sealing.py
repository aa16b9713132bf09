"""Finishing a checkpoint file, and the CRC-32 that MindSpore appends to one: `save_checkpoint(crc_check=True)`.

17 bytes: `crc_num` and, in 10 bytes, the big-endian CRC-32 of everything before them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from reshard_mpi.errors import ShardError
from reshard_mpi.formats import files
from reshard_mpi.formats.ckpt.values import CRC_BYTES, CRC_MARK
from reshard_mpi.formats.protocol import NO_SUMS
from reshard_mpi.units import MIB

_BLOCK_BYTES = 2 * MIB
_NUMBER_BYTES = CRC_BYTES - len(CRC_MARK)


def seal(fd: int, path: str, sums: Mapping[str, int] = NO_SUMS, *, crc: bool = False) -> None:
    """Make the file read-only for its owner, the mode MindSpore gives its checkpoints. crc: append the CRC-32 first.

    There is no place in it for the sums of tensors.
    """
    if crc:
        size_bytes = os.fstat(fd).st_size
        trailer = CRC_MARK + _sum(fd, path, size_bytes).to_bytes(_NUMBER_BYTES, "big")
        files.write_all(fd, trailer, size_bytes)
    os.fchmod(fd, 0o400)


def stored_sums(path: str) -> Mapping[str, int]:
    """Return nothing: the format has no place for the sums of tensors."""
    return NO_SUMS


def check_crc(path: str) -> bool:
    """Tell whether the file at `path` has a trailer. Raises ShardError if it does not fit what is before it."""
    with files.opened(path) as (fd, size_bytes):
        before = size_bytes - CRC_BYTES
        trailer = os.pread(fd, CRC_BYTES, before) if before >= 0 else b""
        if not trailer.startswith(CRC_MARK):
            return False
        expected = int.from_bytes(trailer[len(CRC_MARK) :], "big")
        found = _sum(fd, path, before)
        if found != expected:
            raise ShardError(
                "a checkpoint does not fit its own checksum: it is damaged",
                expected=f"CRC-32 {expected:08x}, as its last {CRC_BYTES} bytes say",
                got=f"{found:08x}",
                where=path,
                remedy="copy it again, or use another replica",
            )
        return True


def _sum(fd: int, path: str, size_bytes: int) -> int:
    from zlib_ng.zlib_ng import crc32

    buffer = memoryview(bytearray(min(_BLOCK_BYTES, size_bytes)))
    at = crc = 0
    while at < size_bytes:
        count = os.preadv(fd, [buffer[: size_bytes - at]], at)
        if count == 0:
            raise ShardError("a checkpoint became shorter while it was read", where=path)
        crc = crc32(buffer[:count], crc)
        at += count
    return crc
