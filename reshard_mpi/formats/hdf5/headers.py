"""Datasets of native shards, read from their object headers where these are, byte by byte, as this program makes them.

Nearly all are, and this costs a quarter of asking the library for each thing in them. A header of any other form, be it
edited, repacked or damaged, is left to the library: what is returned here is what the library would have told.

HDF5 File Format Specification, "Version 2 Data Object Header": a prefix with the size of the messages, the messages, a
checksum. The messages, in the order in which the library writes them, are named in `_form`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from functools import lru_cache
from operator import add, le
from struct import Struct
from typing import Any, NamedTuple

from h5py import h5f, h5o, h5t

from reshard_mpi.box import Box
from reshard_mpi.dtypes import BY_NAME, DType
from reshard_mpi.formats.hdf5 import attributes, elements

_PREFIX = b"OHDR\x02\x01"
_MESSAGES_AT = len(_PREFIX) + 2
# The first message is the dataspace: 4 bytes of every message, its version, and the number of dimensions.
_DIMENSIONS_AT = _MESSAGES_AT + 5
# As many as MindSpore has; such a header takes less than 512 bytes.
_MAX_DIMENSIONS = 8
_READ_BYTES = 512
_DATASPACE, _DATATYPE, _FILL, _LAYOUT, _ATTRIBUTE, _ATTRIBUTES = 0x01, 0x03, 0x05, 0x08, 0x0C, 0x15
_CONSTANT, _NOT_SHAREABLE = 0x01, 0x04
_ADDRESS_BYTES = 8
_PLACE = Struct("<QQ")
_SCALAR = b"\x02\x00\x00\x00"
# What the library puts before the message when it encodes a type.
_ENCODING_BYTES = 2


class Header(NamedTuple):
    """What a native shard says of one tensor; the elements are one byte range."""

    dtype: DType
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    box: Box
    offset_bytes: int
    size_bytes: int


class Headers:
    """Reads headers from `fd`, the descriptor of the file of `size_bytes` that the library has open as `file`."""

    def __init__(self, fd: int, size_bytes: int, file: Any) -> None:
        self._fd = fd
        self._size_bytes = size_bytes
        creation = file.get_create_plist()
        # Only then are the addresses in the file offsets in it, and is nothing in the library newer than the file.
        self._readable = (
            creation.get_userblock() == 0
            and creation.get_sizes() == (_ADDRESS_BYTES, _ADDRESS_BYTES)
            and file.get_intent() == h5f.ACC_RDONLY
        )

    def dataset(self, group: Any, name: bytes, address: int) -> Header | None:
        """Return the header at `address`, to which `name` of `group` is a hard link; None if the library must look."""
        if not self._readable or not 0 <= address < self._size_bytes:
            return None
        header = _parse(os.pread(self._fd, _READ_BYTES, address), self._size_bytes)
        if header is None:
            return None
        try:
            # Makes the library verify the checksum.
            seen = h5o.get_info(group, name)
        except (OSError, LookupError, RuntimeError, ValueError, TypeError, ArithmeticError):
            return None
        return header if seen.addr == address and seen.type == h5o.TYPE_DATASET else None


class _Form(NamedTuple):
    """The headers of datasets with a certain number of dimensions."""

    pattern: re.Pattern[bytes]
    numbers: Struct


def _parse(head: bytes, file_bytes: int) -> Header | None:
    """Return what the header `head` says, or None if it has another form or says what cannot be."""
    ndim = head[_DIMENSIONS_AT] if len(head) > _DIMENSIONS_AT else 0
    if not 0 < ndim <= _MAX_DIMENSIONS:
        return None
    pattern, numbers = _form(ndim)
    match = pattern.match(head)
    if match is None or int.from_bytes(head[len(_PREFIX) : _MESSAGES_AT], "little") != match.end() - _MESSAGES_AT:
        return None
    extent, kind, place, name, whole, first = match.groups()
    dtype, expected_kind = _kinds()[name]
    shape = numbers.unpack_from(extent)
    global_shape = numbers.unpack(whole)
    start = numbers.unpack(first)
    offset_bytes, size_bytes = _PLACE.unpack(place)
    stop = tuple(map(add, start, shape))
    sound = (
        kind == expected_kind
        and extent == 2 * extent[: numbers.size]
        and min(shape) > 0
        and min(start) >= 0
        and all(map(le, stop, global_shape))
        and size_bytes == dtype.itemsize_bytes * math.prod(shape)
        and offset_bytes + size_bytes <= file_bytes
    )
    return Header(dtype, shape, global_shape, Box(start, stop), offset_bytes, size_bytes) if sound else None


@lru_cache(maxsize=_MAX_DIMENSIONS)
def _form(ndim: int) -> _Form:
    extent = b"\x02" + bytes([ndim]) + b"\x01\x01"
    lengths = Struct("<QQ").pack(ndim, ndim)
    numbers = h5t.STD_I64LE.encode()[_ENCODING_BYTES:], b"\x02\x01\x01\x01" + lengths
    messages = [
        # The lengths, twice: datasets of one byte range cannot grow.
        _message(_DATASPACE, 0, extent, 2 * 8 * ndim),
        _any_of({kind for _, kind in _kinds().values()}),
        # Version 3: allocated early, never filled, no value.
        _message(_FILL, _CONSTANT, b"\x03\x05"),
        # Version 3: contiguous, at an address, of a size.
        _message(_LAYOUT, _CONSTANT, b"\x03\x01", _PLACE.size),
        # No attribute is stored elsewhere.
        _message(_ATTRIBUTES, _NOT_SHAREABLE, b"\x00\x00" + b"\xff" * 2 * _ADDRESS_BYTES),
        _any_of(_kinds()),
        _message(_ATTRIBUTE, 0, _attribute(b"global_shape", *numbers), 8 * ndim),
        _message(_ATTRIBUTE, 0, _attribute(b"offset", *numbers), 8 * ndim),
    ]
    return _Form(re.compile(re.escape(_PREFIX) + b".." + b"".join(messages), re.DOTALL), Struct(f"<{ndim}q"))


@lru_cache(maxsize=1)
def _kinds() -> dict[bytes, tuple[DType, bytes]]:
    """Return by the message of the attribute `dtype` the type it names, and the message of the type that stores it."""
    kinds = {}
    for dtype in BY_NAME.values():
        text = dtype.name.encode()
        kind = elements.create(dtype).encode()[_ENCODING_BYTES:]
        told = _attribute(b"dtype", attributes.text_type(len(text)).encode()[_ENCODING_BYTES:], _SCALAR) + text
        kinds[_head(_ATTRIBUTE, 0, len(told)) + told] = dtype, _head(_DATATYPE, _CONSTANT, len(kind)) + kind
    return kinds


def _message(code: int, flags: int, known: bytes, open_bytes: int = 0) -> bytes:
    """Return the pattern of a message that begins with `known`; the rest is captured."""
    known = _head(code, flags, len(known) + open_bytes) + known
    return re.escape(known) + (b"(.{%d})" % open_bytes if open_bytes else b"")


def _any_of(messages: Iterable[bytes]) -> bytes:
    return b"(" + b"|".join(map(re.escape, sorted(messages))) + b")"


def _head(code: int, flags: int, size_bytes: int) -> bytes:
    return Struct("<BHB").pack(code, size_bytes, flags)


def _attribute(name: bytes, kind: bytes, space: bytes) -> bytes:
    """Return an attribute up to its content: version 3, nothing shared, a name that ends with NUL, in ASCII."""
    sizes = len(name) + 1, len(kind), len(space)
    return Struct("<BBHHHB").pack(3, 0, *sizes, 0) + name + b"\0" + kind + space
