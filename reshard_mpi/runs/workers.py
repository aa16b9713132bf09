"""Be the parent of a run's local processes: start, serve and end them (`run_with_workers`).

Workers are forked from an interpreter that has loaded the modules of its task (`Task.load`), and no MPI, no HDF5 and no
threads. So these modules are loaded once, however many workers there are; the modules of a format, and those that only
some options need, such as --verify, are loaded by each worker when it comes to them. The command line is such an
interpreter. A caller of the Python functions may be any process, so a fresh interpreter is started for it. A worker
that dies is reported with the target that it was writing.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from reshard_mpi.errors import ReshardError, TransformError, as_reshard_error
from reshard_mpi.processes.comm import SerialComm
from reshard_mpi.processes.host import ONE_THREAD, host_name
from reshard_mpi.processes.imports import fresh_interpreter, import_environment
from reshard_mpi.processes.leases import give_back_start, register_worker
from reshard_mpi.processes.signals import exit_when_terminated
from reshard_mpi.runs.monitor import monitored
from reshard_mpi.runs.outcome import Failure, Outcome, TargetReport
from reshard_mpi.runs.process_memory import RunMemory, RunProcess
from reshard_mpi.runs.progress import Progress
from reshard_mpi.runs.request import Request, Strategies, Task, list_object_stores
from reshard_mpi.runs.worker_pipes import (
    Channel,
    Fork,
    PipeComm,
    PipeDisplay,
    SharedCounts,
    ends_quietly,
    tell,
    wait_for_any,
)
from reshard_mpi.text import counted

_START = "from reshard_mpi.runs.workers import parent_main; parent_main(*{descriptors})"
# Libraries that must not be loaded when a process is forked, since their state does not survive it.
_NOT_TO_FORK = ("h5py", "mpi4py.MPI")
_TO_STOP = (signal.SIGINT, signal.SIGTERM)
_THREADS = Path("/proc/self/task")
_LOOK_AT_MEMORY = "run again; if it was killed from outside, make sure there is memory for it"
_STOP_SECONDS = 10.0


class _Worker:
    """A worker, as its parent knows it."""

    def __init__(self, rank: int, process: Fork, channel: Channel) -> None:
        self.rank, self.process, self.channel = rank, process, channel
        self.to_make: tuple[int, ...] = ()  # its targets
        self.target: int | None = None  # the one that it is making
        self.made: tuple[TargetReport, ...] = ()  # its complete ones
        self.alive = True
        # gathering, value: whether it waits for gathered values, and its own
        self.gathering, self.value = False, None
        self.lost = Outcome()  # the outcome for a worker that has died


def run_with_workers(
    request: Request, jobs: int | None, progress: Progress, task: Task = Task.CONVERT, caller: Channel | None = None
) -> Outcome:
    """Do `task` in `jobs` local processes; return their common outcome.

    Args:
        jobs: None for one on each core, but no more than are useful. If fewer than `jobs` are started, a note in the
            outcome says so.
        caller: the channel to the process that has started this one, if it is not the caller itself. Nothing more is
            sent on it, so if it becomes readable that process is gone.

    Raises EOFError when the caller is gone, and the error that refused the run. A worker that dies is a failure of the
    targets it has not made.
    """
    if not _may_fork():
        return _run_elsewhere(request, jobs, progress, task)
    with RunProcess.begun(request, SerialComm(), progress) as parent:
        memory = parent.memory
        parent.reserve_for_reading(f"reading the strategies of {request.source}")
        # Workers that are forked know what this has listed.
        list_object_stores(request, is_target_read=task is not Task.CONVERT)
        strategies = _read(request)
        task.load()  # once, before workers are forked
        size, notes = _workers_to_start(request, jobs, task, strategies, memory)
        workers: list[_Worker] = []
        counts = SharedCounts(size)

        def do_work(rank: int, channel: Channel) -> Outcome:
            register_worker(memory.lease().governor)
            channel.send(("there", None))
            progress = Progress(PipeDisplay(channel, begins=rank == 0), counts.of(rank))
            return task.run(request, PipeComm(channel, rank, size), progress, strategies)

        stopped = True
        # Signals to stop are held back while workers are started or ended, so that none of them is forgotten.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _TO_STOP)
        try:
            try:
                for rank in range(size):
                    workers.append(_start(workers, rank, partial(do_work, rank), mask))
                progress.counts_of_others = counts.read
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                result = _serve(workers, progress, memory, caller)
                stopped = False
            finally:
                signal.pthread_sigmask(signal.SIG_BLOCK, _TO_STOP)
        finally:
            _join(workers, stopped=stopped)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if isinstance(result, ReshardError):
            raise result
        return result._replace(notes=(*notes, *result.notes))


def _workers_to_start(
    request: Request, jobs: int | None, task: Task, strategies: Strategies, memory: RunMemory
) -> tuple[int, tuple[str, ...]]:
    """Return how many workers to start, as many as there is memory for, and notes if they are fewer than asked for."""
    targets = len(request.rank) if request.rank else strategies.target.world_size
    notes: tuple[str, ...] = ()
    if jobs is None:
        size = processes_by_default(targets)
    elif task in (Task.VERIFY_ALONE, Task.VERIFY_PAIR):
        size, notes = processes_of_use(jobs, _count_shards(request, task) or 1, "shard", together=False)
    else:  # several processes compare the tensors of two checkpoints
        size, notes = processes_of_use(jobs, targets, "target", together=True)
    parameters = max(len(strategies.target.parameters), len(strategies.source.parameters) if strategies.source else 0)
    useful, size = size, memory.reserve_for_workers(size, parameters)
    if size < useful and jobs is not None:
        notes = (*notes, f"{size} of {useful} processes were started: there can be no memory for more at once")
    return size, notes


def parent_main(*descriptors: int) -> None:
    """Be the parent of workers for a process that must not fork, which is at the other end of the channel."""
    exit_when_terminated()
    channel = Channel(*descriptors)
    with ends_quietly():
        request, jobs, task = channel.receive()
        try:
            with monitored(PipeDisplay(channel), SerialComm()) as progress:
                result: Outcome | ReshardError = run_with_workers(request, jobs, progress, task, channel)
        except ReshardError as error:
            result = error
        channel.send(("result", result))


def _may_fork() -> bool:
    """Tell whether this process may be forked: it has one thread, and none of the libraries that must not be forked."""
    return len(list(_THREADS.iterdir())) == 1 and not any(name in sys.modules for name in _NOT_TO_FORK)


def _read(request: Request) -> Strategies:
    try:
        return Strategies.read(request)
    except OSError as error:
        raise as_reshard_error(error) from error


def _count_shards(request: Request, task: Task) -> int:
    """Return how many shards there are to verify; 0 if that is unknown, for which the workers will raise an error."""
    from reshard_mpi.checkpoints import discovery

    try:
        files = request.shard_files() if task is Task.VERIFY_ALONE else discovery.find_shards(request.target)
        return len(files.by_rank)
    except (ReshardError, OSError):
        return 0


def _run_elsewhere(request: Request, jobs: int | None, progress: Progress, task: Task) -> Outcome:
    """Have a fresh interpreter be the parent of the workers."""
    import subprocess

    ours, theirs = Channel.pair()
    process = subprocess.Popen(
        fresh_interpreter(_START.format(descriptors=theirs.descriptors)),
        pass_fds=theirs.descriptors,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **ONE_THREAD, **import_environment()},
        process_group=0,  # an interrupt from the terminal is for the caller, which ends the others itself
    )
    theirs.close()
    try:
        ours.send((request, jobs, task))
        while True:
            kind, value = ours.receive()
            if kind == "result":
                break
            tell(progress.display, kind, value)
    except (EOFError, ConnectionResetError, BrokenPipeError):
        problem, cause = "the parent of the worker processes died", _cause(process.wait())
        raise TransformError(problem, expected="a result", got=cause, remedy=_LOOK_AT_MEMORY) from None
    finally:
        ours.close()
        process.terminate()
        try:
            process.wait(2 * _STOP_SECONDS)  # it may have to wait for workers, and then to kill them
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if isinstance(value, ReshardError):
        raise value
    outcome: Outcome = value
    return outcome


def _start(others: list[_Worker], rank: int, do_work: Callable[[Channel], Outcome], mask: Iterable[int]) -> _Worker:
    """Fork a worker. others: those started before. mask: the signals that are blocked in it."""
    ours, theirs = Channel.pair()

    def be_worker() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for other in (ours, *(worker.channel for worker in others)):
            other.close()  # or the worker at its other end would not see that the parent has closed it
        _send_result_of(do_work, theirs)

    process = Fork(be_worker)
    theirs.close()
    return _Worker(rank, process, ours)


def _send_result_of(do_work: Callable[[Channel], Outcome], channel: Channel) -> None:
    """Do a worker's part of the work, and send the result to the parent."""
    with ends_quietly():
        try:
            result: Outcome | ReshardError = do_work(channel)
        except ReshardError as error:
            result = error
        give_back_start()
        channel.send(("result", result))


