"""Files of DeepSpeed and Megatron by their own words: those without the weights that they list are refused.

The files are made with the keys that the programs write; `tests/checkpoints/test_foreign_samples.py` has true ones.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import dcp_peer, torch_peer
from support.command_line import done, run_here

from reshard_mpi.errors import ShardError
from reshard_mpi.formats import torch

SHAPES = {"embed": (5, 4), "layer.weight": (4, 4), "layer.bias": (4,)}


def tensor(shape: tuple[int, ...], key: str) -> torch_peer.Tensor:
    size = int(np.prod(shape))
    return torch_peer.tensor(dcp_peer.sample(np.arange(size, dtype=np.float32).reshape(shape)), key)


def module(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch_peer.Tensor]:
    return OrderedDict((name, tensor(shape, str(at))) for at, (name, shape) in enumerate(shapes.items()))


def states(held: dict[str, tuple[int, ...]] | None, *, listed: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Any]:
    """Return model states as DeepSpeed has them, with buffers that it does not list."""
    buffers = {"scale": (3,)}
    return {
        "module": None if held is None else module({**held, **buffers}),
        "buffer_names": ["scale"],
        "param_shapes": [OrderedDict(listed)],
        "dp_world_size": 2,
        "mp_world_size": 1,
        "ds_version": "0.19.8",
        "num_experts": [4],
    }


FLAT = {"state": {0: {"step": tensor((), "1"), "exp_avg": tensor((18,), "2")}}, "param_groups": [{"params": [0]}]}
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "the model states of stage 3": (
        states(dict.fromkeys(SHAPES, (0,))),
        "a DeepSpeed ZeRO stage 3 checkpoint, and has no weights",
        "3 that are empty, such as 'embed' of shape [0]",
    ),
    "one parameter that is kept whole": (
        states({**dict.fromkeys(SHAPES, (0,)), "layer.bias": (4,)}),
        "a DeepSpeed ZeRO stage 3 checkpoint",
        "2 that are empty",
    ),
    "experts in files of their own": (
        states({"embed": (5, 4)}),
        "does not hold all weights that it lists",
        "2 are not in it; experts lie in layer_*_expert_*",
    ),
    "layers in files of their own": (
        states(None),
        "does not hold all weights that it lists",
        "3 are not in it; layers of a pipeline lie in layer_*-model",
    ),
    "the optimizer of stages 1 and 2": (
        {
            "optimizer_state_dict": {
                "base_optimizer_state": FLAT,
                "single_partition_of_fp32_groups": [tensor((18,), "0")],
            },
            "ds_version": "0.19.8",
        },
        "one rank's part of the optimizer of a DeepSpeed ZeRO checkpoint",
        "flat pieces",
    ),
    "the optimizer of stage 3": (
        {"optimizer_state_dict": {"optimizer_state_dict": FLAT, "fp32_flat_groups": [tensor((18,), "0")]}},
        "one rank's part of the optimizer of a DeepSpeed ZeRO checkpoint",
        "flat pieces",
    ),
    "the distributed optimizer of Megatron": (
        {"buckets_coalesced": True, 0: {"param": tensor((18,), "0")}},
        "the distributed optimizer of a Megatron checkpoint",
        "flat buckets",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_file_without_its_weights(tmp_path: Path, what: str) -> None:
    content, problem, got = REFUSED[what]
    path = tmp_path / "model.pt"
    torch_peer.save(path, content)
    for command in (
        ["inspect", str(path)],
        *([name, str(path), str(tmp_path / "out")] for name in ("plan", "transform")),
    ):
        said = run_here(*command)
        assert said.code == 3 and problem in said.err and got in said.err, said.err
        assert "what to do: " in said.err and not (tmp_path / "out").exists()


def test_a_file_with_all_its_weights(tmp_path: Path) -> None:
    path, out = tmp_path / "mp_rank_00_model_states.pt", tmp_path / "out"
    torch_peer.save(path, states(SHAPES))
    assert len(torch.locate(str(path)).tensors) == 4
    done("transform", path, out, "--exclude", "module.embed")
    # What is left out of it is no reason to refuse what this program has written itself.
    assert len(torch.locate(str(out / "rank_0" / "checkpoint_0.pt")).tensors) == 3


@given(st.dictionaries(st.sampled_from([*SHAPES, "other"]), st.sampled_from([(0,), (4,), (4, 4), (5, 4)])))
def test_whatever_it_holds(tmp_path_factory: pytest.TempPathFactory, held: dict[str, tuple[int, ...]]) -> None:
    path = tmp_path_factory.mktemp("any") / "model.pt"
    torch_peer.save(path, states(held))
    is_whole = all(held.get(name, (0,)) != (0,) for name in SHAPES)
    if is_whole:
        assert set(torch.locate(str(path)).tensors) == {f"module.{name}" for name in (*held, "scale")}
    else:
        with pytest.raises(ShardError, match="DeepSpeed"):
            torch.locate(str(path))


ODD: dict[str, Any] = {
    "shapes that are none": {**states(SHAPES), "param_shapes": 7},
    "shapes in a dictionary": {**states(SHAPES), "param_shapes": SHAPES},
    "names that are none": {**states(SHAPES), "param_shapes": [{3: (1,), ("a",): (2,)}]},
    "sizes that are none": {**states(SHAPES), "param_shapes": [dict.fromkeys(SHAPES, "large")]},
    "an optimizer in a dictionary": {"optimizer_state_dict": {"state": tensor((2,), "0")}},
    "arguments that are none": {"args": [3], "checkpoint_version": 3.0, "w": tensor((2,), "0")},
}


@pytest.mark.parametrize("what", ODD)
def test_keys_that_mean_something_else(tmp_path: Path, what: str) -> None:
    torch_peer.save(tmp_path / "model.pt", ODD[what])
    assert len(torch.locate(str(tmp_path / "model.pt")).tensors)


def rank_of_megatron(tensor_parallel: int, pipeline: int = 1) -> dict[str, Any]:
    args = argparse.Namespace(
        num_layers=2, tensor_model_parallel_size=tensor_parallel, pipeline_model_parallel_size=pipeline
    )
    return {"args": args, "checkpoint_version": 3.0, "iteration": 3, "model": module({"w": (4, 4)})}


@pytest.mark.parametrize(
    "content, said_part",
    [
        (rank_of_megatron(2), "a Megatron checkpoint of 2 x 1 ranks"),
        (rank_of_megatron(1, 2), "a Megatron checkpoint of 1 x 2 ranks"),
        ({**states(SHAPES), "mp_world_size": 2}, "a DeepSpeed checkpoint of 2 model-parallel ranks"),
        (rank_of_megatron(1), ""),
    ],
)
def test_one_of_several_ranks(tmp_path: Path, content: dict[str, Any], said_part: str) -> None:
    path = tmp_path / "model_optim_rng.pt"
    torch_peer.save(path, content)
    for source in (path, tmp_path):
        said = run_here("plan", source, tmp_path / "out")
        assert said.code == (3 if said_part else 0), said.err
        assert said_part in said.err
    done("inspect", path)


def test_all_ranks_with_a_strategy(tmp_path: Path) -> None:
    """As the guide shows it; the full checkpoint that is made keeps the arguments, and can be read."""
    for rank in range(2):
        (tmp_path / "src" / f"rank_{rank}").mkdir(parents=True)
        content = rank_of_megatron(2)
        parts = dcp_peer.sample(np.arange(16, dtype=np.float32).reshape(4, 4) + 16 * rank)
        content["model"] = {"w": torch_peer.tensor(parts, "0")}
        torch_peer.save(tmp_path / "src" / f"rank_{rank}" / "model_optim_rng.pt", content)
    spec = tmp_path / "tp.toml"
    spec.write_text('mesh = { t = 2 }\n[[parameter]]\nmatch = "*"\nsplit = { 0 = ["t"] }\n')
    done("transform", tmp_path / "src", tmp_path / "out", "--src-strategy", spec)
    done("plan", tmp_path / "out", tmp_path / "more", "--to", "safetensors")
