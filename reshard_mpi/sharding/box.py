"""Define boxes, half-open regions in global coordinates, and how pieces cover one (`Box`)."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, pairwise
from operator import add, sub
from typing import Final


class Box:
    """The elements x with start <= x < stop in every dimension. Immutable; nothing is clamped or wrapped.

    A box of no dimensions is a scalar and holds one element; a box with an empty dimension holds none.
    """

    __slots__ = ("start", "stop")

    def __init__(self, start: tuple[int, ...], stop: tuple[int, ...]) -> None:
        if len(start) != len(stop):
            raise ValueError(f"a box needs as many starts as stops, got {start} and {stop}")
        for low, high in zip(start, stop):
            if not 0 <= low <= high:
                raise ValueError(f"a box needs 0 <= start <= stop, got {start} and {stop}")
        self.start: Final = start
        self.stop: Final = stop

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Box) and self.start == other.start and self.stop == other.stop

    def __hash__(self) -> int:
        return hash((self.start, self.stop))

    def __repr__(self) -> str:
        return f"Box({self.start}, {self.stop})"

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Return the box of a whole tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def at(cls, start: Sequence[int], shape: Sequence[int]) -> Box:
        """Return the box of `shape` whose first element is at `start`."""
        return cls(tuple(start), tuple(map(add, start, shape)))

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
        return None if any(low >= high for low, high in zip(start, stop)) else Box(start, stop)

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


# The number of a piece, and the region that is taken from it.
CoveredPart = tuple[int, Box]


class UncoveredError(Exception):
    """`box` is in none of the pieces."""

    def __init__(self, box: Box) -> None:
        super().__init__(str(box))
        self.box = box


class Pieces:
    """The boxes of a tensor's pieces, sorted so that overlaps with a box are found quickly.

    Attributes:
        boxes: where pieces overlap, the one that comes first here is taken.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        first: dict[Box, int] = {}
        for number, box in enumerate(boxes):
            if box.size:
                first.setdefault(box, number)
        self._dim = _most_cut(list(first))
        by_start = sorted(first, key=self._start)
        self._boxes = [(first[box], box) for box in by_start]
        self._starts = [self._start(box) for box in by_start]
        # Up to each piece, the furthest stop of any; ascending, so that it can be searched.
        self._reaches = list(accumulate((box.stop[self._dim] if box.ndim else 1 for box in by_start), max))

    def cover(self, box: Box) -> list[CoveredPart]:
        """Return disjoint regions that make up `box`, each with its piece, in row-major order of their starts.

        Raises UncoveredError for a part of the box that no piece has.
        """
        if not box.size:
            return []
        meeting = sorted(self.meeting(box))
        span_by_key = dict[tuple[int, tuple[int, ...], tuple[int, ...]], list[int]]()
        regions: list[tuple[int, list[int], tuple[int, ...], tuple[int, ...]]] = []
        for number, start, stop in _swept(meeting, box.start, box.stop, 0):
            # A region that begins where another of the same piece and extent ends makes it longer.
            key = (number, start[1:], stop[1:])
            span = span_by_key.get(key)
            if span is not None and start and span[1] == start[0]:
                span[1] = stop[0]
                continue
            span = [start[0], stop[0]] if start else [0, 1]
            span_by_key[key] = span
            regions.append((number, span, start[1:], stop[1:]))
        covering = [
            (number, Box((span[0], *start), (span[1], *stop)) if box.ndim else box)
            for number, span, start, stop in regions
        ]
        return sorted(covering, key=lambda taken: (taken[1].start, taken[0]))

    def meeting(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Yield the pieces that share elements with `box`, by number, and the shared boxes."""
        low, high = (box.start[self._dim], box.stop[self._dim]) if box.ndim else (0, 1)
        for number, piece in self._boxes[bisect_right(self._reaches, low) : bisect_left(self._starts, high)]:
            shared = piece.intersect(box)
            if shared is not None:
                yield number, shared

    def _start(self, box: Box) -> int:
        return box.start[self._dim] if box.ndim else 0


def overlapping(boxes: Sequence[Box], within: Box) -> Iterator[tuple[int, int, Box]]:
    """Yield the numbers of every two boxes that share elements within a box, and the region they share there."""
    inside = [(number, shared) for number, box in enumerate(boxes) if (shared := box.intersect(within)) is not None]
    dim = _most_cut([box for _, box in inside])
    inside.sort(key=lambda numbered: numbered[1].start[dim] if numbered[1].ndim else 0)
    for place, (number, box) in enumerate(inside):
        for other, another in islice(inside, place + 1, None):
            if box.ndim and another.start[dim] >= box.stop[dim]:
                break
            shared = box.intersect(another)
            if shared is not None:
                yield number, other, shared


def _most_cut(boxes: Sequence[Box]) -> int:
    """Return the dimension in which boxes have the most different starts; 0 if there is none."""
    if not boxes:
        return 0
    cuts = [len({box.start[dim] for box in boxes}) for dim in range(boxes[0].ndim)]
    return max(range(len(cuts)), key=cuts.__getitem__, default=0)


def _swept(
    meeting: Sequence[tuple[int, Box]], start: tuple[int, ...], stop: tuple[int, ...], dim: int
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Yield disjoint regions that make up the box from `start` to `stop`: piece number, start, stop.

    The box is cut at all edges of pieces, one dimension after another from `dim` on.

    Args:
        meeting: the pieces by preference; each reaches over the whole box in the dimensions before `dim`.
    """
    if not meeting:
        raise UncoveredError(Box(start, stop))
    number, first = meeting[0]
    if dim == len(start) or (first.start[dim:] == start[dim:] and first.stop[dim:] == stop[dim:]):
        yield number, start, stop
        return
    cuts = sorted({edge for _, box in meeting for edge in (box.start[dim], box.stop[dim])} | {start[dim], stop[dim]})
    begin, waiting = 0, sorted(range(len(meeting)), key=lambda place: meeting[place][1].start[dim])
    active: list[int] = []
    for low, high in pairwise(cuts):
        while begin < len(waiting) and meeting[waiting[begin]][1].start[dim] <= low:
            active.append(waiting[begin])
            begin += 1
        active = [place for place in active if meeting[place][1].stop[dim] > low]
        inner = [(meeting[place][0], meeting[place][1].within(dim, low, high)) for place in sorted(active)]
        yield from _swept(inner, (*start[:dim], low, *start[dim + 1 :]), (*stop[:dim], high, *stop[dim + 1 :]), dim + 1)
