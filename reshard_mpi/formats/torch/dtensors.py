"""Compute which part of the whole a rank's DTensor is (`part_of`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from reshard_mpi.errors import LayoutError, ShardError
from reshard_mpi.formats.manifest import ShardIdentity
from reshard_mpi.formats.nest.nodes import Call, Dict, Value
from reshard_mpi.formats.torch.tensors import DistributedTensor, StoredTensor, numbers
from reshard_mpi.sharding import strategy_table
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.layout import Layout
from reshard_mpi.sharding.placement import Placement, Shape, ceil_lengths
from reshard_mpi.sharding.strategy import Strategy
from reshard_mpi.sharding.value_checks import MAX_AXES

# The largest trainings known have some tens of thousands.
_MAX_RANKS = 1 << 17
# In the place of a rank.
UNSAID = -1


class MeshFactor(NamedTuple):
    """A part of a mesh dimension: ranks whose numbers are `stride` apart."""

    length: int
    stride: int


class TensorMesh(NamedTuple):
    """The mesh of a tensor, which may be a part of all ranks: each dimension as factors, the major one first."""

    world_size: int
    rank: int  # the file's own; -1 if the mesh does not say, as a part of all ranks in torch 2.9
    dimensions: tuple[tuple[MeshFactor, ...], ...]
    counts_all: bool = True  # it says how many ranks there are in all; else there may be more than it has

    def length(self, dimension: int) -> int:
        return math.prod(factor.length for factor in self.dimensions[dimension])


class UnclearError(Exception):
    """An unusual DTensor, in words; it becomes a ShardError where the tensor's name is known."""


def _shown(rank: Value) -> str:
    return f"rank {rank}"[:100] if type(rank) is int else "no rank"


def mesh_of(value: Value) -> TensorMesh:
    """Return the mesh that an object describes. Raises UnclearError or ValueError if it is not as torch has it."""
    state = attributes_of(value, "DeviceMesh")
    if state.get("_layout") is None and state.get("_flatten_mesh_list") is not None:
        return _mesh_of_ranks(state)
    layout, rank = state.get("_layout"), state.get("_rank")
    if layout is None or state.get("_flatten_rank_map") is None:
        raise UnclearError("a mesh of a release of torch that is not known: load the file and save full tensors")
    ranks = numbers(state.get("_flatten_rank_map"))
    if not 0 < len(ranks) <= _MAX_RANKS or ranks != tuple(range(len(ranks))):
        raise UnclearError(f"a mesh whose ranks are not counted from 0: {ranks[:MAX_AXES]}")
    dimensions = _dimensions(attributes_of(layout, "_MeshLayout"))
    if rank is None:
        is_whole = math.prod(factor.length for axis in dimensions for factor in axis) == len(ranks)
        rank = _own_rank(dimensions, numbers(state.get("_coordinate_on_dim"))) if is_whole else UNSAID
    elif type(rank) is not int or not 0 <= rank < len(ranks):
        raise UnclearError(f"a mesh of {len(ranks)} ranks, and a file of {_shown(rank)}")
    return TensorMesh(len(ranks), rank, dimensions)


def _dimensions(layout: Dict) -> tuple[tuple[MeshFactor, ...], ...]:
    """Return the dimensions of a mesh, each by itself (torch 2.13) or all their lengths and strides (torch 2.9)."""
    axes = layout.get("axes")
    if axes is None:
        shape, stride = layout.get("shape"), layout.get("stride")
        if type(shape) is not tuple or type(stride) is not tuple or len(shape) != len(stride):
            raise UnclearError("a mesh without dimensions")
        pairs = [(length if type(length) is tuple else (length,), step) for length, step in zip(shape, stride)]
        dimensions = tuple(_factors(length, step if type(step) is tuple else (step,)) for length, step in pairs)
    else:
        states = [attributes_of(axis, "_FlatLayout") for axis in axes] if type(axes) in (tuple, list) else []
        dimensions = tuple(_factors(state.get("shape"), state.get("stride")) for state in states)
    if not 0 < len(dimensions) <= MAX_AXES:
        raise UnclearError("a mesh without dimensions")
    return dimensions


