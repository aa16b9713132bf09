"""Match element types with HDF5 types (`stored_as`); read attributes, and the table of types (`read_table`).

Types that numpy and HDF5 have are stored as h5py does it. bfloat16 is a 16-bit HDF5 float, so h5py and h5dump show
numbers. 8-bit floats are bytes in native shards, since as HDF5 floats some show wrong numbers (256 in e4m3 as inf);
int4 and hifloat8 are bytes, since HDF5 has no type for them. 8-bit floats of other programs are told by their fields.

So a native shard has a table of its types and boxes, one row a tensor, in the order of the list of contents. h5py shows
such a row as

    (b"float32", [8, 5, 6], [6, 0, 2])

a float32 tensor of shape 8 x 5 x 6 as a whole, of which the box that the shard holds begins at element (6, 0, 2). The
dataset has the shape of the box. Rows of tensors with fewer dimensions than others end in zeros.
"""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import numpy as np
from h5py import h5a, h5s, h5t

from reshard_mpi.errors import ShardError
from reshard_mpi.formats import structure
from reshard_mpi.formats.dtypes import BY_NAME, DType
from reshard_mpi.formats.manifest import Specs
from reshard_mpi.sharding.box import Box

_STORED_AS = {"int4": "int8", "hifloat8": "uint8", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
# (size in bytes, (sign, exponent, exponent size, mantissa, mantissa size), exponent bias) of an HDF5 float type.
_FLOATS = {
    (1, (7, 3, 4, 0, 3), 7): "float8_e4m3fn",
    (1, (7, 2, 5, 0, 2), 15): "float8_e5m2",
    (2, (15, 10, 5, 0, 10), 15): "float16",
    (2, (15, 7, 8, 0, 7), 127): "bfloat16",
    (4, (31, 23, 8, 0, 23), 127): "float32",
    (8, (63, 52, 11, 0, 52), 1023): "float64",
}
_ORDERS = {h5t.ORDER_LE: "little", h5t.ORDER_BE: "big"}
# Class of HDF5 2.0's complex numbers; older libraries, and h5py before 3.15, do not name it.
_COMPLEX_CLASS = getattr(h5t, "COMPLEX", None)


class Stored(NamedTuple):
    """An element type by name, as an HDF5 type stores it. swapped: not in this machine's byte order."""

    name: str
    swapped: bool


def stored_as(dtype: DType) -> str:
    """Return the name of the type that holds elements of `dtype` in a native shard."""
    return _STORED_AS.get(dtype.name, dtype.name)


def create(dtype: DType) -> Any:
    """Return the HDF5 type in which a native shard stores `dtype`, in this machine's byte order."""
    if dtype.name == "bfloat16":
        # Fields first: the type must not be smaller than the fields it has.
        kind = h5t.NATIVE_FLOAT.copy()
        kind.set_fields(15, 7, 8, 0, 7)
        kind.set_size(2)
        kind.set_ebias(127)
        return kind
    return h5t.py_create(np.dtype(stored_as(dtype)), logical=True)


def recognise(kind: Any) -> Stored | None:
    """Return the element type that the HDF5 type `kind` stores; None if it stores none of this program's."""
    match kind.get_class():
        case h5t.INTEGER:
            return _ordered(kind, f"{'int' if kind.get_sign() == h5t.SGN_2 else 'uint'}{8 * kind.get_size()}")
        case h5t.FLOAT:
            implied = kind.get_norm() == h5t.NORM_IMPLIED
            key = (kind.get_size(), kind.get_fields(), kind.get_ebias())
            return _ordered(kind, _FLOATS.get(key)) if implied else None
        case h5t.ENUM:
            return _boolean(kind)
        case h5t.COMPOUND:
            return _complex_pair(kind)
        case other if other == _COMPLEX_CLASS:
            return _complex_of(recognise(kind.get_super()))
    return None


def _ordered(kind: Any, name: str | None) -> Stored | None:
    """Return `name` and its byte order, unless the type has unused bits."""
    if name not in BY_NAME or kind.get_precision() != 8 * kind.get_size() or kind.get_offset() != 0:
        return None
    if kind.get_size() == 1:
        return Stored(name, False)
    order = _ORDERS.get(kind.get_order())
    return Stored(name, order != sys.byteorder) if order else None


def _boolean(kind: Any) -> Stored | None:
    """Recognise h5py's booleans: an enumeration of FALSE = 0 and TRUE = 1 in a byte."""
    if kind.get_size() != 1 or kind.get_nmembers() != 2:
        return None
    members = {kind.get_member_name(index): kind.get_member_value(index) for index in range(2)}
    return Stored("bool", False) if members == {b"FALSE": 0, b"TRUE": 1} else None


def _complex_pair(kind: Any) -> Stored | None:
    """Recognise h5py's complex numbers: a compound of the floats `r` and `i`, without gaps."""
    if kind.get_nmembers() != 2:
        return None
    first, second = (kind.get_member_type(index) for index in range(2))
    half = first.get_size()
    names = [kind.get_member_name(index) for index in range(2)]
    offsets = [kind.get_member_offset(index) for index in range(2)]
    if names != [b"r", b"i"] or offsets != [0, half] or kind.get_size() != 2 * half:
        return None
    part = recognise(first)
    return _complex_of(part) if part == recognise(second) else None


def _complex_of(part: Stored | None) -> Stored | None:
    names = {"float32": "complex64", "float64": "complex128"}
    return Stored(names[part.name], part.swapped) if part is not None and part.name in names else None


def write_text(handle: Any, name: str, value: str) -> None:
    """Attach the attribute `name`, a UTF-8 text of fixed length that is not empty, to an object."""
    content = value.encode()
    kind = h5t.C_S1.copy()
    kind.set_size(len(content))
    kind.set_cset(h5t.CSET_UTF8)
    kind.set_strpad(h5t.STR_NULLPAD)
    h5a.create(handle, name.encode(), kind, h5s.create(h5s.SCALAR)).write(np.array(content), mtype=kind)


def write_number(handle: Any, name: str, value: int) -> None:
    """Attach the attribute `name`, a whole number, to an object."""
    kind = h5t.NATIVE_INT64
    h5a.create(handle, name.encode(), kind, h5s.create(h5s.SCALAR)).write(np.array(value, np.int64), mtype=kind)


def read_text(handle: Any, name: str) -> str | None:
    """Return the text of the attribute `name`; None if there is none, or it is not a short text of fixed length."""
    try:
        attribute = h5a.open(handle, name.encode())
        kind = attribute.get_type()
        if kind.get_class() != h5t.STRING or kind.is_variable_str() or attribute.shape != ():
            return None
        if not 0 < kind.get_size() <= structure.MAX_NAME_BYTES:
            return None
        content = np.zeros((), dtype=f"S{kind.get_size()}")
        attribute.read(content, mtype=kind)
        return bytes(content.item()).decode()
    except (LookupError, OSError, TypeError, ValueError):
        return None


def read_number(handle: Any, name: str, where: str) -> int:
    """Return the number that the attribute `name` holds. Raises ShardError if it is no whole number of 0 or more."""
    try:
        attribute = h5a.open(handle, name.encode())
        if attribute.shape != ():
            raise _damaged(name, f"shape {list(attribute.shape)}", where)
        number = np.zeros((), dtype=np.int64)
        attribute.read(number, mtype=h5t.NATIVE_INT64)
    except (LookupError, OSError, TypeError, ValueError) as error:
        raise _damaged(name, str(error), where) from error
    value = int(number)
    if value < 0:
        raise _damaged(name, str(value), where)
    return value


def _damaged(name: str, got: str, where: str) -> ShardError:
    return ShardError(
        f"the attribute `{name}` of a native HDF5 shard is missing or damaged",
        expected="a whole number that is not negative",
        got=got,
        where=where,
        remedy="save or copy the shard again",
    )


_COLUMNS = ("dtype", "global_shape", "offset")
_DTYPE_BYTES = 16  # room for the longest name of a type

# A row: the name of the element type, the shape of the whole tensor, the first element of the box.
Row = tuple[bytes, list[int], list[int]]


def table_of(specs: Specs) -> np.ndarray[Any, Any]:
    """Return the table for the tensors of a shard to be written."""
    kinds = np.zeros(len(specs.kinds), _row_type(max((len(kind.shape) for kind in specs.kinds), default=0)))
    for row, kind in zip(kinds, specs.kinds):
        row["dtype"] = kind.dtype.name.encode()
        row["global_shape"][: len(kind.shape)] = kind.whole_shape
        row["offset"][: len(kind.shape)] = kind.own_box.start
    return kinds[np.asarray(specs.kind_ids, np.intp)]


def read_table(handle: Any, shape: tuple[int, ...], count: int, where: str) -> list[Row]:
    """Return the `count` rows of a table, a dataset of h5py. Raises ShardError if it is none, or of other length."""
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


def located(row: Row, stored: Stored, shape: tuple[int, ...], where: str) -> tuple[DType, tuple[int, ...], Box]:
    """Return the element type, the whole shape and the box of a tensor.

    Args:
        row: what the table says of it.
        stored, shape: the type and shape of its dataset, which must fit.

    Raises ShardError if they do not.
    """
    name, global_shape, offset = row
    dtype = BY_NAME.get(name.decode(errors="replace"))
    if dtype is None or stored_as(dtype) != stored.name:
        raise ShardError(
            "the element type of a tensor of a native HDF5 shard is unknown, or does not fit the dataset",
            expected=f"a type stored as {stored.name}",
            got=repr(name),
            where=where,
        )
    padding = (*global_shape[len(shape) :], *offset[len(shape) :])
    is_outside = any(low < 0 or low + length > whole for low, length, whole in zip(offset, shape, global_shape))
    if len(shape) > len(offset) or any(padding) or is_outside:
        raise ShardError(
            "a tensor of a native HDF5 shard does not lie within the whole tensor",
            expected=f"shape {list(shape)} at {offset} within {global_shape}",
            got="something outside",
            where=where,
        )
    return dtype, tuple(global_shape[: len(shape)]), Box.at(offset[: len(shape)], shape)


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
