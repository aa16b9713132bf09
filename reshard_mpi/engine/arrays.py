"""Tensors of a source as arrays: to be loaded, or compared."""

from __future__ import annotations

from typing import Any

import numpy as np

from reshard_mpi.dtypes import to_numpy
from reshard_mpi.engine.files import Files
from reshard_mpi.engine.gather import gather, raw_dtype
from reshard_mpi.planning.model import Check, Copy, Limits, RankPlan


def load_shard(plan: RankPlan, *, limits: Limits) -> dict[str, np.ndarray[Any, Any]]:
    """Return every tensor of `plan` as an owned C-contiguous array of its own type."""
    arrays = {}
    with Files() as files:
        for tensor in plan.tensors:
            dtype = tensor.spec.dtype
            array = np.empty(tensor.spec.box.shape, raw_dtype(dtype))
            for copy in tensor.copies:
                gather(files, copy, copy.region, array, tensor.spec.box, limits)
            arrays[tensor.spec.name] = array.view(to_numpy(dtype))
    return arrays


def first_difference(check: Check, *, limits: Limits) -> tuple[Copy, tuple[int, ...]] | None:
    """Return the first copy that differs from the check's first one, and the element (global index) where it does."""
    first, *others = check.copies
    dtype = raw_dtype(first.source.dtype)
    elements = max(1, limits.buffer_bytes // 2 // dtype.itemsize)
    with Files() as files:
        for block in first.region.blocks(elements):
            expected = np.empty(block.shape, dtype)
            gather(files, first, block, expected, block, limits)
            got = np.empty(block.shape, dtype)
            for copy in others:
                gather(files, copy, block, got, block, limits)
                if got.tobytes() != expected.tobytes():
                    at = np.unravel_index(int(np.argmax((got != expected).reshape(-1))), block.shape or (1,))
                    return copy, tuple(low + int(i) for low, i in zip(block.start, at))
    return None
