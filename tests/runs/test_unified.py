"""`unified_safetensors`: whole tensors in a few files, by the names that MindSpore's loader reads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import safetensors_peer
from support.checkpoints import as_read, read_shard, sample
from support.conversions import TENSORS, Conversion, make
from support.examples import few

import reshard_mpi
from reshard_mpi import unified_safetensors
from reshard_mpi.api import mindspore
from reshard_mpi.errors import CoverageError, ReshardError, SourceError, TargetError, UsageError
from reshard_mpi.runs import target_writer
from reshard_mpi.runs.progress import RunStatus
from reshard_mpi.testing.sample_tensors import ShardContents

MINDSPORE = Path(__file__).parents[1] / "formats" / "golden" / "mindspore"
STRATEGY = MINDSPORE / "strategy_2x2.ckpt"
HYPER = "hyper_param.safetensors"
# By the number of a share, of two.
FILES_OF_SHARE = {1: {"part0.safetensors", HYPER}, 2: {"part1.safetensors"}}
PLACED = {name: array for name, array in TENSORS.items() if name != "global_step"}


@pytest.fixture
def c(tmp_path: Path) -> Conversion:
    return make(tmp_path, "safetensors")


def zeros(c: Conversion) -> None:
    """Save another state of the source over it, of the same shapes."""
    for rank in range(4):
        later = [sample(name, np.zeros_like(array)) for name, array in c.arrays(rank).items()]
        safetensors_peer.write(c.shard(rank), ShardContents.of(later))


def weight_map(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / "param_name_map.json").read_text())["weight_map"]
    return found


@pytest.mark.parametrize("ranks", few(1, ["ranks", "ranks_without_redundancy"]))
@pytest.mark.parametrize("redundant", few(1, [True, False]))
def test_what_mindspore_makes(tmp_path: Path, ranks: str, redundant: bool) -> None:
    unified_safetensors(MINDSPORE / ranks, STRATEGY, tmp_path / "out", merge_with_redundancy=redundant)
    theirs = MINDSPORE / "unified"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(path.name for path in theirs.iterdir())
    for file in ("part0.safetensors", "hyper_param.safetensors"):
        assert read_shard(tmp_path / "out" / file) == read_shard(theirs / file)
    ours_map, their_map = (json.loads((at / "param_name_map.json").read_text()) for at in (tmp_path / "out", theirs))
    assert ours_map == their_map


def test_whole_tensors_and_no_slices(c: Conversion) -> None:
    """What follows a parameter is put together as well; MindSpore leaves rank 0's slice of it as if it were all."""
    unified_safetensors(c.src, c.src_strategy, c.dst)
    assert read_shard(c.dst / "part0.safetensors") == as_read(PLACED)
    assert read_shard(c.dst / "hyper_param.safetensors") == as_read({"global_step": TENSORS["global_step"]})
    assert weight_map(c.dst) == dict.fromkeys(PLACED, "part0.safetensors")


def test_its_files_without_their_map_are_no_checkpoint(c: Conversion, tmp_path: Path) -> None:
    """They may be those of two runs, of which the second was killed."""
    unified_safetensors(c.src, c.src_strategy, c.dst)
    (c.dst / "param_name_map.json").unlink()
    with pytest.raises(SourceError, match="lacks the map of its files"):
        reshard_mpi.transform(c.dst, tmp_path / "again")
    reshard_mpi.transform(c.dst / "part0.safetensors", tmp_path / "again")
    assert read_shard(tmp_path / "again" / "rank_0" / "checkpoint_0.safetensors") == as_read(PLACED)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mindspore, "MOST_BYTES", 200)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("processes", few(1, [1, 2, 64]))
def test_parts_by_several_processes(c: Conversion, monkeypatch: pytest.MonkeyPatch, processes: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})  # no more are started than there are cores
    unified_safetensors(c.src, c.src_strategy, c.dst, max_process_num=processes)
    files = weight_map(c.dst)
    assert sorted(set(files.values())) == ["part0.safetensors", "part1.safetensors"]
    assert files.keys() == PLACED.keys()
    for name, file in files.items():
        assert read_shard(c.dst / file)[name] == as_read(TENSORS)[name]
    # As one full checkpoint it is the same as the ranks.
    reshard_mpi.diff(c.src, c.dst, c.src_strategy)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("processes", few(1, [1, 2]))
