"""The commit record: there if and only if all targets of a run are complete and belong together."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import COMMAND, done, refused, run_here
from support.conversions import (
    DST_LAYOUTS,
    Conversion,
    assert_right,
    four_targets,
    listing,
    make,
    of_every_kind,
    shards,
    side,
    transform_apart,
    transform_by_function,
)
from support.examples import few, few_cases
from support.kills import instants, killed_before
from support.launch import MPI, by_one_mpi
from support.oracle import RawLayout
from support.processes import HANG_SECONDS, clean_environment

import reshard_mpi
from reshard_mpi.checkpoints.discovery import find_shards
from reshard_mpi.errors import ReshardError, TargetError
from reshard_mpi.journal import commit as journal_commit
from reshard_mpi.journal.commit import commit, commit_if_complete
from reshard_mpi.journal.provenance import TargetInputs
from reshard_mpi.journal.run_records import RunIdentity
from reshard_mpi.journal.target_journal import Journal
from reshard_mpi.journal.target_records import TargetRecord
from reshard_mpi.planning.rank_plan import StageDigest
from reshard_mpi.planning.source_flaws import Differences
from reshard_mpi.runs.outcome import Outcome
from reshard_mpi.runs.target_writer import Writer

FOUR = {"w": RawLayout((4,), (0, -1)), "b": RawLayout((2, 2), (1,))}


def record(c: Conversion) -> Path:
    return c.dst / "reshard.json"


# What it says


@of_every_kind
def test_it_says_what_was_made_of_what(tmp_path: Path, kind: str) -> None:
    c = make(tmp_path, kind)
    c.done()
    facts = json.loads(record(c).read_text())
    run_facts = json.loads((c.dst / ".reshard_mpi" / "run.json").read_text())
    assert (facts["format"], facts["version"]) == ("reshard_mpi commit", 1)
    assert (facts["source"], facts["prefix"], facts["to"]) == (str(c.src), "checkpoint_", kind)
    assert facts["target_ranks"] == 2 and len(facts["src_strategy"]) == len(facts["dst_strategy"]) == 64
    assert {name: facts[name] for name in run_facts} == run_facts
    assert facts["targets"] == [
        {
            "rank": rank,
            "file": str(c.written(rank).relative_to(c.dst)),
            "size_bytes": c.written(rank).stat().st_size,
            "read_ranks": [2 * rank, 2 * rank + 1],
        }
        for rank in range(2)
    ]
    assert facts["sources"] == [
        {"file": str(c.shard(rank).relative_to(c.src)), "size_bytes": c.shard(rank).stat().st_size} for rank in range(4)
    ]
    lines = 3 + len(run_facts) + len(facts["sources"]) + 3 + len(facts["targets"]) + 2
    assert record(c).read_text().count("\n") == lines  # a line a file


DIVISIONS: dict[str, list[list[str]]] = {
    "one worker for two": [["--jobs", "2"]],
    "targets filled together": [["--jobs", "5"]],
    "ranks": [["--rank", "3"], ["--rank", "0", "--rank", "2"], ["--rank", "1"]],
    "parts": [["--part", f"{part}/4"] for part in (2, 0, 3, 1)],
    "few parts": [["--part", "1/2"], ["--part", "0/2", "--jobs", "2"]],
    "more parts than targets": [["--part", f"{part}/6"] for part in range(6)],
    "resumed": [["--rank", "2"], ["--resume"]],
    "made anew": [[], ["--overwrite"], ["--overwrite", "--rank", "1"], ["--resume"]],
}


@pytest.mark.slow
@pytest.mark.parametrize("division", DIVISIONS)
def test_it_is_the_same_however_the_run_is_divided(tmp_path: Path, division: str) -> None:
    c = four_targets(tmp_path)
    whole = c.but(dst=tmp_path / "whole")
    whole.done()
    for options in DIVISIONS[division]:
        assert c.run("transform", *options).ended == (0, "")
    assert shards(c.dst) == shards(whole.dst)
    assert record(c).read_bytes() == record(whole).read_bytes()


def test_an_array_makes_it_with_its_last_task_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And reads no more than one record of others before all of them have made theirs."""
    c = four_targets(tmp_path)
    read: list[int] = []
    original = TargetRecord.read
    monkeypatch.setattr(TargetRecord, "read", lambda state, rank: (read.append(rank), original(state, rank))[1])
    for part in (3, 1, 0):
        c.done("transform", "--part", f"{part}/4", "--resume")
        assert not record(c).exists()
        assert len({*read} - {part}) <= 1
        read.clear()
    c.done("transform", "--part", "2/4", "--resume")
    assert record(c).exists() and set(read) == {0, 1, 2, 3}
    read.clear()
    c.done("transform", "--part", "2/4", "--resume")
    assert set(read) <= {2}  # the record is there: nothing to do


