"""The public functions. None uses MPI unless a communicator is given, so they may be called on one rank or on all.

What the command line prints as notes and warnings is logged by the logger "reshard_mpi", each text once: notes at
level INFO, warnings, and what is waited for, at level WARNING. With a communicator its rank 0 logs; worker processes
log nothing. Ranks that call a function without one log for themselves.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard_mpi import formats
from reshard_mpi.checkpoints import discovery
from reshard_mpi.checkpoints.inspection import inspect
from reshard_mpi.checkpoints.source import SourceCheckpoint
from reshard_mpi.errors import TargetError, UsageError, only_known_errors
from reshard_mpi.filesystem.paths import require_reachable
from reshard_mpi.journal.targets import Unrecorded
from reshard_mpi.planning.parameters import Unlisted
from reshard_mpi.planning.ranks import needed_ranks
from reshard_mpi.planning.replicas import Replicas
from reshard_mpi.planning.summary import Plan, RankSummary
from reshard_mpi.processes.comm import MPIComm, SerialComm
from reshard_mpi.processes.governor.allowance import Allowance
from reshard_mpi.runs.conversion import Conversion
from reshard_mpi.runs.memory import RunMemory
from reshard_mpi.runs.outcome import Outcome, Report
from reshard_mpi.runs.overlap import refuse_posing
from reshard_mpi.runs.plain import (
    plain_files,
    plain_number,
    plain_number_or_none,
    plain_numbers,
    plain_path,
    plain_path_or_none,
    plain_share,
    plain_size,
    plain_text,
)
from reshard_mpi.runs.plans import plan_together
from reshard_mpi.runs.preflight import Tally, may_share, require_room, require_short_names, stranger_notes
from reshard_mpi.runs.progress import Silent, log
from reshard_mpi.runs.request import Request
from reshard_mpi.runs.workers import Task, run_with_workers
from reshard_mpi.runs.write import write_whole
from reshard_mpi.sharding import strategy
from reshard_mpi.sharding.placement import Strategy, unsharded
from reshard_mpi.sharding.strategy.merge import merge

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "Plan",
    "RankSummary",
    "Report",
    "convert_checkpoint_by_rank",
    "convert_checkpoints",
    "diff",
    "inspect",
    "load_rank",
    "merge_pipeline_strategys",
    "plan",
    "rank_list_for_convert",
    "rank_list_for_transform",
    "transform",
    "transform_checkpoint_by_rank",
    "transform_checkpoints",
    "verify",
]

PathLike = str | os.PathLike[str]


@only_known_errors()
def transform(
    source: PathLike,
    target: PathLike,
    src_strategy: PathLike | None = None,
    dst_strategy: PathLike | None = None,
    *,
    to: str | None = None,
    prefix: str = "checkpoint_",
    select: str | None = None,
    source_format: str | None = None,
    ranks: Iterable[int] | None = None,
    part: tuple[int, int] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    unlisted: str = "follow",
    strict: bool = False,
    replicas: str = "sample",
    verify: bool = False,
    crc: bool = False,
    memory: str | int | None = None,
    max_active: int | None = None,
    jobs: int = 1,
    comm: Any = None,
) -> Report:
    """Reshard the checkpoint `source` into the folder `target`, as `reshard-mpi transform` does with these options.

    Keeps the record of the run in the folder, so it can be resumed, and commits it when all targets are there.
    source_format: of the files that are meant, where those of several formats lie there. ranks: the targets to make
    (None: all); part: (i, n), the i-th from 0 of n shares of them. jobs: local processes, 1 or more; comm: an mpi4py
    communicator whose ranks share the work instead, all of which make the call and get the same report. Raises a
    ReshardError: before anything is written for what is refused, and a TransformError where some targets could not be
    written.
    """
    begin = time.monotonic()
    request = Request(
        source=plain_path(source, "source"),
        target=plain_path(target, "target"),
        src_strategy=plain_path_or_none(src_strategy, "src_strategy"),
        dst_strategy=plain_path_or_none(dst_strategy, "dst_strategy"),
        prefix=plain_text(prefix, "prefix"),
        select=None if select is None else plain_text(select, "select"),
        source_format=_known_format(source_format, "source_format"),
        to=_known_format(to, "to"),
        ranks=None if ranks is None else tuple(plain_numbers(ranks, "ranks")),
        part=None if part is None else plain_share(part, "part"),
        resume=resume,
        overwrite=overwrite,
        unlisted=as_unlisted(unlisted),
        strict=strict,
        memory=plain_size(memory, "memory"),
        max_active=plain_number_or_none(max_active, "max_active"),
        verify=verify,
        crc=crc,
        replicas=as_replicas(replicas),
    )
    _refuse_both({"ranks": ranks is not None, "part": part is not None})
    _refuse_both({"resume": resume, "overwrite": overwrite})
    outcome = _run(request, plain_number(jobs, "jobs"), comm, processes_name="jobs")
    outcome.raise_failures()
    return Report.of(outcome, time.monotonic() - begin)


@only_known_errors()
def transform_checkpoints(
    src_checkpoints_dir: PathLike,
    dst_checkpoints_dir: PathLike,
    ckpt_prefix: str,
    src_strategy_file: PathLike | None = None,
    dst_strategy_file: PathLike | None = None,
    process_num: int = 1,
    output_format: str = formats.DEFAULT,
    *,
    unlisted: str = "follow",
    replicas: str = "sample",
    memory: str | int | None = None,
    max_active: int | None = None,
    verify: bool = False,
    crc: bool = False,
    comm: Any = None,
) -> None:
    """Transform the whole checkpoint under `src_checkpoints_dir` (`rank_x` folders) to the target strategy.

    Writes `dst_checkpoints_dir/rank_x/<ckpt_prefix>x.<ending>`; files that are there are replaced, each atomically.
    A strategy of None is one full checkpoint; folders of strategy files are merged. process_num: local processes; 0 is
    1, as for MindSpore, and no more are started than have something to do.
    output_format: "ckpt", "hdf5", "safetensors" or "torch". unlisted: what becomes of parameters the target strategy
    does not list: "follow", "replicate" or "drop". replicas: what several ranks hold is taken from one of them;
    "sample" first holds the source strategy against the checkpoint, comparing a few ranks in a few places of a few
    tensors, "check" compares all copies of what is needed as well, byte by byte, and "any" trusts. memory: how much of
    a host's memory all processes of the user may take together: a size such as "64G" or a number of bytes,
    "unlimited", or None for what RESHARD_MPI_MEMORY says and else for all that is free. max_active: how many of them
    may transform at once on a host. verify: read sources and targets once more and compare them. crc: add the checksum
    that MindSpore checks (.ckpt, .safetensors). comm: an mpi4py communicator whose ranks share the work; all must make
    the call.

    A process waits until there is memory for what it is going to do. The logger "reshard_mpi" is told when that takes
    long, and warned (WARNING) of source files that are missing or damaged, which ranks' are taken instead, and of
    listed parameters that were never saved; what else the command line has to say are notes (INFO).

    Raises a ReshardError: before anything is written if the source cannot be transformed exactly (a BudgetError if it
    can never fit the memory), and a TransformError if some targets could not be written.
    """
    formats.by_name(plain_text(output_format, "output_format"))
    request = Request(
        source=plain_path(src_checkpoints_dir, "src_checkpoints_dir"),
        target=plain_path(dst_checkpoints_dir, "dst_checkpoints_dir"),
        src_strategy=plain_path_or_none(src_strategy_file, "src_strategy_file"),
        dst_strategy=plain_path_or_none(dst_strategy_file, "dst_strategy_file"),
        prefix=plain_text(ckpt_prefix, "ckpt_prefix"),
        to=output_format,
        overwrite=True,
        unlisted=as_unlisted(unlisted),
        recorded=False,
        memory=plain_size(memory, "memory"),
        max_active=plain_number_or_none(max_active, "max_active"),
        verify=verify,
        crc=crc,
        replicas=as_replicas(replicas),
    )
    outcome = _run(request, plain_number(process_num, "process_num") or 1, comm)
    outcome.raise_failures()


@only_known_errors()
def transform_checkpoint_by_rank(
    rank_id: int,
    checkpoint_files_map: Mapping[int, PathLike],
    save_checkpoint_file_name: PathLike,
    src_strategy_file: PathLike | None = None,
    dst_strategy_file: PathLike | None = None,
    *,
    unlisted: str = "follow",
    replicas: str = "sample",
    memory: str | int | None = None,
    max_active: int | None = None,
) -> None:
    """Write the shard of target rank `rank_id` to `save_checkpoint_file_name`, replacing what is there atomically.

    checkpoint_files_map: source shards by rank; it may hold more ranks than are needed, or other replicas. The ending
    of the file name (.ckpt, .h5, .pt ...) tells the format; its folder is made if it is not there. replicas, memory,
    max_active, and what is logged: as in `transform_checkpoints`. Raises a ReshardError; then nothing is written.
    """
    rank_id = plain_number(rank_id, "rank_id")
    path = Path(plain_path(save_checkpoint_file_name, "save_checkpoint_file_name"))
    name = formats.name_of(path.name)
    if name is None:
        raise UsageError(
            "the file to save has an unknown ending",
            expected=" or ".join(formats.SUFFIXES),
            got=path.name,
            where=str(path),
        )
    files = _listed(checkpoint_files_map, "checkpoint_files_map")
    allowed = plain_size(memory, "memory"), plain_number_or_none(max_active, "max_active")
    with RunMemory(lambda: Allowance.of(*allowed, os.environ), SerialComm(), Silent().waiting) as allotted:
        purpose = f"target rank {rank_id} at {path}"
        notes = allotted.open().notes
        allotted.to_open((src_strategy_file, dst_strategy_file), purpose, files.format)
        conversion = _conversion(files, src_strategy_file, dst_strategy_file, unlisted, replicas=replicas)
        target = _require_free(path, rank_id, conversion, (src_strategy_file, dst_strategy_file))
        # Where the folder is not that of the rank, shards of other ranks may well lie in it.
        strange = stranger_notes([path] if path.parent.name == f"rank_{rank_id}" else [])
        allotted.on_giving_way(conversion.forget)
        allotted.to_plan(conversion, name, purpose)
        (rank_plan,), told = plan_together(conversion, [rank_id], (*notes, *strange))
        tally = Tally()
        size_bytes, left_bytes = formats.by_name(name).size_at_most_bytes(rank_plan.shard), target.left_bytes(path)
        tally.add(path, size_bytes, left_bytes=left_bytes)
        require_room([tally.rooms(1, partial(may_share, conversion.source.files, name, path))])
        peak_bytes = allotted.require_possible(rank_plan)
        log(told.notes, told.warnings)
        while not allotted.to_move(peak_bytes, purpose):
            rank_plan = conversion.plan(rank_id, checked=False)
        with target.writing(rank_id, path, mode=formats.by_name(name).MODE) as publication:
            write_whole(rank_plan, name, publication, conversion.limits, Silent().moved)


def _require_free(
    path: Path, rank_id: int, conversion: Conversion, strategies: Iterable[PathLike | None]
) -> Unrecorded:
    """Return what the shard of a target is written by. Raises a ReshardError if it cannot be written to `path`."""
    refuse_posing(conversion.source.files, path)
    target = Unrecorded(path.parent)
    require_short_names(target.paths(rank_id, path))
    target.check()
    target.is_done(rank_id, path)
    real = os.path.realpath(path)
    for given in strategies:
        if given is not None and path.exists() and os.path.realpath(given) in (real, os.path.dirname(real)):  # noqa: PTH120
            raise TargetError("the target is one of the strategies", expected="another file", where=str(path))
    return target


@only_known_errors()
def rank_list_for_transform(
    rank_id: int,
    src_strategy_file: PathLike | None = None,
    dst_strategy_file: PathLike | None = None,
    *,
    unlisted: str = "follow",
) -> list[int]:
    """Return the source ranks whose shards target rank `rank_id` needs, ascending and as few as are enough.

    Raises UsageError if the target has no such rank, StrategyError or LayoutError for what is wrong with the files.
    """
    rank_id = plain_number(rank_id, "rank_id")
    source, target = _strategies(src_strategy_file, dst_strategy_file)
    source = source or unsharded()
    # Strategies made of rules list no names; a rule's own glob then stands for the parameters it is for. Each stage may
    # have others of these.
    names = [glob for glob, _ in (*source.rules, *target.rules)]
    every, choice = range(source.world_size), as_unlisted(unlisted)
    found = needed_ranks(source, target, rank_id, names=names, available=every, unlisted=choice, from_any_stage=True)
    return list(found)


# MindSpore's other names of the same.
rank_list_for_convert = rank_list_for_transform
convert_checkpoint_by_rank = transform_checkpoint_by_rank
convert_checkpoints = transform_checkpoints


@only_known_errors()
def merge_pipeline_strategys(src_strategy_dirs: PathLike | Sequence[PathLike], dst_strategy_file: PathLike) -> None:
    """Merge the strategy files of all pipeline stages (a folder, or paths) into one file.

    Files of one stage must agree; the stages run from 0. Raises StrategyError.
    """
    out = plain_path(dst_strategy_file, "dst_strategy_file")
    if isinstance(src_strategy_dirs, Sequence) and not isinstance(src_strategy_dirs, str | bytes):
        merge([plain_path(path, "one of src_strategy_dirs") for path in src_strategy_dirs], out)
    else:
        merge(plain_path(src_strategy_dirs, "src_strategy_dirs"), out)


@only_known_errors()
def plan(
    source: PathLike,
    src_strategy: PathLike | None = None,
    dst_strategy: PathLike | None = None,
    *,
    ranks: Iterable[int] | None = None,
    select: str | None = None,
    source_format: str | None = None,
    unlisted: str = "follow",
    strict: bool = False,
    replicas: str = "sample",
    memory: str | int | None = None,
) -> Plan:
    """Return what a transform of `source` would do, writing nothing. ranks: the target ranks (None: all).

    source_format: of the files that are meant, where those of several formats lie there.
    memory, and what is logged: as in `transform_checkpoints`. Raises what the transform would refuse.
    """
    targets = None if ranks is None else plain_numbers(ranks, "ranks")
    files = _found(source, select, source_format)
    allowed = plain_size(memory, "memory")
    with RunMemory(lambda: Allowance.of(allowed, None, os.environ), SerialComm(), Silent().waiting) as allotted:
        purpose = f"planning from {files.path}"
        notes = allotted.open().notes
        allotted.to_open((src_strategy, dst_strategy), purpose, files.format)
        conversion = _conversion(files, src_strategy, dst_strategy, unlisted, strict, replicas)
        allotted.on_giving_way(conversion.forget)
        every = range(conversion.target.world_size) if targets is None else targets
        projection = allotted.to_plan(conversion, files.format, purpose, targets=len(every))
        plans, told = plan_together(conversion, every, notes)
        for rank_plan in plans:
            allotted.require_possible(rank_plan)
        log((*told.notes, *conversion.shown_rules()), told.warnings)
        summaries = tuple(RankSummary.of(rank_plan, projection.peak_bytes(rank_plan)) for rank_plan in plans)
        return Plan(summaries, conversion.source.described)


@only_known_errors()
def verify(
    source: PathLike,
    target: PathLike | None = None,
    src_strategy: PathLike | None = None,
    dst_strategy: PathLike | None = None,
    *,
    select: str | None = None,
    source_format: str | None = None,
    unlisted: str = "follow",
    replicas: str = "sample",
    process_num: int = 1,
    memory: str | int | None = None,
    max_active: int | None = None,
    comm: Any = None,
) -> None:
    """Verify that `target` holds what a transform of `source` would write, or, without it, that `source` fits its sums.

    Formats and layouts may differ. replicas: "sample" holds the source strategy against the source as
    `transform_checkpoints` does, "any" trusts it. process_num (1 or more), memory, max_active, comm, and what is
    logged: as there. Raises DamageError for the first damage found, naming tensor, file and byte, and how many more
    there are; another ReshardError if the two cannot be compared, or `source` keeps no sums.
    """
    request = Request(
        source=plain_path(source, "source"),
        target=plain_path(source if target is None else target, "target"),
        src_strategy=plain_path_or_none(src_strategy, "src_strategy"),
        dst_strategy=plain_path_or_none(dst_strategy, "dst_strategy"),
        select=select,
        source_format=_known_format(source_format, "source_format"),
        unlisted=as_unlisted(unlisted),
        recorded=False,
        memory=plain_size(memory, "memory"),
        max_active=plain_number_or_none(max_active, "max_active"),
        replicas=as_replicas(replicas),
    )
    work = Task.VERIFY_ALONE if target is None else Task.VERIFY_PAIR
    _raise_first(_run(request, plain_number(process_num, "process_num"), comm, work))


@only_known_errors()
def diff(
    first: PathLike,
    second: PathLike,
    first_strategy: PathLike | None = None,
    second_strategy: PathLike | None = None,
    *,
    select: str | None = None,
    source_format: str | None = None,
    replicas: str = "sample",
    jobs: int = 1,
    memory: str | int | None = None,
    max_active: int | None = None,
    comm: Any = None,
) -> None:
    """Compare two checkpoints: whether they hold the same tensors, whatever their formats, layouts and order of names.

    A strategy of None: the shards describe themselves, or are one full checkpoint. select: of the first one's files.
    replicas: as in `verify`. Raises DifferenceError for the first difference, naming tensor, element, values and
    places, and how many more there are; another ReshardError if the two cannot be compared.
    """
    request = Request(
        source=plain_path(first, "first"),
        target=plain_path(second, "second"),
        src_strategy=plain_path_or_none(first_strategy, "first_strategy"),
        dst_strategy=plain_path_or_none(second_strategy, "second_strategy"),
        select=None if select is None else plain_text(select, "select"),
        source_format=_known_format(source_format, "source_format"),
        recorded=False,
        memory=plain_size(memory, "memory"),
        max_active=plain_number_or_none(max_active, "max_active"),
        replicas=as_replicas(replicas),
    )
    outcome = _run(request, plain_number(jobs, "jobs"), comm, Task.DIFF, processes_name="jobs")
    _raise_first(outcome)


def _raise_first(outcome: Outcome) -> None:
    """Raise the first failure, which says how many more there are."""
    if outcome.failures:
        first = outcome.failures[0].named(alone=True)
        if len(outcome.failures) > 1:
            first.problem += f" (and {len(outcome.failures) - 1} more found)"
        raise first


@only_known_errors()
def load_rank(
    rank: int,
    source: PathLike | Mapping[int, PathLike],
    src_strategy: PathLike | None = None,
    dst_strategy: PathLike | None = None,
    *,
    select: str | None = None,
    source_format: str | None = None,
    unlisted: str = "follow",
    replicas: str = "sample",
) -> dict[str, np.ndarray[Any, Any] | str]:
    """Return what target rank `rank` holds, resharded at load time: owned C-contiguous arrays, and strings as str.

    source: a checkpoint folder or file, or a map from source rank to shard file. bfloat16 and float8 arrays have
    ml_dtypes types; int4 comes as int8. replicas, and what is logged: as in `transform_checkpoints`. Nothing is
    written. Memory: that of the arrays.
    """
    rank = plain_number(rank, "rank")
    if isinstance(source, Mapping):
        files = _listed(source, "source")
    else:
        files = _found(source, select, source_format)
    conversion = _conversion(files, src_strategy, dst_strategy, unlisted, replicas=replicas)
    (rank_plan,), told = plan_together(conversion, [rank])
    log(told.notes, told.warnings)
    from reshard_mpi.engine.arrays import load_shard

    return {**load_shard(rank_plan, limits=conversion.limits), **rank_plan.strings}


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


def _refuse_both(options: Mapping[str, bool]) -> None:
    if all(options.values()):
        raise UsageError(f"{' and '.join(options)} exclude each other", expected="one of them", got="both")


def _run(
    request: Request,
    processes: int,
    communicator: Any,
    work: Task = Task.CONVERT,
    *,
    processes_name: str = "process_num",
) -> Outcome:
    if processes < 1:
        raise UsageError(f"{processes_name} is out of range", expected="1 or more", got=str(processes))
    if processes > 1 and communicator is None:
        outcome = run_with_workers(request, processes, Silent(), work)
    else:
        comm = SerialComm() if communicator is None else MPIComm(communicator)
        outcome = work.load()(request, comm, Silent(), None)
    if communicator is None or communicator.Get_rank() == 0:
        log(outcome.notes, outcome.warnings)
    return outcome


def _known_format(name: object, argument: str) -> str | None:
    """Return the name of a format, or None for none. Raises UsageError for an unknown one."""
    return None if name is None else formats.by_name(plain_text(name, argument)).NAME


def _found(source: object, select: str | None, source_format: object) -> discovery.ShardFiles:
    path = plain_path(source, "source")
    require_reachable(path)
    return discovery.find_shards(path, select, format_name=_known_format(source_format, "source_format"))


def _listed(files: object, name: str) -> discovery.ShardFiles:
    by_rank = plain_files(files, name)
    for path in by_rank.values():
        require_reachable(path)
    return discovery.shards_from_map(by_rank)


def _strategies(src_strategy: PathLike | None, dst_strategy: PathLike | None) -> tuple[Strategy | None, Strategy]:
    source = None if src_strategy is None else strategy.load(plain_path(src_strategy, "the source strategy"))
    target = unsharded() if dst_strategy is None else strategy.load(plain_path(dst_strategy, "the target strategy"))
    return source, target


def _conversion(
    files: discovery.ShardFiles,
    src_strategy: PathLike | None,
    dst_strategy: PathLike | None,
    unlisted: str,
    strict: bool = False,
    replicas: str = "sample",
) -> Conversion:
    source, target = _strategies(src_strategy, dst_strategy)
    if dst_strategy is None and as_unlisted(unlisted) is Unlisted.DROP:
        raise UsageError("unlisted='drop' needs a list to go by", expected="a target strategy", got="None")
    checkpoint = SourceCheckpoint.open(files, source)
    return Conversion(checkpoint, target, as_unlisted(unlisted), strict, replicas=as_replicas(replicas))
