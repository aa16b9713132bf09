"""Files that nobody's torch.save has written: each is refused by name, and quickly."""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support import torch_peer
from support.examples import few
from support.torch_peer import STAND_INS, Stored, Tensor

from reshard_mpi.errors import ShardError
from reshard_mpi.formats import torch
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.locations import ByteRanges, StridedView
from reshard_mpi.testing import sample_tensors
from reshard_mpi.testing.sample_tensors import SampleTensor, ShardContents

GOLDEN = Path(__file__).parent / "golden" / "torch"
FLOATS = struct.pack("=6f", *range(6))
ORDER = sys.byteorder.encode()


def stored(key: str = "0", elements: int = 6, content: bytes = FLOATS, kind: str = "FloatStorage") -> Stored:
    return Stored(getattr(STAND_INS["torch"], kind), key, elements, content)


def tensor(storage: Any = None, offset: Any = 0, shape: Any = (2, 3), strides: Any = (3, 1), *rest: Any) -> Tensor:
    make = STAND_INS["torch._utils"]._rebuild_tensor_v2
    return Tensor(make, stored() if storage is None else storage, offset, shape, strides, False, OrderedDict(), *rest)


def pickled(data: bytes) -> dict[str, bytes]:
    """Return the members of an archive with this pickle."""
    return {"data.pkl": data, "byteorder": ORDER, "version": b"3\n"}


def refused(path: Path, problem: str) -> None:
    with pytest.raises(ShardError, match=problem) as caught:
        torch.locate(str(path))
    assert str(path) in str(caught.value)


# What a pickle says

WRONG_TENSORS: dict[str, tuple[Callable[[], Any], str]] = {
    "a storage longer than its member": (lambda: tensor(stored(elements=7)), "not there as its pickle says"),
    "a storage shorter than its member": (lambda: tensor(stored(elements=5), 0, (5,), (1,)), "not there as its"),
    "past the end": (lambda: tensor(shape=(3, 3)), "runs past the end of its storage"),
    "an offset past the end": (lambda: tensor(None, 1), "runs past the end of its storage"),
    "strides past the end": (lambda: tensor(strides=(4, 1)), "runs past the end of its storage"),
    "a negative offset": (lambda: tensor(None, -1), "without a sound place"),
    "an offset of another kind": (lambda: tensor(None, "0"), "without a sound place"),
    "a negative stride": (lambda: tensor(None, 5, (6,), (-1,)), "less than 0"),
    "strides that come round at 64 bits": (lambda: tensor(None, 0, (2,), ((1 << 64) - 1,)), "runs past the end"),
    "a negative length": (lambda: tensor(shape=(-2, 3)), "less than 0"),
    "other lengths than strides": (lambda: tensor(shape=(6,)), "without a sound place"),
    "a length that is no number": (lambda: tensor(shape=(2.0, 3)), "less than 0"),
    "a truth as a length": (lambda: tensor(shape=(True, 3)), "less than 0"),
    "a shape of one number": (lambda: tensor(shape=6), "no tuple"),
    "a thousand dimensions": (lambda: tensor(shape=(1,) * 1000, strides=(1,) * 1000), "dimensions, more than 32"),
    "a shape of 2^80 elements": (lambda: tensor(None, 0, (1 << 40, 1 << 40), (0, 0)), "impossibly large"),
    "no storage": (lambda: tensor("storage"), "without storage"),
    "a storage of two sizes": (lambda: [tensor(), tensor(stored(elements=3), 0, (3,), (1,))], "of two sizes"),
}


@pytest.mark.parametrize("name", WRONG_TENSORS)
def test_tensors_with_no_sound_place(tmp_path: Path, name: str) -> None:
    make, problem = WRONG_TENSORS[name]
    torch_peer.save(tmp_path / "net.pt", {"w": make()})
    refused(tmp_path / "net.pt", problem)


def test_a_storage_that_is_a_view_of_another(tmp_path: Path) -> None:
    data, _ = torch_peer.dumps({"w": tensor()})
    six = data.replace(b"K\x06tq", b"K\x06)tq")
    torch_peer.archive(tmp_path / "net.pt", {**pickled(six), "data/0": FLOATS})
    refused(tmp_path / "net.pt", "view of another")


