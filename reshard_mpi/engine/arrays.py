"""Tensors of a source as arrays: to be loaded, or compared."""

from __future__ import annotations

from typing import Any

import numpy as np

from reshard_mpi.engine.files import Files
from reshard_mpi.engine.gather import Array, gather, raw_dtype
from reshard_mpi.formats.dtypes import to_numpy
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


def first_difference(
    check: Check, *, limits: Limits, files: Files | None = None
) -> tuple[Copy, tuple[int, ...]] | None:
    """Return the first copy that differs from the check's first one, and the element (global index) where it does.

    Every copy is read once. files: open files of the caller's, for many checks of the same ones.
    """
    if files is None:
        with Files() as files:
            return first_difference(check, limits=limits, files=files)
    first, *others = check.copies
    dtype = raw_dtype(first.source.dtype)
    elements = min(first.region.size, max(1, limits.buffer_bytes // 2 // dtype.itemsize))
    buffers = np.empty(elements, dtype), np.empty(elements, dtype)
    for block in first.region.blocks(max(1, elements)):
        expected, got = (buffer[: block.size].reshape(block.shape) for buffer in buffers)
        gather(files, first, block, expected, block, limits)
        for copy in others:
            gather(files, copy, block, got, block, limits)
            if not _same_bytes(expected, got):
                at = np.unravel_index(int(np.argmax((got != expected).reshape(-1))), block.shape or (1,))
                return copy, tuple(low + int(i) for low, i in zip(block.start, at))
    return None


def _same_bytes(left: Array, right: Array) -> bool:
    """Tell whether two C-contiguous arrays of one size hold the same bytes, in words as long as they come to."""
    size_bytes = left.size * left.dtype.itemsize
    word = np.dtype("u8") if size_bytes % 8 == 0 else np.dtype("u1")
    return bool(np.array_equal(left.reshape(-1).view(word), right.reshape(-1).view(word)))