def _serve(
    workers: list[_Worker], progress: Progress, memory: RunMemory, caller: Channel | None
) -> Outcome | ReshardError:
    """Serve the workers until each has sent its result or died; return their result, which is the same for all.

    When all that are alive have sent a value to gather, each gets the values of all. Raises EOFError if the caller is
    gone, before the workers begin anything more.
    """
    callers = () if caller is None else (caller,)
    result: Outcome | ReshardError | None = None
    lost = Outcome()
    open_workers = list(workers)
    while open_workers:
        for ready in wait_for_any((*callers, *(worker.channel for worker in open_workers))):
            if ready is caller:
                raise EOFError
            worker = next(worker for worker in open_workers if worker.channel is ready)
            try:
                kind, value = worker.channel.receive()
            except (EOFError, ConnectionResetError, pickle.UnpicklingError):
                open_workers.remove(worker)
                worker.alive = False
                worker.lost = _death(worker)
                lost = lost.joined([worker.lost])
                continue
            if kind == "result":
                open_workers.remove(worker)
                result = value
            elif kind == "there":
                memory.lease().worker_is_there()
            elif kind == "gather":
                worker.gathering, worker.value, worker.target = True, value, None
            else:
                _remember(worker, kind, value)
                tell(progress.display, kind, value)
        waiting = [worker for worker in open_workers if worker.gathering]
        if waiting and len(waiting) == len(open_workers):
            values = [worker.value if worker.alive else worker.lost for worker in workers]
            for worker in waiting:
                worker.gathering = False
                with contextlib.suppress(BrokenPipeError):
                    worker.channel.send(values)
    return result if result is not None else lost._replace(processes=len(workers))


