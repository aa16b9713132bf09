"""A newer checkpoint that appears in the source while a run is under way: never mixed with the older one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.checkpoints import as_read, expected_rank, read_shard, write_shard
from support.command_line import COMMAND, done, refused, run_here
from support.conversions import TENSORS, Conversion, four_targets, listing
from support.examples import few
from support.launch import MPI, by_one_mpi, mpirun_command
from support.processes import run_command

from reshard_mpi.journal.run_records import RunIdentity

OLD, NEW = "net-1_100.ckpt", "net-1_200.ckpt"


@pytest.fixture
def c(tmp_path: Path) -> Conversion:
    """Targets 0 and 1 are made from the source ranks 0 and 1, the others from 2 and 3."""
    c = four_targets(tmp_path)
    for rank in range(4):
        c.shard(rank).rename(c.shard(rank).with_name(OLD))
    return c


def save_newer(c: Conversion) -> None:
    """Save other values beside the old ones."""
    for rank in range(4):
        arrays = expected_rank(c.source, {**c.tensors, "w": TENSORS["w"] + 1}, rank)
        write_shard(arrays, c.shard(rank).with_name(NEW))


def assert_old(c: Conversion) -> None:
    """All targets are of the older checkpoint, and committed."""
    for rank in range(4):
        assert read_shard(c.written(rank)) == as_read(expected_rank(c.target, c.tensors, rank))
    sources = json.loads((c.dst / "reshard.json").read_text())["sources"]
    assert {Path(source["file"]).name for source in sources} == {OLD}


FIRST_AND_LAST = [
    (["--rank", "0-1"], ["--resume"]),
    (["--rank", "0-1"], ["--rank", "2-3"]),
    (["--part", "0/2"], ["--part", "1/2"]),
    (["--part", "0/2", "--resume"], ["--part", "1/2", "--resume", "--jobs", "2"]),
    (["--part", "0/2", "--select", "net*"], ["--part", "1/2", "--select", "net*"]),
]


@pytest.mark.parametrize(("first", "last"), few(1, FIRST_AND_LAST), ids=" ".join)
def test_a_run_goes_on_with_what_it_has_begun_with_or_not_at_all(
    c: Conversion, first: list[str], last: list[str]
) -> None:
    assert c.run("transform", *first).ended == (0, "")
    save_newer(c)
    before = listing(c.dst)
    said = c.refused("transform", *last)
    assert listing(c.dst) == before
    assert "error: the target folder holds a run from another checkpoint of the same source" in said
    assert f"expected: {OLD}, which the run that began this folder has chosen" in said
    assert f"got: {NEW}, chosen now in {c.src}" in said
    assert f"--select {OLD}; " in said and "--overwrite" in said
    assert "2 of 4 targets are not complete" in refused("commit", c.dst, code=4)
    others = [option for option in last if option not in ("--select", "net*")]
    c.done("transform", *others, "--select", OLD)  # the remedy
    c.done("transform", "--resume", "--select", OLD)
    assert_old(c)


def test_the_run_may_begin_again_with_the_newer_one(c: Conversion) -> None:
    c.done("transform", "--rank", "0-1")
    save_newer(c)
    c.done("transform", "--overwrite", "--rank", "2-3")
    assert "target rank 0 is of another run" in refused("commit", c.dst, code=4)
    c.done("transform", "--overwrite")
    sources = json.loads((c.dst / "reshard.json").read_text())["sources"]
    assert {Path(source["file"]).name for source in sources} == {NEW}


@pytest.mark.slow
def test_what_chooses_the_same_is_the_same_run(c: Conversion) -> None:
    for number, options in enumerate(([], ["--select", "*_100.ckpt"], ["--select", OLD], ["--select", "*"])):
        c.done("transform", "--rank", str(number), *options)
    assert_old(c)
    recorded = json.loads((c.dst / ".reshard_mpi" / "run.json").read_text())
    assert recorded["chosen"] == OLD and "select" not in recorded
    assert "--select" not in run_here("inspect", c.dst).out
    other = c.but(dst=c.folder / "other")
    other.done("transform", "--select", "*_1*")
    assert "--select '*_1*'" in run_here("inspect", other.dst).out


def test_a_folder_of_an_earlier_version_is_committed_but_not_added_to(c: Conversion) -> None:
    """It has not recorded which files were chosen."""
    c.done()
    as_earlier_version(c, None)
    (c.dst / "reshard.json").unlink()
    said = c.refused("transform", "--resume")
    assert "the target folder holds another run" in said
    assert "no record of which files were chosen (an earlier version)" in said and "--overwrite" in said
    done("commit", c.dst)
    assert "4 of 4 targets complete" in run_here("inspect", c.dst).out
    as_earlier_version(c, "net*")
    assert "--select 'net*'" in run_here("inspect", c.dst).out


def as_earlier_version(c: Conversion, select: str | None) -> None:
    """Have the target folder say what version 0.1 wrote: the glob as a setting, and no moments of the choice."""
    state = c.dst / ".reshard_mpi"
    recorded = json.loads((state / "run.json").read_text())
    facts = {name: value for name, value in recorded.items() if name not in ("chosen", "digest")}
    files = {name: facts.pop(name) for name in ("src_strategy_file", "dst_strategy_file")}
    identity = RunIdentity({**facts, "select": select})
    (state / "run.json").write_text(json.dumps({**identity.facts, **files, "digest": identity.digest}))
    for path in state.glob("rank_*.json"):
        record = json.loads(path.read_text())
        moments = [moment for moment in record["moments"] if moment["name"] != "chosen files"]
        record.pop("check", None)
        path.write_text(json.dumps({**record, "digest": identity.digest, "moments": moments}))


def test_records_of_two_choices_are_not_committed(c: Conversion) -> None:
    """Even if they say that they are of one run."""
    c.done()
    path = c.dst / ".reshard_mpi" / "rank_3.json"
    record = path.read_text()
    assert record.count(f'"value": "{OLD}"') == 1
    path.write_text(record.replace(f'"value": "{OLD}"', f'"value": "{NEW}"'))
    said = refused("commit", c.dst)
    assert "not all have chosen the same checkpoint in the source" in said
    assert f"expected: {OLD}" in said and f"got: {NEW}" in said and "--overwrite" in said
    assert (c.dst / "reshard.json").exists()  # the targets are those that were committed


@pytest.mark.parametrize("form", few(1, ["hf", "dcp"]))
def test_a_folder_with_an_index_that_is_replaced(c: Conversion, form: str) -> None:
    folder = c.folder / form
    whole = c.but(dst=folder, dst_strategy=None)
    whole.done("transform", "--to", form)
    from_folder = c.but(src=folder, src_strategy=None)
    from_folder.done("transform", "--rank", "0-1", "--to", "ckpt")
    save_newer(c)
    whole.done("transform", "--to", form, "--overwrite")
    before = listing(c.dst)
    for rank in ("2", "3"):
        finished = from_folder.run("transform", "--rank", rank, "--to", "ckpt", "--resume")
        problem = f"a source was changed between the targets of ranks 0 and {rank}"
        assert finished.code == 3 and problem in finished.err and "--overwrite" in finished.err, finished
        assert listing(c.dst) == before
    from_folder.done("transform", "--overwrite", "--to", "ckpt")


# In the middle of one run

# Of several processes of a run, those for which the condition holds look when the newer checkpoint is there.
STAND_IN = """
import os
from reshard_mpi.checkpoints import discovery

