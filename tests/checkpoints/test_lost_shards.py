"""Source shards that are missing or damaged: others that hold the same take their place, and the user is told."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cases import Side
from support.checkpoints import as_read, expected_rank, read_shard
from support.command_line import run_in_fork
from support.conversions import (
    DST_LAYOUTS,
    SRC_LAYOUTS,
    TENSORS,
    Conversion,
    assert_right,
    listing,
    make,
    of_every_kind,
    shards,
    side,
    transform_apart,
    write_conversion,
)
from support.examples import few
from support.launch import MPI, by_one_mpi
from support.oracle import RawLayout

import reshard_mpi
from reshard_mpi.checkpoints import source
from reshard_mpi.errors import DisagreementError, ShardError, TransformError
from reshard_mpi.runs import target_plans, transform

# Two targets a source rank, so both that look to rank 0 first may be made by different processes.
EIGHT_LAYOUTS = {"w": RawLayout((8,), (0, -1)), "b": RawLayout((8,), (-1,))}


def of_another_format(path: Path) -> None:
    path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(90) if path.suffix == ".ckpt" else b"\x0a\x02\x0a\x00")


def cannot_be_read(path: Path) -> None:
    """Have every read of the file fail, even root's: of a process's memory, nothing is at address 0."""
    path.unlink()
    path.symlink_to("/proc/self/mem")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 20),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "damaged structure": lambda path: path.write_bytes(b"\xff" * 64 + path.read_bytes()[64:]),
    "text": lambda path: path.write_text("these are not the weights you are looking for\n"),
    "another format": of_another_format,
    "cannot be read": cannot_be_read,
}


# Replaced, and told


@of_every_kind
@pytest.mark.parametrize("damage", few(1, DAMAGE))
def test_a_damaged_shard_is_replaced_and_told(tmp_path: Path, kind: str, damage: str) -> None:
    c = make(tmp_path, kind)
    DAMAGE[damage](c.shard(0))
    report = tmp_path / "report.json"
    finished = c.done("transform", "--report", str(report))
    assert_right(c)
    (told,) = finished.warnings  # what is the same on all ranks comes from rank 1 then, which is read anyway
    assert told.startswith(f"the shard of rank 0 cannot be used, {c.shard(0)}")
    assert told.endswith("; taken from ranks 1, 2 instead")
    facts = json.loads(report.read_text())
    assert facts["warnings"] == [told]
    assert [target["read_ranks"] for target in facts["targets"]] == [[1, 2], [2, 3]]
    again = c.but(dst=tmp_path / "again")
    assert again.done("plan").warnings == [told]
    planned = again.run("plan", "--json")
    assert [target["warnings"] for target in json.loads(planned.out)["targets"]] == [[told], []]


@of_every_kind
def test_missing_shards_are_told_in_one_line(tmp_path: Path, kind: str) -> None:
    c = make(tmp_path, kind)
    c.remove(0)
    c.shard(3).unlink()
    finished = c.done()
    assert_right(c)
    there = f"2 of 4 ranks are there: no shard of ranks 0, 3 in {c.src}"
    assert finished.warnings == [f"{there}; what should be there was taken from ranks 1, 2 instead"]


def test_missing_shards_of_which_nothing_is_needed_are_told(c: Conversion) -> None:
    c.remove(2, 3)
    c.shard(1).write_bytes(c.shard(1).read_bytes())
    finished = c.done("transform", "--rank", "0")
    assert finished.warnings == [f"2 of 4 ranks are there: no shard of ranks 2, 3 in {c.src}"]


@pytest.mark.parametrize("way", few(1, ["alone", "jobs", "tasks", "backwards", "ranks"]))
def test_every_division_of_a_run_takes_the_same_and_tells_it_once(tmp_path: Path, way: str) -> None:
    """Rank 0 is damaged and 3 is missing; 1 then serves for 3, and 2 for 0, for targets of several processes."""
    c = make(tmp_path).to(side(8, EIGHT_LAYOUTS))
    DAMAGE["half"](c.shard(0))
    c.remove(3)
    runs = {
        "alone": [["--jobs", "1"]],
        "jobs": [["--jobs", "3"]],
        "tasks": [["--part", f"{number}/8"] for number in range(8)],
        "backwards": [["--rank", str(rank)] for rank in reversed(range(8))],
        "ranks": [["--jobs", "1", "--rank", "7", "--rank", "0"], ["--resume"]],
    }[way]
    told: list[str] = []
    for options in runs:
        finished = run_in_fork(*c.arguments("transform", *options))
        assert finished.code == 0, finished
        warned = finished.warnings
        assert len(warned) == len(set(warned)) <= 2
        told += [text.partition(";")[0] for text in warned]
    assert_right(c)
    missing, damaged = sorted(set(told))
    assert missing == f"3 of 4 ranks are there: no shard of rank 3 in {c.src}" and damaged.startswith(
        "the shard of rank 0 cannot be used, "
    )
    committed = json.loads((c.dst / "reshard.json").read_text())
    assert [target["read_ranks"] for target in committed["targets"]] == [[1, 2]] * 8


@by_one_mpi
def test_ranks_of_one_mpi_run_take_the_same_and_tell_it_once(tmp_path: Path, mpi: MPI) -> None:
    c = make(tmp_path).to(side(8, EIGHT_LAYOUTS))
    DAMAGE["half"](c.shard(0))
    finished = transform_apart(c, "--jobs", "1", mpi=mpi, ranks=3)
    assert finished.code == 0, finished
    assert_right(c)
    assert len(finished.warnings) == 1
    committed = json.loads((c.dst / "reshard.json").read_text())
    assert [target["read_ranks"] for target in committed["targets"]] == [[1, 2]] * 4 + [[2, 3]] * 4


@pytest.mark.slow
@of_every_kind
def test_functions_warn_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    c = make(tmp_path, kind)
    DAMAGE["empty"](c.shard(0))
    strategies = (c.src_strategy, c.dst_strategy)
    files = {rank: c.shard(rank) for rank in (0, 1, 2)}
    for call in (
        lambda: reshard_mpi.transform_checkpoints(c.src, c.dst, "checkpoint_", *strategies, 1, kind),
        lambda: reshard_mpi.transform_checkpoints(c.src, c.dst, "checkpoint_", *strategies, 2, kind),
        lambda: reshard_mpi.transform_checkpoint_by_rank(0, files, tmp_path / "out.ckpt", *strategies),
        lambda: reshard_mpi.load_rank(0, c.src, *strategies),
        lambda: reshard_mpi.plan(c.src, *strategies),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "reshard_mpi"):
            call()
        (record,) = caplog.records
        assert "rank 0 cannot be used" in record.message and "taken from ranks 1, 2 instead" in record.message
    assert_right(c)


def test_a_map_that_names_only_some_ranks_misses_none(
    c: Conversion, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "reshard_mpi"):
        files = {rank: c.shard(rank) for rank in (2, 3)}
        reshard_mpi.transform_checkpoint_by_rank(0, files, tmp_path / "o.ckpt", c.src_strategy, c.dst_strategy)
        four = c.strategy("four", {"w": RawLayout((4,), (0, -1)), "b": RawLayout((4,), (-1,))})
        reshard_mpi.transform_checkpoint_by_rank(0, files, tmp_path / "o.ckpt", c.src_strategy, four)
    assert not caplog.records


# Contradictions


@pytest.mark.slow
def test_a_contradiction_between_the_shards_of_different_targets_is_refused(c: Conversion, tmp_path: Path) -> None:
    """Each target reads its own rank's shard only, and so sees no contradiction."""
    layouts = {"w": RawLayout((4,), (-1, -1)), "b": RawLayout((4,), (-1,))}
    whole = Side(4, 1, {name: layouts.get(name, RawLayout((4,), ())) for name in TENSORS})
    for rank in range(4):
        c.rewrite(rank, {**TENSORS, **({"b": np.zeros(9, np.int64)} if rank == 2 else {})})
    strategy = c.strategy("four", layouts)
    c = c.but(source=whole, target=whole, src_strategy=strategy, dst_strategy=strategy)
    before = listing(tmp_path)
    for command in (["plan"], ["transform"], ["transform", "--jobs", "2"]):
        said = c.refused(*command)
        assert "disagree in the type or shape of 'b'" in said
        assert "expected: int64 [8], as by the shards opened for target rank" in said
        assert "got: int64 [9] by those for target rank 2" in said and "what to do" in said
    with pytest.raises(DisagreementError, match="type or shape of 'b'"):
        reshard_mpi.plan(c.src, c.src_strategy, c.dst_strategy)
    assert listing(tmp_path) == before


