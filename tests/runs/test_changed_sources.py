"""Sources that change between two parts of one run, or in the middle of one: noticed, named, never mixed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import as_read, expected_rank, read_shard
from support.conversions import TENSORS, Conversion, command_line, listing, make

import reshard_mpi
from reshard_mpi.runs import write

Capture = pytest.CaptureFixture[str]


def transform(capsys: Capture, c: Conversion, *options: str) -> tuple[int, str]:
    said = command_line(capsys, *c.arguments("transform", "--progress", "none", *options))
    return said.code, said.err


def later(c: Conversion, rank: int) -> None:
    """Give a source shard another time of modification, as one of the same size that is saved over it has."""
    status = c.shard(rank).stat()
    os.utime(c.shard(rank), ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def test_a_record_says_which_files_a_target_was_made_from(tmp_path: Path, capsys: Capture) -> None:
    c = make(tmp_path)
    assert transform(capsys, c)[0] == 0
    for rank in range(2):
        record = json.loads((c.dst / ".reshard_mpi" / f"rank_{rank}.json").read_text())
        assert record["sources"]["folder"] == str(c.src)
        assert record["sources"]["files"] == [
            [f"rank_{source}/checkpoint_{source}.ckpt", status.st_size, status.st_mtime_ns]
            for source in (2 * rank, 2 * rank + 1)
            for status in (c.shard(source).stat(),)
        ]


@pytest.mark.parametrize("how", ["size", "time"])
@pytest.mark.parametrize("command", ["transform", "plan"])
def test_a_finished_target_whose_source_is_another_now(tmp_path: Path, capsys: Capture, how: str, command: str) -> None:
    c = make(tmp_path)
    assert transform(capsys, c, "--rank", "0")[0] == 0
    before = listing(c.dst)
    if how == "size":
        c.rewrite(1, {"more": np.array(1)})
    else:
        later(c, 1)
    said = command_line(capsys, *c.arguments(command, "--resume"))
    assert said.code == 3 and "target rank 0 was made from sources that have changed since" in said.err, said
    assert "expected: rank_1/checkpoint_1.ckpt of " in said.err and f"where: {c.src}" in said.err
    assert "--overwrite" in said.err and listing(c.dst) == before
    assert transform(capsys, c, "--overwrite")[0] == 0
    assert transform(capsys, c, "--resume")[0] == 0


def test_several_sources_that_are_others_now(tmp_path: Path, capsys: Capture) -> None:
    c = make(tmp_path).but(dst_strategy=None)  # one target of all
    assert transform(capsys, c)[0] == 0
    for rank in range(2):
        later(c, rank)
    code, said = transform(capsys, c, "--resume")
    assert code == 3 and "and 1 more: rank_1/checkpoint_1.ckpt\n" in said


def test_a_finished_target_whose_source_is_gone(tmp_path: Path, capsys: Capture) -> None:
    c = make(tmp_path)
    assert transform(capsys, c, "--rank", "0")[0] == 0
    c.remove(0)
    said = f"warning: 3 of 4 ranks are there: no shard of rank 0 in {c.src}\n"
    assert transform(capsys, c, "--resume") == (0, said)
    assert (c.dst / "reshard.json").exists()


def test_one_file_as_source(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    c = make(tmp_path).but(dst_strategy=None)
    assert transform(capsys, c)[0] == 0
    monkeypatch.chdir(c.written(0).parent)
    one = c.but(src=Path(c.written(0).name), dst=tmp_path / "two", src_strategy=None, dst_strategy=c.dst_strategy)
    assert transform(capsys, one)[0] == 0
    found = json.loads((one.dst / "reshard.json").read_text())
    assert found["sources"] == [{"file": "checkpoint_0.ckpt", "size_bytes": c.written(0).stat().st_size}]
    monkeypatch.chdir(tmp_path)
    assert transform(capsys, one.but(src=c.written(0)), "--resume")[0] == 0
    os.utime(c.written(0), ns=(1, 1))
    assert "have changed since" in transform(capsys, one.but(src=c.written(0)), "--resume")[1]


def test_targets_that_were_made_from_two_states_of_a_file_are_not_committed(tmp_path: Path, capsys: Capture) -> None:
    c = make(tmp_path)
    c.remove(0, 1)  # so both targets are made from the others
    assert transform(capsys, c, "--part", "0/2")[0] == 0
    later(c, 3)
    code, said = transform(capsys, c, "--part", "1/2")
    assert code == 3 and "a source was changed between the targets of ranks 0 and 1" in said
    assert "rank_3/checkpoint_3.ckpt of " in said and "--overwrite" in said
    assert c.written(1).exists() and not (c.dst / "reshard.json").exists()
    assert transform(capsys, c, "--overwrite")[0] == 0


@pytest.mark.parametrize("journal", [True, False])
def test_a_source_that_is_saved_over_while_it_is_read(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, journal: bool
) -> None:
    c = make(tmp_path)
    fill = write._fill

    def save_over(plan, *arguments):
        filled = fill(plan, *arguments)
        if plan.target_rank == 1:
            later(c, 3)
        return filled

    with monkeypatch.context() as patched:
        patched.setattr(write, "_fill", save_over)
        if journal:
            code, said = transform(capsys, c)
            assert code == 4 and "1 of 2 targets failed" in said
        else:
            with pytest.raises(reshard_mpi.errors.TransformError) as error:
                reshard_mpi.transform_checkpoints(c.src, c.dst, "checkpoint_", c.src_strategy, c.dst_strategy)
            said = str(error.value)
    assert "sources of target rank 1 were changed while it was written" in said and "rank_3/checkpoint_3" in said
    assert list(c.dst.glob("rank_*/*")) == [c.written(0)]
    assert transform(capsys, c, "--resume" if journal else "--overwrite")[0] == 0
    assert read_shard(c.written(1)) == as_read(expected_rank(c.target, TENSORS, 1))


# Targets that have no source file in common


def saved_again(c: Conversion) -> None:
    """Save other weights of the same step over the source."""
    for rank in range(4):
        c.rewrite(rank, {"w": expected_rank(c.source, {"w": TENSORS["w"] + 1}, rank)["w"]})


def test_targets_of_two_states_are_not_committed(tmp_path: Path, capsys: Capture) -> None:
    c = make(tmp_path)
    assert transform(capsys, c, "--rank", "0")[0] == 0
    saved_again(c)
    code, said = transform(capsys, c, "--rank", "1", "--resume")
    assert code == 3 and "other targets were made from what was saved after target rank 0 was made" in said
    assert "expected: rank_0/checkpoint_0.ckpt of " in said and "--overwrite" in said
    said = command_line(capsys, "commit", str(c.dst)).err
    assert "saved after target rank 0" in said and not (c.dst / "reshard.json").exists()
    assert transform(capsys, c, "--overwrite")[0] == 0 and (c.dst / "reshard.json").exists()


def test_what_is_saved_when_all_targets_are_made_is_no_concern(tmp_path: Path, capsys: Capture) -> None:
    c = make(tmp_path)
    for rank in ("0", "1"):
        assert transform(capsys, c, "--rank", rank)[0] == 0
    (c.dst / "reshard.json").unlink()
    saved_again(c)
    assert command_line(capsys, "commit", str(c.dst)).code == 0
