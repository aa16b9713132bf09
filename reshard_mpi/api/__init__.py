"""Offer the public functions (`transform`, `verify`, `audit`, `plan`, `open`, `load_rank`); none uses MPI unasked.

Unless a communicator is given they may be called on one rank or on all.

They log what the command line prints, to the logger "reshard_mpi": notes at level INFO, warnings and reasons for
waiting at level WARNING, each text once. With a communicator, its rank 0 logs. Without one, each rank that calls a
function logs for itself. Worker processes log nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from reshard_mpi import formats
from reshard_mpi.api.calls import OnProgress, PathLike, check_files, outcome_of, public, request_of, run
from reshard_mpi.api.checkpoint import Checkpoint, SourcePart, Tensor, open, opened
from reshard_mpi.api.mindspore import (
    convert_checkpoint_by_rank,
    convert_checkpoints,
    merge_pipeline_strategys,
    rank_list_for_convert,
    rank_list_for_transform,
    transform_checkpoint_by_rank,
    transform_checkpoints,
    unified_safetensors,
)
from reshard_mpi.checkpoints.inspection import inspect
from reshard_mpi.errors import UsageError
from reshard_mpi.options import check_count, check_flag, check_number
from reshard_mpi.processes.comm import SerialComm
from reshard_mpi.runs.open_run import open_run
from reshard_mpi.runs.outcome import Report, ShardReport, TargetReport
from reshard_mpi.runs.plan_command import Plan, RankSummary, rules_of_source, told_rules
from reshard_mpi.runs.process_memory import RunProcess
from reshard_mpi.runs.progress import Progress, RunStatus, log
from reshard_mpi.runs.request import Task
from reshard_mpi.runs.transform import plan_alone
from reshard_mpi.soundness.findings import AuditReport, Finding, FindingKind

if TYPE_CHECKING:
    import numpy as np


@public
def transform(
    source: PathLike,
    target: PathLike,
    src_strategy: PathLike | None = None,
    dst_strategy: PathLike | None = None,
    *,
    to: str | None = None,
    prefix: str = formats.DEFAULT_PREFIX,
    select: str | None = None,
    source_format: str | None = None,
    src_files: int | None = None,
    rank: int | Iterable[int] | None = None,
    part: tuple[int, int] | str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    single_writer: bool = False,
    unlisted: str = "follow",
    strict: bool = False,
    replicas: str = "sample",
    accumulated: str = "refuse",
    verify: bool = False,
    crc: bool = False,
    memory: str | int | None = None,
    max_active: int | None = None,
    max_shard_size: str | int | None = None,
    dp: int | None = None,
    zero_stage: int | None = None,
    ep: int | None = None,
    core_version: str | None = None,
    map: PathLike | Iterable[PathLike] | None = None,
    forward: bool = False,
    reverse: bool = False,
    config: PathLike | None = None,
    axis: Mapping[str, int] | str | Iterable[str] = (),
    like: PathLike | None = None,
    dtype: str | Iterable[str] = (),
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    jobs: int = 1,
    comm: Any = None,
    progress: OnProgress | None = None,
) -> Report:
    """Reshard the checkpoint `source` into the folder `target`, as `reshard-mpi transform` does with these options.

    The folder keeps a record of the run, so that it can be resumed, and is committed when all targets are complete.

    Args:
        source_format: read only files of this format, if there are several.
        src_files: how many files the source was saved in, where nothing in it tells.
        rank: the targets to make, one or several; None: all.
        part: (i, n), share number i from 0 of n shares of them; "auto/n" in a task of a cluster's array, whose runner
            says the number.
        accumulated: as in `transform_checkpoints`.
        dp, zero_stage: for how many data-parallel ranks, and for which stage of ZeRO, files of format "deepspeed" are.
        ep: over how many ranks Megatron or DeepSpeed is to share out experts; None: as it did before.
        core_version: which release of Megatron-Core is to load files of format "megatron", such as "0.19".
        max_shard_size: the most bytes of a file of format "hf" or "megatron", such as "5GB" (the default).
        map: an equation, the path of a map, or the name of one that comes with the program; or several of these,
            applied one after another.
        forward and reverse: their direction, where names do not tell it; config: path of the model's configuration;
            axis: lengths of the map's axes by name, as {"m": 128}, or "m=128"; like: path of a checkpoint whose names
            and shapes the target is to have.
        dtype: "TYPE" or "GLOB=TYPE", or several; include, exclude: globs of names in the target.
        jobs: how many local processes, 1 or more.
        comm: an mpi4py communicator whose ranks share the work instead; all of them must make the call, and get the
            same report.
        progress: a function that is called about twice a second, and once at the end, with a `RunStatus`: how far the
            run is, over all its processes. It may be called from another thread than the caller's; with comm, that of
            its rank 0 is called.

    Raises a ReshardError before anything is written if the transform is refused, and a TransformError if some targets
    could not be written.
    """
    request = request_of(locals())
    return run(request, check_count(jobs, "jobs"), comm, progress=progress)


@public
def plan(
    source: PathLike,
    src_strategy: PathLike | None = None,
    dst_strategy: PathLike | None = None,
    *,
    rank: int | Iterable[int] | None = None,
    select: str | None = None,
    source_format: str | None = None,
    src_files: int | None = None,
    unlisted: str = "follow",
    strict: bool = False,
    replicas: str = "sample",
    accumulated: str = "refuse",
    map: PathLike | Iterable[PathLike] | None = None,
    forward: bool = False,
    reverse: bool = False,
    config: PathLike | None = None,
    axis: Mapping[str, int] | str | Iterable[str] = (),
    like: PathLike | None = None,
    dtype: str | Iterable[str] = (),
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    memory: str | int | None = None,
) -> Plan:
    """Return the plan of the same transform of `source`; nothing is written. rank: the target ranks (None: all).

    source_format, src_files, accumulated, map to exclude: as in `transform`. memory, and the log: as in
    `transform_checkpoints`. Raises a ReshardError if the transform would be refused.
    """
    request = request_of(locals())
    with RunProcess.begun(request, SerialComm(), Progress()) as process:
        run, allotted = open_run(process), process.memory
        plans, outcome = plan_alone(run.planner, run.targets, allotted.lease().governor.notes)
        summaries = tuple(RankSummary.of(rank_plan, allotted.possible_peak_bytes(rank_plan)) for rank_plan in plans)
        rules = rules_of_source(run.planner, run.targets[0] if run.targets else None)
        notes = (*outcome.notes, *told_rules(rules, are_all=True))
        log(notes, outcome.warnings)
        return Plan(summaries, run.planner.source.summary_text, rules=rules)


@public
def verify(
    source: PathLike,
    target: PathLike | None = None,
    src_strategy: PathLike | None = None,
    dst_strategy: PathLike | None = None,
    *,
    rank: int | Iterable[int] | None = None,
    select: str | None = None,
    source_format: str | None = None,
    src_files: int | None = None,
    unlisted: str = "follow",
    replicas: str = "sample",
    accumulated: str = "refuse",
    map: PathLike | Iterable[PathLike] | None = None,
    forward: bool = False,
    reverse: bool = False,
    config: PathLike | None = None,
    axis: Mapping[str, int] | str | Iterable[str] = (),
    like: PathLike | None = None,
    dtype: str | Iterable[str] = (),
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    jobs: int = 1,
    memory: str | int | None = None,
    max_active: int | None = None,
    comm: Any = None,
    progress: OnProgress | None = None,
) -> Report:
    """Verify that `target` holds a correct transform of `source`; without `target`, that `source` fits its sums.

    Formats and layouts may differ.

    Args:
        rank: check the shards of these ranks only, of `target` if it is given (None: all). accumulated, map to
            exclude: those of the transform.
        replicas: "sample" checks the source strategy as in `transform_checkpoints`, "any" does not. memory, max_active
            and the log: as there.
        jobs, comm, progress: as in `transform`.

    Raises DamageError for the first damage, with tensor, file and byte, and how many more there are; another
    ReshardError if the two cannot be compared, or if `source` keeps no sums.
    """
    request = request_of(locals() | {"target": source if target is None else target})._replace(keeps_journal=False)
    if request.rank == ():
        raise UsageError("rank names no rank", expected="one rank or more, or None for all", got="none")
    task = Task.VERIFY_ALONE if target is None else Task.VERIFY_PAIR
    return run(request, check_count(jobs, "jobs"), comm, task, progress=progress)


@public
def diff(
    first: PathLike,
    second: PathLike,
    src_strategy: PathLike | None = None,
    dst_strategy: PathLike | None = None,
    *,
    select: str | None = None,
    source_format: str | None = None,
    src_files: int | None = None,
    replicas: str = "sample",
    accumulated: str = "refuse",
    map: PathLike | Iterable[PathLike] | None = None,
    forward: bool = False,
    reverse: bool = False,
    config: PathLike | None = None,
    axis: Mapping[str, int] | str | Iterable[str] = (),
    like: PathLike | None = None,
    dtype: str | Iterable[str] = (),
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    values: bool = False,
    atol: float = 0.0,
    rtol: float = 0.0,
    jobs: int = 1,
    memory: str | int | None = None,
    max_active: int | None = None,
    comm: Any = None,
    progress: OnProgress | None = None,
) -> Report:
    """Compare two checkpoints: whether they hold the same tensors, whatever their formats, layouts and order of names.

    src_strategy is how the first one is cut, dst_strategy the second; None: the shards describe themselves, or are one
    full checkpoint.

    Args:
        select, source_format, src_files: for the files of the first one, as in `transform`. map to dtype: what
            becomes of the first one before it is compared, as in `transform`.
        include, exclude: which tensors of both are compared.
        accumulated: how gradients that are being accumulated are joined on either side before they are compared.
        values: compare numbers, whatever their types: the report's `comparison` says how far apart they are, and
            whether that `passes`; then a difference is not raised.
        atol, rtol: with values, how far apart elements a and b may be: atol + rtol * |b|.
        replicas: as in `verify`.
        progress: as in `transform`.

    Raises DifferenceError for the first difference, with tensor, element, values and places, and how many more there
    are; another ReshardError if the two cannot be compared.
    """
    request = request_of(locals(), source="first", target="second")._replace(keeps_journal=False)
    in_numbers = check_flag(values, "values")
    if not in_numbers and (request.atol or request.rtol):
        raise UsageError("atol and rtol go with values", expected="values=True", got="a tolerance alone")
    task = Task.DIFF_VALUES if in_numbers else Task.DIFF
    return run(request, check_count(jobs, "jobs"), comm, task, progress=progress)


@public
def audit(
    source: PathLike,
    src_strategy: PathLike | None = None,
    *,
    config: PathLike | None = None,
    like: PathLike | None = None,
    before: PathLike | None = None,
    map: PathLike | Iterable[PathLike] | None = None,
    forward: bool = False,
    reverse: bool = False,
    axis: Mapping[str, int] | str | Iterable[str] = (),
    allow: str | Iterable[str] = (),
    select: str | None = None,
    source_format: str | None = None,
    src_files: int | None = None,
    replicas: str = "sample",
    jobs: int = 1,
    memory: str | int | None = None,
    max_active: int | None = None,
    comm: Any = None,
    progress: OnProgress | None = None,
) -> AuditReport:
    """Audit a checkpoint: whether it is whole, and its values may be from a training. Nothing is written.

    Args:
        config: the model's folder, or its config.json, whose names and shapes the checkpoint should have (None: that
            in the checkpoint's folder, if there is one); like: a checkpoint whose names and shapes it should have.
        before: the checkpoint that the same training has saved before, whose norms are compared.
        map to axis: as in `transform`; they give the tensors the names of config or like.
        allow: globs; nothing is found in tensors whose names match.
        src_strategy, select to progress: as in `verify`.

    The findings are in the report, and those that are wrong for certain in `errors`; `is_sound` tells if there are any.
    Raises a ReshardError if there is no checkpoint, or an option does not fit it.
    """
    begin = time.monotonic()
    request = request_of(locals())._replace(keeps_journal=False)
    outcome = outcome_of(request, check_count(jobs, "jobs"), comm, Task.AUDIT, progress=progress)
    return AuditReport.of(request.source, outcome, time.monotonic() - begin)


@public
def load_rank(
    rank: int,
    source: PathLike | Mapping[int, PathLike],
    src_strategy: PathLike | None = None,
    dst_strategy: PathLike | None = None,
    *,
    select: str | None = None,
    source_format: str | None = None,
    src_files: int | None = None,
    unlisted: str = "follow",
    replicas: str = "sample",
    accumulated: str = "refuse",
    map: PathLike | Iterable[PathLike] | None = None,
    forward: bool = False,
    reverse: bool = False,
    config: PathLike | None = None,
    axis: Mapping[str, int] | str | Iterable[str] = (),
    like: PathLike | None = None,
    dtype: str | Iterable[str] = (),
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
) -> dict[str, np.ndarray[Any, Any] | str]:
    """Return the shard of target rank `rank` without writing it: C-contiguous arrays, and strings as str, by name.

    Args:
        source: a checkpoint folder or file, or a map from source rank to shard file. Arrays of bfloat16 and float8 have
            types of ml_dtypes; int4 comes as int8. Each array owns its memory. What is neither tensor nor text, and how
            all of it is nested, is not returned. map to exclude: as in `transform`. replicas, accumulated and the log:
            as in `transform_checkpoints`.

    Raises a ReshardError.
    """
    arguments, rank = dict(locals()), check_number(rank, "rank")
    listed = check_files(arguments.pop("source"), "source") if isinstance(source, Mapping) else None
    request = request_of(arguments)._replace(source_by_rank=listed)
    request.require_list_to_drop_by()
    with opened(request, rank) as checkpoint:
        return {**{name: tensor[...] for name, tensor in checkpoint.items()}, **checkpoint.texts}


__all__ = [
    "AuditReport",
    "Checkpoint",
    "Finding",
    "FindingKind",
    "Plan",
    "RankSummary",
    "Report",
    "RunStatus",
    "ShardReport",
    "SourcePart",
    "TargetReport",
    "Tensor",
    "audit",
    "convert_checkpoint_by_rank",
    "convert_checkpoints",
    "diff",
    "inspect",
    "load_rank",
    "merge_pipeline_strategys",
    "open",
    "plan",
    "rank_list_for_convert",
    "rank_list_for_transform",
    "transform",
    "transform_checkpoint_by_rank",
    "transform_checkpoints",
    "unified_safetensors",
    "verify",
]
