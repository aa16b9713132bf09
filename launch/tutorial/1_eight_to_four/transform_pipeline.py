"""A checkpoint of pipeline stages becomes one of another sharding, with or without stages.

    mpirun -n 4 python transform_pipeline.py SRC DST SRC_STRATEGY_DIR DST_STRATEGY [--weights-only]

SRC holds the shards as training left them (rank_0/checkpoint-3_1875.ckpt ...; other files beside them do not matter),
SRC_STRATEGY_DIR the strategy files of all stages, one a stage or one a rank. Any number of ranks may be started: they
share the target's shards. --weights-only leaves out what the target strategy does not list, such as the optimizer's
state when the strategy is that of a network for inference.
"""

import sys

from mpi4py import MPI

from reshard_mpi import ReshardError, merge_pipeline_strategys, transform_checkpoints


def transform_stages(
    source: str, target: str, src_strategy_dir: str, src_strategy: str, dst_strategy: str, *, unlisted: str = "follow"
) -> None:
    """Merge the stages' strategies into the file `src_strategy`, and convert by it. Every rank makes the same call."""
    # One file for all stages. Every rank may write it: all write the same, and it is replaced as a whole.
    merge_pipeline_strategys(src_strategy_dir, src_strategy)

    # Without `comm` each rank would do all of the work.
    transform_checkpoints(
        source, target, "checkpoint_", src_strategy, dst_strategy, unlisted=unlisted, comm=MPI.COMM_WORLD
    )


if __name__ == "__main__":
    paths = [argument for argument in sys.argv[1:] if argument != "--weights-only"]
    if len(paths) != 4:
        sys.exit(__doc__)
    src, dst, stages, strategy = paths
    merged = f"{stages.rstrip('/')}_merged.ckpt"
    try:
        transform_stages(
            src, dst, stages, merged, strategy, unlisted="drop" if "--weights-only" in sys.argv else "follow"
        )
    except ReshardError as error:
        # The ranks fail alike, so one of them tells.
        sys.exit(str(error) if MPI.COMM_WORLD.Get_rank() == 0 else 1)