def looks_first():
    try:
        os.close(os.open({mark!r}, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True

find = discovery.find_shards

def stand_in(path, select=None, **named):
    if path == {src!r}:
        select = {new!r} if {is_late} else {old!r}
    return find(path, select, **named)

discovery.find_shards = stand_in
"""
IS_SECOND_RANK = "'1' in (os.environ.get('PMI_RANK'), os.environ.get('OMPI_COMM_WORLD_RANK'))"


def looking(c: Conversion, is_late: str) -> dict[str, str]:
    """Return the environment in which processes look early or late."""
    folder = c.folder / "stand_in"
    folder.mkdir()
    names = {"src": str(c.src), "mark": str(c.folder / "first"), "new": NEW, "old": OLD}
    (folder / "sitecustomize.py").write_text(STAND_IN.format(is_late=is_late, **names))
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(":")}


@by_one_mpi
@pytest.mark.parametrize("command", ["transform", "plan", "verify", "verify alone", "diff"])
def test_ranks_that_have_chosen_differently(c: Conversion, mpi: MPI, command: str) -> None:
    if command in ("verify", "diff"):
        c.done()
    save_newer(c)
    if command == "verify alone":
        arguments = ["verify", str(c.src)]
    elif command == "diff":
        arguments = ["diff", str(c.src), str(c.dst), "--src-strategy", str(c.src_strategy)]
        arguments += ["--dst-strategy", str(c.dst_strategy)]
    else:
        arguments = c.arguments(command)
    before = listing(c.dst)
    finished = run_command(mpirun_command(mpi, 3, [*COMMAND, *arguments]), env=looking(c, IS_SECOND_RANK))
    assert finished.code == 3 and listing(c.dst) == before, finished
    assert finished.err.count("error: not all have chosen the same checkpoint in the source") == 1, finished
    assert f"expected: {OLD}" in finished.err and f"got: {NEW}" in finished.err


@pytest.mark.slow
def test_workers_that_have_chosen_differently(c: Conversion) -> None:
    """They are forked, and each looks for itself."""
    save_newer(c)
    finished = run_command([*COMMAND, *c.arguments("transform", "--jobs", "2")], env=looking(c, "not looks_first()"))
    assert finished.code == 3 and "not all have chosen the same checkpoint" in finished.err, finished
    assert not c.dst.exists()
