"""Offer MindSpore's names, arguments and file conventions (`transform_checkpoints`)."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from reshard_mpi import formats
from reshard_mpi.api.calls import OnProgress, PathLike, check_files, public, request_of, run
from reshard_mpi.checkpoints.shard_opener import ShardShare
from reshard_mpi.errors import UsageError, wrong_type
from reshard_mpi.filesystem.source_files import look_again
from reshard_mpi.formats.manifest import Specs
from reshard_mpi.options import check_count, check_number, check_numbers, check_part, check_path, check_text
from reshard_mpi.planning.rank_choice import joined_ranks, needed_ranks
from reshard_mpi.planning.rank_plan import RankPlan
from reshard_mpi.processes.comm import SerialComm
from reshard_mpi.runs.open_run import filled_files, open_run
from reshard_mpi.runs.outcome import Report
from reshard_mpi.runs.process_memory import RunProcess
from reshard_mpi.runs.progress import Progress
from reshard_mpi.runs.request import Request, Strategies, TargetFiles
from reshard_mpi.sharding.merge_strategies import merge
from reshard_mpi.sharding.strategy import Unlisted, unsharded
from reshard_mpi.text import GIB

# What these functions call the strategies of both sides.
_FILES = {"src_strategy": "src_strategy_file", "dst_strategy": "dst_strategy_file"}

# `unified_safetensors`: files, the index that lists them, and what such a folder is read as.
_FORMAT, _READ_AS = "safetensors", "hf"
_PART, _HYPER, _MAP = "part{}.safetensors", "hyper_param.safetensors", "param_name_map.json"
# The size up to which MindSpore fills a part.
MOST_BYTES = 3 * GIB

# Called with the name of each tensor; returns whether to take it, or its new name.
_Choose = Callable[[str], object]


@public
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
    accumulated: str = "refuse",
    memory: str | int | None = None,
    max_active: int | None = None,
    verify: bool = False,
    crc: bool = False,
    comm: Any = None,
    progress: OnProgress | None = None,
) -> Report:
    """Transform the whole checkpoint under `src_checkpoints_dir` (`rank_x` folders) to the target strategy.

    Writes `dst_checkpoints_dir/rank_x/<ckpt_prefix>x.<ending>`; existing files are replaced, each atomically. A
    strategy of None means one full checkpoint; the strategy files of a folder are merged.

    Args:
        process_num: how many local processes; 0 is 1, as in MindSpore, and no more are started than have something to
            do.
        output_format: "ckpt", "hdf5", "safetensors" or "torch".
        unlisted: what becomes of parameters that the target strategy does not list: "follow", "replicate" or "drop".
        replicas: which copies are compared before that of one rank is taken: "sample" compares a few ranks in a few
            places of a few tensors, and so checks the source strategy; "check" compares all needed copies as well, byte
            by byte; "any" compares none.
        accumulated: what becomes of gradients that are being accumulated (`accu_grads.*`, `grad_sum.*`) and differ
            between replicas: every target rank gets their "mean"; or the lowest of those that hold the same gets their
            "sum", and the others zeros; or they "refuse" it.
        memory: how much of a host's memory all processes of the user may take together: a size such as "64G" or a
            number of bytes, "unlimited", or None for RESHARD_MPI_MEMORY, or without that all that is free.
        max_active: how many of them may transform at once on a host.
        verify: read sources and targets once more and compare them.
        crc: add the checksum that MindSpore checks (.ckpt, .safetensors).
        comm: an mpi4py communicator whose ranks share the work; all must make the call.
        progress: as in `transform`.

    A process waits until there is memory for what it is going to do. The logger "reshard_mpi" gets a warning (WARNING)
    if that takes long, for missing or damaged source files, with the ranks whose files are used instead, and for listed
    parameters that were never saved. Everything else that the command line prints is logged as notes (INFO).

    Raises a ReshardError before anything is written if the source cannot be transformed exactly (a BudgetError if it
    can never fit the memory), and a TransformError if some targets could not be written.
    """
    processes = check_count(check_number(process_num, "process_num") or 1, "process_num")
    check_text(output_format, "output_format")  # None is no format here
    named = {"source": "src_checkpoints_dir", "target": "dst_checkpoints_dir", "prefix": "ckpt_prefix"}
    request = request_of(locals(), to="output_format", **named, **_FILES)
    request = request._replace(overwrite=True, keeps_journal=False)
    return run(request, processes, comm, progress=progress)


@public
def transform_checkpoint_by_rank(
    rank_id: int,
    checkpoint_files_map: Mapping[int, PathLike],
    save_checkpoint_file_name: PathLike,
    src_strategy_file: PathLike | None = None,
    dst_strategy_file: PathLike | None = None,
    *,
    unlisted: str = "follow",
    replicas: str = "sample",
    accumulated: str = "refuse",
    memory: str | int | None = None,
    max_active: int | None = None,
    progress: OnProgress | None = None,
) -> Report:
    """Write the shard of target rank `rank_id` to `save_checkpoint_file_name`; an existing file is replaced atomically.

    Args:
        checkpoint_files_map: source shards by rank; it may have more ranks than are needed, or other replicas. The
            ending of the file name (.ckpt, .h5, .pt ...) tells the format; its folder is made if there is none.
        accumulated: as in `transform_checkpoints`; gradients are joined of the shards that `rank_list_for_transform`
            names if it is told the same. replicas, memory, max_active and the log: as in `transform_checkpoints`.
        progress: as in `transform`.

    Raises a ReshardError, and then writes nothing.
    """
    request = request_of(locals(), **_FILES)
    rank_id = check_number(rank_id, "rank_id")
    path = Path(check_path(save_checkpoint_file_name, "save_checkpoint_file_name"))
    name = formats.name_of(path.name)
    if name is None:
        raise UsageError(
            "the file to save has an unknown ending",
            expected=" or ".join(formats.suffixes()),
            got=path.name,
            where=str(path),
        )
    listed = check_files(checkpoint_files_map, "checkpoint_files_map")
    source = str(Path(next(iter(listed.values()), "")).parent)
    request = request._replace(source=source, source_by_rank=listed, target=str(path.parent), target_file=str(path))
    return run(request._replace(to=name, rank=(rank_id,), keeps_journal=False), 1, None, progress=progress)


@public
def unified_safetensors(
    src_dir: PathLike,
    src_strategy_file: PathLike | None,
    dst_dir: PathLike,
    merge_with_redundancy: bool = True,
    file_suffix: str | None = None,
    max_process_num: int = 64,
    choice_func: Callable[[str], bool | str] | None = None,
    split_dst_file: tuple[int, int] | None = None,
    *,
    replicas: str = "sample",
    memory: str | int | None = None,
    max_active: int | None = None,
    progress: OnProgress | None = None,
) -> Report:
    """Merge the shards of the checkpoint under `src_dir` into whole tensors, in a few files under `dst_dir`.

    Writes `part0.safetensors` and so on, of some 3 GiB each, and `param_name_map.json`, which tells which of them holds
    which tensor. Tensors that the strategy does not place, such as step counters, go to `hyper_param.safetensors`.
    MindSpore's `load_distributed_checkpoint` reads these files. Existing files are replaced, each atomically, the map
    last.

    Args:
        merge_with_redundancy: not needed, since a slice is found whichever rank holds it.
        file_suffix: how the names of the files to read end, before the ending; None: the newest files are read.
        max_process_num: how many local processes at most; never more than files or cores.
        choice_func: called with the name of each tensor; False leaves the tensor out, a text is its new name.
        split_dst_file: (i, n), to write only share number i from 1 of n shares of the parts; the first also writes the
            other files, and the share that is complete last the map.
        replicas, memory, max_active: as in `transform_checkpoints`, and so is the log.
        progress: as in `transform`. The report's targets are the files, by their numbers.

    Raises a ReshardError: before anything is written if it cannot be done exactly.
    """
    request = request_of(locals(), source="src_dir", target="dst_dir", src_strategy="src_strategy_file")
    if split_dst_file is None or not tuple(split_dst_file):
        part = None
    else:
        first, *others = check_numbers(split_dst_file, "split_dst_file")
        part = check_part((first - 1, *others), "split_dst_file")
    suffix = None if file_suffix is None else check_text(file_suffix, "file_suffix")
    select = None if suffix is None else f"*{glob.escape(suffix)}.safetensors"
    most = check_count(max_process_num, "max_process_num")
    request = _request_of_files(request._replace(select=select, part=part), choice_func)
    if not request.rank:
        raise UsageError("split_dst_file has more shares than there are parts", got=repr(split_dst_file))
    processes = min(most, len(request.rank), len(os.sched_getaffinity(0)))
    return run(request, processes, None, progress=progress)


def _request_of_files(request: Request, choose: _Choose | None) -> Request:
    """Return the request with its share of the files to write, which are found by planning the whole checkpoint.

    The first share has some of the parts, and all other files. Raises UsageError if `choose` gives two tensors
    one name or leaves none, WrongTypeError if it returns neither a bool nor a text, and a ReshardError if the
    checkpoint cannot be planned.
    """
    request = request._replace(to=_FORMAT, keeps_journal=False)
    with RunProcess.begun(request._replace(target="", part=None), SerialComm(), Progress()) as process:
        planner = open_run(process).planner
        plan = planner.plan(0, checked=False)
        planner.require_none_left_behind(
            plan, ShardShare(0, 1), lambda name: choose is None or _chosen(name, choose(name)) is not None
        )
        names = _chosen_names(plan.tensors.specs.names, choose)
        files, parts = _files(plan, names)
    share, shares = (0, 1) if request.part is None else (request.part.number, request.part.shares)
    numbers = (*range(parts)[share::shares], *(range(parts, len(files.held)) if share == 0 else ()))
    # Otherwise tensors that are left out would be placed like those they are named after.
    unlisted = request.unlisted if choose is None else Unlisted.DROP
    return request._replace(files=files, rank=numbers, part=None, unlisted=unlisted)


def _files(plan: RankPlan, names: dict[str, str]) -> tuple[TargetFiles, int]:
    """Return the files to write, and how many of them are parts, which come first.

    Args:
        plan: of the whole checkpoint, as one shard.
        names: of the tensors to write, with their new ones.
    """
    specs = plan.tensors.specs
    kinds = {name: kind for name, kind in zip(specs.names, specs.kind_ids) if name in names}
    placed = [name for name in kinds if name not in plan.unlisted]
    unlisted = tuple(name for name in kinds if name in plan.unlisted)
    part_specs = Specs(placed, specs.kinds, [kinds[name] for name in placed])
    parts = filled_files(part_specs, MOST_BYTES) if placed or not names else []
    held = {_PART.format(number): tuple(part) for number, part in enumerate(parts)}
    total_bytes = sum(specs.kinds[kinds[name]].size_bytes for name in placed)
    weight_map = {names[name]: file for file, part in held.items() for name in part}
    text = json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=4)
    all_held = {**held, _HYPER: unlisted} if unlisted else held
    return TargetFiles(all_held, names, _MAP, text, _READ_AS, (_HYPER,)), len(parts)


def _chosen_names(names: Sequence[str], choose: _Choose | None) -> dict[str, str]:
    """Return the tensors to write with their new names, in their order. Raises UsageError as `_request_of_files`."""
    chosen_names: dict[str, str] = {}
    owners: dict[str, str] = {}
    for name in names:
        chosen = name if choose is None else _chosen(name, choose(name))
        if chosen is None:
            continue
        other = owners.setdefault(chosen, name)
        if other != name:
            raise UsageError(f"choice_func gives two tensors the name {chosen!r}", got=f"{other!r} and {name!r}")
        chosen_names[name] = chosen
    if names and not chosen_names:
        raise UsageError("choice_func leaves nothing", expected="True or a name for some tensor", got="False for all")
    return chosen_names


def _chosen(name: str, answer: object) -> str | None:
    """Return the new name of a tensor, by what `choose` returned for it; None if the tensor is left out."""
    if isinstance(answer, str):
        return answer
    if isinstance(answer, bool):
        return name if answer else None
    raise wrong_type(f"what choice_func returns for {name!r}", "True, False or a name", answer)


@public
def rank_list_for_transform(
    rank_id: int,
    src_strategy_file: PathLike | None = None,
    dst_strategy_file: PathLike | None = None,
    *,
    unlisted: str = "follow",
    accumulated: str = "refuse",
) -> list[int]:
    """Return the source ranks whose shards target rank `rank_id` needs, ascending, and as few as suffice.

    Args:
        accumulated: as in `transform_checkpoints`; a "mean" or "sum" needs the shards of all ranks that hold a part of
            it.

    Raises UsageError if the target has no such rank, StrategyError or LayoutError if the strategy files are wrong.
    """
    rank_id, request = check_number(rank_id, "rank_id"), request_of(locals(), **_FILES)
    strategies = Strategies.read(request)
    source, target = strategies.source or unsharded(), strategies.target
    # Strategies made of rules list no names, so a rule's own glob stands for the parameters that it places, which may
    # be different ones in each stage.
    names = [glob for glob, _ in (*source.rules, *target.rules)]
    available, unlisted = range(source.world_size), request.unlisted
    ranks = needed_ranks(
        source, target, rank_id, names=names, available=available, unlisted=unlisted, from_any_stage=True
    )
    joined = joined_ranks(source, target, rank_id, names=names, unlisted=unlisted, accumulated=request.accumulated)
    return sorted({*ranks, *joined})


# MindSpore's other names of the same functions.
rank_list_for_convert = rank_list_for_transform
convert_checkpoint_by_rank = transform_checkpoint_by_rank
convert_checkpoints = transform_checkpoints


@public
def merge_pipeline_strategys(src_strategy_dirs: PathLike | Sequence[PathLike], dst_strategy_file: PathLike) -> None:
    """Merge the strategy files of all pipeline stages (a folder, or paths) into one file.

    Files of the same stage must agree; stages are numbered from 0. Raises StrategyError.
    """
    look_again()
    out = check_path(dst_strategy_file, "dst_strategy_file")
    if isinstance(src_strategy_dirs, Sequence) and not isinstance(src_strategy_dirs, str | bytes):
        merge([check_path(path, "one of src_strategy_dirs") for path in src_strategy_dirs], out)
    else:
        merge(check_path(src_strategy_dirs, "src_strategy_dirs"), out)
