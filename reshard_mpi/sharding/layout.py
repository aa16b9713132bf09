"""Which rank holds which box of a tensor: a placement bound to the tensor's shape."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from reshard_mpi.errors import LayoutError
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.nesting import regroup, regroup_held
from reshard_mpi.sharding.placement import Piece, Placement, Shape


class Layout:
    """A Placement bound to the shape of the whole tensor.

    Raises LayoutError if the number of dimensions differs, or a cut does not divide and no sizes are given.
    """

    __slots__ = ("_bounds", "placement", "shape")

    def __init__(self, placement: Placement, shape: Shape) -> None:
        placement = regroup(placement, shape)
        if placement.split and len(placement.split) != len(shape):
            raise LayoutError(
                "a tensor has another number of dimensions than its placement",
                expected=placement.dimensions,
                got=f"shape {list(shape)}",
            )
        self.placement = placement
        self.shape = shape
        self._bounds: dict[int, tuple[int, ...]] = {}
        for dim, sizes in placement.sizes:
            bounds = [0]
            for size in sizes:
                bounds.append(bounds[-1] + size)
            if bounds[-1] != shape[dim]:
                raise LayoutError(
                    f"the sizes given for dimension {dim} do not add up to the tensor",
                    expected=f"{shape[dim]} of shape {list(shape)}",
                    got=f"{bounds[-1]} = sum of {list(sizes)}",
                )
            self._bounds[dim] = tuple(bounds)
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
                heights = {high - low for low, high in (self._slice(0, at) for at in range(placement.slices(0)))}
            if any(height % placement.optimizer for height in heights):
                raise LayoutError(
                    "the optimizer cut does not divide dimension 0",
                    expected=f"slices whose height is a multiple of {placement.optimizer}",
                    got=f"heights {sorted(heights)} of shape {list(shape)}",
                )

    def box(self, rank: int) -> Box:
        """Return what global rank `rank` holds; its stage must be one of the placement's."""
        return self.piece_box(self.placement.piece(rank))

    def piece_box(self, piece: Piece) -> Box:
        """Return the box of one part."""
        if not self.placement.split:
            low, high = [0] * len(self.shape), list(self.shape)
        else:
            bounds = [self._slice(dim, at) for dim, at in enumerate(piece.index)]
            low, high = [b[0] for b in bounds], [b[1] for b in bounds]
        if self.placement.optimizer > 1:
            height = (high[0] - low[0]) // self.placement.optimizer
            low[0] += piece.part * height
            high[0] = low[0] + height
        return Box(tuple(low), tuple(high))

    def pieces_meeting(self, box: Box) -> Iterator[tuple[Piece, Box]]:
        """Yield the parts that share elements with `box`, each with the shared box, in row-major order.

        Found dimension by dimension: the cost is that of what is found, whatever the number of ranks.
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

    def _slice(self, dim: int, at: int) -> tuple[int, int]:
        bounds = self._bounds.get(dim)
        if bounds is not None:
            return bounds[at], bounds[at + 1]
        step = self.shape[dim] // self.placement.slices(dim)
        return at * step, at * step + step

    def _slices_meeting(self, dim: int, low: int, high: int) -> range:
        bounds = self._bounds.get(dim)
        if bounds is not None:
            first = next(i for i in range(len(bounds) - 1) if bounds[i + 1] > low)
            last = next(i for i in range(len(bounds) - 1, 0, -1) if bounds[i - 1] < high)
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


def whole_shape(placement: Placement, rank: int, held: Shape) -> Shape:
    """Return the shape of the whole tensor of which `rank` holds a part of shape `held`.

    Raises LayoutError if the number of dimensions does not fit; a part of the wrong size does not fit the shape it
    leads to, which is for the caller to see.
    """
    placement = regroup_held(placement, held)
    if not placement.split and placement.optimizer == 1:
        return held
    if placement.split and len(placement.split) != len(held):
        raise LayoutError(
            "a tensor has another number of dimensions than its placement",
            expected=placement.dimensions,
            got=f"shape {list(held)}",
        )
    if not held:
        raise LayoutError("a scalar cannot be cut", expected="a tensor of one dimension or more", got="shape []")
    totals = [placement.total(dim) for dim in range(len(held))]
    return tuple(
        length * placement.cuts(dim) if total is None else total
        for dim, (length, total) in enumerate(zip(held, totals))
    )


def stand_in_shape(source: Placement, target: Placement) -> Shape:
    """Return a small shape that both placements cut, in which the same parts meet as in any shape they both cut."""
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
