"""Ranks that end before MPI connects them: the others would wait without end, so the launcher ends them."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from pathlib import Path

import pytest
from support.command_line import COMMAND
from support.conversions import Conversion, make
from support.examples import one_at_a_time
from support.launch import MPI, mpirun_command
from support.processes import Finished, run_command

from reshard_mpi.cli import first_lease

# Does something in one rank, or in all, as soon as a module is about to be loaded.
STAND_IN = """
import os, signal, sys
rank = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
def hook(event, arguments):
    if event == "import" and arguments[0] == {module!r} and rank in {ranks!r}:
        {do}
sys.addaudithook(hook)
"""
EARLY, LATE = "reshard_mpi.cli.first_lease", "reshard_mpi.cli.commands"  # before anything is handled, and after


def at_import(folder: Path, module: str, do: str, ranks: str = "0") -> dict[str, str]:
    """Return the environment in which these ranks (digits) do something when they load a module."""
    (folder / "stand_in").mkdir()
    (folder / "stand_in" / "sitecustomize.py").write_text(STAND_IN.format(module=module, do=do, ranks=ranks))
    return {"PYTHONPATH": os.pathsep.join([str(folder / "stand_in"), os.environ.get("PYTHONPATH", "")]).rstrip(":")}


def refused(c: Conversion, mpi: MPI, rank: int, *, before: str = "", after: str = "", ranks: int = 3) -> Finished:
    """Run a conversion in which one rank is started by another command. before, after: what that has in addition."""
    own = f"exec {before} {shlex.join(map(str, [*COMMAND, *c.arguments()]))} {after}"
    others = f"exec {shlex.join(map(str, [*COMMAND, *c.arguments()]))}"
    script = f'[ "${{PMI_RANK:-$OMPI_COMM_WORLD_RANK}}" = {rank} ] && {own}; {others}'
    finished = run_command(mpirun_command(mpi, ranks, ["sh", "-c", script]))
    assert not c.dst.exists() and "Traceback" not in finished.err, finished
    return finished


STOP = "os.kill(os.getpid(), signal.{})"


@pytest.mark.parametrize(("name", "module", "ranks"), one_at_a_time(["SIGTERM", "SIGINT"], [EARLY, LATE], ["1", "012"]))
def test_a_signal_ends_all(c: Conversion, tmp_path: Path, mpi: MPI, name: str, module: str, ranks: str) -> None:
    env = at_import(tmp_path, module, STOP.format(name), ranks)
    finished = run_command(mpirun_command(mpi, 3, [*COMMAND, *c.arguments()]), env=env)
    assert finished.code != 0 and "Traceback" not in finished.err and "wrote" not in finished.out, finished
    assert not c.dst.exists()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "word"), [(signal.SIGTERM, "terminated"), (signal.SIGINT, "interrupted")])
def test_a_process_alone(tmp_path: Path, kind: signal.Signals, word: str) -> None:
    command = [*COMMAND, *make(tmp_path).arguments()]
    early = run_command(command, env=at_import(tmp_path, EARLY, STOP.format(kind.name)))
    assert (early.code, early.err) == (-kind, "")
    (tmp_path / "late").mkdir()
    late = run_command(command, env=at_import(tmp_path / "late", LATE, STOP.format(kind.name)))
    assert late.code == 128 + kind and late.err.startswith(f"reshard-mpi: {word}"), late


LIMITS = {
    "a stack": ("prlimit --stack=1000000:1000000", "", "the limit on the size of the stack is too low"),
    "an argument": ("", "--memory nothing", "no amount of memory"),
    "an option": ("", "--no-such-option", "no such option: --no-such-option"),
    "a variable": ("env RESHARD_MPI_MEMORY=nothing", "", "RESHARD_MPI_MEMORY"),
    "no mpi4py": ("env MPI4PY_LIBMPI=/dev/null", "", "MPI cannot be used from Python"),
}


@pytest.mark.parametrize(("what", "rank"), one_at_a_time(LIMITS, [2, 0]))
def test_what_one_rank_is_refused_ends_all(tmp_path: Path, mpi: MPI, what: str, rank: int) -> None:
    before, after, message = LIMITS[what]
    finished = refused(make(tmp_path), mpi, rank, before=before, after=after)
    assert finished.code == 2 and finished.err.count(message) == 1, finished


def test_what_all_are_refused(tmp_path: Path, mpi: MPI) -> None:
    """The first one says it, and others only where they have not been ended before."""
    finished = run_command(mpirun_command(mpi, 3, [*COMMAND, *make(tmp_path).arguments(), "--no-such-option"]))
    assert finished.code == 2 and 1 <= finished.err.count("no such option") <= 3, finished


@pytest.mark.parametrize("rank", ["0", "2"])
def test_a_rank_that_cannot_be_loaded_ends_all(c: Conversion, tmp_path: Path, mpi: MPI, rank: str) -> None:
    env = at_import(tmp_path, LATE, "raise OSError('no module today')", rank)
    finished = run_command(mpirun_command(mpi, 3, [*COMMAND, *c.arguments()]), env=env)
    assert finished.code == 1 and finished.err.count("OSError: no module today") == 1, finished


# What a parent leaves to the program


FORGED = [
    "[1e400, 1, {}]",
    "[1, NaN, {}]",
    '[1, 1, {"host": -9}]',
    f'[1, 1, {{"host": {10**26}}}]',
    "[" * 100_000,
    "9" * 5000,
]


@pytest.mark.parametrize("text", FORGED)
def test_what_nobody_has_passed_on_is_passed_over(text: str) -> None:
    assert first_lease._Earlier.loads(text) == first_lease._Earlier()


def test_what_has_been_passed_on() -> None:
    ten_years = 3650 * 24 * 3600 * 10**9  # of a host that has not been started again
    known = first_lease._Earlier(5, 1.5, {"host": 7, "slurm-1": ten_years})
    assert first_lease._Earlier.loads(json.dumps(known)) == known


@pytest.mark.parametrize("variable", ["RESHARD_MPI_STATE_DIR", "RESHARD_MPI_HOST"])
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_name_that_is_too_long(tmp_path: Path, variable: str, jobs: str) -> None:
    name = "n" * 300 if variable == "RESHARD_MPI_HOST" else str(tmp_path / ("n" * 300))
    finished = run_command([*COMMAND, *make(tmp_path).arguments(), "--jobs", jobs], env={variable: name})
    assert finished.code == 3 and finished.err.count("File name too long") == 1, finished
    assert "RESHARD_MPI_STATE_DIR" in finished.err and "Traceback" not in finished.err, finished


@pytest.mark.slow
@pytest.mark.parametrize("command", ["transform", "verify"])
def test_a_parent_that_ignores_the_end_of_children(c: Conversion, command: str) -> None:
    if command == "verify":
        run_command([*COMMAND, *c.arguments("transform", "--verify")], check=True)
    arguments = c.arguments() if command == "transform" else ["verify", str(c.dst)]
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    finished = run_command([sys.executable, "-c", ignoring, *map(str, [*COMMAND, *arguments, "--jobs", "2"])])
    assert finished.code == 0, finished
