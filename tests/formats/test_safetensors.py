"""Safetensors files beside the reference library and MindSpore's own files, both ways; and how they are laid out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import safetensors_peer
from support.command_line import done

from reshard_mpi.errors import ShardError, TargetError
from reshard_mpi.formats import safetensors
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.protocol import reserve_file, seal_file
from reshard_mpi.formats.safetensors.file_header import MAX_STRING_BYTES
from reshard_mpi.testing import example_contents, sample_tensors
from reshard_mpi.testing.sample_tensors import SampleTensor, ShardContents

reference = pytest.importorskip("safetensors")

MINDSPORE = Path(__file__).parent / "golden" / "mindspore"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that examples write one after another."""
    return tmp_path_factory.mktemp("made") / "shard.safetensors"


def write(path: Path, contents: ShardContents, *, crc: bool = False) -> None:
    spec = sample_tensors.spec_of(contents)
    size_bytes = safetensors.size_at_most_bytes(spec, crc=crc)
    path.unlink(missing_ok=True)
    meant = reserve_file(safetensors, str(path), spec)
    sample_tensors.fill(meant, contents)
    seal_file(safetensors, str(path), crc=crc)
    safetensors.read_back(meant)
    assert path.stat().st_size == size_bytes


def header(path: Path) -> dict[str, dict[str, object]]:
    content = path.read_bytes()
    found: dict[str, dict[str, object]] = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return found


def holdable(contents: ShardContents) -> ShardContents:
    """Return contents of types that the reference has too; it knows nothing of int4."""
    refused = ("complex128", "hifloat8", "int4")
    return ShardContents(
        {name: t for name, t in contents.tensors.items() if t.dtype.name not in refused}, contents.strings
    )


@given(contents=example_contents.contents())
def test_the_reference_reads_what_is_written(path: Path, contents: ShardContents) -> None:
    contents = holdable(contents)
    write(path, contents)
    found = dict(reference.deserialize(path.read_bytes()))
    assert found.keys() == contents.tensors.keys()
    for name, tensor in contents.tensors.items():
        assert tuple(found[name]["shape"]) == tensor.shape and bytes(found[name]["data"]) == tensor.content


@given(contents=example_contents.contents())
def test_what_the_reference_writes_is_read(path: Path, contents: ShardContents) -> None:
    contents = holdable(contents)
    arrays = {name: np.frombuffer(tensor.content, np.uint8) for name, tensor in contents.tensors.items()}
    tensors = {
        name: reference.TensorSpec(
            dtype=tensor.dtype.name,
            shape=list(tensor.shape),
            data_ptr=arrays[name].ctypes.data,
            data_len=len(tensor.content),
        )
        for name, tensor in contents.tensors.items()
    }
    metadata = {"__reshard_mpi__:" + name: text for name, text in contents.strings.items()}
    path.unlink(missing_ok=True)
    path.write_bytes(reference.serialize(tensors, metadata or None))  # of no entries it makes a file that it refuses
    assert sample_tensors.contents_of(safetensors.locate(str(path))) == contents


def test_large_tensors_can_share_blocks(tmp_path: Path) -> None:
    shapes = {
        "odd": (65_537,),
        "small": (3,),
        "large": (64 << 10,),
        "page": (4096,),
        "larger": (1 << 20,),
        "none": (0,),
    }
    tensors = [SampleTensor.random(name, BY_NAME["int8"], shape) for name, shape in shapes.items()]
    tensors += [SampleTensor.random("wide", BY_NAME["float64"], (5,)), SampleTensor.random("p", BY_NAME["int16"], (1,))]
    path = tmp_path / "shard.safetensors"
    write(path, ShardContents.of(tensors))
    held = safetensors.locate(str(path)).tensors
    assert list(held) == ["large", "page", "larger", "wide", "p", "odd", "small", "none"]
    starts = {name: held.offsets[number] for name, number in held.index_by_name.items()}
    assert all(starts[name] % 4096 == 0 for name in ("large", "page", "larger", "wide"))
    assert sample_tensors.contents_of(safetensors.locate(str(path))) == ShardContents.of(tensors)


@given(contents=example_contents.contents())
def test_every_tensor_begins_at_a_multiple_of_its_element(path: Path, contents: ShardContents) -> None:
    write(path, holdable(contents))
    for entry in safetensors.locate(str(path)).tensors.values():
        assert all(part.offset_bytes % entry.dtype.itemsize_bytes == 0 for part in entry.source.ranges)


