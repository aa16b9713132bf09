"""Files of torch that cost little to make and would cost much to read: refused within bounds of work and memory.

Each is read by a process of its own (`hostile_child.py`). The pickle of a sound file of 100,000 tensors takes a good
part of that, so there is no less for these.
"""

from __future__ import annotations

import re
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from support import torch_peer
from support.hostile import MAX_WORK, read_by_child

from reshard_mpi.formats.structure import MAX_TENSORS

GROWTH_BYTES = 170 << 20
MOST_BYTES = 40 << 20
START, KEY = b"\x80\x02", b"X\x01\x00\x00\x00a"


def pickled(path: Path, body: bytes) -> None:
    torch_peer.archive(path, {"data.pkl": START + body, "byteorder": sys.byteorder.encode(), "version": b"3\n"})


def repeated(start: bytes, part: bytes, end: bytes = b".") -> Callable[[Path], None]:
    """Return what makes a pickle as large as may be, most of it one part again and again."""
    count = (MOST_BYTES - len(start) - len(end) - 2) // len(part)
    return lambda path: pickled(path, start + part * count + end)


def numbered(count: int) -> Callable[[Path], None]:
    """Return what makes a pickle of so many tensors of one element, all in one storage."""

    def make(path: Path) -> None:
        names = (f"X\x08\x00\x00\x00{at:08d}h\x00".encode("latin-1") for at in range(count))
        tensor = (
            b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nByteStorage\nX\x01\x00\x00\x000"
            b"X\x03\x00\x00\x00cpuK\x01tQK\x00))\x89ccollections\nOrderedDict\n)RtRq\x000"
        )
        body = tensor + b"}(" + b"".join(names) + b"u."
        members = {"data.pkl": START + body, "byteorder": sys.byteorder.encode(), "version": b"3\n", "data/0": b"x"}
        torch_peer.archive(path, members)

    return make


def many_members(path: Path) -> None:
    """Write an archive of empty members: an entry of each, in the list at its end."""
    count, name = MAX_TENSORS + 2000, b"net/data/%08d"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr((name % 0).decode(), b"")
    content = path.read_bytes()
    start = content.index(b"PK\1\2")  # of the list, after the member; all have the same place
    end = content.index(b"PK\5\6")
    entry, rest = content[start:end].split(name % 0)
    entries = b"".join(entry + name % at + rest for at in range(count))
    last = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, len(entries), start)
    last += struct.pack("<IIQI", 0x07064B50, 0, start + len(entries), 1)  # where that is, of more than 65,535 entries
    last += struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    path.write_bytes(content[:start] + entries + last)


def doubled(path: Path) -> None:
    pickled(path, b"}" + KEY + b"](K\x01eq\x00" + b"0](h\x00h\x00eq\x00" * 60 + b"s.")


def text(path: Path) -> None:
    pickled(path, b"}" + KEY + b"X" + struct.pack("<I", MOST_BYTES - 50) + b"a" * (MOST_BYTES - 50) + b"s.")


def legacy(path: Path) -> None:
    start = (Path(__file__).parent / "golden" / "torch" / "legacy.pth").read_bytes()[:20]
    path.write_bytes(start + b"]" * (MOST_BYTES + 100))


BOMBS: dict[str, tuple[Callable[[Path], None], str]] = {
    "lists": (repeated(b"}" + KEY + b"](", b"]", b"es."), "too much memory"),
    "dictionaries": (repeated(b"}" + KEY + b"](", b"}", b"es."), "too much memory"),
    "nothings": (repeated(b"}" + KEY + b"](", b"N", b"es."), "too much memory"),
    "numbers": (repeated(b"}" + KEY + b"](", b"M\xff\xff", b"es."), "too much memory"),
    "texts": (repeated(b"}" + KEY + b"](", b"X\x02\x00\x00\x00ab", b"es."), "too much memory"),
    "calls": (repeated(b"ccollections\nOrderedDict\nq\x000}" + KEY + b"](", b"h\x00)R", b"es."), "too much memory"),
    "tuples in each other": (repeated(b"}" + KEY + b")", b"\x85", b"s."), "too much memory"),
    "marks": (repeated(b"", b"("), "too much memory"),
    "a text": (text, "too long, or too many"),
    "the same list doubled sixty times": (doubled, "too many values"),
    "two hundred thousand tensors": (numbered(200_000), "too many tensors"),
    "members": (many_members, "too many members"),
    "an older file": (legacy, "too much memory"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_bombs(tmp_path: Path, name: str) -> None:
    make, problem = BOMBS[name]
    make(tmp_path / "net.pt")
    found = read_by_child("locate", tmp_path / "net.pt")
    assert found["is_ours"] and re.search(problem, found["problem"]), found
    assert found["growth_bytes"] < GROWTH_BYTES and found["work"] < MAX_WORK, found
