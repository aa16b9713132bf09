"""Checkpoints exchanged with torch.distributed.checkpoint: its processes save what we read, and load what we write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.command_line import run_apart
from support.dcp_peer import arrays_of
from support.torch_processes import run_processes

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch

TARGET = """
mesh = { dp = 2 }
[[parameter]]
match = "*.0.weight"
split = { 0 = ["dp"] }
[[parameter]]
match = "*.0.bias"
split = { 0 = ["dp"] }
[[parameter]]
match = "further.both"
split = { 1 = ["dp"] }
"""


def processes(work: str, ranks: int, folder: Path, whole: Path) -> None:
    """Have processes of torch save or load a checkpoint."""
    meeting = folder.with_name(f"{folder.name}.{work}")
    run_processes("dcp_ranks.py", ranks, meeting, folder, whole, first=(work,))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint of four processes, and its whole tensors."""
    folder = tmp_path_factory.mktemp("saved")
    processes("save", 4, folder / "checkpoint", folder / "whole.pt")
    return folder / "checkpoint", folder / "whole.pt"


def bits(tensor: Any) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).numpy()) if tensor.numel() else b""


def assert_same(whole: Path, found: dict[str, bytes]) -> None:
    assert found == {name: bits(tensor) for name, tensor in torch.load(whole).items()}


def flattened(value: Any, path: str = "") -> dict[str, bytes]:
    """Return the tensors of nested dictionaries and lists by name."""
    if isinstance(value, torch.Tensor):
        return {path: bits(value)}
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {
        name: content
        for key, part in inner
        for name, content in flattened(part, f"{path}.{key}" if path else str(key)).items()
    }


def test_what_four_processes_save(saved: tuple[Path, Path]) -> None:
    assert_same(saved[1], {name: array.tobytes() for name, array in arrays_of(saved[0]).items()})


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_two_processes_load(tmp_path: Path, saved: tuple[Path, Path], ranks: int) -> None:
    """Into another mesh: a model and its optimizer, DTensors, plain tensors and objects."""
    (tmp_path / "target.toml").write_text(TARGET)
    strategy = [] if ranks == 1 else ["--dst-strategy", tmp_path / "target.toml"]
    run_apart("transform", saved[0], tmp_path / "made", "--strict", "--jobs", "1", *strategy, check=True)
    assert len(list((tmp_path / "made").glob("__*"))) == ranks
    processes("load", 2, tmp_path / "made", saved[1])


@pytest.mark.parametrize("are_tensors", [False, True])
def test_a_training_loads_what_is_made_of_its_file(tmp_path: Path, are_tensors: bool) -> None:
    """Its keys are those that torch makes of the same: a scheduler's milestones are a Counter, betas a tuple.

    Where that has tensors in it, these have keys besides.
    """
    from torch.distributed import checkpoint

    net = torch.nn.Linear(3, 4)
    betas = tuple(torch.tensor(beta) if are_tensors else beta for beta in (0.5, 0.75))
    optimizer = torch.optim.AdamW(net.parameters(), betas=betas, foreach=False)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 4])
    training = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save(training, tmp_path / "x.pt")
    run_apart("transform", tmp_path / "x.pt", tmp_path / "made", "--to", "dcp", "--jobs", "1", check=True)
    checkpoint.save(training, checkpoint_id=tmp_path / "saved", no_dist=True)
    made, saved = (
        checkpoint.FileSystemReader(tmp_path / name).read_metadata().state_dict_metadata.keys()
        for name in ("made", "saved")
    )
    key = "optimizer.param_groups.0.betas"
    assert made == {*saved, *((f"{key}.0", f"{key}.1") if are_tensors else ())}
    optimizer.param_groups[0]["betas"] = tuple(0 * beta for beta in betas)
    again = {**training, "optimizer": optimizer.state_dict()}
    checkpoint.load(again, checkpoint_id=tmp_path / "made", no_dist=True)
    assert again["optimizer"]["param_groups"][0]["betas"] == betas
    for name in ("made", "saved"):
        run_apart("transform", tmp_path / name, tmp_path / f"{name}.back", "--to", "torch", "--jobs", "1", check=True)
        (path,) = (tmp_path / f"{name}.back").glob("rank_0/*.pt")
        loaded = torch.load(path)
        assert loaded["scheduler"]["milestones"] == {1: 1, 4: 1}
        assert loaded["optimizer"]["param_groups"][0]["betas"] == betas


def test_through_a_file_of_torch_to_one_of_torch(tmp_path: Path, saved: tuple[Path, Path]) -> None:
    """There and back, and then made one file by torch: nested as it was saved."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    run_apart("transform", saved[0], tmp_path / "file", "--to", "torch", "--strict", "--jobs", "1", check=True)
    (path,) = (tmp_path / "file").glob("rank_0/*.pt")
    assert_same(saved[1], flattened(torch.load(path)))
    run_apart("transform", tmp_path / "file", tmp_path / "made", "--to", "dcp", "--strict", "--jobs", "1", check=True)
    dcp_to_torch_save(tmp_path / "made", tmp_path / "one.pt")
    one, expected = torch.load(tmp_path / "one.pt", weights_only=False), torch.load(path)
    assert_same(saved[1], flattened(one))
    assert one["optim"]["param_groups"] == expected["optim"]["param_groups"]
    assert one["plain list"] == [1, 2, "a"] and one["list"][2] == 5 and one["a.b"].keys() == {"c.d"}