# What is not replaced silently, or not at all


@of_every_kind
@pytest.mark.parametrize("missing", few(1, [False, True]))
def test_values_of_the_own_rank_that_are_lost_are_told(tmp_path: Path, kind: str, missing: bool) -> None:
    c = make(tmp_path, kind)
    c = c.but(dst_strategy=c.strategy("d", {"w": RawLayout((4,), (0, -1)), "b": RawLayout((4,), (-1,))}))
    for rank in range(4):
        c.rewrite(rank, {"random_state": np.full(4, rank, np.uint32)})
    c.remove(3) if missing else DAMAGE["empty"](c.shard(3))
    finished = c.done()
    assert len(finished.warnings) == 2
    (own,) = (text for text in finished.warnings if text.startswith("target rank 3 "))
    told = re.fullmatch(r"target rank 3 has 'random_state' of rank (\d), not its own: .*", own)
    assert told is not None
    assert read_shard(c.written(3))["random_state"][2] == np.full(4, int(told[1]), np.uint32).tobytes()


@of_every_kind
def test_a_stage_whose_shards_are_all_lost_is_refused_though_the_target_lists_nothing(
    tmp_path: Path, kind: str
) -> None:
    tensors = {"w": np.arange(8, dtype=np.float32), "v": np.arange(4, dtype=np.float32)}
    source = Side(4, 2, {"w": RawLayout((2,), (0,)), "v": RawLayout((2,), (-1,), stages=(1,))})
    target = Side(1, 1, {"w": RawLayout((1,), (-1,)), "v": RawLayout((1,), (-1,))})
    c = write_conversion(tmp_path, kind, source, target, tensors).but(dst_strategy=None)
    for rank in (2, 3):
        DAMAGE["empty"](c.shard(rank))
    before = listing(tmp_path)
    said = c.refused()
    assert "no shard that should hold 'v' is there" in said
    assert f"rank 2: a shard is empty, expected a checkpoint, got 0 bytes, in {c.shard(2)}" in said
    for rank in (2, 3):
        before = {k: v for k, v in before.items() if f"rank_{rank}/" not in k and not k.endswith(f"rank_{rank}")}
        shutil.rmtree(c.shard(rank).parent)
    assert "no shard that should hold 'v' is there" in c.refused()
    assert listing(tmp_path) == before


