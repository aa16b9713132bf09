"""Which rank writes what several hold: each piece is written once, and every rank that asks finds the same."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from support.cases import Case, cases
from support.in_memory import strategy_of

from reshard_mpi.planning.rank_choice import pieces_written_by
from reshard_mpi.sharding.layout import Layout
from reshard_mpi.sharding.placement import Placement


@given(case=cases(), names=st.lists(st.text(max_size=3), max_size=5, unique=True), is_listed=st.booleans())
def test_every_piece_is_written_once(case: Case, names: list[str], is_listed: bool) -> None:
    strategy = strategy_of(case.src)
    for listed, placements in strategy.parameters.items():
        layout = Layout(placements[0], case.tensors[listed].shape)
        ranks = [rank for rank in range(strategy.world_size) if strategy.stage_of(rank) in placements[0].stages]
        pieces = {layout.placement.piece(rank) for rank in ranks}
        written = Counter(
            (name, layout.placement.piece(rank))
            for rank in ranks
            for name in pieces_written_by(rank, names, layout.placement, is_listed=is_listed)
        )
        assert written == dict.fromkeys(((name, piece) for name in names for piece in pieces), 1)


def test_ranks_share_the_work() -> None:
    everywhere, names = Placement((4,)), [f"w{at}" for at in range(400)]
    counts = [len(list(pieces_written_by(rank, names, everywhere, is_listed=True))) for rank in range(4)]
    assert sum(counts) == 400 and min(counts) > 60
    assert [list(pieces_written_by(rank, names, everywhere, is_listed=False)) for rank in range(4)] == [
        names,
        [],
        [],
        [],
    ]
