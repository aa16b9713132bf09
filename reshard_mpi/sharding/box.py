"""Boxes: half-open regions of a tensor in global element coordinates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from operator import sub


@dataclass(frozen=True, slots=True)
class Box:
    """The elements x with start <= x < stop in every dimension. Immutable; nothing is clamped or wrapped.

    A box of no dimensions is a scalar and holds one element; a box with an empty dimension holds none.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise ValueError(f"a box needs as many starts as stops, got {self.start} and {self.stop}")
        for low, high in zip(self.start, self.stop):
            if not 0 <= low <= high:
                raise ValueError(f"a box needs 0 <= start <= stop, got {self.start} and {self.stop}")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Return the box of a whole tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def ndim(self) -> int:
        return len(self.start)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(sub, self.stop, self.start))

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(map(sub, self.stop, self.start))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{low}:{high}" for low, high in zip(self.start, self.stop)) + "]"

    def intersect(self, other: Box) -> Box | None:
        """Return the common elements, or None where there are none. Raises ValueError if the dimensions differ."""
        self._require_same_ndim(other)
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(low >= high for low, high in zip(start, stop)):
            return None
        return Box(start, stop)

    def _require_same_ndim(self, other: Box) -> None:
        if len(self.start) != len(other.start):
            raise ValueError(f"boxes of {self.ndim} and {other.ndim} dimensions do not meet")

    def contains(self, other: Box) -> bool:
        """Tell whether `other` lies in this box, its bounds included where it is empty.

        Raises ValueError if the dimensions differ.
        """
        self._require_same_ndim(other)
        return all(low <= a and b <= high for low, a, b, high in zip(self.start, other.start, other.stop, self.stop))

    def within(self, dim: int, low: int, high: int) -> Box:
        """Return the part of this box from index `low` up to `high` of one dimension, in global coordinates."""
        start, stop = self.start, self.stop
        return Box((*start[:dim], low, *start[dim + 1 :]), (*stop[:dim], high, *stop[dim + 1 :]))

    def relative_to(self, outer: Box) -> Box:
        """Return this box in the coordinates of `outer`. Raises ValueError if that does not contain it."""
        if not outer.contains(self):
            raise ValueError(f"{self} does not lie in {outer}")
        return Box(
            tuple(a - low for a, low in zip(self.start, outer.start)),
            tuple(b - low for b, low in zip(self.stop, outer.start)),
        )

    def offset_of(self, inner: Box) -> int:
        """Return how many elements of this box, in row-major order, come before the first of `inner`, a part of it."""
        offset = 0
        for low, high, first in zip(self.start, self.stop, inner.start):
            offset = offset * (high - low) + (first - low)
        return offset

    def span_of(self, inner: Box) -> int:
        """Return how many elements of this box, in row-major order, `inner` reaches over from its first to its last."""
        if inner.size == 0:
            return 0
        last = 0
        for low, high, end, first in zip(self.start, self.stop, inner.stop, inner.start):
            last = last * (high - low) + (end - 1 - first)
        return last + 1

    def blocks(self, limit: int, first: int = 0, last: int | None = None) -> Iterator[Box]:
        """Yield boxes of at most `limit` elements that are consecutive in the row-major order of this box.

        Together, in that order, they cover the elements from number `first` to before number `last` (None: to the
        end). Raises ValueError if `limit` is less than 1.
        """
        if limit < 1:
            raise ValueError(f"a block holds 1 element or more, got the limit {limit}")
        shape = self.shape
        rows = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))  # elements in one step of a dimension
        position, end = first, self.size if last is None else last
        while position < end:
            room = min(limit, end - position)
            start, stop, rest = [], [], position
            for dim, (row, length) in enumerate(zip(rows, shape)):
                index, rest = divmod(rest, row)
                low = self.start[dim] + index
                start.append(low)
                if rest == 0 and row <= room:
                    count = min(length - index, room // row)
                    stop.append(low + count)
                    start.extend(self.start[dim + 1 :])
                    stop.extend(self.stop[dim + 1 :])
                    position += count * row
                    break
                stop.append(low + 1)
            else:
                position += 1  # the one element of a scalar
            yield Box(tuple(start), tuple(stop))
