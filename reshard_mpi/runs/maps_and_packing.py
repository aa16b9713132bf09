"""Choose how targets are made of a source besides cutting: maps (`planner_with_maps`), packing (`packing_of`).

All modules that read and apply maps are loaded only where there is a map, or something packs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from reshard_mpi import formats
from reshard_mpi.checkpoints.source import SourceCheckpoint
from reshard_mpi.errors import TargetError, UsageError
from reshard_mpi.formats.manifest import NEST
from reshard_mpi.formats.nest.nodes import is_whole_training
from reshard_mpi.formats.protocol import Packed, PackingOptions, Part
from reshard_mpi.options import OPTIONS
from reshard_mpi.runs.request import Request
from reshard_mpi.sharding.box import Box

if TYPE_CHECKING:
    from reshard_mpi.formats.dtypes import DType
    from reshard_mpi.formats.tensor_table import TensorType
    from reshard_mpi.journal.run_records import RunIdentity
    from reshard_mpi.mapping.selection import Selection
    from reshard_mpi.runs.planner import Planner
    from reshard_mpi.runs.request_maps import TensorMap


class Packing(NamedTuple):
    """What packs a checkpoint into files.

    Attributes:
        pack: takes the whole tensors and the strings of a checkpoint, and `own_types` as of `PackingFormat.packed`.
            None: they stay as they are.
        by_file: whether the targets are the files that it makes; else the tensors in them are divided anew.
    """

    pack: Callable[[Mapping[str, TensorType], Mapping[str, str], Mapping[str, DType]], Packed | None]
    by_file: bool


def packing_of(request: Request, source: SourceCheckpoint, format_name: str) -> Packing | None:
    """Return what packs the source, or a map's result of it, into files of a format; None: nothing does."""
    module = formats.packing_by_name(format_name)
    if module is None:
        return model_alone_of(request, source, format_name)
    files = source.files
    name = files.latest or Path(files.path).name if files.format == format_name else ""
    options = PackingOptions(
        request.dp or 1, request.zero_stage or 1, request.ep, request.core_version or "", request.most_file_bytes, name
    )
    return Packing(partial(module.packed, options=options), by_file=True)


def packing_to_compare(request: Request, source: SourceCheckpoint, format_name: str) -> Packing | None:
    """Return what makes the source, or a map's result of it, what targets of it in a format are read as.

    None if that is the same.
    """
    if not formats.info(format_name).packs:
        return model_alone_of(request, source, format_name)
    is_same = not request.is_mapped and source.files.format == format_name
    return None if is_same else packing_as_read(format_name)


def packing_as_read(format_name: str) -> Packing | None:
    """Return the step that makes a checkpoint as it is read from files of a format; None if that packs nothing."""
    module = formats.packing_by_name(format_name)
    return None if module is None else Packing(module.as_read, by_file=False)


def files_of_run(
    request: Request, source: SourceCheckpoint, run: RunIdentity | None, format_name: str
) -> Packing | None:
    """Return what packs the source as a run has done it, if its files can be compared one by one; else None."""
    if run is None or run.format != format_name or not formats.info(format_name).names_parts:
        return None
    as_run = {name: run.facts.get(name) for name in ("dp", "zero_stage", "ep", "core_version", "max_shard_size")}
    return packing_of(Request.of({**request._asdict(), **as_run}), source, format_name)


def model_alone_of(request: Request, source: SourceCheckpoint, format_name: str) -> Packing | None:
    """Return what takes the model alone out of a whole training, if a format holds nothing else.

    Only a map's result tells whether it still is a whole training.
    """
    if not formats.info(format_name).holds_model_alone:
        return None
    shard = next(filter(None, map(source.find, sorted(source.files.by_rank))), None)
    if not request.is_mapped and (shard is None or not is_whole_training(shard.strings.get(NEST))):
        return None
    from reshard_mpi.mapping.result import model_alone

    return Packing(model_alone, by_file=False)


def planner_with_maps(
    request: Request, planner: Planner, packing: Packing | None = None
) -> tuple[Planner, Mapping[str, str]]:
    """Return a planner of the targets through the request's maps, and digests of all files that decide its result.

    It is the given one if the request leaves all tensors as they are. Raises MapError if the map cannot be read,
    UsageError for options that do not belong together.

    Args:
        packing: what packs the result into files, if the target's format does.
    """
    if request.config and not request.map and not planner.source.is_told_by_config:
        raise UsageError(
            "--config belongs to a map, or to a checkpoint that is quantized",
            expected="--map as well, or a configuration with quantization_config",
            got="no --map",
            where=request.config,
        )
    if not request.is_mapped and packing is None:
        return planner, {}
    from reshard_mpi.runs.mapped_source import planner_through
    from reshard_mpi.runs.request_maps import TensorMap

    tensor_map = TensorMap.read(request)
    return planner_through(tensor_map, planner, packing), tensor_map.digests


