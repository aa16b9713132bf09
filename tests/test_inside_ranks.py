"""Starts pytest on several ranks, for the tests in `ranks/`."""

import sys
from pathlib import Path

from launch import mpirun_command
from processes import run_command

RANKS = Path(__file__).parent / "ranks"
PYTEST = [sys.executable, "-m", "mpi4py", "-m", "pytest", "--with-mpi", "-n0", "--color=no", "-pno:cacheprovider"]


def test_tests_inside_ranks_pass(mpi):
    finished = run_command(mpirun_command(mpi, 2, [*PYTEST, RANKS]), check=True)
    assert finished.stdout.count(" passed in ") == 2, finished  # one closing line a rank
    assert "skipped" not in finished.stdout, finished
