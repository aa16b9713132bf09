"""Folders of torch.distributed.checkpoint with tensors that cannot be read: each is named, and --exclude does without.

What other tensors the folder has is read as if those were not there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import dcp_peer, torch_peer
from support.command_line import done, run_here
from support.dcp_peer import Metadata, listed
from support.examples import few
from support.torch_peer import Tensor

from reshard_mpi.checkpoints.inspection import inspect
from reshard_mpi.formats import torch
from reshard_mpi.sharding.box import Box
from reshard_mpi.testing import sample_tensors
from reshard_mpi.testing.sample_tensors import SampleTensor

W = np.arange(24, dtype=np.float32).reshape(6, 4)
ODD = np.arange(5, dtype=np.float32)
UPPER, LOWER, WHOLE = Box((0, 0), (3, 4)), Box((3, 0), (6, 4)), Box((0,), (5,))


def conjugated(sample: SampleTensor) -> Any:
    """Return what is saved of a piece: of the odd one a view whose bits say that it is conjugated."""
    made = torch_peer.tensor(sample, "0")
    return Tensor(made.make, *made.args, {"conj": True}) if sample.shape == ODD.shape else made


def unknown_type(metadata: Metadata) -> None:
    for name in metadata.state_dict_metadata:
        if name != "w" and hasattr(metadata.state_dict_metadata[name], "properties"):
            metadata.state_dict_metadata[name].properties.dtype = dcp_peer.quantized


def flattened(metadata: Metadata) -> None:
    names = [name for name in metadata.state_dict_metadata if name not in ("w", "lr")]
    shapes = {name: {"nd_reformulated_orig_global_shape": (5,)} for name in names}
    metadata.mcore_data = {"w": {}, **shapes}  # type: ignore[attr-defined]


def write(folder: Path, name: str, **options: Any) -> None:
    pieces = [("__0_0.distcp", UPPER), ("__1_0.distcp", LOWER)]
    tensors = {name: listed(ODD, [("__0_0.distcp", WHOLE)]), "w": listed(W, pieces)}
    dcp_peer.write(folder, tensors, {"lr": ("__0_0.distcp", 0.5)}, **options)


CASES: dict[str, tuple[str, dict[str, Callable[..., Any]], str]] = {
    "a conjugated view": ("c", {"made": conjugated}, "a conjugated or negated view"),
    "a type that is not known": ("f", {"spoil": unknown_type}, "a type that is not known here, torch.quint4x2"),
    "no name": ("", {}, "a tensor without a name"),
    "flattened ranges": ("exp_avg.w", {"spoil": flattened}, "Megatron-Core up to 0.15"),
    "a name like a pattern": ("odd[*]", {"made": conjugated}, "a conjugated or negated view"),
}


@pytest.mark.parametrize("what", few(1, CASES))
def test_a_tensor_that_cannot_be_read(tmp_path: Path, what: str) -> None:
    name, options, why = CASES[what]
    source = tmp_path / "source"
    source.mkdir()
    write(source, name, **options)
    for command in ("plan", "transform"):
        said = run_here(command, str(source), str(tmp_path / "out"))
        assert said.code == 3 and not (tmp_path / "out").exists()
        assert f"the tensor {name!r} of the checkpoint cannot be read\n" in said.err and why in said.err
        assert "--exclude" in said.err and "'w'" not in said.err
    pattern = said.err.partition("--exclude ")[2].partition(")")[0].strip("'")
    for to in ("torch", "safetensors", "dcp"):
        out = tmp_path / to
        said = run_here("transform", str(source), str(out), "--to", to, "--exclude", pattern, "--verify")
        assert said.code == 0, said.err
        shard = out if to == "dcp" else next(out.glob("rank_0/checkpoint_0.*"))
        assert list(facts_of(shard)["tensors"]) == ["w"]
    path = str(next((tmp_path / "torch").glob("rank_0/*.pt")))
    assert sample_tensors.payload(torch.locate(path).tensors["w"]) == W.tobytes()
    assert run_here("verify", str(source), str(tmp_path / "torch"), "--exclude", pattern).code == 0


def facts_of(path: Path) -> Any:
    facts = inspect(path)
    return facts if facts["kind"] == "shard" else facts["shards"][0][0]


def test_other_tensors_are_asked_for(tmp_path: Path) -> None:
    write(tmp_path, "c", made=conjugated)
    said = run_here("transform", str(tmp_path), str(tmp_path / "out"), "--include", "w", "--to", "safetensors")
    assert said.code == 0, said.err
    said = run_here("plan", str(tmp_path), str(tmp_path / "other"), "--include", "c")
    assert said.code == 3 and "the tensor 'c' of the checkpoint cannot be read" in said.err


def test_inspect_says_which(tmp_path: Path) -> None:
    write(tmp_path, "c", made=conjugated)
    assert facts_of(tmp_path)["unreadable"] == {
        "c": "a conjugated or negated view: save tensor.resolve_conj().resolve_neg()"
    }
    assert "cannot be read: c: a conjugated or negated view" in run_here("inspect", str(tmp_path)).out


def test_a_missing_file_of_a_tensor_that_is_left_out(tmp_path: Path) -> None:
    """Which is another reason why a tensor cannot be had; others lie in other files."""
    tensors = {"a": listed(ODD, [("__0_0.distcp", WHOLE)]), "b": listed(ODD, [("__1_0.distcp", WHOLE)])}
    dcp_peer.write(tmp_path, tensors)
    (tmp_path / "__1_0.distcp").unlink()
    out = str(tmp_path / "out")
    assert "no chunk of 'b'" in run_here("plan", str(tmp_path), out).err
    assert "__1_0.distcp" in done("transform", str(tmp_path), out, "--exclude", "b", "--to", "safetensors").err


def test_metadata_that_is_a_program(tmp_path: Path) -> None:
    write(tmp_path, "c")
    (tmp_path / ".metadata").write_bytes(b"cposix\nsystem\n(S'true'\ntR.")
    said = run_here("plan", str(tmp_path), str(tmp_path / "out"))
    assert said.code == 3 and "would run code" in said.err and "copy it again" not in said.err


@given(
    kinds=st.lists(st.sampled_from(["sound", "conjugated", "unknown"]), min_size=1, max_size=6),
    number_of_files=st.integers(1, 3),
)
def test_any_of_them(tmp_path_factory: pytest.TempPathFactory, kinds: list[str], number_of_files: int) -> None:
    """Exactly those that cannot be read are said to be so, and all others hold what was written."""
    folder = tmp_path_factory.mktemp("any")
    arrays = {f"t{at}": np.arange(at + 2, dtype=np.float32) for at in range(len(kinds))}
    odd = {math.prod(arrays[f"t{at}"].shape): kind for at, kind in enumerate(kinds)}
    tensors = {
        name: listed(array, [(f"__{at % number_of_files}_0.distcp", Box((0,), array.shape))])
        for at, (name, array) in enumerate(arrays.items())
    }

    def made(sample: SampleTensor) -> Any:
        saved = torch_peer.tensor(sample, "0")
        return Tensor(saved.make, *saved.args, {"neg": True}) if odd[sample.shape[0]] == "conjugated" else saved

    def spoil(metadata: Metadata) -> None:
        for name, kind in zip(arrays, kinds):
            if kind == "unknown":
                metadata.state_dict_metadata[name].properties.dtype = dcp_peer.quantized

    dcp_peer.write(folder, tensors, made=made, spoil=spoil)
    bad = [name for name, kind in zip(arrays, kinds) if kind != "sound"]
    sound = [name for name in arrays if name not in bad]
    assert list(facts_of(folder).get("unreadable", {})) == bad
    excluded = [word for name in bad for word in ("--exclude", name)]
    said = run_here("transform", str(folder), str(folder / "out"), "--to", "torch", *excluded)
    assert said.code == (0 if sound else 3), said.err
    if sound:
        located = torch.locate(str(folder / "out" / "rank_0" / "checkpoint_0.pt")).tensors
        assert {name: sample_tensors.payload(entry) for name, entry in located.items()} == {
            name: arrays[name].tobytes() for name in sound
        }
