"""Times what a map makes of the tensors of experts, gate and up, of 58 layers of 256: `... MAP`."""

import json
import sys
import time

from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.tensor_table import TensorType
from reshard_mpi.mapping.apply_rules import applied
from reshard_mpi.mapping.map_file import read_rules
from reshard_mpi.mapping.selection import Selection

kind = TensorType(BY_NAME["bfloat16"], (2048, 7168))
inventory = {
    f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight": kind
    for layer in range(3, 61)
    for expert in range(256)
    for part in ("gate", "up")
}
begin = time.perf_counter()
rules, _ = read_rules(sys.argv[1], None)
mapped = applied(rules, Selection(), inventory)
seconds = time.perf_counter() - begin
assert len(mapped.made) == 58
print(json.dumps({"seconds": seconds, "tensors": len(inventory)}))
