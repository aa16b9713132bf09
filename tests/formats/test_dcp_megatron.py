"""Folders as Megatron-Core saves them (torch_dist): read as those of torch, flat buckets left out and named.

`tests/checkpoints/test_foreign_samples.py` has true ones.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support import dcp_peer, torch_peer
from support.command_line import refused, run_here
from support.dcp_peer import Metadata, arrays_of, listed
from support.examples import few

from reshard_mpi.checkpoints import discovery
from reshard_mpi.formats import dcp
from reshard_mpi.formats.dcp import metadata
from reshard_mpi.sharding.box import Box

W = np.arange(24, dtype=np.float32).reshape(6, 4)
UPPER, LOWER, FLAT = Box((0, 0), (3, 4)), Box((3, 0), (6, 4)), Box((0,), (24,))
BUCKET = "optimizer.distributed.dp_group_idx_{}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.{}"
NUMEL = "optimizer.distributed.dp_group_idx_0.per_bucket_numel/shard_0_1"
GROUPS = "optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1"
ROOT = "megatron.core.dist_checkpointing.strategies.torch"


def write(folder: Path, prefix: str = "", root: str = "") -> None:
    """Write a tensor, buckets, two in a file of their own, and objects. root: the class of the metadata."""
    pieces = [("__0_0.distcp", UPPER), ("__1_0.distcp", LOWER)]
    tensors = {"decoder.w": listed(W, pieces)}
    for rank in range(2):
        for kind in ("param", "exp_avg"):
            name = prefix + BUCKET.format(rank, kind)
            tensors[name] = listed(W.reshape(24), [(f"__{2 * rank}_0.distcp", FLAT)])
    objects = {prefix + NUMEL: ("__0_0.distcp", [[24]]), prefix + GROUPS: ("__0_0.distcp", [{"lr": 0.5}])}
    torch_peer.save(folder / "common.pt", {"iteration": 3})
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    if not root:
        dcp_peer.write(folder, tensors, objects)
        return
    named = type("MCoreMetadata", (Metadata,), {"__module__": root, "__qualname__": "MCoreMetadata"})
    parts = root.split(".")
    modules = {name: types.ModuleType(name) for name in (".".join(parts[: at + 1]) for at in range(len(parts)))}
    modules[root].MCoreMetadata = named  # type: ignore[attr-defined]

    def spoil(made: Metadata) -> None:
        made.__class__ = named
        made.mcore_data = {name: {} for name in tensors}  # type: ignore[attr-defined]

    with mock.patch.dict(dcp_peer.MODULES, modules):
        dcp_peer.write(folder, tensors, objects, spoil=spoil)


@pytest.mark.parametrize("prefix", few(1, ["", "chained_1."]))
@pytest.mark.parametrize("root", few(1, ["", ROOT]))
def test_buckets_are_left_out_and_named(tmp_path: Path, prefix: str, root: str) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    write(source, prefix, root)
    by_choice = run_here("plan", str(source), str(out), "--from", "dcp")
    for name in ("metadata.json", "common.pt"):  # nothing else says that it is Megatron's
        (source / name).unlink()
    assert {name: array.tolist() for name, array in arrays_of(source).items()} == {"decoder.w": W.tolist()}
    (said,) = dcp.open_folder(str(source))[0].left_out
    assert said.startswith(f"{prefix}{BUCKET.format(0, 'exp_avg')}, ") and "and 3 more: " in said
    told = run_here("transform", str(source), str(out), "--to", "torch")
    assert by_choice.code == 0 and said in by_choice.err and "--from megatron" in said
    assert told.code == 0 and said in told.err
    assert "distcp" not in told.err  # files with buckets alone are of the checkpoint too
    assert said in run_here("inspect", str(source)).out
    assert "flat buckets" in refused("plan", str(source), str(tmp_path / "strict"), "--strict")
    assert len(discovery.find_shards(str(source)).shards) == 3
    assert b"lr" in (out / "rank_0" / "checkpoint_0.pt").read_bytes()  # the optimizer's groups are plain data


def test_a_class_of_another_module(tmp_path: Path) -> None:
    write(tmp_path, root="megatron.core.other")
    assert "no Metadata where one should be" in refused("plan", str(tmp_path), str(tmp_path.parent / "out"))


NAMES = [
    "optimizer.distributed.dp_group_idx_0.gbuf_idx_0",
    "optimizer.distributed.dp_group_idx_x.gbuf_idx_0.dtype_(a, b).bucket_idx_0.param",
    "my.optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(a, b).bucket_idx_0.param",
    "bucket_idx_0.param",
]


@pytest.mark.parametrize("name", NAMES)
def test_names_that_are_none_of_a_bucket(tmp_path: Path, name: str) -> None:
    dcp_peer.write(tmp_path, {name: listed(W, [("__0_0.distcp", Box.whole(W.shape))])})
    assert list(arrays_of(tmp_path)) == [name]


def test_buckets_alone(tmp_path: Path) -> None:
    """Nothing is left that could be converted: the run goes through, and says what it has left out."""
    array: Any = W.reshape(24)
    dcp_peer.write(tmp_path, {BUCKET.format(0, "param"): listed(array, [("__0_0.distcp", FLAT)])})
    assert dict(arrays_of(tmp_path)) == {}
    assert "flat buckets" in run_here("plan", str(tmp_path), str(tmp_path.parent / "out")).err


# The plans of Megatron's ranks, which are cut away unread


def planned(folder: Path, plans: Any, name: str = "w") -> bytes:
    """Write a folder whose metadata has plans, and return the metadata."""

    def spoil(made: Metadata) -> None:
        made.all_local_plans = plans  # type: ignore[attr-defined]

    dcp_peer.write(folder, {name: listed(W, [("__0_0.distcp", UPPER), ("__1_0.distcp", LOWER)])}, spoil=spoil)
    return (folder / ".metadata").read_bytes()


def require_whole(folder: Path, name: str = "w") -> None:
    assert {name: array.tolist() for name, array in arrays_of(folder).items()} == {name: W.tolist()}


# By their numbers: an id of 3 MB would be sent to the process that reports, and held there for each that tests.
@pytest.mark.parametrize("plans", few(2, [[], [{}], [{"items": [Box.whole((3,))]}, "x" * (3 << 20)]]))
def test_plans_are_not_read(tmp_path: Path, plans: Any) -> None:
    """Whatever they hold, and however much; the weights are those of torch's own reading."""
    planned(tmp_path, plans)
    require_whole(tmp_path)


