"""Times `transform` in ranks that have imported it: `... SRC DST DST_STRATEGY FORMAT`."""

import json
import sys
import time

from mpi4py import MPI

from reshard_mpi import transform

source, target, dst_strategy, kind = sys.argv[1:]
comm = MPI.COMM_WORLD
comm.Barrier()
begin = time.perf_counter()
transform(source, target, None, dst_strategy, to=kind, comm=comm)
seconds = comm.allreduce(time.perf_counter() - begin, op=MPI.MAX)
if comm.Get_rank() == 0:
    print(json.dumps({"seconds": seconds}))
