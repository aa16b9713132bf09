"""MindSpore itself reads what we write, and we read what it writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.processes import run_command
from support.strategy_files import write_stage_file

from reshard_mpi.sharding import strategy_files
from reshard_mpi.sharding.merge_strategies import merge
from reshard_mpi.sharding.mindspore_json import RawLayout, StageFile, StrategyItem
from reshard_mpi.sharding.mindspore_protobuf import encode_protobuf

pytestmark = pytest.mark.mindspore

LAYOUTS = {
    "flat": RawLayout((2, 4), ((0,), (-1,))),
    "cut": RawLayout((2, 4), ((0,), (-1,)), 2, 4),
    "nested": RawLayout((2, 4), ((1, 0), (-1,))),
    "nested_1d": RawLayout((2, 4), ((1, 0),)),
    "whole": RawLayout((2, 4), ((-1,),)),
    "scalar": RawLayout((2, 4), ()),
    "uneven": RawLayout((2, 4), ((1,),), param_split_shape=(3, 9), indices_offset=(0, 3)),
}


@pytest.fixture(autouse=True, scope="module")
def _mindspore() -> None:
    pytest.importorskip("mindspore")


def write_stages(folder: Path, kind: str, layouts: dict[str, RawLayout]) -> None:
    folder.mkdir()
    for rank in range(4):
        stage = rank // 2
        kept = {name: layout for name, layout in layouts.items() if name != "flat" or stage == 0}
        file = StageFile(kept, (StrategyItem(f"MatMul_{stage}", stage, ((1, 2), (2, 1))),))
        write_stage_file(folder / f"strategy{rank}.{kind}", file)


def test_it_reads_every_layout_we_write(tmp_path: Path) -> None:
    import mindspore

    write_stage_file(tmp_path / "s.ckpt", StageFile(LAYOUTS, (StrategyItem("MatMul", 0),)))
    read = mindspore.build_searched_strategy(str(tmp_path / "s.ckpt"))
    assert list(read) == list(LAYOUTS)
    for name, layout in LAYOUTS.items():
        theirs = read[name]
        assert tuple(theirs.dev_matrix[0].dim) == layout.dev_matrix
        maps = [tuple(tensor_map.dim) for tensor_map in theirs.tensor_map]
        flat = [tuple(axis for axes in layout.tensor_map for axis in axes)]
        assert maps == {"nested": [(1, 0), (-1,)], "nested_1d": [(1, 0), ()]}.get(name, flat)
        assert (theirs.opt_weight_shard_size, theirs.opt_weight_shard_step) == (
            layout.opt_weight_shard_size,
            layout.opt_weight_shard_step,
        )
        assert tuple(theirs.param_split_shape[0].dim) == layout.param_split_shape


def test_its_bytes_are_ours(tmp_path: Path) -> None:
    from mindspore.train.node_strategy_pb2 import ParallelStrategyMap

    data = encode_protobuf(StageFile(LAYOUTS, (StrategyItem("MatMul", 0, ((1, 2), (2, 1))),)))
    assert ParallelStrategyMap.FromString(data).SerializeToString() == data
    (tmp_path / "s.ckpt").write_bytes(data)
    assert strategy_files.load(str(tmp_path / "s.ckpt")).world_size == 8


@pytest.mark.parametrize("kind", ["ckpt", "json"])
def test_merging_as_it_does(tmp_path: Path, kind: str) -> None:
    import mindspore

    layouts = {name: layout for name, layout in LAYOUTS.items() if kind == "ckpt" or not layout.is_nested}
    write_stages(tmp_path / "in", kind, layouts)
    ours, theirs = tmp_path / f"ours.{kind}", tmp_path / f"theirs.{kind}"
    merge(str(tmp_path / "in"), str(ours))
    mindspore.merge_pipeline_strategys(str(tmp_path / "in"), str(theirs))
    assert (
        strategy_files.load(str(ours)) == strategy_files.load(str(theirs)) == strategy_files.load(str(tmp_path / "in"))
    )
    read = [mindspore.build_searched_strategy(str(path)) for path in (ours, theirs)]
    assert {name: str(layout) for name, layout in read[0].items()} == {
        name: str(layout) for name, layout in read[1].items()
    }
    if kind == "json":
        assert json.loads(ours.read_text()) == json.loads(theirs.read_text())
    else:
        from mindspore.train.node_strategy_pb2 import ParallelStrategyMap

        items = [ParallelStrategyMap.FromString(path.read_bytes()) for path in (ours, theirs)]
        assert {str(item) for item in items[0].parallel_strategy_item} == {
            str(item) for item in items[1].parallel_strategy_item
        }
        assert items[0].current_stage == items[1].current_stage


def test_it_lists_ranks_from_merged_files_we_write(tmp_path: Path) -> None:
    import mindspore

    layouts = {"w": RawLayout((2, 2), ((0,), (-1,)), 2, 2)}
    write_stages(tmp_path / "in", "ckpt", layouts)
    merge(str(tmp_path / "in"), str(tmp_path / "src.ckpt"))
    target = StageFile({"w": RawLayout((2,), ((0,), (-1,)))}, (StrategyItem("MatMul", 0),))
    write_stage_file(tmp_path / "dst.ckpt", target)
    listed = mindspore.rank_list_for_transform(0, str(tmp_path / "src.ckpt"), str(tmp_path / "dst.ckpt"))
    assert set(listed) & {0, 4}
    assert all(0 <= rank < 8 for rank in listed)


@pytest.mark.parametrize("order", ["first", "last"])
def test_one_process_may_import_both_in_any_order(tmp_path: Path, order: str) -> None:
    write_stage_file(tmp_path / "s.ckpt", StageFile(LAYOUTS, (StrategyItem("MatMul", 0),)))
    path = str(tmp_path / "s.ckpt")
    ours = f"from reshard_mpi.sharding import strategy_files\nassert strategy_files.load({path!r}).world_size == 8"
    theirs = f"import mindspore\nassert len(mindspore.build_searched_strategy({path!r})) == {len(LAYOUTS)}"
    code = "\n".join([theirs, ours] if order == "first" else [ours, theirs])
    run_command([sys.executable, "-c", code], timeout_seconds=300, check=True)