@of_every_kind
def test_what_only_a_damaged_shard_may_hold_is_not_taken_for_never_saved(tmp_path: Path, kind: str) -> None:
    """Saved without redundancy: of two ranks that should hold the same, each holds some."""
    c = make(tmp_path, kind)
    for rank in (0, 1):
        c.rewrite(rank, {"b": None})
    for rank in (2, 3):
        c.rewrite(rank, {"w": None, "moments.w": None})
    c.done()
    assert_right(c)
    for rank in (2, 3):
        DAMAGE["empty"](c.shard(rank))
    said = c.but(dst=tmp_path / "other").refused()
    assert "'b' is in no shard that was opened, but may be in one that is damaged" in said, said
    assert "rank 2: a shard is empty" in said and "what to do: restore these shards" in said
    assert not (tmp_path / "other").exists()


def with_accumulator(c: Conversion) -> Conversion:
    """Have both strategies list state of which the shards hold nothing."""
    return c.but(
        src_strategy=c.strategy("s", {**SRC_LAYOUTS, "accu.w": SRC_LAYOUTS["w"]}),
        dst_strategy=c.strategy("d", {**DST_LAYOUTS, "accu.w": DST_LAYOUTS["w"]}),
    )


@of_every_kind
def test_nor_is_a_whole_kind_of_state_where_shards_are_saved_without_redundancy(tmp_path: Path, kind: str) -> None:
    c = with_accumulator(make(tmp_path, kind))
    c.rewrite(0, {"b": None})
    DAMAGE["empty"](c.shard(2))
    assert "'accu.w' is in no shard that was opened" in c.refused()


@of_every_kind
def test_state_that_was_never_saved_is_still_told_from_what_is_lost(tmp_path: Path, kind: str) -> None:
    c = with_accumulator(make(tmp_path, kind))
    DAMAGE["empty"](c.shard(0))
    finished = c.done()
    assert len(finished.warnings) == 2, finished
    assert "1 listed parameters are in no source shard: accu.w" in finished.err
    assert_right(c)


def test_the_first_of_shards_that_describe_themselves(c: Conversion, tmp_path: Path) -> None:
    native = c.but(dst=tmp_path / "native", kind="hdf5", dst_strategy=c.src_strategy, target=c.source)
    native.done("transform", "--to", "hdf5")
    back = native.but(src=native.dst, dst=c.dst, src_strategy=None, dst_strategy=c.dst_strategy, target=c.target)
    DAMAGE["half"](back.shard(0))
    finished = back.done()
    assert len(finished.warnings) == 1 and "taken from ranks 1, 2 instead" in finished.err
    assert_right(back)
    loose = tmp_path / "loose"
    loose.mkdir()
    for rank in range(4):
        shutil.copy(back.shard(rank), loose)
    finished = back.but(src=loose, dst=tmp_path / "more").done()
    assert len(finished.warnings) == 2, finished
    assert f"whose shard {loose}/checkpoint_0.h5 is cannot be told" in finished.err
    assert shards(tmp_path / "more") == shards(back.dst)


