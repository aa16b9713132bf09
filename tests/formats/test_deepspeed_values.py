"""Every value of a training is in what is written for DeepSpeed, or named, or the training is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import deepspeed_peer, torch_peer
from support.deepspeed_samples import NEEDS_DATA, SAMPLES, unpacked
from support.examples import few
from support.torch_runs import tree_of

import reshard_mpi
from reshard_mpi.errors import TargetError

# A pipeline and a mixture of experts are not written.
WRITABLE = [name for name in SAMPLES if "pipeline" not in name and "moe" not in name]
SHAPES = {"a.weight": (5, 3), "b.weight": (6, 6)}


def training() -> dict[str, Any]:
    weights = deepspeed_peer.arrays(SHAPES, 1)
    state = {name: {"step": 3, "exp_avg": tensor(array * 2, name)} for name, array in weights.items()}
    groups = [{"lr": 0.125, "betas": (0.75, 0.5), "params": [*weights]}]
    model = {name: tensor(array, f"model {name}") for name, array in weights.items()}
    return {"model": model, "optimizer": {"state": state, "param_groups": groups}}


def tensor(array: Any, key: str) -> Any:
    return torch_peer.tensor(deepspeed_peer.sample(np.asarray(array)), key)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in a file with their paths; tensors as their bytes."""
    if isinstance(value, torch_peer.Tensor):
        yield path, torch_peer.sample_of("", value).content
    elif isinstance(value, deepspeed_peer.Object):
        yield from leaves(vars(value), path)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}".removeprefix("."))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from leaves(inner, path)
    else:
        yield path, value


def changed(change: dict[str, Any]) -> dict[str, Any]:
    """Return a training with other values: their paths, and them."""
    made = training()
    for path, value in change.items():
        *parents, key = path.split("/")
        place: Any = made
        for parent in parents:
            place = place[int(parent)] if isinstance(place, list) else place.setdefault(parent, {})
        place[int(key) if key.isdecimal() else key] = value
    return made


CHANGES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a key that the training has twice": {"epoch": 101, "client_state/epoch": 102},
    "a key that the training has twice alike": {"epoch": 101, "client_state/epoch": 101},
    "no client state": {"client_state": [101, 102]},
    "client state of no text": {"client_state/701": 101},
    "a scaler that is no dictionary": {"scaler": [101, 102]},
    "a scaler of numbers": {"scaler": {"scale": 101.0, "growth_factor": 2.0}},
    "a scaler and client state of that name": {"scaler": [101], "client_state/scaler": 102},
    "a scaler of DeepSpeed": {"scaler": {"class": "LossScaler", "cur_scale": 101.0, "dynamic": False}},
    "the optimizer's defaults": {"optimizer/defaults": {"lr": 101}},
    "a tensor of the optimizer": {"optimizer/extra": tensor(np.float32(101), "extra")},
    "a text of the optimizer": {"optimizer/name": "AdamW, 101"},
    "plain state of no parameter": {"optimizer/state/ghost": {"step": 101}},
    "state that is no dictionary": {"optimizer/state/a.weight": 101},
    "state of all parameters that is no dictionary": {"optimizer/state/a.weight": 101, "optimizer/state/b.weight": 101},
    "no state": {"optimizer/state": 101},
    "a key that is no text": {"701": 101},
    "a key that is no text, and one that is": {"701": 101, "client_state/701": 102},
    "a setting": {"optimizer/param_groups/0/extra": 101},
    "a setting that is a tensor": {"optimizer/param_groups/0/extra": tensor(np.float32(101), "extra")},
    "a setting of no text": {"optimizer/param_groups/0/701": 101},
    "a tuple of buffers": {"buffer_names": ("scale",), "model/scale": tensor(np.ones(2, np.float32), "scale")},
    "buffers that are no list": {"buffer_names": 101},
    "buffers that are no texts": {"buffer_names": [101]},
    "second names that are no dictionary": {"shared_params": [["a.weight", "b.weight"]]},
    "second names that are no texts": {"shared_params": {"a.weight": 101}},
    "settings that are no dictionary": {"ds_config": "101.json"},
    "a section of settings that is none": {"ds_config": {"zero_optimization": "auto 101"}},
    "a stage": {"ds_config": {"zero_optimization": {"stage": 101, "sub_group_size": 102}}},
    "settings that are a tensor": {"ds_config": {"extra": tensor(np.float32(101), "extra")}},
    "a release that is no text": {"ds_version": 101},
    "a release": {"ds_version": "0.101"},
    "steps that are a tensor": {"global_steps": tensor(np.float32(101), "steps")},
    "steps": {"global_steps": 101},
    "what the engine keeps": {"overflow": 101, "dynamic_loss_scale": 102, "clip_grad": 103},
    "a tensor of what it keeps": {"clip_grad": tensor(np.float32(101), "clip")},
    "a scheduler": {"scheduler": {"last_epoch": 101}},
    "two schedulers": {"scheduler": {"last_epoch": 101}, "lr_scheduler": {"last_epoch": 102}},
    "two schedulers in client state": {"scheduler": {"a": 101}, "client_state/lr_scheduler": {"a": 102}},
    "a scheduler in client state": {"client_state/scheduler": {"a": 102}},
    "keys of the engine": {"client_state/dp_world_size": 101},
    "a key of the engine": {"module": 101},
    "values of a module": {"model/_extra_state": 101},
    "values of a module of no text": {"model/701": 101},
    "no pipeline": {"is_pipeline": False, "num_experts": [101]},
    "sparse tensors": {"sparse_tensor_module_names": ["101"], "data_sampler": 102, "random_ltd": 103},
}


