"""Starts pytest on several ranks, for the tests in `ranks/`."""

from support.launch import PYTEST, RANKS, mpirun_command
from support.processes import run_command


def test_tests_inside_ranks_pass(mpi):
    finished = run_command(mpirun_command(mpi, 2, [*PYTEST, RANKS]), check=True)
    assert finished.out.count(" passed in ") == 2, finished  # one closing line a rank
    assert "skipped" not in finished.out, finished
