"""Reshards targets one by one with MindSpore: `mindspore_by_rank.py SRC DST SRC_STRATEGY DST_STRATEGY RANK...`."""

import sys
from pathlib import Path

import mindspore

source, target, src_strategy, dst_strategy, *ranks = sys.argv[1:]
for rank in map(int, ranks):
    needed = mindspore.rank_list_for_transform(rank, src_strategy, dst_strategy)
    files = {other: f"{source}/rank_{other}/checkpoint_{other}.ckpt" for other in needed}
    folder = Path(target, f"rank_{rank}")
    folder.mkdir(parents=True)
    mindspore.transform_checkpoint_by_rank(
        rank, files, str(folder / f"checkpoint_{rank}.ckpt"), src_strategy, dst_strategy
    )
