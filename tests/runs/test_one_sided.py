"""A warning where a map puts tensors behind each other and a rank has some of them, and not a part of each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import write_shard
from support.examples import few

import reshard_mpi

HALVES = "gate.{l} [f h], up.{l} [f h] <=> both.{l} [(f + f) h]"
TURNS = "gate.{l} [(t f) h], up.{l} [(t f) h] <=> both.{l} [(t (f + f)) h]"
EXPERTS = "gate.{l} [f h], up.{l} [f h] <=> both [l (f + f) h]"
TWO = '[mesh]\nrank = 2\n[[parameter]]\nmatch = "*"\nsplit = { 0 = ["rank"] }\n'


def warned(folder: Path, equation: str, *, to: str = "safetensors", back: bool = True) -> list[bool]:
    """Tell whether there is a warning when the target is cut in two, and when that is a source."""
    folder.mkdir(exist_ok=True)
    model = {f"{part}.{layer}": np.full((4, 3), layer, np.float32) for part in ("gate", "up") for layer in range(2)}
    write_shard(model, folder / "model.safetensors")
    (folder / "two.toml").write_text(TWO)
    axes = "[axes]\nt = 2\n" if "(t" in equation else ""
    (folder / "map.toml").write_text(f'{axes}[[map]]\neq = "{equation}"\n')
    reports = [
        reshard_mpi.transform(
            folder / "model.safetensors", folder / "ranks", None, folder / "two.toml", map=folder / "map.toml", to=to
        )
    ]
    if back:
        source = {} if to == "dcp" else {"src_strategy": folder / "two.toml"}
        reports.append(reshard_mpi.transform(folder / "ranks", folder / "back", map=folder / "map.toml", **source))
    return [any("several tensors behind each other" in text for text in report.warnings) for report in reports]


def test_halves_of_several_tensors(tmp_path: Path) -> None:
    assert warned(tmp_path, HALVES) == [True, True]


@pytest.mark.parametrize("equation", few(1, [TURNS, EXPERTS]), ids=["a part of each", "some experts"])
def test_ranks_that_have_a_part_of_each(tmp_path: Path, equation: str) -> None:
    assert warned(tmp_path, equation) == [False, False]


def test_pieces_of_a_distributed_checkpoint_are_no_ranks(tmp_path: Path) -> None:
    assert warned(tmp_path, HALVES, to="dcp") == [False, False]


def test_both_sides_are_named(tmp_path: Path) -> None:
    warned(tmp_path, HALVES, back=False)
    plan = reshard_mpi.plan(tmp_path / "model.safetensors", None, tmp_path / "two.toml", map=tmp_path / "map.toml")
    (text,) = plan.targets[1].warnings
    assert "both.0, both.1" in text and "strategy of the target" in text
    plan = reshard_mpi.plan(tmp_path / "ranks", tmp_path / "two.toml", map=tmp_path / "map.toml")
    assert "strategy of the source" in plan.targets[0].warnings[0]
