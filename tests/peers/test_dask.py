"""dask: arrays of an open checkpoint, computed in processes of its own, which open it again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import write_ranks

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
