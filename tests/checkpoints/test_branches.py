"""Files of a model, its optimizer and the rest that lie side by side: branches of one checkpoint, by their words."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import dcp_peer, torch_peer
from support.checkpoints import sample
from support.command_line import done, refused
from support.examples import few, few_cases, many

import reshard_mpi
from reshard_mpi.checkpoints import discovery
from reshard_mpi.checkpoints.file_names import LEFT_OUT, branch_of_name
from reshard_mpi.errors import CoverageError, DisagreementError, ReshardError, SourceError
from reshard_mpi.formats.nest.nodes import NestError

GOLDEN = Path(__file__).parent.parent / "formats" / "golden" / "torch" / "dtensor_ranks"
SPEC = 'mesh = { tp = 2 }\n[[parameter]]\nmatch = "*.w"\nsplit = { 0 = ["tp"] }\n'
ROWS = 4


def weights(seed: int, rows: int = ROWS) -> Any:
    return np.random.default_rng(seed).random((rows, 3), np.float32)


def state_of(seed: int) -> dict[str, Any]:
    """Return the state of an optimizer, as torch has it."""
    state = {0: {"step": np.float32(seed), "exp_avg": weights(seed)}}
    return {"state": state, "param_groups": [{"lr": 0.5, "params": [0]}]}


MODEL, OPTIMIZER = {"0.w": weights(1), "0.b": weights(2)[0]}, state_of(3)
SCHEDULER = {"last_epoch": 3, "base_lrs": [0.5]}


def save(path: Path, tree: Any) -> None:
    """Write a file of torch."""
    keys = itertools.count()

    def with_tensors(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: with_tensors(part) for key, part in value.items()}
        if isinstance(value, list):
            return [*map(with_tensors, value)]
        if isinstance(value, np.ndarray | np.generic):
            return torch_peer.tensor(sample("", np.asarray(value)), str(next(keys)))
        return value

    path.parent.mkdir(parents=True, exist_ok=True)
    torch_peer.save(path, with_tensors(tree))


def plain(value: Any) -> Any:
    """Return a tree whose tensors can be compared, with the order of its keys."""
    if isinstance(value, dict):
        return [(key, plain(part)) for key, part in value.items()]
    if isinstance(value, list | tuple):
        return [*map(plain, value)]
    if isinstance(value, torch_peer.Tensor):
        read = torch_peer.sample_of("", value)
        return read.dtype.name, read.shape, read.content
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.name, value.shape, value.tobytes()
    return value


def loaded(target: Path) -> Any:
    return plain(torch_peer.load(target / "rank_0" / "checkpoint_0.pt"))


@pytest.mark.parametrize(
    "name, branch",
    [
        ("model.pt", "model"),
        ("pytorch_model_fsdp.bin", "model"),
        ("model_world_size_8_rank_0.pt", "model"),
        ("optim.pt", "optimizer"),
        ("Optimizer-100.pt", "optimizer"),
        ("optim_world_size_8_rank_0.pt", "optimizer"),
        ("extra_state_world_size_8_rank_0.pt", "extra_state"),
        ("lr_scheduler.bin", "scheduler"),
        ("scaler.pt", "scaler"),
        ("rng_state_0.pth", LEFT_OUT),
        ("sampler.bin", LEFT_OUT),
        ("training_args.bin", LEFT_OUT),
        ("random_model.pt", "model"),
        ("model_optim_rng.pt", ""),
        ("remodel.pt", ""),
        ("net.pt", ""),
        ("optimizer_0", "optimizer"),
    ],
)
def test_words_of_names(name: str, branch: str) -> None:
    assert branch_of_name(name) == branch


def make_loose(folder: Path) -> Path:
    save(folder / "model.pt", MODEL)
    save(folder / "optim.pt", OPTIMIZER)
    return folder


def test_loose_files(tmp_path: Path) -> None:
    source = make_loose(tmp_path / "src")
    save(source / "scheduler.pt", SCHEDULER)
    save(source / "rng_state.pt", {"cpu": np.zeros(4, np.uint8)})
    said = done("transform", source, tmp_path / "made", "--to", "torch")
    assert "model.pt is model, optim.pt is optimizer, scheduler.pt is scheduler" in said.err
    assert "left out, though it lies in" in said.err and "rng_state.pt" in said.err
    expected = {"model": MODEL, "optimizer": OPTIMIZER, "scheduler": SCHEDULER}
    assert loaded(tmp_path / "made") == plain(expected)
    with reshard_mpi.open(source) as checkpoint:
        assert sorted(checkpoint) == [
            *("model.0.b", "model.0.w", "optimizer.state.0.exp_avg", "optimizer.state.0.step")
        ]
        np.testing.assert_array_equal(checkpoint["model.0.w"][1:3], MODEL["0.w"][1:3])
        assert checkpoint.attrs["scheduler"] == SCHEDULER


def test_what_a_trainer_saves(tmp_path: Path) -> None:
    """A model in parts, and what is no dictionary beside it."""
    source = tmp_path / "src"
    for number, (name, value) in enumerate(MODEL.items(), 1):
        save(source / f"pytorch_model-{number:05d}-of-00002.bin", {name: value})
    save(source / "optimizer.pt", OPTIMIZER)
    save(source / "scheduler.pt", SCHEDULER)
    save(source / "rng_state.pth", [3])
    save(source / "training_args.bin", [3])
    (source / "trainer_state.json").write_text("{}")
    said = done("transform", source, tmp_path / "made", "--to", "torch")
    assert "rng_state.pth" in said.err and "training_args" not in said.err
    assert dict(loaded(tmp_path / "made")) == dict(
        plain({"model": MODEL, "optimizer": OPTIMIZER, "scheduler": SCHEDULER})
    )
    (source / "pytorch_model-00002-of-00002.bin").unlink()
    assert "number 2 is not there" in refused("transform", source, tmp_path / "other", "--to", "torch")


@pytest.mark.parametrize("form", few(1, ["dcp", "safetensors", "hdf5", "hf"]))
def test_every_command_and_target(tmp_path: Path, form: str) -> None:
    source = make_loose(tmp_path / "src")
    done("transform", source, tmp_path / "made", "--to", form, "--verify")
    if form != "hf":  # which holds the model alone
        done("diff", source, tmp_path / "made")
    done("verify", source, tmp_path / "made")
    said = done("transform", source, tmp_path / "made", "--to", form, "--verify", "--resume")
    assert "complete already" in said.out
    if form != "hf":
        done("transform", tmp_path / "made", tmp_path / "back", "--to", "torch")
        assert loaded(tmp_path / "back") == plain({"model": MODEL, "optimizer": OPTIMIZER})
    described = json.loads(done("inspect", source, "--json").out)
    assert "model.0.w" in described["shards"]["0"][0]["tensors"]
    assert described["totals"]["tensors"] == 4


def test_a_file_that_changes_is_noticed_on_resume(tmp_path: Path) -> None:
    source = make_loose(tmp_path / "src")
    done("transform", source, tmp_path / "made", "--to", "torch")
    save(source / "optim.pt", state_of(9))
    assert "optim.pt" in refused("transform", source, tmp_path / "made", "--to", "torch", "--resume")


@pytest.mark.parametrize(
    "name, key, content",
    [
        ("optim.pt", "optimizer", OPTIMIZER),
        ("optimizer.pt", "optim", OPTIMIZER),
        ("optim.pt", "optim", {"0.w": weights(1)}),
        ("extra.pt", "extra_state", {"step": 3, "w": weights(5)}),
    ],
)
def test_a_key_that_says_which_branch_it_is(tmp_path: Path, name: str, key: str, content: Any) -> None:
    save(tmp_path / "src" / "model.pt", {"model": MODEL})
    save(tmp_path / "src" / name, {key: content})
    reshard_mpi.transform(tmp_path / "src", tmp_path / "made", to="torch")
    assert loaded(tmp_path / "made") == plain({"model": MODEL, branch_of_name(name): content})


@few_cases(
    2,
    "content",
    [
        {"model": MODEL, "epoch": 3},  # not alone
        {"optimizer": OPTIMIZER},  # another branch
        {"model.0.w": weights(1), "model.1.w": weights(2)},  # names, no dictionary
        {"model": weights(1)},  # a tensor
        {"w": weights(1), "note": "a text"},
        [weights(1), weights(2)],
    ],
)
def test_a_key_that_does_not_say_which_branch_it_is(tmp_path: Path, content: Any) -> None:
    save(tmp_path / "src" / "model.pt", content)
    save(tmp_path / "src" / "optim.pt", OPTIMIZER)
    reshard_mpi.transform(tmp_path / "src", tmp_path / "made", to="torch")
    assert loaded(tmp_path / "made") == plain({"model": content, "optimizer": OPTIMIZER})


def make_ranks(folder: Path, model: str = "model.pt", optimizer: str = "optim.pt") -> Path:
    """Write rank folders, whose tensors `w` are cut, with these names of their files."""
    for rank in range(2):
        rows = slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
        state = {"w": OPTIMIZER["state"][0]["exp_avg"][rows], "step": np.float32(3)}
        save(folder / f"rank_{rank}" / model.format(rank), {**MODEL, "0.w": MODEL["0.w"][rows]})
        save(folder / f"rank_{rank}" / optimizer.format(rank), {"state": {0: state}, "param_groups": []})
    (folder.parent / "spec.toml").write_text(SPEC)
    return folder


OF_RANKS = {
    "model": MODEL,
    "optimizer": {"state": {0: {"w": OPTIMIZER["state"][0]["exp_avg"], "step": np.float32(3)}}, "param_groups": []},
}


@pytest.mark.parametrize(
    "names", [("model.pt", "optim.pt"), ("model_rank_{}.pt", "optim_rank_{}.pt"), ("llama2_model.pt", "optimizer.pt")]
)
def test_rank_folders(tmp_path: Path, names: tuple[str, str]) -> None:
    source = make_ranks(tmp_path / "src", *names)
    said = done("transform", source, tmp_path / "made", "--to", "torch", "--src-strategy", tmp_path / "spec.toml")
    assert f"{names[0].format(0)} is model, {names[1].format(0)} is optimizer, and so on every rank" in said.err
    assert loaded(tmp_path / "made") == plain(OF_RANKS)


def test_rank_folders_become_others(tmp_path: Path) -> None:
    source, spec = make_ranks(tmp_path / "src"), tmp_path / "spec.toml"
    reshard_mpi.transform(source, tmp_path / "one", spec, to="dcp")
    reshard_mpi.transform(tmp_path / "one", tmp_path / "two", None, spec, to="torch")
    reshard_mpi.transform(tmp_path / "two", tmp_path / "made", spec, to="torch")
    assert loaded(tmp_path / "made") == plain(OF_RANKS)


def test_the_newest_moment_that_has_all_files(tmp_path: Path) -> None:
    source = make_ranks(tmp_path / "src", "model_step_9.pt", "optim_step_9.pt")
    for rank in range(2):
        save(source / f"rank_{rank}" / "model_step_8.pt", {"0.w": weights(7)})
        save(source / f"rank_{rank}" / "optim_step_8.pt", {"0.w": weights(7)})
        save(source / f"rank_{rank}" / "model_step_10.pt", {"0.w": weights(7)})
    said = done("transform", source, tmp_path / "made", "--to", "torch", "--src-strategy", tmp_path / "spec.toml")
    assert "model_step_9.pt chosen" in said.err
    assert loaded(tmp_path / "made") == plain(OF_RANKS)


def test_one_rank_of_a_data_parallel_training(tmp_path: Path) -> None:
    """It holds what the ranks beside it hold, which is compared by the names that branches have."""
    for rank in range(3):
        make_loose(tmp_path / "src" / f"rank_{rank}")
    said = done("transform", tmp_path / "src" / "rank_1", tmp_path / "made", "--to", "torch")
    assert "it holds the same as the shards beside it" in said.err
    assert loaded(tmp_path / "made") == plain({"model": MODEL, "optimizer": OPTIMIZER})


def make_distributed(folder: Path, *names: str) -> Path:
    """Write files of four ranks that say how they are cut."""
    folder.mkdir()
    for rank in range(4):
        for name in names:
            shutil.copy(GOLDEN / f"model_world_size_4_rank_{rank}.pt", folder / f"{name}_world_size_4_rank_{rank}.pt")
    return folder


def test_files_that_say_whose_they_are(tmp_path: Path) -> None:
    source = make_distributed(tmp_path / "src", "model", "optim")
    for rank in range(4):
        save(source / f"extra_state_world_size_4_rank_{rank}.pt", {"lr_scheduler": SCHEDULER})
    reshard_mpi.transform(source, tmp_path / "made", to="torch")
    reshard_mpi.transform(make_distributed(tmp_path / "alone", "model"), tmp_path / "other", to="torch")
    whole = loaded(tmp_path / "other")
    made = dict(loaded(tmp_path / "made"))
    assert [*made] == ["model", "optimizer", "extra_state"]
    assert made["model"] == made["optimizer"] == whole and made["extra_state"] == plain({"lr_scheduler": SCHEDULER})
    with reshard_mpi.open(source) as checkpoint:
        assert checkpoint.attrs["extra_state"] == {"lr_scheduler": SCHEDULER}


def test_one_kind_that_is_selected(tmp_path: Path) -> None:
    source = make_distributed(tmp_path / "src", "model", "optim")
    reshard_mpi.transform(source, tmp_path / "made", select="model*", to="torch")
    reshard_mpi.transform(make_distributed(tmp_path / "alone", "model"), tmp_path / "other", to="torch")
    assert loaded(tmp_path / "made") == loaded(tmp_path / "other")
    reshard_mpi.transform(make_loose(tmp_path / "loose"), tmp_path / "optimizer", select="optim*", to="torch")
    assert loaded(tmp_path / "optimizer") == plain(OPTIMIZER)


def make_folders(folder: Path, *names: str) -> Path:
    """Write distributed checkpoints beside one another, of Accelerate's names unless others are given."""
    for name in names or ("pytorch_model_fsdp_0", "optimizer_0"):
        tree = {"model": MODEL} if branch_of_name(name) == "model" else {"optimizer": OPTIMIZER}
        save(folder.parent / "whole.pt", tree)
        reshard_mpi.transform(folder.parent / "whole.pt", folder / name, to="dcp")
        shutil.rmtree(folder / name / ".reshard_mpi")
        (folder / name / "reshard.json").unlink()
    return folder


