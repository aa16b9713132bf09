"""Placements and layouts: what they say of every rank, against an oracle that knows MindSpore's rules only."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import Case, cases
from support.in_memory import placement_of
from support.oracle import RawLayout, rank_holds, slice_for_rank

from reshard_mpi.errors import LayoutError
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.layout import Layout, stand_in_shape, whole_shape
from reshard_mpi.sharding.placement import Piece, Placement
from reshard_mpi.sharding.strategy import Strategy, unsharded


class OracleParameter:
    """One parameter as the oracle sees it: for every rank that holds it, the numbers of the elements it has."""

    def __init__(self, raw: RawLayout, shape: tuple[int, ...], world_size: int) -> None:
        self.raw, self.shape = raw, shape
        self.placement = placement_of(raw)
        self.layout = Layout(self.placement, shape)
        self.numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
        self.ranks = [rank for rank in range(world_size) if rank_holds(raw, rank)]
        self.parts = {rank: slice_for_rank(self.numbers, raw, rank) for rank in self.ranks}

    def elements(self, box: Box) -> np.ndarray:
        return self.numbers[tuple(slice(low, high) for low, high in zip(box.start, box.stop))]

    def copies_of(self, rank: int) -> list[int]:
        """Return the ranks that hold the same elements as `rank`."""
        return [other for other in self.ranks if np.array_equal(self.parts[other], self.parts[rank])]


def oracle_parameters(case: Case) -> list[OracleParameter]:
    return [
        OracleParameter(layout, case.tensors[name].shape, side.world_size)
        for side in (case.src, case.dst)
        for name, layout in side.layouts.items()
    ]


# Ranks and boxes


@given(cases(max_parameters=1))
def test_every_rank_holds_the_box_of_the_oracle(case: Case) -> None:
    for parameter in oracle_parameters(case):
        for rank in parameter.ranks:
            np.testing.assert_array_equal(parameter.elements(parameter.layout.box(rank)), parameter.parts[rank])


@given(cases(max_parameters=1))
def test_a_whole_shape_follows_from_what_any_rank_holds(case: Case) -> None:
    for parameter in oracle_parameters(case):
        for rank in parameter.ranks:
            assert whole_shape(parameter.placement, rank, parameter.parts[rank].shape) == parameter.shape


@given(cases(max_parameters=1, empty=False))
def test_replicas_are_the_ranks_that_hold_the_same_elements(case: Case) -> None:
    for parameter in oracle_parameters(case):
        for rank in parameter.ranks:
            assert sorted(
                parameter.layout.placement.holders(parameter.layout.placement.piece(rank))
            ) == parameter.copies_of(rank)


@given(cases(max_parameters=1, empty=False))
def test_holders_of_a_piece_are_its_ranks_stage_by_stage(case: Case) -> None:
    for parameter in oracle_parameters(case):
        for rank in parameter.ranks:
            holders = list(parameter.placement.holders(parameter.placement.piece(rank)))
            assert holders == parameter.copies_of(rank)
            piece, copies = parameter.placement.piece(rank), parameter.placement.replicas
            assert holders == [parameter.placement.nth_holder(piece, number) for number in range(copies)]
            assert all(parameter.placement.piece(other) == parameter.placement.piece(rank) for other in holders)


@given(cases(max_parameters=1, empty=False))
def test_the_holder_near_a_rank_is_that_rank_or_at_its_place(case: Case) -> None:
    for parameter in oracle_parameters(case):
        placement = parameter.placement
        size = placement.stage_size
        for rank in parameter.ranks:
            piece = placement.piece(rank)
            for home in range(size * (max(placement.stages) + 2)):
                nearest = placement.holder(piece, home)
                copies = parameter.copies_of(rank)
                assert nearest in copies
                if home in copies:
                    assert nearest == home
                stage = home // size if home // size in placement.stages else placement.stages[0]
                assert nearest // size == stage
                if placement.optimizer == 1:
                    along = [np.unravel_index(at % size, placement.mesh) for at in (nearest, home)]
                    assert all(along[0][axis] == along[1][axis] for axis in placement.free_axes)


@given(cases(max_parameters=1, empty=False))
def test_what_is_said_of_the_cut_is_so(case: Case) -> None:
    for parameter in oracle_parameters(case):
        assert parameter.placement.is_cut == any(
            part.size < parameter.numbers.size for part in parameter.parts.values()
        )
        firsts = {rank: part.ravel()[0] for rank, part in parameter.parts.items()}
        assert len(set(firsts.values())) == np.prod(
            [parameter.placement.cuts(dim) for dim in range(len(parameter.shape))]
        )


# Parts that meet


@given(cases(max_parameters=1), st.data())
def test_the_parts_that_meet_a_box_are_found_as_by_asking_every_rank(case: Case, data: st.DataObject) -> None:
    for parameter in oracle_parameters(case):
        start = [data.draw(st.integers(0, length)) for length in parameter.shape]
        stop = [data.draw(st.integers(low, length)) for low, length in zip(start, parameter.shape)]
        box = Box(tuple(start), tuple(stop))
        by_rank = {}
        for rank in parameter.ranks:
            shared = np.intersect1d(parameter.parts[rank], parameter.elements(box))
            if shared.size:
                by_rank[parameter.placement.piece(rank)] = tuple(shared)
        meeting = list(parameter.layout.pieces_meeting(box))
        assert {piece: tuple(parameter.elements(region).ravel()) for piece, region in meeting} == by_rank
        pieces = [(piece.slices, piece.part) for piece, _ in meeting]
        assert pieces == sorted(pieces)
        assert sum(region.size for _, region in meeting) == box.size


@given(cases(max_parameters=2, empty=False))
def test_in_the_stand_in_shape_the_same_parts_meet_as_in_the_real_one(case: Case) -> None:
    for name, whole in case.tensors.items():
        source, target = placement_of(case.src.layouts[name]), placement_of(case.dst.layouts[name])
        small = stand_in_shape(source, target)
        for rank in range(case.dst.world_size):
            met = [
                [piece for piece, _ in Layout(source, shape).pieces_meeting(Layout(target, shape).box(rank))]
                for shape in (small, whole.shape)
            ]
            assert met[0] == met[1]


def test_the_cost_of_finding_parts_does_not_grow_with_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4,096 optimizer pieces a box that meets two of them costs two."""
    asked = []
    piece_box = Layout.piece_box
    monkeypatch.setattr(Layout, "piece_box", lambda layout, piece: asked.append(piece) or piece_box(layout, piece))
    layout = Layout(Placement((4096, 8), ((1,), ()), 4096), (8 * 4096 * 2, 3))
    meeting = list(layout.pieces_meeting(Box((9, 0), (11, 3))))
    assert [piece.part for piece, _ in meeting] == [4, 5]
    assert len(asked) == 2


