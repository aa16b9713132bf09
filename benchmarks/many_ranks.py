"""Strategies of jobs with thousands of ranks, and the shards they would have, without any bytes."""

from __future__ import annotations

import math

from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.locations import ByteRange, ByteRanges
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.tensor_table import TensorEntry, TensorTable
from reshard_mpi.sharding.layout import Layout
from reshard_mpi.sharding.placement import Placement, Shape
from reshard_mpi.sharding.strategy import Strategy

_TENSOR_PARALLEL = 8
_MOST_OPTIMIZER_PIECES = 64
_KINDS = 6  # of parameters in a layer: two cut by rows, two by columns, two that every rank holds whole
_ROWS = 49152  # every mesh used here divides it
_COLUMNS = 64


def strategy(ranks: int, parameters: int, *, optimizer: bool) -> Strategy:
    """Return how so many parameters are placed on data x tensor parallel ranks, with or without optimizer sharding."""
    data = ranks // _TENSOR_PARALLEL
    mesh = (data, _TENSOR_PARALLEL)
    pieces = math.gcd(data, _MOST_OPTIMIZER_PIECES)
    by_rows = Placement(mesh, ((1,), ()), data if optimizer else 1)
    by_columns = Placement(mesh, ((), (1,)), pieces if optimizer else 1)
    whole = Placement(mesh, ((),))
    kinds = (by_rows, by_rows, by_columns, by_columns, whole, whole)
    return Strategy(
        ranks, 1, {f"layers.{at // _KINDS}.p{at % _KINDS}": (kinds[at % _KINDS],) for at in range(parameters)}
    )


def shape(placement: Placement) -> Shape:
    """Return the whole shape of a parameter that is placed so."""
    return (_ROWS, _COLUMNS)[: len(placement.split)]


def manifest(source: Strategy, rank: int) -> Manifest:
    """Return the shard of one rank as if a file held it."""
    dtype = BY_NAME["float32"]
    path = f"rank_{rank}/checkpoint_{rank}.ckpt"
    tensors = TensorTable(path)
    offset_bytes = 0
    for name, (placement,) in source.parameters.items():
        box = Layout(placement, shape(placement)).box(rank)
        size_bytes = box.size * dtype.itemsize_bytes
        place = ByteRanges((ByteRange(path, offset_bytes, size_bytes),))
        tensors.add_entry(TensorEntry(name, dtype, box.shape, place))
        offset_bytes += size_bytes
    return Manifest(path, "ckpt", tensors)
