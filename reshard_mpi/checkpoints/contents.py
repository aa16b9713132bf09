"""Count the contents of a checkpoint: parameters, bytes, layers, experts, steps (`contents_of`, `content_lines`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reshard_mpi.engine.open_files import Files
from reshard_mpi.engine.read import only_element
from reshard_mpi.errors import ReshardError
from reshard_mpi.formats.dtypes import numbers
from reshard_mpi.formats.locations import LibraryRead
from reshard_mpi.formats.manifest import NEST, Manifest, TensorSpec
from reshard_mpi.formats.nest.nodes import NestError
from reshard_mpi.formats.nest.rebuild_tree import as_json, leaves, values_beside
from reshard_mpi.mapping.tensor_kinds import TensorKind, expert_of, kind_of, layer_of
from reshard_mpi.planning.chunk_reads import held_tensor
from reshard_mpi.planning.rank_plan import Limits
from reshard_mpi.sharding.box import Box
from reshard_mpi.text import KIB, counted, format_bytes, natural_key, ranges

# Counters of steps that are read of one file: an optimizer may have one for each parameter.
_MOST_STEPS = 16
_LIMITS = Limits(4 * KIB, 4 * KIB)
# Different numbers of steps that are shown.
_MOST_SHOWN = 3
_BRANCHES = ("model", "optimizer", "other")


def values_of(manifest: Manifest) -> dict[str, Any]:
    """Return the values of a file that are neither tensors nor texts, by name, as JSON has them."""
    text = manifest.strings.get(NEST)
    if text is None:
        return {}
    try:
        values = values_beside(manifest.tensors, {NEST: text})
    except NestError as error:
        return {NEST: f"cannot be read: {error.problem}"}
    return {name: as_json(value) for name, value in leaves(values) if value not in ({}, [], ())}


def steps_of(manifest: Manifest) -> dict[str, list[Any]]:
    """Return the different numbers of steps that a file says, by the last word of their names."""
    found: dict[str, dict[Any, None]] = {}
    said = {**manifest.strings, **values_of(manifest)}
    for name, value in said.items():
        number = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 19 else value
        if isinstance(number, int | float) and kind_of(name) is TensorKind.STEP:
            found.setdefault(_last(name), {})[number] = None
    counters = (name for name in manifest.tensors if kind_of(name) is TensorKind.STEP)
    with Files() as files:
        for _, name in zip(range(_MOST_STEPS), counters):
            number = _only_number(files, manifest, name)
            if number is not None:
                found.setdefault(_last(name), {})[number] = None
    return {word: sorted(values) for word, values in found.items()}


def _last(name: str) -> str:
    return name.replace("/", ".").rpartition(".")[2]


def _only_number(files: Files, manifest: Manifest, name: str) -> Any:
    """Return the number that a tensor is; None if it has more elements, or cannot be read by its place alone."""
    entry = manifest.tensors[name]
    if (
        math.prod(entry.shape) != 1
        or isinstance(entry.source, LibraryRead)
        or entry.dtype.part_bytes != entry.dtype.itemsize_bytes
    ):
        return None
    box = entry.box or Box.whole(entry.shape)
    plan = held_tensor(TensorSpec(name, entry.dtype, entry.global_shape or entry.shape, box), manifest)
    try:
        (number,) = numbers(only_element(files, plan, _LIMITS), entry.dtype)
    except (ReshardError, OSError, ValueError, IndexError):
        return None
    return number if not isinstance(number, float) or math.isfinite(number) else None


class _Whole(NamedTuple):
    """A tensor as files describe it. is_whole: it is the whole tensor, and no part."""

    dtype: str
    elements: int
    size_bytes: int
    is_whole: bool


def contents_of(
    shards: Iterable[Mapping[str, Any]], steps: Mapping[str, Sequence[Any]], *, one_rank: bool
) -> dict[str, Any]:
    """Return the contents of a checkpoint as plain values: by branch of a training's state, and in all.

    "parameters" is the number of elements of the model. It is None, and "whole" False, where not all shapes of whole
    tensors are known; then elements and bytes are those of all parts.

    Args:
        shards: the descriptions of its files.
        steps: numbers of steps, by the word for each.
        one_rank: all of it is in one rank, so that shapes are those of whole tensors.
    """
    tensors: dict[str, _Whole] = {}
    for shard in shards:
        for name, facts in shard["tensors"].items():
            is_whole = one_rank or "global_shape" in facts
            elements = math.prod(facts.get("global_shape", facts["shape"]))
            itemsize = facts["size_bytes"] // max(1, math.prod(facts["shape"]))
            one = _Whole(facts["dtype"], elements, elements * itemsize or facts["size_bytes"], is_whole)
            before = tensors.get(name)
            if before is None or is_whole:
                tensors[name] = one
            else:
                elements, size_bytes = before.elements + one.elements, before.size_bytes + one.size_bytes
                tensors[name] = _Whole(one.dtype, elements, size_bytes, is_whole=False)
    branches: dict[str, dict[str, Any]] = {}
    for name, one in tensors.items():
        branch = branches.setdefault(
            kind_of(name).branch, {"tensors": 0, "elements": 0, "size_bytes": 0, "by_type": {}}
        )
        of_type = branch["by_type"].setdefault(one.dtype, {"tensors": 0, "elements": 0, "size_bytes": 0})
        for each in (branch, of_type):
            each["tensors"] += 1
            each["elements"] += one.elements
            each["size_bytes"] += one.size_bytes
    is_whole = all(one.is_whole for one in tensors.values())
    numbers_in = {"layers": map(layer_of, tensors), "experts": map(expert_of, tensors)}
    numbered = {what: sorted({each for each in found if each is not None}) for what, found in numbers_in.items()}
    return {
        "parameters": branches.get("model", {"elements": 0})["elements"] if is_whole else None,
        "whole": is_whole,
        **{name: branches[name] for name in _BRANCHES if name in branches},
        **numbered,
        "steps": {word: list(values) for word, values in steps.items()},
    }


def content_lines(contents: Mapping[str, Any]) -> Iterator[str]:
    """Yield what `contents_of` returns as lines for people; nothing for no contents."""
    for name in _BRANCHES:
        if name not in contents:
            continue
        of = contents[name]
        count, tensors = of["elements"], counted(of["tensors"], "tensor")
        if contents["whole"]:
            held = f"{count:,} {'parameter' if name == 'model' else 'element'}{'s' * (count != 1)} in {tensors}"
        else:
            held = f"{count:,} element{'s' * (count != 1)} in parts of {tensors}"
        types = ", ".join(of["by_type"])
        if len(of["by_type"]) > 1:
            types = ", ".join(f"{format_bytes(each['size_bytes'])} {kind}" for kind, each in of["by_type"].items())
        yield f"  {name}: {held}, {format_bytes(of['size_bytes'])} ({types})"
    numbers = [f"{what} {ranges(contents[what])}" for what in ("layers", "experts") if contents.get(what)]
    for word, values in sorted(contents.get("steps", {}).items(), key=lambda item: natural_key(item[0])):
        shown = ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values[:_MOST_SHOWN])
        numbers.append(f"{word} {shown}{' ...' * (len(values) > _MOST_SHOWN)}")
    if numbers:
        yield f"  {'; '.join(numbers)}"
