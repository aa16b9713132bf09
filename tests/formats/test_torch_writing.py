"""What is written for torch: nests made again, what cannot be held, and a layout that follows from names and sizes."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import torch_peer
from support.checkpoints import flip_bits
from support.torch_peer import Tensor

from reshard_mpi.errors import ShardError, TargetError
from reshard_mpi.formats import torch
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.manifest import NEST, ShardIdentity, ShardSpec, TensorSpec
from reshard_mpi.formats.protocol import reserve_file
from reshard_mpi.formats.torch import archive
from reshard_mpi.sharding.box import Box
from reshard_mpi.testing import sample_tensors
from reshard_mpi.testing.sample_tensors import SampleTensor, ShardContents

NESTED = (
    '{"dict":[["epoch",3],["model",{"call":["collections","OrderedDict",[]],"dict":[]}],'
    '["optimizer",{"dict":[["state",{"dict":[[0,{"dict":[["step"]]}]]}],["lr",0.5]]}]]}'
)
TENSORS = [
    SampleTensor.random("optimizer.state.0.exp_avg", BY_NAME["float32"], (2, 3)),
    SampleTensor.random("model.layer.weight", BY_NAME["bfloat16"], (2, 3)),
    SampleTensor.random("optimizer.state.0.step", BY_NAME["float32"], ()),
    SampleTensor.random("model.layer.bias", BY_NAME["float8_e5m2"], (3,)),
]
CONTENTS = ShardContents.of(TENSORS, {"note": "text", NEST: NESTED})


def spec(*tensors: tuple[str, str, tuple[int, ...]], **strings: str) -> ShardSpec:
    wanted = tuple(TensorSpec(name, BY_NAME[dtype], shape, Box.whole(shape)) for name, dtype, shape in tensors)
    return ShardSpec(ShardIdentity(0, 1, ""), wanted, strings)


def shown(value: Any) -> Any:
    """Return what a file holds with the bytes of tensors in their place."""
    if isinstance(value, Tensor):
        return torch_peer.sample_of("", value).content
    return type(value)((key, shown(part)) for key, part in value.items()) if isinstance(value, dict) else value


def test_the_nest_is_made_again(tmp_path: Path) -> None:
    sample_tensors.write(torch, str(tmp_path / "net.pt"), CONTENTS)
    exp_avg, weight, step, bias = (sample.content for sample in TENSORS)
    expected = {
        "epoch": 3,
        "model": OrderedDict({"layer.weight": weight, "layer.bias": bias}),
        "optimizer": {"state": {0: {"step": step, "exp_avg": exp_avg}}, "lr": 0.5},
        "note": "text",
    }
    loaded = shown(torch_peer.load(tmp_path / "net.pt"))
    assert json.dumps(loaded, default=repr) == json.dumps(expected, default=repr)
    assert type(loaded["model"]) is OrderedDict


def test_order_and_strings_are_those_that_were_given(tmp_path: Path) -> None:
    path = tmp_path / "net.pt"
    written = sample_tensors.write(torch, str(path), CONTENTS)
    located = torch.locate(str(path))
    assert sample_tensors.contents_of(located) == CONTENTS
    assert list(located.tensors) == list(CONTENTS.tensors)
    torch.read_back(written)


@pytest.mark.parametrize("at", [3, 100, -1, -30, -150])
def test_a_structure_that_is_not_what_was_meant(tmp_path: Path, at: int) -> None:
    path = tmp_path / "net.pt"
    written = sample_tensors.write(torch, str(path), CONTENTS)
    flip_bits(path, at)
    with pytest.raises(ShardError):
        torch.read_back(written)


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_knowing_a_file_of_others_makes_no_difference(tmp_path: Path, data: st.DataObject) -> None:
    """A file that torch has written, and one of zipfile, whose local headers have checksums."""
    first, second = tmp_path / "first.pt", tmp_path / "second.pt"
    if data.draw(st.booleans()):
        content = bytearray((Path(__file__).parent / "golden" / "torch" / "train.pth").read_bytes())
    else:
        torch_peer.write(first, ShardContents.of(TENSORS, {"note": "text"}))
        content = bytearray(first.read_bytes())
    first.write_bytes(content)
    like = torch.locate(str(first))
    for _ in range(data.draw(st.integers(0, 2))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    second.write_bytes(content)
    try:
        expected = torch.locate(str(second))
    except ShardError as error:
        with pytest.raises(ShardError) as caught:
            torch.locate(str(second), like)
        assert str(caught.value) == str(error)
    else:
        assert torch.locate(str(second), like) == expected


def test_files_that_differ_in_payloads_alone_have_the_same_structure(tmp_path: Path) -> None:
    structures = set()
    for number in range(2):
        tensors = [SampleTensor.random(t.name, t.dtype, t.shape, seed=number) for t in TENSORS]
        path = tmp_path / f"{number}.pt"
        meant = sample_tensors.write(torch, str(path), ShardContents.of(tensors, CONTENTS.strings))
        structures |= {meant.header_digest, torch.locate(str(path)).header_digest}
    assert len(structures) == 1


def test_what_others_have_changed_is_read_as_it_is(tmp_path: Path) -> None:
    """The record of strings is of one pickle: where it is another, the pickle tells."""
    path = tmp_path / "net.pt"
    sample_tensors.write(torch, str(path), CONTENTS)
    with zipfile.ZipFile(path) as opened:
        members = {name.removeprefix("archive/"): opened.read(name) for name in opened.namelist()}
    members["data.pkl"] = members["data.pkl"].replace(b"\x05\x00\x00\x00epoch", b"\x05\x00\x00\x00epooh")
    torch_peer.archive(path, members)
    manifest = torch.locate(str(path))
    assert '["epooh",3]' in manifest.strings[NEST]
    assert list(manifest.tensors) != list(CONTENTS.tensors) and set(manifest.tensors) == set(CONTENTS.tensors)


@pytest.mark.parametrize("record", [b"", b"{", b"[]", b'{"pickle_crc":1}', b"[" * 100_000])
def test_a_damaged_record_is_as_good_as_none(tmp_path: Path, record: bytes) -> None:
    torch_peer.save(tmp_path / "net.pt", {"a": {"w": torch_peer.tensor(TENSORS[0], "0")}}, **{".reshard_mpi": record})
    manifest = torch.locate(str(tmp_path / "net.pt"))
    assert manifest.strings == {NEST: '{"nest":{"dict":[["a",{"dict":[]}]]},"order":[0,"a.w"]}'}


@pytest.mark.parametrize("dtype", ["int4", "hifloat8"])
def test_types_that_torch_has_not(tmp_path: Path, dtype: str) -> None:
    unknown = spec(("layer.w", "float32", (2,)), ("layer.q", dtype, (2,)))
    for write in (torch.size_at_most_bytes, lambda spec: reserve_file(torch, str(tmp_path / "net.pt"), spec)):
        with pytest.raises(TargetError, match=f"'layer.q'[^\0]*{dtype}[^\0]*--to ckpt or --to hdf5"):
            write(unknown)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text, problem",
    [
        ('{"call":["os","system",[["true"]]]}', "no plain data"),
        ('{"dict":[["list",[{"tensor":null},{"tensor":null}]]]}', "'list.1'"),
        ("nonsense", "no JSON"),
    ],
)
def test_nests_that_do_not_fit(tmp_path: Path, text: str, problem: str) -> None:
    wrong = spec(("list.0", "float32", (2,)), **{NEST: text})
    for write in (torch.size_at_most_bytes, lambda spec: reserve_file(torch, str(tmp_path / "net.pt"), spec)):
        with pytest.raises(TargetError, match=problem):
            write(wrong)
    assert not list(tmp_path.iterdir())


def test_payloads_begin_at_multiples_of_64(tmp_path: Path) -> None:
    manifest = sample_tensors.write(torch, str(tmp_path / "net.pt"), CONTENTS)
    assert all(start % 64 == 0 for start in manifest.tensors.offsets)
    with zipfile.ZipFile(tmp_path / "net.pt") as opened:
        names = [info.filename for info in opened.infolist()]
        assert opened.testzip() is None
    storages = [f"archive/data/{at}" for at in range(4)]
    first = ["archive/data.pkl", "archive/.format_version", "archive/.storage_alignment", "archive/byteorder"]
    assert names == [*first, *storages, "archive/.reshard_mpi", "archive/version", "archive/.data/serialization_id"]


@pytest.mark.parametrize("name", ["train.pth", "plain.pt"])
def test_the_layout_is_that_of_torch(name: str) -> None:
    """Every byte of a file of torch that is no payload, made again from names, sizes and checksums."""
    path = Path(__file__).parent / "golden" / "torch" / name
    content = path.read_bytes()
    with zipfile.ZipFile(path) as opened:
        infos = opened.infolist()
    members, at = [], 0
    for info in infos:
        short = info.filename.partition("/")[2]
        member = archive.placed(short, info.file_size, at, info.CRC)._replace(name=info.filename.encode())
        header_bytes = struct.unpack_from("<2H", content, at + 26)
        member = member._replace(payload_start=at + 30 + sum(header_bytes))
        assert archive.local_header(member) == content[at : member.payload_start]
        end = member.payload_start + member.size_bytes
        assert archive.descriptor(member) == content[end : member.end]
        members.append(member)
        at = member.end
    assert archive.ends(members, at) == content[at:]


def test_padding_reaches_the_next_multiple_of_64() -> None:
    for length in range(130):
        member = archive.placed("n" * length, 5, 1000 + length)
        assert member.payload_start % 64 == 0
        header = archive.local_header(member)
        assert len(header) == member.payload_start - member.header_start < archive.MEMBER_BYTES + length
        assert len(header) < 30 + len(member.name) + 4 + 64


@pytest.mark.parametrize("size_bytes", [0xFFFFFFFE, 0xFFFFFFFF, 1 << 33])
def test_members_beyond_4_gib(tmp_path: Path, size_bytes: int) -> None:
    path = tmp_path / "net.pt"
    large = spec(("large", "int8", (size_bytes,)), ("after", "int64", (3,)), ("none", "int8", (0,)))
    written = reserve_file(torch, str(path), large)
    assert torch.locate(str(path)).tensors == written.tensors
    assert path.stat().st_size <= torch.size_at_most_bytes(large)
    with zipfile.ZipFile(path) as opened:
        sizes = {info.filename: info.file_size for info in opened.infolist()}
    assert [sizes[f"archive/data/{at}"] for at in range(3)] == [size_bytes, 24, 0]


def test_checksums_are_there_when_it_is_sealed(tmp_path: Path) -> None:
    path = tmp_path / "net.pt"
    manifest = sample_tensors.write(torch, str(path), CONTENTS)
    assert torch.check_crc(str(path))
    start = manifest.tensors.offsets[0]
    fd = os.open(path, os.O_RDWR)
    os.pwrite(fd, bytes([os.pread(fd, 1, start)[0] ^ 1]), start)
    os.close(fd)
    with pytest.raises(ShardError, match="does not fit its own checksum"):
        torch.check_crc(str(path))


def test_files_without_checksums(tmp_path: Path) -> None:
    """torch can be told to leave them out, and has none in its older files."""
    golden = Path(__file__).parent / "golden" / "torch"
    assert torch.check_crc(str(golden / "train.pth"))
    assert not torch.check_crc(str(golden / "legacy.pth"))
    reserve_file(torch, str(tmp_path / "net.pt"), sample_tensors.spec_of(CONTENTS))
    assert not torch.check_crc(str(tmp_path / "net.pt"))
