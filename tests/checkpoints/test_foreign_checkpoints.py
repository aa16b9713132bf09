"""Folders of DeepSpeed and Megatron: each is refused by what it is, wherever in it somebody points."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import torch_peer
from support.command_line import done, run_here
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
    "stage 2": (
        ["mp_rank_00_model_states.pt", *ZERO[2:]],
        "a DeepSpeed ZeRO checkpoint",
        "give mp_rank_00_model_states",
    ),
    "fp32": (["mp_rank_00_model_states.pt", *ZERO[:2]], "a DeepSpeed ZeRO checkpoint", "zero_to_fp32.py"),
    "very old": (
        ["mp_rank_00_model_states.pt", "fp16_zero_pp_rank_0_mp_rank_00optim_states.pt"],
        "a DeepSpeed ZeRO checkpoint",
        "zero_to_fp32.py",
    ),
    "the optimizer alone": (ZERO[:1], "a DeepSpeed ZeRO checkpoint", "zero_to_fp32.py"),
    "stage 3": (
        [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(2)] + ZERO[2:],
        "a DeepSpeed ZeRO stage 3 checkpoint",
        "zero_to_fp32.py",
    ),
    "a pipeline": (
        ["mp_rank_00_model_states.pt", "layer_00-model_states.pt", *ZERO[2:]],
        "a DeepSpeed checkpoint of a pipeline",
        "save the state_dict()",
    ),
    "experts": (
        ["mp_rank_00_model_states.pt", "layer_0_expert_3_mp_rank_00_model_states.pt", *ZERO[2:]],
        "a DeepSpeed checkpoint of a mixture of experts",
        "save the state_dict()",
    ),
    "tensor parallelism": (
        ["mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"],
        "a DeepSpeed ZeRO checkpoint",
        "zero_to_fp32.py",
    ),
    "universal": (
        ["mp_rank_00_model_states.pt", "zero/layer.0.weight/fp32.pt", "zero/layer.0.weight/exp_avg.pt"],
        "a universal checkpoint of DeepSpeed",
        "give mp_rank_00_model_states.pt",
    ),
    "parameters alone": (
        ["optimizer_state.pt", "layer.0.weight/fp32.pt"],
        "a universal checkpoint of DeepSpeed",
        "zero_to_fp32.py",
    ),
    "ranks of Megatron": (
        ["mp_rank_00/model_optim_rng.pt", "mp_rank_01/model_optim_rng.pt"],
        "a Megatron checkpoint of the old form",
        "rank_0, rank_1",
    ),
    "stages of Megatron": (
        ["mp_rank_00_000/model_optim_rng.pt", "mp_rank_00_001/distrib_optim.pt"],
        "a Megatron checkpoint of the old form",
        "torch_dist",
    ),
    "a rank of Megatron": (
        ["model_optim_rng.pt", "distrib_optim.pt"],
        "one rank of a Megatron checkpoint",
        "give that file",
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
    said = run_here("plan", tmp_path, tmp_path / "out")
    assert said.code == 3 and "a Megatron checkpoint in zarr, which is not read" in said.err


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
