"""Files of a checkpoint with an index that are copies of one another, and would be read as other parts."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import write_ranks
from support.command_line import refused, run_here
from support.examples import few

import reshard_mpi
from reshard_mpi.errors import DisagreementError

Array = np.ndarray[Any, Any]
SPEC = 'mesh = { a = 4 }\n[[parameter]]\nmatch = "*"\nsplit = { 0 = ["a"] }\n'
NAMES = ("embed", "head", "norm")


def drawn() -> dict[str, Array]:
    random = np.random.default_rng(0)
    return {name: random.standard_normal((8, 8)).astype(np.float32) for name in NAMES}


def saved(folder: Path, tensors: Mapping[str, Array], form: str = "dcp") -> Path:
    """Return a folder of four files, without records of the run that has made it."""
    write_ranks({0: tensors}, folder / "whole", "safetensors")
    (folder / "spec.toml").write_text(SPEC)
    reshard_mpi.transform(folder / "whole", folder / "saved", to=form, dst_strategy=folder / "spec.toml")
    shutil.rmtree(folder / "saved" / ".reshard_mpi")
    (folder / "saved" / "reshard.json").unlink()
    return folder / "saved"


def copy(folder: Path, number: int, other: int) -> None:
    shutil.copy(folder / f"__{other}_0.distcp", folder / f"__{number}_0.distcp")


@pytest.mark.parametrize("jobs", few(1, ["1", "2"]))
@pytest.mark.parametrize(("number", "other"), few(1, [(0, 1), (3, 1), (2, 0)]))
def test_a_copy_of_another_ranks_file_is_refused(tmp_path: Path, number: int, other: int, jobs: str) -> None:
    source = saved(tmp_path, drawn())
    copy(source, number, other)
    said = refused("transform", source, tmp_path / "out", "--jobs", jobs)
    assert "two files of a checkpoint are copies of one" in said and "the index says" in said
    assert f"__{number}_0.distcp" in said and f"__{other}_0.distcp" in said
    assert not (tmp_path / "out").exists()
    with pytest.raises(DisagreementError, match="copies of one"):
        reshard_mpi.transform(source, tmp_path / "out", exclude="norm", dtype="fp64")
    assert run_here("audit", source, "--jobs", "1").code != 0
    assert run_here("transform", source, tmp_path / "out", "--replicas", "any").code == 0


@pytest.mark.parametrize("equal", NAMES)
def test_one_tensor_of_equal_parts_is_no_sign_of_copies(tmp_path: Path, equal: str) -> None:
    """Rows may be alike by nature, as decay rates of layers that are stacked."""
    tensors = drawn()
    tensors[equal] = np.tile(tensors[equal][:2], (4, 1))
    reshard_mpi.transform(saved(tmp_path, tensors), tmp_path / "out")
    assert dict(reshard_mpi.load_rank(0, tmp_path / "out"))[equal].tobytes() == tensors[equal].tobytes()


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_constants_are_no_sign_of_copies(tmp_path: Path, value: float) -> None:
    source = saved(tmp_path, {name: np.full((8, 8), value, np.float32) for name in NAMES})
    reshard_mpi.transform(source, tmp_path / "out")
    assert all((array == value).all() for array in dict(reshard_mpi.load_rank(0, tmp_path / "out")).values())


@pytest.mark.parametrize("kinds", [1, 40])
def test_tensors_before_those_that_copies_share_hide_none(tmp_path: Path, kinds: int) -> None:
    """As where the optimizer's folder comes behind the model's, or a stage behind another, with files of its own."""
    random = np.random.default_rng(1)
    shapes = [(8, 5 + number % kinds) for number in range(80)]
    others = {f"a.{number}": random.standard_normal(shape).astype(np.float32) for number, shape in enumerate(shapes)}
    (tmp_path / "model").mkdir()
    (tmp_path / "optimizer").mkdir()
    model, optimizer = saved(tmp_path / "model", others), saved(tmp_path / "optimizer", drawn())
    source = tmp_path / "both"
    source.mkdir()
    model.rename(source / "model")
    optimizer.rename(source / "optimizer")
    copy(source / "optimizer", 0, 1)
    said = refused("transform", source, tmp_path / "out")
    assert "are copies of one" in said and "optimizer" in said


def test_constants_hide_no_copies(tmp_path: Path) -> None:
    """Many an optimizer's state is all zeros yet, and comes before the weights."""
    zeros = {f"a.{number}": np.zeros((8, number + 1), np.float32) for number in range(6)}
    source = saved(tmp_path, zeros | drawn())
    copy(source, 0, 1)
    assert "are copies of one" in refused("transform", source, tmp_path / "out")
