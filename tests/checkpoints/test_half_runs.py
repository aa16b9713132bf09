"""Some of a run's targets as a source: what the run has recorded tells that others are missing."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import write_ranks

import reshard_mpi
from reshard_mpi.errors import ReshardError
from reshard_mpi.journal.run_status import commit

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
    reshard_mpi.transform(source(tmp_path), out, None, cut(tmp_path, "cut"), to=form, rank=ranks)
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


# One run has begun to replace the targets of another one, or of another state of the source


def full(path: Path, factor: float) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    values = factor * np.arange(64, dtype=np.float32).reshape(8, 8)
    write_ranks({0: dict.fromkeys(("w0", "w1", "w2"), values)}, path, "safetensors")
    return path


def spec(folder: Path) -> Path:
    (folder / "rows.toml").write_text('mesh = { a = 3 }\n[[parameter]]\nmatch = "*"\n')
    return folder / "rows.toml"


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("first", ["ours", "of others"])
@pytest.mark.parametrize("form", ["hf", "hdf5", "dcp", "safetensors"])
def test_half_replaced_targets_are_no_checkpoint(tmp_path: Path, form: str, first: str, verify: bool) -> None:
    out = tmp_path / "out"
    cut: dict[str, Any] = {"max_shard_size": 260} if form == "hf" else {"dst_strategy": spec(tmp_path)}
    reshard_mpi.transform(full(tmp_path / "one", 1), out, to=form, verify=verify, **cut)
    if first == "of others":
        shutil.rmtree(out / ".reshard_mpi")
        (out / "reshard.json").unlink()
    reshard_mpi.transform(full(tmp_path / "two", 2), out, to=form, verify=verify, overwrite=True, rank=[0], **cut)
    strategy = None if form in ("hf", "hdf5", "dcp") else spec(tmp_path)
    with pytest.raises(ReshardError):
        reshard_mpi.transform(out, tmp_path / "again", strategy, verify=verify)
    assert not (tmp_path / "again").exists()
    with pytest.raises(ReshardError):
        reshard_mpi.verify(out)
    how = {"resume" if first == "ours" else "overwrite": True}
    reshard_mpi.transform(tmp_path / "two", out, to=form, verify=verify, **how, **cut)
    reshard_mpi.transform(out, tmp_path / "again", strategy, verify=verify, to="safetensors")
    assert reshard_mpi.load_rank(0, tmp_path / "again")["w2"][7, 7] == 2 * 63


@pytest.mark.parametrize("form", ["hf", "hdf5", "safetensors"])
def test_targets_of_two_states_of_the_source_are_no_checkpoint(tmp_path: Path, form: str) -> None:
    """What `commit` refuses is neither read nor called sound."""
    out, src = tmp_path / "out", full(tmp_path / "src", 1)
    cut: dict[str, Any] = {"max_shard_size": 260} if form == "hf" else {"dst_strategy": spec(tmp_path)}
    reshard_mpi.transform(src, out, to=form, verify=True, **cut)
    full(src, 2)
    with contextlib.suppress(ReshardError):
        reshard_mpi.transform(src, out, to=form, verify=True, overwrite=True, rank=[0], **cut)
    with pytest.raises(ReshardError):
        commit(out)
    with pytest.raises(ReshardError):
        reshard_mpi.verify(out)
    strategy = spec(tmp_path) if form == "safetensors" else None
    with pytest.raises(ReshardError, match="source"):
        reshard_mpi.transform(out, tmp_path / "again", strategy)


@pytest.mark.parametrize("given", ["folder", "rank folder", "file"])
@pytest.mark.parametrize("record", ["none", "of an earlier run"])
def test_a_slice_that_is_about_to_be_replaced_is_no_checkpoint(tmp_path: Path, record: str, given: str) -> None:
    """A run that is killed while it replaces the only target there has removed its record, or has left it."""
    out = tmp_path / "out"
    reshard_mpi.transform(source(tmp_path), out, None, cut(tmp_path, "cut"), to="safetensors", rank=0)
    if record == "none":
        (out / ".reshard_mpi" / "rank_0.json").unlink()
    else:
        (tmp_path / "other").mkdir()
        write_ranks({0: {**TENSORS, "more": TENSORS["b"]}}, tmp_path / "other" / "src", "safetensors")
        other = tmp_path / "other" / "out"
        strategy = cut(tmp_path, "cut")
        reshard_mpi.transform(tmp_path / "other" / "src", other, None, strategy, to="safetensors", rank=0)
        shutil.copy(other / ".reshard_mpi" / "run.json", out / ".reshard_mpi" / "run.json")
    path = {"folder": out, "rank folder": out / "rank_0", "file": out / "rank_0" / "checkpoint_0.safetensors"}[given]
    with pytest.raises(ReshardError):
        reshard_mpi.transform(path, tmp_path / "again")
    assert not (tmp_path / "again").exists()
