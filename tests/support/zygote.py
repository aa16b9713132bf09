"""Starts the command line by forking a process that has loaded it already, which saves most of its start (`Zygote`).

What is forked is a process of its own in all else: it has its own arguments, environment, folder and streams, and ends
with its own exit code or signal. It shows nothing of what a start takes: time, memory, and what is loaded.
"""

from __future__ import annotations

import array
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from reshard_mpi.processes.host import ONE_THREAD
from support.processes import HANG_SECONDS, Finished, clean_environment, report

# What conversions load.
PLAIN = (
    "reshard_mpi.checkpoints.compare_replicas",
    "reshard_mpi.cli.commands",
    "reshard_mpi.engine.first_difference",
    "reshard_mpi.engine.gather",
    "reshard_mpi.formats.ckpt",
    "reshard_mpi.planning.map_routes",
    "reshard_mpi.processes.memory_scopes",
    "reshard_mpi.runs.monitor",
    "reshard_mpi.runs.transform",
    "reshard_mpi.runs.workers",
    "reshard_mpi.sharding.strategy_files",
    "psutil",
)
# What those to HDF5 load besides. Where it is loaded no workers are forked.
HDF5 = ("reshard_mpi.formats.hdf5.writer", "h5py")
_MESSAGE_BYTES = 1 << 20


class Zygote:
    """A process that starts commands, of this interpreter: `python -m reshard_mpi ...` or `python -c PROGRAM ...`.

    env: added to a clean environment, its own and that of all that it starts. It ends when this object is gone.
    """

    def __init__(self, env: Mapping[str, str] | None = None, modules: Sequence[str] = PLAIN) -> None:
        self._env = env or {}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))
        command = [sys.executable, "-c", "from support.zygote import serve; serve()", str(theirs.fileno()), *modules]
        with theirs:
            process = subprocess.Popen(
                command,
                env={**clean_environment(), **self._env, **ONE_THREAD, "PYTHONPATH": path},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._socket = ours
        self._end = weakref.finalize(self, _end, ours, process)

    def run(self, argv: Sequence[str | os.PathLike[str]], *, timeout_seconds: float = HANG_SECONDS) -> Finished:
        """Run a command without standard input, and return what came of it, as `processes.run_command` does."""
        command = tuple(os.fspath(part) for part in argv)
        assert command[0] == sys.executable, command
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            env = {**clean_environment(), **self._env}
            asked = json.dumps({"argv": command, "env": env, "cwd": str(Path.cwd())}).encode()
            descriptors = array.array("i", [out.fileno(), err.fileno()])
            self._socket.sendmsg([asked], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
            session = int(self._socket.recv(_MESSAGE_BYTES))
            problem = "was interrupted"
            try:
                ready, _, _ = select.select([self._socket], [], [], timeout_seconds)
                problem = "" if ready else f"took longer than {timeout_seconds:g} seconds"
            finally:
                left = _of_session(session, wait=not problem)
                if problem or left:
                    _kill(session)
            code = int(self._socket.recv(_MESSAGE_BYTES))
            problem = problem or (f"left processes behind: {left}" if left else "")
            texts = []
            for stream in (out, err):
                stream.seek(0)
                texts.append(stream.read().decode(errors="replace"))
        if problem:
            pytest.fail(report(command, problem, *texts), pytrace=False)
        return Finished(command, code, *texts)


def _end(connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
    connection.close()
    process.wait()


def _of_session(session: int, *, wait: bool) -> list[int]:
    """Return the living processes of a session; with `wait`, those that are still there after a while."""
    for seconds in (*([0.02] * 500 if wait else ()), 0):
        living = []
        for folder in filter(lambda path: path.name.isdigit(), Path("/proc").iterdir()):
            try:
                state, _, _, own = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:  # it has ended meanwhile
                continue
            if int(own) == session and state != "Z":
                living.append(int(folder.name))
        if not living or not seconds:
            return living
        select.select([], [], [], seconds)
    return living


def _kill(session: int) -> None:
    while living := _of_session(session, wait=False):
        for process in living:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        select.select([], [], [], 0.02)


def serve() -> None:
    """Be the process that starts commands, one at a time, until nobody asks any more."""
    number, *modules = sys.argv[1:]
    for name in modules:
        importlib.import_module(name)
    gc.freeze()
    with socket.socket(fileno=int(number)) as connection:
        while True:
            asked, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 2)
            if not asked:
                return
            process = os.fork()
            if process == 0:
                connection.close()
                _be(json.loads(asked), descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            connection.send(str(process).encode())
            code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            connection.send(str(code).encode())


def _be(asked: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Be the command that is asked for. It never returns."""
    code = 99
    try:
        os.setsid()
        for descriptor, stream in zip(descriptors, (1, 2)):
            os.dup2(descriptor, stream)
            os.close(descriptor)
        os.chdir(asked["cwd"])
        os.environ.clear()
        os.environ.update(asked["env"])
        sys.orig_argv = list(asked["argv"])
        _, kind, what, *arguments = asked["argv"]
        sys.path.remove(str(Path(__file__).parents[1]))
        if kind == "-m":
            assert what == "reshard_mpi"
            from reshard_mpi.__main__ import command

            sys.argv = [what, *arguments]
            command()
        sys.argv = [kind, *arguments]
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        for text in (sys.stdout, sys.stderr):
            text.flush()
        os._exit(code)
