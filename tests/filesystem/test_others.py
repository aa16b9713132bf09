"""Others who may write to the target folder: nothing of theirs, or outside it, is opened, cut short or replaced.

What is promised to whom is in the guide, on the page "promises" ("Folders that others may write to").
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.command_line import run_apart, run_here
from support.conversions import Conversion, assert_right, listing, make, transform_apart
from support.examples import few

import reshard_mpi
from reshard_mpi.errors import TargetError
from reshard_mpi.journal import target_journal

PRECIOUS = b"somebody else's bytes"
SOMEBODY = 4711
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


def elsewhere(folder: Path) -> Path:
    """Return a folder that has nothing to do with the run, with a checkpoint of somebody in it."""
    for name in ("rank_0", ".reshard_mpi"):
        (folder / "elsewhere" / name).mkdir(parents=True)
    for name in ("private", "rank_0/checkpoint_0.ckpt", ".reshard_mpi/run.json", ".reshard_mpi/rank_0.json"):
        (folder / "elsewhere" / name).write_bytes(PRECIOUS)
    return folder / "elsewhere"


def link(path: Path, to: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(to)


# Links in the places of what is made

LINKED = {
    "run.lock": (".reshard_mpi/run.lock", "private"),
    "commit.lock": (".reshard_mpi/commit.lock", "private"),
    "a target's lock": (".reshard_mpi/rank_0.lock", "private"),
    "a lock that leads nowhere": (".reshard_mpi/rank_0.lock", "not there"),
    "the state": (".reshard_mpi", ".reshard_mpi"),
    "a rank folder": ("rank_0", "rank_0"),
    "a rank folder that leads nowhere": ("rank_0", "not there"),
}


@pytest.mark.parametrize("where", few(1, LINKED))
def test_a_link_in_the_place_of_what_is_made_is_refused_by_name(tmp_path: Path, where: str) -> None:
    c, private = make(tmp_path), elsewhere(tmp_path)
    name, to = LINKED[where]
    link(c.dst / name, private / to)
    before = listing(private)
    for options in ((), ("--overwrite",), ("--resume",), ("--overwrite", "--jobs", "2")):
        said = c.refused("transform", *options)
        assert "a symbolic link is in the place of" in said
        assert str(c.dst / name) in said and "Traceback" not in said
    assert listing(private) == before


@pytest.mark.parametrize("name", ["rank_0", "rank_0/checkpoint_0.ckpt"])
def test_the_functions_follow_no_link_either(tmp_path: Path, name: str) -> None:
    c, private = make(tmp_path), elsewhere(tmp_path)
    link(c.dst / name, private / name)
    before = listing(private)
    paths = (c.src, c.dst, "checkpoint_", c.src_strategy, c.dst_strategy)
    if name == "rank_0":
        with pytest.raises(TargetError, match="a symbolic link is in the place of"):
            reshard_mpi.transform_checkpoints(*paths)
    else:  # whose place the new file takes
        reshard_mpi.transform_checkpoints(*paths)
        assert not (c.dst / name).is_symlink()
        assert_right(c)
    assert listing(private) == before


def test_a_record_that_is_a_link_is_none(c: Conversion, tmp_path: Path) -> None:
    """Neither believed nor written through."""
    c.done()
    record = c.dst / ".reshard_mpi" / "rank_1.json"
    kept = shutil.move(record, tmp_path / "kept.json")
    record.symlink_to(kept)
    before = Path(kept).read_bytes()
    assert "target rank 1 has not been written" in run_here("inspect", c.dst).out
    c.done("transform", "--resume")
    assert not record.is_symlink() and Path(kept).read_bytes() == before
    assert_right(c)


@pytest.mark.slow
def test_what_the_user_names_may_be_links(c: Conversion, tmp_path: Path) -> None:
    """The target folder, as one on a scratch file system, and sources, as a folder of links to a hub's cache."""
    (tmp_path / "scratch").mkdir()
    c.dst.symlink_to(tmp_path / "scratch", target_is_directory=True)
    (tmp_path / "linked").mkdir()
    for folder in c.src.iterdir():
        (tmp_path / "linked" / folder.name).symlink_to(folder)
    c = c.but(src=tmp_path / "linked")
    c.done("transform", "--verify", "--jobs", "7")
    assert_right(c)
    farm = tmp_path / "farm"
    subprocess.run(["cp", "-rs", tmp_path / "scratch", farm], check=True)
    c.but(dst=farm).done("verify")


# Swapped while they are written

SWAP = """
import os
from reshard_mpi.runs import target_writer

write = target_writer.write_shard

def swap(target, **more):
    plan, manifest, _, _ = target
    {before}
    written = yield from write(target, **more)
    {after}
    return written
target_writer.write_shard = swap
"""
PARTIAL = "os.unlink(manifest.path); os.symlink({private!r}, manifest.path)"
FOLDER = (
    "folder = os.path.dirname(manifest.path); os.rename(folder, folder + '.away');"
    " os.symlink({elsewhere!r} + '/rank_0', folder)"
)


