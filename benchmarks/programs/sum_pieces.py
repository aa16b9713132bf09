"""Sums the one tensor of a shard, as `reshard-mpi verify` does, and prints how long that took.

Arguments: the shard's path, and the shape and the box of its tensor as JSON: [shape, start, stop].
"""

from __future__ import annotations

import json
import sys
import time

from reshard_mpi import formats
from reshard_mpi.engine.checksums import sum_tensors
from reshard_mpi.formats.manifest import TensorSpec
from reshard_mpi.planning.chunk_reads import held_tensor
from reshard_mpi.runs.planner import LIMITS
from reshard_mpi.sharding.box import Box


def main(path: str, place: str) -> None:
    shape, start, stop = map(tuple, json.loads(place))
    shard = formats.by_name("ckpt").locate(path)
    ((name, entry),) = shard.tensors.items()
    begin = time.perf_counter()
    specs = [TensorSpec(name, entry.dtype, shape, Box(start, stop))]
    held = (held_tensor(spec, shard) for spec in specs)
    list(sum_tensors(held, limits=LIMITS, on_bytes=lambda _: None))
    print(json.dumps({"seconds": time.perf_counter() - begin}))


if __name__ == "__main__":
    main(*sys.argv[1:])
