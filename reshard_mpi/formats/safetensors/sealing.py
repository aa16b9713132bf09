"""Finishing a file, and the checksum that MindSpore puts into its metadata: `save_checkpoint(crc_check=True)`.

`crc_num` is the decimal CRC-32 of all names, sorted, each followed by its tensor's bytes (or what it counts as, see
`formats.counted`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from reshard_mpi.errors import ShardError
from reshard_mpi.formats import files
from reshard_mpi.formats.columns import Tensors
from reshard_mpi.formats.counted import UncountableError, counted_bytes, is_counted
from reshard_mpi.formats.protocol import NO_SUMS, OnBytes, uncounted
from reshard_mpi.formats.safetensors.header import LENGTH_BYTES
from reshard_mpi.formats.safetensors.metadata import CRC
from reshard_mpi.formats.safetensors.reading import read
from reshard_mpi.formats.safetensors.structure import START
from reshard_mpi.units import MIB

_ZEROS_BYTES = 2 * MIB


def seal(fd: int, path: str, sums: Mapping[str, int] = NO_SUMS, *, crc: bool = False) -> None:
    """Finish a file. crc: add `crc_num`, the checksum that MindSpore knows.

    There is no place in it for the sums of tensors. Raises TargetError if it holds what MindSpore cannot sum.
    """
    if crc:
        add_crc(fd, path)


def add_crc(fd: int, path: str) -> None:
    """Add the checksum to the metadata, in the place of spaces at the end of the header."""
    try:
        contents = read(fd, path, os.fstat(fd).st_size)
        entry = f'"{CRC}":"{_sum(fd, contents.tensors)}"'.encode()
    except UncountableError as error:
        raise error.refusal(path) from None
    length_bytes = int.from_bytes(os.pread(fd, LENGTH_BYTES, 0), "little")
    header = os.pread(fd, length_bytes, LENGTH_BYTES)
    entry += b"" if header.startswith(b"}", len(START)) else b","
    patched = START + entry + header[len(START) :]
    if len(patched.rstrip(b" ")) > length_bytes:
        raise RuntimeError("a header has no room for a checksum")
    files.write_all(fd, patched[:length_bytes], LENGTH_BYTES)


def check_crc(path: str, on_bytes: OnBytes = uncounted) -> bool:
    """Tell whether the file at `path` has a checksum. Raises ShardError if it does not fit names and contents."""
    with files.opened(path) as (fd, size_bytes):
        contents = read(fd, path, size_bytes)
        if contents.crc is None:
            return False
        try:
            found = str(_sum(fd, contents.tensors, on_bytes))
        except UncountableError as error:
            found = f"none that can be: {error.name!r} is {error.value}"
        if found != contents.crc.strip(" "):
            raise ShardError(
                "a checkpoint does not fit its own checksum: it is damaged, or has that of another file",
                expected=f"CRC-32 {contents.crc!r}, as its {CRC} says",
                got=found,
                where=path,
                remedy="copy it again, or use another replica",
            )
        return True


def _sum(fd: int, tensors: Tensors, on_bytes: OnBytes = uncounted) -> int:
    """Return the checksum of all tensors. Raises UncountableError if there is none, ShardError if the file is cut.

    on_bytes: told how many bytes have just been read.
    """
    from zlib_ng.zlib_ng import crc32

    crc, zeros = 0, bytes(_ZEROS_BYTES)
    for name in sorted(tensors):
        crc = crc32(name.encode(), crc)
        kind, start = tensors.kind_named(name), tensors.starts[tensors.number_of[name]]
        if is_counted(kind.dtype, kind.shape):
            content = os.pread(fd, kind.size_bytes, start)
            if len(content) < kind.size_bytes:
                raise files.became_shorter(tensors.path)
            left = counted_bytes(name, content, kind.dtype)
            while left:
                part = min(left, len(zeros))
                crc = crc32(zeros[:part], crc)
                left -= part
        else:
            crc = files.crc32_of(fd, tensors.path, (start, start + kind.size_bytes), crc, on_bytes)
    return crc
