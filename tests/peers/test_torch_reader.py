"""Checkpoints of every format in a running torch: four processes load them through `Reader`, one through `load`."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.checkpoints import write_ranks
from support.cut_checkpoints import Cut
from support.torch_processes import run_processes

import reshard_mpi

torch = pytest.importorskip("torch")
import torch.distributed.checkpoint as dcp  # noqa: E402

import reshard_mpi.torch  # noqa: E402
from reshard_mpi.errors import ReshardError, ShardError, UsageError  # noqa: E402

# All cases are loaded by the same processes, of which each takes seconds to start.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.xdist_group("reader"),
]

Array = np.ndarray[Any, Any]
RANKS = 4
FORMS = ("ckpt", "hdf5", "safetensors", "torch", "hf", "dcp")
LAYOUTS = ("plain", "turned", "fsdp", "columns", "square", "hsdp", "drawn")
DTYPES = (np.float32, np.float16, np.int64, np.uint8, np.bool_, ml_dtypes.bfloat16)
MESH = {"m": 2, "n": 3}
TURNED = "[[map]]\neq = '{p*}.w [a b] <=> {p*}.kernel [b a]'\noptional = true\n"
CHANGES = (
    "a missing tensor",
    "another shape",
    "another type",
    "a missing value",
    "no value",
    "one rank lacks it",
    "another cut",
)


def drawn_tensors(seed: int, form: str) -> dict[str, Array]:
    """Return tensors of all sorts; lengths that four processes share evenly, unevenly, or not at all."""
    draw = random.Random(seed)
    tensors = {}
    dtypes = DTYPES if form in ("ckpt", "hdf5") else (*DTYPES, ml_dtypes.float8_e4m3fn)
    for number, dtype in enumerate(dtypes):
        shape = [draw.choice([1, 6, 7, 12, 13, 24]) for _ in range(draw.choice([1, 2, 2, 3]))]
        noise = np.random.default_rng(seed + number).integers(0, 100, shape)
        tensors[f"layers.{number}.w"] = noise.astype(dtype)
    return {**tensors, "step": np.array(draw.randrange(9), np.int64)}


def written(folder: Path, tensors: dict[str, Array], form: str, seed: int = 0) -> tuple[str, dict[str, Any]]:
    """Write tensors, cut in a way that is drawn; return the checkpoint, and the options that it is opened with."""
    draw = random.Random(seed)
    axes: dict[str, dict[int, str]] = {}
    for name, array in tensors.items():
        axes[name] = {}
        for axis, size in MESH.items():
            able = [dim for dim in range(array.ndim) if array.shape[dim] % size == 0 and dim not in axes[name]]
            if able and draw.random() < 0.8:
                axes[name][draw.choice(able)] = axis
    cuts, strategy = Cut(MESH, axes), folder / "strategy.toml"
    folder.mkdir()
    strategy.write_text(cuts.text)
    if form in ("ckpt", "hdf5", "safetensors"):
        write_ranks(cuts.ranks(tensors), folder / "src", form)
    else:
        write_ranks({0: tensors}, folder / "one", "safetensors")
        reshard_mpi.transform(folder / "one", folder / "src", None, None if form == "hf" else strategy, to=form)
    return str(folder / "src"), {} if form in ("hf", "dcp") else {"src_strategy": str(strategy)}


def as_torch(array: Array) -> Any:
    """Return a tensor of torch with the bits of an array, by bytes alone."""
    content = torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8)
    return content.view(getattr(torch, array.dtype.name)).reshape(array.shape)


def cases(folder: Path) -> list[dict[str, Any]]:
    """Write the checkpoints of all cases."""
    every: list[dict[str, Any]] = []

    def add(name: str, work: str, tensors: dict[str, Array], source: str, options: dict[str, Any], **more: Any) -> None:
        whole = folder / f"{len(every)}.pt"
        torch.save({each: as_torch(array) for each, array in tensors.items()}, whole)
        every.append({"name": name, "work": work, "whole": str(whole), "source": source, "options": options} | more)

    for seed, form in enumerate(FORMS):
        tensors = drawn_tensors(seed, form)
        source, options = written(folder / form, tensors, form, seed)
        for layout in LAYOUTS:
            add(f"{form} {layout}", "tensors", tensors, source, options, layout=layout)
        weights = {
            "0.weight": np.arange(6, dtype=np.float32) + 0.5,
            "0.bias": np.arange(6, dtype=np.float32) - 5,
            "1.weight": np.random.default_rng(seed).standard_normal((10, 6), np.float32),
            "1.bias": np.arange(10, dtype=np.float32),
            "2.weight": np.random.default_rng(seed).standard_normal((7, 10), np.float32),
            "2.bias": np.arange(7, dtype=np.float32),
        }
        source, options = written(folder / f"{form} weights", weights, form, seed)
        for layout in ("fsdp", "hsdp", "strided"):
            add(f"{form} weights {layout}", "weights", weights, source, options, layout=layout)
    wide = {"a.w": np.random.default_rng(1).standard_normal((600, 2400), np.float32)}
    (folder / "map.toml").write_text(TURNED)
    turned = {"a.kernel": wide["a.w"].T.astype(np.float64)}
    for form in ("ckpt", "dcp"):
        source, options = written(folder / f"{form} wide", wide, form)
        for layout in ("fsdp", "square"):
            add(f"{form} bytes {layout}", "tensors", wide, source, options, layout=layout, bound=1.01)
        mapped = options | {"map": str(folder / "map.toml"), "forward": True, "dtype": "fp64"}
        add(f"{form} mapped", "tensors", turned, source, mapped, layout="square")
    for form in ("dcp", "torch", "safetensors", "hdf5", "numbered"):
        for layout in ("fsdp", "hsdp", "strided"):
            name = f"training {form} {layout}"
            every.append(
                {"name": name, "work": "training", "source": str(folder / name), "form": form, "layout": layout}
            )
    noise = {"layers.w": np.random.default_rng(1).standard_normal((64, 64), np.float32), "step": np.array(3)}
    cuts = {
        change: Cut({"m": 2}, {"layers.w": {} if change == "another cut" else {0: "m"}, "step": {}})
        for change in CHANGES
    }
    write_ranks(cuts[CHANGES[0]].ranks(noise), folder / "refused", "ckpt")
    for change in CHANGES:
        whole = {**noise, "layers.w": noise["layers.w"][:32]} if change == "another cut" else noise
        strategy = folder / f"{change}.toml"
        strategy.write_text(cuts[change].text)
        add(change, "refused", whole, str(folder / "refused"), {"src_strategy": str(strategy)}, change=change)
    return every


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What each of four processes has found, by the names of cases."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "cases.json").write_text(json.dumps(cases(folder)))
    run_processes("reader_ranks.py", RANKS, folder / "meeting", folder, seconds=400)
    each = [json.loads((folder / f"said_{rank}.json").read_text()) for rank in range(RANKS)]
    return {name: [of_rank[name] for of_rank in each] for name in each[0]}


def assert_fine(words: list[str]) -> None:
    assert words == [""] * RANKS, "\n".join(words)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
def test_tensors_of_every_format_in_every_mesh(said: dict[str, list[str]], form: str, layout: str) -> None:
    """Compared with what `full_tensor` gathers; the memory stays the same, and is filled whatever its strides."""
    assert_fine(said[f"{form} {layout}"])


@pytest.mark.parametrize("layout", ["fsdp", "hsdp", "strided"])
@pytest.mark.parametrize("form", FORMS)
def test_weights_of_a_model(said: dict[str, list[str]], form: str, layout: str) -> None:
    """The model is sharded by `fully_shard`, over a line, over a square with copies, and after tensor parallelism."""
    assert_fine(said[f"{form} weights {layout}"])


@pytest.mark.parametrize("layout", ["fsdp", "hsdp", "strided"])
@pytest.mark.parametrize("form", ["dcp", "torch", "safetensors", "hdf5", "numbered"])
def test_a_training_goes_on(said: dict[str, list[str]], form: str, layout: str) -> None:
    """With AdamW's state by parameters' names, steps and settings; its losses are those of the one that was saved."""
    assert_fine(said[f"training {form} {layout}"])


@pytest.mark.parametrize("layout", ["fsdp", "square"])
@pytest.mark.parametrize("form", ["ckpt", "dcp"])
def test_only_bytes_of_local_slices_are_read(said: dict[str, list[str]], form: str, layout: str) -> None:
    """At most 1 % more."""
    assert_fine(said[f"{form} bytes {layout}"])


@pytest.mark.parametrize("form", ["ckpt", "dcp"])
def test_with_a_map_and_another_type(said: dict[str, list[str]], form: str) -> None:
    assert_fine(said[f"{form} mapped"])


@pytest.mark.parametrize(
    "change, kind, words, ranks",
    [
        ("a missing tensor", "RuntimeError", ["another"], range(4)),
        ("another shape", "ValueError", ["layers.w", "[3, 64, 64]", "[64, 64]"], range(4)),
        ("another type", "UsageError", ["layers.w", "torch.float32", "torch.float64", "dtype="], range(4)),
        ("a missing value", "RuntimeError", ["epoch"], range(4)),
        ("no value", "ValueError", ["step"], range(4)),
        ("one rank lacks it", "SourceError", ["refused_of_others"], [2]),
        ("another cut", "StrategyError", ["layers.w"], [0]),
    ],
)
def test_what_is_wrong_is_the_same_error_on_every_rank(
    said: dict[str, list[str]], change: str, kind: str, words: list[str], ranks: Any
) -> None:
    """None hangs: the errors of all ranks are told to all. Only the coordinator looks whether a strategy fits."""
    first, *others = said[change]
    assert others == [first] * (RANKS - 1)
    errors = json.loads(first)
    assert [*map(int, errors)] == [*ranks], first
    for text in errors.values():
        assert text.startswith(kind) and all(word in text for word in words), text


# One process


@pytest.fixture(params=FORMS)
def one(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[dict[str, Array], str, dict[str, Any]]:
    """A checkpoint: its tensors, its path, and the options to open it with."""
    tensors = drawn_tensors(20, request.param)
    return tensors, *written(tmp_path / "one", tensors, request.param)


def assert_same(found: dict[str, Any], tensors: dict[str, Array]) -> None:
    assert found.keys() == tensors.keys()
    for name, tensor in found.items():
        expected = as_torch(tensors[name])
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
        content = tensor.contiguous().flatten().view(torch.uint8)
        assert torch.equal(content, expected.flatten().view(torch.uint8)), name


def test_load(one: tuple[dict[str, Array], str, dict[str, Any]]) -> None:
    """The tensors have memory of their own: what is written to them is in no file."""
    tensors, source, options = one
    found = reshard_mpi.torch.load(source, **options)
    assert_same(found, tensors)
    for tensor in found.values():
        tensor.zero_()
    assert_same(reshard_mpi.torch.load(source, **options), tensors)


def test_tensors_that_are_filled_through_a_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those on another device are; here, complex numbers that torch keeps conjugated."""
    monkeypatch.setattr(reshard_mpi.torch, "_BUFFER_BYTES", 100)
    values = (np.arange(91) + 1j).astype(np.complex64).reshape(7, 13)
    write_ranks({0: {"w": values, "one": values[0, 0]}}, tmp_path / "src", "safetensors")
    state = {
        "w": torch.zeros(7, 13, dtype=torch.complex64).conj(),
        "one": torch.zeros((), dtype=torch.complex64).conj(),
    }
    dcp.load(state, storage_reader=reshard_mpi.torch.Reader(tmp_path / "src"), no_dist=True)
    assert np.array_equal(state["w"].resolve_conj().numpy(), values) and state["one"].item() == values[0, 0]


