"""A bit that is flipped anywhere in a target that was verified, or in its index, is found by each way to verify it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import torch_peer
from support.checkpoints import sample
from support.examples import few

import reshard_mpi
from reshard_mpi.errors import ReshardError

FORMS = ("ckpt", "hdf5", "safetensors", "torch", "dcp", "hf")
Check = Callable[[Path, Path], Any]


def training(folder: Path) -> Path:
    """Save a training with settings beside its tensors."""
    keys = count()

    def tensor(value: float) -> Any:
        return torch_peer.tensor(sample("", np.full((3, 5), value, np.float32)), str(next(keys)))

    saved = {
        "model": {"fc.weight": tensor(1), "fc.bias": tensor(2)},
        "optimizer": {"state": {0: {"exp_avg": tensor(3)}}, "param_groups": [{"lr": 0.125, "params": [0, 1]}]},
        "epoch": 3,
        "name": "a run",
    }
    torch_peer.save(folder / "x.pt", saved)
    return folder / "x.pt"


def verify_alone(_: Path, out: Path) -> object:
    return reshard_mpi.verify(out)


def verify_pair(src: Path, out: Path) -> object:
    return reshard_mpi.verify(src, out)


def read_verified(_: Path, out: Path) -> object:
    return reshard_mpi.transform(out, out.parent / "again", to="safetensors", verify=True, overwrite=True)


# The first byte of which a bit is flipped, and how many there are from one to the next.
FEW, MORE = (3, 499), (29, 97)


@pytest.mark.parametrize(
    ("check", "places", "form"),
    few(
        1,
        [
            *itertools.product((verify_alone,), (FEW, MORE), FORMS),
            *itertools.product((verify_pair, read_verified), (FEW,), FORMS),
        ],
    ),
)
def test_a_flipped_bit_is_found(tmp_path: Path, form: str, check: Check, places: tuple[int, int]) -> None:
    first, step = places
    src, out = training(tmp_path), tmp_path / "out"
    reshard_mpi.transform(src, out, to=form, verify=True, max_shard_size=64 if form == "hf" else None)
    check(src, out)
    files = [path for path in out.rglob("*") if path.is_file() and ".reshard_mpi" not in path.parts]
    passed = []
    for path in (path for path in files if path.name != "reshard.json"):
        content = path.read_bytes()
        for place in range(first % len(content), len(content), step):
            flipped = bytearray(content)
            flipped[place] ^= 1 << place % 8
            path.write_bytes(flipped)
            try:
                check(src, out)
                passed.append((path.name, place))
            except ReshardError:
                pass
        path.write_bytes(content)
    assert passed == []
    check(src, out)


@pytest.mark.parametrize("content", few(1, [b"", b"{}", None]))
@pytest.mark.parametrize(("form", "index"), [("dcp", ".metadata"), ("hf", "model.safetensors.index.json")])
def test_a_damaged_index_is_made_anew_by_resume(tmp_path: Path, form: str, index: str, content: bytes | None) -> None:
    src, out = training(tmp_path), tmp_path / "out"
    asked: dict[str, Any] = {"to": form, "max_shard_size": 64 if form == "hf" else None}
    reshard_mpi.transform(src, out, **asked)
    committed = (out / index).read_bytes()
    if content is None:
        (out / index).unlink()
    else:
        (out / index).write_bytes(content)
    reshard_mpi.transform(src, out, resume=True, **asked)
    assert (out / index).read_bytes() == committed


@pytest.mark.parametrize("way", few(1, ["file", "selected", "links", "uncommitted"]))
def test_sums_of_files_that_are_read_by_themselves(tmp_path: Path, way: str) -> None:
    """Files of a folder with an index, one of them damaged, read without that index."""
    src, out = training(tmp_path), tmp_path / "out"
    reshard_mpi.transform(src, out, to="hf", max_shard_size=64, verify=True)
    damaged = out / "model-00002-of-00002.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-2] ^= 4
    damaged.write_bytes(content)
    given: dict[str, Any] = {}
    read = out
    if way == "file":
        read = damaged
    elif way == "selected":
        given["select"] = "model-0000*"
    elif way == "links":
        (tmp_path / "links").mkdir()
        read = tmp_path / "links"
        for path in out.glob("*.safetensors"):
            (read / path.name).symlink_to(path)
    else:
        for name in ("reshard.json", "model.safetensors.index.json"):
            (out / name).unlink()
        with pytest.raises(ReshardError, match="is damaged"):
            reshard_mpi.verify(out)
    with pytest.raises(ReshardError, match="is damaged"):
        reshard_mpi.transform(read, tmp_path / "again", to="safetensors", verify=True, **given)


def test_a_lost_shard_among_files_of_others(tmp_path: Path) -> None:
    src, out = training(tmp_path), tmp_path / "out"
    (tmp_path / "two.toml").write_text('mesh = { x = 2 }\n[[parameter]]\nmatch = "*"\n')
    reshard_mpi.transform(src, out, None, tmp_path / "two.toml", verify=True)
    (out / "rank_1").rename(out / "rank_4")
    (out / "rank_4/checkpoint_1.pt").rename(out / "rank_4/checkpoint_4.pt")
    with pytest.raises(ReshardError, match="1 committed shard is missing"):
        reshard_mpi.verify(out)
