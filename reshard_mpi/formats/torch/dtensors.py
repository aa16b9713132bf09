"""Which part of the whole each DTensor of a rank's file is: the file has its mesh and its placements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from reshard_mpi.errors import LayoutError, ShardError
from reshard_mpi.formats.manifest import ShardIdentity
from reshard_mpi.formats.nest.trees import Call, Dict, Value
from reshard_mpi.formats.torch.meshes import UNSAID, Mesh, UnclearError, axes_of, mesh_of, state_of
from reshard_mpi.formats.torch.tensors import DistributedTensor, numbers
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.nesting import ceil_lengths
from reshard_mpi.sharding.placement import Placement, Strategy
from reshard_mpi.sharding.strategy import table

# Pieces of tensors whose pieces are not of one length: of those that are cut differently, and of all.
_MAX_DIFFERENT_PIECES, _MAX_PIECES = 1 << 20, 1 << 24


class Whole(NamedTuple):
    """Where a rank's part lies in a whole tensor, and that tensor's shape."""

    box: Box
    global_shape: tuple[int, ...]


def described(tensors: Sequence[tuple[str, Value]], path: str) -> tuple[Mapping[str, Whole], ShardIdentity | None]:
    """Return which parts the DTensors among a file's tensors are, and whose file it is; none if there are none.

    Raises ShardError for a mesh or placement that is not known, or does not fit the part that lies in the file.
    """
    wholes: dict[str, Whole] = {}
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
            state = state_of(tensor.spec, "DTensorSpec")
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
        wholes[name] = Whole(box, global_shape)
        placements[name] = (placement,)
    strategy = Strategy(first.world_size, 1, placements, origin=path)
    return wholes, ShardIdentity(first.rank, first.world_size, table.dumps(strategy))


def _meshes(tensors: Sequence[tuple[str, DistributedTensor]], path: str) -> list[Mesh]:
    """Return the mesh of each DTensor.

    Those that do not say how many ranks there are have as many as the largest, those without rank have that of others.
    """
    known: dict[int, Mesh] = {}
    described_meshes = []
    for name, tensor in tensors:
        try:
            described_mesh = state_of(tensor.spec, "DTensorSpec").get("mesh")
            described_meshes.append(described_mesh)
            if id(described_mesh) not in known:
                known[id(described_mesh)] = mesh_of(described_mesh)
        except (UnclearError, ValueError) as error:
            raise _unplaced(error, f"{path}, {name!r}") from None
    world_size = max(mesh.world_size for mesh in known.values())
    own = max(mesh.rank for mesh in known.values())
    if not 0 <= own < world_size:
        raise _unplaced(UnclearError("no mesh of all ranks beside those of some"), path)
    for key, mesh in known.items():
        of_all = mesh.world_size if mesh.counts_all else world_size
        known[key] = mesh._replace(world_size=of_all, rank=own if mesh.rank == UNSAID else mesh.rank)
    return [known[id(described_mesh)] for described_mesh in described_meshes]


class _Placing:
    """Places tensors; those that are alike once. A hostile file cannot have it count pieces without end."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[Placement, Box]] = {}
        self._different = self._all = 0

    def of(self, mesh: Mesh, cuts: Mapping[int, Sequence[int]], global_shape: tuple[int, ...]) -> tuple[Placement, Box]:
        """Return how a tensor is placed, and which part of it the file's own rank has."""
        key = mesh, tuple((dimension, *at) for dimension, at in sorted(cuts.items())), global_shape
        if key not in self._known:
            counts = ((dimension, math.prod(map(mesh.length, at))) for dimension, at in cuts.items())
            self._different += sum(count for dimension, count in counts if global_shape[dimension] % count)
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


def placement_of(mesh: Mesh, cuts: Mapping[int, Sequence[int]], global_shape: tuple[int, ...]) -> Placement:
    """Return how a tensor is placed over all ranks. cuts: the mesh dimensions that cut each dimension, major first."""
    lengths, axis_of = axes_of(mesh)
    split, sizes = [], []
    for dimension, length in enumerate(global_shape):
        factors = [factor for at in cuts.get(dimension, ()) for factor in mesh.dimensions[at]]
        split.append(tuple(axis_of[factor] for factor in factors))
        counts = [mesh.length(at) for at in cuts.get(dimension, ())]
        if length % math.prod(counts):
            sizes.append((dimension, ceil_lengths(length, counts)))
    return Placement(lengths, tuple(split), sizes=tuple(sizes))


def part_of(placement: Placement, rank: int, global_shape: tuple[int, ...]) -> Box:
    """Return the box that a rank holds."""
    uneven = dict(placement.sizes)
    start, stop = [], []
    for dimension, index in enumerate(placement.piece(rank).index):
        pieces = uneven.get(dimension)
        if pieces is None:
            length = global_shape[dimension] // placement.slices(dimension)
            start.append(index * length)
        else:
            length = pieces[index]
            start.append(sum(pieces[:index]))
        stop.append(start[-1] + length)
    return Box(tuple(start), tuple(stop))


def _global_shape(state: Dict) -> tuple[int, ...]:
    meta = state.get("tensor_meta")
    if type(meta) is not Call or meta.function.name != "TensorMeta" or not meta.args:
        raise UnclearError("a DTensor without the shape of the whole")
    return numbers(meta.args[0])


def _cuts(state: Dict, mesh: Mesh, dimensions: int) -> dict[int, list[int]]:
    """Return the mesh dimensions that cut each dimension of a tensor, the major one first."""
    placements = state.get("placements")
    if type(placements) not in (tuple, list) or len(placements) != len(mesh.dimensions):
        raise UnclearError("a DTensor without a placement for each mesh dimension")
    factors: dict[int, dict[int, int]] = {}
    for at, placement in enumerate(placements):
        if type(placement) is not Call:
            raise UnclearError("a placement that is none")
        if placement.function.name not in ("Replicate", "Shard", "_StridedShard"):
            raise UnclearError(f"a placement that is not known: {placement.function}"[:200])
        if placement.function.name == "Replicate":
            continue
        own = state_of(placement, placement.function.name)
        dimension, factor = own.get("dim"), own.get("split_factor")
        if placement.function.name == "Shard":
            factor = 1
        if type(dimension) is not int or not 0 <= dimension < dimensions or type(factor) is not int or factor < 1:
            shown = dimension if type(dimension) is int else "something else"
            raise UnclearError(f"a placement of dimension {shown} of {dimensions}"[:200])
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
            raise UnclearError(f"a strided placement with the factor {factors[at]}")
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
