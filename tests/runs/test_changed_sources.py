"""Sources that change between two parts of one run, or in the middle of one: noticed, named, never mixed."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import expected_rank, read_shard, write_shard
from support.command_line import done, refused, run_here
from support.conversions import TENSORS, Conversion, listing, make, transform_apart, transform_by_function
from support.examples import few
from support.processes import Finished

import reshard_mpi
from reshard_mpi import formats
from reshard_mpi.engine import regions
from reshard_mpi.journal import commit
from reshard_mpi.journal.provenance import FirstLooks
from reshard_mpi.processes.host import ONE_THREAD
from reshard_mpi.runs import target_writer


def later(c: Conversion, rank: int) -> None:
    """Give a source shard another time of modification, as one of the same size that is saved over it has."""
    status = c.shard(rank).stat()
    os.utime(c.shard(rank), ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def test_a_record_says_which_files_a_target_was_made_from(c: Conversion) -> None:
    c.done()
    for rank in range(2):
        record = json.loads((c.dst / ".reshard_mpi" / f"rank_{rank}.json").read_text())
        assert record["sources"]["folder"] == str(c.src)
        assert record["sources"]["files"] == [
            [f"rank_{source}/checkpoint_{source}.ckpt", status.st_size, status.st_mtime_ns]
            for source in (2 * rank, 2 * rank + 1)
            for status in (c.shard(source).stat(),)
        ]


@pytest.mark.parametrize("how", few(1, ["size", "time"]))
@pytest.mark.parametrize("command", few(1, ["transform", "plan"]))
def test_a_finished_target_whose_source_is_another_now(c: Conversion, how: str, command: str) -> None:
    c.done("transform", "--rank", "0")
    before = listing(c.dst)
    if how == "size":
        c.rewrite(1, {"more": np.array(1)})
    else:
        later(c, 1)
    said = c.refused(command, "--resume")
    assert "target rank 0 was made from sources that have changed since" in said
    assert "expected: rank_1/checkpoint_1.ckpt of " in said and f"where: {c.src}" in said
    assert "--overwrite" in said and listing(c.dst) == before
    c.done("transform", "--overwrite")
    c.done("transform", "--resume")


def test_several_sources_that_are_others_now(tmp_path: Path) -> None:
    c = make(tmp_path).but(dst_strategy=None)  # one target of all
    c.done()
    for rank in range(2):
        later(c, rank)
    assert "and 1 more: rank_1/checkpoint_1.ckpt\n" in c.refused("transform", "--resume")


def test_a_finished_target_whose_source_is_gone(c: Conversion) -> None:
    c.done("transform", "--rank", "0")
    c.remove(0)
    warning = f"warning: 3 of 4 ranks are there: no shard of rank 0 in {c.src}\n"
    assert c.run("transform", "--resume").ended == (0, warning)
    assert (c.dst / "reshard.json").exists()


def test_one_file_as_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    c = make(tmp_path).but(dst_strategy=None)
    c.done()
    monkeypatch.chdir(c.written(0).parent)
    from_one_file = c.but(
        src=Path(c.written(0).name), dst=tmp_path / "two", src_strategy=None, dst_strategy=c.dst_strategy
    )
    from_one_file.done()
    facts = json.loads((from_one_file.dst / "reshard.json").read_text())
    assert facts["sources"] == [{"file": "checkpoint_0.ckpt", "size_bytes": c.written(0).stat().st_size}]
    monkeypatch.chdir(tmp_path)
    from_one_file.but(src=c.written(0)).done("transform", "--resume")
    os.utime(c.written(0), ns=(1, 1))
    assert "have changed since" in from_one_file.but(src=c.written(0)).run("transform", "--resume").err


def test_targets_that_were_made_from_two_states_of_a_file_are_not_committed(c: Conversion) -> None:
    c.remove(0, 1)  # so both targets are made from the others
    c.done("transform", "--part", "0/2")
    later(c, 3)
    said = c.refused("transform", "--part", "1/2")
    assert "a source was changed between the targets of ranks 0 and 1" in said
    assert "rank_3/checkpoint_3.ckpt of " in said and "--overwrite" in said
    assert not c.written(1).exists()  # refused before it is written
    c.done("transform", "--overwrite", "--part", "1/2")  # as other tasks will do for theirs
    assert "a source was changed between the targets of ranks 0 and 1" in refused("commit", c.dst)
    assert not (c.dst / "reshard.json").exists()
    c.done("transform", "--overwrite")


@pytest.mark.slow
def test_a_large_record_is_left_to_the_commit(c: Conversion, monkeypatch: pytest.MonkeyPatch) -> None:
    c.remove(0, 1)
    monkeypatch.setattr(commit, "_MOST_READ_EARLY_BYTES", 10)
    c.done("transform", "--part", "0/2")
    later(c, 3)
    assert "a source was changed between the targets of ranks 0 and 1" in c.refused("transform", "--part", "1/2")
    assert c.written(1).exists() and not (c.dst / "reshard.json").exists()


def test_a_target_whose_file_is_gone_says_nothing(c: Conversion) -> None:
    c.done("transform", "--rank", "0")
    saved_again(c)
    c.written(0).unlink()
    c.done("transform", "--rank", "1")
    assert c.run("transform", "--rank", "0").code == 0 and (c.dst / "reshard.json").exists()


def said_by(c: Conversion, *, journal: bool) -> str:
    """Convert by the command line, which keeps a journal, or by the function without one; return what it says."""
    if journal:
        return c.refused(code=4)
    with pytest.raises(reshard_mpi.errors.TransformError) as error:
        transform_by_function(c)
    return str(error.value)


@pytest.mark.parametrize("journal", few(1, [True, False]))
def test_a_source_that_is_saved_over_while_it_is_read(
    c: Conversion, monkeypatch: pytest.MonkeyPatch, journal: bool
) -> None:
    fill = target_writer.write_shard

    def save_over(target, **by_name):
        filled = yield from fill(target, **by_name)
        if target.plan.target_rank == 1:
            later(c, 3)
        return filled

    with monkeypatch.context() as patched:
        patched.setattr(target_writer, "write_shard", save_over)
        message = said_by(c, journal=journal)
    assert not journal or "1 of 2 targets failed" in message
    assert "sources of target rank 1 were changed while it was written" in message and "rank_3/checkpoint_3" in message
    assert list(c.dst.glob("rank_*/*")) == [c.written(0)]
    c.done("transform", "--resume" if journal else "--overwrite")
    assert read_shard(c.written(1)) == c.expected(1)


def in_place(c: Conversion) -> None:
    """Write other values into a source shard, and set its time of modification back, as `rsync --inplace -t` may."""
    status = c.shard(3).stat()
    with c.shard(3).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    os.utime(c.shard(3), ns=(status.st_atime_ns, status.st_mtime_ns))


def other_link(c: Conversion) -> None:
    """Have the link that is given as the source lead to another checkpoint of the same structure."""
    link = c.folder / "latest"
    link.unlink()
    link.symlink_to("other")


@pytest.mark.parametrize("change", few(1, [in_place, other_link]))
@pytest.mark.parametrize("journal", [True, False])
def test_what_only_a_look_at_the_same_way_and_time_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Conversion], None], journal: bool
) -> None:
    original = make(tmp_path)
    shutil.copytree(original.src, tmp_path / "other")
    os.utime(tmp_path / "other" / "rank_2" / original.shard(2).name, ns=(1, 1))
    (tmp_path / "latest").symlink_to(original.src.name)
    c = original.but(src=tmp_path / "latest")
    fill = target_writer.write_shard

    def change_then_fill(target, **by_name):
        if target.plan.target_rank == 1:
            change(c)
        return fill(target, **by_name)

    monkeypatch.setattr(target_writer, "write_shard", change_then_fill)
    message = said_by(c, journal=journal)
    assert "sources of target rank 1 were changed while it was written" in message, message
    assert ("but written or replaced since" in message) == (change is in_place)
    assert list(c.dst.glob("rank_*/*")) == [c.written(0)]


# Targets that have no source file in common


def saved_again(c: Conversion) -> None:
    """Save other weights of the same step over the source."""
    for rank in range(4):
        c.rewrite(rank, {"w": expected_rank(c.source, {"w": TENSORS["w"] + 1}, rank)["w"]})


def test_targets_of_two_states_are_not_committed(c: Conversion) -> None:
    c.done("transform", "--rank", "0")
    saved_again(c)
    said = c.refused("transform", "--rank", "1", "--resume")
    assert "other targets were made from what was saved after target rank 0 was made" in said
    assert "expected: rank_0/checkpoint_0.ckpt of " in said and "--overwrite" in said
    assert not c.written(1).exists()  # refused before it is written
    c.done("transform", "--rank", "1", "--overwrite")
    assert "saved after target rank 0" in run_here("commit", c.dst).err and not (c.dst / "reshard.json").exists()
    assert c.run("transform", "--overwrite").code == 0 and (c.dst / "reshard.json").exists()


def test_what_is_saved_when_all_targets_are_made_is_no_concern(c: Conversion) -> None:
    for rank in ("0", "1"):
        c.done("transform", "--rank", rank)
    (c.dst / "reshard.json").unlink()
    saved_again(c)
    done("commit", c.dst)


def copy_of_source(c: Conversion, name: str) -> Path:
    """Return a folder of the same structure with other weights, saved before now."""
    original, other = c.folder / "kept", c.folder / name
    shutil.copytree(c.src, original)
    saved_again(c)
    c.src.rename(other)
    original.rename(c.src)
    return other


@pytest.mark.parametrize("verify", [(), ("--verify",)])
def test_a_source_that_is_exchanged_for_an_older_one_between_two_targets(
    c: Conversion, tmp_path: Path, verify: tuple[str, ...]
) -> None:
    other = copy_of_source(c, "other")
    c.done("transform", "--rank", "0")
    c.src.rename(tmp_path / "was")
    other.rename(c.src)
    said = c.refused("transform", "--rank", "1", *verify)
    assert not c.written(1).exists()
    assert "the source of target rank 0 is another one now, that of target rank 1 is not" in said
    c.done("transform", "--rank", "1", "--overwrite")
    assert "the source of target rank 0 is another one now" in refused("commit", c.dst)
    assert not (c.dst / "reshard.json").exists()


def test_the_source_of_all_targets_may_be_exchanged_for_an_older_one(c: Conversion, tmp_path: Path) -> None:
    other = copy_of_source(c, "other")
    c.done()
    (c.dst / "reshard.json").unlink()
    c.src.rename(tmp_path / "was")
    other.rename(c.src)
    done("commit", c.dst)


@pytest.mark.parametrize("way", few(2, ["transform", "function", "by_rank", "unified"]))
@pytest.mark.parametrize("read", few(1, [1, 2, 3]))
def test_a_source_that_is_replaced_when_its_structure_has_been_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, read: int
) -> None:
    c = make(tmp_path).but(dst_strategy=None)
    other = copy_of_source(c, "other")
    count = 0
    ckpt = formats.by_name("ckpt")
    locate = ckpt.locate

    def locate_then_replace(path: str, *like: object) -> object:
        nonlocal count
        manifest = locate(path, *like)
        if Path(path).is_relative_to(c.src):
            count += 1
            if count == (read + 4 if way == "unified" else read):  # which plans twice, each time from a look of its own
                for rank in range(4):
                    (other / c.shard(rank).relative_to(c.src)).replace(c.shard(rank))
        return manifest

    monkeypatch.setattr(ckpt, "locate", locate_then_replace)
    if way == "transform":
        message = c.run().err
    else:
        with pytest.raises(reshard_mpi.errors.ReshardError) as error:
            if way == "function":
                transform_by_function(c)
            elif way == "by_rank":
                shards = {rank: c.shard(rank) for rank in range(4)}
                reshard_mpi.transform_checkpoint_by_rank(0, shards, c.written(0), c.src_strategy)
            else:
                reshard_mpi.unified_safetensors(c.src, c.src_strategy, c.dst, max_process_num=1)
        message = str(error.value)
    assert count >= read
    assert "were changed while it was written" in message and "checkpoint_0.ckpt of" in message, message
    assert not [*c.dst.rglob("*.ckpt"), *c.dst.rglob("part*"), *c.dst.rglob("param_name_map.json")]


def test_a_source_that_is_written_to_while_its_arrays_are_read(c: Conversion, monkeypatch: pytest.MonkeyPatch) -> None:
    read = regions.gather

    def read_then_change(*arguments: object) -> None:
        read(*arguments)
        in_place(c)

    monkeypatch.setattr(regions, "gather", read_then_change)
    with pytest.raises(reshard_mpi.errors.DisagreementError, match="replaced after the checkpoint was opened"):
        reshard_mpi.load_rank(1, c.src, c.src_strategy, c.dst_strategy)


# The leader of a shared target plans when another process, which fills a part of it, has planned and the source is
# another one already.
LATE_LEADER = """
import os, time
from pathlib import Path
from reshard_mpi.runs import scheduling, target_plans

