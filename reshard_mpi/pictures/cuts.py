"""How both sides cut a tensor: the pieces of a layout or of a list, and what a target's tensor is made of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, product

from reshard_mpi.pictures.figures import Block, Panel
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.layout import Layout
from reshard_mpi.sharding.placement import Piece, Shape

# Into so many blocks a dimension is divided at most, by how many dimensions are drawn that are cut.
_MOST_BLOCKS = {0: 1, 1: 64, 2: 16}
# Of the shards that hold a piece so many are named.
_MOST_HOLDERS = 8
# So many pieces of a list are drawn.
MOST_LISTED = 512


def shown_dimensions(shape: Shape, *all_cuts: Sequence[int]) -> tuple[int, ...]:
    """Return the dimensions of a tensor that are drawn, at most two, ascending.

    Those that any side cuts into the most parts come first, then the longest, then the last. all_cuts: for each side,
    into how many parts it cuts each dimension.
    """
    cuts = [max((cuts[dim] for cuts in all_cuts), default=1) for dim in range(len(shape))]
    ranked = sorted(range(len(shape)), key=lambda dim: (cuts[dim], shape[dim], dim), reverse=True)
    return tuple(sorted(ranked[:2]))


def cuts_of(layout: Layout) -> tuple[int, ...]:
    """Return into how many parts a layout cuts each dimension."""
    return tuple(layout.placement.cuts(dim) for dim in range(len(layout.shape)))


def cuts_of_boxes(shape: Shape, boxes: Iterable[Box]) -> tuple[int, ...]:
    """Return into how many parts boxes cut each dimension."""
    starts: list[set[int]] = [set() for _ in shape]
    for box in boxes:
        for dim, start in enumerate(box.start):
            starts[dim].add(start)
    return tuple(max(1, len(known)) for known in starts)


def panel_of_layout(name: str, dtype: str, layout: Layout, shown: tuple[int, ...]) -> Panel:
    """Return a tensor as a layout cuts it, in blocks where its pieces are too many."""
    cuts = cuts_of(layout)
    cut_dims = sum(cuts[dim] > 1 for dim in shown)
    steps = [-(-count // _MOST_BLOCKS[cut_dims]) for count in cuts]
    ranges = [range(0, cuts[dim], steps[dim]) if dim in shown else range(1) for dim in range(len(cuts))]
    blocks = []
    for first in product(*ranges):
        last = tuple(
            min(index + steps[dim], cuts[dim]) - 1 if dim in shown else index for dim, index in enumerate(first)
        )
        piece = _piece(layout, first)
        low, high = layout.piece_box(piece), layout.piece_box(_piece(layout, last))
        holders = tuple(sorted(islice(layout.placement.holders(piece), _MOST_HOLDERS)))
        count = math.prod(end - index + 1 for index, end in zip(first, last))
        blocks.append(Block(Box(low.start, high.stop), low, count, holders, layout.placement.copies))
    return Panel(name, dtype, layout.shape, shown, cuts, tuple(blocks), math.prod(cuts))


def panel_of_pieces(
    name: str, dtype: str, shape: Shape, held: Mapping[Box, Sequence[int]], shown: tuple[int, ...] | None = None
) -> Panel:
    """Return a tensor of which pieces are known one by one. held: the shards that hold each."""
    cuts = cuts_of_boxes(shape, held)
    shown = shown_dimensions(shape, cuts) if shown is None else shown
    boxes = sorted((box for box in held if is_at_front(box, shown)), key=lambda box: box.start)
    step = 1
    if sum(count > 1 for count in cuts) == 1:  # then neighbours in this order are neighbours in the tensor
        step = -(-len(boxes) // _MOST_BLOCKS[1])
    blocks = []
    for place in range(0, min(len(boxes), step * MOST_LISTED), step):
        together = boxes[place : place + step]
        first, holders = together[0], sorted(held[together[0]])
        box = Box(first.start, tuple(map(max, *(box.stop for box in together)))) if step > 1 else first
        blocks.append(Block(box, first, len(together), tuple(holders[:_MOST_HOLDERS]), len(holders)))
    return Panel(name, dtype, shape, shown, cuts, tuple(blocks), len(held))


def is_at_front(box: Box, shown: tuple[int, ...]) -> bool:
    """Tell whether a box is in the plane that is drawn: index 0 of every dimension that is not."""
    return all(start == 0 for dim, start in enumerate(box.start) if dim not in shown)


def _piece(layout: Layout, index: Sequence[int]) -> Piece:
    """Return the piece that is number `index[dim]` along every dimension, those of the optimizer's cut counted."""
    placement = layout.placement
    if not index:
        return Piece((), 0)
    whole, part = divmod(index[0], placement.optimizer)
    slices = (whole, *index[1:])
    return Piece(slices[: len(placement.split)], part)