def test_what_a_caller_is_told(c: Conversion, processes: int) -> None:
    told: list[RunStatus] = []
    report = unified_safetensors(c.src, c.src_strategy, c.dst, max_process_num=processes, progress=told.append)
    assert [Path(target.path).name for target in report.targets] == [
        "part0.safetensors",
        "part1.safetensors",
        "hyper_param.safetensors",
    ]
    assert report.written_bytes == sum(array.nbytes for array in TENSORS.values()) == told[-1].bytes_done
    assert (told[-1].stage, told[-1].percent, told[-1].targets_done) == ("writing", 100, 3)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_shares_of_the_files(c: Conversion, order: tuple[int, int]) -> None:
    """Whichever is complete last writes the map."""
    first, last = order
    report = unified_safetensors(c.src, c.src_strategy, c.dst, split_dst_file=(first, 2))
    assert {path.name for path in c.dst.glob("[!.]*")} == FILES_OF_SHARE[first]
    assert any("no index yet" in note and min(FILES_OF_SHARE[last] - {HYPER}) in note for note in report.notes)
    report = unified_safetensors(c.src, c.src_strategy, c.dst, split_dst_file=(last, 2))
    assert {path.name for path in c.dst.iterdir()} == {*FILES_OF_SHARE[1], *FILES_OF_SHARE[2], "param_name_map.json"}
    assert not any("index" in note for note in report.notes)
    reshard_mpi.diff(c.src, c.dst, c.src_strategy)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("how", few(1, ["relative path", "link", "other rights", "second name"]))
