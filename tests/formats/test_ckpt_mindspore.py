"""Checkpoints exchanged with MindSpore itself: it saves and we locate, we write and it loads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reshard_mpi.errors import ShardError
from reshard_mpi.formats import ckpt
from reshard_mpi.formats.dtypes import BY_NAME, to_numpy
from reshard_mpi.testing import sample_tensors
from reshard_mpi.testing.sample_tensors import SampleTensor, ShardContents

pytest.importorskip("mindspore")
import mindspore as ms
from mindspore.train import serialization

pytestmark = pytest.mark.mindspore

# What MindSpore's loader takes; it saves complex numbers and 8-bit floats, but refuses to load them.
LOADABLE = [n for n in BY_NAME if not n.startswith(("complex", "float8", "hifloat8", "int4"))]


def from_bytes(sample: SampleTensor, kind: Any) -> Any:
    """Make a MindSpore parameter of these very bits, the way its own loader does."""
    return ms.Parameter(ms.Tensor.convert_bytes_to_tensor(sample.content, sample.shape, kind), name=sample.name)


def tensor_of(sample: SampleTensor) -> Any:
    return from_bytes(sample, getattr(ms, {"bool": "bool_"}.get(sample.dtype.name, sample.dtype.name)))


def save(path: Path, tensors: list[SampleTensor], **options: Any) -> None:
    ms.save_checkpoint([{"name": t.name, "data": tensor_of(t)} for t in tensors], str(path), **options)


@pytest.mark.parametrize("name", LOADABLE)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 5)], ids=str)
def test_we_locate_what_mindspore_saves(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    path = tmp_path / "w.ckpt"
    sample = SampleTensor.random("layer.w", BY_NAME[name], shape)
    save(path, [sample])
    assert sample_tensors.contents_of(ckpt.locate(str(path))) == ShardContents.of([sample])


@pytest.mark.parametrize("name", LOADABLE)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 5)], ids=str)
def test_mindspore_loads_what_we_write(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    path = tmp_path / "w.ckpt"
    sample = SampleTensor.random("layer.w", BY_NAME[name], shape)
    sample_tensors.write(ckpt, str(path), ShardContents.of([sample]))
    loaded = ms.load_checkpoint(str(path))["layer.w"]
    assert loaded.dtype == tensor_of(sample).dtype and loaded.shape == shape
    assert bytes(loaded.get_bytes()) == sample.content


def test_our_bytes_are_mindspores(tmp_path: Path) -> None:
    tensors = [SampleTensor.random(f"layer.{n}", BY_NAME[n], (2, 300)) for n in LOADABLE]
    tensors.append(SampleTensor.random("step", BY_NAME["int32"], ()))
    strings = {"note": "é层", "none": ""}
    save(tmp_path / "theirs.ckpt", tensors, append_dict=strings)
    sample_tensors.write(ckpt, str(tmp_path / "ours.ckpt"), ShardContents.of(tensors, strings))
    assert (tmp_path / "ours.ckpt").read_bytes() == (tmp_path / "theirs.ckpt").read_bytes()


@pytest.mark.parametrize("elements", [511, 512, 513, 1024, 1500])
def test_our_cuts_are_mindspores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    """Its synchronous save of a Tensor cuts by bytes, in the middle of rows, its slice size in units of 1024."""
    monkeypatch.setattr(serialization, "SLICE_SIZE", 2)
    monkeypatch.setattr(ckpt, "CUT_BYTES", 2048)
    sample = SampleTensor.random("w", BY_NAME["float32"], (elements,))
    save(tmp_path / "theirs.ckpt", [sample])
    sample_tensors.write(ckpt, str(tmp_path / "ours.ckpt"), ShardContents.of([sample]))
    assert (tmp_path / "ours.ckpt").read_bytes() == (tmp_path / "theirs.ckpt").read_bytes()
    assert sample_tensors.contents_of(ckpt.locate(str(tmp_path / "theirs.ckpt"))) == ShardContents.of([sample])
    assert bytes(ms.load_checkpoint(str(tmp_path / "ours.ckpt"))["w"].get_bytes()) == sample.content


@pytest.mark.parametrize("shape", [(3, 700), (7, 300), (2, 3000)], ids=str)
def test_asynchronous_saves_cut_along_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    """Of few long rows an asynchronous save can make empty pieces."""
    monkeypatch.setattr(serialization, "SLICE_SIZE", 2)
    sample = SampleTensor.random("w", BY_NAME["float32"], shape)
    path = tmp_path / "w.ckpt"
    save(path, [sample], async_save="thread")
    serialization._wait_async_thread_save_ckpt()
    assert sample_tensors.contents_of(ckpt.locate(str(path))) == ShardContents.of([sample])


@pytest.mark.parametrize("name", ["int4", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "hifloat8"])
def test_types_that_mindspore_saves_but_does_not_load(tmp_path: Path, name: str) -> None:
    dtype = BY_NAME[name]
    content = SampleTensor.random("w", dtype, (6,)).content
    kind = getattr(ms, {"int4": "qint4x2"}.get(name, name), None)
    if kind is None:
        pytest.skip(f"this MindSpore has no {name}")
    try:
        if name.startswith("complex"):
            tensor = ms.Tensor(np.frombuffer(content, to_numpy(dtype)))
        else:
            tensor = from_bytes(SampleTensor.random("w", dtype, (6,)), kind)
        ms.save_checkpoint([{"name": "w", "data": tensor}], str(tmp_path / "w.ckpt"))
    except (RuntimeError, TypeError, ValueError) as error:
        pytest.skip(f"MindSpore cannot make a {name} tensor on this machine: {error}")
    contents = sample_tensors.contents_of(ckpt.locate(str(tmp_path / "w.ckpt")))
    assert contents.tensors["w"] == SampleTensor("w", dtype, (6,), content)


def test_appended_values_keep_their_types(tmp_path: Path) -> None:
    path = tmp_path / "w.ckpt"
    values = {"epoch": 3, "loss": 1.5, "done": True, "note": "é层", "nothing": ""}
    save(path, [SampleTensor.random("w", BY_NAME["float32"], (2,))], append_dict=values, crc_check=True)
    manifest = ckpt.locate(str(path))
    assert {n: (t.dtype.name, t.shape) for n, t in manifest.tensors.items() if n != "w"} == {
        "epoch": ("int64", ()), "loss": ("float32", ()), "done": ("bool", ())
    }  # fmt: skip
    assert manifest.strings == {"note": "é层", "nothing": ""}
    contents = sample_tensors.contents_of(manifest)
    sample_tensors.write(ckpt, str(tmp_path / "copy.ckpt"), contents)
    loaded = ms.load_checkpoint(str(tmp_path / "copy.ckpt"))
    assert {
        name: loaded[name] if isinstance(loaded[name], str) else loaded[name].asnumpy().item() for name in values
    } == values


def test_parameters_of_a_network(tmp_path: Path) -> None:
    network = ms.nn.Dense(5, 3)
    ms.save_checkpoint(network, str(tmp_path / "w.ckpt"), crc_check=True)
    manifest = ckpt.locate(str(tmp_path / "w.ckpt"))
    expected = {p.name: (tuple(p.shape), p.asnumpy().tobytes()) for p in network.get_parameters()}
    assert {n: (t.shape, sample_tensors.payload(t)) for n, t in manifest.tensors.items()} == expected


@pytest.mark.parametrize("mode", ["AES-GCM", "AES-CBC", "SM4-CBC"])
def test_encrypted_checkpoints_are_refused(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "w.ckpt"
    save(path, [SampleTensor.random("w", BY_NAME["float32"], (20,))], enc_key=b"0123456789abcdef", enc_mode=mode)
    with pytest.raises(ShardError, match=f"encrypted .{mode}."):
        ckpt.locate(str(path))


def test_mindspore_loads_a_large_tree_of_ours(tmp_path: Path) -> None:
    tensors = [SampleTensor.random(f"net.{i}.w", BY_NAME["bfloat16"], (i % 7 + 1, 33)) for i in range(300)]
    sample_tensors.write(ckpt, str(tmp_path / "w.ckpt"), ShardContents.of(tensors))
    loaded = ms.load_checkpoint(str(tmp_path / "w.ckpt"))
    assert list(loaded) == [t.name for t in tensors]
    for tensor in tensors:
        assert bytes(loaded[tensor.name].get_bytes()) == tensor.content
        assert math.prod(loaded[tensor.name].shape) * 2 == len(tensor.content)
