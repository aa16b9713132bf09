"""Match element types with HDF5 types, and read attributes (`stored_as`).

Types that numpy and HDF5 have are stored as h5py does it. bfloat16 is a 16-bit HDF5 float, so h5py and h5dump show
numbers. 8-bit floats are bytes in native shards, since as HDF5 floats some show wrong numbers (256 in e4m3 as inf);
int4 and hifloat8 are bytes, since HDF5 has no type for them. 8-bit floats of other programs are told by their fields.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np
from h5py import h5a, h5s, h5t

from reshard_mpi.errors import ShardError
from reshard_mpi.formats import structure
from reshard_mpi.formats.dtypes import BY_NAME, DType

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
