"""dask: arrays of an open checkpoint, and parts of a run, in processes of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import write_ranks
from support.command_line import done
from support.conversions import shards
from support.pages import GUIDE, block_run_by

import reshard_mpi

dask = pytest.importorskip("dask")
da = pytest.importorskip("dask.array")

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("form", ["ckpt", "hdf5", "safetensors"])
def test_norms_of_all_tensors(tmp_path: Path, form: str) -> None:
    tensors = {f"layers.{number}.w": np.random.default_rng(number).random((60, 40)) for number in range(5)}
    halves = {rank: {name: array[30 * rank :][:30] for name, array in tensors.items()} for rank in (0, 1)}
    write_ranks(halves, tmp_path / "src", form)
    (tmp_path / "strategy.toml").write_text('mesh = { a = 2 }\n[[parameter]]\nmatch = "*"\nsplit = { 0 = ["a"] }\n')
    with reshard_mpi.open(tmp_path / "src", src_strategy=tmp_path / "strategy.toml") as checkpoint:
        arrays = {name: da.from_array(tensor, chunks=(25, 40)) for name, tensor in checkpoint.items()}
        norms = {name: da.sqrt((array**2).sum()) for name, array in arrays.items()}
        (found,) = dask.compute(norms, scheduler="processes", num_workers=2)
        (whole,) = dask.compute(arrays, scheduler="threads")
    for name, array in tensors.items():
        assert found[name] == pytest.approx(np.linalg.norm(array), rel=1e-12)
        assert (whole[name] == array).all()


def test_parts_of_a_run(tmp_path: Path) -> None:
    done("demo", tmp_path / "try")
    program = tmp_path / "try/parts.py"
    program.write_text(block_run_by((GUIDE / "arrays.md").read_text(), "test_parts_of_a_run"))
    finished = subprocess.run(
        [sys.executable, program.name], cwd=program.parent, capture_output=True, text=True, timeout=300, check=False
    )
    assert finished.returncode == 0, finished.stderr
    folders = [program.parent / name for name in ("src", "whole", "src_strategy.ckpt", "dst_strategy.ckpt")]
    reshard_mpi.transform(*folders)
    assert shards(program.parent / "out") == shards(program.parent / "whole")
    assert (program.parent / "out/reshard.json").exists()