def test_folders(tmp_path: Path) -> None:
    source = make_folders(tmp_path / "src")
    beside = ["scheduler.bin", "random_states_0.pkl", "sampler.bin", "scaler.pt", "custom_checkpoint_0.pkl"]
    for name in beside:
        (source / name).write_bytes(b"content")
    said = done("transform", source, tmp_path / "made", "--to", "torch", "--verify")
    assert "pytorch_model_fsdp_0 is model, optimizer_0 is optimizer" in said.err
    assert all(name in said.err for name in beside)
    assert loaded(tmp_path / "made") == plain({"model": MODEL, "optimizer": OPTIMIZER})
    done("verify", source, tmp_path / "made")
    done("diff", source, tmp_path / "made")
    assert "4 tensors" in done("inspect", source).out
    done("transform", source, tmp_path / "again")
    found = dcp_peer.arrays_of(tmp_path / "again")
    parts = {**dcp_peer.arrays_of(source / "pytorch_model_fsdp_0"), **dcp_peer.arrays_of(source / "optimizer_0")}
    assert {name: array.tobytes() for name, array in found.items()} == {
        name: array.tobytes() for name, array in parts.items()
    }
    reshard_mpi.transform(source / "optimizer_0", tmp_path / "alone", to="torch")
    assert loaded(tmp_path / "alone") == plain({"optimizer": OPTIMIZER})


