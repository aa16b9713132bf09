"""Bind a placement to a shape: which rank holds which box (`Layout`), whatever dimensions it lists (`regroup`).

MindSpore's JSON flattens a nested map (one dimension over several mesh axes) into factors of that dimension. In the
factors of one dimension all but the last are cut down to length 1, since its axes are used up one after the other.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import accumulate, chain, product

from reshard_mpi.errors import LayoutError
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.placement import Piece, Placement, Shape, ceil_lengths
from reshard_mpi.text import counted


def fitted(placement: Placement, shape: Shape) -> Placement:
    """Return the placement with the dimensions of a tensor of `shape`.

    An open-ended one is closed, the factors of an expanded one are joined, a cut by ceiling division gets its sizes;
    others stay as they are. Raises LayoutError as `regroup` does.
    """
    placement = regroup(_closed(placement, len(shape)), shape)
    return _with_sizes(placement, shape) if placement.ceil else placement


def fitted_to_part(placement: Placement, part_shape: Shape) -> Placement:
    """Return the placement with the dimensions of a tensor if a rank holds a part of shape `part_shape`."""
    return regroup_part(_closed(placement, len(part_shape)), part_shape)


@lru_cache(maxsize=4096)
def _closed(placement: Placement, ndim: int) -> Placement:
    """Return an open-ended placement for a tensor of `ndim` dimensions."""
    if placement.whole_scalars and ndim == 0:
        return Placement(placement.mesh, stages=placement.stages)
    if not placement.open_ended or not placement.split or ndim < len(placement.split):
        return placement
    return placement.changed(
        split=placement.split + ((),) * (ndim - len(placement.split)), open_ended=False, whole_scalars=False
    )


def _with_sizes(placement: Placement, shape: Shape) -> Placement:
    """Return a placement that cuts by ceiling division as one that says how long the slices are."""
    if len(placement.split) > len(shape):
        return placement
    sizes = (
        (dim, ceil_lengths(shape[dim], [placement.mesh[axis] for axis in axes]))
        for dim, axes in enumerate(placement.split)
        if shape[dim] % placement.slices(dim)
    )
    return placement.changed(sizes=tuple(sizes), ceil=False)


class UnknownLengthError(LayoutError):
    """A dimension is cut by ceiling division, and not all of its slices are there, which tell its length."""


class Layout:
    """A Placement bound to the shape of the whole tensor.

    Raises LayoutError if the tensor has another number of dimensions, if the sizes of uneven slices do not add up to
    it, or if a dimension without such sizes is not divisible by the number of its slices.
    """

    __slots__ = ("_bounds", "placement", "shape")

    def __init__(self, placement: Placement, shape: Shape) -> None:
        placement = fitted(placement, shape)
        _require_dimensions(placement, shape)
        self.placement = placement
        self.shape = shape
        self._bounds: dict[int, tuple[int, ...]] = {}
        for dim, sizes in placement.sizes:
            bounds = tuple(accumulate(sizes, initial=0))
            if bounds[-1] != shape[dim]:
                raise LayoutError(
                    f"the sizes given for dimension {dim} do not add up to the tensor",
                    expected=f"{shape[dim]} of shape {list(shape)}",
                    got=f"{bounds[-1]} = sum of {list(sizes)}",
                )
            self._bounds[dim] = bounds
        for dim in range(len(placement.split)):
            if dim not in self._bounds and shape[dim] % placement.slices(dim):
                raise LayoutError(
                    f"dimension {dim} cannot be cut evenly",
                    expected=f"a multiple of {placement.slices(dim)}, or the sizes of its slices",
                    got=f"shape {list(shape)}",
                )
        if placement.optimizer > 1:
            heights = {1}
            if shape:
                heights = {high - low for low, high in (self._slice(0, index) for index in range(placement.slices(0)))}
            if any(height % placement.optimizer for height in heights):
                raise LayoutError(
                    "the optimizer cut does not divide dimension 0",
                    expected=f"slices whose height is a multiple of {placement.optimizer}",
                    got=f"heights {sorted(heights)} of shape {list(shape)}",
                )

    def box(self, rank: int) -> Box:
        """Return the box that global rank `rank` holds; the rank must be of a stage of the placement."""
        return self.piece_box(self.placement.piece(rank))

    def piece_box(self, piece: Piece) -> Box:
        """Return the box of one piece."""
        if not self.placement.split:
            low, high = [0] * len(self.shape), list(self.shape)
        else:
            bounds = [self._slice(dim, index) for dim, index in enumerate(piece.slices)]
            low, high = [bound[0] for bound in bounds], [bound[1] for bound in bounds]
        if self.placement.optimizer > 1:
            height = (high[0] - low[0]) // self.placement.optimizer
            low[0] += piece.part * height
            high[0] = low[0] + height
        return Box(tuple(low), tuple(high))

    def cut_places(self, dim: int) -> set[int]:
        """Return where pieces begin and end along a dimension."""
        parts = self.placement.optimizer if dim == 0 else 1
        slices = (self._slice(dim, index) for index in range(self.placement.slices(dim)))
        return {low + (high - low) // parts * part for low, high in slices for part in range(parts + 1)}

    def pieces_meeting(self, box: Box) -> Iterator[tuple[Piece, Box]]:
        """Yield the pieces that share elements with `box`, each with the shared box, by index and then by part.

        They are computed dimension by dimension, so the cost grows with the pieces yielded and not with the ranks.
        """
        if box.size == 0:
            return
        dims = range(len(self.placement.split))
        for index in product(*(self._slices_meeting(dim, box.start[dim], box.stop[dim]) for dim in dims)):
            for part in self._parts_meeting(index, box):
                piece = Piece(index, part)
                shared = self.piece_box(piece).intersect(box)
                if shared is not None:
                    yield piece, shared

    def _slice(self, dim: int, index: int) -> tuple[int, int]:
        bounds = self._bounds.get(dim)
        if bounds is not None:
            return bounds[index], bounds[index + 1]
        step = self.shape[dim] // self.placement.slices(dim)
        return index * step, index * step + step

    def _slices_meeting(self, dim: int, low: int, high: int) -> range:
        bounds = self._bounds.get(dim)
        if bounds is not None:
            first = next(index for index in range(len(bounds) - 1) if bounds[index + 1] > low)
            last = next(index for index in range(len(bounds) - 1, 0, -1) if bounds[index - 1] < high)
            return range(first, last)
        step = self.shape[dim] // self.placement.slices(dim)
        return range(low // step, (high - 1) // step + 1)

    def _parts_meeting(self, index: tuple[int, ...], box: Box) -> range:
        if self.placement.optimizer == 1:
            return range(1)
        low, high = self._slice(0, index[0] if index else 0)
        if low == high:
            return range(0)
        height = (high - low) // self.placement.optimizer
        return range((max(low, box.start[0]) - low) // height, (min(high, box.stop[0]) - low - 1) // height + 1)


def _require_dimensions(placement: Placement, shape: Shape) -> None:
    if placement.split and len(placement.split) != len(shape):
        raise LayoutError(
            "a tensor has another number of dimensions than its placement",
            expected=placement.dimensions,
            got=f"shape {list(shape)}",
            remedy=_rule_for(len(shape)) if placement.open_ended else "",
        )


def _rule_for(dimensions: int) -> str:
    """Return the advice for a spec's rule that cuts a dimension which tensors of fewer dimensions lack."""
    before = "give it a rule of its own before this one"
    if dimensions == 0:
        return f"the tensor has no dimensions and cannot be cut: {before}"
    there = "dimension 0" if dimensions == 1 else f"dimensions 0 to {dimensions - 1}"
    return f"the tensor has {counted(dimensions, 'dimension')}: cut {there}, or {before}"