def test_a_pickle_that_runs_code_is_not_run(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    command = f"touch {victim}"

    class Evil:
        def __reduce__(self) -> Any:
            import os

            return os.system, (command,)

    data, _ = torch_peer.dumps({"w": tensor(), "evil": Evil()})
    torch_peer.archive(tmp_path / "net.pt", {**pickled(data), "data/0": FLOATS})
    refused(tmp_path / "net.pt", "would run code")
    assert not victim.exists()


@pytest.mark.parametrize(
    ("arguments", "is_member"),
    [((OrderedDict, "fromkeys"), True), ((OrderedDict, "x", 1), False), (("x", "y"), False), ((OrderedDict, 1), False)],
)
def test_a_member_of_an_enumeration_as_python_3_11_0_pickles_it(
    tmp_path: Path, arguments: tuple[Any, ...], is_member: bool
) -> None:
    """It gets an attribute of a class by its name, and nothing else is done so."""

    class Member:
        def __reduce__(self) -> Any:
            return getattr, arguments

    data, _ = torch_peer.dumps({"w": tensor(), "member": Member()})
    torch_peer.archive(tmp_path / "net.pt", {**pickled(data), "data/0": FLOATS})
    if is_member:
        assert "w" in torch.locate(str(tmp_path / "net.pt")).tensors
    else:
        refused(tmp_path / "net.pt", "would run code")


@pytest.mark.parametrize("value", [1, None, "text", tensor()], ids=["number", "nothing", "text", "a lone tensor"])
def test_what_is_no_dictionary(tmp_path: Path, value: Any) -> None:
    torch_peer.save(tmp_path / "net.pt", value)
    refused(tmp_path / "net.pt", "holds no dictionary")


PICKLES: dict[str, tuple[Callable[[], bytes], str]] = {
    "a storage is not there": (lambda: torch_peer.dumps({"w": tensor()})[0], "'0' of a shard is not there"),
    "goes on": (lambda: torch_peer.dumps({"w": 1})[0] + b"N.", "ends before its member does"),
    "a gigabyte": (lambda: b"\x80\x02N." + bytes(41 << 20), "data.pkl of a shard is too large"),
    "an unknown class": (lambda: b"\x80\x02cproject.nets\nNet\n)\x81}X\x01\0\0\0wK\x01sb.", "project.nets.Net"),
    "all is left out": (lambda: b"\x80\x02}X\x05\0\0\0modelcproject.nets\nNet\n)\x81s.", "no tensor that can be read"),
}


@pytest.mark.parametrize("name", few(2, PICKLES))
def test_pickles_that_are_refused(tmp_path: Path, name: str) -> None:
    make, problem = PICKLES[name]
    torch_peer.archive(tmp_path / "net.pt", pickled(make()))
    refused(tmp_path / "net.pt", problem)


# What the archive says


def archive(path: Path, change: Callable[[bytearray], None] = lambda _: None, **options: Any) -> Path:
    torch_peer.save(path, {"w": tensor()}, **options)
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)
    return path


def entry_of(content: bytearray, member: bytes) -> int:
    """Return where the entry of a member in the directory begins."""
    return content.rindex(b"net/" + member) - 46


def put(content: bytearray, at: int, form: str, number: int) -> None:
    struct.pack_into(f"<{form}", content, at, number)


def encrypt(content: bytearray) -> None:
    put(content, entry_of(content, b"data/0") + 8, "H", 1)


def move_storage(content: bytearray) -> None:
    """Have the storage begin where the member before it does."""
    at = content.index(b"PK\x03\x04", 4)
    put(content, entry_of(content, b"data/0") + 42, "I", at)


def lengthen(content: bytearray) -> None:
    """Have the storage reach over what follows it, in its entry and in its header."""
    entry = entry_of(content, b"data/0")
    header = struct.unpack_from("<I", content, entry + 42)[0]
    for at in (entry + 20, entry + 24, header + 18, header + 22):
        put(content, at, "I", 200)


