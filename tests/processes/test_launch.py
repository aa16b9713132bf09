"""The tests' own launcher: what the other tests take for granted about it."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from support import processes
from support.launch import mpirun_command
from support.processes import measure_peak, run_command

from reshard_mpi.text import MIB

pytestmark = pytest.mark.slow


def rank_and_size(label):
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    return label, world.allreduce(world.rank), world.size


def vendor_of_library():
    from mpi4py import MPI

    return MPI.get_vendor()[0]


def raise_on_rank_1():
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 1:
        raise ValueError("told to fail")
    MPI.COMM_WORLD.barrier()


def die_on_rank_1():
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    MPI.COMM_WORLD.barrier()


def wait_forever():
    time.sleep(1000)


def test_every_rank_returns_its_result(mpirun):
    assert mpirun(3, rank_and_size, "a").results == dict.fromkeys(range(3), ("a", 3, 3))


def test_library_belongs_to_launcher(mpi, mpirun):
    vendor = {"mpich": "MPICH", "openmpi": "Open MPI"}[mpi.name]
    assert mpirun(2, vendor_of_library).results == {0: vendor, 1: vendor}


def test_command_under_mpirun(mpi):
    finished = run_command(mpirun_command(mpi, 2, ["sh", "-c", "echo started"]), check=True)
    assert finished.out.count("started") == 2


def test_exception_on_one_rank_ends_the_job(mpirun):
    run = mpirun(3, raise_on_rank_1, check=False)
    assert run.code != 0
    assert 1 not in run.results
    assert "told to fail" in run.output


def test_death_of_one_rank_ends_the_job(mpirun):
    run = mpirun(3, die_on_rank_1, check=False)
    assert run.code != 0
    assert 1 not in run.results


def test_hanging_ranks_are_killed_and_say_where_they_hang(mpirun):
    with pytest.raises(pytest.fail.Exception, match=r"longer than 20 seconds(.|\n)*in wait_forever"):
        mpirun(2, wait_forever, timeout_seconds=20)


def test_process_left_behind_is_killed_and_reported(monkeypatch):
    monkeypatch.setattr(processes, "_LINGER_SECONDS", 0.5)
    # For a moment of its beginning a program has no environment, and cannot be told by that.
    code = """if True:
        import pathlib, subprocess
        pid = subprocess.Popen(['sleep', '1000'], start_new_session=True).pid
        while not pathlib.Path(f'/proc/{pid}/environ').read_bytes():
            pass
        print(pid)
    """
    with pytest.raises(pytest.fail.Exception, match=r"left processes behind: \d+ \(sleep 1000\)") as failure:
        run_command([sys.executable, "-c", code])
    pid = str(failure.value).partition("--- stdout\n")[2].split()[0]
    command_line = Path("/proc", pid, "cmdline")
    # Where nobody collects orphans a killed one stays listed, without a command line.
    assert not command_line.exists() or not command_line.read_bytes()


def test_command_result():
    finished = run_command(["sh", "-c", "echo out; echo err >&2; echo $NAME; exit 7"], env={"NAME": "value"})
    assert (finished.code, finished.out, finished.err) == (7, "out\nvalue\n", "err\n")


def test_peak_is_that_of_the_largest_process():
    taken = f"bytearray({200 * MIB})"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {taken!r}]); sys.exit(3)"
    ballast = bytearray(300 * MIB)  # the tests' own size must not count
    measured = measure_peak([sys.executable, "-c", parent])
    del ballast
    assert measured.code == 3
    assert 200 * MIB < measured.peak_rss_bytes < 240 * MIB


def test_peak_of_ranks(mpi):
    code = f"from mpi4py import MPI; x = bytearray({200 * MIB} if MPI.COMM_WORLD.rank == 1 else 1)"
    measured = measure_peak(mpirun_command(mpi, 2, [sys.executable, "-m", "mpi4py", "-c", code]))
    assert measured.code == 0, measured
    assert 200 * MIB < measured.peak_rss_bytes < 280 * MIB
