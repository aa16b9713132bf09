"""The Values that a checkpoint file consists of: located in a file, and encoded up to their content."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from reshard_mpi.filesystem.file_kinds import START_BYTES
from reshard_mpi.formats import files
from reshard_mpi.formats.ckpt.wire import Field, Reader
from reshard_mpi.formats.places import ByteRange
from reshard_mpi.protobuf import LENGTH, VARINT, encode_length, encode_varint

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
# The encoding protobuf's serializers make: fields in order of their numbers, tags with a length of one or two bytes.
# Varints of up to nine bytes have at most 63 bits.
_VARINT = rb"[\x80-\xff]{0,8}[\x00-\x7f]"
USUAL_START = re.compile(rb"\x0a(%b)\x0a([\x01-\x7f]|[\x80-\xff][\x01-\x7f])" % _VARINT)
# All bytes between a name and the content. No name of a type has the byte that begins the content.
_USUAL_REST = re.compile(
    rb"\x12%b(?:\x08%b){0,%d}\x12[\x01-\x3f][0-9A-Za-z_]+\x1a%b" % (_VARINT, _VARINT, files.MAX_DIMENSIONS, _VARINT)
)


class Value(NamedTuple):
    """One Value of the file, from byte `offset` to byte `end`: a tensor, or a piece of one."""

    offset: int
    tag: str
    dims: tuple[int, ...]
    type_name: str
    content: ByteRange
    end: int


def value_at(reader: Reader, offset: int) -> Value:
    """Return the Value at `offset`. Raises ShardError if there is none."""
    if reader.read(offset, 1) != _VALUE_KEY:
        start = b"" if offset else reader.read(0, min(START_BYTES, reader.size_bytes))
        raise files.other_kind(start, reader.path, "a MindSpore checkpoint") or reader.damage(
            "a shard goes on with bytes that are no checkpoint" if offset else "a shard is not a MindSpore checkpoint",
            offset,
            expected="a value, which begins with byte 0x0a",
            got=f"byte 0x{reader.read(offset, 1).hex()}, {reader.size_bytes - offset} bytes before the end of the file",
            remedy="save or copy it again",
        )
    return _value(reader, reader.field(offset, reader.size_bytes))


def is_trailer(reader: Reader, offset: int) -> bool:
    """Tell whether the file ends, from `offset` on, with the checksum of all before.

    To be asked only between Values: no Value can begin with `c`, which would be the key of a group, and a payload that
    ends like a checksum is not taken for one.
    """
    return reader.size_bytes - offset == CRC_BYTES and reader.read(offset, len(CRC_MARK)) == CRC_MARK


def encoding_of(reader: Reader, value: Value) -> tuple[bytes, bytes] | None:
    """Return the bytes of a Value before its name, and those between name and content; None if it is encoded unusually.

    Two Values with the same of both differ in nothing but name and content.
    """
    window, base, _ = reader.window(value.offset)
    start = USUAL_START.match(window, value.offset - base)
    rest = _USUAL_REST.match(window, start.end() + tag_bytes(start)) if start else None
    return (start[0], rest[0]) if start and rest else None


def tag_bytes(start: re.Match[bytes]) -> int:
    """Return the length of the tag behind what `USUAL_START` has matched."""
    length = start[2]
    return length[0] if len(length) == 1 else length[0] & 0x7F | length[1] << 7


def _value(reader: Reader, value: Field) -> Value:
    parts, _ = _fields_once(reader, value, _VALUE_FIELDS)
    if _MAP_TENSOR in parts:
        raise reader.damage(
            "a shard holds a map tensor (MapParameter), which is not supported",
            value.offset,
            remedy="export it as plain tensors, or leave it out when saving",
        )
    tag = _text(reader, _required(reader, value, parts, _TAG, "tag"), files.MAX_NAME_BYTES, "tag")
    tensor = _required(reader, value, parts, _TENSOR, "tensor")
    parts, dims = _fields_once(reader, tensor, _TENSOR_FIELDS, with_dims=True)
    type_name = _text(reader, _required(reader, tensor, parts, _TYPE, "tensor_type"), _MAX_TYPE_BYTES, "tensor_type")
    content = _required(reader, tensor, parts, _CONTENT, "tensor_content")
    place = ByteRange(reader.path, content.start, content.length_bytes)
    return Value(value.offset, tag, tuple(dims), type_name, place, value.end)


def _fields_once(
    reader: Reader, message: Field, known: tuple[int, ...], *, with_dims: bool = False
) -> tuple[dict[int, Field], list[int]]:
    """Return the fields of `message` by number, in whatever order they come; unknown ones are passed over.

    with_dims: field 1 holds dimensions, packed or not, and may come more than once; they are returned as well. Raises
    ShardError for any other field that comes twice or has the wrong type.
    """
    fields: dict[int, Field] = {}
    dims: list[int] = []
    for field in reader.fields(message.start, message.end):
        if with_dims and field.number == _DIMS and field.wire_type in (VARINT, LENGTH):
            for dim in _dims(reader, field):
                dims.append(dim)
                if len(dims) > files.MAX_DIMENSIONS:
                    limit = f"{files.MAX_DIMENSIONS} at most"
                    raise reader.damage("a tensor has too many dimensions", field.offset, expected=limit)
            continue
        if field.number not in known:
            continue
        if field.wire_type != LENGTH:
            raise reader.damage(
                f"field {field.number} of a value has the wrong type: the shard is damaged",
                field.offset,
                expected=f"wire type {LENGTH}",
                got=str(field.wire_type),
            )
        if field.number in fields:
            raise reader.damage(f"field {field.number} of a value appears twice: the shard is damaged", field.offset)
        fields[field.number] = field
    return fields, dims


def _dims(reader: Reader, field: Field) -> Iterator[int]:
    for number in (field.value,) if field.wire_type == VARINT else reader.varints(field.start, field.end):
        if number >> 63:
            raise reader.damage("a dimension is negative", field.offset, got=str(number - (1 << 64)))
        yield number


def _required(reader: Reader, message: Field, parts: dict[int, Field], number: int, name: str) -> Field:
    if number not in parts:
        raise reader.damage(f"a value has no {name}: the shard is damaged or no MindSpore checkpoint", message.offset)
    return parts[number]


def _text(reader: Reader, field: Field, limit_bytes: int, name: str) -> str:
    length_bytes = field.length_bytes
    if not 0 < length_bytes <= limit_bytes:
        raise reader.damage(
            f"a {name} has an impossible length",
            field.offset,
            expected=f"1 to {limit_bytes} bytes",
            got=f"{length_bytes} bytes",
        )
    try:
        return reader.read(field.start, length_bytes).decode()
    except UnicodeDecodeError as error:
        raise reader.damage(f"a {name} is not UTF-8: the shard is damaged", field.start, got=str(error)) from error


def encode_header(tag: str, dims: tuple[int, ...], type_name: str, content_bytes: int) -> bytes:
    """Return the bytes of a Value up to its content, in the field order protobuf's serializer uses."""
    encoded = tag.encode()
    before, after = encode_around(len(encoded), dims, type_name, content_bytes)
    return before + encoded + after


def encode_around(length_bytes: int, dims: tuple[int, ...], type_name: str, content_bytes: int) -> tuple[bytes, bytes]:
    """Return the bytes of a Value before its tag, which has `length_bytes` bytes, and those between tag and content."""
    type_bytes = type_name.encode()
    tensor = b"".join(b"\x08" + encode_varint(length) for length in dims)
    tensor += encode_length(_TYPE, len(type_bytes)) + type_bytes + encode_length(_CONTENT, content_bytes)
    tag = encode_length(_TAG, length_bytes)
    after = encode_length(_TENSOR, len(tensor) + content_bytes) + tensor
    return encode_length(_VALUE, len(tag) + length_bytes + len(after) + content_bytes) + tag, after