def lengthen_past_the_end(content: bytearray) -> None:
    entry = entry_of(content, b"data/0")
    header = struct.unpack_from("<I", content, entry + 42)[0]
    for at in (entry + 20, entry + 24, header + 18, header + 22):
        put(content, at, "I", 1 << 30)


def contradict(content: bytearray) -> None:
    entry = entry_of(content, b"data/0")
    for at in (entry + 20, entry + 24):
        put(content, at, "I", 20)


def rename(content: bytearray) -> None:
    at = content.index(b"net/data/0")
    content[at + 9 : at + 10] = b"1"


def many_parts(content: bytearray) -> None:
    put(content, len(content) - 18, "H", 1)


def more_members(content: bytearray) -> None:
    put(content, len(content) - 14, "H", 9)
    put(content, len(content) - 12, "H", 9)


def too_many_members(content: bytearray) -> None:
    end = len(content) - 22
    start, length = struct.unpack_from("<I", content, end + 16)[0], struct.unpack_from("<I", content, end + 12)[0]
    count = 1 << 40
    tail = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 798, 45, 0, 0, count, count, length, start)
    tail += struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1)
    tail += struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, length, start, 0)
    content[end:] = tail


WRONG_ARCHIVES: dict[str, tuple[Callable[[bytearray], None], str]] = {
    "encrypted": (encrypt, "encrypted"),
    "a member where another is": (move_storage, "contradicts its directory|not where its directory"),
    "members that overlap": (lengthen, "overlap|runs into the directory"),
    "a member past the end": (lengthen_past_the_end, "runs into the directory"),
    "other sizes in the header": (contradict, "contradicts its directory"),
    "another name in the header": (rename, "contradicts its directory"),
    "an archive of several parts": (many_parts, "several parts"),
    "fewer members than it says": (more_members, "in the middle of an entry"),
    "2^40 members": (too_many_members, "too many members"),
    "bytes before it": (
        lambda content: content.__setitem__(slice(0, 0), b"bytes before it"),
        "no file that torch.save",
    ),
    "a comment": (lambda content: content.extend(b"comment"), "does not end as an archive"),
}


@pytest.mark.parametrize("name", WRONG_ARCHIVES)
def test_archives_that_contradict_themselves(tmp_path: Path, name: str) -> None:
    change, problem = WRONG_ARCHIVES[name]
    refused(archive(tmp_path / "net.pt", change), problem)


def test_compressed_members(tmp_path: Path) -> None:
    data, storages = torch_peer.dumps({"w": tensor()})
    torch_peer.archive(
        tmp_path / "net.pt", {**pickled(data), "data/0": storages["0"]}, compression=zipfile.ZIP_DEFLATED
    )
    refused(tmp_path / "net.pt", "compressed")


@pytest.mark.slow
def test_a_zip_bomb(tmp_path: Path) -> None:
    data, _ = torch_peer.dumps({"w": tensor(stored(elements=1 << 24), 0, (1 << 24,), (1,))})
    members = {**pickled(data), "data/0": bytes(1 << 26)}
    torch_peer.archive(tmp_path / "net.pt", members, compression=zipfile.ZIP_DEFLATED)
    assert (tmp_path / "net.pt").stat().st_size < 1 << 20
    refused(tmp_path / "net.pt", "compressed")


def test_two_members_of_one_name(tmp_path: Path) -> None:
    path = tmp_path / "net.pt"
    data, storages = torch_peer.dumps({"w": tensor()})
    stream = io.BytesIO()
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(stream, "w") as made:
        for name, content in (*pickled(data).items(), ("data/0", storages["0"]), ("data/0", bytes(24))):
            made.writestr(f"net/{name}", content)
    path.write_bytes(stream.getvalue())
    refused(path, "two members of a shard have the same name")


