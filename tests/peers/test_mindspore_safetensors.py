"""Safetensors shards exchanged with MindSpore: it saves those we reshard, and loads those that we write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cases import Side
from support.checkpoints import Read, as_read, expected_rank, read_shard, write_strategy
from support.oracle import RawLayout

import reshard_mpi
from reshard_mpi.formats import safetensors

pytest.importorskip("mindspore")
import mindspore as ms
from support import mindspore_peer as peer

pytestmark = pytest.mark.mindspore

# What it can save with any numpy.
NAMES = (
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    "bool",
)
FOUR = RawLayout((2, 2), (1, -1), 2)
THREE = RawLayout((3,), (-1, 0))
STEP = {"epoch_num": 3, "step_num": 1875}


def tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    return {f"layer.{name}": random.integers(0, 2, (24, 12)).astype(name) for name in NAMES}


def sides(arrays: dict[str, np.ndarray]) -> tuple[Side, Side]:
    four, three = (Side(layout.stage_size, 1, dict.fromkeys(arrays, layout)) for layout in (FOUR, THREE))
    return four, three


def save_ranks(folder: Path, side: Side, arrays: dict[str, np.ndarray], **options: Any) -> None:
    for rank in range(side.world_size):
        path = folder / f"rank_{rank}" / f"net-3_1875_{rank}.safetensors"
        peer.save(expected_rank(side, arrays, rank), path, format="safetensors", append_dict=dict(STEP), **options)


def loaded(path: Path, **options: Any) -> Read:
    """Return what MindSpore finds in a file."""
    held = ms.load_checkpoint(str(path), format="safetensors", **options)
    return {name: (str(v.dtype).lower(), tuple(v.shape), bytes(v.get_bytes())) for name, v in held.items()}


def with_step(arrays: dict[str, np.ndarray]) -> Read:
    return as_read(arrays | {name: np.array(value, np.int64) for name, value in STEP.items()})


@pytest.mark.parametrize("crc", [False, True])
def test_it_saves_and_it_loads(tmp_path: Path, crc: bool) -> None:
    arrays = tensors()
    four, three = sides(arrays)
    src, dst = write_strategy(four, tmp_path / "four"), write_strategy(three, tmp_path / "three")
    save_ranks(tmp_path / "src", four, arrays, crc_check=crc)
    assert safetensors.check_crc(str(tmp_path / "src" / "rank_0" / "net-3_1875_0.safetensors")) is crc
    reshard_mpi.transform_checkpoints(
        tmp_path / "src", tmp_path / "dst", "c_", src, dst, output_format="safetensors", crc=crc, verify=True
    )
    for rank in range(3):
        path = tmp_path / "dst" / f"rank_{rank}" / f"c_{rank}.safetensors"
        assert loaded(path, crc_check=crc) == with_step(expected_rank(three, arrays, rank))
    if crc:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.chmod(0o600)
        path.write_bytes(content)
        with pytest.raises(ValueError):
            loaded(path, crc_check=True)
    reshard_mpi.transform_checkpoints(tmp_path / "src", tmp_path / "full", "c_", src, output_format="safetensors")
    assert loaded(tmp_path / "full" / "rank_0" / "c_0.safetensors") == with_step(arrays)


def test_one_network_takes_what_another_saved(tmp_path: Path) -> None:
    trained, other = ms.nn.Dense(12, 24), ms.nn.Dense(12, 24)
    ms.save_checkpoint(trained, str(tmp_path / "dense.safetensors"), format="safetensors")
    reshard_mpi.transform(tmp_path / "dense.safetensors", tmp_path / "hf", to="hf", max_shard_size=1000)
    reshard_mpi.transform(tmp_path / "hf", tmp_path / "back", to="safetensors")
    held = ms.load_checkpoint(str(tmp_path / "back" / "rank_0" / "checkpoint_0.safetensors"), format="safetensors")
    left_over, _ = ms.load_param_into_net(other, held)
    assert not left_over
    batch = ms.Tensor(np.random.default_rng(4).standard_normal((5, 12), np.float32))
    assert np.array_equal(trained(batch).asnumpy(), other(batch).asnumpy())


@pytest.mark.parametrize("most_bytes", [3 << 30, 2000])
def test_its_loader_reads_what_we_unify(tmp_path: Path, most_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reshard_mpi.api.mindspore.MOST_BYTES", most_bytes)
    arrays = tensors()
    four, three = sides(arrays)
    src, dst = write_strategy(four, tmp_path / "four"), write_strategy(three, tmp_path / "three")
    save_ranks(tmp_path / "src", four, arrays)
    reshard_mpi.unified_safetensors(tmp_path / "src", src, tmp_path / "unified", max_process_num=1)
    for rank in range(3):
        ms.load_distributed_checkpoint(
            network=None,
            predict_strategy=str(dst),
            unified_safetensors_dir=str(tmp_path / "unified"),
            dst_safetensors_dir=str(tmp_path / "dst"),
            rank_id=rank,
            format="safetensors",
        )
        found = read_shard(tmp_path / "dst" / f"rank_{rank}" / "net.safetensors")
        expected = as_read(expected_rank(three, arrays, rank))
        assert {name: found[name] for name in expected} == expected