def test_a_slice_of_no_elements_meets_nothing() -> None:
    layout = Layout(Placement((3, 2), ((0,),), 2, sizes=((0, (2, 0, 2)),)), (4,))
    met = [(piece.slices[0], piece.part) for piece, _ in layout.pieces_meeting(Box((0,), (4,)))]
    assert met == [(0, 0), (0, 1), (2, 0), (2, 1)]


def test_a_tensor_whose_slices_are_all_empty_has_a_stand_in_too() -> None:
    empty, halves = Placement((2,), ((0,),), sizes=((0, (0, 0)),)), Placement((2,), ((0,),))
    assert stand_in_shape(empty, halves) == stand_in_shape(halves, empty) == (0,)
    assert whole_shape(empty, 1, (0,)) == (0,)


# Single cases, as MindSpore's documentation has them


def test_stages_hold_the_same_in_ranks_of_their_own() -> None:
    placement = Placement((2,), ((0,),), stages=(1, 3))
    assert list(placement.holders(Piece((1,), 0))) == [3, 7]
    assert [str(Layout(placement, (4,)).box(rank)) for rank in (2, 3, 6, 7)] == ["[0:2]", "[2:4]"] * 2
    assert placement.holder(Piece((1,), 0), home=6) == 7
    assert placement.holder(Piece((1,), 0), home=0) == 3


def test_rules_match_in_order_and_lists_come_first() -> None:
    rows, columns, rest = Placement((2,), ((0,),)), Placement((2,), ((), (0,))), Placement((2,))
    strategy = Strategy(2, 1, {"a.w": (rows,)}, (("a.*", columns), ("*.w", rows), ("*", rest)))
    assert strategy.find("a.w") == (rows,)
    assert strategy.find("a.b") == (columns,)
    assert strategy.find("b.w") == (rows,)
    assert strategy.find("b") == (rest,)
    assert [name for name in ("a.w", "a.b", "b.w", "b") if strategy.is_only_caught(name)] == ["b"]
    assert Strategy(2, 1, {}).find("b") == ()


def test_an_unsharded_checkpoint_holds_every_name_whole() -> None:
    whole = unsharded("here")
    assert (whole.world_size, whole.stages, whole.origin) == (1, 1, "here")
    assert [str(Layout(p, (3, 2)).box(0)) for p in whole.find("any")] == ["[0:3, 0:2]"]
    assert whole.is_only_caught("any")


# Refusals: what is wrong, expected, got


