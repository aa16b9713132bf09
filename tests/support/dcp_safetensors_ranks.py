"""One of several processes of torch, over gloo: saves a sharded model as safetensors files, each rank its own.

To be run as `python dcp_safetensors_ranks.py RANK RANKS MEETING FOLDER`. MEETING: a file by which the processes find
each other. FOLDER gets `one` (a file a rank), `two` (names dealt out to two files), and `whole.pt`, the whole tensors.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch_processes import end_process


def state_of(ranks: int) -> dict[str, Any]:
    """Return a model of which all ranks hold parts, uneven and empty ones too, and tensors of other sorts."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.LayerNorm(10), torch.nn.Linear(10, 5))
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    flat, square = init_device_mesh("cpu", (ranks,)), init_device_mesh("cpu", (2, ranks // 2))
    return {
        **model.state_dict(),
        "both": distribute_tensor(torch.arange(64, dtype=torch.bfloat16).reshape(8, 8), square, [Shard(0), Shard(1)]),
        "copied rows": distribute_tensor(torch.arange(24.0).reshape(6, 4), square, [Replicate(), Shard(0)]),
        "tiny": distribute_tensor(torch.arange(3.0), flat, [Shard(0)]),
        "copied": distribute_tensor(torch.arange(5), flat, [Replicate()]),
        "plain": torch.arange(6.0).reshape(2, 3),
        "zero": torch.tensor(3.5),
    }


def main() -> None:
    rank, ranks, meeting, folder = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    state = state_of(ranks)
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(f"{folder}/one", save_distributed=True))
    dealt = {name: 1 + number % 2 for number, name in enumerate(state)}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(f"{folder}/two", dealt, save_distributed=True))
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}
    if rank == 0:
        torch.save(whole, f"{folder}/whole.pt")
    end_process()


if __name__ == "__main__":
    main()
