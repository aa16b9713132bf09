"""A placement that does not know the tensor's number of dimensions: what a rule of a spec makes."""

from __future__ import annotations

import pytest

from reshard_mpi.errors import LayoutError
from reshard_mpi.sharding.layout import Layout, stand_in_shape, whole_shape
from reshard_mpi.sharding.placement import Placement

OPEN = Placement((2, 4), ((), (1,)), optimizer=2, open_ended=True)
CLOSED = Placement((2, 4), ((), (1,), ()), optimizer=2)


def test_further_dimensions_are_not_cut() -> None:
    for rank in range(8):
        assert Layout(OPEN, (4, 8, 5)).box(rank) == Layout(CLOSED, (4, 8, 5)).box(rank)
        assert whole_shape(OPEN, rank, (2, 2, 5)) == (4, 8, 5)
        assert whole_shape(OPEN, rank, (2, 2)) == (4, 8)


def test_fewer_dimensions_than_are_cut_are_refused() -> None:
    for refused in (lambda: Layout(OPEN, (8,)), lambda: whole_shape(OPEN, 0, (8,))):
        with pytest.raises(LayoutError, match="2 dimensions or more"):
            refused()


def test_it_meets_placements_of_as_many_dimensions_or_more() -> None:
    assert stand_in_shape(OPEN, CLOSED) == (2, 4, 1)
    assert stand_in_shape(CLOSED, OPEN) == (2, 4, 1)
    assert stand_in_shape(OPEN, Placement((8,), ((0,),), open_ended=True)) == (8, 4)
    with pytest.raises(LayoutError, match="numbers of dimensions"):
        stand_in_shape(OPEN, Placement((8,), ((0,),)))


def test_other_stages_leave_everything_else_as_it_is() -> None:
    assert OPEN.with_stages((1, 2)) == Placement((2, 4), ((), (1,)), 2, stages=(1, 2), open_ended=True)


def test_the_optimizer_cuts_the_joined_dimension_of_an_expanded_map() -> None:
    expanded = Placement((4, 2, 2), ((0,), (1,), ()), optimizer=2, expanded_shape=(4, 8, 6))
    nested = Placement((4, 2, 2), ((0, 1), ()), optimizer=2)
    for rank in range(16):
        assert Layout(expanded, (32, 6)).box(rank) == Layout(nested, (32, 6)).box(rank)
        assert whole_shape(expanded, rank, (2, 6)) == (32, 6)


FOR_ALL = Placement((2, 4), ((0,),), optimizer=4, open_ended=True, whole_scalars=True)


def test_a_rule_for_all_tensors_leaves_scalars_whole() -> None:
    assert Layout(FOR_ALL, ()).placement == Placement((2, 4))
    assert whole_shape(FOR_ALL, 5, ()) == ()
    assert whole_shape(FOR_ALL, 5, (3,)) == (24,)
    assert Layout(FOR_ALL, (24,)).box(5).shape == (3,)


def test_other_rules_refuse_scalars() -> None:
    one = Placement((2, 4), ((0,),), open_ended=True)
    for refused in (lambda: Layout(one, ()), lambda: whole_shape(one, 0, ())):
        with pytest.raises(LayoutError, match="dimension"):
            refused()
