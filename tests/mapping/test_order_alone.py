"""Tensors that are told by the order of parameters alone: lists of averages, and state that a wrapped optimizer has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import torch_peer
from support.examples import few
from support.torch_runs import stored, transformed

import reshard_mpi
from reshard_mpi.errors import MapError

KINDS = pytest.mark.parametrize("kind", few(2, ["a list", "lists of groups", "numbers", "texts", "beside state"]))
TURNED = "model.{p*}.weight [o i] <=> model.{p*}.kernel [i o]"


def tensor(*shape: int, value: float = 0) -> Any:
    return stored(np.full(shape, value, np.float32))


def in_order(kind: str, value: float = 0) -> tuple[dict[str, Any], str]:
    """Return what is kept of two layers' weights and biases in their order, and what the names of it begin with."""
    own = [tensor(*shape, value=value) for shape in ((2, 2), (2,), (2, 2), (2,))]
    if kind == "a list":
        return {"ema": {"decay": 0.9, "shadow_params": own, "collected_params": None}}, "ema.shadow_params"
    if kind == "lists of groups":
        return {"fp32_from_fp16": [own[:2], own[2:]]}, "fp32_from_fp16"
    numbered = {str(place) if kind == "texts" else place: {"slow": each} for place, each in enumerate(own)}
    state = {"state": {}} if kind == "beside state" else {}
    return {"optim": {"slow_state": numbered, **state, "param_groups": [{"params": [0, 1, 2, 3]}]}}, "optim.slow_state"


def saved(path: Path, kind: str, *names: str, value: float = 0) -> Path:
    shapes = {name: (2,) if name.endswith("bias") else (2, 2) for name in names}
    model = {name: tensor(*shape, value=value) for name, shape in shapes.items()}
    torch_peer.save(path, {"model": model, **in_order(kind, value)[0]})
    return path


@pytest.fixture
def source(tmp_path: Path, kind: str) -> Path:
    return saved(tmp_path / "x.pt", kind, "a.weight", "a.bias", "b.weight", "b.bias", value=1)


@KINDS
@pytest.mark.parametrize("equation", [TURNED, "model.a.weight [o i], model.b.weight [p i] <=> model.c [(o + p) i]"])
def test_what_would_stay_while_the_parameters_go_is_refused(
    source: Path, kind: str, equation: str, tmp_path: Path
) -> None:
    with pytest.raises(MapError, match="told by the order of parameters alone would stay") as caught:
        reshard_mpi.transform(source, tmp_path / "dst", map=equation)
    assert f"{in_order(kind)[1]}." in str(caught.value)


@KINDS
def test_parameters_that_get_other_names_alone_keep_their_order(source: Path, kind: str, tmp_path: Path) -> None:
    assert len(transformed(source, tmp_path / "dst", map="model.{p*} <=> model.net.{p*}")["model"]) == 4


@KINDS
def test_what_equations_speak_of_or_is_left_out_is_not_refused(source: Path, kind: str, tmp_path: Path) -> None:
    begin = in_order(kind)[1]
    left = transformed(source, tmp_path / "out", map=TURNED, exclude=f"{begin}.*")
    assert {*left["model"]} == {"a.kernel", "a.bias", "b.kernel", "b.bias"}
    assert "shadow_params" not in left.get("ema", {}) and "fp32_from_fp16" not in left
    names = [name for name in reshard_mpi.inspect(source)["tensors"] if name.startswith(begin)]
    weights = [name for name in names if reshard_mpi.inspect(source)["tensors"][name]["shape"] == [2, 2]]
    equations = [TURNED, *(f"{name} [o i] <=> {name} [i o]" for name in weights)]
    text = "".join(f'[[map]]\neq = "{equation}"\n' for equation in equations)
    (tmp_path / "map.toml").write_text(text)
    reshard_mpi.transform(source, tmp_path / "dst", map=tmp_path / "map.toml", forward=True)


@pytest.mark.parametrize("kind", few(1, ["a list", "numbers"]))
def test_another_order_of_the_parameters_is_refused(source: Path, kind: str, tmp_path: Path) -> None:
    names = ("a.weight", "a.bias", "b.weight", "b.bias")
    same = saved(tmp_path / "same.pt", kind, *(f"net.{name}" for name in names))
    other = saved(tmp_path / "other.pt", kind, *(f"net.{name}" for name in (*names[2:], *names[:2])))
    equation = "model.{p*} <=> model.net.{p*}"
    reshard_mpi.transform(source, tmp_path / "dst", map=equation, like=same)
    with pytest.raises(MapError, match="told by the order of parameters alone would stay"):
        reshard_mpi.transform(source, tmp_path / "dst2", map=equation, like=other)


def test_a_list_of_other_shapes_stays(tmp_path: Path) -> None:
    tensors = {"a.weight": tensor(2, 2), "a.bias": tensor(2)}
    shapes: tuple[tuple[int, ...], ...] = ((2,), (), (2, 2), (2, 2))
    others = [
        tensor(*shape, value=place + 1) for place, shape in enumerate(shapes)
    ]  # more of a shape than there are parameters
    torch_peer.save(tmp_path / "x.pt", {"model": tensors, "means": others, "bias_like": [tensor(2)]})
    reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", map=TURNED)
    made = reshard_mpi.load_rank(0, tmp_path / "dst")
    of_source = reshard_mpi.load_rank(0, tmp_path / "x.pt")
    assert all(np.array_equal(made[f"means.{place}"], of_source[f"means.{place}"]) for place in range(len(shapes)))
