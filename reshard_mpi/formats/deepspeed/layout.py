"""Lay a whole training out as the files of DeepSpeed's ZeRO (`ZeroLayout`, `vectors_of`), and keep that as text.

The files of one checkpoint are numbered: first those with each rank's share of the optimizer, then those with weights
and settings, of which stages 1 and 2 have one and stage 3 has one a rank. All numbers here are in elements.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from reshard_mpi.formats.deepspeed.flat_groups import OwnRun, own_in_partition, own_slices
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
    """A flat group: its parameters in order, the gaps behind them, and the number of the optimizer's own group."""

    parameters: tuple[LaidParameter, ...]
    gaps: tuple[int, ...]
    settings: int

    @property
    def size(self) -> int:
        return sum(parameter.size for parameter in self.parameters) + sum(self.gaps)

    def partition(self, ranks: int) -> int:
        """Return the number of elements of the group that each of `ranks` ranks has at stages 1 and 2, with padding."""
        aligned = _ALIGNMENT * ranks
        return -(-self.size // aligned) * aligned // ranks


class ZeroLayout(NamedTuple):
    """How a training lies in the files of ZeRO.

    Attributes:
        stage, ranks: of ZeRO, and how many data-parallel ranks there are.
        dtype: the name of the type of the model's parameters.
        groups: the flat groups. At stage 3 an optimizer's group may have several.
        kinds: the kinds of state that have the shape of their parameter, with the name of their type; counters: those
            that are one number.
        names: of all tensors of the model, in its order.
        frozen: parameters that are not trained; buffers: names of buffers; shared: names of parameters that are others
            under a second name, each with that.
        model, optimizer: texts of nests: what else the files have of both.
    """

    stage: int
    ranks: int
    dtype: str
    groups: tuple[FlatGroupLayout, ...]
    kinds: tuple[tuple[str, str], ...]
    counters: tuple[str, ...]
    names: tuple[str, ...]
    frozen: tuple[LaidParameter, ...]
    buffers: tuple[str, ...]
    shared: tuple[tuple[str, str], ...]
    model: str
    optimizer: str

    @property
    def is_sliced(self) -> bool:
        return self.stage == 3

    @property
    def files(self) -> int:
        """How many files there are."""
        return 2 * self.ranks if self.is_sliced else self.ranks + 1

    def as_text(self) -> str:
        return json.dumps(self, separators=(",", ":"))

    @classmethod
    def of_text(cls, text: str) -> ZeroLayout:
        """Return the layout that a text of `as_text` says."""
        fields: list[Any] = json.loads(text)
        stage, ranks, dtype, groups, kinds, counters, names, frozen, buffers, shared, model, optimizer = fields
        return cls(
            stage,
            ranks,
            dtype,
            tuple(FlatGroupLayout(_parameters(own), tuple(gaps), settings) for own, gaps, settings in groups),
            tuple((kind, dtype) for kind, dtype in kinds),
            tuple(counters),
            tuple(names),
            _parameters(frozen),
            tuple(buffers),
            tuple((name, other) for name, other in shared),
            model,
            optimizer,
        )


def _parameters(fields: Sequence[Any]) -> tuple[LaidParameter, ...]:
    return tuple(LaidParameter(name, tuple(shape), weights, dtype) for name, shape, weights, dtype in fields)


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
        slices: at stages 1 and 2, for each parameter that has elements here, its number, its start and its length.
    """

    weights: Vector
    state: dict[str, Vector]
    counters: dict[str, Part]
    padding: int
    slices: tuple[tuple[int, int, int], ...]


def vectors_of(layout: ZeroLayout, rank: int) -> Iterator[RankVectors]:
    """Yield the vectors of each flat group in a rank's file of the optimizer."""
    for group in layout.groups:
        sizes = [parameter.size for parameter in group.parameters]
        if layout.is_sliced:
            length, padding = sum(-(-size // layout.ranks) for size in sizes), 0
            own = [*own_slices(sizes, layout.ranks, rank)]
        else:
            length = group.partition(layout.ranks)
            padding = min(max((rank + 1) * length - group.size, 0), length)
            own = [*own_in_partition(sizes, group.gaps, length, rank)]
        first = next(iter(group.parameters), None)
        yield RankVectors(
            Vector(length - padding, tuple(_parts_of(group, own, WEIGHTS, rank))),
            {kind: Vector(length, tuple(_parts_of(group, own, kind, rank))) for kind, _ in layout.kinds},
            {
                kind: whole_part(f"{STATE}{first.name}.{kind}", (), rank)
                for kind in layout.counters
                if first is not None
            },
            padding,
            tuple((run.parameter, run.start, run.length) for run in own),
        )


def _parts_of(group: FlatGroupLayout, own: Sequence[OwnRun], kind: str, rank: int) -> Iterator[tuple[int, Part]]:
    """Yield the parts of a vector of one kind, with their places in it."""
    for run in own:
        parameter = group.parameters[run.parameter]
        source = parameter.weights if kind == WEIGHTS else f"{STATE}{parameter.name}.{kind}"
        yield from _parts(source, parameter.shape, run, rank, "float32" if kind == WEIGHTS else "")


def frozen_vectors(layout: ZeroLayout, rank: int) -> Iterator[Vector]:
    """Yield the slices that a rank of stage 3 has of the parameters that are not trained."""
    for parameter in layout.frozen:
        own = own_slices([parameter.size], layout.ranks, rank)
        parts = [part for run in own for part in _parts(MODEL + parameter.name, parameter.shape, run, rank)]
        yield Vector(-(-parameter.size // layout.ranks), tuple(parts))


def _parts(source: str, shape: tuple[int, ...], run: OwnRun, rank: int, dtype: str = "") -> Iterator[tuple[int, Part]]:
    """Yield the boxes of a tensor that make up a run, with their places in a vector."""
    place = run.start
    for number, box in enumerate(Box.whole(shape).blocks(run.length, run.before, run.before + run.length)):
        yield place, Part(f"{source}@{rank}.{number}", source, box, dtype)
        place += box.size


def whole_part(name: str, shape: tuple[int, ...], file: int) -> Part:
    """Return the part of a file that is a whole tensor, which other files have as well."""
    return Part(f"{name}@{file}", name, Box.whole(shape), "")
