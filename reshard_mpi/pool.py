"""Local processes: workers that run as the processes of one run, and the parent that connects them.

Workers are forked from a fresh interpreter that has loaded what moves bytes and nothing else: no MPI, no HDF5, no
threads. So what is loaded is loaded once, however many workers there are. The command line is such an interpreter; a
caller of the Python functions may be anything, so there one is started. A worker that dies is reported with the target
it was writing.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from reshard_mpi.errors import ReshardError, TransformError, as_reshard_error
from reshard_mpi.report import Failure, Outcome, Progress, TargetReport
from reshard_mpi.request import Request, Strategies
from reshard_mpi.signals import INTERRUPTED, exit_when_terminated
from reshard_mpi.threads import ONE_THREAD

T = TypeVar("T")

_START = "from reshard_mpi.pool import parent_main; parent_main({descriptor})"
# What must not be there when a process is forked: libraries whose state does not survive it.
_NOT_TO_FORK = ("h5py", "mpi4py.MPI")
_THREADS = Path("/proc/self/task")
_PROGRESS_SECONDS = 0.1
_STOP_SECONDS = 10.0
# So many processes move the bytes of even a single target faster; more would only wait for the same disk.
_ALWAYS_USEFUL = 8


class PipeComm:
    """A worker's side: values go through the parent."""

    def __init__(self, connection: Connection, rank: int, size: int) -> None:
        self._connection = connection
        self.rank = rank
        self.size = size
        self.hosts = (0,) * size

    def allgather(self, value: T, step: str) -> list[T]:
        self._connection.send(("gather", value))
        values: list[T] = self._connection.recv()
        return values


