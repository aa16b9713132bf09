"""Fit placements that list more dimensions than their tensor has (`regroup`).

MindSpore's JSON flattens a nested map (one dimension over several mesh axes) into factors of that dimension. In the
factors of one dimension all but the last are cut down to length 1, since its axes are used up one after the other.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import accumulate, chain, product

from reshard_mpi.errors import LayoutError
from reshard_mpi.sharding.placement import Placement, Shape

Grouping = tuple[tuple[int, int], ...]


@lru_cache(maxsize=4096)
def regroup(placement: Placement, shape: Shape) -> Placement:
    """Return the placement with the dimensions of a tensor of `shape`: the factors of an expanded one are joined.

    Others stay as they are. Raises LayoutError if the factors can be joined in no way, or in several ways that differ.
    """
    if placement.expanded_shape is None or len(shape) == len(placement.split):
        return placement
    return _only_way(placement, placement.expanded_shape, shape)


@lru_cache(maxsize=4096)
def regroup_part(placement: Placement, part_shape: Shape) -> Placement:
    """Return the placement with the dimensions of a tensor if a rank holds a part of shape `part_shape`."""
    if placement.expanded_shape is None or len(part_shape) == len(placement.split) or not part_shape:
        return placement
    factors = tuple(
        length // placement.slices(dim) if length % placement.slices(dim) == 0 else 0
        for dim, length in enumerate(placement.expanded_shape)
    )
    # The optimizer cuts the joined dimension 0, not its first factor.
    return _only_way(placement, factors, (part_shape[0] * placement.optimizer, *part_shape[1:]))


@lru_cache(maxsize=4096)
def alignments(source: Placement, target: Placement) -> tuple[tuple[Placement, Placement], ...]:
    """Return pairs of both placements over the same dimensions: several only where the tensor's shape would decide.

    Raises LayoutError if there is none.
    """
    if source.expanded_shape and target.expanded_shape:
        factors = [*map(_without_zeros, (source.expanded_shape, target.expanded_shape))]
        shape = _common_factors(*factors)
        if source.expanded_shape == target.expanded_shape:
            shape, joined = factors[0], [[source], [target]]
        else:
            joined = [
                _ways(placement, len(shape), _products_are(own_factors, shape))
                for placement, own_factors in zip((source, target), factors)
            ]
        pairs = tuple(
            dict.fromkeys(both for pair in product(joined[0], joined[1]) for both in _with_joined_starts(*pair, shape))
        )
    else:
        pairs = tuple(product(_of_dims(source, target), _of_dims(target, source)))
    if not pairs:
        raise LayoutError(
            "source and target place a parameter with different dimensions",
            expected=f"{source.dimensions}, as the source has",
            got=target.dimensions,
            remedy="give strategies of the same network; of nested layouts, as protobuf files",
        )
    return pairs


def _of_dims(placement: Placement, other: Placement) -> list[Placement]:
    """Return the ways to see `placement` over the dimensions of `other`, where one of the two is not expanded."""
    if placement.expanded_shape is None:
        return [placement]
    if not other.split or other.open_ended:
        pairs = _with_joined_starts(placement, other, _without_zeros(placement.expanded_shape))
        return list(dict.fromkeys(joined for joined, _ in pairs))
    if len(placement.split) == len(other.split):
        return [placement]
    return _ways(placement, len(other.split), lambda grouping: True)


def _with_joined_starts(placement: Placement, other: Placement, shape: Shape) -> Iterator[tuple[Placement, Placement]]:
    """Yield both placements as they are and, if the optimizer cuts either, with their first dimensions joined.

    Args:
        shape: the factors that expanded placements list. The optimizer cuts dimension 0 of the tensor, and the first of
            these factors may be only a part of that. A placement that does not list them has the tensor's own
            dimensions, and is not joined.
    """
    yield placement, other
    if placement.optimizer == other.optimizer == 1:
        return
    sides = (placement, other)
    in_factors = [len(side.split) == len(shape) and not side.open_ended for side in sides]
    for count in range(2, len(shape) + 1):
        last = count - 2
        if any(fits and side.slices(last) != shape[last] for side, fits in zip(sides, in_factors)):
            return
        first, second = (_start_joined(side, count) if fits else side for side, fits in zip(sides, in_factors))
        yield first, second


def _start_joined(placement: Placement, count: int) -> Placement:
    joined = tuple(chain(*placement.split[:count]))
    return placement.changed(split=(joined, *placement.split[count:]), expanded_shape=None)


def _only_way(placement: Placement, factors: Shape, shape: Shape) -> Placement:
    ways = _ways(placement, len(shape), _products_are(factors, shape))
    if len(ways) != 1:
        raise LayoutError(
            "the factors of a nested layout cannot be joined into the tensor's dimensions",
            expected=f"exactly one way to join {list(factors)} into the shape",
            got=f"{len(ways)} ways for shape {list(shape)}",
            remedy="give the strategy as a protobuf file, which keeps nested maps as they are",
        )
    return ways[0]


def _products_are(factors: Shape, shape: Shape) -> Callable[[Grouping], bool]:
    return lambda grouping: all(
        math.prod(factors[first:last]) == length for (first, last), length in zip(grouping, shape)
    )


def _ways(placement: Placement, dims: int, fits: Callable[[Grouping], bool]) -> list[Placement]:
    """Return the ways to join the factors of a placement into `dims` dimensions; ways with the same pieces once.

    Args:
        fits: tells whether a grouping of the factors is to be tried.
    """
    assert placement.expanded_shape is not None
    single = [length == placement.slices(dim) for dim, length in enumerate(placement.expanded_shape)]
    ways: dict[tuple[tuple[int, ...], ...], Placement] = {}
    for grouping in _groupings(len(single), dims):
        if fits(grouping) and all(all(single[first : last - 1]) for first, last in grouping):
            split = tuple(tuple(chain(*placement.split[first:last])) for first, last in grouping)
            cutting = tuple(tuple(axis for axis in axes if placement.mesh[axis] > 1) for axes in split)
            ways.setdefault(cutting, placement.changed(split=split, expanded_shape=None))
    return list(ways.values())


def _without_zeros(shape: Shape) -> Shape:
    """Return `shape` with 1 for 0, so that products tell dimensions apart; of an empty tensor no lengths matter."""
    return tuple(max(length, 1) for length in shape)


def _common_factors(first: Shape, second: Shape) -> Shape:
    """Return the finest shape that both shapes refine; both list the factors of one tensor.

    Dimensions of length 1 are kept as often as both shapes have them.
    """
    ends = Counter(accumulate(first, operator.mul)) & Counter(accumulate(second, operator.mul))
    shape, before = [], 1
    for end in sorted(ends.elements()):
        shape.append(end // before)
        before = end
    return tuple(shape)


def _groupings(factors: int, groups: int) -> Iterator[Grouping]:
    """Yield the ways to divide `factors` consecutive factors into `groups` groups of one or more.

    A grouping holds the first factor of each group and the one after its last.
    """
    if groups == 0:
        if factors == 0:
            yield ()
        return
    for last in range(factors - 1, groups - 2, -1):
        for earlier in _groupings(last, groups - 1):
            yield (*earlier, (last, factors))