def packings_of_two(first: SourceCheckpoint, second: SourceCheckpoint) -> tuple[Packing | None, Packing | None]:
    """Return the steps that make two checkpoints alike: of a format that packs, the other is taken as read from it."""
    of_first, of_second = first.files.format, second.files.format
    return (
        None if formats.info(of_first).packs else packing_as_read(of_second),
        None if formats.info(of_second).packs else packing_as_read(of_first),
    )


def both_through_map(
    request: Request, first: Planner, second: Planner, packings: tuple[Packing | None, Packing | None]
) -> tuple[tuple[Planner, Planner], Callable[[Collection[str]], None]]:
    """Return the planners of two checkpoints to compare: the first through the map, both with the selection.

    Also returns a function that takes the names of both and raises MapError if a glob matches none, or nothing is left.

    Args:
        packings: of each, as of `packings_of_two`.
    """
    if not request.is_mapped and not any(packings):
        return (first, second), lambda _: None
    from reshard_mpi.mapping.selection import require_any
    from reshard_mpi.runs.mapped_source import planner_through
    from reshard_mpi.runs.request_maps import TensorMap

    tensor_map = TensorMap.read(request)
    of_both = tensor_map.of_two_checkpoints()

    def through(own: TensorMap, planner: Planner, reading: Packing | None) -> Planner:
        if reading is None:
            return planner_through(own, planner)
        return planner_through(own.without_choice(), planner, _chosen(reading, own.choice))

    if request.is_mapped or packings[0]:
        first = through(of_both, first, packings[0])
    if request.include or request.exclude or packings[1]:
        second = through(of_both.choice_alone(), second, packings[1])

    def require_some(names: Collection[str]) -> None:
        if request.is_mapped:
            require_any(tensor_map.choice, names)

    return (first, second), require_some


def _chosen(reading: Packing, choice: Selection) -> Packing:
    """Return the step that makes a checkpoint as it is read, if that can be, and takes the chosen tensors of it."""
    from reshard_mpi.mapping.selection import is_chosen

    def pack(
        tensors: Mapping[str, TensorType], strings: Mapping[str, str], own_types: Mapping[str, DType]
    ) -> Packed | None:
        whole = [Part(name, name, Box.whole(kind.shape)) for name, kind in tensors.items()]
        try:
            read = reading.pack(tensors, strings, own_types) or Packed("", [whole], strings)
        except TargetError as error:
            read = Packed("", [whole], strings, notes=(f"compared under its own names: {error.problem}",))
        chosen = [part for part in read.files[0] if is_chosen(choice, part.name)]
        taken = {part.source for part in chosen}
        return read._replace(files=[chosen], left_out=tuple(name for name in tensors if name not in taken))

    return Packing(pack, by_file=False)


def require_target_options(request: Request, format_name: str, most_targets: int) -> None:
    """Raise UsageError unless the targets' format has all options that it needs, and none that are for others."""
    form = formats.info(format_name)
    for option in dict.fromkeys(option for other in formats.targets() for option in formats.info(other).options):
        able = [other for other in formats.targets() if option in formats.info(other).options]
        if getattr(request, option) is not None and format_name not in able:
            takers = " or ".join(f"--to {other}" for other in able)
            flag = OPTIONS[option].flag
            raise UsageError(f"{flag} is for {takers}", expected=takers, got=f"targets in {format_name}")
    if not form.packs:
        return
    lacking = [OPTIONS[option].flag for option in form.needs if getattr(request, option) is None]
    if lacking or (form.needs and request.dst_strategy is not None):
        raise UsageError(
            f"a checkpoint in {format_name} is packed for a number of ranks",
            expected="--dp N and --zero-stage 1, 2 or 3, and no --dst-strategy",
            got=f"no {' and no '.join(lacking)}" if lacking else f"--dst-strategy {request.dst_strategy}",
        )
    if request.dst_strategy is not None:
        raise UsageError(
            f"a checkpoint in {format_name} is loaded by any number of ranks",
            expected="no --dst-strategy",
            got=f"--dst-strategy {request.dst_strategy}",
        )
    if request.dp is not None and 2 * request.dp > most_targets:
        problem = "there are too many targets for one run"
        raise UsageError(problem, expected=f"--dp {most_targets // 2} at most", got=str(request.dp))
