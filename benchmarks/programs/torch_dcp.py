"""torch's distributed checkpoint, one process of several over gloo.

`torch_dcp.py save SPEC.json RANK RENDEZVOUS CHECKPOINT` makes a checkpoint of the source's shards, filled with noise;
`torch_dcp.py reshard SPEC.json RANK RENDEZVOUS CHECKPOINT OUTPUT` loads it into the target's mesh and saves it again;
`torch_dcp.py load SPEC.json RANK RENDEZVOUS CHECKPOINT READER` only loads it, by READER: torch's `FileSystemReader` or
`HuggingFaceStorageReader`, or ours, `Reader`.
The first rank prints how long load and save took together, the slowest rank's time between barriers.
"""

import json
import math
import os
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard


def state(side: dict[str, Any], tensors: dict[str, list[int]], *, noise: bool) -> dict[str, DTensor]:
    """Return DTensors of the network over the mesh of one side.

    side: `mesh`, the ranks as a grid, and `placements`, for each tensor the dimension cut along each axis or null.
    """
    mesh = DeviceMesh("cpu", torch.tensor(side["mesh"]))
    coordinates = mesh.get_coordinate()
    held = {}
    for name, shape in tensors.items():
        placements = side["placements"][name]
        local = list(shape)
        for axis, dim in enumerate(placements):
            if dim is not None:
                assert local[dim] % mesh.size(axis) == 0, f"{name} is not cut evenly"
                local[dim] //= mesh.size(axis)
        content = torch.empty(local, dtype=torch.float32)
        if noise:
            content.uniform_(generator=torch.Generator().manual_seed(zlib.crc32(f"{name} {coordinates}".encode())))
        held[name] = DTensor.from_local(
            content,
            mesh,
            [Replicate() if dim is None else Shard(dim) for dim in placements],
            run_check=False,
            shape=torch.Size(shape),
            stride=tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape))),
        )
    return held


def reader_of(name: str, checkpoint: str) -> dcp.StorageReader:
    """Return a reader of a checkpoint by the name of its class."""
    if name == "Reader":
        from reshard_mpi.torch import Reader

        return Reader(checkpoint)
    reader: dcp.StorageReader = getattr(dcp, name)(checkpoint)
    return reader


def main() -> None:
    """Do what the command line says."""
    task, spec, rank, rendezvous, checkpoint, *output = sys.argv[1:]
    network = json.loads(Path(spec).read_text())
    side = network["source" if task == "save" else "target"]
    world_size = sum(map(len, side["mesh"]))
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=world_size)
    held = state(side, network["tensors"], noise=task == "save")
    if task == "save":
        dcp.save(held, checkpoint_id=checkpoint)
    else:
        # Made before, since torch's own readers are imported before too.
        reader = reader_of(output[0], checkpoint) if task == "load" else None
        dist.barrier()
        begin = time.perf_counter()
        if reader is not None:
            dcp.load(held, storage_reader=reader)
        else:
            dcp.load(held, checkpoint_id=checkpoint)
            dcp.save(held, checkpoint_id=output[0])
        seconds = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        if rank == "0":
            print(json.dumps({"seconds": seconds.item()}))
    dist.barrier()
    dist.destroy_process_group()
    # A thread of gloo may still hold a tensor when Python takes itself apart, and now and then the process aborts.
    sys.stdout.flush()
    os._exit(0)


main()
