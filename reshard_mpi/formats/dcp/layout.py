"""An item of a file that is written: an archive as torch makes it of one tensor, or of one object."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple
from zlib import crc32

from reshard_mpi.formats.columns import Kind
from reshard_mpi.formats.nest.trees import Value
from reshard_mpi.formats.torch.layout import (
    ALIGNMENT_BYTES,
    Placed,
    descriptor,
    ends,
    first_members,
    local_header,
    placed,
)
from reshard_mpi.formats.torch.pickling import Leaf, dumps
from reshard_mpi.units import KIB

# Payloads of this size and more begin where file systems can share blocks.
_LARGE_BYTES, _BLOCK_BYTES = 64 * KIB, 4 * KIB
_KEY = "0"
# torch gives each archive a number, which it never looks at.
_NUMBER = b"0" * 40


class ItemLayout(NamedTuple):
    """What an item of a tensor consists of besides its payload: the bytes before it, and those behind it.

    There is no checksum of the payload, which torch never looks at.
    """

    head: bytes
    tail: bytes
    payload_bytes: int

    @property
    def length_bytes(self) -> int:
        return len(self.head) + self.payload_bytes + len(self.tail)

    def start_behind(self, end: int) -> int:
        """Return where the item begins whose predecessor ends at byte `end`, so that its payload is aligned."""
        alignment_bytes = _BLOCK_BYTES if self.payload_bytes >= _LARGE_BYTES else ALIGNMENT_BYTES
        return -(-(end + len(self.head)) // alignment_bytes) * alignment_bytes - len(self.head)


@lru_cache(maxsize=1024)
def of_tensor(kind: Kind) -> ItemLayout:
    """Return the layout of a tensor of a kind, of which only type and shape count."""
    plain = Kind(kind.dtype, kind.shape)
    before, members = _written(first_members(dumps(Leaf(_KEY, plain))), [])
    payload = placed(f"data/{_KEY}", plain.size_bytes, members[-1].end)
    head = before.ljust(payload.header_start, b"\0") + local_header(payload)
    return ItemLayout(head, _finished([*members, payload]), plain.size_bytes)


def of_object(value: Value) -> bytes:
    """Return the item of an object without tensors."""
    before, members = _written(first_members(dumps(value)), [])
    return before + _finished(members)


def _finished(members: list[Placed]) -> bytes:
    """Return what follows the members of an archive: the descriptor of a payload, the last members, the directory."""
    of_payload = descriptor(members[-1]) if members[-1].name.endswith(f"data/{_KEY}".encode()) else b""
    last, every = _written({"version": b"3\n", ".data/serialization_id": _NUMBER}, members)
    return of_payload + last + ends(every, every[-1].end)


def _written(contents: dict[str, bytes], before: list[Placed]) -> tuple[bytes, list[Placed]]:
    parts, members = [], list(before)
    for name, content in contents.items():
        member = placed(name, len(content), members[-1].end if members else 0, crc32(content))
        parts.append(local_header(member) + content + descriptor(member))
        members.append(member)
    return b"".join(parts), members
