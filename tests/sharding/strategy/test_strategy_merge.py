"""Merging the strategies of pipeline stages into one file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.strategy_files import write_stage_file
from support.strategy_messages import messages

from reshard_mpi.errors import StrategyError, TargetError
from reshard_mpi.sharding import strategy_files
from reshard_mpi.sharding.merge_strategies import merge
from reshard_mpi.sharding.mindspore_json import RawLayout, StageFile, StrategyItem
from reshard_mpi.sharding.mindspore_protobuf import encode_protobuf

CUT = RawLayout((2, 2), ((0,), (-1,)), 2, 2, (512, 16), field=7)
NESTED = RawLayout((2, 2), ((1, 0), (-1,)))


def stage_file(stage: int, *names: str, layout: RawLayout = CUT) -> StageFile:
    return StageFile(dict.fromkeys(names, layout), (StrategyItem(f"MatMul_{stage}", stage, ((1, 2), (2, 1))),))


def two_stages(folder: Path, kind: str = "ckpt") -> Path:
    folder.mkdir()
    for rank in range(4):
        names = ("a", "b-1") if rank < 2 else ("a", "c")
        write_stage_file(folder / f"s{rank}.{kind}", stage_file(rank // 2, *names))
    return folder


def test_names_carry_their_stage_and_nothing_is_lost(tmp_path: Path) -> None:
    merge(str(two_stages(tmp_path / "in")), str(tmp_path / "made" / "out.ckpt"))
    merged = messages().strategy_map.FromString((tmp_path / "made" / "out.ckpt").read_bytes())
    assert [item.param_name for item in merged.parallel_layout_item] == ["0-a", "0-b-1", "1-a", "1-c"]
    assert [item.node_name for item in merged.parallel_strategy_item] == ["MatMul_0", "MatMul_1"]
    layout = merged.parallel_layout_item[3].parallel_layouts
    assert (layout.field, layout.opt_weight_shard_step, layout.opt_weight_shard_size) == (7, 2, 2)
    assert list(layout.param_split_shape[0].dim) == [512, 16]
    assert strategy_files.load(str(tmp_path / "made")) == strategy_files.load(str(tmp_path / "in"))
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == ["out.ckpt"]


def test_fields_of_later_versions_are_kept(tmp_path: Path) -> None:
    unknown = bytes.fromhex("f83f 2a")  # field 1023, a number
    layouts = encode_protobuf(stage_file(0, "a"))
    (tmp_path / "s.ckpt").write_bytes(layouts[:2] + unknown + layouts[2:])
    item = messages().strategy_map.FromString(layouts).parallel_layout_item[0]
    data = item.parallel_layouts.SerializeToString() + unknown
    item.parallel_layouts.ParseFromString(data)
    strategy_map = messages().strategy_map.FromString(layouts)
    strategy_map.parallel_layout_item[0].CopyFrom(item)
    (tmp_path / "s.ckpt").write_bytes(strategy_map.SerializeToString())
    merge([str(tmp_path / "s.ckpt")], str(tmp_path / "out.ckpt"))
    assert unknown in (tmp_path / "out.ckpt").read_bytes()


def test_json_stays_json(tmp_path: Path) -> None:
    merge(str(two_stages(tmp_path / "in", "json")), str(tmp_path / "out.ckpt"))
    content = json.loads((tmp_path / "out.ckpt").read_text())
    assert list(content["parallel_layout_item"]) == ["0-a", "0-b-1", "1-a", "1-c"]
    assert list(content["parallel_strategy_item"]) == ["MatMul_0", "MatMul_1"]
    assert strategy_files.load(str(tmp_path / "out.ckpt")) == strategy_files.load(str(tmp_path / "in"))


def test_a_name_in_json_makes_json(tmp_path: Path) -> None:
    merge(str(two_stages(tmp_path / "in")), str(tmp_path / "out.json"))
    assert json.loads((tmp_path / "out.json").read_text())["current_stage"] == 1
    assert strategy_files.load(str(tmp_path / "out.json")) == strategy_files.load(str(tmp_path / "in"))


def test_both_kinds_together(tmp_path: Path) -> None:
    files = [tmp_path / "s0.ckpt", tmp_path / "s1.json"]
    write_stage_file(files[0], stage_file(0, "a"))
    write_stage_file(files[1], stage_file(1, "a"))
    for out in ("out.ckpt", "out.json"):
        merge([str(file) for file in files], str(tmp_path / out))
        assert strategy_files.load(str(tmp_path / out)).find("a")[0].stages == (0, 1)
    write_stage_file(files[0], stage_file(0, "a", layout=NESTED))
    with pytest.raises(StrategyError, match="nested layout cannot be written as JSON"):
        merge([str(file) for file in files], str(tmp_path / "refused.json"))
    write_stage_file(files[0], stage_file(0, "a"))
    shaped = RawLayout((2, 2), ((1,), (0,), (-1,)), tensor_shape=(2, 8, 8))
    write_stage_file(files[1], stage_file(1, "a", layout=shaped))
    with pytest.raises(StrategyError, match="may be a nested one"):
        merge([str(file) for file in files], str(tmp_path / "refused.ckpt"))
    assert not list(tmp_path.glob("*refused*"))


def test_merging_again_into_the_same_folder(tmp_path: Path) -> None:
    folder = two_stages(tmp_path / "in")
    merge(str(folder), str(folder / "merged.ckpt"))
    first = (folder / "merged.ckpt").read_bytes()
    merge(str(folder), str(folder / "merged.ckpt"))
    assert (folder / "merged.ckpt").read_bytes() == first


def test_what_is_merged_already_is_refused(tmp_path: Path) -> None:
    merge(str(two_stages(tmp_path / "in")), str(tmp_path / "in" / "merged.ckpt"))
    for sources in (str(tmp_path / "in"), [str(tmp_path / "in" / "merged.ckpt")]):
        with pytest.raises(StrategyError, match=r"(?s)merged already.*merged.ckpt"):
            merge(sources, str(tmp_path / "again.ckpt"))
    assert not (tmp_path / "again.ckpt").exists()


def test_sources_that_do_not_belong_together(tmp_path: Path) -> None:
    folder, out = two_stages(tmp_path / "in"), str(tmp_path / "out.ckpt")
    write_stage_file(folder / "s1.ckpt", stage_file(0, "a", layout=NESTED))
    with pytest.raises(StrategyError, match="stage 0 disagree"):
        merge(str(folder), out)
    with pytest.raises(StrategyError, match="got: stage 1"):
        merge([str(folder / "s2.ckpt")], out)
    write_stage_file(folder / "s1.ckpt", StageFile({"a": CUT}))
    with pytest.raises(StrategyError, match="which stage"):
        merge(str(folder), out)
    write_stage_file(folder / "s1.ckpt", StageFile({}, (StrategyItem("MatMul", 0),)))
    with pytest.raises(StrategyError, match="no parameter"):
        merge(str(folder), out)
    (folder / "s1.ckpt").unlink()
    (folder / "spec.toml").write_text('mesh = { dp = 2 }\n[[parameter]]\nmatch = "*"\n')
    with pytest.raises(StrategyError, match="cannot be merged"):
        merge(str(folder), out)
    with pytest.raises(StrategyError, match="no strategy"):
        merge([], out)
    assert not Path(out).exists()


def test_a_target_that_cannot_be_written(tmp_path: Path) -> None:
    folder = str(two_stages(tmp_path / "in"))
    (tmp_path / "file").write_bytes(b"")
    for out in (str(tmp_path), str(tmp_path / "file" / "out.ckpt"), ""):
        with pytest.raises(TargetError):
            merge(folder, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "in"]


def test_what_a_killed_merge_left_is_in_nobodys_way(tmp_path: Path) -> None:
    """Ranks on different hosts, or a container started again, may have the same process id."""
    left = tmp_path / f".out.ckpt.{os.getpid()}.part"
    left.write_bytes(b"of another process")
    merge(str(two_stages(tmp_path / "in")), str(tmp_path / "out.ckpt"))
    assert (tmp_path / "out.ckpt").exists()
    assert left.read_bytes() == b"of another process"


@pytest.mark.parametrize("kind", ["json", "ckpt"])
@pytest.mark.parametrize("what", ["a stage among the sources", "a stage in their folder", "a shard"])
def test_no_other_file_is_replaced(tmp_path: Path, kind: str, what: str) -> None:
    """As where all stages are named, and the result is not."""
    folder = two_stages(tmp_path / "in", kind)
    sources: str | list[str] = str(folder)
    out = folder / f"s3.{kind}"
    if what == "a stage among the sources":
        sources = [str(folder / f"s0.{kind}"), str(out)]
    if what == "a shard":
        out = tmp_path / "net.safetensors"
        out.write_bytes(b"weights")
    before = out.read_bytes()
    with pytest.raises(TargetError) as refusal:
        merge(sources, str(out))
    assert refusal.value.where == str(out) and out.read_bytes() == before


@pytest.mark.parametrize("kind", ["json", "ckpt"])
def test_an_earlier_merge_and_an_empty_file_are_replaced(tmp_path: Path, kind: str) -> None:
    folder, out = two_stages(tmp_path / "in", kind), tmp_path / f"out.{kind}"
    out.touch()
    for _ in range(2):
        merge(str(folder), str(out))
        assert strategy_files.load(str(out)) == strategy_files.load(str(folder))
