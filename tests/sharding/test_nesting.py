"""Placements over the factors of a tensor's dimensions (MindSpore's JSON of nested maps), joined when a shape tells."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from support.cases import Case, cases
from support.in_memory import placement_of
from support.oracle import RawLayout, optimizer_step, rank_holds, slice_for_rank

from reshard_mpi.errors import LayoutError
from reshard_mpi.sharding import mindspore_json
from reshard_mpi.sharding.layout import Layout, alignments, fitted, regroup, stand_in_shape, whole_shape
from reshard_mpi.sharding.mindspore_layouts import to_placement
from reshard_mpi.sharding.placement import Placement


def expanded(raw: RawLayout, shape: tuple[int, ...]) -> Placement:
    """Return the placement as it is read from MindSpore's JSON: one factor for each mesh axis that cuts a dimension.

    All factors but the last of a dimension are as long as their axis, which cuts them down to length 1.
    """
    flat, factors = [], []
    for axes, length in zip(raw.tensor_map, shape):
        axes = axes if isinstance(axes, tuple) else (axes,)
        lengths = [raw.dev_matrix[-1 - axis] for axis in axes[:-1]]
        factors += [*lengths, length // math.prod(lengths)]
        flat += [(axis,) for axis in axes]
    size, step = raw.opt_size, optimizer_step(raw)
    return to_placement(
        mindspore_json.RawLayout(raw.dev_matrix, tuple(flat), size, step, tensor_shape=tuple(factors)), ""
    )


def nested_in(case: Case) -> list[tuple[RawLayout, tuple[int, ...], int]]:
    return [
        (layout, case.tensors[name].shape, side.world_size)
        for side in (case.src, case.dst)
        for name, layout in side.layouts.items()
        if layout.is_nested
    ]


def boxes(placement: Placement, shape: tuple[int, ...]) -> list[str] | None:
    """Return the box of every rank of a stage; None if the placement does not cut the shape."""
    try:
        layout = Layout(placement, shape)
    except LayoutError:
        return None
    return [str(layout.box(rank)) for rank in range(placement.stage_size)]


def needed_pieces(source: Placement, target: Placement, shape: tuple[int, ...], rank: int) -> set[int]:
    """Return the pieces that target `rank` needs, each as the first local rank that holds it."""
    box = Layout(target, shape).box(rank)
    return {min(source.holders(piece)) % source.stage_size for piece, _ in Layout(source, shape).pieces_meeting(box)}


NESTED = cases(max_parameters=2, uneven=False, empty=False, unlisted=False)


@given(NESTED)
def test_joined_factors_are_the_nested_map(case: Case) -> None:
    for raw, shape, world_size in nested_in(case):
        joined = regroup(expanded(raw, shape), shape)
        numbers = np.arange(math.prod(shape)).reshape(shape)
        for rank in range(world_size):
            if rank_holds(raw, rank):
                box = Layout(joined, shape).box(rank)
                part = numbers[tuple(slice(low, high) for low, high in zip(box.start, box.stop))]
                np.testing.assert_array_equal(part, slice_for_rank(numbers, raw, rank))


@given(NESTED)
def test_what_a_rank_holds_tells_the_whole_shape_or_is_refused(case: Case) -> None:
    """A slice of length 1 may leave open which dimension a factor belongs to."""
    for raw, shape, world_size in nested_in(case):
        flat = expanded(raw, shape)
        numbers = np.arange(math.prod(shape)).reshape(shape)
        for rank in range(world_size):
            if rank_holds(raw, rank):
                held = slice_for_rank(numbers, raw, rank).shape
                try:
                    assert whole_shape(flat, rank, held) == shape
                except LayoutError as error:
                    assert error.problem.startswith("the factors of a nested layout cannot be joined")
                    assert 1 in held
                    assert int(error.got.split()[0]) > 1


@given(NESTED)
def test_the_true_way_is_among_those_that_fit_without_a_shape(case: Case) -> None:
    for name, whole in case.tensors.items():
        raws = case.src.layouts[name], case.dst.layouts[name]
        assume(any(raw.is_nested for raw in raws))
        true = [boxes(placement_of(raw), whole.shape) for raw in raws]
        sides = [expanded(raw, whole.shape) if raw.is_nested else placement_of(raw) for raw in raws]
        ways = alignments(*sides)
        assert all(len(one.split) == len(other.split) or not (one.split and other.split) for one, other in ways)
        if all(side.expanded_shape for side in sides):
            continue  # they may meet in fewer dimensions than the tensor has, see below
        assert true in [[boxes(one, whole.shape) for one in pair] for pair in ways]


@given(NESTED)
def test_factors_on_both_sides_let_the_same_parts_meet(case: Case) -> None:
    for name, whole in case.tensors.items():
        raws = case.src.layouts[name], case.dst.layouts[name]
        for rank in range(case.dst.world_size):
            if rank_holds(raws[1], rank):
                needed = needed_pieces(*(placement_of(raw) for raw in raws), whole.shape, rank)
                source, target = (expanded(raw, whole.shape) for raw in raws)
                ways = [
                    {
                        min(one.holders(piece))
                        for piece, _ in Layout(one, shape).pieces_meeting(Layout(other, shape).box(rank))
                    }
                    for one, other in alignments(source, target)
                    for shape in [stand_in_shape(one, other)]
                ]
                assert needed <= set().union(*ways)
                if len(ways) == 1:
                    assert [needed] == ways


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (RawLayout((2, 4, 2), ((2, 1),), 2), RawLayout((2, 3, 2), ((2, 1),), 2)),
        (RawLayout((2, 4, 2), ((2, 1),), 2), RawLayout((2, 3), ((1, 0),))),
        (RawLayout((2, 4, 2), ((2, 1),), 2), RawLayout((4, 3, 2), ((2, 1),), 2)),
        (RawLayout((2, 4, 2), ((2, 1),), 2), RawLayout((4,), (-1,), 4)),
        (RawLayout((2, 4, 2), ((2, 1),), 2), RawLayout((4,), (), 4)),
    ],
    ids=["both cut", "source cut", "other factors", "another number of factors", "no dimensions"],
)
def test_what_the_optimizer_cuts_is_needed_where_the_shape_is_not_known(source: RawLayout, target: RawLayout) -> None:
    """It cuts the tensor's dimension 0, not its first factor, whether or not a way tells that they are one."""
    whole = 48
    for rank in range(target.stage_size):
        plain = placement_of(source), placement_of(target)
        needed = needed_pieces(*plain, (whole,), rank)
        sides = [expanded(raw, (whole,)) if raw.is_nested else placement_of(raw) for raw in (source, target)]
        met: set[int] = set()
        for one, other in alignments(*sides):
            shape = stand_in_shape(one, other)
            pieces = Layout(one, shape).pieces_meeting(Layout(other, shape).box(rank))
            met.update(min(one.holders(piece)) for piece, _ in pieces)
        assert needed <= met