def _remember(worker: _Worker, kind: str, arguments: tuple[Any, ...]) -> None:
    if kind == "assigned":
        (worker.to_make,) = arguments
    elif kind == "started":
        worker.target = arguments[0]
    elif kind == "finished":
        worker.target = None
        worker.made += arguments


def _death(worker: _Worker) -> Outcome:
    """Return the outcome for a worker that died: the targets it has made, and failures for the others."""
    code = worker.process.wait()
    hint = {
        -signal.SIGKILL: "killed from outside, as the kernel does when memory runs out: try fewer --jobs",
        -signal.SIGBUS: "a source file became shorter while it was read: make sure nothing writes to the source",
    }.get(code, "")
    moment = "between targets" if worker.target is None else f"while it wrote target rank {worker.target}"
    error = TransformError("a worker process died", expected="a result", got=f"{_cause(code)} {moment}", remedy=hint)
    finished = {report.rank for report in worker.made}
    left = sorted({*worker.to_make} - finished, key=lambda rank: (rank != worker.target, rank))
    host = host_name(os.environ)
    return Outcome(worker.made, tuple(Failure(rank, worker.rank, host, error) for rank in left or (None,)))


def _cause(exit_code: int) -> str:
    return f"signal {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"


def _join(workers: list[_Worker], *, stopped: bool) -> None:
    """Wait until the workers end; if the run is `stopped`, terminate them first. Kill late ones."""
    deadline = time.monotonic() + _STOP_SECONDS
    for worker in workers:
        if stopped:
            worker.process.terminate()
        worker.channel.close()
    for worker in workers:
        if not worker.process.ends_within(max(0.0, deadline - time.monotonic())):
            worker.process.kill()
            worker.process.wait()


# Up to this number, processes make even a single target faster; more would only wait for the same disk.
_ALWAYS_USEFUL = 8
# On a slow file system more processes than cores may help; beyond this they only take memory.
_MOST_A_CORE = 32
# The pipes to a worker, and other files that a process has open.
_DESCRIPTORS_A_WORKER = 2
_OTHER_DESCRIPTORS = 64


def processes_by_default(targets: int) -> int:
    """Return how many processes make `targets` targets unless the user says: one a core, as far as they are of use."""
    return min(_cores(), max(_ALWAYS_USEFUL, targets))


def processes_of_use(asked: int, units: int, unit: str, *, together: bool) -> tuple[int, tuple[str, ...]]:
    """Return how many processes to start if the user asks for `asked`, and a note if they are fewer.

    Args:
        units: how many things there are to work on.
        unit: what these are called.
        together: several may work on one.
    """
    per_unit, cores = _ALWAYS_USEFUL if together else 1, _cores()
    limits = {
        units * per_unit: f"{_there_are(units, unit)}, and no more than {per_unit} can work on one",
        cores * _MOST_A_CORE: f"{_there_are(cores, 'core')}, and more than {_MOST_A_CORE} on one are of no use",
    }
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors != resource.RLIM_INFINITY:
        connected = max(1, (descriptors - _OTHER_DESCRIPTORS) // _DESCRIPTORS_A_WORKER)
        limits[connected] = f"no more than {descriptors} files may be open (ulimit -n)"
    size = min(limits)
    if asked <= size:
        return asked, ()
    return size, (f"{asked} processes were asked for, {size} started: {limits[size]}",)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _there_are(count: int, what: str) -> str:
    return f"there {'is' if count == 1 else 'are'} {counted(count, what)}"