@pytest.mark.parametrize("name", few(1, ["optimizer_0", "optimizer_1", "scaler"]))
def test_a_target_that_would_be_a_branch_of_its_source(tmp_path: Path, name: str) -> None:
    source = make_folders(tmp_path / "src")
    assert name in refused("transform", source, source / name, "--to", "dcp")
    done("transform", source, source / "made", "--to", "dcp")
    assert len(reshard_mpi.inspect(source)["files"]) == 2


def spoil_index(source: Path) -> None:
    (source / "optimizer_0" / ".metadata").unlink()


def spoil_file(source: Path) -> None:
    next((source / "optimizer_0").glob("*.distcp")).unlink()


def spoil_number(source: Path) -> None:
    (source / "optimizer_0").rename(source / "optimizer_1")


def spoil_models(source: Path) -> None:
    shutil.copytree(source / "pytorch_model_fsdp_0", source / "pytorch_model_fsdp_1")
    shutil.copytree(source / "optimizer_0", source / "optimizer_1")


@few_cases(
    1,
    "spoil, words",
    [
        (spoil_index, ["optimizer_0", ".metadata"]),
        (spoil_file, ["optimizer_0", "__0_0.distcp"]),
        (spoil_number, ["pytorch_model_fsdp_0, optimizer_1"]),
        (spoil_models, ["pytorch_model_fsdp_0, pytorch_model_fsdp_1", "by itself"]),
    ],
)
def test_folders_that_do_not_belong_together(tmp_path: Path, spoil: Callable[[Path], None], words: list[str]) -> None:
    source = make_folders(tmp_path / "src")
    spoil(source)
    said = refused("transform", source, tmp_path / "made", "--to", "torch")
    assert all(word in said for word in words), said
    assert not (tmp_path / "made").exists()


