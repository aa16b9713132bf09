"""Times `rank_list_for_transform`, the first call of this process: `rank_list.py SRC_STRATEGY DST_STRATEGY RANK`."""

import json
import sys
import time

from reshard_mpi import rank_list_for_transform

src_strategy, dst_strategy, rank = sys.argv[1:]
begin = time.perf_counter()
ranks = rank_list_for_transform(int(rank), src_strategy, dst_strategy)
seconds = time.perf_counter() - begin
print(json.dumps({"seconds": seconds, "ranks": ranks}))
