"""The guide's inference on 4 cards, from what 8 cards have saved.

    mpirun -n 4 python -m mpi4py model_transformation_infer.py --only_compile=1   # compile and convert
    mpirun -n 4 python model_transformation_infer.py --sharding=cpu               # predict, by run_infer.sh

The conversion is one call of `transform_checkpoint_by_rank` in every rank, of the source ranks that
`rank_list_for_transform` names. The target's strategy lists the weights, so what else was saved is left out.
"""

from __future__ import annotations

import sys
from pathlib import Path

from arguments import parse_arguments
from known_tensors import whole_tensors
from strategies import compile_or_copy, require_same_slices

options = parse_arguments(
    __doc__,
    src_strategy_file="src_strategy.ckpt",
    dst_strategy_file="dst_strategy.ckpt",
    src_checkpoints_dir="src_checkpoints",
    dst_checkpoints_dir="dst_checkpoints",
)

if options.only_compile:
    from mpi4py import MPI
    from transform_by_rank import transform_own_shard

    from reshard_mpi import ReshardError

    rank = MPI.COMM_WORLD.Get_rank()
    compiled = compile_or_copy(
        "infer/dst_strategy.ckpt",
        Path(options.dst_strategy_file),
        cards=4,
        rank=rank,
        optimizer_sharding=True,
        training=False,
    )
    try:
        shard = transform_own_shard(
            rank,
            options.src_checkpoints_dir,
            options.dst_checkpoints_dir,
            options.src_strategy_file,
            options.dst_strategy_file,
            unlisted="drop",
        )
    except ReshardError as error:
        sys.exit(f"rank {rank}: {error}")
    require_same_slices(compiled, whole_tensors(), shard)
elif options.sharding == "guide":
    sys.exit(
        "MindSpore's CPU build cannot predict with what the guide's optimizer cuts: see --sharding=cpu and the README"
    )
else:
    import cpu_training

    cpu_training.predict(options.dst_checkpoints_dir)