@pytest.mark.parametrize(
    "members, problem",
    [
        ({"version": b"3\n"}, "one data.pkl"),
        ({"data.pkl": b"\x80\x02}.", "code/data.pkl": b"", "constants.pkl": b""}, "TorchScript"),
        ({"data.pkl": b"\x80\x02}.", "version": b"11\n"}, "unknown version"),
        ({"data.pkl": b"\x80\x02}.", "version": b"three"}, "unknown version"),
        ({"data.pkl": b"\x80\x02}.", "byteorder": b"middle"}, "unknown byte order"),
        ({"data.pkl": b"\x80\x02}.", "byteorder": b"little" * 100}, "byteorder of a shard is too large"),
        ({"data.pkl": b""}, "ends before it is complete"),
    ],
)
def test_archives_that_are_no_checkpoint(tmp_path: Path, members: dict[str, bytes], problem: str) -> None:
    torch_peer.archive(tmp_path / "net.pt", members)
    refused(tmp_path / "net.pt", problem)


def test_two_pickles(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "net.pt", "w") as made:
        made.writestr("a/data.pkl", b"\x80\x02}.")
        made.writestr("b/data.pkl", b"\x80\x02}.")
    refused(tmp_path / "net.pt", "one data.pkl")


# The older layout


def legacy(change: Callable[[bytes], bytes]) -> bytes:
    return change((GOLDEN / "legacy.pth").read_bytes())


@pytest.mark.parametrize(
    "change, problem",
    [
        (lambda content: content[:-1], "ends in the middle of a storage"),
        (lambda content: content + b"\0", "follows the end"),
        (lambda content: content[:-96] + bytes(96), None),
        (lambda content: content[:-104] + struct.pack("<q", 23) + content[-96:], "another size"),
        (lambda content: content[:-104] + struct.pack("<q", -1) + content[-96:], "another size"),
        (lambda content: content.replace(b"little_endian", b"middle_endian"), "unknown beginning"),
        (lambda content: content.replace(b"M\xe9\x03", b"M\xea\x03"), "unknown beginning"),
        (lambda content: content[:200], "before it is complete"),
    ],
)
def test_older_files(tmp_path: Path, change: Callable[[bytes], bytes], problem: str | None) -> None:
    path = tmp_path / "net.pt"
    path.write_bytes(legacy(change))
    if problem is None:
        assert len(torch.locate(str(path)).tensors) == 3
    else:
        refused(path, problem)


def older(path: Path, value: Any, contents: dict[str, tuple[int, bytes]]) -> None:
    """Write a value in the older layout. contents: of each storage the number of its elements, and its bytes."""
    data, _ = torch_peer.dumps(value)
    numbers = {"protocol_version": 1001, "little_endian": sys.byteorder == "little", "type_sizes": {}}
    start = [pickle.dumps(part, 2) for part in (0x1950A86A20F9469CFC6C, 1001, numbers)]
    storages = [struct.pack("=q", elements) + content for elements, content in contents.values()]
    path.write_bytes(b"".join((*start, data, pickle.dumps(list(contents), 2), *storages)))


@pytest.mark.parametrize(
    "kind, elements, content, problem, got",
    [
        ("QUInt8Storage", 6, bytes(6), "tensors that cannot be read", "q: a tensor of an unknown type (QUInt8Storage)"),
        ("QInt32Storage", 6, bytes(24), "tensors that cannot be read", "q: a tensor of an unknown type"),
        ("QUInt8Storage", 6, bytes(5), "in the middle of a storage", ""),
        ("OddStorage", 6, bytes(6), "a storage is of a type that is not known here", "OddStorage"),
    ],
)
def test_older_files_with_a_quantized_tensor(
    tmp_path: Path, kind: str, elements: int, content: bytes, problem: str, got: str
) -> None:
    """Its storage is passed over, so the tensor is named; no other is blamed, nor the file."""
    made = type(kind, (), {"__module__": "torch"})
    with mock.patch.object(STAND_INS["torch"], kind, made, create=True):
        value = {"w": tensor(), "q": tensor(Stored(made, "1", elements, content))}
        older(tmp_path / "net.pt", value, {"1": (elements, content), "0": (6, FLOATS)})
    with pytest.raises(ShardError, match=problem) as error:
        torch.locate(str(tmp_path / "net.pt"))
    assert got in error.value.got
    older(tmp_path / "net.pt", {"w": tensor()}, {"0": (6, FLOATS)})
    assert sample_tensors.payload(torch.locate(str(tmp_path / "net.pt")).tensors["w"]) == FLOATS


