"""The headers of a native shard's datasets and of its root group, understood without the library.

What is said here is what the library would have told; a header of any other form raises `Unusual`. (HDF5 File Format
Specification, "Dataspace", "Datatype", "Fill Value", "Data Layout" and "Attribute" messages, in the versions that
libraries write for HDF5 1.8.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from struct import Struct
from typing import NamedTuple

from reshard_mpi.formats import files
from reshard_mpi.formats.dtypes import BY_NAME, DType
from reshard_mpi.formats.hdf5 import structure
from reshard_mpi.formats.hdf5.structure import Message, Unusual
from reshard_mpi.sharding.box import Box

_PLACE = Struct("<QQ")
_SCALAR_SPACE = b"\x02\x00\x00\x00"
# Version 3: never filled, or filled with zeros where nothing was written. Version 3: contiguous.
_FILLS = {b"\x03\x05", b"\x03\x0a"}
_LAYOUT = b"\x03\x01"
# No attribute is kept elsewhere.
_ATTRIBUTES_HERE = b"\x00\x00" + b"\xff" * 16
_ATTRIBUTE = Struct("<BBHHHB")
_TEXT = Struct("<4sI")
# A fixed-length string, filled up with NUL, in UTF-8.
_TEXT_CLASS = b"\x13\x11\x00\x00"
_LONGEST = (1 << 63) - 1


class Stored(NamedTuple):
    """A contiguous dataset as its header has it: the datatype message, the shape, where the elements are."""

    kind: bytes
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int
    attributes: Mapping[bytes, bytes]


class Header(NamedTuple):
    """What a native shard says of one tensor; the elements are one byte range."""

    dtype: DType
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    box: Box
    offset_bytes: int
    size_bytes: int


def dataset(messages: Iterable[Message], file_bytes: int) -> Stored:
    """Return the contiguous dataset that `messages` describe, in a file of `file_bytes` bytes."""
    found: dict[int, bytes] = {}
    attributes: dict[bytes, bytes] = {}
    for code, body in messages:
        if code == structure.ATTRIBUTE:
            name, content = _attribute(body)
            if attributes.setdefault(name, content) is not content:
                raise Unusual
        elif found.setdefault(code, body) is not body:
            raise Unusual
    extent, layout = found.get(structure.DATASPACE, b""), found.get(structure.LAYOUT, b"")
    if (
        found.keys() - _OPTIONAL != _REQUIRED
        or found[structure.FILL] not in _FILLS
        or found.get(structure.ATTRIBUTE_INFO, _ATTRIBUTES_HERE) != _ATTRIBUTES_HERE
        or layout[:2] != _LAYOUT
        or len(layout) != len(_LAYOUT) + _PLACE.size
    ):
        raise Unusual
    shape = _shape(extent)
    offset_bytes, size_bytes = _PLACE.unpack_from(layout, len(_LAYOUT))
    if size_bytes and offset_bytes + size_bytes > file_bytes:
        raise Unusual
    return Stored(found[structure.DATATYPE], shape, offset_bytes, size_bytes, attributes)


def tensor(messages: Iterable[Message], file_bytes: int) -> Header:
    """Return what the header of a tensor's dataset says."""
    stored = dataset(messages, file_bytes)
    dtype = _dtype_attributes().get(stored.attributes.get(b"dtype", b""))
    if dtype is None or stored.kind != _kinds()[dtype]:
        raise Unusual
    global_shape = _numbers(stored.attributes, b"global_shape", len(stored.shape))
    start = _numbers(stored.attributes, b"offset", len(stored.shape))
    stop = tuple(low + length for low, length in zip(start, stored.shape))
    if any(low < 0 for low in start) or any(high > whole for high, whole in zip(stop, global_shape)):
        raise Unusual
    if dtype.itemsize_bytes * math.prod(length for length in stored.shape if length) > _LONGEST:
        raise Unusual
    if stored.size_bytes != dtype.itemsize_bytes * math.prod(stored.shape):
        raise Unusual
    return Header(dtype, stored.shape, global_shape, Box(start, stop), stored.offset_bytes, stored.size_bytes)


def content(messages: Iterable[Message], file_bytes: int, dtype_name: str) -> tuple[int, int]:
    """Return where the elements of a one-dimensional dataset lie, and how many bytes they take."""
    stored, dtype = dataset(messages, file_bytes), BY_NAME[dtype_name]
    if stored.kind != _kinds()[dtype] or len(stored.shape) != 1:
        raise Unusual
    if stored.size_bytes != dtype.itemsize_bytes * stored.shape[0]:
        raise Unusual
    return stored.offset_bytes, stored.size_bytes


def group(messages: Iterable[Message]) -> tuple[bytes, list[tuple[str, int]], dict[bytes, bytes]]:
    """Return a group's link info message, the links that its header holds, and its attributes."""
    info = None
    links: list[tuple[str, int]] = []
    attributes: dict[bytes, bytes] = {}
    for code, body in messages:
        if code == structure.LINK_INFO and info is None:
            info = body
        elif code == structure.LINK:
            links.append(structure.link(body))
        elif code == structure.ATTRIBUTE:
            name, content = _attribute(body)
            if attributes.setdefault(name, content) is not content:
                raise Unusual
        elif code == structure.ATTRIBUTE_INFO:
            if body != _ATTRIBUTES_HERE:
                raise Unusual
        elif code != structure.GROUP_INFO:
            raise Unusual
    if info is None:
        raise Unusual
    return info, links, attributes


