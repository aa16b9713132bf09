"""A box made up of pieces that may overlap, and lie in any order: which region is taken from which."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, pairwise

from reshard_mpi.sharding.box import Box

# Of a piece, by its number, a region.
Taken = tuple[int, Box]


class UncoveredError(Exception):
    """`box` is in none of the pieces."""

    def __init__(self, box: Box) -> None:
        super().__init__(str(box))
        self.box = box


class Pieces:
    """The boxes of the pieces of a tensor, sorted so that those which meet another box are found quickly.

    Given in the order in which they are preferred where they overlap.
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
        # The furthest that any piece reaches up to each, which ascends too.
        self._reaches = list(accumulate((box.stop[self._dim] if box.ndim else 1 for box in by_start), max))

    def cover(self, box: Box) -> list[Taken]:
        """Return disjoint regions that make up `box`, in row-major order of their starts, each with its piece.

        Raises UncoveredError for a part that no piece has.
        """
        if not box.size:
            return []
        meeting = sorted(self._meeting(box))
        regions = dict[tuple[int, tuple[int, ...], tuple[int, ...]], list[int]]()
        found: list[tuple[int, list[int], tuple[int, ...], tuple[int, ...]]] = []
        for number, start, stop in _swept(meeting, box.start, box.stop, 0):
            # What goes on behind a region of the same piece that ends here is one region with it.
            key = (number, start[1:], stop[1:])
            span = regions.get(key)
            if span is not None and start and span[1] == start[0]:
                span[1] = stop[0]
                continue
            span = [start[0], stop[0]] if start else [0, 1]
            regions[key] = span
            found.append((number, span, start[1:], stop[1:]))
        taken = [
            (number, Box((span[0], *start), (span[1], *stop)) if box.ndim else box)
            for number, span, start, stop in found
        ]
        return sorted(taken, key=lambda one: (one[1].start, one[0]))

    def _meeting(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Yield the pieces that share elements with `box`, by number, and what they share."""
        low, high = (box.start[self._dim], box.stop[self._dim]) if box.ndim else (0, 1)
        for number, piece in self._boxes[bisect_right(self._reaches, low) : bisect_left(self._starts, high)]:
            shared = piece.intersect(box)
            if shared is not None:
                yield number, shared

    def _start(self, box: Box) -> int:
        return box.start[self._dim] if box.ndim else 0


def overlapping(boxes: Sequence[Box], within: Box) -> Iterator[tuple[int, int, Box]]:
    """Yield pairs of boxes that share elements, and those that lie in a box besides."""
    inside = [(number, shared) for number, box in enumerate(boxes) if (shared := box.intersect(within)) is not None]
    dim = _most_cut([box for _, box in inside])
    inside.sort(key=lambda one: one[1].start[dim] if one[1].ndim else 0)
    for at, (number, box) in enumerate(inside):
        for other, another in islice(inside, at + 1, None):
            if box.ndim and another.start[dim] >= box.stop[dim]:
                break
            shared = box.intersect(another)
            if shared is not None:
                yield number, other, shared


def _most_cut(boxes: Sequence[Box]) -> int:
    """Return the dimension in which boxes begin at the most different places."""
    if not boxes:
        return 0
    cuts = [len({box.start[dim] for box in boxes}) for dim in range(boxes[0].ndim)]
    return max(range(len(cuts)), key=cuts.__getitem__, default=0)


def _swept(
    meeting: Sequence[tuple[int, Box]], start: tuple[int, ...], stop: tuple[int, ...], dim: int
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Yield disjoint regions from `start` to `stop`, dimension by dimension from `dim` on, each with its piece.

    meeting: the pieces that reach over all of it in the dimensions before, those that are preferred first.
    """
    if not meeting:
        raise UncoveredError(Box(start, stop))
    number, first = meeting[0]
    if dim == len(start) or (first.start[dim:] == start[dim:] and first.stop[dim:] == stop[dim:]):
        yield number, start, stop
        return
    cuts = sorted({edge for _, box in meeting for edge in (box.start[dim], box.stop[dim])} | {start[dim], stop[dim]})
    begin, waiting = 0, sorted(range(len(meeting)), key=lambda at: meeting[at][1].start[dim])
    active: list[int] = []
    for low, high in pairwise(cuts):
        while begin < len(waiting) and meeting[waiting[begin]][1].start[dim] <= low:
            active.append(waiting[begin])
            begin += 1
        active = [at for at in active if meeting[at][1].stop[dim] > low]
        inner = [(meeting[at][0], _clipped(meeting[at][1], dim, low, high)) for at in sorted(active)]
        yield from _swept(inner, (*start[:dim], low, *start[dim + 1 :]), (*stop[:dim], high, *stop[dim + 1 :]), dim + 1)


def _clipped(box: Box, dim: int, low: int, high: int) -> Box:
    return Box((*box.start[:dim], low, *box.start[dim + 1 :]), (*box.stop[:dim], high, *box.stop[dim + 1 :]))
