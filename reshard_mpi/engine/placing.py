"""Puts elements from where they were read into an array: in another order, or with their bytes swapped."""

from __future__ import annotations

from typing import Any

import numpy as np

from reshard_mpi.formats.dtypes import DType
from reshard_mpi.planning.model import Copy
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.strides import Strides

Array = np.ndarray[Any, np.dtype[Any]]

# Axes change places in blocks that stay in the processor's first cache: elements along the source, and the target.
_BLOCK_ACROSS, _BLOCK_ALONG = 64, 256
_UNSIGNED: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("u2"), 4: np.dtype("u4"), 8: np.dtype("u8")}


def raw_dtype(dtype: DType) -> np.dtype[Any]:
    """Return a numpy dtype of the element's size that copies bits without interpreting them."""
    return _UNSIGNED.get(dtype.itemsize_bytes) or np.dtype((np.void, dtype.itemsize_bytes))


def source_view(window: memoryview, dtype: np.dtype[Any], strides: Strides) -> Array:
    """Return a view of the copied elements, in the order of the target; the first of them must begin the window."""
    shape = tuple(length for length, _, _ in strides.dimensions)
    return np.ndarray(shape, dtype, window, 0, tuple(step * dtype.itemsize for _, step, _ in strides.dimensions))


def target_view(out: Array, strides: Strides) -> Array:
    """Return a view of the places in `out` where the copied elements go."""
    shape, itemsize = tuple(length for length, _, _ in strides.dimensions), out.dtype.itemsize
    steps = tuple(step * itemsize for _, _, step in strides.dimensions)
    return np.ndarray(shape, out.dtype, out, strides.target_offset * itemsize, steps)


def put(elements: Array, copy: Copy, out: Array, out_box: Box) -> None:
    """Put the elements of a copy's region, row-major, in their places in `out`, which holds `out_box`."""
    strides = strides_alone(copy, out_box)
    assign(target_view(out, strides), source_view(elements.data, out.dtype, strides))


def strides_alone(copy: Copy, out_box: Box) -> Strides:
    """Return the strides of a copy's elements in a row-major array of its region alone, and in one of `out_box`."""
    return Strides.between(copy.region, copy.region, copy.target_region, out_box, copy.order)


def assign(target: Array, source: Array) -> None:
    """Copy `source` to `target`, of the same shape; block by block if their axes of consecutive elements differ."""
    axes = [axis for axis, length in enumerate(source.shape) if length > 1]
    if len(axes) < 2:
        target[...] = source
        return
    across, along = min(axes, key=lambda axis: source.strides[axis]), axes[-1]
    if across == along:
        target[...] = source
        return
    ahead: list[slice] = [slice(None)] * source.ndim
    for first in range(0, source.shape[across], _BLOCK_ACROSS):
        ahead[across] = slice(first, first + _BLOCK_ACROSS)
        for start in range(0, source.shape[along], _BLOCK_ALONG):
            ahead[along] = slice(start, start + _BLOCK_ALONG)
            block = tuple(ahead)
            target[block] = source[block]


def swap(out: Array, strides: Strides, dtype: DType) -> None:
    """Reverse the byte order of the copied elements in `out`; of a complex element, that of each part."""
    itemsize, width = dtype.itemsize_bytes, dtype.part_bytes
    shape = (*(length for length, _, _ in strides.dimensions), itemsize // width)
    steps = (*(step * itemsize for _, _, step in strides.dimensions), width)
    parts: Array = np.ndarray(shape, _UNSIGNED[width], out, strides.target_offset * itemsize, steps)
    parts.byteswap(inplace=True)
