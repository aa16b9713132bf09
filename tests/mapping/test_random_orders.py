"""Random trainings through random chains of formats, ranks and stages: keys in their order, state with its parameter.

Parameters have few shapes, so most swaps would be of equal ones. The oracle is what was saved, by keys: it knows
nothing of files.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import torch_peer
from support.examples import many
from support.torch_runs import transformed

import reshard_mpi
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.testing.sample_tensors import SampleTensor

FORMATS = st.sampled_from(["ckpt", "hdf5", "safetensors", "torch", "dcp"])
SHAPES = st.sampled_from([(2, 3), (2, 3), (4,), ()])
NAMES = [f"layers.{layer}.{kind}" for layer in (0, 1, 2, 10) for kind in ("weight", "bias", "scale")] + [
    "z",
    "a",
    "m.a",
]
MAP = "[[map]]\neq = 'net.{p*} <=> net.body.{p*}'\n"


class Part(NamedTuple):
    """A tensor of a training: its path, and its element type and shape."""

    path: tuple[str | int, ...]
    dtype: str
    shape: tuple[int, ...]

    @property
    def sample(self) -> SampleTensor:
        return SampleTensor.random(".".join(map(str, self.path)), BY_NAME[self.dtype], self.shape)


class Training(NamedTuple):
    """What is saved: a dictionary of values and `Part`s, and the names of its parameters by number."""

    root: dict[str, Any]
    parameters: list[str]


@st.composite
def trainings(draw: st.DrawFn) -> Training:
    names = draw(st.lists(st.sampled_from(NAMES), min_size=2, max_size=8, unique=True))
    types = st.sampled_from(["float32", "float32", "bfloat16", "float16", "float64"])
    model: dict[str, Any] = {}
    for name in names:
        model[name] = Part(("net", name), draw(types), draw(SHAPES))
        if draw(st.integers(0, 4)) == 0:
            model[f"{name}_norm.num_batches_tracked"] = Part(("net", f"{name}_norm.num_batches_tracked"), "int64", ())
        if draw(st.integers(0, 6)) == 0:
            model[f"note of {name}"] = draw(st.integers())
    keys = draw(st.permutations(["step", "exp_avg", "exp_avg_sq", "note"]))
    state: dict[int, Any] = {}
    for number, name in enumerate(names):
        shapes = {"step": (), "exp_avg": model[name].shape, "exp_avg_sq": model[name].shape}
        state[number] = {
            key: Part(("optimizer", "state", number, key), "float32", shapes[key]) if key in shapes else number
            for key in keys
        }
    groups = [{"lr": 0.5, "params": [*range(len(names))]}]
    parts: dict[str, Any] = {
        "net": model,
        "optimizer": {"state": state, "param_groups": groups},
        "epoch": 7,
        "random": Part(("random",), "uint8", (5,)),
        "last": Part(("last",), "bool", ()),
    }
    order = draw(st.permutations([*parts]))
    return Training({key: parts[key] for key in order}, names)


def parts_of(value: Any) -> Iterator[Part]:
    if isinstance(value, Part):
        yield value
    for part in value.values() if isinstance(value, dict) else ():
        yield from parts_of(part)


def saved(value: Any, keys: Iterator[int]) -> Any:
    """Return the same with tensors of torch."""
    if isinstance(value, dict):
        return {key: saved(part, keys) for key, part in value.items()}
    return torch_peer.tensor(value.sample, str(next(keys))) if isinstance(value, Part) else value


def shown(value: Any) -> Any:
    """Return what was saved, or what was loaded, in a form in which the order of keys counts."""
    if isinstance(value, dict):
        return [(key, shown(part)) for key, part in value.items()]
    sample = value.sample if isinstance(value, Part) else value
    sample = torch_peer.sample_of("", value) if isinstance(value, torch_peer.Tensor) else sample
    return (sample.dtype.name, sample.shape, sample.content) if isinstance(sample, SampleTensor) else value


def strategy(draw: Any, training: Training, path: Path) -> Path | None:
    """Write a strategy of one rank, of replicas that cut some tensors, or of stages that tensors are in by chance."""
    kind = draw(st.sampled_from(["one", "ranks", "stages", "turns"]))
    if kind == "one":
        return None
    if kind == "ranks":
        cuts = draw(st.lists(st.sampled_from([*parts_of(training.root)]), max_size=4, unique=True))
        rules = [
            (".".join(map(str, part.path)), "split = { 0 = ['d'] }") for part in cuts if part.shape[:1] in ((2,), (4,))
        ]
        text = "mesh = { d = 2 }\n"
    else:
        stages = draw(st.integers(2, 3))
        text = f"mesh = {{ d = {draw(st.integers(1, 2))} }}\nstages = {stages}\n"
        rules = []
        for at, part in enumerate(parts_of(training.root)):
            stage = at % stages if kind == "turns" else draw(st.integers(0, stages - 1))
            rules.append((".".join(map(str, part.path)), f"stage = {stage}"))
    rules.append(("*", "stage = 0" if kind != "ranks" else ""))
    path.write_text(text + "".join(f"[[parameter]]\nmatch = '{glob}'\n{rest}\n" for glob, rest in rules))
    return path


@pytest.mark.slow
@many(15)
@given(training=trainings(), data=st.data(), has_map=st.booleans())
def test_every_key_stays_in_its_place(training: Training, data: st.DataObject, has_map: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path, before = folder / "x.pt", None
        torch_peer.save(path, saved(training.root, iter(range(1000))))
        for number in range(data.draw(st.integers(1, 3), "formats")):
            to = data.draw(FORMATS)
            cut = strategy(data.draw, training, folder / f"{number}.toml")
            reshard_mpi.transform(path, folder / str(number), before, cut, to=to)
            path, before = folder / str(number), None if to == "dcp" else cut
        options = {}
        if has_map:
            (folder / "map.toml").write_text(MAP)
            options = {"map": folder / "map.toml", "forward": True}
        loaded = transformed(path, folder / "back", before, to="torch", **options)
    assert shown(loaded if not has_map else unmapped(loaded, training)) == shown(training.root)


def unmapped(loaded: dict[str, Any], training: Training) -> dict[str, Any]:
    """Return what the map has made, in the names from before; whose state each is, its new name says.

    Values among tensors are where the map has put them, which is no matter of order.
    """
    number = {f"body.{name}": number for number, name in enumerate(training.parameters)}
    optimizer, model = loaded["optimizer"], {name.removeprefix("body."): part for name, part in loaded["net"].items()}
    assert [*optimizer["state"]] == [*number] == optimizer["param_groups"][0]["params"]
    tensors = [key for key, part in model.items() if isinstance(part, torch_peer.Tensor)]
    assert tensors == [key for key, part in training.root["net"].items() if isinstance(part, Part)]
    return {
        **loaded,
        "net": {key: model[key] for key in training.root["net"]},
        "optimizer": {
            "state": {number[name]: state for name, state in optimizer["state"].items()},
            "param_groups": [{**optimizer["param_groups"][0], "params": [*number.values()]}],
        },
    }
