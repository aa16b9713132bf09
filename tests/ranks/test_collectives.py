"""Runs inside every rank of an MPI job (see test_inside_ranks.py)."""

import pytest


@pytest.mark.mpi(min_size=2)
def test_ranks_see_each_other():
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    assert world.allgather(world.rank * 10) == [rank * 10 for rank in range(world.size)]