def test_plans_that_are_cut_short(tmp_path: Path) -> None:
    content = planned(tmp_path, [["x" * 99]])
    (tmp_path / ".metadata").write_bytes(content[:-40])
    said = run_here("plan", str(tmp_path), str(tmp_path.parent / "out"))
    assert said.code == 3 and ".metadata, byte " in said.err and "before it is complete" in said.err


def test_plans_behind_as_much_metadata_as_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound on its length holds for what is before the plans."""
    content = planned(tmp_path, ["x" * 10000])
    monkeypatch.setattr(metadata, "_MAX_BYTES", content.index(b"all_local_plans"))
    monkeypatch.setattr(metadata, "_READ_BYTES", 100)
    require_whole(tmp_path)
    monkeypatch.setattr(metadata, "_MAX_BYTES", 300)
    assert "too large" in run_here("plan", str(tmp_path), str(tmp_path.parent / "out")).err


@pytest.mark.parametrize("plans", [False, True])
def test_a_tensor_of_that_name(tmp_path: Path, plans: bool) -> None:
    if plans:
        planned(tmp_path, ["a"], "all_local_plans")
    else:
        dcp_peer.write(tmp_path, {"all_local_plans": listed(W, [("__0_0.distcp", Box.whole(W.shape))])})
    require_whole(tmp_path, "all_local_plans")


def test_plans_within_another_object(tmp_path: Path) -> None:
    """Metadata that other metadata holds is not taken for the whole: what comes behind it would be lost."""

    def spoil(made: Metadata) -> None:
        inner = Metadata({}, None, {})
        inner.all_local_plans = []  # type: ignore[attr-defined]
        made.planner_data = inner

    dcp_peer.write(tmp_path, {"w": listed(W, [("__0_0.distcp", Box.whole(W.shape))])}, spoil=spoil)
    require_whole(tmp_path)
