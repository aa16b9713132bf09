"""The figures of pictures: what is fed to whom, how tensors are cut, and what they are made of, beside brute force."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import Case, cases
from support.checkpoints import write_shard, write_shards, write_strategy
from support.conversions import make
from support.examples import few, many
from support.oracle import rank_holds, slice_for_rank

import reshard_mpi
from reshard_mpi.pictures.figures import (
    MOST_PLANNED,
    MOST_SPANS,
    Feed,
    Figures,
    Flow,
    Shards,
    grid_of,
    most_planned,
    panel_of_layout,
    panel_of_pieces,
    sampled_targets,
    shown_dimensions,
)
from reshard_mpi.processes import comm
from reshard_mpi.runs.progress import Progress
from reshard_mpi.runs.request import Request
from reshard_mpi.runs.run_pictures import Asked, planned_figures
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.layout import Layout
from reshard_mpi.sharding.placement import Placement


def figures_of(request: Request, *tensors: str, most_cuts: int = 200) -> Figures:
    with comm.world({}, explicit_share=True, stopped=lambda code: None) as world:
        drawn = planned_figures(request, world, Asked(tensors, most_cuts), Progress())
    assert drawn is not None
    return drawn[0]


def flow(sources: int, planned: tuple[int, ...], targets: int, feeds: tuple[Feed, ...]) -> Flow:
    return Flow(Shards(sources, "rank", {}), Shards(targets, "rank", {}), planned, feeds)


@many(25)
@given(case=cases())
def test_feeds_and_moves_are_what_each_rank_holds(case: Case, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("case")
    write_shards(case.src, case.tensors, folder / "src", "ckpt")
    request = Request(
        str(folder / "src"),
        str(folder / "dst"),
        str(write_strategy(case.src, folder / "source")),
        str(write_strategy(case.dst, folder / "target")),
    )
    figures = figures_of(request)
    assert figures.flow.planned == tuple(range(case.dst.world_size))
    assert figures.further == 0 and sum(cut.total for cut in figures.cuts) == len(case.tensors)
    taken: Counter[int] = Counter()
    for feed in figures.flow.feeds:
        taken[feed.target] += feed.size_bytes
    for rank in figures.flow.planned:
        held = [
            slice_for_rank(whole, case.dst.layouts[name], rank).nbytes
            for name, whole in case.tensors.items()
            if rank_holds(case.dst.layouts[name], rank)
        ]
        assert taken[rank] == sum(held)
    for cut in figures.cuts:
        whole = np.arange(math.prod(cut.target.shape)).reshape(cut.target.shape)
        source, target = case.src.layouts[cut.names[0]], case.dst.layouts[cut.names[0]]
        made = {rank: np.full(whole.shape, -1) for rank in figures.flow.planned if rank_holds(target, rank)}
        for move in cut.moves:
            region = tuple(map(slice, move.region.start, move.region.stop))
            assert (made[move.target][region] == -1).all()
            made[move.target][region] = whole[region]
            assert move.source is not None and np.isin(whole[region], slice_for_rank(whole, source, move.source)).all()
        for rank, array in made.items():
            assert set(array[array >= 0]) == set(slice_for_rank(whole, target, rank).flat)
        for panel, layout in ((cut.sources[0], source), (cut.target, target)):
            for block in panel.blocks:
                region = tuple(map(slice, block.piece.start, block.piece.stop))
                for rank in block.holders:
                    assert np.array_equal(slice_for_rank(whole, layout, rank), whole[region])


@given(targets=st.integers(1, 1 << 20), tensors=st.integers(0, 1 << 20))
def test_a_sample_is_bounded_and_in_every_column(targets: int, tensors: int) -> None:
    most = most_planned(tensors)
    assert 8 <= most <= MOST_PLANNED and (most == 8 or most * tensors <= 1_500_000)
    chosen = sampled_targets(targets, most)
    assert list(chosen) == sorted(set(chosen)) and chosen[0] >= 0 and chosen[-1] < targets
    assert len(chosen) == targets if targets <= most else most // 2 <= len(chosen) <= most
    grid = grid_of(flow(1, chosen, targets, tuple(Feed(0, rank, 1, 1) for rank in chosen)))
    assert {column for _, column in grid.cells} == set(range(len(grid.columns)))


@pytest.mark.parametrize("power", range(8, 21))
def test_a_sample_meets_every_coordinate_of_the_inner_axes(power: int) -> None:
    chosen = sampled_targets(1 << power, MOST_PLANNED)
    assert all({rank % size for rank in chosen} == set(range(size)) for size in (2, 4, 8))


@given(
    sources=st.integers(1, 5000),
    targets=st.integers(1, 5000),
    pairs=st.lists(st.tuples(st.integers(0, 4999), st.integers(0, 4999), st.integers(1, 1 << 50)), max_size=30),
)
def test_a_grid_has_every_byte_once(sources: int, targets: int, pairs: list[tuple[int, int, int]]) -> None:
    feeds = tuple(Feed(source % sources, target % targets, 1, size) for source, target, size in pairs)
    grid = grid_of(flow(sources, tuple(range(targets)), targets, feeds))
    assert len(grid.rows) <= MOST_SPANS and len(grid.columns) <= MOST_SPANS
    for spans, count in ((grid.rows, sources), (grid.columns, targets)):
        assert [number for span in spans for number in range(span.first, span.last + 1)] == list(range(count))
    for (row, column), size in grid.cells.items():
        rows, columns = grid.rows[row], grid.columns[column]
        within = [f for f in feeds if rows.first <= f.source <= rows.last and columns.first <= f.target <= columns.last]
        assert size == sum(feed.size_bytes for feed in within)
    assert sum(grid.cells.values()) == sum(feed.size_bytes for feed in feeds)


def test_a_few_targets_that_were_asked_for_have_a_column_each() -> None:
    grid = grid_of(flow(2, (7, 900), 1000, (Feed(0, 7, 1, 5), Feed(1, 900, 1, 6))))
    assert [str(span) for span in grid.columns] == ["7", "900"]
    assert dict(grid.cells) == {(0, 0): 5, (1, 1): 6}


@pytest.mark.parametrize(
    ("shape", "cuts", "shown"),
    [
        ((), (), ()),
        ((5,), (1,), (0,)),
        ((2, 3), (1, 1), (0, 1)),
        ((8, 4, 100), (2, 1, 1), (0, 2)),
        ((8, 4, 6, 2, 3), (1, 2, 3, 1, 1), (1, 2)),
        ((8, 4, 6, 2, 3), (2, 2, 3, 1, 1), (0, 2)),
        ((0, 4), (1, 1), (0, 1)),
    ],
)
def test_which_dimensions_are_shown(shape: tuple[int, ...], cuts: tuple[int, ...], shown: tuple[int, ...]) -> None:
    assert shown_dimensions(shape, cuts) == shown


PLACEMENTS = [
    (Placement((4,), ((0,),)), (12, 3)),
    (Placement((2, 4), ((1,), (0,))), (12, 6)),
    (Placement((512, 8), ((), (1,)), optimizer=512), (4096, 64)),
    (Placement((16384,), ((0,), ())), (16384, 8)),
    (Placement((300,), ((0,), ()), ceil=True), (1000, 2)),
    (Placement((100, 100), ((0,), (1,))), (200, 300)),
    (Placement((4,), ((0,), ()), sizes=((0, (5, 0, 3, 1)),)), (9, 2)),
    (Placement((8,)), (3, 3)),
]


@pytest.mark.parametrize(("placement", "shape"), PLACEMENTS)
def test_blocks_tile_the_tensor_however_many_pieces_there_are(placement: Placement, shape: tuple[int, ...]) -> None:
    split = placement.split + ((),) * (len(shape) - len(placement.split)) if placement.split else ()
    layout = Layout(Placement(placement.mesh, split, placement.optimizer, placement.sizes, ceil=placement.ceil), shape)
    panel = panel_of_layout("w", "float32", layout, (0, 1))
    assert len(panel.blocks) <= 256 and sum(block.pieces for block in panel.blocks) == panel.pieces
    covered = np.zeros(shape, int)
    for block in panel.blocks:
        covered[tuple(map(slice, block.box.start, block.box.stop))] += 1
        assert all(layout.box(rank) == block.piece for rank in block.holders)
        assert block.box.contains(block.piece) and block.copies == placement.replicas
    assert (covered == 1).all()


def test_listed_pieces_are_put_together_where_they_are_too_many() -> None:
    held = {Box((row,), (row + 1,)): [row % 7] for row in range(1000)}
    panel = panel_of_pieces("w", "float32", (1000,), held)
    assert len(panel.blocks) <= 64 and sum(block.pieces for block in panel.blocks) == panel.pieces == 1000
    assert [block.box.start[0] for block in panel.blocks][1:] == [block.box.stop[0] for block in panel.blocks][:-1]


def test_tensors_that_are_asked_for_come_first_and_are_found_in_any_stage(tmp_path: Path) -> None:
    conversion = make(tmp_path)
    request = Request(*map(str, (conversion.src, conversion.dst, conversion.src_strategy, conversion.dst_strategy)))
    figures = figures_of(request, "global_step", most_cuts=1)
    assert figures.cuts[0].names == ("global_step",)
    assert (
        figures.further + len(figures.cuts) == 3 and figures.further_tensors + sum(c.total for c in figures.cuts) == 4
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", few(1, ["hdf5", "dcp"]))
def test_a_sample_shows_the_whole_tensor_on_both_sides(tmp_path: Path, kind: str) -> None:
    """Blocks stand for all pieces, and each has a target that was planned, though few targets are."""
    write_shard({"w": np.zeros((1200, 4), np.float32), "b": np.zeros((1200,))}, tmp_path / "full.safetensors")
    for ranks in (75, 300):
        spec = f'mesh = {{ x = {ranks // 3}, y = 3 }}\n[[parameter]]\nmatch = "*"\nsplit = {{ 0 = ["x"] }}\n'
        (tmp_path / f"{ranks}.toml").write_text(spec)
    reshard_mpi.transform(tmp_path / "full.safetensors", tmp_path / "src", dst_strategy=tmp_path / "75.toml", to=kind)
    request = Request(str(tmp_path / "src"), str(tmp_path / "dst"), None, str(tmp_path / "300.toml"), to=kind)
    figures = figures_of(request)
    assert figures.flow.is_sample and len(figures.cuts) == 2
    for cut in figures.cuts:
        assert cut.sources[0].pieces == 25 and cut.target.pieces == 100
        for panel in (cut.sources[0], cut.target):
            rows = np.zeros(1200, int)
            for block in panel.blocks:
                rows[block.box.start[0] : block.box.stop[0]] += 1
            assert (rows == 1).all()
        assert all(block.planned is not None for block in cut.target.blocks)


def test_only_the_targets_that_are_asked_for(tmp_path: Path) -> None:
    conversion = make(tmp_path)
    request = Request(*map(str, (conversion.src, conversion.dst, conversion.src_strategy, conversion.dst_strategy)))
    figures = figures_of(request._replace(rank=(1,)))
    assert figures.flow.planned == (1,) and {feed.target for feed in figures.flow.feeds} == {1}
    (cut,) = (cut for cut in figures.cuts if cut.names[0] == "w")
    assert [block.planned for block in cut.target.blocks] == [None, 1]


def test_files_are_called_by_their_names_on_both_sides(tmp_path: Path) -> None:
    """A folder with an index has files and no ranks."""
    (tmp_path / "src").mkdir()
    for number in (1, 2):
        tensors = {f"{letter}.{number}": np.ones((4, 2), np.float32) for letter in "abcdef"}
        write_shard(tensors, tmp_path / "src" / f"model-{number:05}-of-00002.safetensors")
    equation = ", ".join(f"{letter}.1 [x y]" for letter in "abcdef") + " <=> all [(x + x + x + x + x + x) y]"
    (tmp_path / "map.toml").write_text(f'[[map]]\neq = "{equation}"\n')
    request = Request(str(tmp_path / "src"), str(tmp_path / "dst"), to="hf", map=(str(tmp_path / "map.toml"),))
    figures = figures_of(request)
    flow = figures.flow
    assert flow.sources.called([0, 1]) == "model-00001-of-00002.safetensors, model-00002-of-00002.safetensors"
    assert flow.sources.briefly([1]) == "00002" and flow.sources.span(0, 0) == "model-00001-of-00002.safetensors"
    assert (flow.targets.word, flow.targets.called([0])) == ("file", "model.safetensors")
    assert figures.target.endswith("Hugging Face folder, 1 file")
    (fused,) = (cut for cut in figures.cuts if cut.names == ("all",))
    assert [move.tensor for move in fused.moves] == [f"{letter}.1" for letter in "abcdef"]
    assert fused.further == 2 and [move.panel for move in fused.moves] == [0, 1, 2, 3, None, None]