def test_the_functions_make_none(c: Conversion) -> None:
    transform_by_function(c)
    assert sorted(path.name for path in c.dst.iterdir()) == ["rank_0", "rank_1"]


def test_resume_with_nothing_left(c: Conversion) -> None:
    c.done()
    before = record(c).stat()
    c.done("transform", "--resume")
    assert record(c).stat().st_ino == before.st_ino
    for spoil in (record(c).unlink, lambda: record(c).write_text('{"digest": "of another run"}')):
        text = record(c).read_text()
        spoil()
        c.done("transform", "--resume")
        assert record(c).read_text() == text


def test_it_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    c = make(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(journal_commit, "publish_text", full)
        finished = c.run()
    assert finished.code == 4 and "are complete, but the commit record could not be written" in finished.err
    assert "No space" in finished.err
    assert c.run("transform", "--resume").ended == (0, "")
    assert record(c).exists()


@pytest.mark.parametrize("call", few(1, ["stat", "open", "listdir"]))
@pytest.mark.parametrize("options", few(1, [["--part", "1/2"], ["--to", "dcp"], ["--to", "hf"], ["--to", "ckpt"]]))
def test_what_has_just_been_written_is_not_found_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], call: str
) -> None:
    """A run, or the last task of an array, commits what it has made, or says what it has not found."""
    c, number = make(tmp_path), 0
    c = c.but(dst_strategy=None) if "hf" in options else c
    tasks = [["--part", "0/2"], options] if "--part" in options else [options]
    look, commit_it = getattr(os, call), journal_commit.commit_if_complete
    ends = set()
    while number < 200:
        c, left = c.but(dst=tmp_path / f"dst{number}"), number
        number += 1

        def looked(path: object, *arguments: object, dst: Path = c.dst, **named: object) -> object:
            nonlocal left
            is_counted = str(path).startswith((str(dst), ".reshard_mpi", "reshard.json", "rank_"))
            left -= is_counted
            if is_counted and left == -1:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
            return look(path, *arguments, **named)

        def commit_blindly(*arguments: Any, **named: Any) -> Differences:
            with monkeypatch.context() as patched:
                patched.setattr(os, call, looked)
                return commit_it(*arguments, **named)

        for task in tasks[:-1]:
            c.done("transform", *task)
        with monkeypatch.context() as patched:
            patched.setattr(journal_commit, "commit_if_complete", commit_blindly)
            finished = c.run("transform", *tasks[-1])
        ends.add(finished.code)
        if finished.code == 0 and "note: " not in finished.err:
            assert find_shards(str(c.dst)) and record(c).exists(), (finished, number)
        elif finished.code == 0:  # what another task has made is not found
            assert f"note: {c.dst} is not committed: target rank 0 " in finished.err and "--part" in options
        else:
            assert finished.code == 4 and "targets" in finished.err and str(c.dst) in finished.err, (finished, number)
            assert run_here("commit", c.dst).code == 0 and record(c).exists()
        if left >= 0:
            break
    assert number < 200 and ends <= {0, 4}