def test_shares_that_reach_the_same_files_in_two_ways(
    c: Conversion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Each is a job of its own; between them a backup may make hard links of the source."""
    unified_safetensors(c.src, c.src_strategy, c.dst, split_dst_file=(1, 2))
    src = c.src
    if how == "relative path":
        monkeypatch.chdir(c.src.parent)
        src = Path(c.src.name)
    elif how == "link":
        src = tmp_path / "latest"
        src.symlink_to(c.src)
    elif how == "other rights":
        c.shard(0).chmod(0o640)
    else:
        (tmp_path / "backup").hardlink_to(c.shard(0))
    report = unified_safetensors(src, c.src_strategy, c.dst, split_dst_file=(2, 2))
    assert not any("index" in note for note in report.notes)
    reshard_mpi.diff(c.src, c.dst, c.src_strategy)


@pytest.mark.usefixtures("small_parts")
def test_shares_that_cannot_be(c: Conversion) -> None:
    with pytest.raises(UsageError, match="more shares than"):
        unified_safetensors(c.src, c.src_strategy, c.dst, split_dst_file=(4, 4))
    for share in ((0, 2), (3, 2), (1,), (1, 2, 3)):
        with pytest.raises(UsageError, match="split_dst_file"):
            unified_safetensors(c.src, c.src_strategy, c.dst, split_dst_file=share)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("share", few(1, [1, 2]))
def test_a_share_beside_those_of_another_state(c: Conversion, tmp_path: Path, share: int) -> None:
    """Neither an earlier result nor an abandoned share makes up a checkpoint with it."""
    unified_safetensors(c.src, c.src_strategy, c.dst)
    unified_safetensors(c.src, c.src_strategy, c.dst, split_dst_file=(3 - share, 2))
    zeros(c)
    unified_safetensors(c.src, c.src_strategy, c.dst, split_dst_file=(share, 2))
    assert not (c.dst / "param_name_map.json").exists()
    with pytest.raises(SourceError):
        reshard_mpi.transform(c.dst, tmp_path / "again")
    unified_safetensors(c.src, c.src_strategy, c.dst, split_dst_file=(3 - share, 2))
    reshard_mpi.diff(c.src, c.dst, c.src_strategy)
    assert not list(c.dst.glob(".*"))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("how", ["lost", "cut", "replaced"])
def test_a_share_whose_file_has_become_another_before_the_last_share_ends(c: Conversion, how: str) -> None:
    unified_safetensors(c.src, c.src_strategy, c.dst, split_dst_file=(1, 2))
    file = c.dst / "part0.safetensors"
    content = file.read_bytes()
    file.unlink()
    if how != "lost":
        file.write_bytes(content[:-1] if how == "cut" else content)
        os.utime(file, ns=(1, 1))
    report = unified_safetensors(c.src, c.src_strategy, c.dst, split_dst_file=(2, 2))
    assert any("no index yet" in note and note.endswith(": part0.safetensors") for note in report.notes)
    assert not (c.dst / "param_name_map.json").exists()
    unified_safetensors(c.src, c.src_strategy, c.dst, split_dst_file=(1, 2))
    reshard_mpi.diff(c.src, c.dst, c.src_strategy)
    assert not list(c.dst.glob(".*"))


def test_an_earlier_file_of_what_no_strategy_places_is_removed(c: Conversion) -> None:
    """It is read with any map, and would be a part of the new checkpoint."""
    unified_safetensors(c.src, c.src_strategy, c.dst)
    assert (c.dst / HYPER).exists()
    unified_safetensors(c.src, c.src_strategy, c.dst, choice_func=lambda name: name != "global_step")
    assert {path.name for path in c.dst.iterdir()} == {"part0.safetensors", "param_name_map.json"}


def test_what_is_left_out_is_nowhere(c: Conversion) -> None:
    unified_safetensors(c.src, c.src_strategy, c.dst, choice_func=lambda name: name != "moments.w")
    chosen = {name: array for name, array in TENSORS.items() if name != "moments.w"}
    held = read_shard(c.dst / "part0.safetensors") | read_shard(c.dst / "hyper_param.safetensors")
    assert held == as_read(chosen)


def test_other_names(c: Conversion) -> None:
    names = {"w": "model.weight", "global_step": "step"}
    unified_safetensors(c.src, c.src_strategy, c.dst, choice_func=lambda name: names.get(name, name == "b"))
    assert read_shard(c.dst / "part0.safetensors") == as_read({"model.weight": TENSORS["w"], "b": TENSORS["b"]})
    assert read_shard(c.dst / "hyper_param.safetensors") == as_read({"step": TENSORS["global_step"]})
    assert weight_map(c.dst).keys() == {"model.weight", "b"}


def _same(_: str) -> str:
    return "w"


def _nothing(_: str) -> bool:
    return False


def _number(_: str) -> int:
    return 1


def _no_text(name: str) -> str:
    return f"\ud800{name}"


@pytest.mark.parametrize(
    ("choose", "says"),
    [
        (_same, "two tensors the name"),
        (_nothing, "leaves nothing"),
        (_number, "choice_func returns"),
        (_no_text, "Unicode"),
    ],
)
def test_choices_that_cannot_be(c: Conversion, choose: Callable[[str], bool | str], says: str) -> None:
    with pytest.raises(ReshardError, match=says):
        unified_safetensors(c.src, c.src_strategy, c.dst, choice_func=choose)
    assert not c.dst.exists() or not list(c.dst.iterdir())


def test_the_end_of_names(c: Conversion) -> None:
    for rank in range(4):
        c.shard(rank).rename(c.shard(rank).with_name(f"net_{rank}-1_10.safetensors"))
        later = [sample(name, np.zeros_like(array)) for name, array in c.arrays(rank).items()]
        safetensors_peer.write(c.shard(rank).with_name(f"net_{rank}-3_10.safetensors"), ShardContents.of(later))
    unified_safetensors(c.src, c.src_strategy, c.dst, file_suffix="1_10")
    assert read_shard(c.dst / "part0.safetensors") == as_read(PLACED)
    unified_safetensors(c.src, c.src_strategy, c.dst)
    assert not any(any(content) for _, _, content in read_shard(c.dst / "part0.safetensors").values())
    with pytest.raises(SourceError):
        unified_safetensors(c.src, c.src_strategy, c.dst, file_suffix="[3]_10")


def test_a_lost_shard_that_another_rank_has(c: Conversion) -> None:
    c.remove(0)
    unified_safetensors(c.src, c.src_strategy, c.dst)
    assert read_shard(c.dst / "part0.safetensors") == as_read(PLACED)
    c.remove(2)
    with pytest.raises(CoverageError, match="'w' that target rank 0"):
        unified_safetensors(c.src, c.src_strategy, c.dst.with_name("other"))
    assert not c.dst.with_name("other").exists()


def test_shards_without_a_strategy_are_refused(c: Conversion) -> None:
    with pytest.raises(SourceError):
        unified_safetensors(c.src, None, c.dst)


def test_the_source_is_left_alone(c: Conversion) -> None:
    for target in (c.src, c.src / "rank_0"):
        with pytest.raises(TargetError, match="target is the source"):
            unified_safetensors(c.src, c.src_strategy, target)
    assert not list(c.src.rglob("part*"))


def test_files_that_are_there_are_replaced_and_a_failure_leaves_no_map(
    c: Conversion, monkeypatch: pytest.MonkeyPatch
) -> None:
    unified_safetensors(c.src, c.src_strategy, c.dst)
    before = (c.dst / "part0.safetensors").stat().st_ino
    unified_safetensors(c.src, c.src_strategy, c.dst)
    assert (c.dst / "part0.safetensors").stat().st_ino != before

    def fail(*_: object, **by_name: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(target_writer, "write_shard", fail)
    with pytest.raises(ReshardError, match="No space left"):
        unified_safetensors(c.src, c.src_strategy, c.dst, max_process_num=1)
    assert not (c.dst / "param_name_map.json").exists() and (c.dst / "part0.safetensors").exists()


def test_another_checkpoint_that_is_there_is_pointed_out(c: Conversion, caplog: pytest.LogCaptureFixture) -> None:
    """It would be read in place of the new one."""
    c.dst.mkdir()
    lying = c.dst / "model.safetensors.index.json"
    lying.write_text("{}")
    with caplog.at_level("INFO", "reshard_mpi"):
        unified_safetensors(c.src, c.src_strategy, c.dst)
        assert f"{lying} will lie beside the new targets" in caplog.text and lying.read_text() == "{}"
        lying.unlink()
        caplog.clear()
        unified_safetensors(c.src, c.src_strategy, c.dst)  # over files of its own
    assert "beside" not in caplog.text
