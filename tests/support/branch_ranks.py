"""One of several processes of torch, over gloo: saves a training as several files or folders, each a part of its state.

To be run as `python branch_ranks.py SCHEME RANK RANKS MEETING FOLDER WHOLE`. SCHEME: "files", a file of model,
optimizer and the rest for each rank, as verl saves them; "folders", a distributed checkpoint of each, as Accelerate.
MEETING: a file by which the processes find each other. WHOLE: a file of torch to which rank 0 writes the whole model
and optimizer, and the losses of further steps.
"""

from __future__ import annotations

import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def network() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.LayerNorm(10), torch.nn.Linear(10, 5))


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss: Any = model(torch.arange(18.0).reshape(3, 6)).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()  # type: ignore[no-any-return]


def main(scheme: str, rank: int, ranks: int, meeting: str, folder: str, whole: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        step(model, optimizer)
        scheduler.step()
    Path(folder).mkdir(exist_ok=True)
    if scheme == "files":
        torch.manual_seed(rank)
        extra = {"lr_scheduler": scheduler.state_dict(), "rng": {"cpu": torch.get_rng_state()}}
        state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "extra_state": extra}
        for name, value in state.items():
            torch.save(value, f"{folder}/{name}_world_size_{ranks}_rank_{rank}.pt")
    else:
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"{folder}/pytorch_model_fsdp_0")
        dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=f"{folder}/optimizer_0")
        if rank == 0:
            torch.save(scheduler.state_dict(), f"{folder}/scheduler.bin")
    options = StateDictOptions(full_state_dict=True)
    full = {
        "model": get_model_state_dict(model, options=options),
        "optimizer": deepcopy(get_optimizer_state_dict(model, optimizer, options=options)),  # steps are counted on
    }
    losses = [step(model, optimizer) for _ in range(2)]
    if rank == 0:
        torch.save({**full, "losses": losses, "lr": optimizer.param_groups[0]["lr"]}, whole)


if __name__ == "__main__":
    from torch_processes import end_process  # beside this file, which tests import too

    scheme, rank, ranks, *paths = sys.argv[1:]
    main(scheme, int(rank), int(ranks), *paths)
    end_process()
