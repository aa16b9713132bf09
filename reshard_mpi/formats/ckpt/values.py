"""The Values a checkpoint file is made of: found in a file, and encoded up to their content."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from reshard_mpi.formats import files
from reshard_mpi.formats.ckpt.wire import Field, Reader
from reshard_mpi.formats.places import ByteRange
from reshard_mpi.protobuf import LENGTH, VARINT, encode_length, encode_varint, varint

# What `save_checkpoint(crc_check=True)` appends: this mark and a CRC-32 in ten bytes.
CRC_MARK = b"crc_num"
CRC_BYTES = len(CRC_MARK) + 10
EMPTY_CHECKPOINT = CRC_MARK + bytes(10)
# `tensor_type` of a string.
STRING_TYPE = "str"
_MAX_TYPE_BYTES = 64
# Field numbers of Checkpoint, Value and TensorProto.
_VALUE = 1
_TAG, _TENSOR, _MAP_TENSOR = _VALUE_FIELDS = (1, 2, 3)
_DIMS, _TYPE, _CONTENT = _TENSOR_FIELDS = (1, 2, 3)
_VALUE_KEY = encode_varint(_VALUE << 3 | LENGTH)
# The encoding protobuf's serializers make: fields in order of their numbers, tags and types shorter than 128 bytes.
# Varints of up to nine bytes have at most 63 bits.
_VARINT = rb"[\x80-\xff]{0,8}[\x00-\x7f]"
USUAL_START = re.compile(rb"\x0a(%b)\x0a([\x01-\x7f])" % _VARINT)
_USUAL_MIDDLE = re.compile(rb"\x12(%b)((?:\x08%b){0,%d})\x12([\x01-\x3f])" % (_VARINT, _VARINT, files.MAX_DIMENSIONS))
_USUAL_END = re.compile(rb"\x1a(%b)" % _VARINT)
# All between a name and the content. No type's name has the byte that begins the content.
_USUAL_REST = re.compile(
    rb"\x12%b(?:\x08%b){0,%d}\x12[\x01-\x3f][0-9A-Za-z_]+\x1a%b" % (_VARINT, _VARINT, files.MAX_DIMENSIONS, _VARINT)
)
_DIM = re.compile(rb"\x08(%b)" % _VARINT)


class Value(NamedTuple):
    """One Value of the file, up to byte `end`: a tensor, or a piece of one."""

    at: int
    tag: str
    dims: tuple[int, ...]
    type_name: str
    content: ByteRange
    end: int


def value_at(reader: Reader, at: int) -> Value:
    """Return the Value at byte `at`. Raises ShardError if there is none."""
    value = usual_value(reader, at)
    if value is not None:
        return value
    if reader.read(at, 1) != _VALUE_KEY:
        raise reader.damage(
            "a shard goes on with bytes that are no checkpoint" if at else "a shard is not a MindSpore checkpoint",
            at,
            expected="a value, which begins with byte 0x0a",
            got=f"byte 0x{reader.read(at, 1).hex()}, {reader.size_bytes - at} bytes before the end of the file",
            remedy="save or copy it again",
        )
    return _value(reader, reader.field(at, reader.size_bytes))


def is_trailer(reader: Reader, at: int) -> bool:
    """Tell whether all that is left from byte `at` on is the checksum of what is before.

    Looked for only between Values, where no Value can begin with `c` (the key of a group): a payload that ends like a
    trailer is not taken for one.
    """
    return reader.size_bytes - at == CRC_BYTES and reader.read(at, len(CRC_MARK)) == CRC_MARK


# Of Values before: their bytes before the name -> those between name and content -> number of a kind, and how many
# bytes the content has.
Known = dict[bytes, dict[bytes, tuple[int, int]]]
_MAX_ALIKE = 16


def learn(reader: Reader, value: Value, kind: int, known: Known) -> None:
    """Remember how a Value is encoded that is a whole tensor of the kind with this number."""
    window, base, _ = reader.window(value.at)
    start = USUAL_START.match(window, value.at - base)
    rest = _USUAL_REST.match(window, start.end() + start[2][0]) if start else None
    if start and rest and value.content.length_bytes:
        alike = known.setdefault(start[0], {})
        if len(alike) == _MAX_ALIKE:  # a file that is made to be slow; there are a few
            alike.clear()
        alike[rest[0]] = kind, value.content.length_bytes


def usual_value(reader: Reader, at: int) -> Value | None:
    """Return the Value at byte `at` if it is encoded as MindSpore does it, else None: then `_value` must look at it.

    Nearly all are, and this costs a third. What it returns is what `_value` would.
    """
    head = reader.peek(at)
    start = USUAL_START.match(head)
    if start is None:
        return None
    tag_end = start.end() + start[2][0]
    middle = _USUAL_MIDDLE.match(head, tag_end)
    if middle is None:
        return None
    type_end = middle.end() + middle[3][0]
    last = _USUAL_END.match(head, type_end)
    if last is None:
        return None
    content = ByteRange(reader.path, at + last.end(), varint(last[1], 0)[0])
    end = content.offset_bytes + content.length_bytes
    value_end = at + start.end(1) + varint(start[1], 0)[0]
    tensor_end = at + middle.end(1) + varint(middle[1], 0)[0]
    if not end == tensor_end == value_end <= reader.size_bytes:
        return None
    dims = _decode_dims(middle[2])
    try:
        tag, type_name = head[start.end() : tag_end].decode(), head[middle.end() : type_end].decode()
    except UnicodeDecodeError:
        return None
    return Value(at, tag, dims, type_name, content, end)


# Most tensors of a shard have one of a few shapes.
@lru_cache(maxsize=64)
def _decode_dims(encoded: bytes) -> tuple[int, ...]:
    return tuple(varint(dim, 0)[0] for dim in _DIM.findall(encoded))


def _value(reader: Reader, value: Field) -> Value:
    parts = _fields_once(reader, value, _VALUE_FIELDS)
    if _MAP_TENSOR in parts:
        raise reader.damage(
            "a shard holds a map tensor (MapParameter), which is not supported",
            value.at,
            remedy="export it as plain tensors, or leave it out when saving",
        )
    tag = _text(reader, _required(reader, value, parts, _TAG, "tag"), files.MAX_NAME_BYTES, "tag")
    tensor = _required(reader, value, parts, _TENSOR, "tensor")
    dims: list[int] = []
    parts = _fields_once(reader, tensor, _TENSOR_FIELDS, dims)
    type_name = _text(reader, _required(reader, tensor, parts, _TYPE, "tensor_type"), _MAX_TYPE_BYTES, "tensor_type")
    content = _required(reader, tensor, parts, _CONTENT, "tensor_content")
    place = ByteRange(reader.path, content.start, content.length_bytes)
    return Value(value.at, tag, tuple(dims), type_name, place, value.end)


def _fields_once(
    reader: Reader, message: Field, known: tuple[int, ...], dims: list[int] | None = None
) -> dict[int, Field]:
    """Return the fields of `message` by number, in whatever order they come; unknown ones are passed over.

    dims: where given, collects field 1, the only one that may be repeated (packed or not).
    """
    found: dict[int, Field] = {}
    for field in reader.fields(message.start, message.end):
        if dims is not None and field.number == _DIMS and field.wire_type in (VARINT, LENGTH):
            _add_dims(reader, field, dims)
            continue
        if field.number not in known:
            continue
        if field.wire_type != LENGTH:
            raise reader.damage(
                f"field {field.number} of a value has the wrong type: the shard is damaged",
                field.at,
                expected=f"wire type {LENGTH}",
                got=str(field.wire_type),
            )
        if field.number in found:
            raise reader.damage(f"field {field.number} of a value appears twice: the shard is damaged", field.at)
        found[field.number] = field
    return found


def _add_dims(reader: Reader, field: Field, dims: list[int]) -> None:
    if field.wire_type == VARINT:
        numbers: Iterator[int] = iter((field.value,))
    else:
        numbers = reader.varints(field.start, field.end)
    for number in numbers:
        if number >> 63:
            raise reader.damage("a dimension is negative", field.at, got=str(number - (1 << 64)))
        dims.append(number)
        if len(dims) > files.MAX_DIMENSIONS:
            raise reader.damage(
                "a tensor has too many dimensions", field.at, expected=f"{files.MAX_DIMENSIONS} at most"
            )


def _required(reader: Reader, message: Field, parts: dict[int, Field], number: int, name: str) -> Field:
    if number not in parts:
        raise reader.damage(f"a value has no {name}: the shard is damaged or no MindSpore checkpoint", message.at)
    return parts[number]


def _text(reader: Reader, field: Field, limit_bytes: int, name: str) -> str:
    length_bytes = field.length_bytes
    if not 0 < length_bytes <= limit_bytes:
        raise reader.damage(
            f"a {name} has an impossible length",
            field.at,
            expected=f"1 to {limit_bytes} bytes",
            got=f"{length_bytes} bytes",
        )
    try:
        return reader.read(field.start, length_bytes).decode()
    except UnicodeDecodeError as error:
        raise reader.damage(f"a {name} is not UTF-8: the shard is damaged", field.start, got=str(error)) from error


def encode_header(tag: str, dims: tuple[int, ...], type_name: str, content_bytes: int) -> bytes:
    """Return the bytes of a Value up to its content, in the field order protobuf's serializer uses."""
    tag_bytes = tag.encode()
    before, after = encode_around(len(tag_bytes), dims, type_name, content_bytes)
    return before + tag_bytes + after


def encode_around(tag_bytes: int, dims: tuple[int, ...], type_name: str, content_bytes: int) -> tuple[bytes, bytes]:
    """Return the bytes of a Value before its tag, which has so many bytes, and after it up to the content."""
    type_bytes = type_name.encode()
    tensor = b"".join(b"\x08" + encode_varint(length) for length in dims)
    tensor += encode_length(_TYPE, len(type_bytes)) + type_bytes + encode_length(_CONTENT, content_bytes)
    tag = encode_length(_TAG, tag_bytes)
    after = encode_length(_TENSOR, len(tensor) + content_bytes) + tensor
    return encode_length(_VALUE, len(tag) + tag_bytes + len(after) + content_bytes) + tag, after
