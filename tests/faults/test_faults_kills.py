"""Runs that are killed at any instant: resumed, they are to the last byte what an undisturbed run makes.

An instant is what lies before the n-th call that the processes of a run make for its files. Which ones are taken is
drawn from a fixed seed; an odd one kills one process, an even one all of them. There are 28 in all: 20 of a process
alone, 6 of local processes, 2 of ranks under each MPI.
"""

from __future__ import annotations

import os
import random
import runpy
import signal
from pathlib import Path

import pytest
from support.command_line import run_in_fork
from support.conversions import Conversion, four_targets, transform_apart
from support.harm import KILL, KILL_ALL, assert_nothing_half_done, assert_resumed, fault
from support.launch import MPI
from support.processes import Finished

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["ckpt", "hdf5"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    """A run that nothing happened to."""
    c = four_targets(tmp_path_factory.mktemp("whole"), request.param)
    counter = c.folder / "counter"
    assert transform_apart(c, env=fault(c, counter)).code == 0
    assert counter.stat().st_size > 100
    return c


def recovered(whole: Conversion, folder: Path, kills: int, *options: str, mpi: MPI | None = None) -> int:
    """Kill runs at `kills` instants and resume them; return how many were hit."""
    undisturbed = whole.but(dst=folder / "undisturbed")
    assert (
        transform_apart(undisturbed, *options, env=fault(undisturbed, folder / "counter"), mpi=mpi, ranks=3).code == 0
    )
    instants = random.Random(5).sample(range(1, (folder / "counter").stat().st_size + 1), kills)
    hit = 0
    for number in instants:
        c = whole.but(dst=folder / f"killed_{number}")
        env = fault(c, folder / f"counter_{number}", KILL if number % 2 else KILL_ALL, call=number)
        finished = transform_apart(c, *options, env=env, mpi=mpi, ranks=3)
        hit += finished.code != 0
        assert_nothing_half_done(c, whole)
        assert_resumed(c, whole)
    return hit


def forked(c: Conversion, env: dict[str, str]) -> Finished:
    """Run the command line in a fork of this process to which a fault happens."""

    def prepare() -> None:
        os.environ.update(env)
        runpy.run_path(str(Path(__file__).with_name("sitecustomize.py")))

    return run_in_fork(*c.arguments("transform", "--progress", "none"), prepare=prepare)


def test_alone(whole: Conversion, tmp_path: Path) -> None:
    """In forks of this process: no time is spent on starting an interpreter."""
    undisturbed = whole.but(dst=tmp_path / "undisturbed")
    assert forked(undisturbed, fault(undisturbed, tmp_path / "counter")).code == 0
    instants = random.Random(5).sample(range(1, (tmp_path / "counter").stat().st_size + 1), 10)
    for number in instants:
        c = whole.but(dst=tmp_path / f"killed_{number}")
        assert forked(c, fault(c, tmp_path / f"counter_{number}", KILL, call=number)).code == -signal.SIGKILL
        assert_nothing_half_done(c, whole)
        assert_resumed(c, whole)


@pytest.mark.parametrize(("whole", "jobs"), [("ckpt", "2"), ("hdf5", "3")], indirect=["whole"])
def test_jobs(whole: Conversion, tmp_path: Path, jobs: str) -> None:
    assert recovered(whole, tmp_path, 3, "--jobs", jobs) > 0  # how often they look differs a little


@pytest.mark.parametrize("whole", ["hdf5"], indirect=True)
def test_ranks(whole: Conversion, tmp_path: Path, mpi: MPI) -> None:
    assert recovered(whole, tmp_path, 2, mpi=mpi) > 0
