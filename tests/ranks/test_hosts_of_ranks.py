"""Which host every rank is on, as ranks on one host or on several see it (see test_inside_ranks.py, test_hosts.py)."""

import os
import tempfile
from pathlib import Path

import pytest

from reshard_mpi.processes.host import HOST_VARIABLE


@pytest.fixture
def world():
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.mark.mpi(min_size=2)
def test_every_rank_knows_the_host_of_every_other(world):
    from reshard_mpi.processes.comm import MPIComm

    comm = MPIComm(world)
    assert (comm.rank, comm.size) == (world.rank, world.size)
    assert list(comm.hosts) == world.allgather(os.uname().nodename)
    assert comm.allgather(comm.rank * 10) == [rank * 10 for rank in range(comm.size)]


@pytest.mark.mpi(min_size=2)
def test_a_host_is_called_what_the_variable_says(world, monkeypatch):
    from reshard_mpi.processes.comm import MPIComm

    monkeypatch.setenv(HOST_VARIABLE, f"node{world.rank % 2}")
    assert list(MPIComm(world).hosts) == [f"node{rank % 2}" for rank in range(world.size)]


@pytest.mark.mpi(min_size=2)
def test_two_machines_of_one_name_are_two_hosts(world, monkeypatch):
    from reshard_mpi.processes import host
    from reshard_mpi.processes.comm import MPIComm

    monkeypatch.setenv(HOST_VARIABLE, "localhost")
    with tempfile.TemporaryDirectory() as folder:  # the folders of pytest are not made for several ranks at once
        monkeypatch.setattr(host, "_BOOT_ID", Path(folder, "boot_id"))
        Path(folder, "boot_id").write_text(f"{world.rank}234abcd-0000\n")
        seen = MPIComm(world).hosts
    assert list(seen) == [f"localhost#{rank}234abcd" for rank in range(world.size)]
