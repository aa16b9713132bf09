"""Some of a run's targets as a source: what the run has recorded tells that others are missing."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import write_ranks

import reshard_mpi
from reshard_mpi.errors import ReshardError

TENSORS = {"w": np.arange(16, dtype=np.float32).reshape(8, 2), "b": np.arange(3, dtype=np.float32)}


def cut(folder: Path, ways: str) -> Path:
    rules = 'split = { 0 = ["a"] }\n' if ways == "cut" else ""
    (folder / "two.toml").write_text(f'mesh = {{ a = 2 }}\n[[parameter]]\nmatch = "w"\n{rules}')
    return folder / "two.toml"


def source(folder: Path) -> Path:
    write_ranks({0: TENSORS}, folder / "src", "safetensors")
    return folder / "src"


@pytest.mark.parametrize("given", ["folder", "rank folder", "file"])
@pytest.mark.parametrize("lost", ["not made", "lost", "lost, uncommitted"])
@pytest.mark.parametrize("form", ["ckpt", "safetensors", "torch"])
def test_one_of_two_slices_is_no_checkpoint(tmp_path: Path, form: str, lost: str, given: str) -> None:
    out = tmp_path / "out"
    ranks = [0] if lost == "not made" else None
    reshard_mpi.transform(source(tmp_path), out, None, cut(tmp_path, "cut"), to=form, ranks=ranks)
    if ranks is None:
        shutil.rmtree(out / "rank_1")
    if lost == "lost, uncommitted":
        (out / "reshard.json").unlink()
    shard = next(path for path in (out / "rank_0").iterdir() if path.is_file())
    path = {"folder": out, "rank folder": out / "rank_0", "file": shard}[given]
    with pytest.raises(ReshardError):
        reshard_mpi.transform(path, tmp_path / "again")
    assert not list((tmp_path / "again").glob("rank_*/*"))


@pytest.mark.parametrize("form", ["ckpt", "safetensors", "torch"])
def test_one_of_two_replicas_is_a_checkpoint(tmp_path: Path, form: str) -> None:
    out = tmp_path / "out"
    reshard_mpi.transform(source(tmp_path), out, None, cut(tmp_path, "replicas"), to=form)
    reshard_mpi.transform(out / "rank_0", tmp_path / "again", to="safetensors")
    loaded = reshard_mpi.load_rank(0, tmp_path / "again")
    assert all(np.array_equal(loaded[name], array) for name, array in TENSORS.items())


def test_one_of_several_files_of_whole_tensors_is_read_by_itself(tmp_path: Path) -> None:
    reshard_mpi.transform(source(tmp_path), tmp_path / "out", to="hf", max_shard_size=16)
    held: dict[str, np.ndarray] = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        reshard_mpi.transform(path, tmp_path / "again" / path.stem, to="safetensors")
        held |= reshard_mpi.load_rank(0, tmp_path / "again" / path.stem)
    assert held.keys() == TENSORS.keys()
    assert all(np.array_equal(held[name], array) for name, array in TENSORS.items())