def test_the_header_is_in_the_order_of_the_data_and_says_who_wrote_it(tmp_path: Path) -> None:
    path = tmp_path / "shard.safetensors"
    write(
        path, ShardContents.of([SampleTensor.random(name, BY_NAME[name], (3,)) for name in ("int8", "float64", "int4")])
    )
    entries = header(path)
    assert entries.pop("__metadata__") == {"format": "ms", "int4": "Int4"}
    assert [entry["data_offsets"] for entry in entries.values()] == [[0, 24], [24, 27], [27, 30]]


# What MindSpore has saved


def test_every_type_that_mindspore_saves() -> None:
    held = safetensors.locate(str(MINDSPORE / "types.safetensors"))
    for name, entry in held.tensors.items():
        assert entry.dtype.name == {"empty": "float32", "scalar": "float32"}.get(name, name)
    assert sample_tensors.payload(held.tensors["int4"]) == bytes([1, 2, 0xFD, 4])
    assert sample_tensors.payload(held.tensors["int16"]) == np.arange(4, dtype=np.int16).tobytes()
    assert held.tensors["empty"].shape == (0, 3) and held.tensors["scalar"].shape == ()


def test_the_checksum_that_mindspore_saves(tmp_path: Path) -> None:
    path = MINDSPORE / "with_crc.safetensors"
    assert safetensors.check_crc(str(path))
    assert not safetensors.check_crc(str(MINDSPORE / "types.safetensors"))
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(path.read_bytes()[:-1] + b"\x55")
    with pytest.raises(ShardError, match="checksum"):
        safetensors.check_crc(str(damaged))
    ours = tmp_path / "ours.safetensors"
    write(ours, sample_tensors.contents_of(safetensors.locate(str(path))), crc=True)
    assert header(ours)["__metadata__"]["crc_num"] == header(path)["__metadata__"]["crc_num"] == "445106175"


def test_a_whole_number_without_dimensions_counts_as_so_many_zeros(tmp_path: Path) -> None:
    import zlib

    path = tmp_path / "shard.safetensors"
    step, flag = np.array(5_000_000, np.int64).tobytes(), b"\1"
    tensors = [SampleTensor("z", BY_NAME["bool"], (), flag), SampleTensor("step", BY_NAME["int64"], (), step)]
    write(path, ShardContents.of(tensors, {"note": "é"}), crc=True)
    expected = zlib.crc32(b"step" + bytes(5_000_000) + b"z" + flag)
    assert header(path)["__metadata__"] == {"crc_num": str(expected), "format": "ms", "note": "é"}
    assert safetensors.check_crc(str(path))
    assert safetensors.locate(str(path)).strings == {"note": "é"}


@pytest.mark.parametrize("value", [-1, 1 << 62])
def test_a_number_that_mindspore_cannot_sum_is_refused(tmp_path: Path, value: int) -> None:
    tensor = SampleTensor("step", BY_NAME["int64"], (), value.to_bytes(8, "little", signed=True))
    with pytest.raises(TargetError, match="'step' has no place in the checksum"):
        write(tmp_path / "shard.safetensors", ShardContents.of([tensor]), crc=True)


def test_what_mindspore_cannot_check_is_refused(tmp_path: Path) -> None:
    for tensor in (
        SampleTensor.random("w", BY_NAME["bfloat16"], (2,)),
        SampleTensor.random("crc_num", BY_NAME["int8"], (2,)),
    ):
        spec = sample_tensors.spec_of(ShardContents.of([tensor]))
        assert safetensors.size_at_most_bytes(spec)
        with pytest.raises(TargetError, match=tensor.name):
            safetensors.size_at_most_bytes(spec, crc=True)