def shown(error: LayoutError) -> tuple[str, str, str]:
    return error.problem, error.expected, error.got


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            {"mesh": (2, 0)}, ("a mesh axis has no ranks", "every axis 1 or more", "mesh (2, 0)"), id="no ranks"
        ),
        *(
            pytest.param(
                {"mesh": (2, 4), "split": ((axis,),)},
                (
                    "a tensor dimension is mapped outside the mesh",
                    "mesh axes 0 to 1 of mesh (2, 4) (counted from the left)",
                    f"axis {axis}",
                ),
                id=f"axis {axis}",
            )
            for axis in (2, -1)
        ),
        pytest.param(
            {"mesh": (2, 4), "split": ((1,), (0, 1))},
            ("a mesh axis cuts two dimensions", "each mesh axis used once", "mesh axes ((1,), (0, 1))"),
            id="axis twice",
        ),
        *(
            pytest.param(
                {"mesh": (4, 2), "split": ((1,),), "optimizer": pieces},
                (
                    "the optimizer cut does not fit the ranks that share a slice",
                    "a divisor of 4 (mesh (4, 2) without the axes in use)",
                    str(pieces),
                ),
                id=f"optimizer {pieces}",
            )
            for pieces in (3, 8, 0, -1)
        ),
        pytest.param(
            {"mesh": (2,), "split": ((0,),), "sizes": ((0, (3, 3, 3)),)},
            ("the sizes given for dimension 0 do not fit its cut", "2 sizes", "3 sizes [3, 3, 3]"),
            id="too many sizes",
        ),
        pytest.param(
            {"mesh": (2,), "split": ((0,),), "sizes": ((1, (3, 3)),)},
            ("the sizes given for dimension 1 do not fit its cut", "0 sizes", "2 sizes [3, 3]"),
            id="sizes of a dimension that is not placed",
        ),
    ],
)
def test_placements_that_cannot_be(arguments: dict[str, object], message: tuple[str, str, str]) -> None:
    with pytest.raises(LayoutError) as refused:
        Placement(**arguments)
    assert shown(refused.value) == message


@pytest.mark.parametrize(
    ("placement", "shape", "message"),
    [
        pytest.param(
            Placement((2,), ((0,), ())),
            (4,),
            ("a tensor has another number of dimensions than its placement", "2 dimensions", "shape [4]"),
            id="dimensions",
        ),
        pytest.param(
            Placement((2,), ((0,), ()), open_ended=True),
            (4,),
            ("a tensor has another number of dimensions than its placement", "2 dimensions or more", "shape [4]"),
            id="too few dimensions for a rule",
        ),
        pytest.param(
            Placement((4,), ((), (0,))),
            (4, 6),
            ("dimension 1 cannot be cut evenly", "a multiple of 4, or the sizes of its slices", "shape [4, 6]"),
            id="does not divide",
        ),
        pytest.param(
            Placement((2,), ((0,),), sizes=((0, (3, 9)),)),
            (13,),
            ("the sizes given for dimension 0 do not add up to the tensor", "13 of shape [13]", "12 = sum of [3, 9]"),
            id="sizes do not add up",
        ),
        pytest.param(
            Placement((4, 2), ((1,), ()), optimizer=4),
            (12, 5),
            (
                "the optimizer cut does not divide dimension 0",
                "slices whose height is a multiple of 4",
                "heights [6] of shape [12, 5]",
            ),
            id="optimizer does not divide",
        ),
        pytest.param(
            Placement((2, 2), ((0,),), optimizer=2, sizes=((0, (4, 3)),)),
            (7,),
            (
                "the optimizer cut does not divide dimension 0",
                "slices whose height is a multiple of 2",
                "heights [3, 4] of shape [7]",
            ),
            id="optimizer does not divide an uneven slice",
        ),
        pytest.param(
            Placement((2,), optimizer=2),
            (),
            (
                "the optimizer cut does not divide dimension 0",
                "slices whose height is a multiple of 2",
                "heights [1] of shape []",
            ),
            id="optimizer cuts a scalar",
        ),
    ],
)
def test_layouts_that_cannot_be(placement: Placement, shape: tuple[int, ...], message: tuple[str, str, str]) -> None:
    with pytest.raises(LayoutError) as refused:
        Layout(placement, shape)
    assert shown(refused.value) == message


def test_parts_that_cannot_be_of_a_placement() -> None:
    rows = Placement((2,), ((0,), ()))
    with pytest.raises(LayoutError) as refused:
        whole_shape(rows, 0, (4,))
    assert shown(refused.value) == (
        "a tensor has another number of dimensions than its placement",
        "2 dimensions",
        "shape [4]",
    )
    with pytest.raises(LayoutError) as refused:
        whole_shape(Placement((2,), optimizer=2), 0, ())
    assert shown(refused.value) == ("a scalar cannot be cut", "a tensor of one dimension or more", "shape []")


def test_placements_of_other_dimensions_do_not_meet() -> None:
    rows, columns = Placement((2,), ((0,),)), Placement((2,), ((), (0,)))
    with pytest.raises(LayoutError) as refused:
        stand_in_shape(rows, columns)
    assert shown(refused.value) == (
        "source and target place a parameter with different numbers of dimensions",
        "1 dimension, as the source has",
        "2 dimensions",
    )
    assert stand_in_shape(Placement((2,)), columns) == (1, 2)  # a placement that cuts nothing fits any number


def test_meshes_of_one_strategy_have_as_many_ranks() -> None:
    with pytest.raises(LayoutError) as refused:
        Strategy(8, 2, {"w": (Placement((4,)),), "b": (Placement((2, 3)),)}, origin="a file")
    assert shown(refused.value) == (
        "the mesh does not fit the number of ranks",
        "4 ranks a stage (8 ranks, 2 stages)",
        "mesh (2, 3) for parameter 'b'",
    )
    assert refused.value.where == "a file"
    assert refused.value.remedy
