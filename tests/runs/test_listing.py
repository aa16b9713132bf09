"""`plan -v` lists every tensor of the targets with its whole shape, and `plan` shows what rules make of some."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import write_ranks
from support.command_line import done, run_apart, run_here
from support.examples import few
from support.launch import find_mpi

WHOLE = {"a.w": (10, 4), "b.w": (6, 3), "bias": (10,), "step": ()}


def spec(ranks: int, rules: str = "") -> str:
    last = '[[parameter]]\nmatch = "*"\nsplit = { 0 = ["x"] }\nsizes = "ceil"\n'
    return f"mesh = {{ x = {ranks} }}\n{rules}{last}"


def pieces(ranks: int, rank: int) -> dict[str, np.ndarray]:
    made = {}
    for name, shape in WHOLE.items():
        whole = np.ones(shape, np.float32)
        height = -(-shape[0] // ranks) if shape else 0
        made[name] = whole[rank * height : (rank + 1) * height] if shape else whole
    return made


def write(folder: Path, form: str, ranks: int = 4) -> list[str]:
    """Write a checkpoint and specs; return the arguments of a plan of it."""
    write_ranks({rank: pieces(ranks, rank) for rank in range(ranks)}, folder / "src", form)
    (folder / "src.toml").write_text(spec(ranks))
    (folder / "dst.toml").write_text(spec(3))
    return ["plan", f"{folder}/src", f"{folder}/dst", "--src-strategy", f"{folder}/src.toml"]


RANK_1 = ["a.w float32 [10, 4], on rank 1 [4, 4]", "b.w float32 [6, 3], on rank 1 [2, 3]"]
RANK_1 += ["bias float32 [10], on rank 1 [4]", "step float32 []"]
WHOLES = ["a.w float32 [10, 4]", "b.w float32 [6, 3]", "bias float32 [10]", "step float32 []"]


def listed(out: str) -> list[str]:
    return sorted(line for line in out.splitlines() if " float32 [" in line)


@pytest.mark.parametrize("form", few(1, ["ckpt", "safetensors", "hdf5"]))
def test_whole_shapes_and_the_pieces_of_the_rank_that_is_asked_for(tmp_path: Path, form: str) -> None:
    arguments = write(tmp_path, form)
    target = ["--dst-strategy", f"{tmp_path}/dst.toml"]
    assert listed(done(*arguments, *target, "--rank", "1", "-v").out) == RANK_1
    finished = done(*arguments, *target, "--rank", "2,1", "-v", "--to", "dcp")
    assert [line.partition(", on")[0] for line in listed(finished.out)] == WHOLES, finished
    assert listed(run_here(*arguments, "-v").out) == WHOLES
    assert listed(run_here(*arguments, *target).out) == []


@pytest.mark.parametrize("to", few(1, ["hdf5", "dcp", "hf", "torch"]))
def test_every_form_of_source(tmp_path: Path, to: str) -> None:
    """Those that say themselves how they are cut, and those that are whole; a Hugging Face folder in several files."""
    arguments = write(tmp_path, "ckpt")
    cut = ["--dst-strategy", f"{tmp_path}/dst.toml"] if to in ("hdf5", "dcp") else []
    filled = ["--max-shard-size", "100"] if to == "hf" else []
    done("transform", *arguments[1:2], f"{tmp_path}/made", *arguments[3:], *cut, *filled, "--to", to)
    for options, expected in (([], WHOLES), (["--dst-strategy", f"{tmp_path}/dst.toml", "--rank", "1"], RANK_1)):
        finished = done("plan", f"{tmp_path}/made", f"{tmp_path}/dst", *options, "-v", "--to", "ckpt")
        assert listed(finished.out) == expected, finished
    assert listed(done(*arguments, "--to", "hf", "--max-shard-size", "100", "-v").out) == WHOLES


@pytest.mark.slow
def test_processes_list_every_tensor_once(tmp_path: Path) -> None:
    mpi = find_mpi("mpich")
    if mpi is None:
        pytest.skip("mpich is not installed")
    arguments = write(tmp_path, "ckpt")
    finished = run_apart(*arguments, "--dst-strategy", f"{tmp_path}/dst.toml", "--to", "dcp", "-v", mpi=mpi)
    assert finished.code == 0, finished
    assert [line.partition(", on")[0] for line in listed(finished.out)] == WHOLES


def test_whole_shapes_by_ceiling_division_are_shown_before_anything_is_written(tmp_path: Path) -> None:
    arguments = write(tmp_path, "ckpt")
    (tmp_path / "src.toml").write_text(spec(4, '[[parameter]]\nmatch = "a.*"\nsplit = { 0 = ["x"] }\nsizes = "ceil"\n'))
    assert "by rule 'a.*', 'a.w' of shape [3, 4] on a rank is [10, 4] as a whole" in done(*arguments).err


def test_of_many_rules_a_few_are_shown(tmp_path: Path) -> None:
    """Those of the largest tensors, in the order of the rules; the others are counted, and listed by -v."""
    tensors = {f"t{number}": np.full((2, 8 - number), number, np.float32) for number in range(8)}
    write_ranks(dict.fromkeys(range(2), tensors), tmp_path / "src", "ckpt")
    rules = "".join(f'[[parameter]]\nmatch = "t{number}"\nsplit = {{ 0 = ["x"] }}\n' for number in reversed(range(8)))
    (tmp_path / "src.toml").write_text("mesh = { x = 2 }\n" + rules)
    arguments = ["plan", f"{tmp_path}/src", f"{tmp_path}/dst", "--src-strategy", f"{tmp_path}/src.toml"]
    arguments += ["--replicas", "any"]
    brief = [line for line in run_here(*arguments).err.splitlines() if "rule" in line and "two ranks" not in line]
    assert [line.split("'")[1] for line in brief[:-1]] == ["t4", "t3", "t2", "t1", "t0"]
    assert brief[-1] == "note: and 3 more rules that cut (plan -v lists all)"
    assert run_here(*arguments, "-v").err.count("note: by rule") == 8
