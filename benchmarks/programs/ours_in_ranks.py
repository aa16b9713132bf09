"""Times `transform_checkpoints` in ranks that have imported it: `... SRC DST SRC_STRATEGY DST_STRATEGY FORMAT`."""

import json
import sys
import time

from mpi4py import MPI

from reshard_mpi import transform_checkpoints

source, target, src_strategy, dst_strategy, kind = sys.argv[1:]
comm = MPI.COMM_WORLD
comm.Barrier()
begin = time.perf_counter()
transform_checkpoints(source, target, "checkpoint_", src_strategy, dst_strategy, output_format=kind, comm=comm)
seconds = comm.allreduce(time.perf_counter() - begin, op=MPI.MAX)
if comm.Get_rank() == 0:
    print(json.dumps({"seconds": seconds}))
