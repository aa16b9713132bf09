"""Shards of two moments: told by counters wherever a training keeps them, and by the steps of parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import torch_peer
from support.command_line import refused
from support.examples import few
from support.torch_runs import stored

import reshard_mpi

HALVES = """
mesh = { a = 2 }
[[parameter]]
match = "model.*"
split = { 0 = ["a"] }
[[parameter]]
match = "*"
"""
STAGES = 'mesh = { a = 1 }\nstages = 2\n[[parameter]]\nmatch = "*"\n'


def saved(folder: Path, strategy: str, *contents: Any) -> tuple[Path, Path]:
    """Write a file for each rank; return their folder, and the strategy that they are cut by."""
    (folder / "spec.toml").write_text(strategy)
    for rank, content in enumerate(contents):
        (folder / "src" / f"rank_{rank}").mkdir(parents=True)
        torch_peer.save(folder / "src" / f"rank_{rank}" / "net.pt", content)
    return folder / "src", folder / "spec.toml"


def state(name: str, step: Any) -> dict[str, Any]:
    return {"state": {name: {"step": step, "exp_avg": stored(np.ones(3, np.float32))}}, "param_groups": []}


# What a training keeps besides its model, with a number of its own for each rank.
COUNTERS = {
    "at the root": lambda number: {"epoch": number},
    "of a trainer": lambda number: {"trainer": {"global_step": number}},
    "among arguments": lambda number: {"args": {"iteration": number}},
    "of a parameter": lambda number: {"optimizer": state("w", number)},
}


@pytest.mark.parametrize("kept", few(2, COUNTERS))
def test_plain_counters_of_two_moments_are_refused(tmp_path: Path, kept: str) -> None:
    contents = [
        {"model": {"w": stored(np.arange(3, dtype=np.float32) + number)}, **COUNTERS[kept](number)}
        for number in (100, 200)
    ]
    source, strategy = saved(tmp_path, HALVES, *contents)
    said = refused("transform", source, tmp_path / "out", "--src-strategy", strategy, "--to", "torch")
    assert "the shards are of different moments" in said and "= 100" in said and "= 200" in said


@pytest.mark.parametrize("form", few(1, [lambda step: step, lambda step: stored(np.float32(step).reshape(()))]))
@pytest.mark.parametrize(("steps", "is_told"), few(1, [((100, 200), True), ((100, 100), False)]))
def test_stages_whose_parameters_have_other_steps_are_warned_of(
    tmp_path: Path, form: Any, steps: tuple[int, int], is_told: bool
) -> None:
    contents = [
        {"model": {f"{stage}.w": stored(np.ones(3, np.float32))}, "optimizer": state(f"{stage}.w", form(step))}
        for stage, step in enumerate(steps)
    ]
    source, strategy = saved(tmp_path, STAGES, *contents)
    report = reshard_mpi.transform(source, tmp_path / "out", src_strategy=strategy, to="torch")
    assert any("they are of two saves" in warning for warning in report.warnings) == is_told
