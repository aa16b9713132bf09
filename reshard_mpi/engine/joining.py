"""Adds tensors up, element by element: their sum, or their mean, in the type that they have.

Elements are added one tensor after another, beginning with 0.0, in float32, or in float64 where that is their type; a
mean is divided in that type as well; the result is rounded once to the type of the elements. So it depends on nothing
but the tensors and their order. In a mean, an element that is the same in all tensors, bit for bit, stays as it is. A
result that is no number is the same NaN, whatever the NaNs were.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from reshard_mpi.engine.floats import convert, require_tiny_numbers
from reshard_mpi.engine.placing import raw_dtype
from reshard_mpi.formats.dtypes import BY_NAME, DType, to_numpy

Array = np.ndarray[Any, np.dtype[Any]]

_FLOAT64, _FLOAT32 = BY_NAME["float64"], BY_NAME["float32"]


class Joining:
    """The sum or the mean of as many tensors as are added. dtype: of their elements, one of `dtypes.FLOATS`.

    size: how many elements each has. Raises ReshardError if this thread takes tiny numbers for zero.
    """

    def __init__(self, dtype: DType, size: int, *, is_mean: bool) -> None:
        require_tiny_numbers()
        self._dtype, self._is_mean = dtype, is_mean
        self._wide = _FLOAT64 if dtype == _FLOAT64 else _FLOAT32
        self._total: Array = np.zeros(size, to_numpy(self._wide))
        self._count = 0
        self._first: Array | None = None
        self._is_same: Array = np.ones(size, np.bool_)  # as in all tensors that were added, bit for bit
        self._had_infinity: Array | None = None

    def add(self, elements: Array) -> None:
        """Add a tensor. elements: contiguous, of unsigned integers that are as wide as its type."""
        values = self._widened(elements)
        with np.errstate(all="ignore"):
            self._total += values
        infinite = np.isinf(values)
        if infinite.any():
            self._had_infinity = infinite if self._had_infinity is None else self._had_infinity | infinite
        if self._is_mean and self._first is None:
            self._first = elements.copy()
        elif self._first is not None:
            self._is_same &= elements == self._first
        self._count += 1

    def joined(self) -> tuple[Array, int]:
        """Return the elements of the sum or mean, and how many are too large for their type although no part was."""
        total = self._total
        if self._is_mean:
            total /= total.dtype.type(self._count)
        if self._first is not None:
            total[self._is_same] = 0  # what these are is known, and not too large
        # Which NaN comes of several is up to the processor, and would depend on how elements are divided into blocks.
        total[np.isnan(total)] = np.nan
        overflowed = np.isinf(total)
        if self._had_infinity is not None:
            overflowed &= ~self._had_infinity
        elements, too_large = total.view(raw_dtype(self._wide)), int(np.count_nonzero(overflowed))
        if self._wide != self._dtype:
            # As the largest number it is too large for the smaller type as well, and told by it.
            total[overflowed] = np.copysign(np.finfo(total.dtype).max, total[overflowed])
            rounded = np.empty(len(total), raw_dtype(self._dtype))
            too_large = convert(elements, self._wide, rounded, self._dtype)
            elements = rounded
        if self._first is not None:
            elements[self._is_same] = self._first[self._is_same]
        return elements, too_large

    def _widened(self, elements: Array) -> Array:
        wide = elements
        if self._wide != self._dtype:
            wide = np.empty(len(elements), raw_dtype(self._wide))
            convert(elements, self._dtype, wide, self._wide)
        return wide.view(self._total.dtype)
