"""Structures of native shards that lie, with right checksums: what reads them byte by byte gives up at once."""

from __future__ import annotations

import resource
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from reshard_mpi.errors import ShardError
from reshard_mpi.formats import files, hdf5
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.hdf5 import checksums, direct, structure
from reshard_mpi.formats.manifest import ShardIdentity, ShardSpec, TensorSpec
from reshard_mpi.formats.protocol import reserve_file
from reshard_mpi.sharding.box import Box
from reshard_mpi.testing import samples
from reshard_mpi.testing.samples import Contents, SampleTensor


class Editor:
    """A native shard whose structures are changed; those that have a checksum get a right one."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        tensors = [SampleTensor.random(name, BY_NAME["float32"], (3,)) for name in names]
        samples.write(hdf5, str(path), Contents.of(tensors))
        self.path = path
        self.content = bytearray(path.read_bytes())

    def find(self, mark: bytes, number: int = 0) -> int:
        at = -1
        for _ in range(number + 1):
            at = self.content.index(mark, at + 1)
        return at

    def put(self, at: int, kind: str, *values: int) -> None:
        struct.pack_into("<" + kind, self.content, at, *values)

    def get(self, at: int, kind: str = "Q") -> int:
        found: int = struct.unpack_from("<" + kind, self.content, at)[0]
        return found

    def sum(self, start: int, end: int) -> None:
        """Put the checksum of the bytes from `start` to `end` there."""
        self.put(end, "I", *checksums.lookup3([bytes(self.content[start:end])]))

    def header_end(self, at: int) -> int:
        """Return where the checksum of the object header at `at` is."""
        flags = self.content[at + 5]
        return at + 7 + flags + int.from_bytes(self.content[at + 6 : at + 7 + flags], "little")

    def append(self, data: bytes) -> int:
        at = len(self.content)
        self.content += data
        self.put(28, "Q", len(self.content))  # the end of the file, in the superblock
        self.sum(0, 44)
        return at


def group_header(editor: Editor) -> int:
    """The root group's header."""
    return editor.get(36)


def continuation_to_itself(editor: Editor) -> None:
    block = struct.pack("<4sBHBQQ", b"OCHK", 0x10, 16, 0, 0, 28)
    at = editor.append(block + bytes(4))
    editor.put(at + 8, "Q", at)
    editor.sum(at, at + len(block))
    continue_at(editor, at, 28)


def continue_at(editor: Editor, address: int, length_bytes: int) -> None:
    """Have the root group's header, whose first two messages are made a continuation and nothing, go on elsewhere."""
    at = group_header(editor)
    assert editor.content[at + 7] == 0x15 and editor.content[at + 29] == 0x0A
    editor.put(at + 7, "BHBQQ", 0x10, 16, 0, address, length_bytes)
    editor.put(at + 27, "BHBI", 0, 4, 0, 0)
    editor.sum(at, editor.header_end(at))


def continuation_beyond_the_file(editor: Editor) -> None:
    continue_at(editor, len(editor.content) + 100, 64)


def continuation_without_end(editor: Editor) -> None:
    at = editor.append(b"OCHK" + bytes(60))
    continue_at(editor, at, (1 << 64) - 1)


def continuation_at_the_end_of_addresses(editor: Editor) -> None:
    continue_at(editor, (1 << 64) - 4, 64)


def message_beyond_its_header(editor: Editor) -> None:
    at = group_header(editor)
    editor.put(at + 8, "H", 0xFFFF)
    editor.sum(at, editor.header_end(at))


def header_beyond_the_file(editor: Editor) -> None:
    at = editor.append(b"OHDR\x02\x01\xff\xff")
    editor.put(36, "Q", at)
    editor.sum(0, 44)


def root_that_is_no_header(editor: Editor) -> None:
    editor.put(36, "Q", 0)
    editor.sum(0, 44)


def root_beyond_the_file(editor: Editor) -> None:
    editor.put(36, "Q", (1 << 63) + 5)
    editor.sum(0, 44)