scheduling.CUT_BYTES = 16
make = target_plans.TargetPlans.make
src, other, done = map(Path, {paths!r})

def make_late(process, *arguments, **options):
    comm = process.comm
    while comm.rank == 0 and comm.size > 1 and not done.exists():
        time.sleep(0.01)
    plans = make(process, *arguments, **options)
    if comm.rank == 1:
        for path in other.rglob("*.ckpt"):
            path.replace(src / path.relative_to(other))
        done.touch()
    return plans

target_plans.TargetPlans.make = make_late
"""


def transform_by_a_late_leader(c: Conversion, other: Path) -> Finished:
    """Convert by two workers, of which one plans from the source and the other from `other` in its place."""
    late = c.folder / "late"
    late.mkdir()
    paths = (str(c.src), str(other), str(c.folder / "done"))
    (late / "sitecustomize.py").write_text(LATE_LEADER.format(paths=paths))
    return transform_apart(c, "--jobs", "2", env={"PYTHONPATH": str(late), **ONE_THREAD})


@pytest.mark.slow
def test_a_process_that_fills_a_part_has_looked_at_another_source(tmp_path: Path) -> None:
    c = make(tmp_path).but(dst_strategy=None)
    other = copy_of_source(c, "other")
    finished = transform_by_a_late_leader(c, other)
    assert finished.code == 4 and "were changed while it was written" in finished.err, finished
    assert not c.written(0).exists()


@pytest.mark.slow
def test_a_process_that_fills_a_part_has_planned_other_tensors(tmp_path: Path) -> None:
    c = make(tmp_path).but(dst_strategy=None)
    other = copy_of_source(c, "other")
    for rank in range(4):
        write_shard({"w": -c.arrays(rank)["w"]}, other / c.shard(rank).relative_to(c.src))
    finished = transform_by_a_late_leader(c, other)
    assert finished.code == 4 and "processes have planned target rank 0 differently" in finished.err, finished
    assert not c.written(0).exists()


def test_sources_that_are_gone_when_others_are_newer(c: Conversion) -> None:
    c.done("transform", "--rank", "0")
    saved_again(c)
    c.remove(0, 1)  # what target 0 was made of
    said = c.refused("transform", "--rank", "1")
    assert "saved after target rank 0 was made" in said
    assert "rank_0/checkpoint_0.ckpt is not there any more" in said and not c.written(1).exists()


def wait_for_clock(c: Conversion, rank: int) -> None:
    """Wait until what is written has a later time than a target, by the clock of its file system."""
    clock = c.folder / "clock"
    clock.touch()
    while clock.stat().st_ctime_ns <= c.written(rank).stat().st_mtime_ns:
        clock.write_bytes(b"")


@pytest.mark.parametrize("overwrite", few(1, [False, True]))
def test_a_backup_with_older_times_is_being_restored(c: Conversion, overwrite: bool) -> None:
    """What target 0 was made of is not there yet, and what target 1 is made of looks as if it had always been there."""
    backup = copy_of_source(c, "backup")
    c.done("transform", "--rank", "0")
    shutil.rmtree(c.src)
    wait_for_clock(c, 0)
    for rank in (2, 3):
        shutil.copytree(backup / f"rank_{rank}", c.src / f"rank_{rank}")
    problem = "a source was changed between the targets of ranks 0 and 1\n  expected: rank_2/checkpoint_2.ckpt of "
    if not overwrite:
        assert problem in c.refused("transform", "--rank", "1")
        assert not c.written(1).exists()
        return
    c.done("transform", "--rank", "1", "--overwrite")
    assert problem in refused("commit", c.dst)
    assert not (c.dst / "reshard.json").exists()


def test_sources_that_are_gone_when_others_have_got_other_rights(c: Conversion) -> None:
    """It changes the time of their status, but when both targets were made."""
    for rank in ("0", "1"):
        c.done("transform", "--rank", rank)
    (c.dst / "reshard.json").unlink()
    c.remove(0, 1)
    wait_for_clock(c, 1)
    for rank in (2, 3):
        c.shard(rank).chmod(0o400)
    done("commit", c.dst)
    assert (c.dst / "reshard.json").exists()


@pytest.mark.parametrize("journal", [True, False])
def test_a_source_that_is_written_to_and_then_taken_away_while_it_is_read(
    c: Conversion, monkeypatch: pytest.MonkeyPatch, journal: bool
) -> None:
    fill = target_writer.write_shard

    def change_fill_and_take_away(target, **by_name):
        if target.plan.target_rank != 1:
            return (yield from fill(target, **by_name))
        in_place(c)
        filled = yield from fill(target, **by_name)
        c.src.rename(c.folder / "elsewhere")
        return filled

    monkeypatch.setattr(target_writer, "write_shard", change_fill_and_take_away)
    message = said_by(c, journal=journal)
    assert "sources of target rank 1 were changed while it was written" in message and "got: nothing" in message, (
        message
    )
    assert list(c.dst.glob("rank_*/*")) == [c.written(0)]


@pytest.mark.parametrize("left", few(1, ["", "0", "01", "2", "23"]))
def test_targets_of_a_restored_backup_beside_others_whose_sources_are_gone(
    c: Conversion, tmp_path: Path, left: str
) -> None:
    """The backup has the times at which its files were saved, which are earlier than all targets.

    left: the ranks of it that are not cleared away.
    """
    shutil.copytree(c.src, tmp_path / "backup")
    saved_again(c)
    c.done("transform")
    shutil.rmtree(c.src)
    shutil.copytree(tmp_path / "backup", c.src)
    c.done("transform", "--rank", "0", "--overwrite")
    c.remove(*(rank for rank in range(4) if str(rank) not in left))
    assert "a source was changed between the targets of ranks 0 and 1" in refused("commit", c.dst)
    assert not (c.dst / "reshard.json").exists()


@pytest.mark.parametrize("how", few(1, ["--resume", "--overwrite"]))
@pytest.mark.parametrize("more", few(1, [0, 1]))
def test_nodes_that_have_only_what_their_targets_need(c: Conversion, how: str, more: int) -> None:
    """What one node has copied and another has not tells nothing; that lies there as it was saved.

    more: how many ranks the second node has that the first has too.
    """
    home = c.src.rename(c.folder / "home")
    for target, needed in (("0", (0, 1)), ("1", range(2 - more, 4))):
        shutil.rmtree(c.src, ignore_errors=True)
        for rank in needed:
            shutil.copytree(home / f"rank_{rank}", c.src / f"rank_{rank}")
        assert c.run("transform", "--rank", target, how).code == 0
    shutil.rmtree(c.src)
    done("commit", c.dst)


def test_a_shard_that_is_restored_between_two_targets(c: Conversion) -> None:
    """Target 0 has seen it as it was when it was cut, but all that both were made from lies there together."""
    whole, status = c.shard(3).read_bytes(), c.shard(3).stat()
    c.shard(3).write_bytes(whole[:100])
    c.done("transform", "--rank", "0")
    c.shard(3).write_bytes(whole)
    os.utime(c.shard(3), ns=(status.st_atime_ns, status.st_mtime_ns))
    c.done("transform", "--resume")
    assert (c.dst / "reshard.json").exists()
    (c.dst / "reshard.json").unlink()
    done("commit", c.dst)


def test_processes_look_at_the_same_few_files_of_a_large_source(tmp_path: Path) -> None:
    files = []
    for rank in range(100):
        files.append(tmp_path / f"rank_{rank}" / "net.ckpt")
        files[-1].parent.mkdir()
        files[-1].write_bytes(b"")
    paths = [str(file) for file in files]
    seen = FirstLooks(str(tmp_path)).sources(paths[:1], paths).seen
    by_another_way = FirstLooks(os.path.relpath(tmp_path)).sources([], [os.path.relpath(path) for path in paths[::-1]])
    assert len(set(seen)) == 32 and by_another_way.seen == seen
    part = FirstLooks(str(tmp_path)).sources([], paths[:50]).seen
    assert len(part) == 32 and {state for state in seen if str(tmp_path / state.path) in paths[:50]} <= {*part}
    gone = tmp_path / seen[0].path
    gone.unlink()
    assert FirstLooks(str(tmp_path)).sources([], paths).seen == seen[1:]


@pytest.mark.parametrize("verify", [(), ("--verify",)])
def test_sources_that_cannot_be_looked_at_any_more(c: Conversion, verify: tuple[str, ...]) -> None:
    """A file lies in the place of their folder, such as an archive of it; that is as if they were gone."""
    c.done("transform", *verify)
    (c.dst / "reshard.json").unlink()
    shutil.rmtree(c.src)
    c.src.write_bytes(b"packed")
    if verify:
        done("verify", c.dst)
    done("transform", c.dst, c.folder / "again", "--src-strategy", c.dst_strategy, "--to", "hdf5")
    done("commit", c.dst)


def test_a_source_whose_host_has_a_clock_that_is_ahead(c: Conversion) -> None:
    """Its targets seem older than what they were made of."""
    for path in c.src.rglob("*.ckpt"):
        os.utime(path, ns=(time.time_ns() + 60 * 10**9,) * 2)
    c.done("transform")
    (c.dst / "reshard.json").unlink()
    shutil.rmtree(c.src)
    done("commit", c.dst)
    assert (c.dst / "reshard.json").exists()
