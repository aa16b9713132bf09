"""Finishing a file: the checksums of its members, which other tools than torch look at."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from reshard_mpi.errors import ShardError
from reshard_mpi.formats import files
from reshard_mpi.formats.protocol import NO_SUMS, OnBytes, uncounted
from reshard_mpi.formats.torch import archive


def seal(fd: int, path: str, sums: Mapping[str, int] = NO_SUMS, *, crc: bool = False) -> None:
    """Put the CRC-32 of every member behind its payload and into the directory.

    There is no place in it for the sums of tensors; members always have theirs, so `crc` changes nothing.
    """
    size_bytes = os.fstat(fd).st_size
    members = archive.members(fd, path, size_bytes)
    start, length_bytes, _ = archive.directory(fd, path, size_bytes)
    directory = bytearray(os.pread(fd, length_bytes, start))
    for at, member, found in zip(archive.entries(directory), members.values(), _sums(fd, path, members)):
        directory[at + archive.ENTRY_CRC_AT : at + archive.ENTRY_CRC_AT + len(found)] = found
        if member.size_bytes:
            files.write_all(fd, found, member.offset_bytes + member.size_bytes + archive.DESCRIPTOR_CRC_AT)
    files.write_all(fd, bytes(directory), start)


def check_crc(path: str, on_bytes: OnBytes = uncounted) -> bool:
    """Tell whether every member of the file has a checksum. Raises ShardError if one does not fit.

    torch can be told to leave them out; then they are 0. Files of the older layout have none.
    """
    with files.opened(path) as (fd, size_bytes):
        if not archive.is_archive(os.pread(fd, 4, 0)):
            return False
        return check_members(fd, path, archive.members(fd, path, size_bytes), on_bytes)


def check_members(fd: int, path: str, members: Mapping[str, archive.Member], on_bytes: OnBytes) -> bool:
    """Tell whether every member of an archive has a checksum. Raises ShardError if one does not fit.

    on_bytes: told how many bytes have just been read.
    """
    if any(member.size_bytes and not member.crc for member in members.values()):
        return False
    for (name, member), found in zip(members.items(), _sums(fd, path, members, on_bytes)):
        if int.from_bytes(found, "little") != member.crc:
            raise ShardError(
                "a member of a shard does not fit its own checksum: it is damaged",
                expected=f"CRC-32 {member.crc:08x}, as the directory says",
                got=f"{int.from_bytes(found, 'little'):08x}",
                where=f"{path}, byte {member.offset_bytes}, member {name!r}",
                remedy="copy it again, or use another replica",
            )
    return True


def _sums(fd: int, path: str, members: Mapping[str, archive.Member], on_bytes: OnBytes = uncounted) -> Iterator[bytes]:
    """Yield the CRC-32 of each member's payload, as it is written."""
    for member in members.values():
        span = member.offset_bytes, member.offset_bytes + member.size_bytes
        yield files.crc32_of(fd, path, span, on_bytes=on_bytes).to_bytes(4, "little")
