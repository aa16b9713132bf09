"""Meshes of ranks as DTensors name them, in the ways of several releases of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from reshard_mpi.formats.nest.trees import Call, Dict, Value
from reshard_mpi.formats.torch.tensors import StoredTensor, numbers
from reshard_mpi.sharding.strategy.limits import MAX_AXES

# The largest trainings known have some tens of thousands.
_MAX_RANKS = 1 << 17
# In the place of a rank.
UNSAID = -1


class Factor(NamedTuple):
    """A part of a mesh dimension: so many ranks, whose numbers are `stride` apart."""

    length: int
    stride: int


class Mesh(NamedTuple):
    """The mesh of a tensor, which may be a part of all ranks: each dimension as factors, the major one first.

    rank: the file's own; -1 if the mesh does not say, as a part of all ranks in torch 2.9. counts_all: it says how
    many ranks there are in all; else there may be more than it has.
    """

    world_size: int
    rank: int
    dimensions: tuple[tuple[Factor, ...], ...]
    counts_all: bool = True

    def length(self, dimension: int) -> int:
        return math.prod(factor.length for factor in self.dimensions[dimension])


class UnclearError(Exception):
    """What is unusual about a DTensor, in words; it becomes a ShardError where the tensor's name is known."""


def _shown(rank: Value) -> str:
    return f"rank {rank}"[:100] if type(rank) is int else "no rank"


def mesh_of(value: Value) -> Mesh:
    """Return the mesh that an object describes. Raises UnclearError or ValueError if it is not as torch has it."""
    state = state_of(value, "DeviceMesh")
    if state.get("_layout") is None and state.get("_flatten_mesh_list") is not None:
        return _mesh_of_ranks(state)
    layout, rank = state.get("_layout"), state.get("_rank")
    if layout is None or state.get("_flatten_rank_map") is None:
        raise UnclearError("a mesh of a release of torch that is not known: load the file and save full tensors")
    ranks = numbers(state.get("_flatten_rank_map"))
    if not 0 < len(ranks) <= _MAX_RANKS or ranks != tuple(range(len(ranks))):
        raise UnclearError(f"a mesh whose ranks are not counted from 0: {ranks[:MAX_AXES]}")
    dimensions = _dimensions(state_of(layout, "_MeshLayout"))
    if rank is None:
        is_whole = math.prod(factor.length for axis in dimensions for factor in axis) == len(ranks)
        rank = _own_rank(dimensions, numbers(state.get("_coordinate_on_dim"))) if is_whole else UNSAID
    elif type(rank) is not int or not 0 <= rank < len(ranks):
        raise UnclearError(f"a mesh of {len(ranks)} ranks, and a file of {_shown(rank)}")
    return Mesh(len(ranks), rank, dimensions)


def _dimensions(layout: Dict) -> tuple[tuple[Factor, ...], ...]:
    """Return the dimensions of a mesh, each by itself (torch 2.13) or all their lengths and strides (torch 2.9)."""
    axes = layout.get("axes")
    if axes is None:
        shape, stride = layout.get("shape"), layout.get("stride")
        if type(shape) is not tuple or type(stride) is not tuple or len(shape) != len(stride):
            raise UnclearError("a mesh without dimensions")
        pairs = [(length if type(length) is tuple else (length,), step) for length, step in zip(shape, stride)]
        found = tuple(_factors(length, step if type(step) is tuple else (step,)) for length, step in pairs)
    else:
        states = [state_of(axis, "_FlatLayout") for axis in axes] if type(axes) in (tuple, list) else []
        found = tuple(_factors(state.get("shape"), state.get("stride")) for state in states)
    if not 0 < len(found) <= MAX_AXES:
        raise UnclearError("a mesh without dimensions")
    return found


