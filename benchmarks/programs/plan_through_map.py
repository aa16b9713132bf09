"""Plans one target rank of a checkpoint taken through a map: the source, the map, the target's strategy, and the rank.

A target of 40 GB may well have no room where benchmarks work; none is asked for here, since nothing is to be written.
"""

import sys

import reshard_mpi

source, map_file, strategy, rank = sys.argv[1:]
plan = reshard_mpi.plan(source, None, strategy, map=map_file, rank=[int(rank)], memory="unlimited")
assert plan.targets[0].tensors
