"""What `inspect` shows of tensors: those that a pattern names, totals, and what is not alike in two checkpoints."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import torch_peer
from support.checkpoints import sample
from support.command_line import done, refused, run_here
from support.conversions import Conversion, four_targets
from support.safetensors_peer import write

import reshard_mpi
from reshard_mpi.testing.sample_tensors import ShardContents
from reshard_mpi.text import ranges


@pytest.fixture
def c(tmp_path: Path) -> Conversion:
    return four_targets(tmp_path)


def lines(*arguments: str) -> list[str]:
    finished = done("inspect", *arguments)
    return finished.out.splitlines()


def file_of(folder: Path, name: str, **tensors: np.ndarray) -> Path:
    path = folder / f"{name}.safetensors"
    write(path, ShardContents.of(sample(key.replace("__", "."), array) for key, array in tensors.items()))
    return path


LAYERS = {f"layers__{layer}__{kind}": np.zeros((layer + 1, 4), "f4") for layer in (0, 1, 10) for kind in ("w", "b")}


def test_tensors_by_a_pattern_in_rank_folders(c: Conversion) -> None:
    c.done("transform", "--to", "hdf5")
    shown = lines(str(c.dst), "*w")
    assert shown[1:4] == [
        "  w  float32 [2, 4] of [8, 4]  32 B  ranks 0-3",
        "  moments.w  float32 [2, 4] of [8, 4]  32 B  ranks 0-3",
        "  total: 2 tensors in 8 parts, 256 B: 8 float32 (64 elements, 256 B)",
    ]
    shown = lines(str(c.dst), "w", "--rank", "0,2-3")
    assert shown[1] == "  w  float32 [2, 4] of [8, 4]  32 B  ranks 0,2-3"
    assert lines(str(c.dst), "--rank", "3")[:2] == [
        "checkpoint: 1 rank, hdf5, 100 B of tensors",
        f"  rank 3: 4 tensors, 100 B  {c.dst}/rank_3/checkpoint_3.h5",
    ]


@pytest.mark.parametrize("names", ["nothing*", "layers.[0", ""])
def test_a_pattern_that_nothing_matches(c: Conversion, names: str) -> None:
    for path in (c.src, c.src_strategy):
        finished = run_here("inspect", path, names)
        if not names:
            assert finished.code == 2 and "expected a path" in finished.err
            continue
        assert finished.code == 3 and f"got: {names}" in finished.err, finished
        assert f"what to do: reshard-mpi inspect {path} '*' lists all" in finished.err


def test_the_name_that_was_meant(tmp_path: Path) -> None:
    path = str(file_of(tmp_path, "a", **LAYERS))
    assert "like this; did you mean 'layers.10.w'?" in run_here("inspect", path, "layer.10.w").err
    with pytest.raises(reshard_mpi.SourceError, match="like this\n"):
        reshard_mpi.inspect(path, "x")


def test_patterns_and_ranks_of_what_has_none(c: Conversion) -> None:
    c.done()
    for arguments in (["reshard.json", "w"], ["reshard.json", "--rank", "0"], ["rank_0/checkpoint_0.ckpt", "--rank=0"]):
        assert "expected: a checkpoint" in refused("inspect", c.dst / arguments[0], *arguments[1:])
    assert "has no shard of this rank" in run_here("inspect", c.dst, "--rank", "0-4").err
    assert "--rank goes with one checkpoint" in refused("inspect", c.src, c.dst, "--rank", "0", code=2)


def test_a_strategy_by_a_pattern(c: Conversion) -> None:
    shown = lines(str(c.src_strategy), "?")
    assert [line.split("  mesh ")[0] for line in shown[1:]] == ["  w", "  b  whole"]
    assert len(lines(str(c.src_strategy), "b")) == 2


def test_the_rule_that_places_a_name(tmp_path: Path) -> None:
    spec = tmp_path / "spec.toml"
    rules = "".join(f'[[parameter]]\nmatch = "{glob}"\n' for glob in ("a.*", "*.w", "*"))
    spec.write_text(f"mesh = {{ dp = 2 }}\n{rules}")
    for name, shown in (("a.w", ["a.*"]), ("b.w", ["*.w"]), ("b", ["*"]), ("*.w", ["*.w"]), ("?.?", ["a.*", "*.w"])):
        assert [line.split()[0] for line in lines(str(spec), name)[2:]] == shown


def test_what_is_not_alike_in_two_files(tmp_path: Path) -> None:
    first = file_of(tmp_path, "a", **LAYERS, only=np.zeros(2, "f4"), cast=np.zeros(3, "f4"))
    second = file_of(tmp_path, "b", **{**LAYERS, "layers__1__w": np.zeros((4, 2), "f4")}, cast=np.zeros(3, "f2"))
    assert lines(str(first), str(second)) == [
        f"--- {first}  safetensors, 1 rank, 8 tensors",
        f"+++ {second}  safetensors, 1 rank, 7 tensors",
        "- cast  float32 [3]",
        "+ cast  float16 [3]",
        "- layers.1.w  float32 [2, 4]",
        "+ layers.1.w  float32 [4, 2]",
        "- only  float32 [2]",
        "8 tensors: 3 not alike, 5 alike in type and shape",
    ]
    facts = json.loads(run_here("inspect", "--json", str(second), str(first)).out)
    assert facts["kind"] == "comparison" and facts["alike"] == 5 and facts["untold"] == 0
    assert [difference["name"] for difference in facts["differences"]] == ["cast", "layers.1.w", "only"]
    assert facts["differences"][2]["first"] is None


def test_shapes_that_no_file_tells_are_not_said_to_be_alike(c: Conversion) -> None:
    c.done()
    hdf5 = c.dst.parent / "hdf5"
    arguments = c.arguments("transform", "--to", "hdf5")
    arguments[2] = str(hdf5)
    done(*arguments)
    assert lines(str(c.src), str(c.dst))[2:] == [
        "4 tensors: 1 alike in type and shape, 3 alike in type, as far as shards tell",
        "  not all files tell the shapes of whole tensors; reshard-mpi diff compares them, by --src-strategy and"
        " --dst-strategy",
    ]
    assert lines(str(c.dst), str(c.dst))[2:] == ["4 tensors: 4 alike in type and shape"]
    assert lines(str(hdf5), str(c.dst))[2].startswith("4 tensors: 4 alike in type, as far")
    assert lines(str(hdf5), str(hdf5 / "rank_0" / "checkpoint_0.h5"))[2:] == ["4 tensors: 4 alike in type and shape"]
    # One rank of several is not taken for all of them.
    assert lines(str(hdf5), str(c.dst / "rank_0"))[2].startswith("4 tensors: 4 alike in type, as far")


def test_only_checkpoints_are_compared(c: Conversion) -> None:
    assert "a strategy file" in refused("inspect", c.src, c.src_strategy)


@given(st.sets(st.integers(0, 40)))
def test_ranges_are_read_as_they_are_written(numbers: set[int]) -> None:
    from reshard_mpi.cli.arguments import parser

    if numbers:
        assert parser().parse_args(["inspect", "a", "--rank", ranges(sorted(numbers))]).rank == sorted(numbers)


# What one asks first, and values beside the tensors


def training(path: Path, step: int = 7) -> Path:
    """Write a file of torch with a model, an optimizer and settings; a name and a value are hostile."""

    def tensor(name: str, *shape: int, kind: str = "f4") -> torch_peer.Tensor:
        return torch_peer.tensor(sample(name, np.full(shape, step, kind)), name)

    model = {f"layers.{layer}.experts.{e}.w": tensor(f"{layer}{e}", 4, 2) for layer in (0, 1, 3) for e in (0, 1)}
    state = {0: {"exp_avg": tensor("m", 4, 2, kind="f8"), "step": tensor("s")}, 1: {"step": step}}
    content = {
        "model": model | {"head\x1b.weight": tensor("h", 3, 2)},
        "optimizer": {"state": state, "param_groups": [{"lr": 0.5, "betas": (0.9, math.inf), "params": [0]}]},
        "epoch": 2,
        "note": "\x1b[31m",
        "empty": {},
    }
    torch_peer.save(path, content)
    return path


def test_contents_come_first(tmp_path: Path) -> None:
    shown = lines(str(training(tmp_path / "a.pt")))
    assert shown[1:4] == [
        "  model: 54 parameters in 7 tensors, 216 B (float32)",
        "  optimizer: 9 elements in 2 tensors, 68 B (64 B float64, 4 B float32)",
        "  layers 0-1,3; experts 0-1; epoch 2; step 7",
    ]
    for line in ("  optimizer.param_groups.0.lr  0.5", '  optimizer.param_groups.0.betas.1  "Infinity"', "  epoch  2"):
        assert shown.count(line) == 1
    assert '  note  "\\u001b[31m"' in shown and not any("\x1b" in line or "nest" in line for line in shown)
    facts = reshard_mpi.inspect(tmp_path / "a.pt")
    assert facts["contents"] == {
        "parameters": 54,
        "whole": True,
        "model": {
            "tensors": 7,
            "elements": 54,
            "size_bytes": 216,
            "by_type": {"float32": {"tensors": 7, "elements": 54, "size_bytes": 216}},
        },
        "optimizer": {
            "tensors": 2,
            "elements": 9,
            "size_bytes": 68,
            "by_type": {
                "float64": {"tensors": 1, "elements": 8, "size_bytes": 64},
                "float32": {"tensors": 1, "elements": 1, "size_bytes": 4},
            },
        },
        "layers": [0, 1, 3],
        "experts": [0, 1],
        "steps": {"step": [7], "epoch": [2]},
    }
    assert facts["strings"] == {} and facts["values"] == {
        "optimizer.state.1.step": 7,
        "optimizer.param_groups.0.lr": 0.5,
        "optimizer.param_groups.0.betas.0": 0.9,
        "optimizer.param_groups.0.betas.1": "Infinity",
        "optimizer.param_groups.0.params.0": 0,
        "epoch": 2,
        "note": "\x1b[31m",
    }
    assert json.loads(run_here("inspect", tmp_path / "a.pt", "--json").out) == facts


def test_a_folder_in_pieces(tmp_path: Path) -> None:
    training(tmp_path / "a.pt")
    strategy = tmp_path / "two.toml"
    strategy.write_text('mesh = { a = 2 }\n[[parameter]]\nmatch = "model.layers.*"\nsplit = { 0 = ["a"] }\n')
    done("transform", tmp_path / "a.pt", tmp_path / "dcp", "--to", "dcp", "--dst-strategy", strategy)
    shown = lines(str(tmp_path / "dcp"))
    assert shown[0].startswith("checkpoint: 2 files, dcp, 284 B of tensors in 15 pieces")
    assert "  model: 54 parameters in 7 tensors, 216 B (float32)" in shown
    assert "  layers 0-1,3; experts 0-1; epoch 2; step 7" in shown
    assert reshard_mpi.inspect(tmp_path / "dcp", "model.layers.0.*")["shards"][0][0]["pieces"] == 4


def test_parts_of_which_files_do_not_tell_the_whole(c: Conversion) -> None:
    shown = lines(c.src)
    assert any(line.startswith("  model: ") and " elements in parts of 2 tensors, " in line for line in shown)
    facts = reshard_mpi.inspect(c.src)["contents"]
    assert facts["parameters"] is None and not facts["whole"] and facts["steps"] == {"global_step": [7]}
    shown = lines(str(next(Path(c.src).glob("rank_0/*"))))
    assert any(line.startswith("  model: ") and " elements in parts of 2 tensors, " in line for line in shown)


def test_several_globs(tmp_path: Path) -> None:
    path = str(training(tmp_path / "a.pt"))
    shown = lines(path, "model.layers.0.*", "*.lr", "*step")
    assert [line.split()[0] for line in shown[1:-1]] == [
        "model.layers.0.experts.0.w",
        "model.layers.0.experts.1.w",
        "optimizer.state.0.step",
        "optimizer.state.1.step",
        "optimizer.param_groups.0.lr",
    ]
    facts = reshard_mpi.inspect(path, ["*.w", "epoch"])
    assert facts["names"] == ["*.w", "epoch"] and facts["values"] == {"epoch": 2} and len(facts["tensors"]) == 6
    assert "no tensor has a name like this" in refused("inspect", path, "*.lr", "nothing*")
    stats = done("inspect", path, "*.experts.0.w", "*.exp_avg", "--stats").out.splitlines()
    assert [line.split()[0] for line in stats] == [
        *(f"model.layers.{n}.experts.0.w" for n in (0, 1, 3)),
        "optimizer.state.0.exp_avg",
    ]
    assert "no tensor has a name like this" in refused("inspect", path, "*.w", "x*", "--stats")


def test_long_lists_of_values_are_cut(tmp_path: Path) -> None:
    weights = torch_peer.tensor(sample("w", np.ones(2, "f4")), "0")
    torch_peer.save(tmp_path / "a.pt", {"w": weights, "args": {f"key{number}": number for number in range(40)}})
    shown = lines(str(tmp_path / "a.pt"))
    assert "  args.key29  29" in shown and "  args.key30  30" not in shown
    assert "  10 more values beside the tensors: --json has all, GLOB chooses some" in shown
    assert "  args.key39  39" in lines(str(tmp_path / "a.pt"), "*key39")
