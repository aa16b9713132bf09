"""Attributes of native shards: short texts and lists of numbers, written with a fixed size and read within bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
from h5py import h5a, h5s, h5t

from reshard_mpi.errors import ShardError
from reshard_mpi.formats import files


def write_text(handle: Any, name: str, text: str) -> None:
    """Attach `text`, which is not empty, to an object as a fixed-length UTF-8 string."""
    content = text.encode()
    kind = _text_type(len(content))
    h5a.create(handle, name.encode(), kind, h5s.create(h5s.SCALAR)).write(np.array(content), mtype=kind)


def write_numbers(handle: Any, name: str, numbers: tuple[int, ...]) -> None:
    """Attach a list of numbers to an object."""
    space = h5s.create_simple((len(numbers),))
    attribute = h5a.create(handle, name.encode(), h5t.NATIVE_INT64, space)
    if numbers:
        attribute.write(np.array(numbers, dtype=np.int64))


def write_number(handle: Any, name: str, number: int) -> None:
    """Attach one number to an object."""
    attribute = h5a.create(handle, name.encode(), h5t.NATIVE_INT64, h5s.create(h5s.SCALAR))
    attribute.write(np.array(number, dtype=np.int64))


def read_text(handle: Any, name: str) -> str | None:
    """Return the attribute `name`, or None if there is none or it is no short fixed-length text."""
    if not h5a.exists(handle, name.encode()):
        return None
    attribute = h5a.open(handle, name.encode())
    kind = attribute.get_type()
    if kind.get_class() != h5t.STRING or kind.is_variable_str() or attribute.shape != ():
        return None
    if not 0 < kind.get_size() <= files.MAX_NAME_BYTES:
        return None
    content = np.zeros((), dtype=f"S{kind.get_size()}")
    attribute.read(content, mtype=kind)
    return bytes(content.item()).decode()


def read_numbers(handle: Any, name: str, where: str) -> tuple[int, ...]:
    """Return a list of numbers (a single one for a scalar attribute). Raises ShardError if it is none."""
    if not h5a.exists(handle, name.encode()):
        raise _missing(name, where)
    attribute = h5a.open(handle, name.encode())
    shape = attribute.shape
    if attribute.get_type().get_class() != h5t.INTEGER or not (
        shape == () or (len(shape) == 1 and shape[0] <= files.MAX_DIMENSIONS)
    ):
        raise _missing(name, where)
    numbers = np.zeros(shape, dtype=np.int64)
    if numbers.size:
        attribute.read(numbers, mtype=h5t.NATIVE_INT64)
    found = tuple(int(number) for number in numbers.reshape(-1))
    if any(number < 0 for number in found):
        raise ShardError(f"the attribute `{name}` of a native HDF5 shard is negative", got=str(found), where=where)
    return found


def _missing(name: str, where: str) -> ShardError:
    return ShardError(
        f"the attribute `{name}` of a native HDF5 shard is missing or damaged", expected="whole numbers", where=where
    )


def _text_type(length_bytes: int) -> Any:
    kind = h5t.C_S1.copy()
    kind.set_size(length_bytes)
    kind.set_cset(h5t.CSET_UTF8)
    kind.set_strpad(h5t.STR_NULLPAD)
    return kind
