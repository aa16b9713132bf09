"""`python -m benchmarks.programs.small_pieces FOLDER COUNT`: move so many tensors of 4 KiB from a file to another.

Prints how much CPU time the engine took for it.
"""

import json
import os
import sys
import time
from pathlib import Path

from reshard_mpi.engine.shard_transfer import OpenTarget, last_of, write_shard
from reshard_mpi.formats import ckpt
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.manifest import ShardIdentity, ShardSpec, Specs
from reshard_mpi.formats.protocol import reserve_file
from reshard_mpi.formats.tensor_table import TensorType
from reshard_mpi.planning.rank_plan import Group, PlannedTensors, RankPlan, ReadGroup
from reshard_mpi.runs.planner import LIMITS
from reshard_mpi.sharding.box import Box


def main() -> None:
    """Do what the command line says."""
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    box, names = Box.whole((32, 32)), [f"layers.{at}.weight" for at in range(count)]
    kind = TensorType.of_box(BY_NAME["float32"], box, box.shape)
    spec = ShardSpec(ShardIdentity(0, 1, ""), Specs(names, [kind], [0] * count), {})
    source = reserve_file(ckpt, str(folder / "from.ckpt"), spec)
    target = reserve_file(ckpt, str(folder / "to.ckpt"), spec)
    route = ReadGroup(0, box, box, source.tensors, range(count))
    tensors = PlannedTensors([Group(kind, names, (route,))], [0] * count)
    plan = RankPlan(0, 0, spec.identity, tensors, {}, (), (), (), (), frozenset())
    descriptor = os.open(target.path, os.O_RDWR)
    begin = time.process_time()
    last_of(write_shard(OpenTarget(plan, target, descriptor), limits=LIMITS, on_bytes=lambda _: None))
    print(json.dumps({"seconds": time.process_time() - begin}))
    for path in (source.path, target.path):
        Path(path).unlink()


main()
