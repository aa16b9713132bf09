"""Files exchanged with torch: it saves what we read, after real steps of training, and loads what we write."""

from __future__ import annotations

import argparse
import collections
import io
import itertools
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import reshard_mpi
from reshard_mpi.formats import torch as torch_format
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.testing import sample_tensors
from reshard_mpi.testing.sample_tensors import SampleTensor, ShardContents

torch = pytest.importorskip("torch")
from support.torch_peer import CANNOT_HOLD  # noqa: E402
from torch.utils.serialization import config  # noqa: E402

pytestmark = pytest.mark.torch

WAYS = [{}, {"mmap": True}]


def bits(tensor: Any) -> bytes:
    """Return the elements of a tensor in row-major order."""
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def require_same(one: Any, other: Any) -> None:
    """Require that two values are of the same types, in the same order, with the same bits."""
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, bits(one)) == (other.dtype, other.shape, bits(other))
        return
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        assert getattr(one, "_metadata", None) == getattr(other, "_metadata", None)
        for key in one:
            require_same(one[key], other[key])
    elif isinstance(one, (list, tuple, collections.deque)):
        assert len(one) == len(other)
        for left, right in zip(one, other):
            require_same(left, right)
    elif isinstance(one, float) and math.isnan(one):
        assert math.isnan(other)
    elif isinstance(one, argparse.Namespace):
        require_same(vars(one), vars(other))
    else:
        assert one == other


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 6)
        self.conv = torch.nn.Conv1d(6, 6, 3, padding=1)
        self.norm = torch.nn.BatchNorm1d(6)
        self.out = torch.nn.Linear(6, 11, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Any) -> Any:
        hidden = self.conv(self.embedding(tokens).transpose(1, 2))
        return self.out(self.norm(hidden).transpose(1, 2))


def step(model: Any, optimizer: Any, scaler: Any, number: int) -> Any:
    torch.manual_seed(number)
    tokens = torch.randint(0, 11, (4, 7))
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(tokens).reshape(-1, 11), tokens.reshape(-1))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss


def training() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, torch.amp.GradScaler("cpu", init_scale=1024.0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of a model, its optimizer and its scaler after three steps."""
    model, optimizer, scaler = training()
    for number in range(3):
        step(model, optimizer, scaler, number)
    path = tmp_path_factory.mktemp("trained") / "training.pt"
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "rng": torch.get_rng_state(),
        "epoch": 3,
        "losses": [1.5, float("inf")],
        "names": ("a", b"\xff"),
        "t": model.out.weight.t(),
        "half": model.conv.weight.half().to(memory_format=torch.contiguous_format)[:, ::2],
    }
    torch.save(state, path)
    return path


@pytest.mark.parametrize("through", [("torch",), ("hdf5", "torch"), ("ckpt", "hdf5", "torch")], ids="-".join)
def test_training_goes_on_from_what_we_write(trained: Path, tmp_path: Path, through: tuple[str, ...]) -> None:
    path = trained
    for number, to in enumerate(through):
        reshard_mpi.transform(path, tmp_path / str(number), to=to, verify=True)
        path = next((tmp_path / str(number) / "rank_0").iterdir())
    expected = torch.load(trained, weights_only=True)
    for options in WAYS:
        require_same(torch.load(path, weights_only=True, **options), expected)
    losses = []
    for file in (trained, path):
        model, optimizer, scaler = training()
        state = torch.load(file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scaler.load_state_dict(state["scaler"])
        losses.append([step(model, optimizer, scaler, number).item() for number in (3, 4)])
    assert losses[0] == losses[1]


def all_types() -> ShardContents:
    names = sorted(BY_NAME.keys() - CANNOT_HOLD)
    shapes = [(2, 3), (), (0, 4), (5,)]
    tensors = [
        SampleTensor.random(f"{name}.{at}", BY_NAME[name], shape)
        for name, (at, shape) in itertools.product(names, enumerate(shapes))
    ]
    return ShardContents.of(tensors, {"note": "é", "empty": ""})


@pytest.mark.parametrize("offsets", [False, True], ids=["read", "computed"])
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_every_type_is_loaded(tmp_path: Path, options: dict[str, bool], offsets: bool) -> None:
    """Also where torch computes the places of storages as its own writer puts them, without looking."""
    path, contents = tmp_path / "net.pt", all_types()
    sample_tensors.write(torch_format, str(path), contents)
    config.load.calculate_storage_offsets = offsets
    try:
        loaded = torch.load(path, weights_only=True, **options)
    finally:
        config.load.calculate_storage_offsets = False
    assert list(loaded) == [*contents.tensors, *contents.strings]
    for name, tensor in contents.tensors.items():
        found = loaded[name]
        assert (str(found.dtype), tuple(found.shape)) == (f"torch.{tensor.dtype}", tensor.shape)
        assert bits(found) == tensor.content
        assert not found.requires_grad and found.is_contiguous()
    assert {name: loaded[name] for name in contents.strings} == contents.strings


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}, {"pickle_protocol": 4}], ids=str)
def test_every_type_is_located(tmp_path: Path, options: dict[str, Any]) -> None:
    contents = all_types()
    sample_tensors.write(torch_format, str(tmp_path / "ours.pt"), contents)
    torch.save(torch.load(tmp_path / "ours.pt", weights_only=True), tmp_path / "theirs.pt", **options)
    assert sample_tensors.contents_of(torch_format.locate(str(tmp_path / "theirs.pt"))) == contents


VIEWS = {
    "transposed": lambda base: base.t(),
    "rows": lambda base: base[1:3],
    "columns": lambda base: base[:, 1:3],
    "every second": lambda base: base[::2, ::3],
    "expanded": lambda base: base[:1].expand(5, 6),
    "window": lambda base: base.as_strided((3, 3), (2, 1), 4),
    "permuted": lambda base: base.reshape(2, 2, 6).permute(2, 0, 1),
    "element": lambda base: base[2, 3],
    "nothing": lambda base: base[:0],
    "parameter": lambda base: torch.nn.Parameter(base.clone()),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint16", "complex128", "float8_e4m3fn", "bool"])
def test_views_are_read_as_torch_shows_them(tmp_path: Path, dtype: str) -> None:
    base = torch.arange(24).reshape(4, 6).to(getattr(torch, dtype))
    views = {"base": base}
    for name, view in VIEWS.items():
        if name != "parameter" or dtype in ("float32", "bfloat16", "complex128"):
            views[name] = view(base)
    torch.save(views, tmp_path / "views.pt")
    found = sample_tensors.contents_of(torch_format.locate(str(tmp_path / "views.pt"))).tensors
    expected = torch.load(tmp_path / "views.pt", weights_only=True)
    assert {name: tensor.content for name, tensor in found.items()} == {
        name: bits(tensor) for name, tensor in expected.items()
    }
    reshard_mpi.transform(tmp_path / "views.pt", tmp_path / "out")
    written = torch.load(tmp_path / "out" / "rank_0" / "checkpoint_0.pt", weights_only=True)
    require_same(written, {name: tensor.detach() for name, tensor in expected.items()})


def test_plain_data_comes_back(tmp_path: Path) -> None:
    value = {
        "args": argparse.Namespace(lr=0.1, tensor=torch.arange(3)),
        "deque": collections.deque([1, torch.zeros(2)], maxlen=3),
        "default": collections.defaultdict(list, {"a": [1]}),
        "counter": collections.Counter("aab"),
        "set": {1, 2},
        "complex": 1 + 2j,
        "slice": slice(1, 2),
        "range": range(3),
        "numbers": [1 << 80, -5, float("nan"), float("-inf"), -0.0],
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "device": torch.device("cpu"),
        "path": Path("/a/b"),
        "dotted.key": {"a.b": torch.ones(1), 7: torch.ones(2), None: "x"},
    }
    torch.save(value, tmp_path / "plain.pt")
    reshard_mpi.transform(tmp_path / "plain.pt", tmp_path / "out")
    loaded = torch.load(tmp_path / "out" / "rank_0" / "checkpoint_0.pt", weights_only=False)
    require_same(loaded, value)


def test_extra_state_of_transformer_engine_comes_back(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "w._extra_state": io.BytesIO(b"state")}, tmp_path / "te.pt")
    reshard_mpi.transform(tmp_path / "te.pt", tmp_path / "out")
    loaded = torch.load(tmp_path / "out" / "rank_0" / "checkpoint_0.pt", weights_only=False)
    assert loaded["w._extra_state"].read() == b"state"


RANKS = """
import os, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.LayerNorm(10), torch.nn.Linear(10, 5))
    whole = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    state = net.state_dict()
    for name, tensor in {
        "uneven": torch.arange(7.0 * 3).reshape(7, 3),
        "tiny": torch.arange(3, dtype=torch.int64),
    }.items():
        whole[name] = tensor
        state[name] = distribute_tensor(tensor, mesh, [Shard(0), Shard(0)])
    whole["columns"] = torch.arange(12.0).reshape(2, 6)
    state["columns"] = distribute_tensor(whole["columns"], mesh["tp"], [Shard(1)])
    whole["copied"] = torch.ones(3)
    state["copied"] = distribute_tensor(whole["copied"], mesh, [Replicate(), Replicate()])
    whole["buffer"] = state["buffer"] = torch.arange(4)
    for name, tensor in state.items():
        assert not hasattr(tensor, "full_tensor") or tensor.full_tensor().equal(whole[name]), name
    torch.save(state, f"{folder}/model_world_size_4_rank_{rank}.pt")
    if rank == 0:
        os.mkdir(f"{folder}/whole")
        torch.save(whole, f"{folder}/whole/whole.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # a thread of gloo may still hold a tensor when Python takes itself apart, and the process aborts


if __name__ == "__main__":
    torch.multiprocessing.start_processes(main, (sys.argv[1],), nprocs=4, start_method="fork")
"""


def test_rank_files_of_a_sharded_network(tmp_path: Path) -> None:
    """FSDP2 over tensor parallelism: meshes that are a part of all ranks, and cuts in the other order."""
    script, folder = tmp_path / "ranks.py", tmp_path / "src"
    script.write_text(RANKS)
    folder.mkdir()
    subprocess.run([sys.executable, script, folder], check=True, timeout=300)
    (folder / "store").unlink(missing_ok=True)
    reshard_mpi.transform(folder, tmp_path / "out", select="model*")
    loaded = torch.load(tmp_path / "out" / "rank_0" / "checkpoint_0.pt", weights_only=True)
    expected = torch.load(folder / "whole" / "whole.pt", weights_only=True)
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        require_same(loaded[name], tensor)