def test_folders_of_other_things(tmp_path: Path) -> None:
    """A folder of a model alone is given by itself; what only has such a name is nothing of it."""
    source = make_folders(tmp_path / "src", "model")
    (source / "optim_plots").mkdir()
    (source / "optim_plots" / "loss.png").write_bytes(b"content")
    assert "no checkpoint found" in refused("plan", source, tmp_path / "made")


def files(*names: str, tree: Any = OPTIMIZER) -> Callable[[Path], None]:
    return lambda source: [save(source / name, tree) for name in names] and None


@pytest.mark.parametrize(
    "spoil, words",
    [
        (files("ema_model.pt", tree=MODEL), ["'0.w'", "model.pt", "ema_model.pt"]),
        (files("data.pt", tree={"position": 3}), ["nested", "data.pt"]),
        (files("data.pt", tree={"model.0.w": weights(1)}), ["'model.0.w'", "data.pt"]),
    ],
)
def test_loose_files_that_cannot_be_joined(tmp_path: Path, spoil: Callable[[Path], None], words: list[str]) -> None:
    source = make_loose(tmp_path / "src")
    spoil(source)
    said = refused("transform", source, tmp_path / "made", "--to", "torch")
    assert all(word in said for word in words) and "--select" in said, said


def test_a_file_whose_words_say_nothing_keeps_its_names(tmp_path: Path) -> None:
    source = make_loose(tmp_path / "src")
    save(source / "mask.pt", {"kept": weights(8), "why": "a text"})
    said = done("transform", source, tmp_path / "made", "--to", "torch")
    assert "mask.pt is at the top" in said.err
    made = dict(loaded(tmp_path / "made"))
    assert made == dict(plain({"model": MODEL, "optimizer": OPTIMIZER, "kept": weights(8), "why": "a text"}))