# Of two values one would be lost, or state is no parameter's, or a value is not of the form that DeepSpeed knows.
REFUSED = {
    *("a key that the training has twice", "a key that the training has twice alike"),
    *("a scaler and client state of that name", "a key that is no text, and one that is"),
    *("a tensor of the optimizer", "plain state of no parameter", "no state", "state that is no dictionary"),
    *("state of all parameters that is no dictionary", "buffers that are no list", "buffers that are no texts"),
    *("second names that are no dictionary", "second names that are no texts", "settings that are no dictionary"),
    *("a section of settings that is none", "a release that is no text", "two schedulers"),
    *("two schedulers in client state", "keys of the engine", "a key of the engine"),
}


def require_kept(made: Any, source: Path, folder: Path, stage: int) -> None:
    """Require that what is written of a training has all of its values, or that they are named."""
    reports = [
        reshard_mpi.transform(source, folder / "out", to="deepspeed", dp=1, zero_stage=stage),
        reshard_mpi.transform(folder / "out", folder / "back", to="torch"),
    ]
    told = re.split(r"[\s,:;']+", " ".join(each for own in reports for each in (*own.notes, *own.warnings)))
    read = [value for _, value in leaves(tree_of(folder / "back"))]
    for path, value in leaves(made):
        is_there = any(type(own) is type(value) and own == value for own in read)
        parts = path.removeprefix("client_state.").replace("model.701", "701").split(".")
        is_told = any(".".join(parts[: number + 1]) in told for number in range(len(parts)))
        assert is_there or path == "ds_config.zero_optimization.stage" or is_told, (path, value, told)


@pytest.mark.parametrize("name", few(6, CHANGES))
def test_no_value_is_lost_without_a_word(tmp_path: Path, name: str) -> None:
    made = changed(CHANGES[name])
    torch_peer.save(tmp_path / "x.pt", made)
    if name in REFUSED:
        with pytest.raises(TargetError):
            reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "out", to="deepspeed", dp=1, zero_stage=2)
        assert not (tmp_path / "out").exists()
    else:
        require_kept(made, tmp_path / "x.pt", tmp_path, 3 if len(name) % 2 else 2)


@NEEDS_DATA
@pytest.mark.parametrize("name", few(1, WRITABLE))
def test_no_value_of_a_sample_is_lost_without_a_word(tmp_path: Path, name: str) -> None:
    save = unpacked(name, tmp_path).save
    reshard_mpi.transform(save, tmp_path / "torch", to="torch")
    (path,) = (tmp_path / "torch").rglob("*.pt")
    for stage in (2, 3):
        require_kept(torch_peer.load(path), save, tmp_path / str(stage), stage)
