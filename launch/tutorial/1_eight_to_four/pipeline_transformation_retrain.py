"""The guide's second training, on 4 cards without a pipeline, from what a pipeline of 8 cards has saved.

    mpirun -n 4 python -m mpi4py pipeline_transformation_retrain.py --only_compile=1   # compile and convert
    mpirun -n 4 python pipeline_transformation_retrain.py               # train on, by run_retrain_pipeline.sh

In the target nothing is cut: every card holds all, so that one process can train from the shard of any, too.
The strategies of all stages are merged by `merge_pipeline_strategys`; then one call of `transform_checkpoints`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from arguments import parse_arguments
from known_tensors import whole_tensors
from strategies import SHIPPED, compile_or_copy, require_same_slices

options = parse_arguments(
    __doc__,
    src_strategy_dir="src_pipeline_strategys",
    src_strategy_file="src_pipeline_strategy.ckpt",
    dst_strategy_file="dst_pipeline_strategy.ckpt",
    src_checkpoints_dir="src_checkpoints_pipeline",
    dst_checkpoints_dir="dst_checkpoints_pipeline",
)

if options.only_compile:
    from mpi4py import MPI
    from transform_pipeline import transform_stages

    from reshard_mpi import ReshardError

    rank = MPI.COMM_WORLD.Get_rank()
    compiled = None
    # Nothing is cut here, so one layout holds for all ranks and is compiled once.
    if rank == 0:
        compiled = compile_or_copy(
            "dst_pipeline_strategy.ckpt",
            Path(options.dst_strategy_file),
            cards=4,
            rank=rank,
            optimizer_sharding=False,
            cut=False,
        )
    MPI.COMM_WORLD.Barrier()
    try:
        # The sums of accumulated gradients have no place in a network without a pipeline.
        transform_stages(
            options.src_checkpoints_dir,
            options.dst_checkpoints_dir,
            options.src_strategy_dir,
            options.src_strategy_file,
            options.dst_strategy_file,
            unlisted="drop",
        )
    except ReshardError as error:
        sys.exit(f"rank {rank}: {error}")
    shard = Path(options.dst_checkpoints_dir, f"rank_{rank}", f"checkpoint_{rank}.ckpt")
    require_same_slices(compiled, whole_tensors("moments"), shard)
    print(f"rank {rank}: {shard} is there")
else:
    import cpu_training

    shipped = SHIPPED / "dst_pipeline_strategy.ckpt"
    cpu_training.go_on(options.dst_strategy_file, shipped, options.dst_checkpoints_dir, cut=False)