# Single cases. Mesh (2, 3, 4), a tensor of 2 dimensions.

ROWS_BY_TWO = Placement((2, 3, 4), ((0,), (1,), (2,)), expanded_shape=(2, 6, 8))


def test_a_shape_tells_which_factors_are_one_dimension() -> None:
    assert regroup(ROWS_BY_TWO, (12, 8)) == Placement((2, 3, 4), ((0, 1), (2,)))
    assert regroup(ROWS_BY_TWO, (2, 6, 8)) is ROWS_BY_TWO  # a tensor of as many dimensions is not nested at all


def test_only_the_last_factor_of_a_dimension_may_be_longer_than_its_cut() -> None:
    """(6, 8) cut by (3, 4) is no dimension of 48: its rows of 2 would lie apart."""
    with pytest.raises(LayoutError, match="cannot be joined") as refused:
        regroup(ROWS_BY_TWO, (2, 48))
    assert refused.value.expected == "exactly one way to join [2, 6, 8] into the shape"
    assert refused.value.got == "0 ways for shape [2, 48]"


def test_a_part_that_leaves_two_ways_is_refused_rather_than_guessed() -> None:
    """A part (1, 2) can be that of a tensor (4, 4) or of (2, 8): the middle factor is cut down to length 1."""
    flat = Placement((2, 2, 2), ((0,), (1,), (2,)), expanded_shape=(2, 2, 4))
    for shape in ((4, 4), (2, 8)):
        assert Layout(flat, shape).box(0).shape == (1, 2)
    with pytest.raises(LayoutError, match="cannot be joined") as refused:
        whole_shape(flat, 0, (1, 2))
    assert refused.value.got == "2 ways for shape [1, 2]"
    assert refused.value.remedy == "give the strategy as a protobuf file, which keeps nested maps as they are"