@pytest.mark.parametrize("names", [("model_100.pt", "optim_200.pt"), ("model-1_1.pt", "optim-1_2.pt")])
def test_files_of_different_steps(tmp_path: Path, names: tuple[str, str]) -> None:
    for folder in ("loose", "ranks/rank_0", "ranks/rank_1"):
        save(tmp_path / folder / names[0], MODEL)
        save(tmp_path / folder / names[1], OPTIMIZER)
    for folder in ("loose", "ranks"):
        with pytest.raises(DisagreementError, match=f"{names[0]}, {names[1]}"):
            discovery.find_shards(str(tmp_path / folder))


def test_files_that_count_different_steps(tmp_path: Path) -> None:
    """A copy of one of them may have failed. Their names say nothing."""
    for name, tree, step in (("model.pt", MODEL, 100), ("optim.pt", OPTIMIZER, 200)):
        key = name.removesuffix(".pt")
        save(tmp_path / "src" / name, {key: tree, "global_step": step})
    said = refused("transform", tmp_path / "src", tmp_path / "made", "--to", "torch")
    assert "the shards are of different moments" in said and "= 100" in said and "= 200" in said


def test_ranks_of_different_steps(tmp_path: Path) -> None:
    """The numbers are in the optimizers' names alone."""
    for rank in range(2):
        save(tmp_path / f"rank_{rank}" / "model.pt", MODEL)
        save(tmp_path / f"rank_{rank}" / f"optim_step_{rank + 3}.pt", OPTIMIZER)
    with pytest.raises(DisagreementError, match=r"step 3.*(?s:.*)step 4"):
        discovery.find_shards(str(tmp_path))


