"""Which part of the whole each DTensor of a rank's file is: the file has its mesh and its placements."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from reshard_mpi.errors import LayoutError, ShardError
from reshard_mpi.formats.manifest import ShardIdentity
from reshard_mpi.formats.nest.trees import Call, Dict, Value
from reshard_mpi.formats.torch.tensors import DistributedTensor, StoredTensor, numbers
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.placement import Placement, Strategy
from reshard_mpi.sharding.strategy import table
from reshard_mpi.sharding.strategy.limits import MAX_AXES, MAX_RANKS


class Whole(NamedTuple):
    """Where a rank's part lies in a whole tensor, and that tensor's shape."""

    box: Box
    global_shape: tuple[int, ...]


class Factor(NamedTuple):
    """A part of a mesh dimension: so many ranks, whose numbers are `stride` apart."""

    length: int
    stride: int


class Mesh(NamedTuple):
    """The mesh of a tensor, which may be a part of all ranks: each dimension as factors, the major one first.

    counts_all: it says how many ranks there are in all; else there may be more than it has.
    """

    world_size: int
    rank: int
    dimensions: tuple[tuple[Factor, ...], ...]
    counts_all: bool = True

    def length(self, dimension: int) -> int:
        return math.prod(factor.length for factor in self.dimensions[dimension])


class _Unclear(Exception):
    """What is unusual about a DTensor, in words."""


def described(tensors: Sequence[tuple[str, Value]], path: str) -> tuple[Mapping[str, Whole], ShardIdentity | None]:
    """Return which parts the DTensors among a file's tensors are, and whose file it is; none if there are none.

    Raises ShardError for a mesh or placement that is not known, or does not fit the part that lies in the file.
    """
    wholes: dict[str, Whole] = {}
    placements: dict[str, tuple[Placement, ...]] = {}
    known: dict[Placement, Placement] = {}
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
            state = _state(tensor.spec, "DTensorSpec")
            global_shape = _global_shape(state)
            placement = placement_of(mesh, _cuts(state, mesh, len(global_shape)), global_shape)
        except (_Unclear, LayoutError, ValueError) as error:
            raise _unplaced(error, where) from None
        box = part_of(placement, mesh.rank, global_shape)
        if box.shape != tensor.local.shape:
            raise ShardError(
                "a DTensor does not have the part that its mesh and placements say",
                expected=f"{list(box.shape)} of {list(global_shape)} on rank {mesh.rank}",
                got=str(list(tensor.local.shape)),
                where=where,
            )
        wholes[name] = Whole(box, global_shape)
        placements[name] = (known.setdefault(placement, placement),)
    strategy = Strategy(first.world_size, 1, placements, origin=path)
    return wholes, ShardIdentity(first.rank, first.world_size, table.dumps(strategy))


def _meshes(tensors: Sequence[tuple[str, DistributedTensor]], path: str) -> list[Mesh]:
    """Return the mesh of each DTensor. Those that do not say how many ranks there are have as many as the largest."""
    known: dict[int, Mesh] = {}
    described_meshes = []
    for name, tensor in tensors:
        try:
            described_mesh = _state(tensor.spec, "DTensorSpec").get("mesh")
            described_meshes.append(described_mesh)
            if id(described_mesh) not in known:
                known[id(described_mesh)] = _mesh(described_mesh)
        except (_Unclear, ValueError) as error:
            raise _unplaced(error, f"{path}, {name!r}") from None
    world_size = max(mesh.world_size for mesh in known.values())
    for key, mesh in known.items():
        if not mesh.counts_all:
            if mesh.rank >= world_size:
                raise _unplaced(_Unclear("no mesh of all ranks beside those of some"), path)
            known[key] = mesh._replace(world_size=world_size)
    return [known[id(described_mesh)] for described_mesh in described_meshes]


def _unplaced(error: Exception, where: str) -> ShardError:
    return ShardError("a DTensor cannot be placed", got=str(error)[:300], where=where)


def chunk_lengths(length: int, cuts: Iterable[int]) -> tuple[int, ...]:
    """Return the lengths of the pieces of a dimension that is cut into so many, and each again, as torch.chunk cuts.

    All pieces have the length of the first, rounded up, but the last ones, which may be shorter or empty.
    """
    lengths = [length]
    for count in cuts:
        lengths = [
            max(0, min(-(-whole // count), whole - at * -(-whole // count))) for whole in lengths for at in range(count)
        ]
    return tuple(lengths)


def placement_of(mesh: Mesh, cuts: Mapping[int, Sequence[int]], global_shape: tuple[int, ...]) -> Placement:
    """Return how a tensor is placed over all ranks. cuts: the mesh dimensions that cut each dimension, major first."""
    lengths, axis_of = _axes(mesh)
    split, sizes = [], []
    for dimension, length in enumerate(global_shape):
        factors = [factor for at in cuts.get(dimension, ()) for factor in mesh.dimensions[at]]
        split.append(tuple(axis_of[factor] for factor in factors))
        pieces = chunk_lengths(length, (mesh.length(at) for at in cuts.get(dimension, ())))
        if len(set(pieces)) > 1:
            sizes.append((dimension, pieces))
    return Placement(lengths, tuple(split), sizes=tuple(sizes))


def part_of(placement: Placement, rank: int, global_shape: tuple[int, ...]) -> Box:
    """Return the box that a rank holds."""
    uneven = dict(placement.sizes)
    start, stop = [], []
    for dimension, index in enumerate(placement.piece(rank).index):
        count = placement.slices(dimension)
        pieces = uneven.get(dimension) or (global_shape[dimension] // count,) * count
        start.append(sum(pieces[:index]))
        stop.append(start[-1] + pieces[index])
    return Box(tuple(start), tuple(stop))


def _axes(mesh: Mesh) -> tuple[tuple[int, ...], dict[Factor, int]]:
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
            raise _Unclear(f"a mesh whose dimensions do not count the ranks: {mesh.dimensions}")
        if extent > step:
            lengths.append(extent // step)
        axis_of[factor] = len(lengths)
        lengths.append(factor.length)
        extent = factor.stride
    if extent > 1:
        lengths.append(extent)
    return tuple(lengths) or (1,), axis_of


def _mesh(value: Value) -> Mesh:
    state = _state(value, "DeviceMesh")
    if state.get("_layout") is None and state.get("_flatten_mesh_list") is not None:
        return _mesh_of_ranks(state)
    ranks, rank = state.get("_flatten_rank_map"), state.get("_rank")
    layout = state.get("_layout")
    if type(ranks) is not tuple or layout is None:
        raise _Unclear("a mesh of a release of torch that is not known: load the file and save full tensors")
    if not 0 < len(ranks) <= MAX_RANKS or ranks != tuple(range(len(ranks))):
        raise _Unclear(f"a mesh whose ranks are not counted from 0: {ranks[:MAX_AXES]}")
    if type(rank) is not int or not 0 <= rank < len(ranks):
        raise _Unclear(f"a mesh of {len(ranks)} ranks, and a file of rank {rank}"[:200])
    axes = _state(layout, "_MeshLayout").get("axes")
    if type(axes) not in (tuple, list) or not 0 < len(axes) <= MAX_AXES:
        raise _Unclear("a mesh without dimensions")
    return Mesh(len(ranks), rank, tuple(_factors(axis) for axis in axes))


def _mesh_of_ranks(state: Dict) -> Mesh:
    """Return a mesh as torch up to 2.8 has it: its ranks one by one, and where among them the file's own is."""
    array, ranks = state.get("mesh"), numbers(state.get("_flatten_mesh_list"))
    coordinates = numbers(state.get("_coordinate_on_dim"))
    if type(array) is not StoredTensor or math.prod(array.shape) != len(ranks) or not 0 < len(ranks) <= MAX_RANKS:
        raise _Unclear("a mesh whose ranks do not fit its shape")
    shape = array.shape
    if len(coordinates) != len(shape) or any(at >= length for at, length in zip(coordinates, shape)):
        raise _Unclear("a mesh that the file's own rank is not in")
    counts = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    strides = [ranks[count] - ranks[0] if length > 1 else 0 for length, count in zip(shape, counts)]
    for number, rank in enumerate(ranks):
        steps = (number // count % length * stride for length, count, stride in zip(shape, counts, strides))
        if rank != ranks[0] + sum(steps):
            raise _Unclear(f"a mesh whose ranks are not evenly apart: {ranks[:MAX_AXES]}")
    if any(stride <= 0 for length, stride in zip(shape, strides) if length > 1):
        raise _Unclear(f"a mesh whose ranks do not ascend: {ranks[:MAX_AXES]}")
    own = ranks[sum(at * count for at, count in zip(coordinates, counts))]
    has_all = sorted(ranks) == list(range(len(ranks)))
    dimensions = tuple((Factor(length, stride),) if length > 1 else () for length, stride in zip(shape, strides))
    return Mesh(len(ranks) if has_all else 0, own, dimensions, counts_all=False)


def _factors(axis: Value) -> tuple[Factor, ...]:
    state = _state(axis, "_FlatLayout")
    shape, stride = numbers(state.get("shape")), numbers(state.get("stride"))
    if len(shape) != len(stride) or len(shape) > MAX_AXES or 0 in shape:
        raise _Unclear("a mesh dimension without length")
    factors = tuple(Factor(*pair) for pair in zip(shape, stride) if pair[0] > 1)
    if any(factor.stride == 0 for factor in factors):
        raise _Unclear("a mesh dimension whose ranks are all the same")
    return factors


def _global_shape(state: Dict) -> tuple[int, ...]:
    meta = state.get("tensor_meta")
    if type(meta) is not Call or meta.function.name != "TensorMeta" or not meta.args:
        raise _Unclear("a DTensor without the shape of the whole")
    return numbers(meta.args[0])


def _cuts(state: Dict, mesh: Mesh, dimensions: int) -> dict[int, list[int]]:
    """Return the mesh dimensions that cut each dimension of a tensor, the major one first."""
    placements = state.get("placements")
    if type(placements) not in (tuple, list) or len(placements) != len(mesh.dimensions):
        raise _Unclear("a DTensor without a placement for each mesh dimension")
    factors: dict[int, dict[int, int]] = {}
    for at, placement in enumerate(placements):
        if type(placement) is not Call or placement.function.name not in ("Replicate", "Shard", "_StridedShard"):
            raise _Unclear(f"a placement that is not known: {getattr(placement, 'function', placement)}"[:200])
        if placement.function.name == "Replicate":
            continue
        own = _state(placement, placement.function.name)
        dimension, factor = own.get("dim"), own.get("split_factor")
        if placement.function.name == "Shard":
            factor = 1
        if type(dimension) is not int or not 0 <= dimension < dimensions or type(factor) is not int or factor < 1:
            raise _Unclear(f"a placement of dimension {dimension} of {dimensions}"[:200])
        factors.setdefault(dimension, {})[at] = factor
    cuts = {dimension: _in_order(mesh, of_dimension) for dimension, of_dimension in factors.items()}
    _require_same_order(state, cuts)
    return cuts


def _in_order(mesh: Mesh, factors: Mapping[int, int]) -> list[int]:
    """Return mesh dimensions that cut one dimension in the order in which they do.

    factors: for each of them how many pieces there are already, made by mesh dimensions behind it, when it cuts; 1 if
    they come after it.
    """
    order: list[int] = []
    for at in sorted(factors, reverse=True):
        before = 1
        for position in range(len(order) + 1):
            if before == factors[at]:
                order.insert(position, at)
                break
            if position < len(order):
                before *= mesh.length(order[position])
        else:
            raise _Unclear(f"a strided placement with the factor {factors[at]}")
    return order


def _require_same_order(state: Dict, cuts: Mapping[int, Sequence[int]]) -> None:
    """Raise _Unclear if the file says another order of cuts than its placements."""
    entries = state.get("shard_order")
    if entries is None:
        return
    said: dict[Value, tuple[int, ...]] = {}
    for entry in entries if type(entries) is tuple else (None,):
        if type(entry) is not Call or len(entry.args) != 2 or type(entry.args[0]) is not int:
            raise _Unclear("an order of cuts that is not known")
        said[entry.args[0]] = numbers(entry.args[1])
    if said != {dimension: tuple(order) for dimension, order in cuts.items()}:
        raise _Unclear(f"cuts in another order than the placements say: {said}")


def _state(value: Value, class_name: str) -> Dict:
    """Return the attributes of an object of a class of torch."""
    if type(value) is not Call or value.function.name != class_name or value.function.module.split(".")[0] != "torch":
        raise _Unclear(f"no {class_name}")
    if type(value.state) is not Dict:
        raise _Unclear(f"a {class_name} without attributes")
    return value.state