# commit


def test_commit(c: Conversion) -> None:
    c.done()
    text = record(c).read_text()
    size = sum(c.written(rank).stat().st_size for rank in range(2))
    for _ in range(2):
        (c.dst / ".reshard.json.0123.partial").write_text("left by one that died")
        finished = run_here("commit", c.dst)
        assert finished.ended == (0, "")
        assert finished.out == f"committed 2 targets, {size} B: {record(c)}\n"
        assert record(c).read_text() == text
        assert not list(c.dst.glob(".*.partial"))
        record(c).unlink()


SPOILS: dict[str, tuple[Callable[[Conversion], object], str]] = {
    "no record": (lambda c: state(c, "rank_1.json").unlink(), "has not been written"),
    "damaged record": (lambda c: state(c, "rank_1.json").write_text("{"), "has not been written"),
    "strange record": (lambda c: state(c, "rank_1.json").write_text('{"digest": []}'), "has not been written"),
    "record of another": (
        lambda c: state(c, "rank_1.json").write_text(state(c, "rank_0.json").read_text()),
        "has not been written",
    ),
    "record of what is elsewhere": (
        lambda c: state(c, "rank_1.json").write_text(
            state(c, "rank_1.json").read_text().replace("rank_1/", "../dst/rank_1/")
        ),
        "has not been written",
    ),
    "another run": (
        lambda c: state(c, "rank_1.json").write_text(
            re.sub(
                '"check": "[^"]*", ', "", state(c, "rank_1.json").read_text().replace('"digest": "', '"digest": "0', 1)
            )
        ),
        "is of another run",
    ),
    "no file": (lambda c: c.written(1).unlink(), "has lost its file rank_1/checkpoint_1.ckpt"),
    "no folder": (lambda c: (c.written(1).unlink(), c.written(1).parent.rmdir()), "has lost its file"),
    "another size": (lambda c: os.truncate(c.written(1), 5), "has 5 bytes in rank_1/checkpoint_1.ckpt, not the"),
}


def state(c: Conversion, name: str) -> Path:
    return c.dst / ".reshard_mpi" / name


@pytest.mark.parametrize("form", few(1, ["ckpt", "dcp", "hf"]))
def test_what_is_committed_stays_so_whatever_becomes_of_the_source(c: Conversion, form: str) -> None:
    """A last job that is run again meets a training that has begun to save anew."""
    given = ("--to", form, *(("--max-shard-size", "100") if form == "hf" else ("--dst-strategy", c.dst_strategy)))
    done("transform", c.src, c.dst, "--src-strategy", c.src_strategy, *given)
    before = listing(c.dst)
    c.rewrite(0, {"w": c.arrays(0)["w"] + 1})
    assert "committed" in done("commit", c.dst).out
    assert listing(c.dst) == before


@pytest.mark.parametrize("is_committed", [True, False])
def test_an_index_that_a_training_has_saved_there_stays(tmp_path: Path, is_committed: bool) -> None:
    c = make(tmp_path).but(options=("--to", "dcp"))
    c.done("transform", *(() if is_committed else ("--rank", "0")))
    (c.dst / "__0_0.distcp").write_bytes(b"saved later")
    (c.dst / ".metadata").write_bytes(b"saved later")
    assert "not complete" in refused("commit", c.dst, code=4)
    assert (c.dst / ".metadata").read_bytes() == b"saved later" and record(c).exists() == is_committed


# What becomes of a committed folder whose index makes it a checkpoint, given its first shard.
WITHERS: dict[str, Callable[[Conversion, Path], object]] = {
    "touched": lambda _, shard: shard.touch(),
    "lost": lambda _, shard: shard.unlink(),
    "cut": lambda _, shard: os.truncate(shard, 5),
    "no record": lambda c, _: state(c, "rank_0.json").unlink(),
    "empty record": lambda c, _: state(c, "rank_0.json").write_text(""),
    "saved on": lambda c, _: (state(c, "committed.json").unlink(), c.rewrite(0, {"w": c.arrays(0)["w"] + 1})),
}