@pytest.mark.parametrize(
    "make, name, words",
    [
        (make_ranks, "rank_1/optim.pt", ["model.pt, optim.pt", "model.pt of rank 1"]),
        (
            lambda source: make_distributed(source, "model", "optim"),
            "optim_world_size_4_rank_2.pt",
            ["optim_world_size_4_rank_0.pt", "model_world_size_4_rank_2.pt of rank 2"],
        ),
    ],
)
def test_a_rank_that_lacks_a_file(tmp_path: Path, make: Callable[[Path], Path], name: str, words: list[str]) -> None:
    source = make(tmp_path / "src")
    (source / name).unlink()
    said = refused("transform", source, tmp_path / "made", "--to", "torch")
    assert all(word in said for word in words) and "--select" in said, said


@few_cases(
    2,
    "spoil, error, words",
    [
        (files("data.pt"), SourceError, ["data.pt"]),
        (files("scheduler.pt", tree=SCHEDULER), SourceError, ["scheduler.pt"]),
        (
            lambda source: shutil.copy(source / "optim_world_size_4_rank_0.pt", source / "adam_world_size_4_rank_0.pt"),
            SourceError,
            ["adam_world_size_4_rank_0.pt"],
        ),
        (
            lambda source: shutil.copy(
                source / "model_world_size_4_rank_0.pt", source / "model_world_size_4_rank_9.pt"
            ),
            SourceError,
            ["rank 0", "model_world_size_4_rank_9.pt"],
        ),
        (
            lambda source: shutil.copy(source / "model_world_size_4_rank_0.pt", source / "ema_model_size_4_rank_0.pt"),
            SourceError,
            ["ema_model_size_4_rank_0.pt"],
        ),
        (
            lambda source: shutil.copy(
                source / "optim_world_size_4_rank_1.pt", source / "optim_world_size_4_rank_0.pt"
            ),
            CoverageError,  # the rank counts as lost
            ["rank 0 of 4", "rank 1 of 4"],
        ),
    ],
)
def test_files_beside_those_of_ranks(
    tmp_path: Path, spoil: Callable[[Path], Any], error: type[ReshardError], words: list[str]
) -> None:
    source = make_distributed(tmp_path / "src", "model", "optim")
    spoil(source)
    with pytest.raises(error) as raised:
        reshard_mpi.transform(source, tmp_path / "made", to="torch")
    assert all(word in str(raised.value) for word in words), raised.value


