"""Count a checkpoint's contents (`contents_of`), compare two checkpoints (`compare`), and print both (`as_text`).

Contents are parameters, bytes, layers, experts and steps. Tensors are compared by name, type and shape; no values are
read but counts of steps.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from reshard_mpi.checkpoints import discovery
from reshard_mpi.checkpoints.shard_files import SingleShard, in_its_rank
from reshard_mpi.checkpoints.source import manifests_of
from reshard_mpi.engine.open_files import Files
from reshard_mpi.engine.read import only_element
from reshard_mpi.errors import ReshardError
from reshard_mpi.formats.dtypes import numbers
from reshard_mpi.formats.locations import LibraryRead
from reshard_mpi.formats.manifest import NEST, Manifest, TensorSpec
from reshard_mpi.formats.nest.nodes import NestError
from reshard_mpi.formats.nest.rebuild_tree import as_json, leaves, values_beside
from reshard_mpi.journal.run_status import as_lines
from reshard_mpi.mapping.tensor_kinds import TensorKind, expert_of, kind_of, layer_of
from reshard_mpi.planning.chunk_reads import held_tensor
from reshard_mpi.planning.rank_plan import Limits
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.placement import Shape
from reshard_mpi.text import KIB, counted, format_bytes, natural_key, one_line, ranges

# Counters of steps that are read of one file: an optimizer may have one for each parameter.
_MOST_STEPS = 16
_LIMITS = Limits(4 * KIB, 4 * KIB)
# Different numbers of steps that are shown.
_MOST_NUMBERS = 3
_BRANCHES = ("model", "optimizer", "other")
# Characters shown of a string.
_MAX_SHOWN = 200
# Values beside the tensors that are shown of a shard.
_MAX_VALUES = 30


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
        shown = ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values[:_MOST_NUMBERS])
        numbers.append(f"{word} {shown}{' ...' * (len(values) > _MOST_NUMBERS)}")
    if numbers:
        yield f"  {'; '.join(numbers)}"


def as_text(facts: dict[str, Any]) -> str:
    """Return a description by `inspect` as lines for people."""
    return "\n".join(map(one_line, _lines(facts)))


def _lines(facts: dict[str, Any]) -> list[str]:
    if facts["kind"] == "strategy":
        return _strategy_lines(facts)
    if facts["kind"] in ("run", "commit"):
        return as_lines(facts)
    if facts["kind"] == "shard":
        heading, *lines = _shard_lines(facts)
        contents = () if "names" in facts else content_lines(facts["contents"])
        return [heading, *contents, *lines, _total_line(facts["totals"])]
    size = format_bytes(facts["size_bytes"])
    holders = counted(len(facts["files"]), "file") if "files" in facts else counted(facts["ranks"], "rank")
    shards = [shard for of_rank in facts["shards"].values() for shard in of_rank]
    pieces = sum(shard.get("pieces", 0) for shard in shards)
    cut = f" in {counted(pieces, 'piece')}" if pieces else ""
    lines = [f"checkpoint: {holders}, {facts['format']}, {size} of tensors{cut}", *facts["notes"]]
    if "names" in facts:
        lines += [*_tensor_lines(facts), *_value_lines(facts)]
    else:
        lines += [*content_lines(facts.get("contents", {})), *_file_lines(facts)]
    lost = (_lost_lines(lossy) for lossy in (*shards, facts))
    lines += dict.fromkeys(line for of_shard in lost for line in of_shard)
    lines.append(_total_line(facts["totals"]))
    return [*lines, *as_lines({name: facts[name] for name in ("run", "commit") if name in facts})]


def _file_lines(checkpoint: dict[str, Any]) -> list[str]:
    if "files" in checkpoint:  # a folder with an index has no ranks
        return [f"  {path}" for path in checkpoint["files"]]
    return [
        f"  rank {rank}: {counted(len(shard['tensors']), 'tensor')}, "
        f"{format_bytes(shard['size_bytes'])}  {shard['path']}"
        for rank, shards in checkpoint["shards"].items()
        for shard in shards
    ]


def _tensor_lines(checkpoint: dict[str, Any]) -> list[str]:
    """Return a line for each tensor and kind of part of it, with the ranks that hold such a part."""
    holders: dict[str, dict[str, list[int]]] = {}
    for rank, shards in checkpoint["shards"].items():
        for shard in shards:
            for name, facts in shard["tensors"].items():
                whole = facts.get("global_shape", facts["shape"])
                of_whole = f" of {whole}" if whole != facts["shape"] else ""
                part = f"{facts['dtype']} {facts['shape']}{of_whole}  {format_bytes(facts['size_bytes'])}"
                holders.setdefault(name, {}).setdefault(part, []).append(int(rank))
    one_rank = len(checkpoint["shards"]) == 1
    return [
        f"  {name}  {part}" + ("" if one_rank else f"  {'ranks' if len(ranks) > 1 else 'rank'} {ranges(ranks)}")
        for name, parts in holders.items()
        for part, ranks in parts.items()
    ]


def _total_line(totals: dict[str, Any]) -> str:
    parts = f" in {totals['parts']} parts" if totals["parts"] != totals["tensors"] else ""
    types = [
        f"{of['parts']} {name} ({counted(of['elements'], 'element')}, {format_bytes(of['size_bytes'])})"
        for name, of in totals["by_type"].items()
    ]
    count = counted(totals["tensors"], "tensor")
    return f"  total: {count}{parts}, {format_bytes(totals['size_bytes'])}: {', '.join(types) or 'none'}"


def _shard_lines(shard: dict[str, Any]) -> list[str]:
    place = f", rank {shard['rank']} of {shard['world_size']}" if "rank" in shard else ""
    size = format_bytes(shard["size_bytes"])
    lines = [f"{shard['format']} shard{place}: {len(shard['tensors'])} tensors, {size}"]
    for name, facts in shard["tensors"].items():
        whole = f"  at {facts['offset']} of {facts['global_shape']}" if "offset" in facts else ""
        lines.append(f"  {name}  {facts['dtype']} {facts['shape']}  {format_bytes(facts['size_bytes'])}{whole}")
    lines += [f"  {name}  {_shown(text)}" for name, text in shard["strings"].items()]
    values = shard.get("values", {})
    lines += [f"  {name}  {_shown_json(value)}" for name, value in islice(values.items(), _MAX_VALUES)]
    if len(values) > _MAX_VALUES:
        lines.append(f"  {len(values) - _MAX_VALUES} more values beside the tensors: --json has all, GLOB chooses some")
    return [*lines, *_lost_lines(shard)]


def _value_lines(checkpoint: dict[str, Any]) -> list[str]:
    """Return a line for each value beside the tensors and text, each once."""
    shards = [shard for shards in checkpoint["shards"].values() for shard in shards]
    texts = (f"  {name}  {_shown(text)}" for shard in shards for name, text in shard["strings"].items())
    values = (f"  {name}  {_shown_json(value)}" for shard in shards for name, value in shard.get("values", {}).items())
    return [*dict.fromkeys((*texts, *values))]


def _shown_json(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text)} characters)"


def _lost_lines(shard: dict[str, Any]) -> list[str]:
    """Return a line for each thing of a shard that no target can have."""
    unreadable = [f"  cannot be read: {name}: {why}" for name, why in shard.get("unreadable", {}).items()]
    return unreadable + [f"  left out: {what}" for what in shard.get("left_out", ())]


def _shown(text: str) -> str:
    """Return a string as people are shown it: of a long one the beginning."""
    return repr(text) if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]!r}... ({len(text)} characters)"


def _strategy_lines(facts: dict[str, Any]) -> list[str]:
    count = counted(len(facts["parameters"]), "parameter") if facts["parameters"] or not facts["rules"] else ""
    rules = counted(len(facts["rules"]), "rule") if facts["rules"] else ""
    listed = ", ".join(filter(None, (count, rules)))
    ranks, stages = counted(facts["ranks"], "rank"), counted(facts["stages"], "stage")
    lines = [f"strategy: {ranks} in {stages}, {listed}"]
    if "mesh" in facts:
        lines.append(f"  mesh {' '.join(f'{axis}={length}' for axis, length in facts['mesh'].items())}")
    listed_placements = [*facts["parameters"].items(), *((rule["match"], [rule]) for rule in facts["rules"])]
    placed = ((name, placement) for name, placements in listed_placements for placement in placements)
    if "mesh" in facts:
        return lines + [f"  {name}  {_named_placement_text(placement, facts['stages'])}" for name, placement in placed]
    return lines + [f"  {name}  {_placement_text(placement)}" for name, placement in placed]


def _placement_text(facts: dict[str, Any]) -> str:
    """Return a placement whose axes have no names in the words of a spec; they are axis0, axis1 and so on."""
    cuts = [f"{dim}={'+'.join(f'axis{axis}' for axis in axes)}" for dim, axes in enumerate(facts["split"]) if axes]
    text = " ".join(["split", *cuts] if cuts else ["whole"])
    if facts["optimizer"] > 1:
        text = f"{text if cuts else ''} optimizer {facts['optimizer']}".strip()
    if text != "whole":
        text = f"mesh {'x'.join(map(str, facts['mesh']))} {text}"
    if facts["stages"] != [0]:
        text += f" stages {facts['stages']}"
    return text + (f" sizes {facts['sizes']}" if "sizes" in facts else "")


def _named_placement_text(facts: dict[str, Any], stages: int) -> str:
    """Return a placement by a rule of a spec, in the words of the spec. stages: how many the strategy has."""
    axes, sizes = facts["axes"], facts.get("sizes", {})
    cuts = " ".join(f"{dim}={'+'.join(names)}" for dim, names in axes["split"].items())
    of_stages = "" if len(facts["stages"]) == stages else f"stage {' '.join(map(str, facts['stages']))}"
    parts = [
        f"split {cuts}" if cuts else "",
        f"optimizer {'+'.join(axes['optimizer'])}" if axes["optimizer"] else "",
        f"sizes {sizes}" if isinstance(sizes, str) else " ".join(f"sizes {dim}={part}" for dim, part in sizes.items()),
        of_stages,
    ]
    return " ".join(filter(None, parts)) or "whole"


class _OneTensor(NamedTuple):
    """One tensor in a checkpoint: its types (one, if the checkpoint is sound), and its shape."""

    dtypes: frozenset[str]
    # the whole shape, if `is_whole`; else the shapes of the parts that ranks hold, since no file tells the whole
    shapes: frozenset[Shape]
    is_whole: bool

    def joined(self, other: _OneTensor) -> _OneTensor:
        return _OneTensor(self.dtypes | other.dtypes, self.shapes | other.shapes, self.is_whole and other.is_whole)

    def as_json(self) -> dict[str, Any]:
        return {"dtypes": sorted(self.dtypes), "shapes": sorted(map(list, self.shapes)), "whole": self.is_whole}


class _ShownCheckpoint(NamedTuple):
    path: str
    format: str
    ranks: int
    tensors: dict[str, _OneTensor]


def compare(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the tensors that are not alike in two checkpoints (folders or single shards), as plain values.

    "differences" has for each name what either side says of it, None where a side has no such tensor. "alike" is the
    number of tensors that are alike, "untold" that of tensors which have the same type and may have the same shape:
    files tell only the shapes of parts, which differ or are of different numbers of ranks. Raises SourceError or
    ShardError for what is no checkpoint.
    """
    sides = [_side(os.fspath(path)) for path in (first, second)]
    names = dict.fromkeys((*sides[0].tensors, *sides[1].tensors))
    differences, untold = [], 0
    for name in sorted(names, key=natural_key):
        pair = [side.tensors.get(name) for side in sides]
        alike = _alike(*pair, same_ranks=sides[0].ranks == sides[1].ranks)
        if alike is False:
            both = [tensor and tensor.as_json() for tensor in pair]
            differences.append({"name": name, "first": both[0], "second": both[1]})
        untold += alike is None
    described = [
        {"path": side.path, "format": side.format, "ranks": side.ranks, "tensors": len(side.tensors)} for side in sides
    ]
    return {
        "kind": "comparison",
        "first": described[0],
        "second": described[1],
        "alike": len(names) - len(differences) - untold,
        "untold": untold,
        "differences": differences,
    }


