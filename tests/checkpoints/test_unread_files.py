"""What lies beside a checkpoint is read, named as left out, or known to be no part of one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import dcp_peer, deepspeed_peer, megatron_legacy_peer, safetensors_peer, torch_peer
from support.command_line import done, run_here
from support.dcp_peer import listed
from support.deepspeed_peer import Form as DeepSpeedForm
from support.examples import few
from support.megatron_legacy_peer import Form as MegatronForm

import reshard_mpi
from reshard_mpi.checkpoints import discovery
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.sharding.box import Box
from reshard_mpi.testing.sample_tensors import SampleTensor, ShardContents

CONTENTS = ShardContents.of([SampleTensor.random("w", BY_NAME["float32"], (2, 3))])


def a_dcp(folder: Path) -> None:
    array = np.arange(6, dtype=np.float32)
    dcp_peer.write(folder, {"w": listed(array, [("__0_0.distcp", Box((0,), (6,)))])})


def a_model_of_hugging_face(folder: Path) -> None:
    safetensors_peer.write(folder / "model.safetensors", CONTENTS)


def a_loose_file(folder: Path) -> None:
    torch_peer.write(folder / "net.pt", CONTENTS)


def a_rank_folder(folder: Path) -> None:
    (folder / "rank_0").mkdir()
    torch_peer.write(folder / "rank_0" / "net.pt", CONTENTS)


FORMS: list[Callable[[Path], None]] = [a_dcp, a_model_of_hugging_face, a_loose_file, a_rank_folder]
# Of no form above; what is known to be no part of a checkpoint, and what is not.
STATE = ["optimizer.npz", "random_states_0.pkl", "scaler", "weights.npy", "part.bin.0", "x.msgpack", "delta.zip"]
NO_STATE = [
    *("README.md", "config.json", "tokenizer.model", "vocab.txt", "merges.txt", "LICENSE", "latest", "run.log"),
    *("events.out.tfevents.1", ".hidden.npz", "zero_to_fp32.py", "train.yaml", "training_args.bin", "latest_wandb.txt"),
    *("net-graph.meta", "latest_checkpointed_iteration.txt.lock", "USE_POLICY.md", "merges.bpe", "slurm.out"),
]


@pytest.mark.parametrize("form", FORMS)
@given(
    state=st.lists(st.sampled_from(STATE), unique=True, max_size=4),
    no_state=st.lists(st.sampled_from(NO_STATE), unique=True, max_size=4),
    folders=st.lists(st.sampled_from(["state", "zero", "runs", "checkpoint-500", ".cache", "empty"]), unique=True),
)
def test_every_file_is_read_or_named_or_known(
    tmp_path_factory: pytest.TempPathFactory,
    form: Callable[[Path], None],
    state: list[str],
    no_state: list[str],
    folders: list[str],
) -> None:
    folder = tmp_path_factory.mktemp("any")
    form(folder)
    for name in (*state, *no_state):
        (folder / name).write_bytes(b"content")
    for name in folders:
        (folder / name).mkdir()
        if name != "empty":
            (folder / name / "weights.npy").write_bytes(b"content")
    named = sorted([*state, *(f"{name}/" for name in folders if name in ("state", "zero"))])
    assert discovery.find_shards(str(folder)).left_out == ", ".join(named)


@pytest.mark.parametrize("form", few(1, FORMS))
def test_where_it_is_said(tmp_path: Path, form: Callable[[Path], None]) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    form(source)
    for name in ("optimizer.npz", "README.md", "config.json", ".cache"):
        (source / name).write_bytes(b"content")
    said = f"left out, though it lies in {source} beside what is read: optimizer.npz\n"
    assert "left out: optimizer.npz\n" in run_here("inspect", source).out
    for command in ("plan", "transform"):
        told = done(command, source, out, "--to", "safetensors")
        assert f"warning: {said}" in told.err + told.out and "README" not in told.err, told.err
        strict = run_here(command, source, tmp_path / "strict", "--strict")
        assert strict.code == 3 and "got: optimizer.npz\n" in strict.err and not (tmp_path / "strict").exists()
    report = tmp_path / "report.json"
    options = ("--to", "safetensors", "--overwrite", "--report", str(report))
    done("transform", source, out, *options)
    assert said.strip() in json.loads(report.read_text())["warnings"]
    assert said in run_here("verify", source, out).err
    (source / "optimizer.npz").unlink()
    assert "left out" not in run_here("plan", source, tmp_path / "other").err


def test_files_of_a_format_that_no_index_lists(tmp_path: Path) -> None:
    """Such as those of a save by more ranks into the same folder, and the state beside a model of Hugging Face."""
    a_dcp(tmp_path)
    (tmp_path / "__7_0.distcp").write_bytes(b"content")
    torch_peer.write(tmp_path / "train_state.pt", CONTENTS)
    left_out = discovery.find_shards(str(tmp_path)).left_out
    assert left_out.startswith("__7_0.distcp, train_state.pt (Megatron Bridge's step")
    assert discovery.find_shards(str(tmp_path), format_name="dcp").left_out == "__7_0.distcp"


def test_a_model_in_other_forms(tmp_path: Path) -> None:
    a_model_of_hugging_face(tmp_path)
    same = ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "tf_model.h5", "model.onnx", "model-q4.gguf"]
    state = ["consolidated.00.pth", "optimizer.pt", "rng_state_0.pth", "scheduler.pt"]
    for name in (*same, *state):
        (tmp_path / name).write_bytes(b"content")
    assert discovery.find_shards(str(tmp_path)).left_out == ", ".join(state)


def test_files_that_the_user_chooses(tmp_path: Path) -> None:
    a_loose_file(tmp_path)
    (tmp_path / "optimizer.npz").write_bytes(b"content")
    assert discovery.find_shards(str(tmp_path), "net*").left_out == ""
    assert discovery.find_shards(str(tmp_path / "net.pt")).left_out == ""


def test_what_lies_in_a_rank_folder(tmp_path: Path) -> None:
    a_rank_folder(tmp_path)
    for name in ("optimizer.npz", "strategy.ckpt", "graph.meta"):
        (tmp_path / "rank_0" / name).write_bytes(b"\x08content")
    torch_peer.write(tmp_path / "common.pt", CONTENTS)
    left_out = discovery.find_shards(str(tmp_path), format_name="torch").left_out
    assert left_out.startswith("common.pt (Megatron's settings") and left_out.endswith("; in rank_0 optimizer.npz")


def test_files_of_its_format_beside_rank_folders(tmp_path: Path) -> None:
    """They are of no rank, so no choice among the files of a rank has told of them."""
    a_rank_folder(tmp_path)
    torch_peer.write(tmp_path / "optimizer.pt", CONTENTS)
    (tmp_path / "strategy.ckpt").write_bytes(b"\x08content")
    assert discovery.find_shards(str(tmp_path)).left_out == "optimizer.pt"
    assert discovery.find_shards(str(tmp_path), format_name="torch").left_out == "optimizer.pt"


def test_what_lies_in_other_rank_folders_than_the_first(tmp_path: Path) -> None:
    for rank in range(4):
        (tmp_path / f"rank_{rank}").mkdir()
        torch_peer.write(tmp_path / f"rank_{rank}" / "net.pt", CONTENTS)
    (tmp_path / "rank_2" / "head.npz").write_bytes(b"content")
    assert discovery.find_shards(str(tmp_path)).left_out == "in rank_2 head.npz"
    (tmp_path / "rank_3" / "loss.npz").write_bytes(b"content")
    assert discovery.find_shards(str(tmp_path)).left_out == "in rank_2 head.npz, and files in 1 more folder"


def test_folders_into_which_an_index_leads(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    safetensors_peer.write(tmp_path / "a" / "b" / "w.safetensors", CONTENTS)
    index = {"metadata": {}, "weight_map": {"w": "a/b/w.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert discovery.find_shards(str(tmp_path)).left_out == ""
    safetensors_peer.write(tmp_path / "a" / "b" / "more.safetensors", CONTENTS)
    assert discovery.find_shards(str(tmp_path)).left_out == "in a/b more.safetensors"
    (tmp_path / "a" / "optimizer.npz").write_bytes(b"content")
    assert discovery.find_shards(str(tmp_path)).left_out == "in a/b more.safetensors, and files in 1 more folder"


def test_a_rank_folder_without_shards(tmp_path: Path) -> None:
    """Its files are named, unless it has shards, which are chosen by their format."""
    a_model_of_hugging_face(tmp_path)
    (tmp_path / "rank_0").mkdir()
    (tmp_path / "rank_0" / "weights.npy").write_bytes(b"content")
    assert discovery.find_shards(str(tmp_path)).left_out == "rank_0/"
    torch_peer.write(tmp_path / "rank_0" / "net.pt", CONTENTS)
    assert discovery.find_shards(str(tmp_path), format_name="hf").left_out == ""


def test_the_targets_of_a_run_in_the_source(tmp_path: Path) -> None:
    a_dcp(tmp_path)
    done("transform", tmp_path, tmp_path / "out", "--to", "torch")
    assert "left out" not in run_here("verify", tmp_path, tmp_path / "out").err


def test_own_files_of_ranks_that_hold_nothing(tmp_path: Path) -> None:
    a_dcp(tmp_path)
    (tmp_path / "four.toml").write_text("mesh = { data = 4 }\n[[parameter]]\nmatch = '*'\n")
    reshard_mpi.transform(tmp_path, tmp_path / "own", dst_strategy=tmp_path / "four.toml", to="dcp")
    assert len([*(tmp_path / "own").glob("*.distcp")]) == 4
    assert reshard_mpi.transform(tmp_path / "own", tmp_path / "back", to="torch", strict=True).warnings == ()
    # One that holds something, but of another checkpoint, is named.
    (other,) = (path for path in (tmp_path / "own").glob("*.distcp") if path.stat().st_size > 1000)
    (tmp_path / "own" / "__9_0.distcp").write_bytes(other.read_bytes())
    (warning,) = reshard_mpi.transform(tmp_path / "own", tmp_path / "again", to="torch").warnings
    assert warning.endswith("beside what is read: __9_0.distcp")


def test_very_many(tmp_path: Path) -> None:
    a_loose_file(tmp_path)
    for number in range(100):
        (tmp_path / f"{number:03}.npz").write_bytes(b"content")
    deep = tmp_path / "deep"
    deep.mkdir()
    for number in range(300):
        (deep / f"{number}.txt").touch()
    left_out = discovery.find_shards(str(tmp_path)).left_out
    assert left_out == ", ".join(f"{number:03}.npz" for number in range(8)) + " and 93 more"


def test_names_that_act_on_a_terminal_and_links(tmp_path: Path) -> None:
    a_loose_file(tmp_path)
    (tmp_path / "a\x1b[2Jb.npz").write_bytes(b"content")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty.npz").touch()
    said = done("plan", tmp_path, tmp_path.parent / "out")
    assert "\x1b" not in said.err and r"\x1b[2Jb.npz" in said.err
    assert "pipe" not in said.err and "nowhere" not in said.err and "empty" not in said.err


def test_another_save_beside_the_latest_one_is_named(tmp_path: Path) -> None:
    """Two programs may have saved into one folder: which of both is read has to be said, and that the other is not."""
    save = tmp_path / "save"
    megatron_legacy_peer.write(save, megatron_legacy_peer.training(megatron_legacy_peer.Model([[1]])), MegatronForm(1))
    deepspeed_peer.write(save, deepspeed_peer.training({"w": (3, 2)}), DeepSpeedForm(1, 1))
    (save / "latest").write_text("global_step3")
    said = done("plan", save, tmp_path / "out").err
    assert "iter_0000003" in said and "warning: left out: global_step3, the latest as latest says" in said
    a_rank_folder(save)
    assert "rank_0/" in done("plan", save, tmp_path / "out").err


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize("make", [os.mkfifo, link_to_itself])
@pytest.mark.parametrize("name", ["latest", "metadata.json", "old.ckpt", "old.pt", "rank_0", ".metadata"])
def test_what_is_called_like_a_file_and_is_none(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    """A pipe is not waited for, and a link that leads to itself is as good as none."""
    a_loose_file(tmp_path)
    make(tmp_path / name)
    found = discovery.find_shards(str(tmp_path))
    assert (found.format, found.shards, found.left_out) == ("torch", (str(tmp_path / "net.pt"),), "")
