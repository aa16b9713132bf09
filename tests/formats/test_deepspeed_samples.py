"""Checkpoints that DeepSpeed itself has written, to every target: equal to what the running engine gave."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from support import dcp_peer, deepspeed_peer, hdf5_peer, safetensors_peer
from support.command_line import done
from support.deepspeed_samples import NEEDS_DATA, SAMPLES, unpacked
from support.examples import few
from support.torch_runs import require_equal, samples_in, tree_of

import reshard_mpi
from reshard_mpi.testing.sample_tensors import SampleTensor

pytestmark = NEEDS_DATA


def of_torch(folder: Path) -> dict[str, SampleTensor]:
    loaded = tree_of(folder)
    assert list(loaded)[:2] == ["model", "optimizer"] and set(loaded["optimizer"]) == {"state", "param_groups"}
    return samples_in(loaded)


# Where the tensors of a target are, and what reads them.
READERS = {
    "hf": ("model.safetensors", safetensors_peer.read),
    "dcp": ("", dcp_peer.read),
    "hdf5": ("rank_0/checkpoint_0.h5", hdf5_peer.read),
    "safetensors": ("rank_0/checkpoint_0.safetensors", safetensors_peer.read),
}


@pytest.mark.parametrize(("name", "other"), few(1, zip(SAMPLES, itertools.cycle(READERS))))
def test_every_target(tmp_path: Path, name: str, other: str) -> None:
    """Each sample becomes a file of torch, and in turn one of the others: writing knows nothing of reading."""
    sample = unpacked(name, tmp_path / "unpacked")
    for to in ("torch", other):
        done("transform", sample.save, tmp_path / to, "--to", to, "--verify")
    made = of_torch(tmp_path / "torch")
    require_equal(made, sample.expected)
    file, read = READERS[other]
    tensors = read(tmp_path / other / file).tensors
    if other == "hf":
        made = {name: tensor for name, tensor in made.items() if name.startswith("model.")}
        before = "" if made.keys() <= tensors.keys() else "model."
        made = {name.removeprefix(before): tensor for name, tensor in made.items()}
    assert set(tensors) == set(made)
    require_equal(tensors, made)


# Where in the files is what the target has under another name; what is about the files alone is named in the report.
_MOVED = {"lr_scheduler": "scheduler", "loss_scaler": "scaler"}
_OF_ENGINE = {
    *("data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps", "global_steps", "global_samples"),
    *(
        "buffer_names",
        "shared_params",
        "num_experts",
        "ds_config",
        "ds_version",
        "dynamic_loss_scale",
        "overflow",
        "clip_grad",
        "scheduler",
        "scaler",
    ),
}
_VECTORS = {"single_partition_of_fp32_groups", "fp32_flat_groups"}
_NESTED = {"base_optimizer_state", "optimizer_state_dict"}


def require_told(content: Any, target: dict[str, Any], said: str, *, is_model: bool) -> None:
    """Require each entry of a file to be in the target, or to be named in what the run said."""
    for key, value in content.items():
        own = _MOVED.get(key, key)
        is_of_first = key == "shared_params" and not value  # only the first rank lists them
        if f" {key}," in said or f" {key}\n" in said or key in _VECTORS or is_of_first:
            continue
        if key in _NESTED and "param_groups" not in value and type(value) is dict:
            require_told(value, target, said, is_model=False)
        elif key in _NESTED:
            require_state(value, target)
        elif key == "param_groups":
            require_settings(value, target)
        elif key in {"module", "frozen_param_fragments"}:
            assert set(value or ()) <= set(target["model"]), key
        elif key == "optimizer":
            assert value is None
        elif own in _OF_ENGINE or not is_model:
            require_same(value, target[own], key)
        else:
            require_same(value, target["client_state"][own], key)


def require_state(value: Any, target: dict[str, Any]) -> None:
    states = value["state"].values() if type(value) is dict else value
    kinds = {kind for state in states for kind in state}
    assert kinds and all(kinds <= set(own) for own in target["optimizer"]["state"].values())
    require_settings(value["param_groups"] if type(value) is dict else [], target)


def require_settings(value: Any, target: dict[str, Any]) -> None:
    for group, made in zip(value, target["optimizer"]["param_groups"], strict=bool(value)):
        assert set(group) == set(made) and all(name in target["optimizer"]["state"] for name in made["params"])
        for key in group.keys() - {"params"}:
            require_same(group[key], made[key], key)


def require_same(value: Any, made: Any, key: str) -> None:
    if isinstance(value, deepspeed_peer.Object):
        value = {"class": type(value).__name__, **{name: own for name, own in vars(value).items() if name != "args"}}
    if isinstance(value, set):
        value = sorted(value)
    if isinstance(value, dict) and value:
        assert set(value) == set(made), key
        for name, entry in value.items():
            require_same(entry, made[name], f"{key}.{name}")
    elif isinstance(value, list | tuple):
        assert [*value] == [*made], key
    else:
        assert value == made and type(value) is type(made), key


@pytest.mark.parametrize("name", few(2, SAMPLES))
def test_every_key_of_every_file(tmp_path: Path, name: str) -> None:
    """What a file holds is part of the target, or is named."""
    sample = unpacked(name, tmp_path / "unpacked")
    out = tmp_path / "out"
    said = done("transform", sample.save, out).err
    target = tree_of(out)
    files = [*sample.tag.rglob("*.pt")]
    for path in files:
        content, where = deepspeed_peer.load(path), path.name
        if path.parent.parent.name == "zero":
            state = target["optimizer"]["state"].get(path.parent.name, {})
            assert path.stem == "fp32" or path.stem in state
        elif where.startswith("layer_") and "expert" not in where:
            layer = int(where.split("_")[1].partition("-")[0])
            assert {f"{layer}.{key}" for key in content} <= set(target["model"])
        elif "expert" in where:
            assert content.keys() <= set(target["model"])
        else:
            require_told(content, target, said, is_model="model_states" in where)
    assert len(files) > 2


@pytest.mark.slow
def test_ways_to_read_one(tmp_path: Path) -> None:
    """Each command has it as any other checkpoint; the folder of the tag is read as the one above it."""
    sample = unpacked("zero2_2_bf16_frozen", tmp_path / "unpacked")
    out = tmp_path / "out"
    assert "3 files, deepspeed" in done("inspect", sample.save).out
    assert "98.03 KiB" in done("plan", sample.tag, out).out and not out.exists()
    done("verify", sample.save)
    done("transform", sample.tag, out, "--jobs", "2", "--verify")
    done("transform", sample.tag, out, "--resume")
    assert "142 tensors, 98.03 KiB" in done("diff", sample.save, out).out
    with reshard_mpi.open(sample.save) as opened:
        assert opened["model.frozen_table"].shape == (5, 3)
        require_equal(of_torch(out), sample.expected)
        assert len(opened) == len(of_torch(out))
