"""Pipeline stages: merged files, folders of per-rank files, and what is no strategy beside them."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest
from strategy_examples import one_layout
from support.processes import run_command
from support.strategy_files import write_stage_file

from reshard_mpi.errors import LayoutError, StrategyError
from reshard_mpi.sharding import strategy_files
from reshard_mpi.sharding.mindspore_json import RawLayout, StageFile, StrategyItem
from reshard_mpi.sharding.mindspore_layouts import to_strategy
from reshard_mpi.sharding.placement import Placement

CUT = RawLayout((2,), ((0,),))
WHOLE = RawLayout((2,), ((-1,),))
# A checkpoint's first bytes: Value { tag "w", tensor { dims 2, type Float32, content } }.
CHECKPOINT = bytes.fromhex("0a1a 0a0177 1215 0802 1207 466c6f61743332 1a08 0000000000000000")


def merged(layouts: dict[str, RawLayout], stages: int = 1) -> StageFile:
    return StageFile(layouts, tuple(StrategyItem(f"op{number}", number) for number in range(stages)), "s.ckpt")


def write(path: Path, layouts: dict[str, RawLayout], stage: int) -> None:
    write_stage_file(path, StageFile(layouts, (StrategyItem("MatMul", stage),)))


def test_a_merged_file() -> None:
    made = to_strategy([merged({"0-emb": CUT, "0-a-b-1": WHOLE, "3-emb": CUT, "1-x": CUT, "2-x": WHOLE}, 4)], "")
    assert (made.world_size, made.stages) == (8, 4)
    assert made.parameters == {
        "emb": (Placement((2,), ((0,),), stages=(0, 3)),),
        "a-b-1": (Placement((2,), ((),)),),
        "x": (Placement((2,), ((0,),), stages=(1,)), Placement((2,), ((),), stages=(2,))),
    }


@pytest.mark.parametrize("names", [["0-a", "b"], ["1-a", "2-b"], ["0-a", "2-b"], ["a-0", "0-b"], ["-1-a", "0-b"]])
def test_names_that_do_not_all_carry_stages_from_0_are_names(names: list[str]) -> None:
    made = to_strategy([merged(dict.fromkeys(names, CUT))], "")
    assert (made.stages, sorted(made.parameters)) == (1, sorted(names))


def test_a_merged_file_without_one_of_its_stages_is_refused() -> None:
    with pytest.raises(StrategyError, match="stages 0, 2"):
        to_strategy([merged({"0-a": CUT, "2-b": CUT}, 3)], "")


def test_a_stage_alone_is_refused() -> None:
    with pytest.raises(StrategyError, match="got: stage 1"):
        to_strategy([one_layout(CUT, stage=1)], "")


def test_meshes_of_one_strategy_must_agree() -> None:
    with pytest.raises(LayoutError, match="parameter 'b'") as caught:
        to_strategy([merged({"a": CUT, "b": RawLayout((4,), ((0,),))})], "s.ckpt")
    assert caught.value.where == "s.ckpt"


def test_a_folder_of_per_rank_files_is_merged(tmp_path: Path) -> None:
    for rank in range(8):
        stage = rank // 4
        layouts = {"emb": CUT, f"w{stage}": WHOLE}
        if rank % 2:  # the order in a file is that of a hash table
            layouts = dict(reversed(layouts.items()))
        write(tmp_path / f"strategy{rank}.ckpt", layouts, stage)
    made = strategy_files.load(str(tmp_path))
    assert made.world_size == 4
    assert made.find("emb") == (Placement((2,), ((0,),), stages=(0, 1)),)
    assert made.find("w1") == (Placement((2,), ((),), stages=(1,)),)


def test_other_files_of_a_folder_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "s0", {"w": CUT}, 0)
    write(tmp_path / "s1.ckpt", {"w": CUT}, 1)
    before = strategy_files.load(str(tmp_path)), strategy_files.digest(str(tmp_path))
    (tmp_path / "rank_0").mkdir()
    for name, data in {
        ".hidden.ckpt": b"\x08",
        "README": b"notes",
        "notes.md": b"{",
        "checkpoint-3_1875.ckpt": CHECKPOINT,
        "checkpoint-graph.meta": b"\x08\x01",
        "group_info.pb": bytes.fromhex("0a0b 0a0167 1206 0800 0801 08ff01 1204 0800 0801"),
        "rank_table.json": b'{"server_list": []}',
        "list.json": b"[1, 2]",
        "pyproject.toml": b"[project]\nname = 'mesh'\n",
        "shard.h5": b"\x89HDF\r\n\x1a\n",
        "empty": b"",
    }.items():
        (tmp_path / name).write_bytes(data)
    assert (strategy_files.load(str(tmp_path)), strategy_files.digest(str(tmp_path))) == before


def test_a_folder_without_strategy_says_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match="an empty folder"):
        strategy_files.load(str(tmp_path))
    (tmp_path / "net-1.ckpt").write_bytes(CHECKPOINT)
    for refused in (strategy_files.load, strategy_files.digest):
        with pytest.raises(StrategyError, match=r"net-1.ckpt \(a MindSpore checkpoint\)"):
            refused(str(tmp_path))


@pytest.mark.parametrize(("ending", "content"), [("ckpt", CHECKPOINT), ("h5", b"\x89HDF\r\n\x1a\n")])
def test_a_checkpoint_in_place_of_strategies(tmp_path: Path, ending: str, content: bytes) -> None:
    kind = {"ckpt": "a MindSpore checkpoint", "h5": "an HDF5 file"}[ending]
    for rank in (10, 2):
        (tmp_path / f"rank_{rank}").mkdir()
        (tmp_path / f"rank_{rank}" / f"net.{ending}").write_bytes(content)
    for refused in (strategy_files.load, strategy_files.digest):
        with pytest.raises(StrategyError) as error:
            refused(str(tmp_path))
        assert error.value.got == f"a checkpoint: shards in 2 rank folders, such as rank_2/net.{ending} ({kind})"
        assert "give the strategy file" in error.value.remedy


def test_a_folder_of_folders_in_place_of_strategies(tmp_path: Path) -> None:
    for name in (".hidden", "stage_0", "stage_1"):
        (tmp_path / name).mkdir()
    with pytest.raises(StrategyError) as error:
        strategy_files.load(str(tmp_path))
    assert error.value.got == "no files, but folders: stage_0, stage_1"


def test_files_of_one_stage_that_disagree(tmp_path: Path) -> None:
    write(tmp_path / "a.ckpt", {"w": CUT, "x": CUT}, 0)
    write(tmp_path / "b.ckpt", {"w": WHOLE, "x": CUT}, 0)
    with pytest.raises(StrategyError, match=r"(?s)parameter 'w' laid out in two ways.*a.ckpt and .*b.ckpt"):
        strategy_files.load(str(tmp_path))
    write(tmp_path / "b.ckpt", {"w": CUT}, 0)
    with pytest.raises(StrategyError, match=r"parameter 'x' not in .*b.ckpt"):
        strategy_files.load(str(tmp_path))


def test_a_missing_stage(tmp_path: Path) -> None:
    write(tmp_path / "a.ckpt", {"w": CUT}, 0)
    write(tmp_path / "b.json", {"w": CUT}, 2)
    with pytest.raises(StrategyError, match="stages 0, 2"):
        strategy_files.load(str(tmp_path))


def test_merged_and_other_files_are_not_mixed(tmp_path: Path) -> None:
    write(tmp_path / "merged.ckpt", {"0-w": CUT, "1-w": CUT}, 0)
    (tmp_path / "copy.ckpt").write_bytes((tmp_path / "merged.ckpt").read_bytes())
    assert strategy_files.load(str(tmp_path)).world_size == 4
    for name in ("a.ckpt", "z.ckpt"):
        write(tmp_path / name, {"w": CUT}, 1)
        with pytest.raises(StrategyError, match=r"mixed(?s:.*)merged.ckpt|mixed(?s:.*)copy.ckpt"):
            strategy_files.load(str(tmp_path))
        (tmp_path / name).unlink()


def test_a_file_that_tells_no_stage_must_be_alone(tmp_path: Path) -> None:
    write_stage_file(tmp_path / "a.ckpt", StageFile({"w": CUT}))
    assert strategy_files.load(str(tmp_path)).world_size == 2
    write(tmp_path / "b.ckpt", {"w": CUT}, 1)
    with pytest.raises(StrategyError, match="which stage"):
        strategy_files.load(str(tmp_path))


def test_a_spec_in_a_folder_must_be_alone(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('mesh = { dp = 2 }\n[[parameter]]\nmatch = "*"\n')
    assert strategy_files.load(str(tmp_path)).world_size == 2
    write(tmp_path / "b.ckpt", {"w": CUT}, 0)
    with pytest.raises(StrategyError, match="not alone"):
        strategy_files.load(str(tmp_path))


def test_digest(tmp_path: Path) -> None:
    write(tmp_path / "a.ckpt", {"w": CUT}, 0)
    data = (tmp_path / "a.ckpt").read_bytes()
    assert strategy_files.digest(str(tmp_path / "a.ckpt")) == hashlib.sha256(data).hexdigest()
    digests = {strategy_files.digest(str(tmp_path))}
    (tmp_path / "b.ckpt").write_bytes(data)
    digests.add(strategy_files.digest(str(tmp_path)))
    (tmp_path / "b.ckpt").rename(tmp_path / "c.ckpt")
    digests.add(strategy_files.digest(str(tmp_path)))
    write(tmp_path / "c.ckpt", {"w": WHOLE}, 0)
    digests.add(strategy_files.digest(str(tmp_path)))
    assert len(digests) == 4


def test_the_protobuf_library_is_not_loaded_for_json(tmp_path: Path) -> None:
    write(tmp_path / "a.json", {"w": CUT}, 0)
    code = (
        f"import sys\nfrom reshard_mpi.sharding.strategy_files import load\nload({json.dumps(str(tmp_path))})\n"
        "print({'google.protobuf', 'numpy'} & set(sys.modules))"
    )
    assert run_command([sys.executable, "-c", code], check=True).out == "set()\n"