@pytest.mark.parametrize("form", few(1, ["dcp", "hf"]))
@pytest.mark.parametrize("withered", few(1, WITHERS))
def test_commit_leaves_what_is_committed_where_it_fails(tmp_path: Path, withered: str, form: str) -> None:
    """What is amiss may be restored, and without its index nobody could read it then."""
    c = make(tmp_path)
    given = ("--max-shard-size", "140") if form == "hf" else ("--dst-strategy", c.dst_strategy)
    done("transform", c.src, c.dst, "--src-strategy", c.src_strategy, "--to", form, *given)
    committed = {path: path.read_bytes() for path in c.dst.iterdir() if path.is_file()}
    shard = next(path for path in sorted(committed) if path.suffix in (".distcp", ".safetensors"))
    WITHERS[withered](c, shard)
    before = listing(c.dst)
    finished = run_here("commit", c.dst)
    assert finished.code in (3, 4) or withered == "touched", finished  # what is as committed may well be committed
    assert listing(c.dst) == before
    shard.write_bytes(committed[shard])
    shutil.rmtree(c.dst / ".reshard_mpi")
    assert "source: " in done("transform", c.dst, tmp_path / "read", "--to", "safetensors").err
    assert {path: path.read_bytes() for path in committed} == committed


@pytest.mark.parametrize("form", few(1, ["dcp", "hf"]))
@few_cases(
    1,
    ("name", "place"),
    [
        ("rank_1.json", r'"digest": "[0-9a-f]*([0-9])'),
        ("rank_1.json", r'"modified_ns": \d{12}(\d)'),
        ("committed.json", r'"1": \d{12}(\d)'),
    ],
)
def test_commit_removes_nothing_by_a_record_in_which_a_bit_has_turned_over(
    tmp_path: Path, form: str, name: str, place: str
) -> None:
    """The source has changed since, in a part: else the targets would be committed again."""
    c = make(tmp_path)
    given = ("--max-shard-size", "140") if form == "hf" else ("--dst-strategy", c.dst_strategy)
    done("transform", c.src, c.dst, "--src-strategy", c.src_strategy, "--to", form, *given)
    c.rewrite(2, {"w": c.arrays(2)["w"] + 1})
    path = state(c, name)
    content, status = bytearray(path.read_bytes()), path.stat()
    found = re.search(place, content.decode())
    assert found is not None
    content[found.start(1)] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))
    before = listing(c.dst)
    run_here("commit", c.dst)
    assert {file: text for file, text in listing(c.dst).items() if "/" not in file} == {
        file: text for file, text in before.items() if "/" not in file
    }


@pytest.mark.parametrize("spoiled", few(1, SPOILS))
def test_commit_says_what_is_missing(tmp_path: Path, spoiled: str) -> None:
    c = four_targets(tmp_path)
    c.done()
    text = record(c).read_text()
    spoil, got = SPOILS[spoiled]
    spoil(c)
    spoiled_folder = listing(c.dst)
    finished = run_here("commit", c.dst)
    assert finished.code == 4 and "1 of 4 targets are not complete: 1\n" in finished.err and finished.out == ""
    assert f"target rank 1 {got}" in finished.err and "--resume" in finished.err and "sbatch --array=1," in finished.err
    if spoiled == "another run":  # what was committed is not there any more, for certain
        assert not record(c).exists()
    else:
        assert listing(c.dst) == spoiled_folder
    if spoiled in ("no record", "another size"):  # the file may be somebody else's
        assert f"where: {c.written(1)}" in c.refused("transform", "--resume")
        c.written(1).unlink()
    c.done("transform", "--resume")
    assert record(c).read_text() == text