def whole_shape(placement: Placement, rank: int, part_shape: Shape) -> Shape:
    """Return the shape of the whole tensor if `rank` holds a part of shape `part_shape`.

    Raises LayoutError if the number of dimensions does not fit. A part of a wrong size is not noticed here: it leads to
    a shape that the caller finds not to fit.
    """
    placement = fitted_to_part(placement, part_shape)
    if not placement.split and placement.optimizer == 1:
        return part_shape
    if placement.ceil and placement.is_cut:
        raise _unknown_length(next(dim for dim in range(len(part_shape)) if placement.slices(dim) > 1), placement, 1)
    _require_dimensions(placement, part_shape)
    if not part_shape:
        raise LayoutError("a scalar cannot be cut", expected="a tensor of one dimension or more", got="shape []")
    totals = [placement.total(dim) for dim in range(len(part_shape))]
    return tuple(
        length * placement.cuts(dim) if total is None else total
        for dim, (length, total) in enumerate(zip(part_shape, totals))
    )


def whole_shape_of_parts(placement: Placement, parts: Mapping[int, Shape]) -> Shape:
    """Return the shape of the whole tensor from the shapes of the ranks' parts.

    One part tells it, unless dimensions are cut by ceiling division: then the parts along them are added up. Raises
    UnknownLengthError if such parts are missing, LayoutError if the number of dimensions does not fit. Parts of wrong
    sizes are not noticed: see `whole_shape`.
    """
    rank, part_shape = next(iter(parts.items()))
    closed = fitted_to_part(placement, part_shape)
    if not (closed.ceil and closed.is_cut):
        return whole_shape(placement, rank, part_shape)
    _require_dimensions(closed, part_shape)
    pieces = [(closed.piece(rank).slices, shape) for rank, shape in parts.items() if len(shape) == len(part_shape)]
    whole = list(part_shape)
    for dim in range(len(closed.split)):
        lengths = {index[dim]: shape[dim] for index, shape in pieces}
        if len(lengths) != closed.slices(dim):
            raise _unknown_length(dim, closed, len(lengths))
        whole[dim] = sum(lengths.values())
    return tuple(whole)


def _unknown_length(dim: int, placement: Placement, slices: int) -> UnknownLengthError:
    return UnknownLengthError(
        f"how long dimension {dim} is cannot be known from a part of its slices",
        expected=f"shards with all {placement.slices(dim)} slices, since it is cut by ceiling division",
        got=str(slices),
        remedy="add the shards of the other ranks, or give the sizes of all slices in place of ceil",
    )


def stand_in_shape(source: Placement, target: Placement) -> Shape:
    """Return a small shape that both placements can cut.

    The pieces of source and target that share elements in it are those that do in any shape that both can cut. Raises
    LayoutError if the placements have different numbers of dimensions.
    """
    shorter, longer = sorted((source, target), key=lambda placement: len(placement.split))
    if shorter.split and not shorter.open_ended and len(shorter.split) != len(longer.split):
        raise LayoutError(
            "source and target place a parameter with different numbers of dimensions",
            expected=f"{source.dimensions}, as the source has",
            got=target.dimensions,
        )
    shape = []
    for dim in range(max(len(source.split), len(target.split), 1)):
        least = math.lcm(source.cuts(dim), target.cuts(dim))
        totals = (source.total(dim), target.total(dim), least)
        shape.append(next(total for total in totals if total is not None))
    return tuple(shape)


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
        yield from ((*earlier, (last, factors)) for earlier in _groupings(last, groups - 1))
