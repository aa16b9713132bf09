"""The last step of writing a checkpoint file, and its CRC-32, as `save_checkpoint(crc_check=True)` appends it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from reshard_mpi.errors import ShardError
from reshard_mpi.formats import files
from reshard_mpi.formats.ckpt.values import CRC_BYTES, CRC_MARK
from reshard_mpi.formats.protocol import NO_SUMS, OnBytes, uncounted

_NUMBER_BYTES = CRC_BYTES - len(CRC_MARK)


def seal(fd: int, path: str, sums: Mapping[str, int] = NO_SUMS, *, crc: bool = False) -> None:
    """Finish a checkpoint file. crc: append its CRC-32.

    The sums of tensors are dropped, as the format has no place for them.
    """
    if crc:
        size_bytes = os.fstat(fd).st_size
        trailer = CRC_MARK + files.crc32_of(fd, path, (0, size_bytes)).to_bytes(_NUMBER_BYTES, "big")
        files.write_all(fd, trailer, size_bytes)


def check_crc(path: str, on_bytes: OnBytes = uncounted) -> bool:
    """Tell whether the file at `path` ends in a CRC-32. Raises ShardError if that is not of what comes before it."""
    with files.opened(path) as (fd, size_bytes):
        summed_bytes = size_bytes - CRC_BYTES
        trailer = os.pread(fd, CRC_BYTES, summed_bytes) if summed_bytes >= 0 else b""
        if not trailer.startswith(CRC_MARK):
            return False
        expected = int.from_bytes(trailer[len(CRC_MARK) :], "big")
        computed = files.crc32_of(fd, path, (0, summed_bytes), on_bytes=on_bytes)
        if computed != expected:
            raise ShardError(
                "a checkpoint does not fit its own checksum: it is damaged",
                expected=f"CRC-32 {expected:08x}, as its last {CRC_BYTES} bytes say",
                got=f"{computed:08x}",
                where=path,
                remedy="copy it again, or use another replica",
            )
        return True
