"""The guide's pipeline training: 8 cards, two stages, the optimizer sharded.

    mpirun -n 8 python -m mpi4py pipeline_train.py

MindSpore runs a pipeline on real cards only; here every rank has its part compiled, and saves what it would hold of
known tensors, in the files that training leaves: checkpoint-3_1875.ckpt beside checkpoint-graph.meta.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from checkpoint_files import save
from known_tensors import SHAPES, pipeline, whole_tensors
from mpi4py import MPI
from strategies import compile_or_copy, require_same_slices


def main(rank: int, strategies: Path, checkpoints: Path) -> None:
    """Write this rank's strategy file and shard."""
    name = f"src_strategy_{rank}.ckpt"
    compiled = compile_or_copy(
        f"src_pipeline_strategys/{name}", strategies / name, cards=8, rank=rank, optimizer_sharding=True, stages=2
    )
    tensors = whole_tensors("moments")
    slices = {name: part for name, whole in tensors.items() if (part := pipeline(name, whole, rank)) is not None}
    # The sums of accumulated gradients: zeros at the end of a step. MindSpore keeps them whole on every rank of a
    # stage, as its compiler says, although its strategy file says that the optimizer cuts them.
    sums = {f"accu_grads.{name}": np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    slices |= {name: whole for name, whole in sums.items() if name.removeprefix("accu_grads.") in slices}
    shard = checkpoints / f"rank_{rank}" / "checkpoint-3_1875.ckpt"
    save(shard, slices)
    (shard.parent / "checkpoint-graph.meta").write_bytes(b"\x0a\x05graph\x12\x03net")
    require_same_slices(compiled, tensors | sums, shard)
    print(f"rank {rank}: {shard} is there")


if __name__ == "__main__":
    main(MPI.COMM_WORLD.Get_rank(), Path("src_pipeline_strategys"), Path("src_checkpoints_pipeline"))
