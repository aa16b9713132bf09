"""Write and read the table of types and boxes of a native HDF5 shard (`rows`, `read`).

It has one row a tensor, in the order of the list of contents. h5py shows such a row as

    (b"float32", [8, 5, 6], [6, 0, 2])

a float32 tensor of shape 8 x 5 x 6 as a whole, of which the box that the shard holds begins at element (6, 0, 2). The
dataset has the shape of the box. Rows of tensors with fewer dimensions than others end in zeros.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from h5py import h5s, h5t

from reshard_mpi.errors import ShardError
from reshard_mpi.formats import structure
from reshard_mpi.formats.dtypes import BY_NAME, DType
from reshard_mpi.formats.hdf5 import datasets, types
from reshard_mpi.formats.manifest import Specs
from reshard_mpi.sharding.box import Box

_COLUMNS = ("dtype", "global_shape", "offset")
_DTYPE_BYTES = 16  # room for the longest name of a type

# A row: the name of the element type, the shape of the whole tensor, the first element of the box.
Row = tuple[bytes, list[int], list[int]]


def rows(specs: Specs) -> np.ndarray[Any, Any]:
    """Return the table for the tensors of a shard to be written."""
    kinds = np.zeros(len(specs.kinds), _row_type(max((len(kind.shape) for kind in specs.kinds), default=0)))
    for row, kind in zip(kinds, specs.kinds):
        row["dtype"] = kind.dtype.name.encode()
        row["global_shape"][: len(kind.shape)] = kind.whole_shape
        row["offset"][: len(kind.shape)] = kind.own_box.start
    return kinds[np.asarray(specs.kind_ids, np.intp)]


def read(handle: Any, count: int, where: str) -> list[Row]:
    """Return the `count` rows of a table, a dataset of h5py. Raises ShardError if it is none, or of other length."""
    shape = datasets.shape_of(handle, handle.get_create_plist(), where)
    dimensions = _dimensions(handle.dtype)
    if shape != (count,) or dimensions is None:
        raise ShardError(
            "the table of a native HDF5 shard is not one row a tensor, of its type and box",
            expected=f"{count} rows of {', '.join(_COLUMNS)}",
            got=f"shape {list(shape)} of {handle.dtype}"[:200],
            where=where,
        )
    table = np.zeros(shape, _row_type(dimensions))
    if table.size:
        handle.read(h5s.ALL, h5s.ALL, table, mtype=h5t.py_create(table.dtype))
    return list(zip(*(table[name].tolist() for name in _COLUMNS)))


def located(row: Row, stored: types.Stored, shape: tuple[int, ...], where: str) -> tuple[DType, tuple[int, ...], Box]:
    """Return the element type, the whole shape and the box of a tensor.

    Args:
        row: what the table says of it.
        stored, shape: the type and shape of its dataset, which must fit.

    Raises ShardError if they do not.
    """
    name, global_shape, offset = row
    dtype = BY_NAME.get(name.decode(errors="replace"))
    if dtype is None or types.stored_as(dtype) != stored.name:
        raise ShardError(
            "the element type of a tensor of a native HDF5 shard is unknown, or does not fit the dataset",
            expected=f"a type stored as {stored.name}",
            got=repr(name),
            where=where,
        )
    padding = (*global_shape[len(shape) :], *offset[len(shape) :])
    if (
        len(shape) > len(offset)
        or any(padding)
        or any(low < 0 or low + length > whole for low, length, whole in zip(offset, shape, global_shape))
    ):
        raise ShardError(
            "a tensor of a native HDF5 shard does not lie within the whole tensor",
            expected=f"shape {list(shape)} at {offset} within {global_shape}",
            got="something outside",
            where=where,
        )
    start = tuple(offset[: len(shape)])
    stop = tuple(low + length for low, length in zip(start, shape))
    return dtype, tuple(global_shape[: len(shape)]), Box(start, stop)


def _row_type(dimensions: int) -> np.dtype[Any]:
    """Return the type of a row with room for `dimensions`; at least for one, since HDF5 has no empty lists."""
    numbers = ("<i8", (max(1, dimensions),))
    return np.dtype([("dtype", f"S{_DTYPE_BYTES}"), ("global_shape", *numbers), ("offset", *numbers)])


def _dimensions(kind: np.dtype[Any]) -> int | None:
    """Return the dimensions that rows of the type `kind` have room for; None if they are no rows of this table."""
    if kind.names != _COLUMNS or kind["offset"].subdtype is None:
        return None
    dimensions = math.prod(kind["offset"].shape)
    return dimensions if dimensions <= structure.MAX_DIMENSIONS and kind == _row_type(dimensions) else None
