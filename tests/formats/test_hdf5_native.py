"""What others see in a native HDF5 shard, and what it says of itself."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from support.command_line import refused
from support.examples import few

from reshard_mpi.errors import TargetError
from reshard_mpi.formats import hdf5, structure
from reshard_mpi.formats.dtypes import BY_NAME, to_numpy
from reshard_mpi.formats.manifest import ShardIdentity, ShardSpec, TensorSpec
from reshard_mpi.formats.protocol import reserve_file
from reshard_mpi.sharding.box import Box
from reshard_mpi.testing import sample_tensors
from reshard_mpi.testing.sample_tensors import SampleTensor, ShardContents


@pytest.mark.parametrize("name", [n for n in BY_NAME if n not in ("int4", "hifloat8") and not n.startswith("float8")])
def test_h5py_shows_the_numbers(tmp_path: Path, name: str) -> None:
    path = tmp_path / "shard.h5"
    numbers = np.array([[0, 1, 2], [3, 64, 127]]).astype(to_numpy(BY_NAME[name]))
    sample_tensors.write(
        hdf5, str(path), ShardContents.of([SampleTensor("w", BY_NAME[name], (2, 3), numbers.tobytes())])
    )
    with h5py.File(path) as file:
        shown = file["w"][()]
        assert shown.dtype == ("float32" if name == "bfloat16" else name)
        assert np.array_equal(shown, numbers.astype(shown.dtype))
        assert file["__reshard_mpi__/boxes"][0]["dtype"] == name.encode()


@pytest.mark.parametrize("name, shown", [("int4", "int8"), ("hifloat8", "uint8"), ("float8_e4m3fn", "uint8")])
def test_types_hdf5_has_not_are_shown_as_bytes(tmp_path: Path, name: str, shown: str) -> None:
    path = tmp_path / "shard.h5"
    sample = SampleTensor.random("w", BY_NAME[name], (9,))
    sample_tensors.write(hdf5, str(path), ShardContents.of([sample]))
    with h5py.File(path) as file:
        assert file["w"].dtype == shown
        assert file["w"][()].tobytes() == sample.content
    assert sample_tensors.contents_of(hdf5.locate(str(path))) == ShardContents.of([sample])


def test_large_payloads_are_aligned_and_small_ones_are_not(tmp_path: Path) -> None:
    path = tmp_path / "shard.h5"
    sizes = [100, 65535, 65536, 70000, 3, 1 << 20]
    tensors = tuple(TensorSpec(str(n), BY_NAME["int8"], (n,), Box.whole((n,))) for n in sizes)
    manifest = reserve_file(hdf5, str(path), ShardSpec(ShardIdentity(0, 1, ""), tensors, {}))
    offsets = [entry.source.ranges[0].offset_bytes for entry in manifest.tensors.values()]
    assert all(offset % 4096 == 0 for size, offset in zip(sizes, offsets) if size >= 65536)
    assert path.stat().st_size < sum(sizes) + 4 * 4096 + 64 * 1024


def test_nothing_is_written_for_payloads(tmp_path: Path) -> None:
    path = tmp_path / "shard.h5"
    tensor = TensorSpec("w", BY_NAME["float32"], (1 << 24,), Box.whole((1 << 24,)))
    reserve_file(hdf5, str(path), ShardSpec(ShardIdentity(0, 1, ""), (tensor,), {}))
    assert path.stat().st_size > 64 << 20
    assert path.stat().st_blocks * 512 < 1 << 20


def test_escaped_names_are_readable(tmp_path: Path) -> None:
    path = tmp_path / "shard.h5"
    names = [".", "a", "a/b"]
    sample_tensors.write(
        hdf5, str(path), ShardContents.of(SampleTensor.random(n, BY_NAME["int8"], (1,)) for n in names)
    )
    with h5py.File(path) as file:
        assert set(file) == {"a", "__reshard_mpi__"}
        escaped = file["__reshard_mpi__/tensors"]
        assert set(escaped) == {"%2E", "a"}


def test_what_cannot_be_read_back_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "shard.h5"
    long_text = {"note": "x" * (structure.MAX_STRING_BYTES + 1)}
    with pytest.raises(TargetError, match="too long"):
        reserve_file(hdf5, str(path), ShardSpec(ShardIdentity(0, 1, ""), (), long_text))
    with pytest.raises(TargetError, match="Unicode"):
        reserve_file(hdf5, str(path), ShardSpec(ShardIdentity(0, 1, "\ud800"), (), {}))
    monkeypatch.setattr(structure, "MAX_TEXT_BYTES", 10)
    with pytest.raises(TargetError, match="too long"):
        reserve_file(hdf5, str(path), ShardSpec(ShardIdentity(0, 1, "x" * 20), (), {}))
    assert not path.exists()


@pytest.mark.parametrize("text", few(1, ["nope", "[" * 5000, "{}"]), ids=["no JSON", "nested", "no version"])
def test_a_strategy_that_cannot_be_read_names_its_shard(tmp_path: Path, text: str) -> None:
    path, contents = tmp_path / "a.h5", ShardContents.of([SampleTensor.random("w", BY_NAME["int8"], (2,))])
    sample_tensors.write(hdf5, str(path), contents, ShardIdentity(0, 1, text))
    for said in (
        refused("transform", tmp_path, tmp_path / "out", "--jobs", "1"),
        refused("verify", path, "--jobs", "1", code=4),
        refused("inspect", tmp_path, "--toml"),
    ):
        assert "the strategy that a shard states cannot be read" in said and f"where: {path}" in said