def comparison_text(facts: dict[str, Any]) -> str:
    """Format the result of `compare` for people: `-` marks tensors of the first checkpoint only, `+` of the second."""
    lines = []
    for mark, side in (("-", facts["first"]), ("+", facts["second"])):
        count = f"{counted(side['ranks'], 'rank')}, {counted(side['tensors'], 'tensor')}"
        lines.append(f"{mark * 3} {side['path']}  {side['format']}, {count}")
    for difference in facts["differences"]:
        lines += [
            f"{mark} {difference['name']}  {_told(difference[side])}"
            for mark, side in (("-", "first"), ("+", "second"))
            if difference[side] is not None
        ]
    counts = [
        (len(facts["differences"]), "not alike"),
        (facts["alike"], "alike in type and shape"),
        (facts["untold"], "alike in type, as far as shards tell"),
    ]
    counts_text = ", ".join(f"{count} {what}" for count, what in counts if count)
    lines.append(f"{counted(sum(count for count, _ in counts), 'tensor')}: {counts_text}")
    if facts["untold"]:
        hint = "reshard-mpi diff compares them, by --src-strategy and --dst-strategy"
        lines.append(f"  not all files tell the shapes of whole tensors; {hint}")
    return "\n".join(map(one_line, lines))


def _side(path: str) -> _ShownCheckpoint:
    files = in_its_rank(discovery.find_shards(path))
    # A file that was given alone may be one of several that hold a checkpoint together.
    lone = SingleShard.of(files)
    is_full = len(files.by_rank) == 1 and not (lone is not None and lone.siblings())
    tensors: dict[str, _OneTensor] = {}
    for _, manifests in manifests_of(files):
        for manifest in manifests:
            for name, tensor in _tensors(manifest, is_full=is_full).items():
                other_part = tensors.get(name)
                tensors[name] = tensor if other_part is None else other_part.joined(tensor)
    return _ShownCheckpoint(files.path, files.format, len(files.by_rank), tensors)