def test_a_shard_in_the_folder_of_another_rank_is_replaced(c: Conversion, tmp_path: Path) -> None:
    native = c.but(dst=tmp_path / "native", kind="hdf5", dst_strategy=c.src_strategy, target=c.source)
    native.done("transform", "--to", "hdf5")
    back = native.but(src=native.dst, dst=c.dst, src_strategy=None, dst_strategy=c.dst_strategy, target=c.target)
    shutil.copy(back.shard(1), back.shard(2))
    finished = back.done()
    assert "a shard says it belongs elsewhere" in finished.err
    assert "rank 0 instead" in finished.err
    assert_right(back)


# Files that fail while they are read

# How the engine reads.
ENGINE = ("preadv", "copy_file_range")


def failing_reads(monkeypatch: pytest.MonkeyPatch, path: Path, names: Sequence[str]) -> None:
    """Have these ways of reading a file fail, once it is open."""
    for name in names:
        real = getattr(os, name)

        def failing(descriptor: int, *rest: object, real: Callable[..., int] = real) -> int:
            if Path(f"/proc/self/fd/{descriptor}").readlink() == path:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(descriptor, *rest)

        monkeypatch.setattr(os, name, failing)


def assert_failed(c: Conversion, says: str, where: Path) -> None:
    """Check that target 1 alone fails, and what is said of it."""
    said = c.refused(code=4)
    assert says in said and f"where: {where}\n" in said
    assert "restore the " in said and "remove " in said and "--resume" in said
    assert c.written(0).exists() and not c.written(1).exists()


def test_a_shard_whose_structure_cannot_be_read_is_replaced(c: Conversion, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_reads(monkeypatch, c.shard(0), ["pread"])
    finished = c.done()
    (told,) = finished.warnings
    assert f"{c.shard(0)}, byte 0: a shard cannot be read, got [Errno 5] Input/output error" in told
    assert_right(c)


@of_every_kind
def test_a_file_that_cannot_be_read_while_a_target_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    c = make(tmp_path, kind)
    for rank in range(4):  # otherwise what is the same for all ranks is read before
        c.rewrite(rank, {"global_step": None})
    with monkeypatch.context() as patch:
        failing_reads(patch, c.shard(2), ENGINE)
        assert_failed(c, "a source file cannot be read\n", c.shard(2))
    c.remove(2)
    assert "no shard of rank 2" in c.done("transform", "--resume").err
    for rank in range(2):
        kept = {n: a for n, a in expected_rank(c.target, TENSORS, rank).items() if n != "global_step"}
        assert read_shard(c.written(rank)) == as_read(kept)


@of_every_kind
@pytest.mark.parametrize("kept", few(1, [True, False]), ids=["plans are kept", "plans are made again"])
def test_a_file_that_is_truncated_after_it_was_planned_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, kept: bool
) -> None:
    c = make(tmp_path, kind)
    write = transform.write_targets

    def truncate_and_write(*of_run: Any) -> object:
        os.truncate(c.shard(2), 100)
        return write(*of_run)

    with monkeypatch.context() as patch:
        patch.setattr(transform, "write_targets", truncate_and_write)
        if not kept:
            patch.setattr(target_plans, "MAX_KEPT_PLANS", 0)
            patch.setattr(source, "MAX_KEPT_BYTES", 1)
        if kept:
            assert_failed(c, "a source file became shorter while it was read\n", c.shard(2))
        else:
            assert_failed(c, "source shards have changed since the run began\n", c.src)
    assert "the shard of rank 2 cannot be used" in c.done("transform", "--resume").err
    assert_right(c)


def test_the_function_names_the_file_that_cannot_be_read(
    c: Conversion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(4):
        c.rewrite(rank, {"global_step": None})
    failing_reads(monkeypatch, c.shard(2), ENGINE)
    with pytest.raises(TransformError, match=r"1 of 2 targets failed(.|\n)*cannot be read(.|\n)*rank_2"):
        reshard_mpi.transform_checkpoints(c.src, c.dst, "c_", c.src_strategy, c.dst_strategy)
    files = {rank: c.shard(rank) for rank in (2, 3)}
    with pytest.raises(ShardError, match=r"cannot be read(.|\n)*rank_2"):
        reshard_mpi.transform_checkpoint_by_rank(1, files, tmp_path / "o.ckpt", c.src_strategy, c.dst_strategy)
    assert not list(tmp_path.glob("o.ckpt*"))