def _own_rank(dimensions: Sequence[Sequence[Factor]], coordinates: Sequence[int]) -> int:
    """Return the rank at these coordinates of a mesh of all ranks."""
    if len(coordinates) != len(dimensions):
        raise UnclearError("a mesh that the file's own rank is not in")
    rank = 0
    for factors, at in zip(dimensions, coordinates):
        for factor in reversed(factors):
            at, step = divmod(at, factor.length)
            rank += step * factor.stride
        if at:
            raise UnclearError("a mesh that the file's own rank is not in")
    return rank


def _mesh_of_ranks(state: Dict) -> Mesh:
    """Return a mesh as torch up to 2.8 has it: its ranks one by one, and where among them the file's own is."""
    array, ranks = state.get("mesh"), numbers(state.get("_flatten_mesh_list"))
    coordinates = numbers(state.get("_coordinate_on_dim"))
    if type(array) is not StoredTensor or math.prod(array.shape) != len(ranks) or not 0 < len(ranks) <= _MAX_RANKS:
        raise UnclearError("a mesh whose ranks do not fit its shape")
    shape = array.shape
    if len(coordinates) != len(shape) or any(at >= length for at, length in zip(coordinates, shape)):
        raise UnclearError("a mesh that the file's own rank is not in")
    counts = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    strides = [ranks[count] - ranks[0] if length > 1 else 0 for length, count in zip(shape, counts)]
    for number, rank in enumerate(ranks):
        steps = (number // count % length * stride for length, count, stride in zip(shape, counts, strides))
        if rank != ranks[0] + sum(steps):
            raise UnclearError(f"a mesh whose ranks are not evenly apart: {ranks[:MAX_AXES]}")
    if any(stride <= 0 for length, stride in zip(shape, strides) if length > 1):
        raise UnclearError(f"a mesh whose ranks do not ascend: {ranks[:MAX_AXES]}")
    own = ranks[sum(at * count for at, count in zip(coordinates, counts))]
    has_all = sorted(ranks) == list(range(len(ranks)))
    dimensions = tuple((Factor(length, stride),) if length > 1 else () for length, stride in zip(shape, strides))
    return Mesh(len(ranks) if has_all else 0, own, dimensions, counts_all=False)


def _factors(lengths: Value, steps: Value) -> tuple[Factor, ...]:
    """Return the factors of a mesh dimension that are more than one rank."""
    shape, stride = numbers(lengths), numbers(steps)
    if len(shape) != len(stride) or len(shape) > MAX_AXES or 0 in shape:
        raise UnclearError("a mesh dimension without length")
    factors = tuple(Factor(*pair) for pair in zip(shape, stride) if pair[0] > 1)
    if any(factor.stride == 0 for factor in factors):
        raise UnclearError("a mesh dimension whose ranks are all the same")
    return factors


def axes_of(mesh: Mesh) -> tuple[tuple[int, ...], dict[Factor, int]]:
    """Return the lengths of axes that together count all ranks in order, and which of them each factor is."""
    lengths: list[int] = []
    axis_of: dict[Factor, int] = {}
    extent = mesh.world_size
    factors = sorted(
        (factor for dimension in mesh.dimensions for factor in dimension),
        key=lambda factor: factor.stride,
        reverse=True,
    )
    for factor in factors:
        step = factor.length * factor.stride
        if factor in axis_of or extent % step:
            raise UnclearError(f"a mesh whose dimensions do not count the ranks: {mesh.dimensions}")
        if extent > step:
            lengths.append(extent // step)
        axis_of[factor] = len(lengths)
        lengths.append(factor.length)
        extent = factor.stride
    if extent > 1:
        lengths.append(extent)
    return tuple(lengths) or (1,), axis_of


def state_of(value: Value, class_name: str) -> Dict:
    """Return the attributes of an object of a class of torch."""
    if type(value) is not Call or value.function.name != class_name or value.function.module.split(".")[0] != "torch":
        raise UnclearError(f"no {class_name}")
    if type(value.state) is not Dict:
        raise UnclearError(f"a {class_name} without attributes")
    return value.state