def test_names_of_values_are_those_of_torch(tmp_path: Path) -> None:
    """All but those of tuples that hold tensors."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    state = {
        "plain": [1, 2, "a"],
        "mixed": [torch.ones(2), {"x": torch.ones(1), "y": 2}, 5, [torch.ones(1), 6], [7, 8]],
        "deep": [[1, {"z": 3}], [4]],
        "numbers": {0: {"a": 1}, 1: {}},
        "empty": [],
        "none": None,
        "pair": (1, 2.5),
        "dotted.name": {"b.c": True},
    }
    torch.save({**state, "tuple": (1, torch.ones(1))}, tmp_path / "a.pt")
    flat, _ = flatten_state_dict(state)
    reader = reshard_mpi.torch.Reader(tmp_path / "a.pt")
    assert reader.read_metadata().state_dict_metadata.keys() == {*flat, "tuple.1"}
    values = {name: 0 for name, value in flat.items() if not isinstance(value, torch.Tensor)}
    dcp.load(values, storage_reader=reader, no_dist=True)
    assert values == {name: flat[name] for name in values}


def test_partial_loads_are_the_planners_matter(tmp_path: Path) -> None:
    write_ranks({0: {"w": np.ones(3, np.float32)}}, tmp_path / "src", "safetensors")
    state = {"w": torch.zeros(3), "v": torch.full((2,), 7.0)}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    reader = reshard_mpi.torch.Reader("nowhere")
    dcp.load(state, checkpoint_id=tmp_path / "src", storage_reader=reader, planner=planner, no_dist=True)
    assert state["w"].tolist() == [1, 1, 1] and state["v"].tolist() == [7, 7]


def test_a_planner_that_keeps_tensors_elsewhere(tmp_path: Path) -> None:
    """It may have what is read put into memory of its own, and convert it afterwards."""

    class Converting(dcp.DefaultLoadPlanner):
        def resolve_tensor(self, item: Any) -> Any:
            return torch.empty(super().resolve_tensor(item).shape)

        def commit_tensor(self, item: Any, tensor: Any) -> None:
            super().resolve_tensor(item).copy_(tensor)

    write_ranks({0: {"w": np.arange(3, dtype=np.float32)}}, tmp_path / "src", "safetensors")
    state = {"w": torch.zeros(3, dtype=torch.bfloat16)}
    dcp.load(state, storage_reader=reshard_mpi.torch.Reader(tmp_path / "src"), planner=Converting(), no_dist=True)
    assert state["w"].tolist() == [0, 1, 2]


def test_an_option_that_there_is_not(tmp_path: Path) -> None:
    for function in (reshard_mpi.torch.Reader, reshard_mpi.torch.load):
        with pytest.raises(TypeError, match="src_stratgy"):
            function(tmp_path, src_stratgy="a")


def test_a_reader_may_be_used_again_after_an_error(tmp_path: Path) -> None:
    write_ranks({0: {"w": np.ones(3, np.float32)}}, tmp_path / "src", "safetensors")
    reader = reshard_mpi.torch.Reader(tmp_path / "src")
    wrong, right = {"w": torch.zeros(3, dtype=torch.float64)}, {"w": torch.zeros(3)}
    with pytest.raises(dcp.api.CheckpointException) as error:
        dcp.load(wrong, storage_reader=reader, no_dist=True)
    assert isinstance(error.value.failures[0][0], UsageError)
    dcp.load(right, storage_reader=reader, no_dist=True)
    assert right["w"].tolist() == [1, 1, 1]
    (tmp_path / "src" / "rank_0" / "checkpoint_0.safetensors").write_bytes(b"")
    with pytest.raises(dcp.api.CheckpointException) as error:
        dcp.load(right, storage_reader=reader, no_dist=True)
    assert isinstance(error.value.failures[0][0], ShardError)


def test_torch_is_imported_by_its_module_alone() -> None:
    code = "import sys, reshard_mpi; reshard_mpi.open; assert not {'torch', 'mindspore'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ReshardError):
        reshard_mpi.torch.load(tmp_path / "nothing")
