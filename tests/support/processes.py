"""Runs commands for tests so that nothing hangs, nothing is left behind, and all output is there when a test fails."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

# Every process of a run inherits this variable, so the run's processes can be told from all others, even those that a
# launcher has put into process groups or sessions of their own.
_MARK = "RESHARD_MPI_TEST_RUN"

# What launchers leave in the environment: a child that sees it would take itself for a rank of the tests' own job.
_LAUNCHER_VARIABLES = ("HYDRA_", "MPI4PY_", "MPIR_", "OMPI_", "OPAL_", "PMIX_", "PMI_", "PRTE_", "SLURM_")

# After this a command counts as one that hangs. It shows of nothing that it is quick: machines may be slow and busy.
HANG_SECONDS = 300.0

_LINGER_SECONDS = 60.0  # how long after a command's end its children may take to go


@dataclass(frozen=True, slots=True)
class Finished:
    """A command that has ended; `code` is its exit code, negative where a signal killed it."""

    argv: tuple[str, ...]
    code: int
    out: str
    err: str

    @property
    def ended(self) -> tuple[int, str]:
        """The exit code, and all that the command complained of."""
        return self.code, self.err

    @property
    def warnings(self) -> list[str]:
        """The warnings among the lines that the command complained of."""
        return [line.removeprefix("warning: ") for line in self.err.splitlines() if line.startswith("warning: ")]

    def __str__(self) -> str:
        return report(self.argv, f"exit code {self.code}", self.out, self.err)


@dataclass(frozen=True, slots=True)
class Measured(Finished):
    """A command that has ended, and the peak resident memory of the largest single process of those it started."""

    peak_rss_bytes: int


# Now and then Open MPI cannot start its own server.
_NEVER_BEGAN = "The PMIx server's listener thread failed to start"


def clean_environment() -> dict[str, str]:
    """Return this process's environment without what an MPI or SLURM launcher put there."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER_VARIABLES)}


def run_command(
    argv: Sequence[str | os.PathLike[str]],
    *,
    timeout_seconds: float = 300,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    check: bool = False,
) -> Finished:
    """Run a command without standard input and return what came of it.

    `env` is added to a clean environment. The test fails, with the output shown, if the command takes too long or
    leaves processes behind (all are killed), or, with `check`, if its exit code is not 0. A launcher that could not
    begin is started once more: none of our processes ran.
    """
    finished = _run_once(argv, timeout_seconds, env, cwd)
    if _NEVER_BEGAN in finished.err:
        finished = _run_once(argv, timeout_seconds, env, cwd)
    if check and finished.code != 0:
        problem = f"exit code {finished.code}"
        pytest.fail(report(finished.argv, problem, finished.out, finished.err), pytrace=False)
    return finished


def _run_once(
    argv: Sequence[str | os.PathLike[str]],
    timeout_seconds: float,
    env: Mapping[str, str] | None,
    cwd: str | os.PathLike[str] | None,
) -> Finished:
    command = tuple(os.fspath(part) for part in argv)
    mark = uuid.uuid4().hex
    # Files, not pipes: a child that outlives the command would keep a pipe open.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**clean_environment(), **(env or {}), _MARK: mark},
            cwd=cwd,
            start_new_session=True,
        )
        problem = "was interrupted"
        try:
            _wait(child, timeout_seconds)
            left = _wait_until_gone(mark)
            problem = f"left processes behind: {', '.join(left)}" if left else ""
        except subprocess.TimeoutExpired:
            problem = f"took longer than {timeout_seconds:g} seconds"
        finally:
            if problem:
                _kill(child, mark)
        stdout, stderr = _content(out), _content(err)
    if problem:
        pytest.fail(report(command, problem, stdout, stderr), pytrace=False)
    return Finished(command, child.returncode, stdout, stderr)


def measure_peak(
    argv: Sequence[str | os.PathLike[str]],
    *,
    timeout_seconds: float = 300,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> Measured:
    """Run a command and measure the peak resident memory of the largest process in its tree (ranks included).

    A process starts with the peak of the one it was forked from, so the command is started by a small one, not by
    the tests; what that takes, about 10 MiB, is the least that can be measured.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "peak")
        launcher = [sys.executable, "-I", "-S", str(Path(__file__).with_name("peak_launcher.py")), str(result)]
        finished = run_command([*launcher, *argv], timeout_seconds=timeout_seconds, env=env, cwd=cwd)
        if not result.exists():
            pytest.fail(f"the peak of a command could not be measured\n{finished}", pytrace=False)
        code, peak_rss_bytes = map(int, result.read_text().split())
    return Measured(finished.argv, code, finished.out, finished.err, peak_rss_bytes)


def processes_with(variable: str) -> dict[int, str]:
    """Return process id and command line of every living process with `variable`, NAME=VALUE, in its environment."""
    wanted = variable.encode()
    commands = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    commands[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except OSError:  # ended meanwhile, or another user's
                continue
    return commands


def _wait(child: subprocess.Popen[bytes], timeout_seconds: float) -> None:
    """Wait for the end of a process; `Popen.wait` with a time-out would look for it only every 50 ms."""
    descriptor = os.pidfd_open(child.pid)
    try:
        select.select([descriptor], [], [], timeout_seconds)
    finally:
        os.close(descriptor)
    child.wait(0)


def _wait_until_gone(mark: str) -> list[str]:
    deadline = time.monotonic() + _LINGER_SECONDS
    while left := processes_with(f"{_MARK}={mark}"):
        if time.monotonic() > deadline:
            return [f"{pid} ({command})" for pid, command in left.items()]
        time.sleep(0.02)
    return []


def _kill(child: subprocess.Popen[bytes], mark: str) -> None:
    """Kill what is left of a run; more than once, since a process may be starting another just then."""
    while left := processes_with(f"{_MARK}={mark}"):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)
    if child.poll() is None:  # it emptied its environment
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _content(file: tempfile._TemporaryFileWrapper[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def report(argv: Sequence[str], problem: str, stdout: str, stderr: str) -> str:
    """Return what is told of a command that has failed a test."""
    return f"{problem}: {' '.join(argv)}\n--- stdout\n{stdout}\n--- stderr\n{stderr}"