def test_a_rank_folder_with_a_file_of_no_branch(tmp_path: Path) -> None:
    source = make_ranks(tmp_path / "src")
    save(source / "rank_0" / "data.pt", {"w": weights(1)})
    with pytest.raises(SourceError, match="several files of one rank"):
        discovery.find_shards(str(source))


def test_a_damaged_file_of_a_rank(tmp_path: Path) -> None:
    """The other file says whose it is; what only the damaged one has is missing by name."""
    source = make_distributed(tmp_path / "src", "model", "optim")
    path = source / "optim_world_size_4_rank_1.pt"
    path.write_bytes(path.read_bytes()[:100])
    assert path.name in refused("transform", source, tmp_path / "made", "--to", "torch")


@pytest.mark.parametrize("names", [["optim.pt"], ["optim.pt", "scheduler.pt"], ["rank_0/optim.pt"]])
def test_an_optimizer_without_a_model(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        save(tmp_path / name, OPTIMIZER if "optim" in name else SCHEDULER)
    (warning,) = discovery.find_shards(str(tmp_path)).warnings
    assert "optim.pt" in warning and "no file of the model" in warning
    assert discovery.find_shards(str(tmp_path), "*optim*").warnings == ()


# What a file may hold: trees of tensors and plain values, with keys of all sorts.
LEAVES = st.integers(0, 99).map(weights) | st.integers() | st.text(max_size=3) | st.none() | st.floats(allow_nan=False)
KEYS = st.sampled_from(["model", "optim", "optimizer", "state", "w", "a.b", "0"]) | st.integers(0, 3)
TREES = st.recursive(
    LEAVES, lambda inner: st.dictionaries(KEYS, inner, max_size=3) | st.lists(inner, max_size=2), max_leaves=8
)
WORDS = {"model": "model", "optim": "optimizer", "extra_state": "extra_state", "scheduler": "scheduler"}


def oracle(word: str, content: Any) -> Any:
    """Return a branch's tree, reckoned from what the file holds."""
    names = {"model": ["model"], "optimizer": ["optim", "optimizer"]}.get(WORDS[word], ["extra_state", "extra"])
    if len(content) == 1 and next(iter(content)) in names and isinstance(next(iter(content.values())), dict):
        return next(iter(content.values()))
    return content


@pytest.mark.slow
@many(25)  # each is three conversions
@given(data=st.data())
def test_any_files_come_out_as_a_naive_join_says(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    words = data.draw(st.lists(st.sampled_from([*WORDS]), min_size=2, max_size=4, unique=True))
    contents = {word: data.draw(st.dictionaries(KEYS, TREES, max_size=3)) for word in words}
    folder = tmp_path_factory.mktemp("joined")
    for word, content in contents.items():
        save(folder / "src" / f"{word}.pt", content)
    save(folder / "src" / "model.pt", contents.setdefault("model", {"w": weights(1)}))
    expected = {WORDS[word]: oracle(word, contents[word]) for word in WORDS if word in contents}
    try:
        form = data.draw(st.sampled_from(["torch", "dcp", "safetensors"]))
        reshard_mpi.transform(folder / "src", folder / "made", to="torch")
        reshard_mpi.transform(folder / "src", folder / "between", to=form)
        reshard_mpi.transform(folder / "between", folder / "back", to="torch")
    except (ReshardError, NestError) as error:
        # Only what each file is refused for as well: two keys that make one name.
        assert "same name" in str(error) or "key twice" in str(error), error
        return
    assert loaded(folder / "made") == loaded(folder / "back") == plain(expected)
