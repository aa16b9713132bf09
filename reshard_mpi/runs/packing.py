"""Choose what packs whole tensors into the files of a target (`packing_of`), and check the options for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from reshard_mpi import formats
from reshard_mpi.checkpoints.source import SourceCheckpoint
from reshard_mpi.errors import UsageError
from reshard_mpi.formats.manifest import NEST
from reshard_mpi.formats.nest.nodes import is_whole_training
from reshard_mpi.runs.request import Request

if TYPE_CHECKING:
    from reshard_mpi.formats.protocol import Packed
    from reshard_mpi.formats.tensor_table import TensorType


class Packing(NamedTuple):
    """What packs a checkpoint into files.

    Attributes:
        pack: takes the whole tensors and the strings of a checkpoint. None: they stay as they are.
        by_file: whether the targets are the files that it makes; else the tensors in them are divided anew.
    """

    pack: Callable[[Mapping[str, TensorType], Mapping[str, str]], Packed | None]
    by_file: bool


def packing_of(request: Request, source: SourceCheckpoint, format_name: str) -> Packing | None:
    """Return what packs the source, or a map's result of it, into files of a format; None: nothing does."""
    module = formats.packing_by_name(format_name)
    if module is None:
        return model_alone_of(request, source, format_name)
    assert request.dp is not None
    assert request.zero_stage is not None
    files = source.files
    name = files.latest or Path(files.path).name if files.format == format_name else ""
    return Packing(partial(module.packed, ranks=request.dp, stage=request.zero_stage, name=name), by_file=True)


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


def require_for_ranks(request: Request, format_name: str, most_targets: int) -> None:
    """Raise UsageError unless a format that packs has a number of ranks and a stage, and any other has neither."""
    given = {"--dp": request.dp, "--zero-stage": request.zero_stage}
    if not formats.info(format_name).packs:
        for option, value in given.items():
            if value is not None:
                able = " or ".join(f"--to {other}" for other in formats.targets() if formats.info(other).packs)
                raise UsageError(f"{option} is for {able}", expected=able, got=f"targets in {format_name}")
        return
    lacking = [option for option, value in given.items() if value is None]
    if lacking or request.dst_strategy is not None:
        raise UsageError(
            f"a checkpoint in {format_name} is packed for a number of ranks",
            expected="--dp N and --zero-stage 1, 2 or 3, and no --dst-strategy",
            got=f"no {' and no '.join(lacking)}" if lacking else f"--dst-strategy {request.dst_strategy}",
        )
    if request.dp is not None and 2 * request.dp > most_targets:
        problem = "there are too many targets for one run"
        raise UsageError(problem, expected=f"--dp {most_targets // 2} at most", got=str(request.dp))
