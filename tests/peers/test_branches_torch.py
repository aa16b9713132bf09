"""What processes of torch save as several files or folders is one checkpoint, from which one process trains on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.command_line import run_apart
from support.torch_processes import run_processes

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch

RANKS = 2


def saved(scheme: str, folder: Path) -> tuple[Path, Any]:
    """Have processes of torch save a training; return its folder, and what it is as a whole."""
    paths = (folder / "meeting", folder / "src", folder / "whole.pt")
    run_processes("branch_ranks.py", RANKS, *paths, first=(scheme,))
    return folder / "src", torch.load(folder / "whole.pt")


@pytest.fixture(scope="module")
def of_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    return saved("files", tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def of_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    return saved("folders", tmp_path_factory.mktemp("folders"))


def assert_trains_on(state: Any, whole: Any) -> None:
    """Load a model and its optimizer, which must go on as the processes did, but for the order of their sums."""
    from support.branch_ranks import network, optimizer_of, step
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    assert [*state["model"]] == [*whole["model"]]
    assert all(torch.equal(tensor, state["model"][name]) for name, tensor in whole["model"].items())
    model = network()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    model.load_state_dict(state["model"])
    optimizer = optimizer_of(model)
    if isinstance(state["optimizer"]["param_groups"][0]["params"][0], str):
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    else:
        optimizer.load_state_dict(state["optimizer"])
    for name, parameter in model.named_parameters():
        held, expected = optimizer.state[parameter], whole["optimizer"]["state"][name]
        assert held.keys() == expected.keys() >= {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(held[key], expected[key]) for key in expected)
    assert optimizer.param_groups[0]["lr"] == whole["lr"] != 0.01
    losses = [step(model, optimizer) for _ in whole["losses"]]
    assert losses[0] > losses[1]
    torch.testing.assert_close(losses, whole["losses"], rtol=1e-5, atol=0)


@pytest.mark.parametrize("between", [None, "dcp"])
def test_files_of_model_and_optimizer_for_each_rank(
    tmp_path: Path, of_files: tuple[Path, Any], between: str | None
) -> None:
    source, whole = of_files
    for form in filter(None, (between, "torch")):
        run_apart("transform", source, tmp_path / form, "--to", form, "--jobs", "1", "--verify", check=True)
        source = tmp_path / form
    state = torch.load(source / "rank_0" / "checkpoint_0.pt")
    assert [*state] == ["model", "optimizer", "extra_state"]
    assert state["extra_state"]["lr_scheduler"]["last_epoch"] == 3
    assert_trains_on(state, whole)


def test_a_folder_of_the_model_and_one_of_the_optimizer(tmp_path: Path, of_folders: tuple[Path, Any]) -> None:
    """As Accelerate saves them. Its own files have checksums, by which they are verified."""
    source, whole = of_folders
    verified = run_apart("verify", source, check=True)
    assert "4 shards" in verified.out and "sound" in verified.out
    said = run_apart("transform", source, tmp_path / "made", "--to", "torch", "--jobs", "1", check=True)
    assert "scheduler.bin" in said.err
    state = torch.load(tmp_path / "made" / "rank_0" / "checkpoint_0.pt")
    assert [*state] == ["model", "optimizer"]
    assert_trains_on(state, whole)


def test_a_running_model_loads_them(of_folders: tuple[Path, Any]) -> None:
    """Through the names that torch's own distributed checkpoints have."""
    import reshard_mpi.torch

    source, whole = of_folders
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in whole["model"].items()}}
    torch.distributed.checkpoint.load(state, storage_reader=reshard_mpi.torch.Reader(source), no_dist=True)
    assert all(torch.equal(tensor, state["model"][name]) for name, tensor in whole["model"].items())
