"""Boxes, held to numpy: a box of a tensor is the set of the tensor's element numbers that lie in it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.strides import Runs, Strides, run_length

SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, within: Box) -> Box:
    """Draw a box that lies in another; it may be empty."""
    start, stop = [], []
    for low, high in zip(within.start, within.stop):
        start.append(draw(st.integers(low, high)))
        stop.append(draw(st.integers(start[-1], high)))
    return Box(tuple(start), tuple(stop))


@st.composite
def nested_boxes(draw: st.DrawFn, count: int) -> tuple[tuple[int, ...], list[Box]]:
    """Draw a shape, and boxes in it of which each contains the next."""
    shape = draw(SHAPES)
    nested = [Box.whole(shape)]
    for _ in range(count):
        nested.append(draw(boxes(nested[-1])))
    return shape, nested[1:]


@st.composite
def two_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box]:
    shape = draw(SHAPES)
    return shape, draw(boxes(Box.whole(shape))), draw(boxes(Box.whole(shape)))


def elements(box: Box, shape: tuple[int, ...]) -> np.ndarray:
    """Return the numbers of the elements in `box` of a tensor of `shape`, in the shape of the box."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return numbers[tuple(slice(low, high) for low, high in zip(box.start, box.stop))]


@given(nested_boxes(1))
def test_a_box_is_what_numpy_slices(drawn: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (box,) = drawn
    assert box.shape == elements(box, shape).shape
    assert box.size == elements(box, shape).size
    assert box.ndim == len(shape)


@given(two_boxes())
def test_intersect_is_the_set_of_common_elements(drawn: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, one, other = drawn
    common = np.intersect1d(elements(one, shape), elements(other, shape))
    shared = one.intersect(other)
    assert shared == other.intersect(one)
    if shared is None:
        assert common.size == 0
    else:
        np.testing.assert_array_equal(elements(shared, shape).ravel(), common)


@given(two_boxes())
def test_one_contains_the_other_if_every_element_is_in_it(drawn: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, one, other = drawn
    if other.size:
        assert one.contains(other) == set(elements(other, shape).flat).issubset(elements(one, shape).flat)
    elif one.contains(other):  # an empty box has a place too: that is what a zero-size part of a tensor is
        assert one.start <= other.start and other.stop <= one.stop


@given(nested_boxes(2))
def test_relative_to_keeps_the_elements(drawn: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (outer, inner) = drawn
    local = inner.relative_to(outer)
    held = elements(outer, shape)
    np.testing.assert_array_equal(
        held[tuple(slice(low, high) for low, high in zip(local.start, local.stop))], elements(inner, shape)
    )


@given(nested_boxes(2))
def test_offset_and_span_are_row_major_positions(drawn: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (outer, inner) = drawn
    wanted = elements(inner, shape).ravel()
    if wanted.size == 0:
        assert outer.span_of(inner) == 0
        return
    positions = np.flatnonzero(np.isin(elements(outer, shape).ravel(), wanted))
    assert outer.offset_of(inner) == positions[0]
    assert outer.span_of(inner) == positions[-1] - positions[0] + 1


@given(nested_boxes(1), st.integers(1, 50))
def test_blocks_are_contiguous_and_cover_the_box_in_order(drawn: tuple[tuple[int, ...], list[Box]], limit: int) -> None:
    shape, (box,) = drawn
    blocks = list(box.blocks(limit))
    assert all(0 < block.size <= limit for block in blocks)
    assert all(box.span_of(block) == block.size for block in blocks)
    covered = [elements(block, shape).ravel() for block in blocks]
    np.testing.assert_array_equal(np.concatenate([np.array([], int), *covered]), elements(box, shape).ravel())


@given(nested_boxes(1), st.integers(1, 50))
def test_blocks_are_no_smaller_than_they_must_be(drawn: tuple[tuple[int, ...], list[Box]], limit: int) -> None:
    _, (box,) = drawn
    for block, following in itertools.pairwise(box.blocks(limit)):
        start, stop = map(min, block.start, following.start), map(max, block.stop, following.stop)
        together = Box(tuple(start), tuple(stop))
        assert together.size > limit or together.size != block.size + following.size


@st.composite
def transfers(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box, Box]:
    """Draw a region and two boxes that contain it."""
    shape, (region,) = draw(nested_boxes(1))
    around = [
        Box(
            tuple(draw(st.integers(0, low)) for low in region.start),
            tuple(draw(st.integers(high, length)) for high, length in zip(region.stop, shape)),
        )
        for _ in range(2)
    ]
    return shape, region, *around


def common_runs(region: Box, source: Box, target: Box) -> Iterator[Runs]:
    """Yield the runs of elements of one byte in which `region` goes from `source` to `target`."""
    return Strides.between(region, source, region, target).runs(1)


def single_runs(region: Box, source: Box, target: Box) -> Iterator[tuple[int, int, int]]:
    """Yield every run by itself: source offset, target offset, count."""
    for runs in common_runs(region, source, target):
        assert runs.repeats >= 1
        for turn, offsets in enumerate(runs.offsets()):
            assert offsets == (
                runs.source_offset + turn * runs.source_step,
                runs.target_offset + turn * runs.target_step,
            )
            yield *offsets, runs.length


@given(transfers())
def test_common_runs_carry_the_region_and_nothing_else(drawn: tuple[tuple[int, ...], Box, Box, Box]) -> None:
    shape, region, source, target = drawn
    held = elements(source, shape).ravel()
    moved = np.full(target.size, -1)
    offsets = []
    for source_at, target_at, count in single_runs(region, source, target):
        moved[target_at : target_at + count] = held[source_at : source_at + count]
        offsets.append((source_at, target_at))
        assert count == run_length(region, source, target)
    wanted = elements(target, shape).ravel()
    np.testing.assert_array_equal(moved, np.where(np.isin(wanted, elements(region, shape)), wanted, -1))
    assert offsets == sorted(offsets)


@given(transfers())
def test_common_runs_are_as_long_as_can_be(drawn: tuple[tuple[int, ...], Box, Box, Box]) -> None:
    """Where one run ends the next element is somewhere else in the source or in the target."""
    _, region, source, target = drawn
    runs = single_runs(region, source, target)
    for (source_at, target_at, count), following in itertools.pairwise(runs):
        assert following[:2] != (source_at + count, target_at + count)


def test_runs_of_a_column_are_told_together() -> None:
    """A column of a tall tensor has a run in every row: they must not all be in memory."""
    tall = Box.whole((1 << 40, 2))
    column = Box((0, 1), (1 << 40, 2))
    assert list(common_runs(column, tall, column)) == [Runs(1, 0, 1, 1 << 40, 2, 1)]


def test_outer_dimensions_that_are_whole_in_both_are_told_together() -> None:
    source, target = Box.whole((7, 5, 4, 6)), Box((0, 0, 0, 2), (7, 5, 4, 5))
    assert list(common_runs(target, source, target)) == [Runs(2, 0, 3, 7 * 5 * 4, 6, 3)]
    part = Box((2, 0, 0, 2), (4, 5, 4, 5))
    assert list(common_runs(part, source, target)) == [Runs(2 * 120 + 2, 2 * 60, 3, 2 * 5 * 4, 6, 3)]


def test_a_scalar_is_one_element() -> None:
    scalar = Box((), ())
    assert (scalar.size, scalar.shape, str(scalar)) == (1, (), "[]")
    assert scalar.intersect(scalar) == scalar
    assert scalar.contains(scalar)
    assert list(scalar.blocks(1)) == [scalar]
    assert list(single_runs(scalar, scalar, scalar)) == [(0, 0, 1)]


def test_boxes_that_touch_share_nothing() -> None:
    assert Box((0, 0), (2, 4)).intersect(Box((2, 0), (4, 4))) is None


def test_an_empty_box_shares_nothing_even_with_itself() -> None:
    empty = Box((0, 2), (4, 2))
    assert empty.intersect(empty) is None
    assert list(empty.blocks(1)) == []
    assert list(common_runs(empty, empty, empty)) == []


def test_a_box_shows_its_bounds() -> None:
    assert str(Box((0, 2), (4, 8))) == "[0:4, 2:8]"


@pytest.mark.parametrize(
    ("start", "stop"),
    [((0,), (1, 2)), ((-1,), (2,)), ((3,), (2,)), ((0, 0), (1, -1))],
    ids=["unequal length", "negative start", "stop before start", "negative stop"],
)
def test_nothing_is_clamped_or_wrapped(start: tuple[int, ...], stop: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="a box needs"):
        Box(start, stop)


def test_boxes_of_other_dimensions_do_not_meet() -> None:
    line, square = Box.whole((4,)), Box.whole((4, 4))
    for one, other in ((line, square), (square, line)):
        for refused in (one.intersect, one.contains, one.relative_to):
            with pytest.raises(ValueError, match="dimensions"):
                refused(other)


@pytest.mark.parametrize("inner", [Box((0,), (5,)), Box((3,), (9,)), Box((9,), (9,))])
def test_relative_to_what_does_not_contain_it_is_refused(inner: Box) -> None:
    with pytest.raises(ValueError, match="does not lie in"):
        inner.relative_to(Box((1,), (8,)))


def test_blocks_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="limit"):
        list(Box.whole((4,)).blocks(0))