def text(attributes: Mapping[bytes, bytes], name: bytes) -> str:
    """Return an attribute that is a text."""
    body = attributes.get(name, b"")
    head = _SCALAR_TEXT.size
    if len(body) <= head:
        raise Unusual
    kind_bytes, space_bytes, (text_class, length_bytes), space = 8, 4, _TEXT.unpack_from(body, 4), body[12:16]
    if _SIZES.unpack_from(body) != (kind_bytes, space_bytes) or text_class != _TEXT_CLASS or space != _SCALAR_SPACE:
        raise Unusual
    if len(body) != head + length_bytes or length_bytes > files.MAX_NAME_BYTES:
        raise Unusual
    try:
        return body[head:].rstrip(b"\0").decode()
    except UnicodeDecodeError as error:
        raise Unusual from error


def number(attributes: Mapping[bytes, bytes], name: bytes) -> int:
    """Return an attribute that is one number, not negative."""
    head = _SIZES.pack(len(_INT64), len(_SCALAR_SPACE)) + _INT64 + _SCALAR_SPACE
    body = attributes.get(name, b"")
    if not body.startswith(head) or len(body) != len(head) + 8:
        raise Unusual
    found = int.from_bytes(body[len(head) :], "little", signed=True)
    if found < 0:
        raise Unusual
    return found


def _attribute(body: bytes) -> tuple[bytes, bytes]:
    """Return the name of an attribute and what follows it, after the sizes of the latter's type and space.

    Version 3, nothing shared, the name ends with NUL.
    """
    if len(body) < _ATTRIBUTE.size:
        raise Unusual
    version, flags, name_bytes, kind_bytes, space_bytes, _ = _ATTRIBUTE.unpack_from(body)
    end = _ATTRIBUTE.size + name_bytes
    if version != 3 or flags or not name_bytes or body[end - 1 : end] != b"\0":
        raise Unusual
    return body[_ATTRIBUTE.size : end - 1], _SIZES.pack(kind_bytes, space_bytes) + body[end:]


def _shape(extent: bytes) -> tuple[int, ...]:
    """Return the shape in a dataspace message: the lengths, twice, as a dataset of one byte range cannot grow."""
    if extent == _SCALAR_SPACE:
        return ()
    ndim = extent[1] if len(extent) > 4 else 0
    if not 0 < ndim <= files.MAX_DIMENSIONS or len(extent) != 4 + 16 * ndim or extent[:4] != bytes((2, ndim, 1, 1)):
        raise Unusual
    numbers = Struct(f"<{2 * ndim}Q").unpack_from(extent, 4)
    if numbers[:ndim] != numbers[ndim:]:
        raise Unusual
    return numbers[:ndim]


def _numbers(attributes: Mapping[bytes, bytes], name: bytes, count: int) -> tuple[int, ...]:
    head, numbers = _list_head(count)
    body = attributes.get(name, b"")
    if len(body) != len(head) + numbers.size or not body.startswith(head):
        raise Unusual
    return numbers.unpack_from(body, len(head))


@lru_cache(maxsize=files.MAX_DIMENSIONS + 1)
def _list_head(count: int) -> tuple[bytes, Struct]:
    """Return how an attribute that is a list of numbers begins, and the numbers."""
    space = b"\x02\x01\x01\x01" + _PLACE.pack(count, count)
    return _SIZES.pack(len(_INT64), len(space)) + _INT64 + space, Struct(f"<{count}q")


@lru_cache(maxsize=1)
def _dtype_attributes() -> dict[bytes, DType]:
    """Return the element types by what follows the name of the attribute `dtype`."""
    texts = ((dtype, dtype.name.encode()) for dtype in BY_NAME.values())
    return {
        _SIZES.pack(_TEXT.size, len(_SCALAR_SPACE)) + _TEXT.pack(_TEXT_CLASS, len(text)) + _SCALAR_SPACE + text: dtype
        for dtype, text in texts
    }


@lru_cache(maxsize=1)
def _kinds() -> dict[DType, bytes]:
    """Return the message of the type in which a native shard stores each element type (see `elements.create`)."""
    kinds = {f"{sign}int{8 * size}": _integer(size, sign) for sign in ("", "u") for size in (1, 2, 4, 8)}
    kinds |= {
        "float16": _float(2, 10, 5, 15),
        "bfloat16": _float(2, 7, 8, 127),
        "float32": _float(4, 23, 8, 127),
        "float64": _float(8, 52, 11, 1023),
        "bool": b"\x38\x02\0\0\1\0\0\0" + _integer(1, "") + b"FALSE\0TRUE\0\0\1",
        "int4": _integer(1, ""),
    }
    for name, part, size in (("complex64", "float32", 4), ("complex128", "float64", 8)):
        members = b"r\0\0" + kinds[part] + b"i\0" + bytes([size]) + kinds[part]
        kinds[name] = b"\x36\x02\0\0" + (2 * size).to_bytes(4, "little") + members
    return {dtype: kinds.get(dtype.name, kinds["uint8"]) for dtype in BY_NAME.values()}


def _integer(size: int, sign: str) -> bytes:
    return Struct("<BB2xIHH").pack(0x10, 0 if sign else 8, size, 0, 8 * size)


def _float(size: int, mantissa: int, exponent: int, bias: int) -> bytes:
    bits = 8 * size
    fields = (mantissa, exponent, 0, mantissa, bias)
    return Struct("<BBBxIHHBBBBI").pack(0x11, 0x20, bits - 1, size, 0, bits, *fields)


_SIZES = Struct("<HH")
_SCALAR_TEXT = Struct("<HH8s4s")
_INT64 = _integer(8, "")
_REQUIRED = {structure.DATASPACE, structure.DATATYPE, structure.FILL, structure.LAYOUT}
_OPTIONAL = {structure.ATTRIBUTE_INFO}
