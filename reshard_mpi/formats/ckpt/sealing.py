"""The last step of writing a checkpoint file, and its CRC-32, as `save_checkpoint(crc_check=True)` appends it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from reshard_mpi.errors import ShardError
from reshard_mpi.formats import files
from reshard_mpi.formats.ckpt.values import CRC_BYTES, CRC_MARK
from reshard_mpi.formats.protocol import NO_SUMS, OnBytes, uncounted
from reshard_mpi.units import MIB

_BLOCK_BYTES = 2 * MIB
_NUMBER_BYTES = CRC_BYTES - len(CRC_MARK)


def seal(fd: int, path: str, sums: Mapping[str, int] = NO_SUMS, *, crc: bool = False) -> None:
    """Give the file the mode of MindSpore's checkpoints: read-only for its owner. crc: append the CRC-32 first.

    The sums of tensors are dropped, as the format has no place for them.
    """
    if crc:
        size_bytes = os.fstat(fd).st_size
        trailer = CRC_MARK + _sum(fd, path, size_bytes).to_bytes(_NUMBER_BYTES, "big")
        files.write_all(fd, trailer, size_bytes)
    os.fchmod(fd, 0o400)


def check_crc(path: str, on_bytes: OnBytes = uncounted) -> bool:
    """Tell whether the file at `path` ends in a CRC-32. Raises ShardError if that is not of what comes before it."""
    with files.opened(path) as (fd, size_bytes):
        summed_bytes = size_bytes - CRC_BYTES
        trailer = os.pread(fd, CRC_BYTES, summed_bytes) if summed_bytes >= 0 else b""
        if not trailer.startswith(CRC_MARK):
            return False
        expected = int.from_bytes(trailer[len(CRC_MARK) :], "big")
        computed = _sum(fd, path, summed_bytes, on_bytes)
        if computed != expected:
            raise ShardError(
                "a checkpoint does not fit its own checksum: it is damaged",
                expected=f"CRC-32 {expected:08x}, as its last {CRC_BYTES} bytes say",
                got=f"{computed:08x}",
                where=path,
                remedy="copy it again, or use another replica",
            )
        return True


def _sum(fd: int, path: str, size_bytes: int, on_bytes: OnBytes = uncounted) -> int:
    from zlib_ng.zlib_ng import crc32

    buffer = memoryview(bytearray(min(_BLOCK_BYTES, size_bytes)))
    offset = crc = 0
    while offset < size_bytes:
        count = os.preadv(fd, [buffer[: size_bytes - offset]], offset)
        if count == 0:
            raise ShardError("a checkpoint became shorter while it was read", where=path)
        crc = crc32(buffer[:count], crc)
        offset += count
        on_bytes(count)
    return crc
