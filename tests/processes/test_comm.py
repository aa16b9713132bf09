"""Which processes are one run: what launchers say and what MPI sees, and what is done where they do not match."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.command_line import COMMAND, run_apart
from support.conversions import Conversion, listing, transform_apart
from support.launch import MPI, MPI_NAMES, find_mpi, mpirun_command
from support.processes import Finished, run_command

from reshard_mpi.processes import comm

# What tells the last of four processes who started it.
LAUNCHERS = {
    "MPICH": {"PMI_SIZE": "4", "PMI_RANK": "3"},
    "Open MPI": {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "PMIX_RANK": "3"},
    "srun": {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_NTASKS": "4"},
    "PMIx": {"PMIX_RANK": "3"},
}
# Every batch shell has these, and every task of an array.
NO_LAUNCHER = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_ARRAY_TASK_ID": "3", "SLURM_STEP_NUM_TASKS": "1"}
REMEDIES = ("the mpirun of that MPI", "--mpi=pmix or --mpi=pmi2", "MPI4PY_LIBMPI", "--part I/N")


def assert_refused(finished: Finished, c: Conversion, times: Sequence[int] = (1,)) -> None:
    """Check that a run was refused with every remedy, told so often, and that nothing was written."""
    assert finished.code == 2, finished
    assert finished.err.count("the launcher does not match the MPI library") in times, finished
    assert all(remedy in finished.err for remedy in REMEDIES), finished
    assert not c.dst.exists()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_what_launchers_say(launcher: str) -> None:
    assert comm.is_launched(LAUNCHERS[launcher]) and comm.launched_size(LAUNCHERS[launcher]) == 4


def test_a_batch_shell_is_no_launcher() -> None:
    assert not comm.is_launched(NO_LAUNCHER) and comm.launched_size(NO_LAUNCHER) == 1


def test_one_process_is_launched_too() -> None:
    assert comm.is_launched({"PMIX_RANK": "0"}) and comm.launched_size({"PMIX_RANK": "0"}) == 1


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_that_the_library_does_not_find(c: Conversion, mpi: MPI, launcher: str) -> None:
    told = {name: "0" for name in LAUNCHERS[launcher] if name.endswith("RANK") and launcher != "PMIx"}
    env = {**mpi.environment, **LAUNCHERS[launcher], **told}  # rank 0 tells it for all
    finished = transform_apart(c, env=env)
    assert_refused(finished, c)
    assert re.search(r"expected: a world of 4 processes(.|\n)*got: a", finished.err), finished
    assert transform_apart(c, "--part", "1/2", env=env).code == 0
    assert len(list(c.dst.glob("rank_*/*"))) == 1
    assert transform_apart(c, "--rank", "0", env=env).code == 0
    assert len(list(c.dst.glob("rank_*/*"))) == 2
    # Whoever has a share of its own says what is wrong with it.
    again = transform_apart(c, "--part", "1/2", env={**mpi.environment, **LAUNCHERS[launcher]})
    assert again.code == 3 and "target rank 1 is there already" in again.err


def test_a_batch_shell(c: Conversion, mpi: MPI) -> None:
    assert transform_apart(c, env={**mpi.environment, **NO_LAUNCHER}).code == 0
    assert len(list(c.dst.glob("rank_*/*"))) == 2


@pytest.fixture
def other(mpi: MPI) -> MPI:
    """Another implementation than `mpi`."""
    implementation = find_mpi(next(name for name in MPI_NAMES if name != mpi.name))
    if implementation is None:
        pytest.skip("one MPI alone always matches")
    return implementation


def with_library_of(other: MPI) -> list[str]:
    return ["env", *(f"{name}={value}" for name, value in other.environment.items())]


def test_ranks_of_a_launcher_that_does_not_match(c: Conversion, tmp_path: Path, mpi: MPI, other: MPI) -> None:
    before = listing(tmp_path)
    command = [*with_library_of(other), *COMMAND, *c.arguments()]
    # The launcher ends the others when one has failed, so that one has to be heard, whichever it is.
    assert_refused(run_command(mpirun_command(mpi, 2, command)), c, [1, 2])
    assert listing(tmp_path) == before


def test_parts_under_a_launcher_that_does_not_match(c: Conversion, mpi: MPI, other: MPI) -> None:
    rank = {"mpich": "PMI_RANK", "openmpi": "OMPI_COMM_WORLD_RANK"}[mpi.name]
    parts = ["sh", "-c", f'exec "$@" --part ${rank}/2', "-"]
    command = mpirun_command(mpi, 2, [*parts, *with_library_of(other), *COMMAND, *c.arguments()])
    assert run_command(command).code == 0
    assert len(list(c.dst.glob("rank_*/*"))) == 2


@pytest.mark.slow
def test_a_launcher_without_mpi4py(c: Conversion, tmp_path: Path) -> None:
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "mpi4py.py").write_text("raise ImportError('No module named mpi4py')")
    path = os.pathsep.join([str(tmp_path / "without"), os.environ.get("PYTHONPATH", "")]).rstrip(":")
    env = {"PMI_SIZE": "4", "PMI_RANK": "0", "PYTHONPATH": path}
    finished = run_apart(*c.arguments(), env=env)
    assert finished.code == 2, finished
    assert "MPI cannot be used from Python" in finished.err and "pip install mpi4py" in finished.err
    assert "pip install mpich" in finished.err and "[mpi]" not in finished.err  # not every index has this project
    assert not c.dst.exists()
    assert run_apart(*c.arguments("transform", "--part", "1/2"), env=env).code == 0  # which needs no MPI