# Neither the kind nor the processes have to do with what is swapped, and when.
@pytest.mark.parametrize(
    ("what", "moment", "kind", "jobs"),
    [
        ("partial", "before", "ckpt", "1"),
        ("partial", "after", "hdf5", "3"),
        ("folder", "before", "hdf5", "3"),
        ("folder", "after", "ckpt", "1"),
    ],
)
@pytest.mark.slow
def test_nothing_is_written_where_a_swapped_link_leads(
    tmp_path: Path, what: str, moment: str, kind: str, jobs: str
) -> None:
    c, private = make(tmp_path, kind), elsewhere(tmp_path)
    do = {"partial": PARTIAL, "folder": FOLDER}[what].format(private=str(private / "private"), elsewhere=str(private))
    done = str(tmp_path / "done")
    do = f"if target.plan.target_rank == 0 and not os.path.exists({done!r}): os.mkdir({done!r}); {do}"
    (tmp_path / "stand_in").mkdir()
    steps = {"before": "pass", "after": "pass", moment: do}
    (tmp_path / "stand_in" / "sitecustomize.py").write_text(SWAP.format(**steps))
    before = listing(private)
    path = os.pathsep.join([str(tmp_path / "stand_in"), os.environ.get("PYTHONPATH", "")]).rstrip(":")
    environment = {"PYTHONPATH": path}
    finished = transform_apart(c, "--jobs", jobs, env=environment)
    assert (tmp_path / "done").exists() and "Traceback" not in finished.err, finished
    assert listing(private) == before
    if what == "partial":
        assert finished.code == 4 and "target rank 0 failed;" in finished.err, finished
        assert not c.written(0).exists()
    # A folder that is taken away while it is held open gets its file all the same, and is not found again.
    for name in ("rank_0", "rank_0.away"):
        if (c.dst / name).is_symlink():
            (c.dst / name).unlink()
    c.done("transform", "--resume")
    assert_right(c)


# Of another user


@as_root
@pytest.mark.parametrize("name", [".reshard_mpi", "rank_0", ".reshard_mpi/run.lock", ".reshard_mpi/rank_0.lock"])
def test_what_another_user_has_made_is_refused_by_name(c: Conversion, name: str) -> None:
    path = c.dst / name
    path.parent.mkdir(parents=True)
    path.touch() if path.suffix == ".lock" else path.mkdir(mode=0o777)
    os.chown(path, SOMEBODY, SOMEBODY)
    finished = c.run()
    kind = "a file" if path.suffix == ".lock" else "a folder"
    assert finished.code == 3 and f"{kind} of another user is in the way" in finished.err, finished
    assert f"user {SOMEBODY}" in finished.err and str(path) in finished.err
    assert [file for file in c.dst.rglob("*") if file not in (path, path.parent)] == []


@as_root
def test_a_partial_file_of_another_user_stays(c: Conversion) -> None:
    partial = c.written(1).with_name(f".{c.written(1).name}.0123456789ab.partial")
    partial.parent.mkdir(parents=True)
    partial.write_bytes(PRECIOUS)
    os.chown(partial, SOMEBODY, SOMEBODY)
    said = c.refused()
    assert "a file of another user is in the way" in said
    assert str(partial) in said
    assert partial.read_bytes() == PRECIOUS and not c.written(0).exists()


@as_root
def test_the_target_folder_may_be_of_another_user(c: Conversion) -> None:
    c.dst.mkdir(mode=0o2775)
    os.chown(c.dst, SOMEBODY, SOMEBODY)
    c.done()
    assert_right(c)


# Locks


@contextmanager
def lock_held(path: Path, kind: int = fcntl.LOCK_EX) -> Iterator[int]:
    """Have another process hold a lock, and give its number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    holder = (
        f"import fcntl, sys, time\nfile = open(sys.argv[1], 'a')\nfcntl.flock(file, {kind})\n"
        "print('held', flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", holder, str(path)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"held\n"
            yield process.pid
        finally:
            process.kill()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have locks that others hold waited for for a moment only."""
    monkeypatch.setattr(target_journal, "_BEGIN_SECONDS", 0.2)
    monkeypatch.setattr(target_journal, "_COMMIT_SECONDS", 0.2)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("name", ["run.lock", "commit.lock", "rank_0.lock"])
def test_a_lock_that_others_hold_is_named_and_not_waited_for_without_end(c: Conversion, name: str) -> None:
    path = c.dst / ".reshard_mpi" / name
    with lock_held(path) as pid:
        finished = c.run()
    assert finished.code in (3, 4) and f"held by process {pid}" in finished.err and str(path) in finished.err, finished
    assert not list(c.dst.glob("rank_*/*"))
    c.done("transform", "--resume")
    assert_right(c)


@pytest.mark.usefixtures("impatient")
def test_a_stopped_holder_is_said_to_be_stopped(c: Conversion) -> None:
    with lock_held(c.dst / ".reshard_mpi" / "run.lock") as pid:
        os.kill(pid, signal.SIGSTOP)
        finished = c.run()
    assert finished.code == 3 and f"process {pid} (stopped)" in finished.err, finished


@pytest.mark.parametrize("name", ["run.lock", "commit.lock", "rank_0.lock", "rank_0.json", "run.json"])
def test_a_pipe_is_never_waited_for(c: Conversion, name: str) -> None:
    (c.dst / ".reshard_mpi").mkdir(parents=True)
    os.mkfifo(c.dst / ".reshard_mpi" / name)
    finished = run_apart(*c.arguments())
    if name == "rank_0.json":  # which is none, and is replaced
        assert finished.code == 0, finished
        assert_right(c)
    else:
        assert finished.code == 3 and str(c.dst) in finished.err, finished
