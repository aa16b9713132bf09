"""Which tensors of two checkpoints are not alike in name, type or shape. Only the structure of files is read."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from reshard_mpi.checkpoints import discovery
from reshard_mpi.checkpoints.inspection import manifests_of
from reshard_mpi.checkpoints.siblings import LoneShard, in_its_rank
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.text import counted, natural_key, one_line

Shape = tuple[int, ...]


class _Tensor(NamedTuple):
    """What a checkpoint says of a tensor: its types (one, if it is sound), and its shape.

    shapes: the whole shape, if `is_whole`; else those of the parts that ranks hold, since no file tells the whole.
    """

    dtypes: frozenset[str]
    shapes: frozenset[Shape]
    is_whole: bool

    def joined(self, other: _Tensor) -> _Tensor:
        return _Tensor(self.dtypes | other.dtypes, self.shapes | other.shapes, self.is_whole and other.is_whole)

    def as_json(self) -> dict[str, Any]:
        return {"dtypes": sorted(self.dtypes), "shapes": sorted(map(list, self.shapes)), "whole": self.is_whole}


class _Side(NamedTuple):
    path: str
    format: str
    ranks: int
    tensors: dict[str, _Tensor]


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
            told = [tensor and tensor.as_json() for tensor in pair]
            differences.append({"name": name, "first": told[0], "second": told[1]})
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


def as_text(facts: dict[str, Any]) -> str:
    """Return what `compare` found as lines for people: `-` has what only the first one has, `+` what the second has."""
    lines = [_side_line(mark, facts[side]) for mark, side in (("-", "first"), ("+", "second"))]
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
    told = ", ".join(f"{count} {what}" for count, what in counts if count)
    lines.append(f"{counted(sum(count for count, _ in counts), 'tensor')}: {told}")
    if facts["untold"]:
        hint = "reshard-mpi diff compares them, by --src-strategy and --dst-strategy"
        lines.append(f"  not all files tell the shapes of whole tensors; {hint}")
    return "\n".join(map(one_line, lines))


def _side(path: str) -> _Side:
    files = in_its_rank(discovery.find_shards(path))
    # A file that was given alone may be one of several that hold a checkpoint together.
    lone = LoneShard.of(files)
    is_full = len(files.by_rank) == 1 and not (lone is not None and lone.siblings())
    tensors: dict[str, _Tensor] = {}
    for _, manifests in manifests_of(files):
        for manifest in manifests:
            for name, tensor in _tensors(manifest, is_full=is_full).items():
                known = tensors.get(name)
                tensors[name] = tensor if known is None else known.joined(tensor)
    return _Side(files.path, files.format, len(files.by_rank), tensors)


def _tensors(manifest: Manifest, *, is_full: bool) -> dict[str, _Tensor]:
    """Return what one file says of its tensors. is_full: it holds tensors whole where it says nothing else."""
    of_kind = {}
    for number, kind in enumerate(manifest.tensors.kinds):
        whole = kind.global_shape if kind.global_shape is not None else kind.shape
        is_whole = kind.global_shape is not None or is_full
        of_kind[number] = _Tensor(frozenset({kind.dtype.name}), frozenset({whole}), is_whole)
    return {name: of_kind[number] for name, number in zip(manifest.tensors, manifest.tensors.kind_of)}


def _alike(first: _Tensor | None, second: _Tensor | None, *, same_ranks: bool) -> bool | None:
    """Tell whether two tensors have the same type and shape; None if files do not tell enough of the shape.

    Parts of the same shapes on as many ranks count as the same.
    """
    if first is None or second is None or first.dtypes != second.dtypes:
        return False
    if first.is_whole and second.is_whole:
        return first.shapes == second.shapes
    return True if first == second and same_ranks else None


def _side_line(mark: str, side: dict[str, Any]) -> str:
    count = f"{counted(side['ranks'], 'rank')}, {counted(side['tensors'], 'tensor')}"
    return f"{mark * 3} {side['path']}  {side['format']}, {count}"


def _told(tensor: dict[str, Any]) -> str:
    shapes = " and ".join(map(str, tensor["shapes"]))
    return f"{' and '.join(tensor['dtypes'])} {'' if tensor['whole'] else 'parts of '}{shapes}"
