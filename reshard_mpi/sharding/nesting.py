"""Placements that list more dimensions than their tensor has, and those that leave the number open.

MindSpore's JSON flattens a nested map (one dimension over several mesh axes) into factors of that dimension. In the
factors of one dimension all but the last are cut down to length 1, since its axes are used up one after the other.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

from reshard_mpi.errors import LayoutError
from reshard_mpi.sharding.placement import Placement, Shape

Grouping = tuple[tuple[int, int], ...]


@lru_cache(maxsize=4096)
def regroup(placement: Placement, shape: Shape) -> Placement:
    """Return the placement with the dimensions of a tensor of `shape`.

    The factors of an expanded placement are joined, an open-ended one is closed; others stay as they are. Raises
    LayoutError if the factors can be joined in no way, or in several that differ.
    """
    placement = _closed(placement, len(shape))
    if placement.expanded_shape is None or len(shape) == len(placement.split):
        return placement
    return _only_way(placement, placement.expanded_shape, shape)


@lru_cache(maxsize=4096)
def regroup_held(placement: Placement, held: Shape) -> Placement:
    """Return the placement with the dimensions of a tensor of which a rank holds a part of shape `held`."""
    placement = _closed(placement, len(held))
    if placement.expanded_shape is None or len(held) == len(placement.split) or not held:
        return placement
    factors = tuple(
        length // placement.slices(dim) if length % placement.slices(dim) == 0 else 0
        for dim, length in enumerate(placement.expanded_shape)
    )
    # The optimizer cuts the joined dimension 0, not its first factor.
    return _only_way(placement, factors, (held[0] * placement.optimizer, *held[1:]))


@lru_cache(maxsize=4096)
def alignments(source: Placement, target: Placement) -> tuple[tuple[Placement, Placement], ...]:
    """Return the ways to see both placements over the same dimensions; one, but where only a shape would tell.

    Raises LayoutError if there is none.
    """
    if source.expanded_shape and target.expanded_shape:
        factors = [_without_zeros(one) for one in (source.expanded_shape, target.expanded_shape)]
        shape = _common_factors(*factors)
        if source.expanded_shape == target.expanded_shape:
            shape, joined = factors[0], [[source], [target]]
        else:
            joined = [_ways(one, len(shape), _products_are(own, shape)) for one, own in zip((source, target), factors)]
        pairs = ((one, other) for one in joined[0] for other in joined[1])
        found = tuple(dict.fromkeys(both for pair in pairs for both in _with_joined_starts(*pair, shape)))
    else:
        joined = [_of_dims(source, target), _of_dims(target, source)]
        found = tuple((one, other) for one in joined[0] for other in joined[1])
    if not found:
        raise LayoutError(
            "source and target place a parameter with different dimensions",
            expected=f"{source.dimensions}, as the source has",
            got=target.dimensions,
            remedy="give strategies of the same network; of nested layouts, as protobuf files",
        )
    return found


def _of_dims(placement: Placement, other: Placement) -> list[Placement]:
    if placement.expanded_shape is None:
        return [placement]
    if not other.split or other.open_ended:
        pairs = _with_joined_starts(placement, other, _without_zeros(placement.expanded_shape))
        return list(dict.fromkeys(one for one, _ in pairs))
    if len(placement.split) == len(other.split):
        return [placement]
    return _ways(placement, len(other.split), lambda grouping: True)


def _with_joined_starts(one: Placement, other: Placement, shape: Shape) -> Iterator[tuple[Placement, Placement]]:
    """Yield both placements as they are and, if the optimizer cuts either, with their first dimensions joined.

    It cuts the tensor's dimension 0, of which the first dimension of `shape`, the factors that both are in, may be but
    a factor. Only placements in these factors are joined; another has the dimensions of the tensor.
    """
    yield one, other
    if one.optimizer == other.optimizer == 1:
        return
    sides = (one, other)
    in_factors = [len(side.split) == len(shape) and not side.open_ended for side in sides]
    for count in range(2, len(shape) + 1):
        last = count - 2
        if any(fits and side.slices(last) != shape[last] for side, fits in zip(sides, in_factors)):
            return
        first, second = (_start_joined(side, count) if fits else side for side, fits in zip(sides, in_factors))
        yield first, second


def _start_joined(placement: Placement, count: int) -> Placement:
    start = tuple(axis for axes in placement.split[:count] for axis in axes)
    return replace(placement, split=(start, *placement.split[count:]), expanded_shape=None)


def _only_way(placement: Placement, factors: Shape, shape: Shape) -> Placement:
    found = _ways(placement, len(shape), _products_are(factors, shape))
    if len(found) != 1:
        raise LayoutError(
            "the factors of a nested layout cannot be joined into the tensor's dimensions",
            expected=f"exactly one way to join {list(factors)} into the shape",
            got=f"{len(found)} ways for shape {list(shape)}",
            remedy="give the strategy as a protobuf file, which keeps nested maps as they are",
        )
    return found[0]


def _products_are(factors: Shape, shape: Shape) -> Callable[[Grouping], bool]:
    return lambda grouping: all(
        math.prod(factors[first:last]) == length for (first, last), length in zip(grouping, shape)
    )


def _ways(placement: Placement, dims: int, fits: Callable[[Grouping], bool]) -> list[Placement]:
    """Return the ways to join the factors into `dims` dimensions that give different pieces."""
    assert placement.expanded_shape is not None
    single = [length == placement.slices(dim) for dim, length in enumerate(placement.expanded_shape)]
    ways: dict[tuple[tuple[int, ...], ...], Placement] = {}
    for grouping in _groupings(len(single), dims):
        if fits(grouping) and all(all(single[first : last - 1]) for first, last in grouping):
            split = tuple(tuple(axis for axes in placement.split[i:j] for axis in axes) for i, j in grouping)
            cutting = tuple(tuple(axis for axis in axes if placement.mesh[axis] > 1) for axes in split)
            ways.setdefault(cutting, replace(placement, split=split, expanded_shape=None))
    return list(ways.values())


def _without_zeros(shape: Shape) -> Shape:
    """Return a shape whose dimensions can be told by their products; without elements nothing depends on them."""
    return tuple(max(length, 1) for length in shape)


def _common_factors(first: Shape, second: Shape) -> Shape:
    """Return the dimensions at whose ends both shapes have one, those of length 1 as often as both have them."""
    ends = Counter(accumulate(first, operator.mul)) & Counter(accumulate(second, operator.mul))
    shape, before = [], 1
    for end in sorted(ends.elements()):
        shape.append(end // before)
        before = end
    return tuple(shape)


def _closed(placement: Placement, ndim: int) -> Placement:
    """Return an open-ended placement as that of a tensor of `ndim` dimensions."""
    if not placement.open_ended or not placement.split or ndim < len(placement.split):
        return placement
    return replace(placement, split=placement.split + ((),) * (ndim - len(placement.split)), open_ended=False)


def _groupings(factors: int, dims: int) -> Iterator[Grouping]:
    """Yield the ways to cut `factors` consecutive factors into `dims` groups of one or more."""
    if dims == 0:
        if factors == 0:
            yield ()
        return
    for last in range(factors - 1, dims - 2, -1):
        for head in _groupings(last, dims - 1):
            yield (*head, (last, factors))
