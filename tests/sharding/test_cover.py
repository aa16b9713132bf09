"""Boxes made up of pieces of any list: every element once, from a piece that has it, the preferred one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import many
from support.in_memory import part

from reshard_mpi.sharding.box import Box, Pieces, UncoveredError


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    start = tuple(draw(st.integers(0, length)) for length in shape)
    return Box(start, tuple(draw(st.integers(low, length)) for low, length in zip(start, shape)))


@st.composite
def lists(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box], Box]:
    """Draw a shape, pieces of it that may overlap, be empty or leave holes, and a box."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    pieces = draw(st.lists(boxes(shape), max_size=8))
    if draw(st.booleans()):
        pieces.insert(draw(st.integers(0, len(pieces))), Box.whole(shape))
    return shape, pieces, draw(boxes(shape))


@many(250)
@given(lists())
def test_every_element_comes_from_the_first_piece_that_has_it(drawn: tuple[tuple[int, ...], list[Box], Box]) -> None:
    shape, pieces, box = drawn
    first = np.full(shape, -1)
    for number, piece in reversed(list(enumerate(pieces))):
        part(first, piece)[...] = number
    try:
        taken = Pieces(pieces).cover(box)
    except UncoveredError as error:
        assert (part(first, error.box) == -1).all() and error.box.size and box.contains(error.box)
        return
    taken_from = np.full(shape, -2)
    for number, region in taken:
        assert region.size and (part(taken_from, region) == -2).all()
        part(taken_from, region)[...] = number
    assert (part(taken_from, box) == part(first, box)).all() and (part(first, box) >= 0).all()
    assert np.count_nonzero(taken_from != -2) == box.size


def test_pieces_stay_whole_where_others_do_not_lie_in_them() -> None:
    halves = [Box((0, 0), (4, 8)), Box((4, 0), (8, 4)), Box((4, 4), (6, 8)), Box((6, 4), (8, 8))]
    assert Pieces(halves).cover(Box.whole((8, 8))) == list(enumerate(halves))


def test_the_same_box_twice_is_taken_from_the_first() -> None:
    assert Pieces([Box((2,), (4,)), Box((0,), (2,)), Box((2,), (4,))]).cover(Box((1,), (4,))) == [
        (1, Box((1,), (2,))),
        (0, Box((2,), (4,))),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grid", "rows", "ranges"])
def test_many_pieces(kind: str) -> None:
    """16,384 of them, for 64 targets: never compared every one with every other."""
    many, side = 1 << 14, 1 << 7
    if kind == "grid":
        pieces = [Box((i * 4, j * 4), (i * 4 + 4, j * 4 + 4)) for i in range(side) for j in range(side)]
        shape: tuple[int, ...] = (4 * side, 4 * side)
    elif kind == "rows":
        pieces, shape = [Box((i * 2, 0), (i * 2 + 2, 5)) for i in range(many)], (2 * many, 5)
    else:  # ranges of the flattened tensor, each of some boxes
        shape = (many, 7)
        pieces = [
            box
            for number in range(0, many * 7, 5)
            for box in Box.whole(shape).blocks(5, number, min(number + 5, many * 7))
        ]
    listed = Pieces(pieces)
    step = shape[0] // 64
    for target in range(64):
        box = Box((target * step, 0), ((target + 1) * step, shape[1]))
        assert sum(region.size for _, region in listed.cover(box)) == box.size
