"""Assign whole tensors to a few files, by MindSpore's names (`request_of_files`).

`part0.safetensors`, `part1.safetensors` and so on hold the tensors that the source strategy places;
`hyper_param.safetensors` those that it does not, such as step counters; `param_name_map.json`, written last, says which
part holds which tensor. MindSpore's `load_distributed_checkpoint` reads them by these names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from reshard_mpi.checkpoints.shard_opener import ShardShare
from reshard_mpi.errors import UsageError, wrong_type
from reshard_mpi.formats.manifest import Specs
from reshard_mpi.planning.rank_plan import RankPlan
from reshard_mpi.planning.tensor_names import Unlisted
from reshard_mpi.processes.comm import SerialComm
from reshard_mpi.runs.open_run import filled_files, open_run
from reshard_mpi.runs.progress import Progress
from reshard_mpi.runs.request import Request, TargetFiles
from reshard_mpi.runs.run_memory import RunMemory
from reshard_mpi.text import GIB

_FORMAT = "safetensors"
_PART, _HYPER, _MAP = "part{}.safetensors", "hyper_param.safetensors", "param_name_map.json"
# The size up to which MindSpore fills a part.
MOST_BYTES = 3 * GIB

# Called with the name of each tensor; returns whether to take it, or its new name.
Choose = Callable[[str], object]


def request_of_files(request: Request, choose: Choose | None) -> Request:
    """Return the request with its share of the files to write, which are found by planning the whole checkpoint.

    The first share has some of the parts, and all other files. Raises UsageError if `choose` gives two tensors
    one name or leaves none, WrongTypeError if it returns neither a bool nor a text, and a ReshardError if the
    checkpoint cannot be planned.
    """
    request = request._replace(to=_FORMAT, recorded=False)
    with RunMemory(lambda: request.allowance, SerialComm(), Progress()) as memory:
        conversion = open_run(request._replace(target="", part=None), memory).conversion
        plan = conversion.plan(0, checked=False)
        conversion.require_none_left_behind(
            plan, ShardShare(0, 1), lambda name: choose is None or _chosen(name, choose(name)) is not None
        )
        names = _chosen_names(plan.tensors.specs.names, choose)
        files, parts = _files(plan, names)
    share, shares = request.part or (0, 1)
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
    placed = [name for name in kinds if name not in plan.loose]
    loose = tuple(name for name in kinds if name in plan.loose)
    part_specs = Specs(placed, specs.kinds, [kinds[name] for name in placed])
    parts = filled_files(part_specs, MOST_BYTES) if placed or not names else []
    held = {_PART.format(number): tuple(part) for number, part in enumerate(parts)}
    total_bytes = sum(specs.kinds[kinds[name]].size_bytes for name in placed)
    weight_map = {names[name]: file for file, part in held.items() for name in part}
    text = json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=4)
    all_held = {**held, _HYPER: loose} if loose else held
    return TargetFiles(all_held, names, _MAP, text, (_HYPER,)), len(parts)


def _chosen_names(names: Sequence[str], choose: Choose | None) -> dict[str, str]:
    """Return the tensors to write with their new names, in their order. Raises UsageError as `request_of_files`."""
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
