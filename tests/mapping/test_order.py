"""The order of a model's tensors, by which torch numbers optimizer state, through formats that have other orders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import torch_peer
from support.checkpoints import sample

import reshard_mpi

Array = np.ndarray[Any, np.dtype[Any]]

# Parameters of one shape, so that nothing but the order tells whose state is whose; as they are in the model.
DTYPES = {"d": "float32", "b": "float16", "a": "float32", "c": "float16"}
MODEL = {name: np.full((2, 3), 10 * at + 1, dtype) for at, (name, dtype) in enumerate(DTYPES.items())}
MAP = '[[map]]\neq = "model.{p*} <=> model.net.{p*}"\n'
# Where tensors are: on two replicas, in two stages of a pipeline, in two stages that take turns.
SPECS = {
    "one": "",
    "replicas": "mesh = { data = 2 }\n",
    "stages": "mesh = { data = 1 }\nstages = 2\n",
    "turns": "mesh = { data = 1 }\nstages = 2\n",
}
SECOND_STAGE = {
    "stages": ("model.[ac]", "optimizer.state.[23].*", "last"),
    "turns": ("model.[bc]", "optimizer.state.[13].*"),
}
FORMATS = ("ckpt", "hdf5", "safetensors", "torch", "dcp")


def moment(name: str) -> Array:
    return np.full((2, 3), 100 + [*MODEL].index(name), np.float32)


def training() -> dict[str, Any]:
    """Return what torch saves of a training: values among tensors, and a number beside state."""
    keys = iter(range(100))

    def tensor(array: Array) -> Any:
        return torch_peer.tensor(sample("", array), str(next(keys)))

    state = {
        number: {"step": tensor(np.array(3, np.float32)), "exp_avg": tensor(moment(name)), "note": number}
        for number, name in enumerate(MODEL)
    }
    groups = [{"lr": 0.5, "params": [*range(len(MODEL))]}]
    return {
        "epoch": 3,
        "model": {name: tensor(array) for name, array in MODEL.items()},
        "seed": tensor(np.array(5, np.int64)),
        "optimizer": {"state": state, "param_groups": groups},
        "last": tensor(np.zeros(3, np.int8)),
    }


def keys_of(value: Any) -> Any:
    """Return all keys of nested dictionaries, in their order."""
    return [(key, keys_of(part)) for key, part in value.items()] if isinstance(value, dict) else None


def array_of(value: Any) -> Array:
    stored = torch_peer.sample_of("", value)
    return np.frombuffer(stored.content, stored.dtype.name).reshape(stored.shape)


def source(folder: Path) -> Path:
    torch_peer.save(folder / "x.pt", training())
    return folder / "x.pt"


def spec(folder: Path, ways: str) -> Path | None:
    """Write a strategy that has tensors in one of the ways of `SPECS`."""
    if ways == "one":
        return None
    rules = "".join(f"[[parameter]]\nmatch = '{glob}'\nstage = 1\n" for glob in SECOND_STAGE.get(ways, ()))
    last = "[[parameter]]\nmatch = '*'\n" + "stage = 0\n" * bool(rules)
    (folder / f"{ways}.toml").write_text(SPECS[ways] + rules + last)
    return folder / f"{ways}.toml"


def made(src: Path, dst: Path, to: str, folder: Path, before: str = "one", ways: str = "one", **options: Any) -> Path:
    """Convert a checkpoint whose tensors are in the way `before`; return the file, or the folder of several ranks."""
    src_strategy = None if src.is_file() or (src / ".metadata").exists() else spec(folder, before)
    strategies = {"src_strategy": src_strategy, "dst_strategy": spec(folder, ways)}
    reshard_mpi.transform(src, dst, to=to, **strategies, **options)
    return next((dst / "rank_0").iterdir()) if ways == "one" and to != "dcp" else dst


def assert_as_it_was(path: Path) -> None:
    loaded, original = torch_peer.load(path), training()
    assert keys_of(loaded) == keys_of(original)
    for number, name in enumerate(MODEL):
        assert np.array_equal(array_of(loaded["model"][name]), MODEL[name])
        assert np.array_equal(array_of(loaded["optimizer"]["state"][number]["exp_avg"]), moment(name))


@pytest.mark.parametrize("ways", SPECS)
@pytest.mark.parametrize("form", FORMATS)
def test_keys_keep_their_order(tmp_path: Path, form: str, ways: str) -> None:
    between = made(source(tmp_path), tmp_path / "between", form, tmp_path, ways=ways)
    assert_as_it_was(made(between, tmp_path / "back", "torch", tmp_path, before=ways))


@pytest.mark.parametrize("ways", SPECS)
@pytest.mark.parametrize("form", FORMATS)
def test_state_goes_with_its_parameter(tmp_path: Path, form: str, ways: str) -> None:
    between = made(source(tmp_path), tmp_path / "between", form, tmp_path, ways=ways)
    (tmp_path / "map.toml").write_text(MAP)
    path = made(between, tmp_path / "back", "torch", tmp_path, before=ways, map=tmp_path / "map.toml")
    optimizer = torch_peer.load(path)["optimizer"]
    names = [f"net.{name}" for name in MODEL]
    assert [*optimizer["state"]] == names == optimizer["param_groups"][0]["params"]
    for name in MODEL:
        assert np.array_equal(array_of(optimizer["state"][f"net.{name}"]["exp_avg"]), moment(name)), name
