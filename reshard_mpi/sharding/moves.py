"""A box of one tensor that becomes a box of another, and moves one after another (`Move`)."""

from __future__ import annotations

from typing import NamedTuple

from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.strides import paired


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
        to = target_region(after.region, after.to, after.order, shared)
        if self.order is None and self.to == self.region:
            return Move(shared, to, after.order)
        region = source_region(self.region, self.to, self.order, shared)
        between = {dim: own for own, dim in paired(region, shared, self.order)}
        long = [between[dim] for dim, _ in paired(shared, to, after.order)]
        if long == sorted(long):
            return Move(region, to)
        return Move(region, to, (*long, *(dim for dim in range(region.ndim) if dim not in long)))


def source_region(region: Box, to: Box, order: tuple[int, ...] | None, part: Box) -> Box:
    """Return what of `region`, which becomes `to`, becomes `part` of that."""
    start, stop = list(region.start), list(region.stop)
    for dim, other in paired(region, to, order):
        start[dim] += part.start[other] - to.start[other]
        stop[dim] = start[dim] + part.stop[other] - part.start[other]
    return Box(tuple(start), tuple(stop))


def target_region(region: Box, to: Box, order: tuple[int, ...] | None, part: Box) -> Box:
    """Return what of `to`, which `region` becomes, `part` of the region becomes."""
    start, stop = list(to.start), list(to.stop)
    for dim, other in paired(region, to, order):
        start[other] += part.start[dim] - region.start[dim]
        stop[other] = start[other] + part.stop[dim] - part.start[dim]
    return Box(tuple(start), tuple(stop))
