"""Starts the command line by forking a process that has loaded it already, which saves most of its start (`Zygote`).

What is forked is a process of its own in all else: it has its own arguments, environment, folder and streams, and ends
with its own exit code or signal. It shows nothing of what a start takes: time, memory, and what is loaded.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import marshal
import os
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

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
    "reshard_mpi.planning.made_tensors",
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
_TESTS = Path(__file__).parents[1]


class Zygote:
    """A process that starts commands, of this interpreter: `python -m reshard_mpi ...` or `python -c PROGRAM ...`.

    env: added to a clean environment, its own and that of all that it starts. It ends when this object is gone.
    """

    def __init__(self, env: Mapping[str, str] | None = None, modules: Sequence[str] = PLAIN) -> None:
        self._env = env or {}
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._end = weakref.finalize(self, _end, *_started(theirs, self._env, modules))

    def run(
        self,
        argv: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        timeout_seconds: float = HANG_SECONDS,
    ) -> Finished:
        """Run a command without standard input, and return what came of it, as `processes.run_command` does.

        env: added to the environment of this command alone.
        """
        command = tuple(os.fspath(part) for part in argv)
        assert command[0] == sys.executable, command
        with Path(os.devnull).open("rb") as null, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            environment = {**clean_environment(), **self._env, **(env or {})}
            asked = marshal.dumps(([*command], environment, str(Path.cwd())))
            socket.send_fds(self._socket, [asked], [stream.fileno() for stream in (null, out, err)])
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


@functools.cache
def zygote() -> Zygote:
    """Return the one from which commands of all tests of this process may be forked."""
    return Zygote()


# `reshard-mpi` for a shell. Under a launcher, or where other modules are to be found, it is the real one.
_SHIM = """#!{python} -IS
import _socket, marshal, os, sys
env = dict(os.environ)
begins = ("HYDRA_", "MPI", "OMPI_", "PMI", "PRTE_", "SLURM_")
if env.get("PYTHONPATH", "") != {path!r} or any(name.startswith(begins) for name in env):
    os.execv({real!r}, [{real!r}, *sys.argv[1:]])
connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
connection.connect({socket!r})
asked = marshal.dumps(([{python!r}, "-m", "reshard_mpi", *sys.argv[1:]], env, os.getcwd()))
streams = b"".join(number.to_bytes(4, sys.byteorder) for number in range(3))
connection.sendmsg([asked], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
connection.recv(32)
code = int(connection.recv(32))
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


class ShellZygote:
    """A process that is `reshard-mpi` for shells in whose PATH `folder` comes first, with this PYTHONPATH."""

    def __init__(self, python_path: str) -> None:
        self._folder = tempfile.TemporaryDirectory()  # whose path is short, as those of sockets must be
        self.folder = Path(self._folder.name)
        address, shim = self.folder / "socket", self.folder / "reshard-mpi"
        real = str(Path(sysconfig.get_path("scripts"), "reshard-mpi"))
        shim.write_text(_SHIM.format(python=sys.executable, path=python_path, socket=str(address), real=real))
        shim.chmod(0o755)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(address))
        listener.listen(8)
        self._end = weakref.finalize(self, _end, *_started(listener, {}, PLAIN))


def _started(
    theirs: socket.socket, env: Mapping[str, str], modules: Sequence[str]
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start the process that serves a socket; return what ends it when it is closed, and the process."""
    ours, living = socket.socketpair()
    path = os.pathsep.join(filter(None, [str(_TESTS), os.environ.get("PYTHONPATH", "")]))
    descriptors = [theirs.fileno(), living.fileno()]
    command = [sys.executable, "-c", "from support.zygote import serve; serve()", *map(str, descriptors), *modules]
    with theirs, living:
        process = subprocess.Popen(
            command,
            env={**clean_environment(), **env, **ONE_THREAD, "PYTHONPATH": path},
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
        )
    return ours, process


def _end(connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
    connection.close()
    process.wait()


def _of_session(session: int, *, wait: bool) -> list[int]:
    """Return the living processes of a session; with `wait`, those that are still there after a minute."""
    for seconds in (*([0.02] * 3000 if wait else ()), 0):
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
    asks, lives, *modules = sys.argv[1:]
    for name in modules:
        importlib.import_module(name)
    gc.freeze()
    with socket.socket(fileno=int(asks)) as asking, socket.socket(fileno=int(lives)) as living:
        is_listener = asking.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        while True:
            ready, _, _ = select.select([asking, living], [], [])
            if living in ready:  # nobody is at its other end
                return
            if not is_listener:
                _start(asking, (asking, living))
                continue
            connection = asking.accept()[0]
            with connection:
                _start(connection, (connection, asking, living))


def _start(connection: socket.socket, ours: Sequence[socket.socket]) -> None:
    """Be told of a command, start it, and say which process it is, and then how it has ended."""
    asked, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 3)
    if not asked:
        return
    process = os.fork()
    if process == 0:
        for each in ours:
            each.close()
        _be(*marshal.loads(asked), descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    with contextlib.suppress(ConnectionError):  # who has asked may have been killed meanwhile
        connection.send(str(process).encode())
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with contextlib.suppress(ConnectionError):
        connection.send(str(code).encode())


def _customize(path: str) -> None:
    """Do what an interpreter with this PYTHONPATH does at its start: import the `sitecustomize` that lies there."""
    folders = [folder for folder in path.split(os.pathsep) if folder]
    if any(Path(folder, "sitecustomize.py").exists() for folder in folders):
        sys.path[:0] = folders
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")


def _be(argv: list[str], env: dict[str, str], cwd: str, descriptors: Sequence[int]) -> None:
    """Be a command with these arguments, environment, working folder and streams. It never returns."""
    code = 99
    try:
        os.setsid()
        for descriptor, stream in zip(descriptors, range(3)):
            os.dup2(descriptor, stream)
            os.close(descriptor)
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        sys.orig_argv = argv
        _, kind, what, *arguments = argv
        sys.path[:] = [path for path in sys.path if path not in ("", str(_TESTS))]
        _customize(env.get("PYTHONPATH", ""))
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
