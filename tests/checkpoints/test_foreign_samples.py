"""Checkpoints that Megatron itself has written: refused by what they are, or read and told whole."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import safetensors_peer
from support.command_line import done, run_here

DATA = Path(os.environ.get("RESHARD_MPI_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
MEGATRON = DATA / "megatron"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MEGATRON.is_dir(), reason="no megatron under RESHARD_MPI_SHARED_DATA or ../shared/data"),
]
LEGACY = ["megatron/legacy_tp2pp2", "megatron/legacy_pp2_vpp2_tied_plain"]


def unpacked(name: str, folder: Path) -> Path:
    """Return the folder of the save in an archive, and above it the one that names it."""
    with tarfile.open(DATA / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    (found,) = folder.glob("*/*/")
    return found


def refused(source: Path, out: Path, *options: str) -> str:
    """Return what all commands say of a source, which they refuse."""
    said = [run_here("plan", source, out, *options)]
    said += [run_here("transform", source, out, "--to", to, *options) for to in ("torch", "hf", "safetensors")]
    assert {one.code for one in said} == {3} and not out.exists()
    problems = {one.err.partition("error: ")[2].partition("\n")[0].removeprefix("target rank 0: ") for one in said}
    assert len(problems) == 1, problems
    return said[0].err


@pytest.mark.parametrize("name", LEGACY)
def test_each_file(tmp_path: Path, name: str) -> None:
    for path in sorted(unpacked(name, tmp_path).rglob("*.pt")):
        assert "Megatron" in refused(path, tmp_path / "out")


TORCH_DIST = {
    "core19_tp2pp2": ("tp2", [], ["bucket_idx_0"]),
    "core19_tp2pp2_reshardable": ("tp2", [], []),
    "core19_ep2_experts": ("experts", [], ["bucket_idx_0"]),
    "core18_tp2dp2_buckets": ("tp2", [], ["bucket_idx_0"]),
    "core15_tp2pp2": ("tp2", [], ["bucket_idx_0"]),
    "core14_tp2dp2_model_space": ("tp2", ["--exclude", "optimizer.state.*"], []),
}


@pytest.mark.parametrize("name", TORCH_DIST)
def test_torch_dist(tmp_path: Path, name: str) -> None:
    """Read as torch's own: weights are those of the running ranks; what is not read is named, --strict refuses it."""
    expected_name, options, left_out = TORCH_DIST[name]
    save, out = unpacked(f"megatron/{name}", tmp_path), tmp_path / "out"
    if options:
        said_of_it = refused(save, out, "--from", "dcp")
        assert "as the optimizer of Megatron-Core up to 0.15 has them" in said_of_it
        assert "(--exclude 'optimizer.state.*')" in said_of_it
    said = done("transform", str(save), out, "--to", "hf", "--from", "dcp", *options)
    for what in left_out:
        assert what in said.err
    if left_out:
        strict = run_here("plan", save, tmp_path / "strict", "--strict", "--from", "dcp", *options)
        assert strict.code == 3 and "as --strict demands" in strict.err and any(what in strict.err for what in left_out)
    expected: dict[str, Any] = dict(np.load(MEGATRON / "expected" / f"{expected_name}.npz"))
    made = safetensors_peer.read(out / "model.safetensors").tensors
    weights = [weight for weight in expected if "|" not in weight]
    assert weights and set(weights) <= set(made) and not any("bucket" in other for other in made)
    for weight in weights:
        sample = made[weight]
        assert sample.dtype.name == "bfloat16"
        floats = (np.frombuffer(sample.content, np.uint16).astype(np.uint32) << 16).view(np.float32)
        assert np.array_equal(floats.reshape(sample.shape), expected[weight]), weight
    states = [name for name in made if name.startswith("optimizer.state.")]
    for state in states:  # of what is saved by names: param, exp_avg and exp_avg_sq
        kind, _, parameter = state.removeprefix("optimizer.state.").partition(".")
        whole = np.frombuffer(made[state].content, np.float32).reshape(made[state].shape)
        assert np.array_equal(whole, expected[f"{kind}|{parameter}"]), state
