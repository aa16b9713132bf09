"""Find the runs that are consecutive in two row-major arrays, and move boxes (`Strides`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import accumulate, count, islice
from operator import mul
from typing import NamedTuple

from reshard_mpi.sharding.box import Box

# Thousands of tensors are of a few dozen kinds, whose regions lie alike; the engine asks for each several times.
_REMEMBERED = 256
# A dimension of the source and the same one of the target, for those longer than 1, the target's outermost first.
Pairs = tuple[tuple[int, int], ...]


class Runs(NamedTuple):
    """`repeats` runs of `length` bytes that are consecutive in the source and in the target, at even distances.

    Offsets and steps (from the start of one run to that of the next) count bytes.
    """

    source_offset: int
    target_offset: int
    length: int
    repeats: int = 1
    source_step: int = 0
    target_step: int = 0

    @property
    def source_span(self) -> int:
        """How many bytes of the source lie from the first to the last of them, with those between."""
        return (self.repeats - 1) * self.source_step + self.length

    @property
    def target_span(self) -> int:
        """How many bytes of the target lie from the first to the last of them, with those between."""
        return (self.repeats - 1) * self.target_step + self.length

    def offsets(self, first: int = 0) -> Iterator[tuple[int, int]]:
        """Yield the offsets of each run, from number `first` on, in the source and in the target."""
        sources, targets = count(self.source_offset, self.source_step), count(self.target_offset, self.target_step)
        return islice(zip(sources, targets), first, self.repeats)

    def places_in(self, target: memoryview) -> list[memoryview]:
        """Return the runs in the target."""
        return [target[offset : offset + self.length] for _, offset in self.offsets()]


class Strides(NamedTuple):
    """How the elements of a region lie in a source and in a target array. Offsets and steps count elements.

    The offsets are those of the region's first element.
    """

    source_offset: int
    target_offset: int
    # length, source step and target step of each, the target's outermost first. Two whose elements are evenly spaced on
    # both sides are merged, so a region that is contiguous on both sides has one dimension, of step 1.
    dimensions: tuple[tuple[int, int, int], ...]

    @classmethod
    @lru_cache(_REMEMBERED)
    def between(
        cls,
        region: Box,
        source: Box,
        target_region: Box,
        target: Box,
        order: tuple[int, ...] | None = None,
        steps: tuple[int, ...] | None = None,
    ) -> Strides:
        """Return how `region` lies in `source`, and `target_region`, which holds the same elements, in `target`.

        Args:
            order: the dimensions of the source in the order that they have in the target; None: that of the source.
                Either side may have further dimensions of length 1.
            steps: how far apart elements of the source are in each dimension, if it is not row-major.
        """
        source_steps, target_steps = steps or _steps(source), _steps(target)
        lengths = region.shape
        dimensions: list[tuple[int, int, int]] = []
        for dim, target_dim in paired(region, target_region, order):
            length, step, target_step = lengths[dim], source_steps[dim], target_steps[target_dim]
            while dimensions and dimensions[-1][1:] == (step * length, target_step * length):
                length *= dimensions.pop()[0]
            dimensions.append((length, step, target_step))
        if 0 in lengths:
            dimensions = [(0, 1, 1)]
        firsts = (first - low for first, low in zip(region.start, source.start))
        source_offset = sum(map(mul, firsts, source_steps))
        return cls(source_offset, target.offset_of(target_region), tuple(dimensions))

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(length for length, _, _ in self.dimensions)

    @property
    def source_span(self) -> int:
        """How many elements of the source lie from the first to the last of them, with those between."""
        return 1 + sum((length - 1) * step for length, step, _ in self.dimensions) if self.size else 0

    @property
    def run_length(self) -> int:
        """How many elements are consecutive in both arrays: the length of every run."""
        length, step, target_step = self.dimensions[-1] if self.dimensions else (1, 1, 1)
        return length if step == target_step == 1 or not length else 1

    @property
    def is_in_source_order(self) -> bool:
        """Whether all elements are contiguous in the source, and in the order that they have in the target."""
        expected = 1
        for length, step, _ in reversed(self.dimensions):
            if step != expected:
                return False
            expected *= length
        return True

    @property
    def is_transposed(self) -> bool:
        """Whether elements that are consecutive in the source are apart in the target."""
        steps = [step for _, step, _ in self.dimensions]
        return 1 in steps and steps[-1] != 1

    def runs(self, itemsize: int) -> Iterator[Runs]:
        """Yield the runs in the order of the target. itemsize: of an element, in bytes."""
        if not self.size:
            return
        dimensions, length = self.dimensions, self.run_length
        outer = dimensions[:-1] if length > 1 else dimensions
        repeats, step, target_step = outer[-1] if outer else (1, length, length)
        for source_offset, target_offset in _offsets(self.source_offset, self.target_offset, outer[:-1]):
            yield Runs(
                source_offset * itemsize,
                target_offset * itemsize,
                length * itemsize,
                repeats,
                step * itemsize,
                target_step * itemsize,
            )


def paired(region: Box, target_region: Box, order: tuple[int, ...] | None) -> Pairs:
    """Return pairs of a dimension of `region` and the same one of `target_region`, for those longer than 1.

    Args:
        order: the dimensions of `region` in the order that they have in the target; None: as they are.

    Raises ValueError if the lengths differ.
    """
    lengths, target_lengths = region.shape, target_region.shape
    dims = [dim for dim in (order if order is not None else range(len(lengths))) if lengths[dim] != 1]
    target_dims = [dim for dim, length in enumerate(target_lengths) if length != 1]
    if [lengths[dim] for dim in dims] != [target_lengths[dim] for dim in target_dims]:
        raise ValueError(f"{region} does not fit {target_region}" + (f" in the order {order}" if order else ""))
    return tuple(zip(dims, target_dims))


def run_length(region: Box, source: Box, target: Box) -> int:
    """Return how many elements of `region` are consecutive in both `source` and `target`: the length of every run."""
    return Strides.between(region, source, region, target).run_length


def _steps(box: Box) -> tuple[int, ...]:
    """Return for each dimension of a row-major array how many elements lie from one index to the next."""
    return tuple(accumulate((1, *reversed(box.shape[1:])), mul))[::-1] if box.ndim else ()


def _offsets(source: int, target: int, dimensions: tuple[tuple[int, int, int], ...]) -> Iterator[tuple[int, int]]:
    """Yield the source and target offsets of runs; itertools.product would keep every row number in memory."""
    if not dimensions:
        yield source, target
        return
    (length, step, target_step), *inner = dimensions
    for index in range(length):
        yield from _offsets(source + index * step, target + index * target_step, tuple(inner))


class Move(NamedTuple):
    """A box of a tensor that becomes a box of another one. order: the dimensions of the one in the order in which they
    come in the other; None: as they are. Either box may have further dimensions of length 1."""

    region: Box
    to: Box
    order: tuple[int, ...] | None = None

    def then(self, after: Move) -> Move | None:
        """Return the move of what both have in common: from the source of this one to the target of the one after it.

        None if they have nothing in common.
        """
        shared = self.to.intersect(after.region)
        if shared is None:
            return None
        to = after.target_of(shared)
        if self.order is None and self.to == self.region:
            return Move(shared, to, after.order)
        region = self.source_of(shared)
        between = {dim: own for own, dim in paired(region, shared, self.order)}
        long = [between[dim] for dim, _ in paired(shared, to, after.order)]
        if long == sorted(long):
            return Move(region, to)
        return Move(region, to, (*long, *(dim for dim in range(region.ndim) if dim not in long)))

    def source_of(self, part: Box) -> Box:
        """Return what of the region becomes `part` of `to`."""
        pairs = paired(self.region, self.to, self.order)
        return _part_like(part, self.to, self.region, ((other, dim) for dim, other in pairs))

    def target_of(self, part: Box) -> Box:
        """Return what of `to` is made of `part` of the region."""
        return _part_like(part, self.region, self.to, paired(self.region, self.to, self.order))


def _part_like(part: Box, whole: Box, other: Box, pairs: Iterable[tuple[int, int]]) -> Box:
    """Return the part of `other` that lies in it as `part` lies in `whole`.

    Args:
        pairs: the dimensions of `whole` that are longer than 1, each with its like in `other`.
    """
    start, stop = list(other.start), list(other.stop)
    for dim, like in pairs:
        start[like] += part.start[dim] - whole.start[dim]
        stop[like] = start[like] + part.stop[dim] - part.start[dim]
    return Box(tuple(start), tuple(stop))
