"""One mesh for placements over different meshes of the same ranks.

Two meshes number the same ranks row-major, so an axis is told by its stride (how many ranks apart its neighbours are)
and its length. A mesh whose axes begin and end wherever an axis in use begins or ends says the same of every placement.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from reshard_mpi.errors import LayoutError
from reshard_mpi.sharding.placement import Placement


class _Axis(NamedTuple):
    """The ranks of a stage whose numbers differ by multiples of `stride`, up to `end`, the stride of the next axis."""

    stride: int
    end: int

    def is_within(self, other: _Axis) -> bool:
        return other.stride <= self.stride < self.end <= other.end


def common_mesh(placements: Iterable[Placement]) -> tuple[int, ...]:
    """Return the coarsest mesh on which all the placements, of stages of one size, can be said.

    Raises LayoutError if there is none.
    """
    bounds = {1}
    for placement in placements:
        bounds |= {placement.stage_size, *_bounds(placement)}
    ordered = sorted(bounds, reverse=True)
    for larger, smaller in pairwise(ordered):
        if larger % smaller:
            raise LayoutError(
                "the meshes cannot be made one",
                expected="axes of which one begins where another does, or within it",
                got=f"axes that begin at every {smaller} ranks, and others at every {larger}",
            )
    return tuple(larger // smaller for larger, smaller in pairwise(ordered)) or (1,)


def on_mesh(placement: Placement, mesh: tuple[int, ...]) -> Placement:
    """Return a placement as one over `mesh`, a common mesh of it and others: the same for tensors of any shape.

    It tells only the dimensions that are cut, so that equal cuts are equal. Raises LayoutError if it cannot be said.
    """
    cuts = _cuts(placement)
    if placement.expanded_shape is not None and any(cuts):
        raise LayoutError(
            "a nested layout tells the factors of dimensions, not the dimensions",
            expected="one entry for each dimension of the tensor",
            got=f"entries for {list(placement.expanded_shape)}",
            remedy="give the strategy as a protobuf file, which keeps nested layouts as they are",
        )
    axes = _axes(mesh)
    split = [tuple(number for cut in dim for number, axis in enumerate(axes) if axis.is_within(cut)) for dim in cuts]
    if placement.ceil and [len(numbers) for numbers in split] != [len(dim) for dim in cuts]:
        raise LayoutError(
            "a cut by ceiling division does not go over several axes as over one",
            expected=f"whole axes of mesh {list(placement.mesh)}",
            got=f"mesh {list(mesh)}",
        )
    sized = max((dim for dim, _ in placement.sizes), default=-1)
    while split and not split[-1] and len(split) > sized + 1:
        split.pop()
    return replace(
        placement,
        mesh=mesh,
        split=tuple(split),
        expanded_shape=None,
        open_ended=True,
        whole_scalars=placement.whole_scalars and placement.is_cut,
        ceil=placement.ceil and bool(split),
    )


def _axes(mesh: tuple[int, ...]) -> list[_Axis]:
    axes, stride = [], 1
    for length in reversed(mesh):
        axes.append(_Axis(stride, stride * length))
        stride *= length
    return axes[::-1]


def _cuts(placement: Placement) -> list[list[_Axis]]:
    """Return for each dimension the axes that cut it, major first; two that one longer axis is the same as are joined.

    Axes of one rank cut nothing. What is cut by ceiling division is cut otherwise by a longer axis.
    """
    axes, cuts = _axes(placement.mesh), []
    for dim in placement.split:
        joined: list[_Axis] = []
        for axis in (axes[number] for number in dim if placement.mesh[number] > 1):
            if joined and joined[-1].stride == axis.end and not placement.ceil:
                axis = _Axis(axis.stride, joined.pop().end)
            joined.append(axis)
        cuts.append(joined)
    return cuts


def _bounds(placement: Placement) -> set[int]:
    """Return the strides at which an axis must begin or end for what the placement says."""
    used = sorted(axis for dim in _cuts(placement) for axis in dim)
    bounds = {bound for axis in used for bound in axis}
    pieces, low = placement.optimizer, 1
    # The optimizer's pieces go round over the free ranks, so they are the last axes of those between the used ones.
    for axis in (*used, _Axis(placement.stage_size, placement.stage_size)):
        free = axis.stride // low
        if pieces > 1 and free > 1:
            if pieces % free and free % pieces:
                raise LayoutError(
                    "the optimizer cut does not go over whole axes",
                    expected=f"a divisor or a multiple of {free}, the ranks of an axis that cuts nothing",
                    got=f"an optimizer cut into {placement.optimizer} over mesh {list(placement.mesh)}",
                )
            bounds |= {low, low * min(pieces, free)}
            pieces //= min(pieces, free)
        low = axis.end
    return bounds
