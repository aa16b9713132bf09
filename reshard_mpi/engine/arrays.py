"""The tensors of one target rank as numpy arrays, read from the source without a target file."""

from __future__ import annotations

from typing import Any

import numpy as np

from reshard_mpi.engine.files import Files
from reshard_mpi.engine.gather import gather
from reshard_mpi.engine.placing import raw_dtype
from reshard_mpi.formats.dtypes import to_numpy
from reshard_mpi.planning.model import Limits, RankPlan


def load_shard(plan: RankPlan, *, limits: Limits) -> dict[str, np.ndarray[Any, Any]]:
    """Return every tensor of `plan` by name, as a C-contiguous array of the tensor's type that owns its memory.

    Raises ShardError if a source file cannot be read.
    """
    arrays = {}
    with Files() as files:
        for tensor in plan.tensors:
            dtype = tensor.spec.dtype
            array = np.empty(tensor.spec.box.shape, raw_dtype(dtype))
            for copy in tensor.copies:
                gather(files, copy, array, tensor.spec.box, limits)
            arrays[tensor.spec.name] = array.view(to_numpy(dtype))
    return arrays
