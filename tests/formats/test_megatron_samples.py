"""Checkpoints that Megatron-Core itself has written (torch_dist), to every target: equal to what its ranks had."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import dcp_peer, hdf5_peer, safetensors_peer
from support.command_line import done
from support.examples import few
from support.torch_runs import samples_in, tree_of

from reshard_mpi.testing.sample_tensors import SampleTensor

DATA = Path(os.environ.get("RESHARD_MPI_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data")) / "megatron"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="no megatron under RESHARD_MPI_SHARED_DATA or ../shared/data")
SAMPLES = {
    "core19_tp2pp2": "tp2",
    "core14_tp2dp2_model_space": "tp2",
    "core15_tp2pp2": "tp2",
    "core18_tp2dp2_buckets": "tp2",
    "core19_ep2_experts": "experts",
    "core19_tp1_reshardable": "tp2",
    "core19_tp2pp2_reshardable": "tp2",
}
LEGACY = ("legacy_tp2pp2", "legacy_pp2_vpp2_tied_plain")

# What was not gathered from the ranks.
LACKING = {"core19_ep2_experts": ("moments",)}


def unpacked(name: str, folder: Path) -> Path:
    """Unpack a sample, and return the folder of its save."""
    with tarfile.open(DATA / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    (found,) = folder.glob("*/*/")
    return found.parent


def expected(name: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return the tensors that ranks had, in float32, by their names in a whole training state."""
    named = {}
    for key, whole in np.load(DATA / "expected" / f"{SAMPLES[name]}.npz").items():
        kind, _, parameter = key.rpartition("|")
        kind = "fp32_param" if kind == "param" else kind
        # One rank alone has a vocabulary that is padded less.
        rows = 112 if "tp1" in name and parameter.endswith(("word_embeddings.weight", "output_layer.weight")) else None
        named[f"optimizer.state.{parameter}.{kind}" if kind else f"model.{parameter}"] = whole[:rows]
    return named


def floats(sample: SampleTensor) -> np.ndarray[Any, Any]:
    if sample.dtype.name == "bfloat16":
        bits = np.frombuffer(sample.content, np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(sample.shape)
    return np.frombuffer(sample.content, sample.dtype.name).reshape(sample.shape)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
def test_every_target(tmp_path: Path, name: str) -> None:
    source = unpacked(name, tmp_path / "unpacked")
    for to in ("torch", "dcp", "hdf5", "hf"):
        done("transform", source, tmp_path / to, "--to", to, "--verify", "--replicas", "check")
    wholes, made = expected(name), samples_in(tree_of(tmp_path / "torch"))
    assert set(made) == set(wholes) | {key for key in made if "moments" in LACKING.get(name, ()) and ".exp_avg" in key}
    for key, whole in wholes.items():
        assert made[key].shape == whole.shape and np.array_equal(floats(made[key]), whole), key
        assert made[key].dtype.name == ("bfloat16" if key.startswith("model.") else "float32")
    assert_same(made, dcp_peer.read(tmp_path / "dcp").tensors)
    assert_same(made, hdf5_peer.read(tmp_path / "hdf5" / "rank_0" / "checkpoint_0.h5").tensors)
    of_hf = safetensors_peer.read(tmp_path / "hf" / "model.safetensors").tensors
    assert_same({name[6:]: tensor for name, tensor in made.items() if name.startswith("model.")}, of_hf)


def assert_same(made: dict[str, SampleTensor], others: Any) -> None:
    assert set(made) == set(others)
    for name, sample in made.items():
        assert (others[name].dtype, others[name].content) == (sample.dtype, sample.content), name


# What a folder holds besides tensors


class _Anything:
    """An object of a class that is not there: its arguments and attributes."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        return type(name, (_Anything,), {"__module__": module})

    def persistent_load(self, pid: Any) -> Any:
        return pid


def unpickled(content: bytes) -> Any:
    """Return what an archive of torch holds, but for the elements of tensors."""
    with zipfile.ZipFile(io.BytesIO(content)) as opened:
        (pickled,) = (name for name in opened.namelist() if name.endswith("/data.pkl"))
        return _Unpickler(io.BytesIO(opened.read(pickled))).load()


def objects_of(folder: Path) -> dict[str, Any]:
    """Return the objects of a folder by their keys, and what ranks have in common by an empty key."""
    index = _Unpickler(io.BytesIO((folder / ".metadata").read_bytes())).load().state
    kept = {}
    for key, place in index["storage_data"].items():
        name = key.state["fqn"]
        if type(index["state_dict_metadata"][name]).__name__ == "BytesStorageMetadata":
            own = place.state
            content = (folder / own["relative_path"]).read_bytes()
            (kept[name],) = unpickled(content[own["offset"] : own["offset"] + own["length"]])
    if (folder / "common.pt").exists():
        kept[""] = unpickled((folder / "common.pt").read_bytes())
    else:
        kept[""] = kept.pop("common_state/shard_0_1")
    return kept


def groups_in(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the groups of all optimizers within a value."""
    if isinstance(value, dict):
        yield from value.get("param_groups", [])
        for entry in value.values():
            yield from groups_in(entry)


@pytest.mark.parametrize("name", few(1, SAMPLES))
def test_every_key_of_every_pickle(tmp_path: Path, name: str) -> None:
    """What a pickle holds is part of the target, or is named in what the run says."""
    source = unpacked(name, tmp_path / "unpacked")
    (folder,) = source.glob("iter_*")
    said = done("transform", source, tmp_path / "out", "--to", "torch").err
    target = tree_of(tmp_path / "out")
    objects = objects_of(folder)
    common = objects.pop("")
    settings = {key for group in target["optimizer"]["param_groups"] for key in group}
    for value in (common["optimizer"], *objects.values()):
        for group in groups_in(value):
            assert set(group) - {"params"} <= settings
    for key, value in objects.items():
        stem = key.partition("/")[0]
        is_told = stem.rpartition(".")[2] in said or stem in said
        assert key in target["model"] or is_told or (stem.endswith(".optimizer") and groups_in(value)), key
    for key, value in common.items():
        own = {"opt_param_scheduler": "scheduler"}.get(key, key)
        if key == "args":
            assert set(value.state) == set(target["args"])
        elif isinstance(value, dict) and key not in ("optimizer", "content_metadata"):
            assert set(value) == set(target[own]), key
        else:
            assert own in target or own in said, key
    assert target["iteration"] == 3 and target["args"]["num_layers"] == 4


@pytest.mark.parametrize("name", [*SAMPLES, *LEGACY])
def test_a_conversion_holds_the_same_tensors(tmp_path: Path, name: str) -> None:
    save = unpacked(name, tmp_path / "unpacked")
    done("transform", save, tmp_path / "out", "--to", "torch")
    assert "the same" in done("diff", save, tmp_path / "out").out
    assert "the same" in done("diff", tmp_path / "out", save).out