def test_a_compressed_program(tmp_path: Path) -> None:
    """As torch.jit.save compresses its code."""
    with zipfile.ZipFile(tmp_path / "net.pt", "w") as made:
        made.writestr("net/data.pkl", b"\x80\x02}.")
        made.writestr("net/code/__torch__/net.py", b"def forward(self): ..." * 9, zipfile.ZIP_DEFLATED)
    refused(tmp_path / "net.pt", "TorchScript program")


# Files that are unusual, and sound


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol(tmp_path: Path, protocol: int) -> None:
    samples_ = [SampleTensor.random("w", BY_NAME["float32"], (2, 3)), SampleTensor.random("u", BY_NAME["uint16"], (3,))]
    value = {sample.name: torch_peer.tensor(sample, str(at)) for at, sample in enumerate(samples_)}
    torch_peer.save(tmp_path / "net.pt", value, protocol=protocol)
    assert sample_tensors.contents_of(torch.locate(str(tmp_path / "net.pt"))) == ShardContents.of(samples_)


def test_the_other_byte_order(tmp_path: Path) -> None:
    other = b"big" if sys.byteorder == "little" else b"little"
    swapped = struct.pack(">6f" if sys.byteorder == "little" else "<6f", *range(6))
    with mock.patch.object(torch_peer.sys, "byteorder", other.decode()):
        value = {"w": tensor(stored(content=swapped)), "t": tensor(stored(content=swapped), 0, (3, 2), (1, 3))}
        torch_peer.save(tmp_path / "net.pt", value)
    tensors = torch.locate(str(tmp_path / "net.pt")).tensors
    assert isinstance(tensors["w"].source, ByteRanges) and tensors["w"].source.swapped
    assert isinstance(tensors["t"].source, StridedView) and tensors["t"].source.swapped
    assert sample_tensors.payload(tensors["w"]) == FLOATS
    assert struct.unpack("=6f", sample_tensors.payload(tensors["t"])) == (0, 3, 1, 4, 2, 5)


def test_views_lie_in_the_storage_that_they_share(tmp_path: Path) -> None:
    views = {
        "row": tensor(None, 3, (3,), (1,)),
        "column": tensor(None, 1, (2,), (3,)),
        "again": tensor(None, 1, (4, 2), (0, 3)),
        "one": tensor(None, 5, (1, 1), (77, 99)),
        "scalar": tensor(None, 2, (), ()),
        "empty": tensor(None, 6, (0, 3), (3, 1)),
    }
    torch_peer.save(tmp_path / "net.pt", views)
    tensors = torch.locate(str(tmp_path / "net.pt")).tensors
    values = {
        name: struct.unpack(f"={entry.size_bytes // 4}f", sample_tensors.payload(entry))
        for name, entry in tensors.items()
    }
    assert values == {"row": (3, 4, 5), "column": (1, 4), "again": (1, 4) * 4, "one": (5,), "scalar": (2,), "empty": ()}
    assert [type(entry.source) for entry in tensors.values()] == [
        ByteRanges,
        StridedView,
        StridedView,
        *[ByteRanges] * 3,
    ]


def test_a_type_that_is_not_known_here_is_refused(tmp_path: Path) -> None:
    kind = type("ComplexHalfStorage", (), {"__module__": "torch"})
    with mock.patch.object(STAND_INS["torch"], "ComplexHalfStorage", kind, create=True):
        odd = tensor(Stored(kind, "1", 6, FLOATS))
        torch_peer.save(tmp_path / "net.pt", {"w": tensor(), "odd": odd})
    with pytest.raises(ShardError, match="tensors that cannot be read") as error:
        torch.locate(str(tmp_path / "net.pt"))
    assert error.value.got == "odd: a tensor of an unknown type (ComplexHalfStorage)"


def test_conjugated_bits_that_are_not_set(tmp_path: Path) -> None:
    torch_peer.save(tmp_path / "net.pt", {"w": tensor(None, 0, (2, 3), (3, 1), {"conj": False})})
    assert sample_tensors.payload(torch.locate(str(tmp_path / "net.pt")).tensors["w"]) == FLOATS
