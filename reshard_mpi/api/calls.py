"""Begin runs for the public functions: requests, progress, reports (`request_of`, `run`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from enum import StrEnum
from functools import partial
from typing import Any, TypeVar

from reshard_mpi import formats
from reshard_mpi.api.arguments import (
    all_in_python,
    or_none,
    plain_bytes,
    plain_files,
    plain_flag,
    plain_maps,
    plain_number,
    plain_numbers,
    plain_path,
    plain_share,
    plain_size,
    plain_text,
    plain_texts,
)
from reshard_mpi.checkpoints import discovery
from reshard_mpi.errors import UsageError
from reshard_mpi.filesystem.paths import require_reachable
from reshard_mpi.planning.parameters import Accumulated, Unlisted
from reshard_mpi.planning.replicas import Replicas
from reshard_mpi.processes.comm import Comm, MPIComm, SerialComm
from reshard_mpi.processes.governor import scopes
from reshard_mpi.runs.monitor import Display, ProgressMonitor, RankProgress, RootProgress
from reshard_mpi.runs.outcome import Outcome, Report
from reshard_mpi.runs.progress import RunProgress, RunStatus, Silent, ended, log, log_warning
from reshard_mpi.runs.request import Request
from reshard_mpi.runs.workers import Task, run_with_workers
from reshard_mpi.sharding import strategy
from reshard_mpi.sharding.placement import Strategy, unsharded

# How far apart two calls are.
_INTERVAL_SECONDS = 0.5

OnProgress = Callable[[RunStatus], object]


class CallbackDisplay(Display):
    """The display of a caller's function. If it raises, the error is logged, and it is not called again."""

    def __init__(self, on_progress: OnProgress | None) -> None:
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


def shown_to(on_progress: OnProgress | None, comm: Comm) -> AbstractContextManager[RunProgress]:
    """Give what tells a caller's function the progress of a run, until its end. Every process must call this."""
    return ended(progress_for(on_progress, comm))


def progress_for(on_progress: OnProgress | None, comm: Comm) -> RunProgress:
    """Return what tells a caller's function the progress of a run. Every process of `comm` must call this.

    It is called on rank 0, if it is given there.
    """
    if not any(comm.allgather(on_progress is not None)):
        return Silent()
    if not isinstance(comm, MPIComm):
        return ProgressMonitor(CallbackDisplay(on_progress))
    return RootProgress(comm, CallbackDisplay(on_progress)) if comm.rank == 0 else RankProgress(comm, log_warning)


E = TypeVar("E", bound=StrEnum)
PathLike = str | os.PathLike[str]

# What every call needs is loaded with the functions, so that the first call takes no longer than others.
scopes.prepare()
Task.CONVERT.load()


def chosen(kind: type[E], value: str, name: str) -> E:
    """Return the named choice. Raises UsageError for an unknown one."""
    try:
        return kind(value)
    except ValueError:
        raise UsageError(f"unknown value of {name}", expected=", ".join(kind), got=repr(value)) from None


def known_format(name: object, argument: str) -> str:
    """Return the name of a format. Raises UsageError for an unknown one."""
    return formats.by_name(plain_text(name, argument)).NAME


def known_target(name: object, argument: str) -> str:
    """Return the name of a format that can be written. Raises UsageError for an unknown one."""
    return formats.require_target(plain_text(name, argument))


_FLAGS = ("resume", "overwrite", "strict", "verify", "crc", "forward", "reverse")
# What arguments mean to a run: fields of its request, each with what checks the value of an argument by this name.
_FIELDS: Mapping[str, Callable[[Any, str], object]] = {
    "source": plain_path,
    "target": plain_path,
    "src_strategy": or_none(plain_path),
    "dst_strategy": or_none(plain_path),
    "prefix": plain_text,
    "select": or_none(plain_text),
    "source_format": or_none(known_format),
    "source_files": or_none(plain_number),
    "to": or_none(known_target),
    "ranks": or_none(plain_numbers),
    "part": or_none(plain_share),
    "unlisted": partial(chosen, Unlisted),
    "memory": plain_size,
    "max_active": or_none(plain_number),
    "replicas": partial(chosen, Replicas),
    "accumulated": partial(chosen, Accumulated),
    "max_shard_size": plain_bytes,
    "map": plain_maps,
    "config": or_none(plain_path),
    "like": or_none(plain_path),
    "dtype": plain_texts,
    "include": plain_texts,
    "exclude": plain_texts,
    **dict.fromkeys(_FLAGS, plain_flag),
}


def request_of(arguments: Mapping[str, Any], **called: str) -> Request:
    """Build a request from the arguments of a public function; arguments that no run uses are ignored.

    Args:
        called: what the function calls the arguments for some fields of the request, where it has other names for them.

    Raises UsageError for wrong values, and for arguments that exclude each other.
    """
    given: dict[str, Any] = {"source": "", "target": ""}
    for field, check in _FIELDS.items():
        name = called.get(field, field)
        if name in arguments:
            given[field] = check(arguments[name], name)
    request = Request(**given)
    for one, other in (("forward", "reverse"), ("ranks", "part"), ("resume", "overwrite")):
        if all(getattr(request, field) not in (False, None) for field in (one, other)):
            raise UsageError(f"{one} and {other} exclude each other", expected="one of them", got="both")
    return request


def run(
    request: Request,
    processes: int,
    communicator: Any,
    work: Task = Task.CONVERT,
    *,
    processes_name: str = "process_num",
    progress: OnProgress | None = None,
) -> Outcome:
    """Do the work that a request asks for, in local processes or with a communicator, and log what there is to say.

    Args:
        progress: the caller's function that is told it.

    Raises the error that refused the run; other failures are in the outcome.
    """
    if processes < 1:
        raise UsageError(f"{processes_name} is out of range", expected="1 or more", got=str(processes))
    comm = SerialComm() if communicator is None else MPIComm(communicator)
    with shown_to(progress, comm) as shown:
        if processes > 1 and communicator is None:
            outcome = run_with_workers(request, processes, shown, work)
        else:
            outcome = work.run(request, comm, shown)
    if communicator is None or communicator.Get_rank() == 0:
        log(all_in_python(outcome.notes), all_in_python(outcome.warnings))
    return outcome


def report_of(outcome: Outcome, seconds: float) -> Report:
    """Return the report of a run as a caller reads it."""
    report = Report.of(outcome, seconds)
    return report._replace(notes=all_in_python(report.notes), warnings=all_in_python(report.warnings))


def raise_first(outcome: Outcome) -> None:
    """Raise the first failure, which says how many more there are."""
    if outcome.failures:
        first = outcome.failures[0].named(alone=True)
        if len(outcome.failures) > 1:
            first.problem += f" (and {len(outcome.failures) - 1} more found)"
        raise first


def listed_shards(files: object, name: str) -> discovery.ShardFiles:
    by_rank = plain_files(files, name)
    for path in by_rank.values():
        require_reachable(path)
    return discovery.shards_from_map(by_rank)


def both_strategies(src_strategy: PathLike | None, dst_strategy: PathLike | None) -> tuple[Strategy | None, Strategy]:
    source = None if src_strategy is None else strategy.load(plain_path(src_strategy, "the source strategy"))
    target = unsharded() if dst_strategy is None else strategy.load(plain_path(dst_strategy, "the target strategy"))
    return source, target