def _own_rank(dimensions: Sequence[Sequence[MeshFactor]], coordinates: Sequence[int]) -> int:
    """Return the rank at these coordinates of a mesh of all ranks."""
    if len(coordinates) != len(dimensions):
        raise UnclearError("a mesh that the file's own rank is not in")
    rank = 0
    for factors, coordinate in zip(dimensions, coordinates):
        for factor in reversed(factors):
            coordinate, step = divmod(coordinate, factor.length)
            rank += step * factor.stride
        if coordinate:
            raise UnclearError("a mesh that the file's own rank is not in")
    return rank


def _mesh_of_ranks(state: Dict) -> TensorMesh:
    """Return a mesh as torch up to 2.8 has it: its ranks one by one, and where among them the file's own is."""
    array, ranks = state.get("mesh"), numbers(state.get("_flatten_mesh_list"))
    coordinates = numbers(state.get("_coordinate_on_dim"))
    if type(array) is not StoredTensor or math.prod(array.shape) != len(ranks) or not 0 < len(ranks) <= _MAX_RANKS:
        raise UnclearError("a mesh whose ranks do not fit its shape")
    shape = array.shape
    if len(coordinates) != len(shape) or any(coordinate >= length for coordinate, length in zip(coordinates, shape)):
        raise UnclearError("a mesh that the file's own rank is not in")
    counts = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    strides = [ranks[count] - ranks[0] if length > 1 else 0 for length, count in zip(shape, counts)]
    for number, rank in enumerate(ranks):
        steps = (number // count % length * stride for length, count, stride in zip(shape, counts, strides))
        if rank != ranks[0] + sum(steps):
            raise UnclearError(f"a mesh whose ranks are not evenly apart: {ranks[:MAX_AXES]}")
    if any(stride <= 0 for length, stride in zip(shape, strides) if length > 1):
        raise UnclearError(f"a mesh whose ranks do not ascend: {ranks[:MAX_AXES]}")
    own = ranks[sum(coordinate * count for coordinate, count in zip(coordinates, counts))]
    has_all = sorted(ranks) == list(range(len(ranks)))
    dimensions = tuple((MeshFactor(length, stride),) if length > 1 else () for length, stride in zip(shape, strides))
    return TensorMesh(len(ranks) if has_all else 0, own, dimensions, counts_all=False)


def _factors(lengths: Value, steps: Value) -> tuple[MeshFactor, ...]:
    """Return the factors of a mesh dimension that are more than one rank."""
    shape, stride = numbers(lengths), numbers(steps)
    if len(shape) != len(stride) or len(shape) > MAX_AXES or 0 in shape:
        raise UnclearError("a mesh dimension without length")
    factors = tuple(MeshFactor(*pair) for pair in zip(shape, stride) if pair[0] > 1)
    if any(factor.stride == 0 for factor in factors):
        raise UnclearError("a mesh dimension whose ranks are all the same")
    return factors


def axes_of(mesh: TensorMesh) -> tuple[tuple[int, ...], dict[MeshFactor, int]]:
    """Return the lengths of axes that together count all ranks in order, and which of them each factor is."""
    lengths: list[int] = []
    axis_of: dict[MeshFactor, int] = {}
    extent = mesh.world_size
    factors = (factor for dimension in mesh.dimensions for factor in dimension)
    for factor in sorted(factors, key=lambda factor: factor.stride, reverse=True):
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


def attributes_of(value: Value, class_name: str) -> Dict:
    """Return the attributes of an object of a class of torch."""
    if type(value) is not Call or value.function.name != class_name or value.function.module.split(".")[0] != "torch":
        raise UnclearError(f"no {class_name}")
    if type(value.state) is not Dict:
        raise UnclearError(f"a {class_name} without attributes")
    return value.state


# Pieces of tensors whose pieces differ in length: by way of cutting, and of all.
_MAX_DIFFERENT_PIECES, _MAX_PIECES = 1 << 20, 1 << 24


class WholeTensor(NamedTuple):
    """Where a rank's part lies in a whole tensor, and that tensor's shape."""

    box: Box
    global_shape: tuple[int, ...]


def whole_tensors(
    tensors: Sequence[tuple[str, Value]], path: str
) -> tuple[Mapping[str, WholeTensor], ShardIdentity | None]:
    """Return which parts the DTensors among a file's tensors are, and whose file it is; none if there are none.

    Raises ShardError for a mesh or placement that is not known, or does not fit the part that lies in the file.
    """
    wholes: dict[str, WholeTensor] = {}
    placements: dict[str, tuple[Placement, ...]] = {}
    placing = _Placing()
    distributed = [(name, tensor) for name, tensor in tensors if type(tensor) is DistributedTensor]
    if not distributed:
        return {}, None
    meshes = _meshes(distributed, path)
    first = meshes[0]
    for (name, tensor), mesh in zip(distributed, meshes):
        where = f"{path}, {name!r}"
        if mesh[:2] != first[:2]:
            raise ShardError(
                "DTensors of one file are of different ranks",
                expected=f"rank {first.rank} of {first.world_size}, as {distributed[0][0]!r} says",
                got=f"rank {mesh.rank} of {mesh.world_size}",
                where=where,
            )
        try:
            state = attributes_of(tensor.spec, "DTensorSpec")
            global_shape = _global_shape(state)
            placement, box = placing.of(mesh, _cuts(state, mesh, len(global_shape)), global_shape)
        except (UnclearError, LayoutError, ValueError) as error:
            raise _unplaced(error, where) from None
        if box.shape != tensor.local.shape:
            raise ShardError(
                "a DTensor does not have the part that its mesh and placements say",
                expected=f"{list(box.shape)} of {list(global_shape)} on rank {mesh.rank}",
                got=str(list(tensor.local.shape)),
                where=where,
            )
        wholes[name] = WholeTensor(box, global_shape)
        placements[name] = (placement,)
    strategy = Strategy(first.world_size, 1, placements, origin=path)
    return wholes, ShardIdentity(first.rank, first.world_size, strategy_table.dumps(strategy))


def _meshes(tensors: Sequence[tuple[str, DistributedTensor]], path: str) -> list[TensorMesh]:
    """Return the mesh of each DTensor.

    Those that do not say how many ranks there are have as many as the largest, those without rank have that of others.
    """
    meshes: dict[int, TensorMesh] = {}
    described_meshes = []
    for name, tensor in tensors:
        try:
            described_mesh = attributes_of(tensor.spec, "DTensorSpec").get("mesh")
            described_meshes.append(described_mesh)
            if id(described_mesh) not in meshes:
                meshes[id(described_mesh)] = mesh_of(described_mesh)
        except (UnclearError, ValueError) as error:
            raise _unplaced(error, f"{path}, {name!r}") from None
    world_size = max(mesh.world_size for mesh in meshes.values())
    own = max(mesh.rank for mesh in meshes.values())
    if not 0 <= own < world_size:
        raise _unplaced(UnclearError("no mesh of all ranks beside those of some"), path)
    for key, mesh in meshes.items():
        of_all = mesh.world_size if mesh.counts_all else world_size
        meshes[key] = mesh._replace(world_size=of_all, rank=own if mesh.rank == UNSAID else mesh.rank)
    return [meshes[id(described_mesh)] for described_mesh in described_meshes]


class _Placing:
    """Places tensors; equal ones once. A hostile file cannot have it count pieces without end."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[Placement, Box]] = {}
        self._different = self._all = 0

    def of(self, mesh: TensorMesh, cuts: Mapping[int, Sequence[int]], global_shape: Shape) -> tuple[Placement, Box]:
        """Return how a tensor is placed, and which part of it the file's own rank has."""
        ordered_cuts = tuple((dimension, *mesh_dimensions) for dimension, mesh_dimensions in sorted(cuts.items()))
        key = mesh, ordered_cuts, global_shape
        if key not in self._known:
            counts = {dimension: math.prod(map(mesh.length, own)) for dimension, own in cuts.items()}
            self._different += sum(count for dimension, count in counts.items() if global_shape[dimension] % count)
            if self._different > _MAX_DIFFERENT_PIECES:
                raise UnclearError("too many tensors that are cut in different ways")
            placement = placement_of(mesh, cuts, global_shape)
            self._known[key] = placement, part_of(placement, mesh.rank, global_shape)
        placement, box = self._known[key]
        self._all += sum(len(sizes) for _, sizes in placement.sizes)
        if self._all > _MAX_PIECES:
            raise UnclearError("too many pieces of tensors that are cut unevenly")
        return placement, box


def _unplaced(error: Exception, where: str) -> ShardError:
    return ShardError("a DTensor cannot be placed", got=str(error)[:300], where=where)


def placement_of(mesh: TensorMesh, cuts: Mapping[int, Sequence[int]], global_shape: tuple[int, ...]) -> Placement:
    """Return how a tensor is placed over all ranks. cuts: the mesh dimensions that cut each dimension, major first."""
    lengths, axis_of = axes_of(mesh)
    split, sizes = [], []
    for dimension, length in enumerate(global_shape):
        factors = [factor for mesh_dimension in cuts.get(dimension, ()) for factor in mesh.dimensions[mesh_dimension]]
        split.append(tuple(axis_of[factor] for factor in factors))
        counts = [mesh.length(mesh_dimension) for mesh_dimension in cuts.get(dimension, ())]
        if length % math.prod(counts):
            sizes.append((dimension, ceil_lengths(length, counts)))
    return Placement(lengths, tuple(split), sizes=tuple(sizes))


def part_of(placement: Placement, rank: int, global_shape: tuple[int, ...]) -> Box:
    """Return the box that a rank holds."""
    return Layout(placement, global_shape).box(rank)


def _global_shape(state: Dict) -> tuple[int, ...]:
    meta = state.get("tensor_meta")
    if type(meta) is not Call or meta.function.name != "TensorMeta" or not meta.args:
        raise UnclearError("a DTensor without the shape of the whole")
    return numbers(meta.args[0])


def _cuts(state: Dict, mesh: TensorMesh, dimensions: int) -> dict[int, list[int]]:
    """Return the mesh dimensions that cut each dimension of a tensor, the major one first."""
    placements = state.get("placements")
    if type(placements) not in (tuple, list) or len(placements) != len(mesh.dimensions):
        raise UnclearError("a DTensor without a placement for each mesh dimension")
    factors: dict[int, dict[int, int]] = {}
    for mesh_dimension, placement in enumerate(placements):
        if type(placement) is not Call:
            raise UnclearError("a placement that is none")
        if placement.function.name not in ("Replicate", "Shard", "_StridedShard"):
            raise UnclearError(f"a placement that is not known: {placement.function}"[:200])
        if placement.function.name == "Replicate":
            continue
        own = attributes_of(placement, placement.function.name)
        dimension, factor = own.get("dim"), own.get("split_factor")
        if placement.function.name == "Shard":
            factor = 1
        if type(dimension) is not int or not 0 <= dimension < dimensions or type(factor) is not int or factor < 1:
            shown = dimension if type(dimension) is int else "something else"
            raise UnclearError(f"a placement of dimension {shown} of {dimensions}"[:200])
        factors.setdefault(dimension, {})[mesh_dimension] = factor
    cuts = {dimension: _in_order(mesh, of_dimension) for dimension, of_dimension in factors.items()}
    _require_same_order(state, cuts)
    return cuts


def _in_order(mesh: TensorMesh, factors: Mapping[int, int]) -> list[int]:
    """Return mesh dimensions that cut one dimension in the order in which they do.

    Args:
        factors: for each of them how many pieces there are already, made by mesh dimensions behind it, when it cuts; 1
            if they come after it.
    """
    order: list[int] = []
    for offset in sorted(factors, reverse=True):
        before = 1
        for position in range(len(order) + 1):
            if before == factors[offset]:
                order.insert(position, offset)
                break
            if position < len(order):
                before *= mesh.length(order[position])
        else:
            raise UnclearError(f"a strided placement with the factor {factors[offset]}")
    return order


def _require_same_order(state: Dict, cuts: Mapping[int, Sequence[int]]) -> None:
    """Raise UnclearError if the file says another order of cuts than its placements."""
    entries = state.get("shard_order")
    if entries is None:
        return
    said: dict[Value, tuple[int, ...]] = {}
    for entry in entries if type(entries) is tuple else (None,):
        if type(entry) is not Call or len(entry.args) != 2 or type(entry.args[0]) is not int:
            raise UnclearError("an order of cuts that is not known")
        said[entry.args[0]] = numbers(entry.args[1])
    if said != {dimension: tuple(order) for dimension, order in cuts.items()}:
        raise UnclearError(f"cuts in another order than the placements say: {said}")
