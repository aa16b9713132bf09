"""How a DeepSpeed checkpoint is found: by `latest`, by its files, in a Trainer's folder, beside other checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import deepspeed_peer, safetensors_peer, torch_peer
from support.command_line import done, refused, run_here
from support.deepspeed_peer import Form, Training
from support.examples import few

import reshard_mpi
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.testing.sample_tensors import SampleTensor, ShardContents

TRAINING = deepspeed_peer.training({"a.w": (3, 4), "b.w": (5,)}, buffers={"scale": np.float32([1, 2])})
FORM = Form(2, 2)
OTHER = ShardContents.of([SampleTensor.random("other", BY_NAME["float32"], (2, 3))])


def require_read(folder: Path, *, made: Training = TRAINING, form: Form = FORM) -> None:
    with reshard_mpi.open(folder) as opened:
        assert set(opened) == set(deepspeed_peer.expected(made, form))


def trainer(folder: Path) -> Path:
    """Write what a Trainer of Hugging Face saves with DeepSpeed."""
    tag = deepspeed_peer.write(folder, TRAINING, FORM)
    safetensors_peer.write(folder / "model.safetensors", OTHER)
    torch_peer.write(folder / "scheduler.pt", OTHER)
    for rank in range(2):
        torch_peer.write(folder / f"rng_state_{rank}.pth", OTHER)
    for name in ("trainer_state.json", "config.json"):
        (folder / name).write_text("{}")
    (folder / "zero_to_fp32.py").write_text("print()")
    return tag


def test_the_folder_of_a_trainer(tmp_path: Path) -> None:
    """DeepSpeed's part is read, all else is named as left out; with --from hf the weights alone are."""
    trainer(tmp_path / "checkpoint-3")
    said = done("transform", tmp_path / "checkpoint-3", tmp_path / "out").err
    assert "global_step3 of" in said and "the latest as latest says" in said
    for name in ("model.safetensors", "scheduler.pt", "rng_state_0.pth"):
        assert name in said.partition("left out, though it lies in")[2], said
    require_read(tmp_path / "checkpoint-3")
    done("transform", tmp_path / "checkpoint-3", tmp_path / "hf", "--from", "hf", "--to", "hf")
    assert set(safetensors_peer.read(tmp_path / "hf" / "model.safetensors").tensors) == {"other"}


def test_each_way_to_name_it(tmp_path: Path) -> None:
    tag = deepspeed_peer.write(tmp_path, TRAINING, FORM)
    for source in (tag, tmp_path):
        require_read(source)
        assert "3 files, deepspeed" in done("inspect", source).out
        done("plan", source, tmp_path / "out", "--from", "deepspeed")
    (tmp_path / "latest").unlink()
    require_read(tag)


def test_the_latest_of_several(tmp_path: Path) -> None:
    deepspeed_peer.write(tmp_path, TRAINING, FORM)
    (tmp_path / "global_step3").rename(tmp_path / "global_step2")
    later = deepspeed_peer.training({"later": (2,)})
    deepspeed_peer.write(tmp_path, later, FORM)
    require_read(tmp_path, made=later)
    (tmp_path / "latest").write_text("global_step2\n")
    require_read(tmp_path)


def test_a_universal_one_beside(tmp_path: Path) -> None:
    """DeepSpeed writes `latest`, its converter `latest_universal`: the first is what training goes on with."""
    deepspeed_peer.write(tmp_path, TRAINING, FORM)
    tag = deepspeed_peer.write_universal(tmp_path, TRAINING, FORM)
    assert "the latest as latest says" in done("plan", tmp_path, tmp_path / "out").err
    require_read(tag)
    (tmp_path / "latest").unlink()
    require_read(tmp_path)


@pytest.mark.parametrize("tag", few(1, ["gone", "", "..", "a/b", "\0", "é", "x" * 300]))
def test_a_latest_that_names_nothing(tmp_path: Path, tag: str) -> None:
    folder = deepspeed_peer.write(tmp_path, TRAINING, FORM)
    (tmp_path / "latest").write_text(tag)
    for command in (["inspect"], ["plan", str(tmp_path / "out")], ["transform", str(tmp_path / "out")]):
        said = run_here(command[0], str(tmp_path), *command[1:])
        assert said.code == 3 and f"where: {tmp_path / 'latest'}" in said.err and "what to do: " in said.err
    require_read(folder)


@pytest.mark.parametrize("says", ["run", "gone", ""])
def test_a_latest_of_another_program(tmp_path: Path, says: str) -> None:
    """Beside a checkpoint that is read as ever."""
    safetensors_peer.write(tmp_path / "model.safetensors", OTHER)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.txt").write_text("text")
    (tmp_path / "latest").write_text(says)
    done("transform", tmp_path, tmp_path / "out")
    assert set(safetensors_peer.read(tmp_path / "out" / "model.safetensors").tensors) == {"other"}


def test_a_file_by_itself(tmp_path: Path) -> None:
    """Weights in 16 bit are a file of torch; a file with parts of tensors is refused, and the folder named."""
    tag = deepspeed_peer.write(tmp_path, TRAINING, FORM)
    done("plan", tag / "mp_rank_00_model_states.pt", tmp_path / "out")
    share = tag / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    for options, remedy in ((["--from", "deepspeed"], f"give {tag}"), ([], "give the folder of all files")):
        said = run_here("plan", share, tmp_path / "out", *options)
        assert said.code == 3 and "DeepSpeed" in said.err and f"what to do: {remedy}" in said.err


def test_two_checkpoints_together(tmp_path: Path) -> None:
    tag = deepspeed_peer.write(tmp_path, TRAINING, FORM)
    safetensors_peer.write(tag / "model.safetensors", OTHER)
    assert "two checkpoints lie together" in refused("plan", tag, tmp_path / "out")
    done("plan", tag, tmp_path / "out", "--from", "deepspeed")