def tree_of_one_leaf(total: int) -> Callable[[Editor], None]:
    """Every node has the same child twenty times: 20^6 times one leaf."""

    def change(editor: Editor) -> None:
        head = editor.find(b"BTHD")
        node_bytes, depth = 512, 6
        leaf = editor.content.index(b"BTLF")
        records = bytes(editor.content[leaf + 6 : leaf + 6 + 11 * 19])
        count, child = struct.unpack_from("<BHQ", editor.content, head + 23)[1], leaf
        tree = structure._Tree.of(node_bytes, depth)
        for level in range(1, depth + 1):
            pointer = struct.pack("<Q", child) + bytes([count]) + bytes(tree.child_bytes(level) - 9)
            room = (node_bytes - 10 - len(pointer)) // (11 + len(pointer))
            count = min(room, 19)
            node = b"BTIN\0\x05" + records[: 11 * count] + pointer * (count + 1)
            child = editor.append(node.ljust(node_bytes, b"\0"))
        editor.put(head + 12, "H", depth)
        editor.put(head + 16, "QHQ", child, count, total)
        editor.sum(head, head + 34)

    return change


def tree_that_is_its_own_child(editor: Editor) -> None:
    head = editor.find(b"BTHD")
    node = editor.append(b"BTIN\0\x05" + bytes(506))
    editor.put(head + 12, "H", 40)
    editor.put(head + 16, "QHQ", node, 1, 1 << 15)
    editor.sum(head, head + 34)
    size = 17  # of a pointer in a node of that depth, or a little more
    for at in range(17, 500 - size, size):
        editor.put(node + at, "Q", node)
        editor.content[node + at + 8] = 1


def tree_of_depth(depth: int) -> Callable[[Editor], None]:
    def change(editor: Editor) -> None:
        head = editor.find(b"BTHD")
        editor.put(head + 12, "H", depth)
        editor.sum(head, head + 34)

    return change


def tree_of_many_records(editor: Editor) -> None:
    head = editor.find(b"BTHD")
    editor.put(head + 16 + 8, "HQ", 0xFFFF, 1 << 62)
    editor.sum(head, head + 34)


def tree_of_huge_nodes(editor: Editor) -> None:
    head = editor.find(b"BTHD")
    editor.put(head + 6, "I", 0xFFFFFFFF)
    editor.sum(head, head + 34)


def tree_of_no_room(editor: Editor) -> None:
    head = editor.find(b"BTHD")
    editor.put(head + 6, "I", 0)
    editor.sum(head, head + 34)


def heap(**values: int) -> Callable[[Editor], None]:
    """Change what the header of a fractal heap says of its blocks."""
    places = {"width": (110, "H"), "start": (112, "Q"), "largest": (120, "Q"), "root": (132, "Q"), "rows": (140, "H")}

    def change(editor: Editor) -> None:
        head = editor.find(b"FRHP")
        for name, value in values.items():
            at, kind = places[name]
            editor.put(head + at, kind, value)
        editor.sum(head, head + 142)

    return change


def heap_that_is_its_own_child(editor: Editor) -> None:
    rows, width = 32, 64
    block = editor.append(b"FHIB\0" + bytes(12) + b"\xff" * (8 * rows * width))
    for child in range(2 * width, rows * width):  # those of the first rows hold objects
        editor.put(block + 17 + 8 * child, "Q", block)
    heap(width=width, root=block, rows=rows, start=512, largest=512)(editor)


def group_that_holds_itself(editor: Editor) -> None:
    """The link to the reserved group leads to the root."""
    link = editor.find(b"__reshard_mpi__") + len(b"__reshard_mpi__")
    editor.put(link, "Q", group_header(editor))


def groups_that_hold_themselves(editor: Editor) -> None:
    """2^n names of n parts: `many` holds itself twice."""
    group = editor.content.rindex(b"OHDR\x02\0", 0, editor.find(b"first"))
    for name in (b"first", b"second"):
        editor.put(editor.find(name) + len(name), "Q", group)
    editor.sum(group, editor.header_end(group))


def dataset_with(kind: str, at: int, *values: int) -> Callable[[Editor], None]:
    """Change a number in the first header of a dataset that is in one piece, counted from its beginning."""

    def change(editor: Editor) -> None:
        number = 0
        while True:
            start = editor.find(b"OHDR\x02\x01", number)
            if b"global_shape" in editor.content[start : editor.header_end(start)]:
                break
            number += 1
        editor.put(start + at, kind, *values)
        editor.sum(start, editor.header_end(start))

    return change