def test_a_target_that_was_about_to_be_replaced_is_not_committed(
    c: Conversion, monkeypatch: pytest.MonkeyPatch
) -> None:
    c.done()
    rename = os.rename

    def refuse(file: str, name: str, **folders: int) -> None:
        if name == c.written(1).name:
            raise OSError(5, "Input/output error")
        rename(file, name, **folders)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", refuse)
        assert c.run("transform", "--overwrite").code == 4
    assert "target rank 1 was about to be put in the place of rank_1/" in refused("commit", c.dst, code=4)
    assert not record(c).exists()
    assert c.run("transform", "--resume").code == 0 and record(c).exists()


def test_missing_ranks_are_said_as_sbatch_takes_them(c: Conversion) -> None:
    target = side(8, {"w": RawLayout((8,), (0, -1)), "b": RawLayout((8,), (0,))})
    c = c.to(target)
    c.done("transform", "--rank", "1", "--rank", "6")
    assert "6 of 8 targets are not complete: 0,2-5,7\n" in refused("commit", c.dst, code=4)


@pytest.mark.parametrize(
    ("make_folder", "got"),
    [
        (lambda folder: None, "no record of a run"),
        (lambda folder: folder.mkdir(), "no record of a run"),
        (lambda folder: folder.write_text(""), "no record of a run"),
        (lambda folder: run_file(folder).write_text("{}"), "damaged, or of another version"),
        (lambda folder: run_file(folder).write_text('{"a": 1, "digest": "0"}'), "damaged, or of another version"),
        (
            lambda folder: run_file(folder).write_text(RunIdentity({"source": "x"}).as_text()),
            "damaged, or of another version",
        ),
    ],
    ids=["nothing", "empty folder", "file", "empty record", "edited record", "record of an earlier version"],
)
def test_commit_of_what_holds_no_run(tmp_path: Path, make_folder: Callable[[Path], object], got: str) -> None:
    make_folder(tmp_path / "dst")
    said = refused("commit", tmp_path / "dst")
    assert "holds no run to commit" in said and got in said
    assert not (tmp_path / "dst").is_dir() or not list(tmp_path.rglob("*.lock"))


def run_file(folder: Path) -> Path:
    (folder / ".reshard_mpi").mkdir(parents=True)
    return folder / ".reshard_mpi" / "run.json"


# Shards that do not belong together


@few_cases(2, "last", [["--part", "1/2"], ["--resume"], ["--rank", "1"], ["--resume", "--jobs", "3"]])
def test_targets_of_different_moments(c: Conversion, last: list[str]) -> None:
    for rank in (2, 3):  # target 0 reads 0 and 1, target 1 reads these
        c.rewrite(rank, {"global_step": np.array(8, np.int32)})
    assert c.run("transform", "--part", "0/2").ended == (0, "")
    said = c.refused("transform", *last)
    assert "different moments" in said
    assert "'global_step' = 7" in said and "'global_step' = 8" in said and "--overwrite" in said
    assert c.written(0).exists() and c.written(1).exists() and not record(c).exists()
    assert "different moments" in run_here("commit", c.dst).err and run_here("commit", c.dst).code == 3
    assert not record(c).exists()


def test_targets_made_anew_one_by_one_from_later_shards(c: Conversion) -> None:
    """Until the last one is replaced they do not belong together, which is nobody's failure."""
    c.done()
    text = record(c).read_text()
    for rank in range(4):
        c.rewrite(rank, {"global_step": np.array(8, np.int32)})
    finished = c.done("transform", "--part", "0/2", "--overwrite")
    assert "note: not committed yet" in finished.err and "different moments" in finished.err
    assert not record(c).exists()
    assert c.run("transform", "--part", "1/2", "--overwrite").ended == (0, "")
    assert record(c).read_text() == text


