"""Local processes: workers started fresh, each running `convert` as one process of a run; the parent connects them.

Workers are new interpreters, not forks, so nothing of MPI, HDF5 or threads is inherited, and the caller's main module
is not run again. A worker that dies is reported with the target it was writing.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, TypeVar

from reshard_mpi.errors import ReshardError, TransformError
from reshard_mpi.report import Failure, Outcome, Progress, TargetReport
from reshard_mpi.request import Request
from reshard_mpi.signals import INTERRUPTED, exit_when_terminated

T = TypeVar("T")

_START = "from reshard_mpi.pool import worker_main; worker_main({descriptor})"
# Several processes share the cores already; libraries are not to start threads of their own.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_PROGRESS_SECONDS = 0.1
_STOP_SECONDS = 10.0


class PipeComm:
    """A worker's side: values go through the parent."""

    def __init__(self, connection: Connection, rank: int, size: int) -> None:
        self._connection = connection
        self.rank = rank
        self.size = size

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
        self._connection.send(("assigned", ranks))

    def started(self, rank: int, written_bytes: int) -> None:
        self._connection.send(("started", (rank, written_bytes)))

    def moved(self, count_bytes: int) -> None:
        self._moved_bytes += count_bytes
        if time.monotonic() >= self._next:
            self._flush()

    def finished(self, report: TargetReport) -> None:
        self._flush()
        self._connection.send(("finished", report))

    def close(self) -> None:
        pass

    def _flush(self) -> None:
        self._next = time.monotonic() + _PROGRESS_SECONDS
        self._connection.send(("moved", self._moved_bytes))
        self._moved_bytes = 0


@dataclass(slots=True)
class _Worker:
    """A worker and what is known of it: the targets it has still to make, the one it is at, those it has made."""

    process: subprocess.Popen[bytes]
    connection: Connection
    to_make: tuple[int, ...] = ()
    target: int | None = None
    made: tuple[TargetReport, ...] = ()
    alive: bool = True
    gathering: bool = False
    value: Any = None
    lost: Outcome = field(default_factory=Outcome)


def useful_workers(request: Request, jobs: int) -> int:
    """Return how many of `jobs` processes would have a target to make; at least one."""
    return max(1, min(jobs, request.most_targets())) if jobs > 1 else 1


def convert_with_workers(request: Request, jobs: int, progress: Progress) -> Outcome:
    """Run `convert` in `jobs` local processes and return what they did together.

    Raises what refused the run. A worker's death is a failure of the target it was making.
    """
    workers = [_start(request, rank, jobs) for rank in range(jobs)]
    try:
        return _serve(workers, progress)
    except ReshardError:
        raise
    except BaseException:
        for worker in workers:
            worker.process.terminate()
        raise
    finally:
        _join(workers)


def worker_main(descriptor: int) -> None:
    """Be a worker: the request comes through the connection whose descriptor is given."""
    exit_when_terminated()
    # Here, not above: the parent starts its workers before it, or they, have loaded what moves bytes.
    from reshard_mpi.runtime import convert

    connection: Connection = Connection(descriptor)
    try:
        request, rank, size = connection.recv()
        try:
            result: Outcome | ReshardError = convert(
                request, PipeComm(connection, rank, size), PipeProgress(connection)
            )
        except ReshardError as error:
            result = error
        connection.send(("result", result))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except (BrokenPipeError, EOFError, ConnectionResetError):
        sys.exit(1)  # the parent is gone, and with it whoever wanted to know


def _start(request: Request, rank: int, size: int) -> _Worker:
    ours, theirs = Pipe()
    imports = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    environment = {**os.environ, **_ONE_THREAD, "PYTHONPATH": imports}
    process = subprocess.Popen(
        [sys.executable, "-c", _START.format(descriptor=theirs.fileno())],
        pass_fds=(theirs.fileno(),),
        stdin=subprocess.DEVNULL,
        env=environment,
        process_group=0,  # an interrupt from the terminal is for the parent, which ends its workers itself
    )
    theirs.close()
    ours.send((request, rank, size))
    return _Worker(process, ours)


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
                worker.gathering, worker.value = True, value
            else:
                _tell(progress, worker, kind, value)
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


def _tell(progress: Progress, worker: _Worker, kind: str, value: Any) -> None:
    if kind == "assigned":
        worker.to_make = value
        progress.assigned(value)
    elif kind == "started":
        worker.target = value[0]
        progress.started(*value)
    elif kind == "moved":
        progress.moved(value)
    elif kind == "finished":
        worker.target = None
        worker.made += (value,)
        progress.finished(value)


def _death(worker: _Worker) -> Outcome:
    """Return what a worker that died has made, and failures for what it has not."""
    code = worker.process.wait()
    cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    hint = {
        -signal.SIGKILL: "killed from outside, as the kernel does when memory runs out: try fewer --jobs",
        -signal.SIGBUS: "a source file became shorter while it was read: make sure nothing writes to the source",
    }.get(code, "")
    at = "between targets" if worker.target is None else f"while it wrote target rank {worker.target}"
    error = TransformError("a worker process died", expected="a result", got=f"{cause} {at}", remedy=hint)
    made = {report.rank for report in worker.made}
    left = sorted({*worker.to_make} - made, key=lambda rank: (rank != worker.target, rank))
    return Outcome(worker.made, tuple(Failure(rank, error) for rank in left) or (Failure(None, error),))


def _join(workers: list[_Worker]) -> None:
    deadline = time.monotonic() + _STOP_SECONDS
    for worker in workers:
        worker.connection.close()
        try:
            worker.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
