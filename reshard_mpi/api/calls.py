"""What the public functions have in common: they turn arguments into plain values, find sources, and begin runs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from reshard_mpi import formats
from reshard_mpi.api.plain import (
    plain_files,
    plain_number_or_none,
    plain_path,
    plain_path_or_none,
    plain_text,
    plain_texts,
)
from reshard_mpi.api.shown import OnProgress, progress_for
from reshard_mpi.api.wording import all_in_python
from reshard_mpi.checkpoints import discovery
from reshard_mpi.checkpoints.opening import open_source
from reshard_mpi.errors import UsageError
from reshard_mpi.filesystem.paths import require_reachable
from reshard_mpi.planning.parameters import Unlisted
from reshard_mpi.planning.partial_sums import Accumulated
from reshard_mpi.planning.replicas import Replicas
from reshard_mpi.processes.comm import MPIComm, SerialComm
from reshard_mpi.processes.governor import usage
from reshard_mpi.runs.conversion import Conversion
from reshard_mpi.runs.outcome import Outcome, Report
from reshard_mpi.runs.progress import log
from reshard_mpi.runs.request import Request
from reshard_mpi.runs.through import through_map
from reshard_mpi.runs.workers import Task, run_with_workers
from reshard_mpi.sharding import strategy
from reshard_mpi.sharding.placement import Strategy, unsharded

PathLike = str | os.PathLike[str]

# What every call needs is loaded with the functions, so that the first call takes no longer than others.
usage.prepare()
Task.CONVERT.load()


def as_unlisted(value: str) -> Unlisted:
    """Return the named choice. Raises UsageError for an unknown one."""
    try:
        return Unlisted(value)
    except ValueError:
        raise UsageError("unknown value of unlisted", expected=", ".join(Unlisted), got=repr(value)) from None


def as_replicas(value: str) -> Replicas:
    """Return the named choice. Raises UsageError for an unknown one."""
    try:
        return Replicas(value)
    except ValueError:
        raise UsageError("unknown value of replicas", expected=", ".join(Replicas), got=repr(value)) from None


def as_accumulated(value: str) -> Accumulated:
    """Return the named choice. Raises UsageError for an unknown one."""
    try:
        return Accumulated(value)
    except ValueError:
        raise UsageError("unknown value of accumulated", expected=", ".join(Accumulated), got=repr(value)) from None


def known_format(name: object, argument: str) -> str | None:
    """Return the name of a format; None for None. Raises UsageError for an unknown one."""
    return None if name is None else formats.by_name(plain_text(name, argument)).NAME


def refuse_both(options: Mapping[str, bool]) -> None:
    if all(options.values()):
        raise UsageError(f"{' and '.join(options)} exclude each other", expected="one of them", got="both")


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

    progress: the caller's function that is told it. Raises the error that refused the run; other failures are in the
    outcome.
    """
    if processes < 1:
        raise UsageError(f"{processes_name} is out of range", expected="1 or more", got=str(processes))
    comm = SerialComm() if communicator is None else MPIComm(communicator)
    shown = progress_for(progress, comm)
    try:
        if processes > 1 and communicator is None:
            outcome = run_with_workers(request, processes, shown, work)
        else:
            outcome = work.load()(request, comm, shown, None)
    except BaseException:
        shown.abandon()
        raise
    shown.close()
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


def map_fields(
    map: PathLike | None,
    forward: bool,
    reverse: bool,
    config: PathLike | None,
    like: PathLike | None,
    dtype: str | Iterable[str],
    include: str | Iterable[str],
    exclude: str | Iterable[str],
) -> dict[str, Any]:
    """Return what a request says of names, shapes and types, by the names of its fields.

    Raises UsageError for arguments that exclude each other.
    """
    refuse_both({"forward": forward, "reverse": reverse})
    return {
        "map": plain_path_or_none(map, "map"),
        "forward": bool(forward),
        "reverse": bool(reverse),
        "config": plain_path_or_none(config, "config"),
        "like": plain_path_or_none(like, "like"),
        "dtype": plain_texts(dtype, "dtype"),
        "include": plain_texts(include, "include"),
        "exclude": plain_texts(exclude, "exclude"),
    }


def found_shards(
    source: object, select: str | None, source_format: object, source_files: object = None
) -> discovery.ShardFiles:
    path = plain_path(source, "source")
    require_reachable(path)
    return discovery.find_shards(
        path,
        select,
        format_name=known_format(source_format, "source_format"),
        file_count=plain_number_or_none(source_files, "source_files"),
    )


def listed_shards(files: object, name: str) -> discovery.ShardFiles:
    by_rank = plain_files(files, name)
    for path in by_rank.values():
        require_reachable(path)
    return discovery.shards_from_map(by_rank)


def both_strategies(src_strategy: PathLike | None, dst_strategy: PathLike | None) -> tuple[Strategy | None, Strategy]:
    source = None if src_strategy is None else strategy.load(plain_path(src_strategy, "the source strategy"))
    target = unsharded() if dst_strategy is None else strategy.load(plain_path(dst_strategy, "the target strategy"))
    return source, target


def conversion_of(
    files: discovery.ShardFiles,
    src_strategy: PathLike | None,
    dst_strategy: PathLike | None,
    unlisted: str,
    strict: bool = False,
    replicas: str = "sample",
    accumulated: str = "refuse",
    fields: Mapping[str, Any] = MappingProxyType({}),
) -> Conversion:
    """Return the conversion of `files`. fields: those that `map_fields` returns."""
    source, target = both_strategies(src_strategy, dst_strategy)
    if dst_strategy is None and as_unlisted(unlisted) is Unlisted.DROP:
        raise UsageError("unlisted='drop' needs a list to go by", expected="a target strategy", got="None")
    checkpoint = open_source(files, source)
    conversion = Conversion(
        checkpoint,
        target,
        as_unlisted(unlisted),
        strict,
        replicas=as_replicas(replicas),
        accumulated=as_accumulated(accumulated),
    )
    return through_map(Request("", "", **fields), conversion)[0]
