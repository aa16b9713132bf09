"""How a box is made up of pieces that may overlap and lie in any order: which region comes from which piece."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, pairwise

from reshard_mpi.sharding.box import Box

# The number of a piece, and the region that is taken from it.
Taken = tuple[int, Box]


class UncoveredError(Exception):
    """`box` is in none of the pieces."""

    def __init__(self, box: Box) -> None:
        super().__init__(str(box))
        self.box = box


class Pieces:
    """The boxes of the pieces of a tensor, sorted so that those which share elements with a box are found quickly.

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

    def cover(self, box: Box) -> list[Taken]:
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
        """Yield the pieces that share elements with `box`, by number, and what they share."""
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

    The box is cut at all edges of pieces, one dimension after another from `dim` on. meeting: the pieces by preference;
    each reaches over the whole box in the dimensions before `dim`.
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
