"""Begin runs for the public functions: requests, progress, errors (`request_of`, `run`, `public`)."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

from reshard_mpi import formats
from reshard_mpi.errors import UsageError, as_reshard_error, told, wrong_type
from reshard_mpi.filesystem.source_files import look_again
from reshard_mpi.options import EXCLUSIVE, OPTIONS, check_number, check_path
from reshard_mpi.processes import memory_scopes
from reshard_mpi.processes.comm import Comm, MPIComm, SerialComm
from reshard_mpi.runs.monitor import monitored
from reshard_mpi.runs.outcome import Outcome, Report
from reshard_mpi.runs.progress import Display, Progress, RunStatus, Words, log, log_warning
from reshard_mpi.runs.request import Request, Task
from reshard_mpi.runs.workers import run_with_workers

P = ParamSpec("P")
R = TypeVar("R")

# How far apart two calls are.
_INTERVAL_SECONDS = 0.5

OnProgress = Callable[[RunStatus], object]


class CallbackDisplay(Display):
    """The display of a caller's function. If it raises, the error is logged, and it is not called again."""

    def __init__(self, on_progress: OnProgress | None) -> None:
        super().__init__()
        self._on_progress = on_progress
        self._next_seconds = 0.0

    def update(self, status: RunStatus) -> None:
        if status.seconds >= self._next_seconds:
            self._next_seconds = status.seconds + _INTERVAL_SECONDS
            self._tell(status)

    def say(self, text: str) -> None:
        log_warning(text)

    def close(self, status: RunStatus) -> None:
        self._tell(status)

    def _tell(self, status: RunStatus) -> None:
        if self._on_progress is None:
            return
        try:
            self._on_progress(status)
        except Exception:
            import logging

            logging.getLogger("reshard_mpi").exception("the function that is told the progress has failed")
            self._on_progress = None


def shown_to(on_progress: OnProgress | None, comm: Comm) -> AbstractContextManager[Progress]:
    """Give the progress of a run, which a caller's function is told until its end. Every process must call this.

    The function is called on rank 0, if it is given there.
    """
    if not any(comm.allgather(on_progress is not None)):
        return nullcontext(Progress())
    return monitored(Words() if comm.rank else CallbackDisplay(on_progress), comm)


PathLike = str | os.PathLike[str]

# What every call needs is loaded with the functions, so that the first call takes no longer than others.
memory_scopes.prepare()
Task.CONVERT.load()


def public(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function public: all that it raises is a ReshardError, also where the file system or memory fails."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (OSError, MemoryError) as error:
            raise as_reshard_error(error) from error

    return call


def request_of(arguments: Mapping[str, Any], **called: str) -> Request:
    """Build a request from the arguments of a public function; arguments that no run uses are ignored.

    A new call looks anew at what lies in object stores.

    Args:
        called: what the function calls the arguments for some fields of the request, where it has other names for them.

    Raises UsageError for wrong values, and for arguments that exclude each other.
    """
    look_again()
    checks: dict[str, Callable[[Any, str], Any]] = {name: option.check for name, option in OPTIONS.items()}
    given: dict[str, Any] = {"source": "", "target": ""}
    for field, check in {"source": check_path, "target": check_path, **checks}.items():
        name = called.get(field, field)
        if name in arguments and field in Request._fields:
            given[field] = check(arguments[name], name)
    request = Request.of(given)
    for one, other in EXCLUSIVE:
        if all(getattr(request, field) not in (False, None) for field in (one, other)):
            raise UsageError(f"{one} and {other} exclude each other", expected="one of them", got="both")
    return request


def run(
    request: Request,
    processes: int,
    communicator: Any,
    work: Task = Task.CONVERT,
    *,
    progress: OnProgress | None = None,
) -> Report:
    """Do the work that a request asks for, in local processes or with a communicator; log its notes and warnings.

    Args:
        progress: the caller's function that is told it.

    Raises the error that refused the run, or one for what has failed in it.
    """
    begin = time.monotonic()
    outcome = outcome_of(request, processes, communicator, work, progress=progress)
    return Report.of(outcome, time.monotonic() - begin)


def outcome_of(
    request: Request, processes: int, communicator: Any, work: Task, *, progress: OnProgress | None = None
) -> Outcome:
    """Do as `run`, and return all that has come out."""
    comm = SerialComm() if communicator is None else MPIComm(communicator)
    with shown_to(progress, comm) as shown:
        if processes > 1 and communicator is None:
            outcome = run_with_workers(request, processes, shown, work)
        else:
            outcome = work.run(request, comm, shown)
    if communicator is None or communicator.Get_rank() == 0:
        log(outcome.notes, (*outcome.warnings, *map(told, formats.left_out().values())))
    if work is Task.CONVERT and request.target_file is None and request.files is None:
        outcome.raise_failures()
    elif outcome.failures:
        first = outcome.failures[0].named(alone=True)
        if len(outcome.failures) > 1:
            first.problem += f" (and {len(outcome.failures) - 1} more found)"
        raise first
    return outcome


def check_files(files: object, name: str) -> dict[int, str]:
    """Return the paths that the argument `name` lists by rank. Raises UsageError if it is no such map."""
    if not isinstance(files, Mapping):
        raise wrong_type(name, "a dict from rank to checkpoint file", files)
    by_rank = {}
    for rank, path in files.items():
        number = check_number(rank, f"a rank in {name}")
        by_rank[number] = check_path(path, f"the file of rank {number} in {name}")
    return by_rank
