"""Each rank makes its own shard of a checkpoint that other ranks saved.

    mpirun -n 4 python transform_by_rank.py SRC DST SRC_STRATEGY DST_STRATEGY

SRC holds rank_<r>/checkpoint_<r>.ckpt; as many ranks are started as the target strategy has. The body is that of
MindSpore's guide, with two imports exchanged: the transform functions, and get_rank.
"""

import sys
from pathlib import Path

from mpi4py import MPI

from reshard_mpi import ReshardError, rank_list_for_transform, transform_checkpoint_by_rank

get_rank = MPI.COMM_WORLD.Get_rank  # was: from mindspore.communication import get_rank


def transform_own_shard(
    rank: int, source: str, target: str, src_strategy: str, dst_strategy: str, *, unlisted: str = "follow"
) -> Path:
    """Write this rank's shard of the target and return where it is. `unlisted`: what the target does not list."""
    # Which source shards does this rank need, and where are they?
    checkpoint_files = {}
    for needed in rank_list_for_transform(rank, src_strategy, dst_strategy):
        checkpoint_files[needed] = Path(source, f"rank_{needed}", f"checkpoint_{needed}.ckpt")

    # The folder may be there already. The file appears complete or not at all, and replaces one of an earlier run.
    shard = Path(target, f"rank_{rank}", f"checkpoint_{rank}.ckpt")
    shard.parent.mkdir(parents=True, exist_ok=True)
    transform_checkpoint_by_rank(rank, checkpoint_files, shard, src_strategy, dst_strategy, unlisted=unlisted)
    print(f"rank {rank}: {shard} from source ranks {sorted(checkpoint_files)}")
    return shard


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    try:
        transform_own_shard(get_rank(), *sys.argv[1:])
    except ReshardError as error:
        sys.exit(f"rank {get_rank()}: {error}")
