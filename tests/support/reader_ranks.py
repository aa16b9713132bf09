"""One of several processes of torch, over gloo: loads checkpoints through `reshard_mpi.torch.Reader`, and compares.

To be run as `python reader_ranks.py RANK RANKS MEETING FOLDER`. MEETING: a file by which the processes find each other.
FOLDER has `cases.json`, a list of what to load and how; each process writes `said_RANK.json`, what it found by case:
an empty text where all is as it should be, else what is wrong; of what is to be refused, the errors of all ranks.
"""

from __future__ import annotations

import copy
import json
import os
import random
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import reshard_mpi
from reshard_mpi.engine import regions
from reshard_mpi.torch import Reader

Case = dict[str, Any]
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class CountedFiles(regions.Files):
    """Source files that are kept for their counts of bytes."""

    every: list[CountedFiles] = []  # noqa: RUF012 - of all, on purpose

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.every.append(self)


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().flatten().view(torch.uint8).numpy()) if tensor.numel() else b""


def require(is_so: bool, what: object) -> None:
    if not is_so:
        raise AssertionError(str(what))


# Tensors in meshes


def placed(whole: torch.Tensor, layout: str, meshes: dict[str, DeviceMesh], drawn: random.Random) -> torch.Tensor:
    """Return zeros of the shape of a tensor, placed as a layout says."""
    zeros = torch.zeros(whole.shape, dtype=whole.dtype)
    dims = range(whole.ndim)
    ways: dict[str, tuple[str, list[Any]]] = {
        "fsdp": ("flat", [Shard(0)]),
        "columns": ("flat", [Shard(whole.ndim - 1)]),
        "square": ("square", [Shard(0), Shard(whole.ndim - 1)]),
        "hsdp": ("square", [Replicate(), Shard(0)]),
        "drawn": ("square", [drawn.choice([Replicate(), *map(Shard, dims)]) for _ in range(2)]),
    }
    if layout == "plain" or not whole.ndim:
        return zeros
    if layout == "turned":  # each element has its place, but not in the order of rows
        return zeros.permute(*reversed(dims)).contiguous().permute(*reversed(dims))
    mesh, placements = ways[layout]
    return distribute_tensor(zeros, meshes[mesh], placements, src_data_rank=None)


def load_tensors(case: Case, meshes: dict[str, DeviceMesh]) -> None:
    """Load whole tensors into a layout; see that all is there, and that only what is needed was read."""
    expected, drawn = torch.load(case["whole"]), random.Random(case["name"])
    state = {name: placed(whole, case["layout"], meshes, drawn) for name, whole in expected.items()}
    before = {name: getattr(tensor, "_local_tensor", tensor).data_ptr() for name, tensor in state.items()}
    CountedFiles.every.clear()
    dcp.load(state, storage_reader=Reader(case["source"], **case["options"]))
    local = {name: getattr(tensor, "_local_tensor", tensor) for name, tensor in state.items()}
    require(before == {name: tensor.data_ptr() for name, tensor in local.items()}, "other memory")
    read = sum(files.traffic.requested_bytes for files in CountedFiles.every)
    needed = sum(tensor.nbytes for tensor in local.values())
    require(read <= case.get("bound", 1e9) * needed, f"{read} bytes were read for {needed}")
    for name, tensor in state.items():
        if isinstance(tensor, DTensor):
            if tensor.dtype is torch.float8_e4m3fn:  # of which gloo cannot gather any
                integers, form = tensor._local_tensor.view(torch.uint8), expected[name].view(torch.uint8)
                tensor = DTensor.from_local(
                    integers, tensor.device_mesh, tensor.placements, shape=form.shape, stride=form.stride()
                )
            tensor = tensor.full_tensor()
        require(raw(tensor) == raw(expected[name]), f"{name}: {tensor} is not {expected[name]}")


# Models in training


def layers() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.LayerNorm(6), torch.nn.Linear(6, 10), torch.nn.Linear(10, 7))


