"""Faults in the middle of a run: the exit code, one message that names what it hit, the others whole, resumed the same.

Elsewhere: what is refused before anything is written (test_bad_input.py: damaged structure, another run's folder, two
steps in one checkpoint), signals to a run alone or with --jobs and files that may not grow (test_runtime.py), sources
that change (test_changed_sources.py), kills (test_faults_kills.py).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.cases import Side
from support.command_line import COMMAND, run_apart
from support.conversions import Conversion, listing, shards, transform_apart, write_conversion
from support.examples import one_at_a_time
from support.harm import assert_nothing_half_done, assert_resumed, fault
from support.launch import MPI, by_one_mpi, mpirun_command
from support.oracle import RawLayout
from support.processes import HANG_SECONDS, Finished, clean_environment, run_command

# Of columns cut in two, in rows of three lengths: copied by the kernel, read to their places; many are gathered from a
# window, few are read one by one.
TENSORS = {
    "long": np.arange(1 << 18, dtype=np.float32).reshape(4, -1),
    "middle": np.arange(1 << 14, dtype=np.float32).reshape(32, -1),
    "short": np.arange(1 << 11, dtype=np.float32).reshape(256, -1),
    "few": np.arange(1 << 7, dtype=np.float32).reshape(16, -1),
}
SOURCE = Side(2, 1, dict.fromkeys(TENSORS, RawLayout((2,), (-1, 0))))
TARGET = Side(4, 1, dict.fromkeys(TENSORS, RawLayout((4,), (0, -1))))
JOBS = pytest.mark.parametrize("jobs", ["1", "2"])
# Done once, however often it comes to that.
ONCE = "os.path.exists({mark!r}) or (os.mkdir({mark!r}), {do})"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    """A run that nothing happened to."""
    c = write_conversion(tmp_path_factory.mktemp("whole"), "ckpt", SOURCE, TARGET, TENSORS)
    transform_apart(c, check=True)
    return c


@pytest.fixture
def c(whole: Conversion, tmp_path: Path) -> Conversion:
    """The same run, into another folder."""
    return whole.but(folder=tmp_path, dst=tmp_path / "dst")


@pytest.fixture
def own(c: Conversion) -> Iterator[Conversion]:
    """The same run, of sources that may be spoiled: they are restored as they were."""
    with_times = c.folder / "kept"
    shutil.copytree(c.src, with_times)
    yield c
    shutil.copytree(with_times, c.src, dirs_exist_ok=True)


def restore(c: Conversion) -> None:
    shutil.copytree(c.folder / "kept", c.src, dirs_exist_ok=True)


def assert_failed(finished: Finished, c: Conversion, whole: Conversion, *ranks: int) -> None:
    """Check that these targets failed, and nothing else: one message says so, no other target is missing."""
    assert finished.code == 4, finished
    named = rf"error: {len(ranks)} of 4 targets failed; the first: target rank {ranks[0]}\b"
    assert len(re.findall(named, finished.err)) == 1, finished
    failed = f"target rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} failed"
    others = {0: "0 others are", 1: "1 other is"}.get(4 - len(ranks), f"{4 - len(ranks)} others are")
    assert f"got: {failed}; {others} complete" in finished.err, finished
    assert "Traceback" not in finished.err and "wrote" not in finished.out, finished
    assert set(c.dst.glob("rank_*/*")) == {c.written(rank) for rank in range(4) if rank not in ranks}
    assert_nothing_half_done(c, whole)


# Input and output

ERRORS = {
    "pwrite": ("rank_1/.", "{dst}/rank_1/"),
    "fsync": ("rank_1/.", "{dst}/rank_1/"),
    "os.rename": ("rank_1/.", "{dst}/rank_1/"),
}


@pytest.mark.parametrize(("call", "jobs"), [("pwrite", "1"), ("fsync", "2"), ("os.rename", "1"), ("os.rename", "2")])
def test_an_error_of_writing(c: Conversion, whole: Conversion, call: str, jobs: str) -> None:
    path, named = ERRORS[call]
    env = fault(c, c.folder / "counter", "raise OSError(5, 'Input/output error')", on=call, path=path)
    finished = transform_apart(c, "--jobs", jobs, env=env)
    assert_failed(finished, c, whole, 1)
    where = re.search("where: (.*)", finished.err)
    assert where and re.match(named.format(src=c.src, dst=c.dst), where[1]), finished
    assert "Input/output error" in finished.err
    assert_resumed(c, whole)


@JOBS
def test_an_error_of_the_kernels_copying(c: Conversion, whole: Conversion, jobs: str) -> None:
    """It does not say which file it is about; reading and writing one after the other would, and here go well."""
    error = "raise OSError(5, 'Input/output error')"
    env = fault(c, c.folder / "counter", error, on="copy_file_range", path="dst/rank_1/.")
    finished = transform_apart(c, "--jobs", jobs, env=env)
    assert finished.code == 0, finished
    assert shards(c.dst) == shards(whole.dst)


@JOBS
def test_an_error_of_reading(c: Conversion, whole: Conversion, jobs: str) -> None:
    env = fault(c, c.folder / "counter", "raise OSError(5, 'Input/output error')", on="preadv", path="src/rank_1/")
    finished = transform_apart(c, "--jobs", jobs, env=env)
    assert_failed(finished, c, whole, 0, 1, 2, 3)
    assert f"where: {c.shard(1)}\n" in finished.err, finished
    assert_resumed(c, whole)


@pytest.mark.slow
def test_a_disk_that_is_full_in_the_middle(whole: Conversion, small_disk: Path, tmp_path: Path) -> None:
    c = whole.but(folder=tmp_path, dst=small_disk / "dst")
    fill = f"os.close(os.posix_fallocate(d := os.open({str(small_disk / 'fill')!r}, 66), 0, 1724 << 10) or d)"
    fill = ONCE.format(mark=str(tmp_path / "filled"), do=fill)
    finished = transform_apart(c, env=fault(c, tmp_path / "counter", fill, on="copy_file_range", path="dst/rank_1/."))
    assert finished.code == 4 and "No space left on device" in finished.err, finished
    assert re.search(rf"where: .*{c.dst}/rank_\d/", finished.err)
    assert_nothing_half_done(c, whole)
    assert not list(c.dst.rglob("*.partial")) and c.written(0).exists()
    (small_disk / "fill").unlink()
    assert_resumed(c, whole)


def test_a_disk_that_is_too_small(whole: Conversion, small_disk: Path) -> None:
    (small_disk / "fill").write_bytes(bytes(700 << 10))
    said = whole.but(dst=small_disk / "dst").refused()
    assert "there is no room" in said
    assert f"the file system at {small_disk}\n" in said
    assert set(listing(small_disk)) == {"fill"}


def test_a_disk_that_is_read_only(whole: Conversion, small_disk: Path) -> None:
    run_command(["mount", "-o", "remount,ro", small_disk], check=True)
    said = whole.but(dst=small_disk / "dst").refused()
    assert "the target cannot be written" in said and str(small_disk) in said


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for a run, and little more."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if run_command(["mount", "-t", "tmpfs", "-o", "size=2424k", "none", folder]).code:
        pytest.skip("nothing can be mounted here")
    try:
        yield folder
    finally:
        run_command(["umount", folder], check=True)


# Sources


@pytest.mark.parametrize(
    ("do", "says"),
    [("os.remove({path!r})", "No such file"), ("os.truncate({path!r}, 100)", "a source file became shorter")],
)
def test_a_source_that_goes_in_the_middle(own: Conversion, whole: Conversion, do: str, says: str) -> None:
    spoil = ONCE.format(mark=str(own.folder / "mark"), do=do.format(path=str(own.shard(1))))
    env = fault(own, own.folder / "counter", spoil, on="os.rename", path="dst/rank_0/checkpoint_0.ckpt")
    finished = transform_apart(own, "--jobs", "1", env=env)
    assert_failed(finished, own, whole, 1, 2, 3)
    assert says in finished.err and str(own.shard(1)) in finished.err, finished
    restore(own)
    assert_resumed(own, whole)


@pytest.mark.slow
def test_a_source_that_shrinks_while_it_is_mapped(own: Conversion, whole: Conversion) -> None:
    """The kernel kills the worker that looks there; the parent says which target that was, and why."""
    env = fault(own, own.folder / "counter", "os.truncate(path, 0)", on="mapped", path="src/rank_1/")
    whole_targets = {"FAULT_CUT": str(1 << 20)}  # so one worker alone is at this one
    # Started as users start it: in a fork the other worker may be the first to say that the source has changed.
    finished = run_apart(*own.arguments("transform", "--jobs", "2", "--rank", "0"), env={**env, **whole_targets})
    assert finished.code == 4, finished
    assert re.search(r"1 of 1 targets failed; the first: target rank 0 \(process [01] on host", finished.err), finished
    assert "a worker process died" in finished.err and "signal SIGBUS while it wrote target rank 0" in finished.err
    assert "a source file became shorter" in finished.err and "Traceback" not in finished.err
    restore(own)
    assert_resumed(own, whole)


@pytest.mark.slow
def test_a_source_that_shrinks_while_it_is_mapped_alone(own: Conversion, whole: Conversion) -> None:
    env = fault(own, own.folder / "counter", "os.truncate(path, 0)", on="mapped", path="src/rank_1/")
    assert transform_apart(own, "--jobs", "1", env=env).code == -signal.SIGBUS
    assert_nothing_half_done(own, whole)
    restore(own)
    assert_resumed(own, whole)


def test_a_source_that_shrinks_while_ranks_have_it_mapped(own: Conversion, whole: Conversion, mpi: MPI) -> None:
    env = fault(own, own.folder / "counter", "os.truncate(path, 0)", on="mapped", path="src/rank_1/")
    finished = transform_apart(own, env=env, mpi=mpi, ranks=2)
    assert finished.code != 0 and re.search("Bus error|signal 7", finished.out + finished.err), finished
    assert_nothing_half_done(own, whole)
    restore(own)
    assert_resumed(own, whole)


# Processes


@pytest.mark.slow
def test_two_runs_at_once(c: Conversion, whole: Conversion) -> None:
    """The second is refused by name while the first is at its second target, and joins it when that is done."""
    there, go = c.folder / "there", c.folder / "go"
    os.mkfifo(go)
    wait = ONCE.format(mark=str(there), do=f"os.close(os.open({str(go)!r}, os.O_WRONLY))")
    env = {**clean_environment(), **fault(c, c.folder / "counter", wait, on="pwrite", path="dst/rank_1/.")}
    with subprocess.Popen([*COMMAND, *c.arguments()], env=env, stdout=subprocess.DEVNULL) as first:
        try:
            while not there.exists():
                assert first.poll() is None
                time.sleep(0.01)
            before = listing(c.dst)
            for again in ("--resume", "--overwrite"):
                assert "target rank 1 is being written by another process" in c.refused("transform", again)
                assert listing(c.dst) == before
            go.read_bytes()
            assert first.wait(HANG_SECONDS) == 0
        finally:
            first.kill()
    assert_resumed(c, whole)


@by_one_mpi
def test_one_rank_without_memory(c: Conversion, whole: Conversion, mpi: MPI) -> None:
    env = fault(c, c.folder / "counter", "raise MemoryError", on="pwrite", path="dst/rank_1/.")
    finished = transform_apart(c, env=env, mpi=mpi, ranks=3)
    assert_failed(finished, c, whole, 1)
    assert finished.err.count("out of memory") == 1 and "fewer processes" in finished.err
    assert_resumed(c, whole)


@pytest.mark.parametrize(("kind", "whom"), one_at_a_time([signal.SIGTERM, signal.SIGINT], ["the launcher", "a rank"]))
def test_a_job_that_is_stopped(c: Conversion, whole: Conversion, mpi: MPI, kind: signal.Signals, whom: str) -> None:
    launcher = c.folder / "launcher"
    whose = "os.getpid()" if whom == "a rank" else f"int(open({str(launcher)!r}).read())"
    stop = f"os.kill({whose}, {int(kind)}); import time; time.sleep(600)"
    env = fault(c, c.folder / "counter", stop, on="pwrite", path="dst/rank_1/.")
    command = mpirun_command(mpi, 2, [*COMMAND, *c.arguments()])
    finished = run_command(["sh", "-c", f'echo $$ > {launcher}; exec "$@"', "-", *command], env=env)
    assert finished.code != 0 and "wrote" not in finished.out, finished
    words = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
    lines = [line for line in finished.err.splitlines() if line.startswith("reshard-mpi: ")]
    if whom == "a rank":
        assert finished.code == 128 + kind and "Traceback" not in finished.err, finished
        assert lines == [f"reshard-mpi: {words[kind]}; the same command with --resume goes on"], finished
    elif mpi.name == "mpich":
        assert lines == [f"reshard-mpi: {words[kind]}; the same command with --resume goes on"], finished
    else:
        assert len(lines) <= 1, finished  # this launcher may pass on nothing more once it has been told to stop
    if whom == "the launcher" or mpi.name == "mpich":
        assert "abort(" not in finished.err.lower() and "MPI_ABORT" not in finished.err, finished
    assert not c.written(1).exists()
    assert_nothing_half_done(c, whole)
    assert_resumed(c, whole)
