"""Times the plan of one target rank: `rank_plan.py SRC_STRATEGY DST_STRATEGY RANK SOURCE_RANK...`.

Strategies are read and the shards of the source ranks described (no file holds them) before the clock starts.
"""

import json
import sys
import time

from benchmarks.many_ranks import manifest
from reshard_mpi.checkpoints.shard_files import ShardFiles
from reshard_mpi.checkpoints.shard_opener import ShardShare
from reshard_mpi.checkpoints.source import SourceCheckpoint
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.runs.planner import Planner
from reshard_mpi.sharding import strategy_files


class _Described(SourceCheckpoint):
    """A source whose shards are only described."""

    held: dict[int, Manifest]

    def manifest(self, rank: int) -> Manifest:
        return self.held[rank]


src_strategy, dst_strategy, target_rank, *ranks = sys.argv[1:]
source, target = strategy_files.load(src_strategy), strategy_files.load(dst_strategy)
every = {rank: (f"rank_{rank}",) for rank in range(source.world_size)}
described = _Described(ShardFiles("nowhere", "ckpt", every), source)
looked_into = ShardShare(int(target_rank), target.world_size).ranks(source.world_size)
described.held = {rank: manifest(source, rank) for rank in {*map(int, ranks), *looked_into}}
planner = Planner(described, target)
begin = time.perf_counter()
plan = planner.plan(int(target_rank))
seconds = time.perf_counter() - begin
assert len(plan.tensors) == len(target.parameters)
print(json.dumps({"seconds": seconds}))
