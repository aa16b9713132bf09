"""Whole checkpoints exchanged with MindSpore: it saves the shards we reshard, and loads the shards we write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.cases import Side
from support.checkpoints import as_read, expected_rank, read_shard, write_strategy
from support.conversions import of_every_kind
from support.mindformers import SIDES, weights, write_merged
from support.oracle import RawLayout

import reshard_mpi

pytest.importorskip("mindspore")
import mindspore as ms
from mindspore.train import serialization
from support import mindspore_peer as peer

pytestmark = pytest.mark.mindspore

SHAPE = (24, 12)
DTYPES = [
    *(np.dtype(name) for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")),
    *(np.dtype(name) for name in ("float16", "float32", "float64", "bool", ml_dtypes.bfloat16)),
]
# Rows by 2 and the optimizer by 2 on 4 ranks; columns by 3.
FOUR = RawLayout((2, 2), (1, -1), 2)
THREE = RawLayout((3,), (-1, 0))
APPENDED = {"epoch_num": 3, "step_num": 1875, "loss": 1.5, "done": True, "note": "é层", "nothing": ""}
APPENDED_DTYPES = {"epoch_num": np.int64, "step_num": np.int64, "loss": np.float32, "done": np.bool_}


def every_type() -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    tensors = {}
    for dtype in DTYPES:
        raw = random.integers(0, 2 if dtype == np.bool_ else 256, (SHAPE[0], SHAPE[1] * dtype.itemsize), np.uint8)
        tensors[f"layer.{dtype.name}"] = raw.view(dtype)
    return tensors


@pytest.mark.parametrize("content", [b"", b"crc_num" + bytes(10)], ids=["no byte", "a checksum"])
def test_it_loads_no_file_of_nothing(tmp_path: Path, content: bytes) -> None:
    """So a rank that holds nothing is refused as a target in this format."""
    (tmp_path / "net.ckpt").write_bytes(content)
    with pytest.raises(ValueError, match="dict is empty"):
        ms.load_checkpoint(str(tmp_path / "net.ckpt"))


@pytest.mark.parametrize("options", [{}, {"crc_check": True}, {"async_save": "thread"}], ids=str)
@of_every_kind
def test_it_saves_and_it_loads(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    """4 ranks to 3 and back: bits, types and appended values are those MindSpore saved."""
    tensors = every_type()
    if "async_save" in options:
        del tensors["layer.bfloat16"]  # MindSpore makes a numpy array of it, which it can with some numpys only
    four, three = (Side(layout.stage_size, 1, dict.fromkeys(tensors, layout)) for layout in (FOUR, THREE))
    src, dst = write_strategy(four, tmp_path / "four"), write_strategy(three, tmp_path / "three")
    for rank in range(4):
        path = tmp_path / "src" / f"rank_{rank}" / "checkpoint-3_1875.ckpt"
        peer.save(expected_rank(four, tensors, rank), path, append_dict=dict(APPENDED), **options)
        if "async_save" in options:
            serialization._wait_async_thread_save_ckpt()

    reshard_mpi.transform_checkpoints(tmp_path / "src", tmp_path / "dst", "c_", src, dst, output_format=kind)
    if kind == "ckpt":
        for rank in range(3):
            check_loaded(tmp_path / "dst" / f"rank_{rank}" / f"c_{rank}.ckpt", expected_rank(three, tensors, rank))
    reshard_mpi.transform_checkpoints(tmp_path / "dst", tmp_path / "back", "c_", dst, src, output_format="ckpt")
    for rank in range(4):
        check_loaded(tmp_path / "back" / f"rank_{rank}" / f"c_{rank}.ckpt", expected_rank(four, tensors, rank))


def check_loaded(path: Path, arrays: dict[str, np.ndarray]) -> None:
    values = {name: np.array(APPENDED[name], dtype) for name, dtype in APPENDED_DTYPES.items()}
    strings = {name: text for name, text in APPENDED.items() if isinstance(text, str)}
    assert peer.load(path) == (as_read(arrays | values), strings)


def test_back_again_the_files_are_its_own(tmp_path: Path) -> None:
    tensors = every_type()
    four, three = (Side(layout.stage_size, 1, dict.fromkeys(tensors, layout)) for layout in (FOUR, THREE))
    src, dst = write_strategy(four, tmp_path / "four"), write_strategy(three, tmp_path / "three")
    for rank in range(4):
        path = tmp_path / "src" / f"rank_{rank}" / f"checkpoint_{rank}.ckpt"
        peer.save(expected_rank(four, tensors, rank), path, append_dict={"note": "é层"})
    reshard_mpi.transform_checkpoints(tmp_path / "src", tmp_path / "dst", "checkpoint_", src, dst)
    reshard_mpi.transform_checkpoints(tmp_path / "dst", tmp_path / "back", "checkpoint_", dst, src)
    for rank in range(4):
        file = f"rank_{rank}/checkpoint_{rank}.ckpt"
        assert (tmp_path / "back" / file).read_bytes() == (tmp_path / "src" / file).read_bytes()


def test_a_network_takes_its_parameters_back(tmp_path: Path) -> None:
    """Saved whole by MindSpore, sharded over 4 ranks as HDF5, made whole again, loaded into another network."""
    trained, other = ms.nn.Dense(12, 24), ms.nn.Dense(12, 24)
    ms.save_checkpoint(trained, str(tmp_path / "dense.ckpt"))
    layouts = {"weight": FOUR, "bias": RawLayout((2, 2), (1,), 2)}
    strategy = write_strategy(Side(4, 1, layouts), tmp_path / "strategy")
    (tmp_path / "src").mkdir()
    (tmp_path / "dense.ckpt").rename(tmp_path / "src" / "dense.ckpt")
    reshard_mpi.transform_checkpoints(tmp_path / "src", tmp_path / "four", "c_", None, strategy, output_format="hdf5")
    reshard_mpi.transform_checkpoints(tmp_path / "four", tmp_path / "whole", "c_")
    left_over, _ = ms.load_param_into_net(other, ms.load_checkpoint(str(tmp_path / "whole" / "rank_0" / "c_0.ckpt")))
    assert not left_over
    batch = ms.Tensor(np.random.default_rng(4).standard_normal((5, 12), np.float32))
    assert np.array_equal(trained(batch).asnumpy(), other(batch).asnumpy())


def test_it_reshards_a_gpt2_as_we_do(tmp_path: Path) -> None:
    """Two stages to two stages, 8 ranks to 4: every tensor MindSpore finds for a rank is ours too."""
    tensors = weights()
    src, dst = (write_merged(SIDES[ranks], tmp_path / f"strategy_{ranks}") for ranks in (8, 4))
    shards = {rank: tmp_path / "src" / f"rank_{rank}" / "gpt2-3_1875.ckpt" for rank in range(8)}
    for rank, path in shards.items():
        peer.save(expected_rank(SIDES[8], tensors, rank), path)
    reshard_mpi.transform_checkpoints(tmp_path / "src", tmp_path / "ours", "c_", src, dst)
    ms.transform_checkpoints(str(tmp_path / "src"), str(tmp_path / "theirs"), "c_", str(src), str(dst))
    for rank in range(4):
        theirs, ours = (read_shard(tmp_path / side / f"rank_{rank}" / f"c_{rank}.ckpt") for side in ("theirs", "ours"))
        assert ours == as_read(expected_rank(SIDES[4], tensors, rank))
        assert theirs == ours
        listed = reshard_mpi.rank_list_for_transform(rank, src, dst)
        assert len(listed) <= len(ms.rank_list_for_transform(rank, str(src), str(dst)))