def network(meshes: dict[str, DeviceMesh], layout: str) -> torch.nn.Module:
    torch.manual_seed(5)
    model = layers()
    if layout == "fsdp":
        return fully_shard(model, mesh=meshes["flat"])
    if layout == "hsdp":
        return fully_shard(model, mesh=meshes["square"])
    parallelize_module(model, meshes["square"]["tp"], {"1": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(model, mesh=meshes["square"]["dp"])


def trained(
    meshes: dict[str, DeviceMesh], layout: str, steps: int, lr: float
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = network(meshes, layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for _ in range(steps):
        losses(model, optimizer, 1)
    return model, optimizer


def losses(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        loss = model(torch.arange(18.0).reshape(3, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def load_training(case: Case, meshes: dict[str, DeviceMesh]) -> None:
    """Save a training of FSDP in the form of a case, go on with it in another layout: its losses are the same."""
    folder, form = Path(case["source"]), case["form"]
    model, optimizer = trained(meshes, "fsdp", 3, 0.01)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optim": of_optimizer, "epoch": 3, "seen": [1, "a"], "pair": (1, 2.5)}
    options: dict[str, Any] = {}
    if form == "dcp":
        dcp.save(state, checkpoint_id=folder)
    else:
        whole_model, whole_optimizer = get_state_dict(model, optimizer, options=WHOLE)
        if dist.get_rank() == 0:
            if form == "numbered":  # as one process saves it
                alone = layers()
                alone_optimizer = torch.optim.AdamW(alone.parameters())
                whole = {"model_state_dict": whole_model, "optim_state_dict": whole_optimizer}
                set_state_dict(alone, alone_optimizer, **copy.deepcopy(whole))
                whole_model, whole_optimizer = alone.state_dict(), alone_optimizer.state_dict()
            saved = {**state, "model": whole_model, "optim": whole_optimizer}
            torch.save(saved, folder.with_suffix(".pt"))
            if form in ("safetensors", "hdf5"):
                reshard_mpi.transform(folder.with_suffix(".pt"), folder, to=form)
        dist.barrier()
        folder = folder if form in ("safetensors", "hdf5") else folder.with_suffix(".pt")
        if form == "numbered":
            options = {"map": "{name*} <=> {name*}", "forward": True}
    expected = losses(model, optimizer, 3)
    other, other_optimizer = trained(meshes, case["layout"], 1, 0.5)
    of_model, of_optimizer = get_state_dict(other, other_optimizer)
    state = {"model": of_model, "optim": of_optimizer, "epoch": 0, "seen": [], "pair": ()}
    kinds = {type(place) for tensor in of_model.values() for place in tensor.placements}
    require((_StridedShard in kinds) == (case["layout"] == "strided"), kinds)
    dcp.load(state, storage_reader=Reader(folder, **options))
    set_state_dict(other, other_optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    require((state["epoch"], state["seen"], state["pair"]) == (3, [1, "a"], (1, 2.5)), state)
    require(other_optimizer.param_groups[0]["lr"] == 0.01, other_optimizer.param_groups)
    found = losses(other, other_optimizer, 3)
    require(torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-4), f"{found} are not {expected}")


def load_weights(case: Case, meshes: dict[str, DeviceMesh]) -> None:
    """Load the weights of a model in each layout; the optimizer begins anew."""
    expected = torch.load(case["whole"])
    model = network(meshes, case["layout"])
    state = get_model_state_dict(model)
    dcp.load(state, storage_reader=Reader(case["source"], **case["options"]))
    set_model_state_dict(model, state)
    for name, tensor in get_model_state_dict(model, options=WHOLE).items():
        require(dist.get_rank() > 0 or raw(tensor) == raw(expected[name]), name)
    losses(model, torch.optim.AdamW(model.parameters()), 1)


# What is refused


def refuse(case: Case, meshes: dict[str, DeviceMesh]) -> str:
    """Return the errors of all ranks."""
    expected = torch.load(case["whole"])
    name = next(name for name in expected if expected[name].ndim)
    state: dict[str, Any] = {each: placed(whole, "fsdp", meshes, random.Random(0)) for each, whole in expected.items()}
    own = state[name]
    match case["change"]:
        case "a missing tensor":
            state["another"] = own
        case "another shape":
            state[name] = placed(torch.zeros(3, *own.shape, dtype=own.dtype), "fsdp", meshes, random.Random(0))
        case "another type":
            state[name] = placed(expected[name].to(torch.float64), "fsdp", meshes, random.Random(0))
        case "a missing value":
            state["epoch"] = 0
        case "no value":
            state["step"] = 0
    source = case["source"]
    if case["change"] == "one rank lacks it" and dist.get_rank() == 2:
        source += "_of_others"
    try:
        dcp.load(state, storage_reader=Reader(source, **case["options"]))
    except CheckpointException as error:
        said = {rank: f"{type(each).__name__}: {each}" for rank, (each, _) in sorted(error.failures.items())}
        return json.dumps(said)
    return "nothing was refused"


WORK = {"tensors": load_tensors, "training": load_training, "weights": load_weights, "refused": refuse}


def main() -> None:
    rank, ranks, meeting, folder = sys.argv[1:]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    regions.Files = CountedFiles
    dist.init_process_group("gloo", f"file://{meeting}", rank=int(rank), world_size=int(ranks))
    meshes = {
        "flat": init_device_mesh("cpu", (4,)),
        "square": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
    }
    said = {}
    for case in json.loads(Path(folder, "cases.json").read_text()):
        try:
            said[case["name"]] = WORK[case["work"]](case, meshes) or ""
        except (Exception, CheckpointException):
            said[case["name"]] = traceback.format_exc()
        dist.barrier()
    Path(folder, f"said_{rank}.json").write_text(json.dumps(said))
    dist.barrier()
    # A thread of gloo may still hold a tensor when Python takes itself apart, and now and then the process aborts.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