class PipeProgress:
    """Tells the parent what a worker does, not more often than is worth it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._moved_bytes = 0
        self._next = 0.0

    def assigned(self, ranks: tuple[int, ...]) -> None:
        self._connection.send(("assigned", (ranks,)))

    def started(self, rank: int, written_bytes: int) -> None:
        self._connection.send(("started", (rank, written_bytes)))

    def moved(self, count_bytes: int) -> None:
        self._moved_bytes += count_bytes
        if time.monotonic() >= self._next:
            self._flush()

    def finished(self, report: TargetReport) -> None:
        self._flush()
        self._connection.send(("finished", (report,)))

    def close(self) -> None:
        pass

    def _flush(self) -> None:
        self._next = time.monotonic() + _PROGRESS_SECONDS
        self._connection.send(("moved", (self._moved_bytes,)))
        self._moved_bytes = 0


@dataclass(slots=True)
class _Worker:
    """A worker and what is known of it: the targets it has still to make, the one it is at, those it has made."""

    process: BaseProcess
    connection: Connection
    to_make: tuple[int, ...] = ()
    target: int | None = None
    made: tuple[TargetReport, ...] = ()
    alive: bool = True
    gathering: bool = False
    value: Any = None
    lost: Outcome = field(default_factory=Outcome)


def convert_with_workers(request: Request, jobs: int | None, progress: Progress) -> Outcome:
    """Run `convert` in `jobs` local processes and return what they did together.

    jobs: None for one a core, but no more than are useful. Raises what refused the run. A worker's death is a failure
    of the target it was making.
    """
    if not _may_fork():
        return _convert_elsewhere(request, jobs, progress)
    reading = _Reading(request)
    # While that process reads the strategies, this one loads all that the workers need.
    from reshard_mpi import runtime  # noqa: F401

    strategies = reading.result()
    size = jobs or min(len(os.sched_getaffinity(0)), max(_ALWAYS_USEFUL, strategies.target.world_size))
    workers: list[_Worker] = []
    try:
        for rank in range(size):
            workers.append(_start(workers, request, strategies, rank, size))
        return _serve(workers, progress)
    except ReshardError:
        raise
    except BaseException:
        for worker in workers:
            worker.process.terminate()
        raise
    finally:
        _join(workers)


def parent_main(descriptor: int) -> None:
    """Be the parent of workers for a process that must not fork; it is at the other end of the connection."""
    exit_when_terminated()
    connection: Connection = Connection(descriptor)
    with _ends_quietly():
        request, jobs = connection.recv()
        try:
            result: Outcome | ReshardError = convert_with_workers(request, jobs, PipeProgress(connection))
        except ReshardError as error:
            result = error
        connection.send(("result", result))


def _may_fork() -> bool:
    """Tell whether nothing in this process would be broken in a fork of it."""
    return len(list(_THREADS.iterdir())) == 1 and not any(name in sys.modules for name in _NOT_TO_FORK)


class _Reading:
    """A process that reads the strategies."""

    def __init__(self, request: Request) -> None:
        self._connection, theirs = Pipe(duplex=False)
        self._process = _fork(_read_strategies, theirs, request)
        theirs.close()

    def result(self) -> Strategies:
        """Return what has been read. Raises what is wrong with it."""
        try:
            found: Strategies | ReshardError = self._connection.recv()
        except EOFError:
            self._process.join()
            cause = _cause(self._process.exitcode or 0)
            raise TransformError("the process that reads the strategies died", got=cause) from None
        finally:
            self._connection.close()
            self._process.join()
        if isinstance(found, ReshardError):
            raise found
        return found


def _read_strategies(connection: Connection, request: Request) -> None:
    with _ends_quietly():
        try:
            connection.send(Strategies.read(request))
        except (ReshardError, OSError) as error:
            connection.send(as_reshard_error(error))


def _fork(work: Callable[..., None], *arguments: object) -> BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=work, args=arguments)
    process.start()
    return process


def _convert_elsewhere(request: Request, jobs: int | None, progress: Progress) -> Outcome:
    """Have a fresh interpreter be the parent of the workers."""
    ours, theirs = Pipe()
    imports = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-c", _START.format(descriptor=theirs.fileno())],
        pass_fds=(theirs.fileno(),),
        stdin=subprocess.DEVNULL,
        env={**os.environ, **ONE_THREAD, "PYTHONPATH": imports},
        process_group=0,  # an interrupt from the terminal is for the caller, which ends the others itself
    )
    theirs.close()
    try:
        ours.send((request, jobs))
        while True:
            kind, value = ours.recv()
            if kind == "result":
                break
            _tell(progress, kind, value)
    except (EOFError, ConnectionResetError, BrokenPipeError):
        raise TransformError("the parent of the worker processes died", got=_cause(process.wait())) from None
    finally:
        ours.close()
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if isinstance(value, ReshardError):
        raise value
    outcome: Outcome = value
    return outcome


def _start(others: list[_Worker], request: Request, strategies: Strategies, rank: int, size: int) -> _Worker:
    ours, theirs = Pipe()
    not_its_own = (ours, *(worker.connection for worker in others))
    process = _fork(_work, PipeComm(theirs, rank, size), PipeProgress(theirs), theirs, not_its_own, request, strategies)
    theirs.close()
    return _Worker(process, ours)


def _work(
    comm: PipeComm,
    progress: PipeProgress,
    connection: Connection,
    not_its_own: tuple[Connection, ...],
    request: Request,
    strategies: Strategies,
) -> None:
    """Be a worker."""
    from reshard_mpi.runtime import convert

    for other in not_its_own:
        other.close()
    with _ends_quietly():
        try:
            result: Outcome | ReshardError = convert(request, comm, progress, strategies)
        except ReshardError as error:
            result = error
        connection.send(("result", result))


@contextlib.contextmanager
def _ends_quietly() -> Iterator[None]:
    """End this process without a word where there is nothing to say or nobody left to hear it."""
    os.setpgid(0, 0)  # an interrupt from the terminal is for the parent, which ends the others itself
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except (BrokenPipeError, EOFError, ConnectionResetError):
        sys.exit(1)  # the parent is gone, and with it whoever wanted to know


def _serve(workers: list[_Worker], progress: Progress) -> Outcome:
    """Pass gathered values around until every worker has said its result or is lost."""
    result: Outcome | ReshardError | None = None
    lost = Outcome()
    open_workers = list(workers)
    while open_workers:
        for ready in wait([worker.connection for worker in open_workers]):
            worker = next(worker for worker in open_workers if worker.connection is ready)
            try:
                kind, value = worker.connection.recv()
            except (EOFError, ConnectionResetError, pickle.UnpicklingError):
                open_workers.remove(worker)
                worker.alive = False
                worker.lost = _death(worker)
                lost = lost.joined([worker.lost])
                continue
            if kind == "result":
                open_workers.remove(worker)
                result = value
            elif kind == "gather":
                worker.gathering, worker.value, worker.target = True, value, None
            else:
                _note(worker, kind, value)
                _tell(progress, kind, value)
        waiting = [worker for worker in open_workers if worker.gathering]
        if waiting and len(waiting) == len(open_workers):
            values = [worker.value if worker.alive else worker.lost for worker in workers]
            for worker in waiting:
                worker.gathering = False
                with contextlib.suppress(BrokenPipeError):
                    worker.connection.send(values)
    if isinstance(result, ReshardError):
        raise result
    return result if result is not None else lost


def _tell(progress: Progress, kind: str, arguments: tuple[Any, ...]) -> None:
    getattr(progress, kind)(*arguments)


def _note(worker: _Worker, kind: str, arguments: tuple[Any, ...]) -> None:
    if kind == "assigned":
        (worker.to_make,) = arguments
    elif kind == "started":
        worker.target = arguments[0]
    elif kind == "finished":
        worker.target = None
        worker.made += arguments


def _death(worker: _Worker) -> Outcome:
    """Return what a worker that died has made, and failures for what it has not."""
    worker.process.join()
    code = worker.process.exitcode or 0
    hint = {
        -signal.SIGKILL: "killed from outside, as the kernel does when memory runs out: try fewer --jobs",
        -signal.SIGBUS: "a source file became shorter while it was read: make sure nothing writes to the source",
    }.get(code, "")
    at = "between targets" if worker.target is None else f"while it wrote target rank {worker.target}"
    error = TransformError("a worker process died", expected="a result", got=f"{_cause(code)} {at}", remedy=hint)
    made = {report.rank for report in worker.made}
    left = sorted({*worker.to_make} - made, key=lambda rank: (rank != worker.target, rank))
    return Outcome(worker.made, tuple(Failure(rank, error) for rank in left) or (Failure(None, error),))


def _cause(exit_code: int) -> str:
    return f"signal {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"


def _join(workers: list[_Worker]) -> None:
    deadline = time.monotonic() + _STOP_SECONDS
    for worker in workers:
        worker.connection.close()
        worker.process.join(max(0.0, deadline - time.monotonic()))
        if worker.process.exitcode is None:
            worker.process.kill()
            worker.process.join()
