"""Lay a whole training out as the files of DeepSpeed's ZeRO (`ZeroLayout`, `vectors_of`), and keep that as text.

The files of one checkpoint are numbered: first those with each rank's share of the optimizer, then those with weights
and settings, of which stages 1 and 2 have one and stage 3 has one a rank. In a pipeline each of its stages has these,
one behind the other. Last come the files of its layers, or of experts. All numbers here are in elements.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from reshard_mpi.formats.deepspeed.flat_groups import FlatRun, own_in_partition, own_slices
from reshard_mpi.formats.nest.nodes import MODEL
from reshard_mpi.formats.protocol import Part
from reshard_mpi.sharding.box import Box

# Under this name the layout goes to the writer, among the strings of a file.
LAYOUT = "__reshard_mpi_deepspeed__"
# Partitions of a group have a multiple of this number of elements (called nccl_start_alignment_factor there).
_ALIGNMENT = 2
# The name that state has of the weights themselves.
WEIGHTS = "fp32_param"
STATE = "optimizer.state."


class LaidParameter(NamedTuple):
    """A parameter.

    Attributes:
        name, shape: in the model, whole.
        weights: the tensor that its weights in vectors come from.
        dtype: the name of the type of one that is not trained; "": that of the model.
    """

    name: str
    shape: tuple[int, ...]
    weights: str = ""
    dtype: str = ""

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class FlatGroupLayout(NamedTuple):
    """A flat group.

    Attributes:
        parameters: in order. Experts are divided over parts of the ranks; then it has those of one part behind those of
            the other, with as many of the same shapes each.
        gaps: behind the parameters of a part.
        settings: the number of the optimizer's own group.
        parts: how many parts there are: one but for experts.
    """

    parameters: tuple[LaidParameter, ...]
    gaps: tuple[int, ...]
    settings: int
    parts: int = 1

    def of_part(self, part: int) -> tuple[LaidParameter, ...]:
        """Return the parameters of a part. All parts call theirs as the first one does."""
        count = len(self.gaps)
        return self.parameters[part * count : (part + 1) * count]

    @property
    def size(self) -> int:
        """How many elements a part has."""
        return sum(parameter.size for parameter in self.of_part(0)) + sum(self.gaps)

    def partition(self, ranks: int) -> int:
        """Return the number of elements of the group that each of `ranks` ranks has at stages 1 and 2, with padding."""
        aligned = _ALIGNMENT * ranks
        return -(-self.size // aligned) * aligned // ranks


class ZeroLayout(NamedTuple):
    """How a training lies in the files of ZeRO.

    Attributes:
        stage, ranks: of ZeRO, and how many data-parallel ranks there are.
        dtype: the name of the type of the model's parameters.
        groups: the flat groups of each stage of a pipeline; what is none has one. At stage 3 of ZeRO an optimizer's
            group may have several.
        kinds: the kinds of state that have the shape of their parameter, with the name of their type; counters: those
            that are one number.
        names: of all tensors of the model, in its order.
        frozen: parameters that are not trained; buffers: names of buffers; shared: names of parameters that are others
            under a second name, each with that.
        apart: for each file of a layer or an expert, what names of its tensors begin with.
        is_pipeline: whether these are layers.
        module, model, optimizer: texts of nests: what else modules save, and the files of weights and of the optimizer.
    """

    stage: int
    ranks: int
    dtype: str
    groups: tuple[tuple[FlatGroupLayout, ...], ...]
    kinds: tuple[tuple[str, str], ...]
    counters: tuple[str, ...]
    names: tuple[str, ...]
    frozen: tuple[LaidParameter, ...]
    buffers: tuple[str, ...]
    shared: tuple[tuple[str, str], ...]
    apart: tuple[str, ...]
    is_pipeline: bool
    module: str
    model: str
    optimizer: str

    @property
    def is_sliced(self) -> bool:
        return self.stage == 3

    @property
    def optimizer_files(self) -> int:
        """How many files there are with shares of the optimizer, which come first."""
        return len(self.groups) * self.ranks

    @property
    def model_files(self) -> int:
        """How many files there are with weights and settings, which come next."""
        return self.ranks if self.is_sliced else len(self.groups)

    def as_text(self) -> str:
        return json.dumps(self, separators=(",", ":"))

    @classmethod
    def of_text(cls, text: str) -> ZeroLayout:
        """Return the layout that a text of `as_text` says."""
        layout = cls(*_as_tuples(json.loads(text)))
        groups = tuple(
            tuple(FlatGroupLayout(_parameters(own), gaps, settings, parts) for own, gaps, settings, parts in of_stage)
            for of_stage in layout.groups
        )
        return layout._replace(groups=groups, frozen=_parameters(layout.frozen))


def layer_of(name: str, otherwise: int) -> int:
    """Return the number of the layer of a pipeline that a tensor is in, by its name; another one if it is in none."""
    number = name.partition(".")[0]
    return int(number) if number.isdecimal() else otherwise


def _as_tuples(value: Any) -> Any:
    """Return a value of JSON with tuples for its lists."""
    return tuple(map(_as_tuples, value)) if type(value) is list else value


def _parameters(fields: Iterable[Any]) -> tuple[LaidParameter, ...]:
    return tuple(LaidParameter(*own) for own in fields)


def names_by_file(layout: ZeroLayout, names: Iterable[str]) -> dict[str, list[str]]:
    """Return names in the model by what those in their file begin with; "" stands for the files of weights."""
    begins = sorted(layout.apart)  # none begins with another one
    by_file: dict[str, list[str]] = {}
    for name in names:
        place = bisect_right(begins, name) - 1
        is_apart = place >= 0 and name.startswith(begins[place])
        by_file.setdefault(begins[place] if is_apart else "", []).append(name)
    return by_file


class Vector(NamedTuple):
    """A vector in a file: its length, and the parts of tensors in it, each with the place of its first element."""

    length: int
    parts: tuple[tuple[int, Part], ...]


class RankVectors(NamedTuple):
    """The vectors of one flat group in a file.

    Attributes:
        weights: the parameters themselves; at stages 1 and 2 without the padding at the end.
        state: by kind; counters: by kind, as tensors of one number.
        padding: how many elements of the partition are padding.
        runs: of its parameters.
    """

    weights: Vector
    state: dict[str, Vector]
    counters: dict[str, Part]
    padding: int
    runs: Sequence[FlatRun]


def vectors_of(layout: ZeroLayout, file: int) -> Iterator[RankVectors]:
    """Yield the vectors of each flat group in a file of the optimizer."""
    model_rank, data_rank = divmod(file, layout.ranks)
    for group in layout.groups[model_rank]:
        # The parts of experts are dealt out over the ranks.
        rank, part = divmod(data_rank, group.parts)
        ranks = layout.ranks // group.parts
        parameters = group.of_part(part)
        sizes = [parameter.size for parameter in parameters]
        if layout.is_sliced:
            length, padding = sum(-(-size // ranks) for size in sizes), 0
            own = [*own_slices(sizes, ranks, rank)]
        else:
            length = group.partition(ranks)
            padding = min(max((rank + 1) * length - group.size, 0), length)
            own = [*own_in_partition(sizes, group.gaps, length, rank)]
        counters = layout.counters if parameters else ()
        yield RankVectors(
            Vector(length - padding, tuple(_parts_of(parameters, own, WEIGHTS, file))),
            {kind: Vector(length, tuple(_parts_of(parameters, own, kind, file))) for kind, _ in layout.kinds},
            {kind: whole_part(f"{STATE}{parameters[0].name}.{kind}", (), file) for kind in counters},
            padding,
            own,
        )


def _parts_of(
    parameters: Sequence[LaidParameter], own: Sequence[FlatRun], kind: str, file: int
) -> Iterator[tuple[int, Part]]:
    """Yield the parts of a vector of one kind, with their places in it."""
    for run in own:
        parameter = parameters[run.parameter]
        source = parameter.weights if kind == WEIGHTS else f"{STATE}{parameter.name}.{kind}"
        yield from _parts(source, parameter.shape, run, file, "float32" if kind == WEIGHTS else "")


def frozen_vectors(layout: ZeroLayout, rank: int) -> Iterator[Vector]:
    """Yield the slices that a rank of stage 3 has of the parameters that are not trained."""
    for parameter in layout.frozen:
        own = own_slices([parameter.size], layout.ranks, rank)
        parts = [part for run in own for part in _parts(MODEL + parameter.name, parameter.shape, run, rank)]
        yield Vector(-(-parameter.size // layout.ranks), tuple(parts))


def _parts(source: str, shape: tuple[int, ...], run: FlatRun, rank: int, dtype: str = "") -> Iterator[tuple[int, Part]]:
    """Yield the boxes of a tensor that make up a run, with their places in a vector."""
    place = run.start
    for number, box in enumerate(Box.whole(shape).blocks(run.length, run.before, run.before + run.length)):
        yield place, Part(f"{source}@{rank}.{number}", source, box, dtype)
        place += box.size


def whole_part(name: str, shape: tuple[int, ...], file: int) -> Part:
    """Return the part of a file that is a whole tensor, which other files have as well."""
    return Part(f"{name}@{file}", name, Box.whole(shape), "")