def _tensors(manifest: Manifest, *, is_full: bool) -> dict[str, _OneTensor]:
    """Return what one file says of its tensors. is_full: it holds tensors whole where it says nothing else."""
    of_kind = {}
    for number, kind in enumerate(manifest.tensors.kinds):
        whole = kind.global_shape if kind.global_shape is not None else kind.shape
        is_whole = kind.global_shape is not None or is_full
        of_kind[number] = _OneTensor(frozenset({kind.dtype.name}), frozenset({whole}), is_whole)
    return {name: of_kind[number] for name, number in zip(manifest.tensors, manifest.tensors.kind_ids)}


def _alike(first: _OneTensor | None, second: _OneTensor | None, *, same_ranks: bool) -> bool | None:
    """Tell whether two tensors have the same type and shape; None if files do not tell enough of the shape.

    Parts of the same shapes on as many ranks count as the same.
    """
    if first is None or second is None or first.dtypes != second.dtypes:
        return False
    if first.is_whole and second.is_whole:
        return first.shapes == second.shapes
    return True if first == second and same_ranks else None


def _told(tensor: dict[str, Any]) -> str:
    shapes = " and ".join(map(str, tensor["shapes"]))
    return f"{' and '.join(tensor['dtypes'])} {'' if tensor['whole'] else 'parts of '}{shapes}"