def test_targets_of_an_earlier_run_with_more_of_them(tmp_path: Path) -> None:
    c = four_targets(tmp_path)
    c.done()
    fewer = c.but(dst_strategy=tmp_path / "dst_strategy" / "strategy_0.ckpt")
    assert fewer.run("transform", "--overwrite", "--rank", "0").ended == (0, "") and not record(c).exists()
    assert not c.written(2).parent.exists() and not c.written(3).parent.exists()
    assert fewer.run("transform", "--overwrite", "--rank", "1").ended == (0, "")
    assert_right(fewer.but(target=side(2, DST_LAYOUTS)))
    assert [target["rank"] for target in json.loads(record(c).read_text())["targets"]] == [0, 1]


def test_targets_that_do_not_hold_the_same_parameters(c: Conversion) -> None:
    for rank in (0, 1):
        c.rewrite(rank, {"moments.w": None})
    c.done("transform", "--part", "1/2")
    said = c.refused("transform", "--part", "0/2")
    assert "target rank 0 holds 'moments.w', but those for rank 1 do" in said
    assert "restore the shards" in said and not record(c).exists()
    assert "for target rank 0 holds 'moments.w'" in refused("commit", c.dst)


def test_unlisted_tensors_that_differ(c: Conversion, tmp_path: Path) -> None:
    for rank in range(4):
        c.rewrite(rank, {"seed": np.array(rank // 2)})
    unsampled = ("--replicas", "any")
    assert c.run("transform", "--part", "0/2", *unsampled).ended == (0, "")
    assert c.done("transform", "--part", "1/2", *unsampled).err.count("note: 'seed' differs between ranks 0, 2") == 1
    assert record(c).exists()
    assert run_here("commit", c.dst).err.count("note: 'seed' differs between ranks 0, 2") == 1
    whole = c.but(dst=tmp_path / "whole")
    assert whole.run("transform", *unsampled).err.count("'seed' differs") == 1
    assert record(whole).read_bytes() == record(c).read_bytes()


# Never beside targets that are changing

EVIDENCE = TargetInputs((), StageDigest(0, "", 0), (), ())


def identity(target_ranks: int) -> RunIdentity:
    return RunIdentity({"source": "here", "to": "ckpt", "target_ranks": target_ranks})


def write(folder: Path, ranks: int, rank: int) -> None:
    journal = Journal(folder, identity(ranks), resume=False, overwrite=True)
    journal.begin()
    with journal.writing(rank, folder / f"rank_{rank}" / f"net_{rank}.ckpt", EVIDENCE) as publication:
        assert not (folder / "reshard.json").exists()
        publication.partial.write_bytes(b"whole")
        publication.publish()


def commit_two(folder: Path) -> None:
    for rank in range(2):
        write(folder, 2, rank)
    assert commit(folder).targets == 2
    assert (folder / "reshard.json").exists()


def test_one_that_replaces_a_target_without_a_journal_withdraws_it(c: Conversion) -> None:
    arguments = (c.src, c.dst, "checkpoint_", c.src_strategy, c.dst_strategy)
    c.done()
    reshard_mpi.transform_checkpoints(*arguments, output_format="hdf5")  # files of other names
    assert record(c).exists()
    reshard_mpi.transform_checkpoints(*arguments, unlisted="drop")
    assert not record(c).exists()
    assert "2 of 2 targets are not complete" in refused("commit", c.dst, code=4)
    for path in c.dst.glob("rank_*/*.h5"):
        path.unlink()
    assert "that this run has not written" in c.refused("transform", "--resume")
    c.done("transform", "--overwrite")
    assert record(c).exists()


@pytest.mark.parametrize("by_rank", few(1, [True, False]))
def test_so_does_one_in_a_copy_without_records(c: Conversion, by_rank: bool) -> None:
    c.done("transform", "--verify")
    shutil.rmtree(c.dst / ".reshard_mpi")
    if by_rank:
        files = {rank: find_shards(str(c.src)).by_rank[rank][0] for rank in range(c.source.world_size)}
        reshard_mpi.transform_checkpoint_by_rank(0, files, c.written(0), c.src_strategy, c.dst_strategy)
    else:
        reshard_mpi.transform_checkpoints(c.src, c.dst, "checkpoint_", c.src_strategy, c.dst_strategy)
    assert not record(c).exists()


@contextmanager
def commit_lock(folder: Path, kind: int) -> Iterator[None]:
    with (folder / ".reshard_mpi" / "commit.lock").open("a") as stream:
        fcntl.flock(stream, kind)
        yield


def test_nobody_commits_while_another_writes(tmp_path: Path) -> None:
    commit_two(tmp_path)
    (tmp_path / "reshard.json").unlink()
    with commit_lock(tmp_path, fcntl.LOCK_SH):
        told = commit_if_complete(tmp_path, identity(2), made_here={0, 1}, any_written=True, already_told=())
        assert told == Differences(notes=(f"{tmp_path} is left to another process to commit, which is at work there",))
        assert (
            commit_if_complete(tmp_path, identity(2), made_here={1}, any_written=True, already_told=()) == Differences()
        )
        assert not (tmp_path / "reshard.json").exists()
    commit_if_complete(tmp_path, identity(2), made_here={0, 1}, any_written=True, already_told=())
    assert (tmp_path / "reshard.json").exists()


def test_commit_waits_for_one_who_is_about_to_be_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit_two(tmp_path)
    with commit_lock(tmp_path, fcntl.LOCK_SH):
        monkeypatch.setattr(journal_commit, "_WAIT_SECONDS", 0.1)
        with pytest.raises(ReshardError, match="being written or committed by another process"):
            commit(tmp_path)
        monkeypatch.setattr(journal_commit, "_WAIT_SECONDS", HANG_SECONDS)
        thread = threading.Thread(target=commit, args=(tmp_path,))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
    thread.join(HANG_SECONDS)
    assert not thread.is_alive()


def test_who_writes_waits_for_one_who_commits(tmp_path: Path) -> None:
    commit_two(tmp_path)
    with commit_lock(tmp_path, fcntl.LOCK_EX):
        thread = threading.Thread(target=write, args=(tmp_path, 2, 0))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive() and (tmp_path / "reshard.json").exists()
    thread.join(HANG_SECONDS)
    assert not thread.is_alive() and not (tmp_path / "reshard.json").exists()


def in_fork(do: Callable[[], object]) -> int:
    """Start a process that does `do` and ends; return its id."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            do()
            code = 0
        finally:
            os._exit(code)
    return process


def test_commit_while_a_target_is_written(tmp_path: Path) -> None:
    commit_two(tmp_path)
    begun, begin = os.pipe()

    def hold() -> None:
        journal = Journal(tmp_path, identity(2), resume=False, overwrite=True)
        with journal.writing(1, tmp_path / "rank_1" / "net_1.ckpt", EVIDENCE):
            os.write(begin, b"1")
            time.sleep(600)

    process = in_fork(hold)
    try:
        os.read(begun, 1)
        finished = run_here("commit", tmp_path)
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(begun)
        os.close(begin)
    assert finished.code == 4 and "1 of 2 targets are not complete: 1\n" in finished.err
    assert "is writing" in finished.err


@pytest.mark.parametrize("turn", few(1, range(30)))
def test_of_tasks_that_end_at_one_moment_one_commits(tmp_path: Path, turn: int) -> None:
    ranks = 4
    begin, go = os.pipe()

    def task(rank: int) -> None:
        os.close(go)
        os.read(begin, 1)  # all at once, when the other end is closed
        write(tmp_path, ranks, rank)
        commit_if_complete(tmp_path, identity(ranks), made_here={rank}, any_written=True, already_told=())

    processes = [in_fork(lambda rank=rank: task(rank)) for rank in range(ranks)]
    os.close(begin)
    os.close(go)
    assert [os.waitpid(process, 0)[1] for process in processes] == [0] * ranks
    assert (tmp_path / "reshard.json").exists()


@pytest.mark.slow
def test_a_run_that_has_failed_at_what_another_has_made(c: Conversion, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes last commits, whatever it has made itself: the other could not, since targets were missing."""
    write_target = Writer._write_target

    def write(self: Writer, rank: int, *more: Any) -> Generator[float, None, Outcome]:
        if rank == 0:
            transform_apart(c, "--rank", "0", check=True)
            assert not (c.dst / "reshard.json").exists()
            raise TargetError("target rank 0 is being written by another process")
        return (yield from write_target(self, rank, *more))

    monkeypatch.setattr(Writer, "_write_target", write)
    assert "target rank 0 is being written" in c.refused(code=4)
    assert json.loads((c.dst / "reshard.json").read_text())["target_ranks"] == 2


@pytest.mark.slow
def test_a_kill_at_any_instant(c: Conversion) -> None:
    """A committed checkpoint is made anew, killed before the n-th thing that it does to the folder, and resumed."""
    c.done()
    text, content = record(c).read_bytes(), shards(c.dst)
    arguments = c.arguments("transform", "--progress", "none", "--overwrite")
    withdrawn = 0
    numbers = instants(arguments, c.dst)
    for number in [*numbers, 0]:
        assert killed_before(arguments, c.dst, number) == (number > 0)
        if record(c).exists():
            assert shards(c.dst) == content and record(c).read_bytes() == text
            for rank in range(2):
                assert TargetRecord.read(c.dst / ".reshard_mpi", rank) is not None
        withdrawn += not record(c).exists()
        if number:
            c.done("transform", "--resume")
        assert shards(c.dst) == content and record(c).read_bytes() == text
        assert {path.name for path in c.dst.iterdir()} == {".reshard_mpi", "rank_0", "rank_1", "reshard.json"}
    assert len(numbers) > 20 and withdrawn > 15


# Processes that run together


@by_one_mpi
@pytest.mark.parametrize("ranks", [2, 5])
def test_ranks_of_one_job(tmp_path: Path, mpi: MPI, ranks: int) -> None:
    c = four_targets(tmp_path)
    whole = c.but(dst=tmp_path / "whole")
    whole.done()
    finished = transform_apart(c, mpi=mpi, ranks=ranks)
    assert finished.code == 0, finished
    assert record(c).read_bytes() == record(whole).read_bytes()


@by_one_mpi
def test_ranks_of_one_job_that_complete_what_does_not_belong_together(tmp_path: Path, mpi: MPI) -> None:
    c = four_targets(tmp_path)
    c.done("transform", "--rank", "0", "--rank", "1")
    for rank in (2, 3):  # which only the other targets are made from
        c.rewrite(rank, {"global_step": np.array(8, np.int32)})
    finished = transform_apart(c, "--resume", mpi=mpi)
    assert finished.code == 3 and finished.err.count("different moments") == 1, finished
    assert c.written(3).exists() and not record(c).exists()


@pytest.mark.slow
def test_array_tasks_at_once(tmp_path: Path) -> None:
    c = four_targets(tmp_path)
    tasks = [
        subprocess.Popen([*COMMAND, *c.arguments("transform", "--part", f"{part}/4")], env=clean_environment())
        for part in range(4)
    ]
    assert [task.wait(HANG_SECONDS) for task in tasks] == [0] * 4
    assert [target["rank"] for target in json.loads(record(c).read_text())["targets"]] == [0, 1, 2, 3]


def test_nothing_is_made_of_a_part_of_nothing(c: Conversion) -> None:
    assert c.run("transform", "--part", "2/3").ended == (0, "")
    assert not c.dst.exists()
