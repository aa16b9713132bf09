"""The oracle against slices worked out by hand."""

import numpy as np
import pytest
from support.oracle import RawLayout, rank_holds, slice_for_rank


def grid(*shape):
    return np.arange(np.prod(shape, dtype=int)).reshape(shape)


def slices(layout, whole, ranks):
    return [slice_for_rank(whole, layout, rank).tolist() for rank in range(ranks)]


def test_map_counts_from_the_right():
    # Device matrix 2 x 3: value 1 is the dimension of 2, value 0 the one of 3, which runs fastest.
    layout = RawLayout((2, 3), (1, 0))
    assert slices(layout, grid(2, 3), 6) == [[[0]], [[1]], [[2]], [[3]], [[4]], [[5]]]


def test_transposed_map():
    layout = RawLayout((2, 3), (0, 1))
    assert slices(layout, grid(3, 2), 6) == [[[0]], [[2]], [[4]], [[1]], [[3]], [[5]]]


def test_uncut_dimension_is_held_by_all():
    layout = RawLayout((2, 2), (1, -1))
    top, bottom = [[0, 1], [2, 3]], [[4, 5], [6, 7]]
    assert slices(layout, grid(4, 2), 4) == [top, top, bottom, bottom]


def test_nested_map_has_the_major_one_first():
    # Dimension 0 is cut by the device dimensions 2 (value 1) and 3 (value 0).
    layout = RawLayout((2, 3), ((1, 0), (-1,)))
    assert slices(layout, grid(6, 1), 6) == [[[row]] for row in range(6)]
    layout = RawLayout((2, 3), ((0, 1), (-1,)))
    # Rank 1 has coordinates (0, 1); the major one is now the dimension of 3, so it holds row 1 * 2 + 0.
    assert slices(layout, grid(6, 1), 6) == [[[row]] for row in (0, 2, 4, 1, 3, 5)]


def test_full_optimizer_sharding_goes_over_all_copies():
    layout = RawLayout((4,), (-1,), opt_size=-1)
    assert slices(layout, grid(8), 4) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_partial_optimizer_sharding_repeats():
    # Four copies, cut in two: position p holds piece p mod 2.
    layout = RawLayout((4,), (-1,), opt_size=2)
    assert slices(layout, grid(4), 4) == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_optimizer_sharding_cuts_after_the_model_split():
    # Rows by the major device dimension, then each half once more over the minor one.
    layout = RawLayout((2, 2), (1,), opt_size=-1)
    assert slices(layout, grid(4), 4) == [[0], [1], [2], [3]]
    # Rows by the minor device dimension: ranks 0 and 2 share the first half.
    layout = RawLayout((2, 2), (0,), opt_size=-1)
    assert slices(layout, grid(4), 4) == [[0], [2], [1], [3]]


def test_optimizer_sharding_of_a_transposed_map():
    # The case in which MindSpore 2.10 swaps shards: device matrix [2, 2, 2], map [0, 1], two pieces.
    layout = RawLayout((2, 2, 2), (0, 1), opt_size=2)
    whole = grid(4, 2)
    assert slices(layout, whole, 8) == [
        [[0]],  # (0, 0, 0): rows 0-1, column 0, first piece
        [[4]],  # (0, 0, 1): rows 2-3, column 0, first piece
        [[1]],  # (0, 1, 0): rows 0-1, column 1, first piece
        [[5]],  # (0, 1, 1)
        [[2]],  # (1, 0, 0): second pieces
        [[6]],
        [[3]],
        [[7]],
    ]


def test_uneven_slices():
    layout = RawLayout((2,), (0,), split_sizes=(3, 9))
    assert slices(layout, grid(12), 2) == [[0, 1, 2], [3, 4, 5, 6, 7, 8, 9, 10, 11]]


def test_stages():
    layout = RawLayout((2,), (0,), stages=(1,))
    assert [rank_holds(layout, rank) for rank in range(6)] == [False, False, True, True, False, False]
    assert slice_for_rank(grid(4), layout, 3).tolist() == [2, 3]
    with pytest.raises(ValueError, match="rank 4"):
        slice_for_rank(grid(4), layout, 4)


def test_tied_stages_hold_the_same():
    layout = RawLayout((2,), (0,), stages=(0, 2))
    assert slice_for_rank(grid(4), layout, 1).tolist() == slice_for_rank(grid(4), layout, 5).tolist() == [2, 3]


def test_scalar():
    assert slices(RawLayout((2,), ()), np.array(7), 2) == [7, 7]


def test_optimizer_sharding_of_an_empty_dimension():
    # All slices are empty, yet the copies of each are still those with the same slice number.
    layout = RawLayout((2, 2), (-1, 0), opt_size=-1)
    assert slice_for_rank(grid(2, 0), layout, 3).shape == (1, 0)


def test_cut_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="equal pieces"):
        slice_for_rank(grid(5), RawLayout((2,), (0,)), 0)
    with pytest.raises(ValueError, match="do not cut"):
        slice_for_rank(grid(5), RawLayout((2,), (0,), split_sizes=(2, 2)), 0)
