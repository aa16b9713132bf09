"""The command line of the project: run in this process, in a fork of it, in a process of its own, or on ranks."""

from __future__ import annotations

import io
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

from reshard_mpi.cli import commands
from reshard_mpi.errors import ReshardError
from support.launch import MPI, mpirun_command
from support.processes import HANG_SECONDS, Finished, Measured, measure_peak, run_command

COMMAND = [sys.executable, "-m", "reshard_mpi"]
Argument = str | os.PathLike[str]


def run_here(*arguments: Argument) -> Finished:
    """Run the command line in this process: the quickest way, and the only one that sees what a test has patched."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", newline="", write_through=True) for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err):
        code = _exit_code(given := tuple(map(os.fspath, arguments)))
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]
    return Finished(("reshard-mpi", *given), code, *texts)


def done(*arguments: Argument) -> Finished:
    """Run the command line in this process, which must succeed."""
    return _succeeded(run_here(*arguments))


def refused(*arguments: Argument, code: int = ReshardError.exit_code) -> str:
    """Run the command line in this process, which must end with this exit code; return what it says of that."""
    return _complaint(run_here(*arguments), code)


def _succeeded(finished: Finished) -> Finished:
    assert finished.code == 0, finished
    return finished


def _complaint(finished: Finished, code: int) -> str:
    assert finished.code == code and "Traceback" not in finished.err, finished
    return finished.err


class CommandLine:
    """What has a command line, which is run in this process."""

    __slots__ = ()

    def arguments(self, *given: Any, **named: Any) -> list[str]:
        raise NotImplementedError

    def run(self, *given: Any, **named: Any) -> Finished:
        return run_here(*self.arguments(*given, **named))

    def done(self, *given: Any, **named: Any) -> Finished:
        return _succeeded(self.run(*given, **named))

    def refused(self, *given: Any, code: int = ReshardError.exit_code, **named: Any) -> str:
        return _complaint(self.run(*given, **named), code)


def _exit_code(arguments: tuple[str, ...]) -> int:
    """Run the command line in this process, which then handles signals as before; return its exit code."""
    handlers, hook = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)}, sys.unraisablehook
    try:
        commands.main(arguments)
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code
    finally:
        for kind, handler in handlers.items():
            signal.signal(kind, handler)
        sys.unraisablehook = hook
    raise AssertionError("the command line must exit")


def run_apart(
    *arguments: Argument,
    mpi: MPI | None = None,
    ranks: int = 2,
    env: Mapping[str, str] | None = None,
    timeout_seconds: float = 300,
    check: bool = False,
) -> Finished:
    """Run the command line in a process of its own, as users do; with `mpi`, on so many ranks. Else: `run_command`."""
    command = [*COMMAND, *arguments]
    if mpi is not None:
        command = mpirun_command(mpi, ranks, command)
    return run_command(command, env=env, timeout_seconds=timeout_seconds, check=check)


def measure_apart(*arguments: Argument, timeout_seconds: float = 300) -> Measured:
    """Run the command line in a process of its own, and measure its peak memory."""
    return measure_peak([*COMMAND, *arguments], timeout_seconds=timeout_seconds)


def run_in_fork(*arguments: str, prepare: Callable[[], object] | None = None, timeout_seconds: int = 300) -> Finished:
    """Run the command line in a fork of this process, which saves its start. prepare: what the fork does before."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = os.fork()
        if process == 0:
            code = 99
            try:
                signal.alarm(int(HANG_SECONDS))
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                sys.stdout, sys.stderr = (open(fd, "w", closefd=False) for fd in (1, 2))  # noqa: SIM115
                if prepare is not None:
                    prepare()
                try:
                    commands.main(arguments)
                except SystemExit as end:
                    code = end.code if isinstance(end.code, int) else 98
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
    return Finished(("reshard-mpi", *arguments), code, *texts)
