"""One of several processes of torch, over gloo: saves a checkpoint of a model in training, or loads one.

To be run as `python dcp_ranks.py save|load RANK RANKS MEETING FOLDER WHOLE`. MEETING: a file by which the processes
find each other. WHOLE: a file of torch with the whole tensors, which rank 0 writes when it saves, and with which all
compare what they load.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch_processes import end_process


def training(ranks: int, *, steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model that is sharded over all ranks, and its optimizer, after real steps."""
    torch.manual_seed(steps)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.LayerNorm(10), torch.nn.Linear(10, 5))
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * steps)
    for _ in range(steps):
        model(torch.ones(3, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def further(ranks: int, factor: int) -> dict[str, Any]:
    """Return tensors of all sorts; factor: 0 for those that are to be loaded into."""
    flat = init_device_mesh("cpu", (ranks,))
    square = init_device_mesh("cpu", (2, ranks // 2)) if ranks > 2 else None
    both = torch.arange(64, dtype=torch.bfloat16).reshape(8, 8) * factor
    return {
        "both": distribute_tensor(both, square, [Shard(0), Shard(1)])
        if square is not None
        else distribute_tensor(both, flat, [Shard(1)]),
        "tiny": distribute_tensor(torch.arange(3.0) * factor, flat, [Shard(0)]),
        "copied": distribute_tensor(torch.arange(5) * factor, flat, [Replicate()]),
        "plain": (torch.arange(6.0) * factor).reshape(2, 3).t(),
        "empty": torch.zeros(0, 4),
        "zero": torch.tensor(3.5 * factor),
        "flags": torch.tensor([True, False]) & bool(factor),
        "eight": (torch.arange(8.0) * factor).to(torch.float8_e4m3fn),
    }


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ranks: int, factor: int) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {
        "model": of_model,
        "optim": of_optimizer,
        "further": further(ranks, factor),
        "epoch": 7 * factor,
        "name": "run" if factor else "",
        "list": [torch.ones(2) * factor, {"x": torch.ones(2, dtype=torch.int16) * factor}, 5 * factor],
        "plain list": [factor, 2, "a"],
        "a.b": {"c.d": torch.ones(1) * factor},
    }


def tensors_of(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the whole tensors of a state by name."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from tensors_of(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield from tensors_of(inner, f"{path}.{at}")
    elif isinstance(value, DTensor):
        yield path, value.full_tensor()
    elif isinstance(value, torch.Tensor):
        yield path, value


def save(rank: int, ranks: int, folder: str, whole: str) -> None:
    state = state_of(*training(ranks, steps=2), ranks, 1)
    dcp.save(state, checkpoint_id=folder)
    tensors = dict(tensors_of(state))
    if rank == 0:
        torch.save(tensors, whole)


def load(ranks: int, folder: str, whole: str) -> None:
    model, optimizer = training(ranks, steps=1)
    state = state_of(model, optimizer, ranks, 0)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    expected = torch.load(whole)
    found = dict(tensors_of(state))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        same = tensor.contiguous().flatten().view(torch.uint8), expected[name].contiguous().flatten().view(torch.uint8)
        assert tensor.dtype == expected[name].dtype and tensor.shape == expected[name].shape, name
        assert not tensor.numel() or torch.equal(*same), name
    assert (state["epoch"], state["name"], state["list"][2], state["plain list"]) == (7, "run", 5, [1, 2, "a"])
    assert optimizer.param_groups[0]["lr"] == 0.02


def main() -> None:
    work, rank, ranks, meeting, folder, whole = sys.argv[1:]
    dist.init_process_group("gloo", f"file://{meeting}", rank=int(rank), world_size=int(ranks))
    if work == "save":
        save(int(rank), int(ranks), folder, whole)
    else:
        load(int(ranks), folder, whole)
    end_process()


if __name__ == "__main__":
    main()
