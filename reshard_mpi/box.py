"""Boxes: half-open regions of a tensor in global element coordinates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


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
        return tuple(high - low for low, high in zip(self.start, self.stop))

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

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

    def relative_to(self, outer: Box) -> Box:
        """Return this box in the coordinates of `outer`. Raises ValueError if that does not contain it."""
        if not outer.contains(self):
            raise ValueError(f"{self} does not lie in {outer}")
        return Box(
            tuple(a - low for a, low in zip(self.start, outer.start)),
            tuple(b - low for b, low in zip(self.stop, outer.start)),
        )

    def offset_of(self, inner: Box) -> int:
        """Return the row-major element offset, within this box, of the first element of `inner`, which lies in it."""
        offset = 0
        for low, high, first in zip(self.start, self.stop, inner.start):
            offset = offset * (high - low) + (first - low)
        return offset

    def span_of(self, inner: Box) -> int:
        """Return how many row-major elements of this box lie from the first to the last element of `inner`."""
        if inner.size == 0:
            return 0
        last = 0
        for low, high, end, first in zip(self.start, self.stop, inner.stop, inner.start):
            last = last * (high - low) + (end - 1 - first)
        return last + 1

    def blocks(self, limit: int) -> Iterator[Box]:
        """Cut this box into boxes of at most `limit` elements, each one contiguous run of its row-major order.

        The blocks come in row-major order and cover the box. Raises ValueError if `limit` is less than 1.
        """
        if limit < 1:
            raise ValueError(f"a block holds 1 element or more, got the limit {limit}")
        if self.size == 0:
            return
        shape = self.shape
        row = 1  # elements in one step of dimension `cut`
        cut = len(shape)
        while cut > 0 and row * shape[cut - 1] <= limit:
            cut -= 1
            row *= shape[cut]
        if cut == 0:
            yield self
            return
        cut -= 1
        step = limit // row
        for lead in _indices(self.start[:cut], self.stop[:cut]):
            for first in range(self.start[cut], self.stop[cut], step):
                last = min(first + step, self.stop[cut])
                yield Box(
                    (*lead, first, *self.start[cut + 1 :]),
                    (*(i + 1 for i in lead), last, *self.stop[cut + 1 :]),
                )


@dataclass(frozen=True, slots=True)
class Run:
    """`count` consecutive elements that are consecutive in the source and in the target; offsets count elements."""

    source_offset: int
    target_offset: int
    count: int


def run_length(region: Box, source: Box, target: Box) -> int:
    """Return how many elements of `region` are consecutive in both `source` and `target` (all runs are as long)."""
    length = 1
    for low, high, s_low, s_high, t_low, t_high in reversed(
        tuple(zip(region.start, region.stop, source.start, source.stop, target.start, target.stop))
    ):
        length *= high - low
        if high - low != s_high - s_low or high - low != t_high - t_low:
            break
    return length


def common_runs(region: Box, source: Box, target: Box) -> Iterator[Run]:
    """Yield the runs that carry `region` from `source` to `target`, in row-major order of the region."""
    if region.size == 0:
        return
    count = run_length(region, source, target)
    for block in region.blocks(count):
        yield Run(source.offset_of(block), target.offset_of(block), count)


def _indices(start: tuple[int, ...], stop: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the indices of a box one by one; itertools.product would keep every row number of a tensor in memory."""
    if not start:
        yield ()
        return
    for first in range(start[0], stop[0]):
        for rest in _indices(start[1:], stop[1:]):
            yield (first, *rest)
