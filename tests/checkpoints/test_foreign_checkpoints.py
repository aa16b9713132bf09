"""Folders of Megatron, and parts of DeepSpeed's: each is refused by what it is, wherever in it somebody points."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import torch_peer
from support.command_line import done, refused, run_here
from support.examples import few

from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.testing.sample_tensors import SampleTensor, ShardContents


def made(folder: Path, *names: str) -> Path:
    """Make files with a tensor each: what they are is told by their names."""
    for at, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".pt"):
            torch_peer.write(path, ShardContents.of([SampleTensor.random(f"w{at}", BY_NAME["float32"], (2, 3))]))
        else:
            path.write_text("{}")
    return folder


ZERO = [f"{name}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for name in ("", "bf16_") for rank in range(2)]
FOLDERS: dict[str, tuple[list[str], str, str]] = {
    "parameters alone": (
        ["optimizer_state.pt", "layer.0.weight/fp32.pt"],
        "the parameters of a universal checkpoint of DeepSpeed, without its settings",
        "give the folder above",
    ),
    "a universal one without settings": (
        ["zero/layer.0.weight/fp32.pt", "zero/layer.0.weight/exp_avg.pt"],
        "a universal checkpoint of DeepSpeed without its settings",
        "copy or restore those files",
    ),
    "a rank of Megatron": (
        ["model_optim_rng.pt", "distrib_optim.pt"],
        "one rank of a Megatron checkpoint",
        "give the folder of all ranks",
    ),
}


@pytest.mark.parametrize("what", FOLDERS)
@pytest.mark.parametrize("place", ["itself", "above", "named by Megatron's"])
def test_a_folder_of_a_form_that_is_not_read(tmp_path: Path, what: str, place: str) -> None:
    names, kind, remedy = FOLDERS[what]
    save = tmp_path / "save"
    tag = {"itself": "save", "above": "any tag", "named by Megatron's": "iter_0000003"}[place]
    folder = made(save if place == "itself" else save / tag, *names)
    if place == "above":
        (save / "latest").write_text(tag)
        (save / "zero_to_fp32.py").write_text("print()")
    if place == "named by Megatron's":
        (save / "latest_checkpointed_iteration.txt").write_text("3")
    for command in (["inspect"], ["plan", str(tmp_path / "out")], ["transform", str(tmp_path / "out"), "--to", "hf"]):
        said = run_here(command[0], str(save), *command[1:])
        assert said.code == 3 and not (tmp_path / "out").exists()
        assert f"is {kind}" in said.err and remedy in said.err and f"where: {folder}\n" in said.err, said.err
        assert "which is not read" in said.err and said.err.count("error:") == 1


def test_zarr(tmp_path: Path) -> None:
    made(tmp_path, "embedding.word_embeddings.weight/.zarray", "common.pt")
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    assert "a Megatron checkpoint in zarr, which is not read" in refused("plan", tmp_path, tmp_path / "out")


def test_megatrons_other_forms(tmp_path: Path) -> None:
    """Only who asks for Megatron's is refused: others read it as what it is besides."""
    made(tmp_path, ".metadata", "__0_0.distcp")
    said = run_here("plan", tmp_path, tmp_path / "out", "--from", "megatron")
    assert said.code == 3 and "torch_dcp or fsdp_dtensor, or one whose save was not finished, which is not" in said.err
    assert "--from dcp" in said.err and "fsdp_dtensor" not in run_here("plan", tmp_path, tmp_path / "out").err


def test_megatrons_own_form_that_has_lost_its_metadata_json(tmp_path: Path) -> None:
    """It is no plain DCP folder, unless that is asked for."""
    done("transform", tmp_path / made(tmp_path, "net.pt"), tmp_path / "save", "--to", "dcp")
    (tmp_path / "net.pt").rename(tmp_path / "save" / "common.pt")
    said = run_here("plan", tmp_path / "save", tmp_path / "out")
    assert said.code == 3 and "a Megatron checkpoint that has lost its metadata.json" in said.err
    assert "with --from dcp" in said.err
    done("plan", tmp_path / "save", tmp_path / "out", "--from", "dcp")


def test_a_file_that_is_chosen(tmp_path: Path) -> None:
    """Which says itself whether it holds all weights, unlike this one."""
    made(tmp_path, "mp_rank_00_model_states.pt", *ZERO[2:])
    for source in (["--select", "mp_rank*"], []):
        path = tmp_path if source else tmp_path / "mp_rank_00_model_states.pt"
        done("plan", path, tmp_path / "out", *source)


@pytest.mark.parametrize("tag", few(1, ["", "..", "a/b", "gone", "\0", "x" * 300, "é"]))
def test_trackers_that_lead_nowhere(tmp_path: Path, tag: str) -> None:
    made(tmp_path, "net.pt")
    made(tmp_path.parent, "mp_rank_00_model_states.pt", *ZERO[:1])
    (tmp_path / "latest").write_text(tag)
    done("plan", tmp_path, tmp_path / "out")
