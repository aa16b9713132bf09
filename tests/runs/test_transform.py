"""Runs of several processes: the same bytes whichever, and what happens when one of them fails, dies or is stopped."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from support.cases import Side
from support.command_line import COMMAND, done, run_apart, run_here
from support.conversions import (
    Conversion,
    assert_right,
    four_targets,
    listing,
    of_every_kind,
    resume,
    shards,
    transform_apart,
    transform_by_function,
    write_conversion,
)
from support.examples import few
from support.launch import MPI, RankRun, by_one_mpi, mpirun_command
from support.oracle import RawLayout
from support.processes import Finished, run_command
from support.rank_calls import transform_alone_then_together
from support.stand_ins import doing, refusing

import reshard_mpi
from reshard_mpi.errors import ReshardError
from reshard_mpi.runs import workers

NO_ROOM_FOR_RANK_3 = """
from reshard_mpi.formats import ckpt

reserve = ckpt.reserve

def refuse(fd, path, spec):
    if "/rank_3/" in path:
        raise OSError(28, "No space left on device", path)
    return reserve(fd, path, spec)
ckpt.reserve = refuse
"""


def place(process: int) -> str:
    """Return how a message says which process of a run on this host failed."""
    return f" (process {process} on host {os.uname().nodename})"


# The same bytes


@pytest.fixture(scope="module", params=["ckpt", "hdf5"])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    """A conversion and, as its target, what one process alone makes of it."""
    c = four_targets(tmp_path_factory.mktemp("reference"), request.param)
    assert c.src_strategy is not None and c.dst_strategy is not None
    transform_by_function(c)
    assert_right(c)
    return c


def test_command_line_alone(reference: Conversion, tmp_path: Path) -> None:
    reference.but(dst=tmp_path).done()
    assert shards(tmp_path) == shards(reference.dst)


@pytest.mark.parametrize("cores", [1, 2])
def test_workers_are_started_unless_there_is_one_core(
    reference: Conversion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    def refuse(_: object, jobs: int | None, *__: object) -> None:
        raise ReshardError(f"workers: {jobs}")

    monkeypatch.setattr(workers, "run_with_workers", refuse)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    c = reference.but(dst=tmp_path / "dst")
    finished = run_here("transform", c.src, c.dst, "--src-strategy", c.src_strategy)
    assert ("workers: None" in finished.err) == (cores > 1), finished


def test_jobs(reference: Conversion, tmp_path: Path) -> None:
    finished = done(*reference.but(dst=tmp_path).arguments("transform", "--jobs", "2", "-v"))
    assert len(re.findall("^target ", finished.err, re.M)) == 4
    assert shards(tmp_path) == shards(reference.dst)


def test_parts(reference: Conversion, tmp_path: Path) -> None:
    for part in ("0/3", "1/3", "2/3"):
        reference.but(dst=tmp_path).done("transform", "--part", part)
    assert shards(tmp_path) == shards(reference.dst)


# What a kind of file is written with does not depend on how many ranks there are, nor on their MPI: each once.
@pytest.mark.parametrize(
    ("reference", "mpi", "ranks"), [("hdf5", "mpich", 3), ("ckpt", "openmpi", 5)], indirect=["reference", "mpi"]
)
def test_mpirun(reference: Conversion, tmp_path: Path, mpi: MPI, ranks: int) -> None:
    finished = transform_apart(
        reference.but(dst=tmp_path), "--report", str(tmp_path / "report.json"), mpi=mpi, ranks=ranks
    )
    assert finished.code == 0, finished
    assert finished.out.count("wrote 4 shards") == 1
    assert shards(tmp_path) == shards(reference.dst)
    assert f'"processes": {ranks}' in (tmp_path / "report.json").read_text()


@pytest.mark.slow
def test_process_num(reference: Conversion, tmp_path: Path) -> None:
    c = reference
    reshard_mpi.transform_checkpoints(c.src, tmp_path, "checkpoint_", c.src_strategy, c.dst_strategy, 3, c.kind)
    assert listing(tmp_path) == shards(c.dst)


@by_one_mpi
@pytest.mark.parametrize("reference", ["hdf5"], indirect=True)
def test_functions_on_every_rank(reference: Conversion, tmp_path: Path, mpirun: functools.partial[RankRun]) -> None:
    run = reference.but(dst=tmp_path / "together").paths
    mpirun(3, transform_alone_then_together, run, tmp_path / "alone", reference.kind)
    for folder in ("alone", "together"):
        assert listing(tmp_path / folder) == shards(reference.dst)


# A target that cannot be written


def assert_others_complete(c: Conversion, finished: Finished) -> None:
    assert finished.code == 4, finished
    assert finished.err.count("1 of 4 targets failed; the first: target rank 1") == 1, finished
    assert "got: target rank 1 failed; 3 others are complete" in finished.err and "--resume" in finished.err
    assert "Traceback" not in finished.err and "wrote" not in finished.out


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_target_that_cannot_be_written(tmp_path: Path, jobs: str) -> None:
    c = four_targets(tmp_path)
    finished = transform_apart(c, "--jobs", jobs, "--report", str(tmp_path / "report.json"), env=refusing(tmp_path))
    assert_others_complete(c, finished)
    assert f"{c.dst}/rank_1" in finished.err
    (failure,) = json.loads((tmp_path / "report.json").read_text())["failures"]
    assert (failure["rank"], failure["kind"], failure["host"]) == (1, "ReshardError", os.uname().nodename)
    assert failure["process"] == {"1": 0, "2": 1}[jobs]
    assert f"target rank 1{place(1) if jobs == '2' else ''}: the file system refused" in finished.err
    assert_right(c, (0, 2, 3))
    output = resume(c)
    assert "wrote 1 shard," in output and "3 were complete" in output
    assert_right(c)


@by_one_mpi
def test_a_target_that_cannot_be_written_under_mpirun(tmp_path: Path, mpi: MPI) -> None:
    c = four_targets(tmp_path)
    assert_others_complete(c, transform_apart(c, mpi=mpi, ranks=3, env=refusing(tmp_path)))
    resume(c)
    assert_right(c)


@of_every_kind
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_file_system_without_room(tmp_path: Path, kind: str, jobs: str) -> None:
    tensors = {"w": np.arange(1 << 18, dtype=np.float32).reshape(1024, 256)}
    source = Side(1, 1, {"w": RawLayout((1,), (-1, -1))})
    target = Side(2, 1, {"w": RawLayout((2,), (0, -1), split_sizes=(24, 1000))})
    c = write_conversion(tmp_path, kind, source, target, tensors).but(src_strategy=None)
    limited = ["bash", "-c", 'ulimit -f 256; exec "$@"', "-", *COMMAND, *c.arguments("transform", "--jobs", jobs)]
    finished = run_command(limited)
    assert finished.code == 4, finished
    named = f"target rank 1{place(0) if jobs == '2' else ''}"
    assert f"1 of 2 targets failed; the first: {named}: the file system refused" in finished.err, finished
    assert "File too large" in finished.err and "rank_1/" in finished.err
    assert set(c.dst.glob("rank_*/*")) == {c.written(0)}
    resume(c)
    assert_right(c)


# Targets that several processes fill


@pytest.mark.parametrize(("reference", "jobs"), [("hdf5", 3), ("ckpt", 5), ("ckpt", 8)], indirect=["reference"])
def test_jobs_that_fill_targets_together(reference: Conversion, tmp_path: Path, jobs: int) -> None:
    c = reference.but(dst=tmp_path / "dst")
    report = tmp_path / "report.json"
    finished = transform_apart(c, "--jobs", str(jobs), "--report", str(report), env=doing(tmp_path, "pass"))
    assert finished.code == 0, finished
    assert shards(c.dst) == shards(reference.dst)
    targets = json.loads(report.read_text())["targets"]
    assert sum(target["processes"] - 1 for target in targets) == jobs - {3: 1, 5: 1, 8: 4}[jobs]
    for target in targets:
        assert target["requested_bytes"] - target["needed_bytes"] <= 16 * (target["processes"] - 1)


@pytest.mark.parametrize(
    ("reference", "mpi", "ranks"), [("ckpt", "mpich", 7), ("hdf5", "openmpi", 3)], indirect=["reference", "mpi"]
)
def test_ranks_that_fill_targets_together(reference: Conversion, tmp_path: Path, mpi: MPI, ranks: int) -> None:
    c = reference.but(dst=tmp_path / "dst")
    finished = transform_apart(c, mpi=mpi, ranks=ranks, env=doing(tmp_path, "pass"))
    assert finished.code == 0, finished
    assert shards(c.dst) == shards(reference.dst)


@pytest.mark.slow
def test_jobs_that_fill_a_file_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    c = four_targets(tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    finished = transform_apart(c.but(dst=Path(), dst_strategy=None), "--to", "hf", "--jobs", "2")
    assert finished.code == 0, finished
    reshard_mpi.diff(c.src, "model.safetensors", c.src_strategy)


# With 3 processes, targets 0 to 2 are made by one each, and 3 by all; this is where one that helps has done its part.
HAS_HELPED = "plan.target_rank == 3 and span[0] > 0"


@pytest.mark.slow
def test_a_helper_that_is_killed(tmp_path: Path) -> None:
    c = four_targets(tmp_path)
    finished = transform_apart(
        c, "--jobs", "3", env=doing(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", HAS_HELPED)
    )
    assert finished.code == 4, finished
    assert re.search(r"target rank 3 \(process [12] on host .*\): a worker process died", finished.err), finished
    assert "SIGKILL" in finished.err
    assert not list(c.dst.rglob("*.partial")) and not c.written(3).exists()
    resume(c)
    assert_right(c)


@pytest.mark.slow
def test_a_helper_that_cannot_read(tmp_path: Path) -> None:
    c = four_targets(tmp_path)
    finished = transform_apart(
        c, "--jobs", "3", env=doing(tmp_path, "raise OSError(5, 'the disk is gone')", HAS_HELPED)
    )
    assert finished.code == 4, finished
    # One or both of those that help: the error is theirs, not that of the one that leads.
    assert re.search(r"1 of 4 targets failed; the first: target rank 3 \(process [12] on host", finished.err)
    assert "the disk is gone" in finished.err and "3 others are complete" in finished.err
    assert_right(c, (0, 1, 2))
    resume(c)
    assert_right(c)


@pytest.mark.slow
def test_one_that_leads_is_killed(tmp_path: Path) -> None:
    c = four_targets(tmp_path)
    leading = "plan.target_rank == 3 and span[0] == 0"
    finished = transform_apart(c, "--jobs", "3", env=doing(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", leading))
    assert finished.code == 4, finished
    assert f"1 of 4 targets failed; the first: target rank 3{place(0)}: a worker process died" in finished.err
    resume(c)
    assert_right(c)


@pytest.mark.slow
def test_a_target_that_cannot_be_reserved(tmp_path: Path) -> None:
    c = four_targets(tmp_path)
    env = doing(tmp_path, "pass")
    with (tmp_path / "stand_in" / "sitecustomize.py").open("a") as stream:
        stream.write(NO_ROOM_FOR_RANK_3)
    finished = transform_apart(c, "--jobs", "3", env=env)
    assert finished.code == 4 and "got: target rank 3 failed; 3 others are complete" in finished.err, finished
    resume(c)
    assert_right(c)


@by_one_mpi
def test_a_helper_under_mpi_that_cannot_read(tmp_path: Path, mpi: MPI) -> None:
    c = four_targets(tmp_path)
    finished = transform_apart(
        c, mpi=mpi, ranks=3, env=doing(tmp_path, "raise OSError(5, 'the disk is gone')", HAS_HELPED)
    )
    assert finished.code == 4 and finished.err.count("the disk is gone") == 1, finished
    assert_right(c, (0, 1, 2))


# A process that dies or is stopped


def test_a_worker_that_is_killed(tmp_path: Path) -> None:
    c = four_targets(tmp_path)
    finished = transform_apart(c, "--jobs", "2", env=doing(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)"))
    assert finished.code == 4, finished
    # Its worker had 1 and 3 to make, in this order.
    named = f"the first: target rank 1{place(1)}: a worker process died"
    assert f"2 of 4 targets failed; {named}" in finished.err, finished
    assert "signal SIGKILL while it wrote target rank 1" in finished.err and "fewer --jobs" in finished.err
    assert "got: target ranks 1, 3 failed; 2 others are complete" in finished.err
    output = resume(c)
    assert "wrote 2 shards" in output and "2 were complete" in output
    assert_right(c)  # nor is the dead one's partial file left


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_workers")
def test_a_worker_that_is_killed_under_the_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    c = four_targets(tmp_path)
    doing(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    monkeypatch.syspath_prepend(tmp_path / "stand_in")
    named = re.escape(f"target rank 1{place(1)}: a worker process died")
    with pytest.raises(reshard_mpi.errors.TransformError, match=rf"{named}(.|\n)*SIGKILL"):
        transform_by_function(c, 2)


# A caller of the function that forks must not be forked itself: a fresh process is the parent of the workers.
CALLER = """
import os, signal, sys
import h5py
os.environ["CALLER"] = str(os.getpid())
import reshard_mpi
reshard_mpi.transform_checkpoints(*sys.argv[1:6], 2)
"""


def call(c: Conversion, env: dict[str, str]) -> Finished:
    arguments = (c.src, c.dst, "checkpoint_", c.src_strategy, c.dst_strategy)
    return run_command([sys.executable, "-c", CALLER, *arguments], env=env)


@pytest.mark.slow
def test_a_caller_of_the_function_that_is_interrupted(tmp_path: Path) -> None:
    c = four_targets(tmp_path)
    finished = call(c, doing(tmp_path, "os.kill(int(os.environ['CALLER']), signal.SIGINT); time.sleep(600)"))
    assert finished.code == -signal.SIGINT and "KeyboardInterrupt" in finished.err, finished
    assert not c.written(1).exists() and not list(c.dst.rglob("*.partial"))


@pytest.mark.slow
def test_the_parent_of_workers_that_is_killed(tmp_path: Path) -> None:
    c = four_targets(tmp_path)
    kill = "parent = os.getppid(); os.kill(parent, signal.SIGKILL)"
    wait = "any(time.sleep(0.01) or os.getppid() != parent for _ in iter(int, 1))"  # until it has gone
    finished = call(c, doing(tmp_path, f"{kill}; {wait}"))
    assert finished.code == 1 and "TransformError: the parent of the worker processes died" in finished.err
    assert "signal SIGKILL" in finished.err


@pytest.mark.slow
def test_a_bug_in_a_worker(tmp_path: Path) -> None:
    c = four_targets(tmp_path)
    finished = transform_apart(c, "--jobs", "2", env=doing(tmp_path, "raise ValueError('a bug')"))
    assert finished.code == 4, finished
    assert "ValueError: a bug" in finished.err and "exit code 1 while it wrote target rank 1" in finished.err
    assert not list(c.dst.glob("rank_*/.*"))


def test_a_bug_alone(tmp_path: Path) -> None:
    c = four_targets(tmp_path)
    finished = transform_apart(c, "--jobs", "1", env=doing(tmp_path, "raise ValueError('a bug')"))
    assert finished.code == 1 and "ValueError: a bug" in finished.err, finished
    assert not list(c.dst.glob("rank_*/.*"))


def test_a_bug_on_one_rank_ends_the_job(tmp_path: Path, mpi: MPI) -> None:
    c = four_targets(tmp_path)
    finished = transform_apart(c, mpi=mpi, ranks=3, env=doing(tmp_path, "raise ValueError('a bug')"))
    assert finished.code != 0 and "ValueError: a bug" in finished.out + finished.err, finished
    assert not list(c.dst.glob("rank_1/*"))


STOPS = {
    "terminated": ("1", "os.kill(os.getpid(), signal.SIGTERM)", 143),
    "interrupted": ("1", "os.kill(os.getpid(), signal.SIGINT)", 130),
    "jobs terminated": ("2", "os.kill(os.getppid(), signal.SIGTERM)", 143),
    "jobs interrupted": ("2", "os.kill(os.getppid(), signal.SIGINT)", 130),
    "jobs interrupted from the terminal": ("2", "os.killpg(os.getpgid(os.getppid()), signal.SIGINT)", 130),
    "terminated while an object is deleted": (
        "1",
        "type('Deleted', (), {'__del__': lambda self: os.kill(os.getpid(), signal.SIGTERM)})()",
        143,
    ),
    "interrupted while an object is deleted": (
        "1",
        "type('Deleted', (), {'__del__': lambda self: os.kill(os.getpid(), signal.SIGINT)})()",
        130,
    ),
    "all jobs terminated": ("2", "[os.kill(pid, signal.SIGTERM) for pid in (os.getppid(), os.getpid())]", 143),
}


@pytest.mark.parametrize("name", STOPS)
def test_a_run_that_is_stopped(tmp_path: Path, name: str) -> None:
    jobs, do, code = STOPS[name]
    c = four_targets(tmp_path)
    finished = transform_apart(c, "--jobs", jobs, env=doing(tmp_path, f"{do}; time.sleep(600)"))
    assert finished.code == code, finished
    assert "Traceback" not in finished.err and "wrote" not in finished.out, finished.err
    word = {130: "interrupted", 143: "terminated"}[code]
    assert finished.err.splitlines()[-1] == f"reshard-mpi: {word}; the same command with --resume goes on"
    assert finished.err.count("--resume goes on") == 1
    assert not c.written(1).exists() and not list(c.dst.rglob("*.partial"))
    resume(c)
    assert_right(c)


@pytest.mark.slow
def test_a_run_that_is_stopped_while_strategies_are_read(tmp_path: Path) -> None:
    c = four_targets(tmp_path)
    (tmp_path / "stand_in").mkdir()
    read = (
        "import os, signal, time\nfrom reshard_mpi.runs.request import Strategies\n\n"
        "def read(request):\n    os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(100_000)\n\n"
        "Strategies.read = read\n"
    )
    (tmp_path / "stand_in" / "sitecustomize.py").write_text(read)
    finished = transform_apart(c, "--jobs", "2", env={"PYTHONPATH": str(tmp_path / "stand_in")})
    assert finished.code == 143 and finished.err == "reshard-mpi: terminated; the same command with --resume goes on\n"
    assert not c.dst.exists()


# Launchers


def test_a_refusal_under_mpirun_is_told_once(tmp_path: Path, mpi: MPI) -> None:
    c = four_targets(tmp_path)
    for rank in (1, 3):  # which hold the same
        c.shard(rank).write_bytes(b"")
    before = listing(tmp_path)
    finished = transform_apart(c, mpi=mpi, ranks=3)
    assert finished.code == 3, finished
    assert finished.err.count("reshard-mpi: error: ") == 1 and "a shard is empty" in finished.err
    assert listing(tmp_path) == before
    finished = transform_apart(c, "--rank", "99", mpi=mpi)
    assert finished.code == 2 and finished.err.count("target rank out of range") == 1, finished


@by_one_mpi
def test_a_demo_that_cannot_be_made_under_mpirun(tmp_path: Path, mpi: MPI) -> None:
    (tmp_path / "file").write_text("")
    finished = run_apart("demo", tmp_path / "file", mpi=mpi)
    assert finished.code == 3 and "Traceback" not in finished.err, finished
    assert finished.err.count("reshard-mpi: error: the file system refused") == 1, finished


@by_one_mpi
def test_jobs_do_not_go_with_mpirun(tmp_path: Path, mpi: MPI) -> None:
    c = four_targets(tmp_path)
    finished = transform_apart(c, "--jobs", "2", mpi=mpi)
    assert finished.code == 2 and finished.err.count("--jobs does not go with an MPI run") == 1, finished
    assert not c.dst.exists()


@pytest.mark.parametrize("options", few(2, ["--verify", "--part 0/2", "--jobs 2", "--quiet"]))
@by_one_mpi
def test_ranks_of_different_commands_are_refused(tmp_path: Path, mpi: MPI, options: str) -> None:
    c = four_targets(tmp_path)
    own, other = ([*COMMAND, *c.arguments("transform", *each)] for each in ((), options.split()))
    finished = run_command([*mpirun_command(mpi, 1, own), ":", "-n", "1", *other], timeout_seconds=60)
    assert finished.code == 2 and finished.err.count("were given different commands") == 1, finished
    assert not c.dst.exists()
