"""The guide's second training, on 4 cards, from what 8 cards have saved.

    mpirun -n 4 python -m mpi4py model_transformation_retrain.py --only_compile=1   # compile and convert
    mpirun -n 4 python model_transformation_retrain.py --sharding=cpu               # train on, by run_retrain.sh

The conversion is one call of `transform_checkpoints`, with MindSpore's arguments; the ranks share the work (`comm`).
"""

from __future__ import annotations

import sys
from pathlib import Path

from arguments import parse_arguments
from known_tensors import whole_tensors
from strategies import SHIPPED, compile_or_copy, require_same_slices

options = parse_arguments(
    __doc__,
    src_strategy_file="src_strategy.ckpt",
    dst_strategy_file="dst_strategy.ckpt",
    src_checkpoints_dir="src_checkpoints",
    dst_checkpoints_dir="dst_checkpoints",
)

if options.only_compile:
    from mpi4py import MPI

    from reshard_mpi import ReshardError, transform_checkpoints

    rank = MPI.COMM_WORLD.Get_rank()
    compiled = None
    if options.sharding == "guide":
        compiled = compile_or_copy(
            "dst_strategy.ckpt", Path(options.dst_strategy_file), cards=4, rank=rank, optimizer_sharding=True
        )
    MPI.COMM_WORLD.Barrier()  # every rank has its strategy file
    try:
        transform_checkpoints(
            options.src_checkpoints_dir,
            options.dst_checkpoints_dir,
            "checkpoint_",
            options.src_strategy_file,
            options.dst_strategy_file,
            comm=MPI.COMM_WORLD,
        )
    except ReshardError as error:
        sys.exit(f"rank {rank}: {error}")
    shard = Path(options.dst_checkpoints_dir, f"rank_{rank}", f"checkpoint_{rank}.ckpt")
    require_same_slices(compiled, whole_tensors("moments"), shard)
    print(f"rank {rank}: {shard} is there")
elif options.sharding == "guide":
    sys.exit("MindSpore's CPU build cannot train with a sharded optimizer: see --sharding=cpu and the README")
else:
    import cpu_training

    cpu_training.go_on(options.dst_strategy_file, SHIPPED / "cpu" / "dst_strategy.ckpt", options.dst_checkpoints_dir)
