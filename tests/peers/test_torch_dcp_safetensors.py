"""Safetensors files that processes of torch.distributed.checkpoint save, each rank its own, beside what torch makes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.torch_processes import run_processes

import reshard_mpi
from reshard_mpi.errors import ShardError, SourceError

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch

RANKS = 4


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What four processes have saved."""
    folder = tmp_path_factory.mktemp("saved")
    run_processes("dcp_safetensors_ranks.py", RANKS, folder / "meeting", folder)
    return folder


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).numpy())


def found(folder: Path, count: int) -> dict[str, bytes]:
    loaded = reshard_mpi.load_rank(0, folder, src_files=count)
    return {name: array.tobytes() for name, array in loaded.items() if not isinstance(array, str)}


@pytest.mark.parametrize("name", ["one", "two"])
def test_what_four_processes_save(saved: Path, name: str) -> None:
    whole = {name: bits(tensor) for name, tensor in torch.load(saved / "whole.pt").items()}
    assert found(saved / name, len(list((saved / name).iterdir()))) == whole


@pytest.mark.parametrize("name", ["one", "two"])
def test_no_file_of_them_can_be_lost(saved: Path, tmp_path: Path, name: str) -> None:
    files = sorted((saved / name).iterdir())
    for lost in files:
        shutil.copytree(saved / name, tmp_path / "copy")
        (tmp_path / "copy" / lost.name).unlink()
        with pytest.raises((ShardError, SourceError), match=r"the files of rank|not as many files|no checkpoint found"):
            found(tmp_path / "copy", len(files))
        shutil.rmtree(tmp_path / "copy")


def test_torch_consolidates_the_same(saved: Path, tmp_path: Path) -> None:
    """But for whole numbers, of which torch's own function cannot tell the size, and a single one, which it loses."""
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    whole = torch.load(saved / "whole.pt")
    names = [name for name, tensor in whole.items() if tensor.is_floating_point() and tensor.ndim]
    (tmp_path / "theirs").mkdir()
    consolidate_safetensors_files(str(saved / "one"), str(tmp_path / "theirs"), dict.fromkeys(names, 1))
    reshard_mpi.transform(saved / "one", tmp_path / "ours", src_files=RANKS)
    (theirs,) = (tmp_path / "theirs").glob("*.safetensors")
    expected = reshard_mpi.load_rank(0, theirs)
    ours = reshard_mpi.load_rank(0, tmp_path / "ours")
    assert {name: array.tobytes() for name, array in expected.items()} == {name: ours[name].tobytes() for name in names}
    index = json.loads((tmp_path / "theirs" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == set(names)
