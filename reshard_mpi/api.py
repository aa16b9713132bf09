"""The public functions. None uses MPI unless a communicator is given, so they may be called on one rank or on all."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard_mpi import discovery, formats, strategy
from reshard_mpi.comm import MPIComm, SerialComm
from reshard_mpi.conversion import Conversion
from reshard_mpi.errors import TargetError, UsageError
from reshard_mpi.governor.admission import open_governor
from reshard_mpi.governor.allowance import Allowance
from reshard_mpi.inspection import inspect
from reshard_mpi.journal import Unrecorded
from reshard_mpi.overlap import refuse_posing
from reshard_mpi.placement import Strategy, unsharded
from reshard_mpi.planning.losses import warnings_of
from reshard_mpi.planning.parameters import Unlisted
from reshard_mpi.planning.ranks import needed_ranks
from reshard_mpi.planning.replicas import Replicas
from reshard_mpi.planning.summary import Plan, RankSummary
from reshard_mpi.plans import plan_together, warn
from reshard_mpi.pool import Work, run_with_workers
from reshard_mpi.preflight import Tally, may_share, require_room, require_short_names
from reshard_mpi.report import Outcome, Silent
from reshard_mpi.request import Request
from reshard_mpi.source import SourceCheckpoint
from reshard_mpi.strategy.merge import merge
from reshard_mpi.writing import write_file

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "Plan",
    "RankSummary",
    "inspect",
    "load_rank",
    "merge_pipeline_strategys",
    "plan",
    "rank_list_for_transform",
    "transform_checkpoint_by_rank",
    "transform_checkpoints",
    "verify",
]

PathLike = str | os.PathLike[str]


def transform_checkpoints(
    src_checkpoints_dir: PathLike,
    dst_checkpoints_dir: PathLike,
    ckpt_prefix: str,
    src_strategy_file: PathLike | None = None,
    dst_strategy_file: PathLike | None = None,
    process_num: int = 1,
    output_format: str = "ckpt",
    *,
    unlisted: str = "follow",
    replicas: str = "any",
    memory: str | int | None = None,
    max_active: int | None = None,
    verify: bool = False,
    crc: bool = False,
    comm: Any = None,
) -> None:
    """Transform the whole checkpoint under `src_checkpoints_dir` (`rank_x` folders) to the target strategy.

    Writes `dst_checkpoints_dir/rank_x/<ckpt_prefix>x.<ending>`; files that are there are replaced, each atomically.
    A strategy of None is one full checkpoint; folders of strategy files are merged. process_num: local processes.
    output_format: "ckpt" or "hdf5". unlisted: what becomes of parameters the target strategy does not list:
    "follow", "replicate" or "drop". replicas: "any" takes what several ranks hold from one of them, "check" compares
    all of them before, byte by byte. memory: how much of a host's memory all processes of the user may take together:
    a size such as "64G" or a number of bytes, "unlimited", or None for what RESHARD_MPI_MEMORY says and else for all
    that is free. max_active: how many of them may transform at once on a host. verify: read sources and targets once
    more and compare them. crc: end .ckpt files with the checksum that MindSpore checks. comm: an mpi4py communicator
    whose ranks share the work; all must make the call.

    A process waits until there is memory for what it is going to do; the logger "reshard_mpi" is told when that takes
    long. It is also warned of source files that are missing or damaged, and which ranks' are taken instead.

    Raises a ReshardError: before anything is written if the source cannot be transformed exactly (a BudgetError if it
    can never fit the memory), and a TransformError if some targets could not be written.
    """
    formats.by_name(output_format)
    request = Request(
        source=os.fspath(src_checkpoints_dir),
        target=os.fspath(dst_checkpoints_dir),
        src_strategy=_path(src_strategy_file),
        dst_strategy=_path(dst_strategy_file),
        prefix=ckpt_prefix,
        select=None,
        to=output_format,
        ranks=None,
        part=None,
        resume=False,
        overwrite=True,
        unlisted=as_unlisted(unlisted),
        strict=False,
        recorded=False,
        memory=memory,
        max_active=max_active,
        verify=verify,
        crc=crc,
        replicas=as_replicas(replicas),
    )
    outcome = _run(request, process_num, comm)
    if comm is None or comm.Get_rank() == 0:
        warn((*warnings_of(outcome.lost), *outcome.other_warnings))
    outcome.raise_failures()


def transform_checkpoint_by_rank(
    rank_id: int,
    checkpoint_files_map: Mapping[int, PathLike],
    save_checkpoint_file_name: PathLike,
    src_strategy_file: PathLike | None = None,
    dst_strategy_file: PathLike | None = None,
    *,
    unlisted: str = "follow",
    replicas: str = "any",
    memory: str | int | None = None,
    max_active: int | None = None,
) -> None:
    """Write the shard of target rank `rank_id` to `save_checkpoint_file_name`, replacing what is there atomically.

    checkpoint_files_map: source shards by rank; it may hold more ranks than are needed, or other replicas. The ending
    of the file name (.ckpt, .h5, .hdf5) tells the format; its folder is made if it is not there. replicas, memory,
    max_active: as in `transform_checkpoints`. Raises a ReshardError; then nothing is written.
    """
    path = Path(save_checkpoint_file_name)
    name = formats.name_of(path.name)
    if name is None:
        raise UsageError(
            "the file to save has an unknown ending", expected=".ckpt, .h5 or .hdf5", got=path.name, where=str(path)
        )
    conversion = _conversion(
        discovery.shards_from_map(checkpoint_files_map),
        src_strategy_file,
        dst_strategy_file,
        unlisted,
        replicas=replicas,
    )
    refuse_posing(conversion.source.files, path)
    for given in (src_strategy_file, dst_strategy_file):
        if given is not None and path.exists() and Path(given).resolve() in (path.resolve(), path.resolve().parent):
            raise TargetError("the target is one of the strategies", expected="another file", where=str(path))
    (rank_plan,) = plan_together(conversion, [rank_id])
    target = Unrecorded(path.parent)
    require_short_names(target.paths(rank_id, path))
    target.check()
    target.is_done(rank_id, path)
    tally = Tally()
    tally.add(path, rank_plan.written_bytes)
    require_room([tally.rooms(1, partial(may_share, conversion.source.files, name, path))])
    governor = open_governor(Allowance.of(memory, max_active, os.environ), os.environ)
    peak_bytes = rank_plan.peak_bytes(conversion.limits)
    governor.require_possible(peak_bytes, conversion.limits.base_bytes)
    progress = Silent()
    with (
        governor.lease(peak_bytes, f"target rank {rank_id} at {path}", progress.waiting),
        target.writing(rank_id, path) as publication,
    ):
        write_file(rank_plan, name, publication.partial, conversion.limits, progress.moved)
        publication.publish()


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
    source, target = _strategies(src_strategy_file, dst_strategy_file)
    source = source or unsharded()
    # Strategies made of rules list no names; a rule's own glob then stands for the parameters it is for.
    names = [glob for glob, _ in (*source.rules, *target.rules)]
    every = range(source.world_size)
    return list(needed_ranks(source, target, rank_id, names=names, available=every, unlisted=as_unlisted(unlisted)))


def merge_pipeline_strategys(src_strategy_dirs: PathLike | Sequence[PathLike], dst_strategy_file: PathLike) -> None:
    """Merge the strategy files of all pipeline stages (a folder, or paths) into one file.

    Files of one stage must agree; the stages run from 0. Raises StrategyError.
    """
    if isinstance(src_strategy_dirs, str | os.PathLike):
        merge(os.fspath(src_strategy_dirs), os.fspath(dst_strategy_file))
    else:
        merge([os.fspath(path) for path in src_strategy_dirs], os.fspath(dst_strategy_file))


def plan(
    source: PathLike,
    src_strategy: PathLike | None = None,
    dst_strategy: PathLike | None = None,
    *,
    ranks: Iterable[int] | None = None,
    select: str | None = None,
    unlisted: str = "follow",
    strict: bool = False,
    replicas: str = "any",
) -> Plan:
    """Return what a transform of `source` would do, writing nothing. ranks: the target ranks (None: all).

    Raises what the transform would refuse.
    """
    files = discovery.find_shards(os.fspath(source), select)
    conversion = _conversion(files, src_strategy, dst_strategy, unlisted, strict, replicas)
    plans = plan_together(conversion, range(conversion.target.world_size) if ranks is None else ranks)
    return Plan(tuple(RankSummary.of(rank_plan, conversion.limits) for rank_plan in plans))


def verify(
    source: PathLike,
    target: PathLike | None = None,
    src_strategy: PathLike | None = None,
    dst_strategy: PathLike | None = None,
    *,
    select: str | None = None,
    unlisted: str = "follow",
    process_num: int = 1,
    memory: str | int | None = None,
    max_active: int | None = None,
    comm: Any = None,
) -> None:
    """Verify that `target` holds what a transform of `source` would write, or, without it, that `source` fits its sums.

    Formats and layouts may differ. process_num, memory, max_active, comm: as in `transform_checkpoints`. Raises
    DamageError for the first damage found, naming tensor, file and byte, and how many more there are; another
    ReshardError if the two cannot be compared, or `source` keeps no sums.
    """
    request = Request(
        source=os.fspath(source),
        target=os.fspath(source if target is None else target),
        src_strategy=_path(src_strategy),
        dst_strategy=_path(dst_strategy),
        prefix="",
        select=select,
        to=None,
        ranks=None,
        part=None,
        resume=False,
        overwrite=False,
        unlisted=as_unlisted(unlisted),
        strict=False,
        recorded=False,
        memory=memory,
        max_active=max_active,
    )
    work = Work.VERIFY_ALONE if target is None else Work.VERIFY_PAIR
    failures = _run(request, process_num, comm, work).failures
    if failures:
        first = failures[0].named(alone=True)
        if len(failures) > 1:
            first.problem += f" (and {len(failures) - 1} more found)"
        raise first


def load_rank(
    rank: int,
    source: PathLike | Mapping[int, PathLike],
    src_strategy: PathLike | None = None,
    dst_strategy: PathLike | None = None,
    *,
    select: str | None = None,
    unlisted: str = "follow",
) -> dict[str, np.ndarray[Any, Any] | str]:
    """Return what target rank `rank` holds, resharded at load time: owned C-contiguous arrays, and strings as str.

    source: a checkpoint folder or file, or a map from source rank to shard file. bfloat16 and float8 arrays have
    ml_dtypes types; int4 comes as int8. Nothing is written. Memory: that of the arrays.
    """
    if isinstance(source, Mapping):
        files = discovery.shards_from_map(source)
    else:
        files = discovery.find_shards(os.fspath(source), select)
    conversion = _conversion(files, src_strategy, dst_strategy, unlisted)
    (rank_plan,) = plan_together(conversion, [rank])
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


def _run(request: Request, processes: int, communicator: Any, work: Work = Work.CONVERT) -> Outcome:
    if processes < 1:
        raise UsageError("process_num is out of range", expected="1 or more", got=str(processes))
    if processes > 1 and communicator is None:
        return run_with_workers(request, processes, Silent(), work)
    return work.load()(request, SerialComm() if communicator is None else MPIComm(communicator), Silent(), None)


def _path(path: PathLike | None) -> str | None:
    return None if path is None else os.fspath(path)


def _strategies(src_strategy: PathLike | None, dst_strategy: PathLike | None) -> tuple[Strategy | None, Strategy]:
    source = None if src_strategy is None else strategy.load(os.fspath(src_strategy))
    target = unsharded() if dst_strategy is None else strategy.load(os.fspath(dst_strategy))
    return source, target


def _conversion(
    files: discovery.ShardFiles,
    src_strategy: PathLike | None,
    dst_strategy: PathLike | None,
    unlisted: str,
    strict: bool = False,
    replicas: str = "any",
) -> Conversion:
    source, target = _strategies(src_strategy, dst_strategy)
    if dst_strategy is None and as_unlisted(unlisted) is Unlisted.DROP:
        raise UsageError("unlisted='drop' needs a list to go by", expected="a target strategy", got="None")
    checkpoint = SourceCheckpoint.open(files, source)
    return Conversion(checkpoint, target, as_unlisted(unlisted), strict, replicas=as_replicas(replicas))