NAMES = [*(f"layers.{at:03}.w" for at in range(40)), "many/first/w", "many/second/w"]
# In a header of one dimension: the extent and its limit, the address and the length of the elements.
LIES: dict[str, Callable[[Editor], None]] = {
    "a continuation to itself": continuation_to_itself,
    "a continuation beyond the file": continuation_beyond_the_file,
    "a continuation without end": continuation_without_end,
    "a continuation at the end of all addresses": continuation_at_the_end_of_addresses,
    "a message beyond its header": message_beyond_its_header,
    "a header beyond the file": header_beyond_the_file,
    "a root that is no header": root_that_is_no_header,
    "a root beyond the file": root_beyond_the_file,
    "a tree that is its own child": tree_that_is_its_own_child,
    "a tree of one leaf": tree_of_one_leaf(60_000),
    "a tree of one leaf and records without end": tree_of_one_leaf(1 << 62),
    "a tree of depth 8": tree_of_depth(8),
    "a tree of depth 65535": tree_of_depth(65535),
    "a tree of many records": tree_of_many_records,
    "a tree of huge nodes": tree_of_huge_nodes,
    "a tree of no room": tree_of_no_room,
    "a heap of width 0": heap(width=0, rows=1),
    "a heap of many rows": heap(rows=0xFFFF),
    "a heap of huge blocks": heap(start=1 << 62, largest=1 << 63),
    "a heap of no blocks": heap(start=0),
    "a heap of odd blocks": heap(start=513),
    "a heap whose root is elsewhere": heap(root=0),
    "a heap whose root is beyond": heap(root=(1 << 64) - 2),
    "a heap that is its own child": heap_that_is_its_own_child,
    "a group that holds itself": group_that_holds_itself,
    "groups that hold themselves": groups_that_hold_themselves,
    "an extent of 2^63": dataset_with("QQ", 16, 1 << 63, 1 << 63),
    "an extent of 2^62": dataset_with("QQ", 16, 1 << 62, 1 << 62),
    "elements beyond the file": dataset_with("Q", 68, 1 << 40),
    "elements at the end of all addresses": dataset_with("Q", 68, (1 << 64) - 12),
    "elements of another length": dataset_with("Q", 76, 1 << 63),
}


@contextmanager
def little_memory() -> Iterator[None]:
    """Let this process take so much more as a hostile file may cost, and a little that Python has in reserve."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (1024 * int(status["VmData"].split()[0]) + (64 << 20), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@pytest.mark.parametrize("lie", LIES)
def test_lies(tmp_path: Path, lie: str) -> None:
    path = tmp_path / "shard.h5"
    editor = Editor(path, NAMES)
    sound = bytes(editor.content)
    LIES[lie](editor)
    assert editor.content != sound
    path.write_bytes(editor.content)
    begin = time.process_time()
    with path.open("rb") as file, little_memory():
        assert direct.locate(file.fileno(), str(path), len(editor.content)) is None
        assert direct.stored_sums(file.fileno(), str(path), len(editor.content)) in (None, {})
    assert time.process_time() - begin < 1
    with pytest.raises(ShardError) as caught:
        hdf5.locate(str(path))
    assert caught.value.where.startswith(str(path))


@pytest.mark.parametrize("change", [dataset_with("Q", 76, 12), heap(start=512), tree_of_depth(0)])
def test_what_is_changed_into_itself_is_read(tmp_path: Path, change: Callable[[Editor], None]) -> None:
    """Or the tests above would only be of wrong checksums and places."""
    path = tmp_path / "shard.h5"
    editor = Editor(path, NAMES)
    sound = bytes(editor.content)
    change(editor)
    assert editor.content == sound
    with path.open("rb") as file:
        assert direct.locate(file.fileno(), str(path), len(sound)) is not None


def test_groups_that_share_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names without end, and none of them of a dataset: what is met is counted."""
    path = tmp_path / "shard.h5"
    editor = Editor(path, NAMES)
    monkeypatch.setattr(files, "MAX_TENSORS", len(NAMES) + 3)  # and as many groups more
    with path.open("rb") as file:
        assert direct.locate(file.fileno(), str(path), len(editor.content)) is None
        monkeypatch.setattr(files, "MAX_TENSORS", 2 * len(NAMES))
        assert direct.locate(file.fileno(), str(path), len(editor.content)) is not None


def test_a_shape_that_is_huge_beside_a_zero(tmp_path: Path) -> None:
    path = tmp_path / "shard.h5"
    box = Box.whole((0, 1 << 62))
    spec = ShardSpec(ShardIdentity(0, 1, ""), (TensorSpec("w", BY_NAME["float32"], box.shape, box),), {})
    reserve_file(hdf5, str(path), spec)
    with path.open("rb") as file:
        assert direct.locate(file.fileno(), str(path), path.stat().st_size) is None
    with pytest.raises(ShardError, match="impossibly large"):
        hdf5.locate(str(path))
