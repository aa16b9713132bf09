"""Attributes of native shards: short texts and lists of numbers, written with a fixed size and read within bounds."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from h5py import h5a, h5s, h5t

from reshard_mpi.errors import ShardError
from reshard_mpi.formats import files


# Describing a type or a shape to HDF5 costs as much as writing an attribute, so each is described once.
@lru_cache(maxsize=64)
def text_type(length_bytes: int) -> Any:
    """Return the type of a text of so many bytes."""
    kind = h5t.C_S1.copy()
    kind.set_size(length_bytes)
    kind.set_cset(h5t.CSET_UTF8)
    kind.set_strpad(h5t.STR_NULLPAD)
    return kind


@lru_cache(maxsize=files.MAX_DIMENSIONS + 2)
def _space(length: int | None) -> Any:
    return h5s.create(h5s.SCALAR) if length is None else h5s.create_simple((length,))


class Attribute(NamedTuple):
    """A named value to be attached to an object. kind, space: objects of h5py. content: its elements, in `kind`."""

    name: bytes
    kind: Any
    space: Any
    content: bytes

    def write(self, handle: Any) -> None:
        """Attach it to an object."""
        attribute = h5a.create(handle, self.name, self.kind, self.space)
        if self.content:
            attribute.write(np.frombuffer(self.content, self.kind.dtype).reshape(self.space.shape), mtype=self.kind)


def text(name: str, value: str) -> Attribute:
    """Return an attribute that holds `value`, which is not empty, as a fixed-length UTF-8 string."""
    content = value.encode()
    return Attribute(name.encode(), text_type(len(content)), _space(None), content)


def numbers(name: str, value: tuple[int, ...] | int) -> Attribute:
    """Return an attribute that holds a list of numbers, or a single one."""
    length = len(value) if isinstance(value, tuple) else None
    return Attribute(name.encode(), h5t.NATIVE_INT64, _space(length), np.array(value, np.int64).tobytes())


def read_text(handle: Any, name: str) -> str | None:
    """Return the text of the attribute `name`; None if there is none, or it is not a short text of fixed length."""
    try:
        attribute = h5a.open(handle, name.encode())
        kind = attribute.get_type()
        if kind.get_class() != h5t.STRING or kind.is_variable_str() or attribute.shape != ():
            return None
        if not 0 < kind.get_size() <= files.MAX_NAME_BYTES:
            return None
        content = np.zeros((), dtype=f"S{kind.get_size()}")
        attribute.read(content, mtype=kind)
        return bytes(content.item()).decode()
    except (LookupError, OSError, TypeError, ValueError):
        return None


def read_numbers(handle: Any, name: str, where: str) -> tuple[int, ...]:
    """Return the numbers of the attribute `name`; of a scalar one, a single number.

    Raises ShardError if there is none, or it holds anything but whole numbers of 0 or more.
    """
    try:
        attribute = h5a.open(handle, name.encode())
        shape = attribute.shape
        if len(shape) > 1 or (shape and shape[0] > files.MAX_DIMENSIONS):
            raise _damaged(name, f"shape {list(shape)}", where)
        numbers = np.zeros(shape, dtype=np.int64)
        if numbers.size:
            attribute.read(numbers, mtype=h5t.NATIVE_INT64)
    except ShardError:
        raise
    except (LookupError, OSError, TypeError, ValueError) as error:
        raise _damaged(name, str(error), where) from error
    values = tuple(numbers.reshape(-1).tolist())
    if values and min(values) < 0:
        raise _damaged(name, str(list(values)), where)
    return values


def _damaged(name: str, got: str, where: str) -> ShardError:
    return ShardError(
        f"the attribute `{name}` of a native HDF5 shard is missing or damaged",
        expected="whole numbers, none negative",
        got=got,
        where=where,
        remedy="save or copy the shard again",
    )