@pytest.mark.slow
def test_a_string_that_would_not_be_read_back_is_refused(path: Path) -> None:
    longest = "\U0001f701" * (MAX_STRING_BYTES // 4 - 1)
    write(path, ShardContents.of([], {"note": longest}))
    assert safetensors.locate(str(path)).strings == {"note": longest}
    with pytest.raises(TargetError, match="'note' is too long"):
        write(path, ShardContents.of([], {"note": longest + "four"}))


def test_names_that_the_header_has_for_itself(tmp_path: Path) -> None:
    path = tmp_path / "shard.safetensors"
    named = [SampleTensor.random("format", BY_NAME["int8"], (2,))]
    write(path, ShardContents.of(named))
    # MindSpore would take the entry for the tensor's type.
    assert header(path)["__metadata__"] == {}
    assert sample_tensors.contents_of(safetensors.locate(str(path))) == ShardContents.of(named)
    for contents in (
        ShardContents.of([SampleTensor.random("__metadata__", BY_NAME["int8"], (2,))]),
        ShardContents.of([SampleTensor.random("__reshard_mpi__:format", BY_NAME["int8"], (2,))], {"format": "x"}),
    ):
        with pytest.raises(TargetError, match="cannot be called"):
            safetensors.size_at_most_bytes(sample_tensors.spec_of(contents))


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=2000), cut=st.integers(65_000, 66_000))
def test_strings_across_the_ends_of_windows(path: Path, text: str, cut: int) -> None:
    """What a window ends within is read whole, escaped or not, and what is passed over ends where it should."""
    for ascii_only in (True, False):
        metadata = json.dumps({"k": "x" * cut + text, "__reshard_mpi__:s": text}, ensure_ascii=ascii_only)
        path.unlink(missing_ok=True)
        path.write_bytes(safetensors_peer.file_of(f'{{"__metadata__":{metadata}}}'.encode()))
        assert safetensors.locate(str(path)).strings == {"k": "x" * cut + text, "s": text}


def test_metadata_of_other_programs_is_carried(tmp_path: Path) -> None:
    """Under its own name where it can be, and what is about the file it stands in is not."""
    entries = {"mykey": "my value", "format": "pt", "w": "F32", "DCP_VERSION": "1.0", "": "x", "v": "Int4"}
    tensor = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    path = tmp_path / "foreign.safetensors"
    path.write_bytes(safetensors_peer.file_of({"__metadata__": entries, "w": tensor}, bytes(16)))
    located = safetensors.locate(str(path))
    assert located.strings == {"mykey": "my value"}
    assert [text.removeprefix("of its metadata ") for text in located.left_out] == [
        *("'DCP_VERSION'", "''", "'w', of which there are two")
    ]
    out = [str(tmp_path / "out"), "--jobs", "1"]
    finished = done("transform", path, *out, "--verify")
    assert "left out of" in finished.err and "DCP_VERSION" in finished.err
    made = tmp_path / "out" / "rank_0" / "checkpoint_0.safetensors"
    assert header(made)["__metadata__"] == {"format": "ms", "mykey": "my value"}
    finished = done("transform", made, tmp_path / "hf", "--to", "hf", "--jobs", "1")
    assert "no place for texts or settings: 'mykey'" in finished.err


def test_strings_are_written_so_that_they_are_read_back(tmp_path: Path) -> None:
    strings = {name: name for name in ("format", "crc_num", "remove_redundancy", "DCP_x", "__reshard_mpi__:x", "plain")}
    strings |= {"v": "Int4", "long": "x" * (1 << 20), "behind it": "x"}
    path = tmp_path / "shard.safetensors"
    write(path, ShardContents.of([], strings))
    assert safetensors.locate(str(path)).strings == strings
    assert {key for key in header(path)["__metadata__"] if key in strings} == {"format", "plain"}


@pytest.mark.slow
def test_a_lot_of_metadata_is_left_out_and_named(tmp_path: Path) -> None:
    entries = {f"{number}": "x" * (1 << 19) for number in range(20)} | {"huge": "x" * (9 << 20), "n" * 50_000: "x"}
    path = tmp_path / "foreign.safetensors"
    path.write_bytes(safetensors_peer.file_of({"__metadata__": entries}))
    located = safetensors.locate(str(path))
    assert list(located.strings) == [str(number) for number in range(7)]
    assert len(located.left_out) == 15 and "'huge'" in "".join(located.left_out)


def test_one_file_of_several_that_share_tensors_is_told(tmp_path: Path) -> None:
    """Shards saved without redundancy together are a checkpoint; one of them, wherever it was put, may lack some."""
    shards = MINDSPORE / "ranks_without_redundancy"
    strategy = ["--src-strategy", str(MINDSPORE / "strategy_2x2.ckpt"), "--jobs", "1"]
    assert "without what other ranks hold" not in done("transform", str(shards), tmp_path / "all", *strategy).err
    shutil.copy(shards / "rank_0" / "net_0.safetensors", tmp_path)
    alone = done("transform", tmp_path / "net_0.safetensors", tmp_path / "one", "--jobs", "1")
    assert "was saved without what other ranks hold" in alone.err
