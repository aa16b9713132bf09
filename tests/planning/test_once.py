"""Which rank writes what several hold: each piece is written once, and every rank that asks finds the same."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from support.cases import Case, cases
from support.in_memory import strategy_of

from reshard_mpi.planning.once import is_writer
from reshard_mpi.sharding.layout import Layout
from reshard_mpi.sharding.placement import Placement


@given(case=cases(), name=st.text(max_size=3), loose=st.booleans())
def test_every_piece_is_written_once(case: Case, name: str, loose: bool) -> None:
    strategy = strategy_of(case.src)
    for listed, placements in strategy.parameters.items():
        shape = case.tensors[listed].shape
        ranks = [rank for rank in range(strategy.world_size) if strategy.stage_of(rank) in placements[0].stages]
        layout = Layout(placements[0], shape)
        held = {layout.box(rank) for rank in ranks}
        written = Counter(
            layout.box(rank) for rank in ranks if is_writer(rank, name, placements, layout.placement, loose=loose)
        )
        assert written.keys() == held
        assert loose or all(count == 1 for box, count in written.items() if box.size)


def test_stages_that_cut_a_parameter_differently() -> None:
    """The pieces of one of them make it up; torch refuses chunks that overlap."""
    rows, columns = Placement((2,), ((0,), ()), stages=(0,)), Placement((2,), ((), (0,)), stages=(1,))
    writers = [is_writer(rank, "w", (rows, columns), (rows, columns)[rank // 2], loose=False) for rank in range(4)]
    assert writers == [True, True, False, False]


def test_ranks_share_the_work() -> None:
    everywhere = Placement((4,))
    writers = Counter(
        rank
        for at in range(400)
        for rank in range(4)
        if is_writer(rank, f"w{at}", (everywhere,), everywhere, loose=False)
    )
    assert sum(writers.values()) == 400 and min(writers.values()) > 60
    assert [is_writer(rank, "w", (everywhere,), everywhere, loose=True) for rank in range(4)] == [True, *[False] * 3]