def test_a_mesh_axis_of_one_rank_makes_no_second_way() -> None:
    harmless = Placement((2, 1, 2), ((0,), (1,), (2,)), expanded_shape=(2, 1, 2))
    assert boxes(regroup(harmless, (2, 2)), (2, 2)) == ["[0:1, 0:1]", "[0:1, 1:2]", "[1:2, 0:1]", "[1:2, 1:2]"]


def test_the_optimizer_cut_is_of_the_joined_dimension() -> None:
    flat = Placement((2, 2, 2), ((0,), (1,)), optimizer=2, expanded_shape=(2, 4))
    assert regroup(flat, (8,)) == Placement((2, 2, 2), ((0, 1),), optimizer=2)
    assert whole_shape(flat, 5, (1,)) == (8,)


def test_two_sides_of_the_same_factors_meet_as_they_are() -> None:
    other = ROWS_BY_TWO.changed(mesh=(2, 3, 2))
    assert alignments(ROWS_BY_TWO, other) == ((ROWS_BY_TWO, other),)


def test_two_sides_of_other_factors_meet_in_the_dimensions_both_have() -> None:
    ((one, other),) = alignments(ROWS_BY_TWO, Placement((4, 3), ((0,), (1,)), expanded_shape=(12, 8)))
    assert (one.split, other.split) == (((0, 1), (2,)), ((0,), (1,)))


def test_dimensions_of_length_1_are_kept() -> None:
    source = Placement((1, 2), ((), (1,), ()), expanded_shape=(1, 2, 1))
    target = Placement((2,), ((0,), ()), expanded_shape=(2, 1))
    ((one, other),) = alignments(source, target)
    assert [boxes(placement, (2, 1)) for placement in (one, other)] == [["[0:1, 0:1]", "[1:2, 0:1]"]] * 2


def test_dimensions_of_length_0_meet_too() -> None:
    source = Placement((2, 2), ((0,), (1,), ()), expanded_shape=(2, 2, 0))
    target = Placement((4,), ((0,), ()), expanded_shape=(4, 0))
    ((one, other),) = alignments(source, target)
    assert (one.split, other.split) == (((0, 1), ()), ((0,), ()))


def test_factors_meet_a_plain_placement_in_its_dimensions() -> None:
    plain = Placement((4,), ((0,), ()))
    ((one, other),) = alignments(ROWS_BY_TWO, plain)
    assert (one.split, other) == (((0, 1), (2,)), plain)
    assert alignments(plain, ROWS_BY_TWO) == ((plain, one),)


def test_factors_that_cannot_have_the_other_sides_dimensions_are_refused() -> None:
    with pytest.raises(LayoutError, match="with different dimensions") as refused:
        alignments(Placement((4,), ((0,), (), (), ())), ROWS_BY_TWO)
    assert refused.value.expected == "4 dimensions, as the source has"
    assert refused.value.got == "3 dimensions"


def test_an_open_ended_placement_is_closed_by_the_shape() -> None:
    rule = Placement((2,), ((0,),), open_ended=True)
    assert fitted(rule, (4, 3, 2)) == Placement((2,), ((0,), (), ()))
    assert fitted(rule, ()) == rule  # for the layout to refuse
    nothing = Placement((2,), open_ended=True)
    assert fitted(nothing, (4, 3)) == nothing
