"""Read and write the protobuf fields of a `.ckpt` file as byte ranges (`WireReader`).

Values tell one after another where the next one begins. Layers of a model are alike, so the distances between values
repeat. Where each read is a trip to an object store, the places that follow from the last few distances are read
together with the one that is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from reshard_mpi import protobuf_wire
from reshard_mpi.errors import ShardError
from reshard_mpi.filesystem.paths import START_BYTES
from reshard_mpi.filesystem.source_files import SourceFile
from reshard_mpi.formats import structure
from reshard_mpi.formats.locations import ByteRange
from reshard_mpi.protobuf_wire import LENGTH, MAX_VARINT_BYTES, VARINT, FieldHead, encode_length, encode_varint
from reshard_mpi.text import KIB

# By how many of the last distances the next one is told, the longer ones first.
_DEPTHS = (4, 3, 2, 1)
# How many values are foreseen at first, and at most; four times as many as were foreseen rightly.
_LEAST, _MOST, _AGAIN = 8, 512, 4
# What is read around a place: names of other lengths move it.
_BEFORE_BYTES, _BEHIND_BYTES = KIB, 3 * KIB


class Steps:
    """The distances between the places where a file was read, ascending."""

    def __init__(self) -> None:
        self._last = -1
        self._steps: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}
        self._right = 0  # how many of the last ones were foreseen

    def add(self, offset: int) -> None:
        """Take note that the file is read at byte `offset`."""
        if 0 <= self._last < offset:
            step = offset - self._last
            foreseen = self._following(self._steps)
            is_right = foreseen is not None and abs(foreseen - step) <= _BEFORE_BYTES
            self._right = self._right + 1 if is_right else 0
            for depth in _DEPTHS:
                if len(self._steps) >= depth:
                    self._next[tuple(self._steps[-depth:])] = step
            self._steps.append(step)
            del self._steps[: -_DEPTHS[0]]
        self._last = offset

    def ahead(self) -> Iterator[tuple[int, int]]:
        """Yield the parts of the file in which the next values are likely to begin."""
        offset, steps = self._last, list(self._steps)
        for _ in range(min(_MOST, max(_LEAST, _AGAIN * self._right))):
            step = self._following(steps)
            if step is None:
                return
            offset += step
            steps = [*steps[1 - _DEPTHS[0] :], step]
            yield offset - min(_BEFORE_BYTES, step), offset + _BEHIND_BYTES

    def _following(self, steps: list[int]) -> int | None:
        """Return the distance that came behind the last ones before; None if they are new."""
        known = (self._next.get(tuple(steps[-depth:])) for depth in _DEPTHS if len(steps) >= depth)
        return next((step for step in known if step is not None), None)


# One read takes a header, and with it the small values that follow; a larger one would read payload for nothing.
_WINDOW_BYTES = 1024
_LARGE_WINDOW_BYTES = 64 << 10
_HEADER_BYTES = 320
# Fields that are read one by one, unlike the fields of values that repeat others; a value has ten.
_MAX_FIELDS = 1 << 20


class WireReader:
    """A file read through a small window. `path` and offsets are named in every error."""

    def __init__(self, file: SourceFile) -> None:
        self.path = file.path
        self.size_bytes = file.size_bytes
        self._file = file
        self._base = 0
        self._window = b""
        self._fields = 0
        self._steps = Steps() if file.is_far else None

    def damage(self, problem: str, offset: int, *, expected: str = "", got: str = "", remedy: str = "") -> ShardError:
        """Return the error that says `problem` was found at byte `offset`."""
        return ShardError(problem, expected=expected, got=got, where=f"{self.path}, byte {offset}", remedy=remedy)

    def read(self, offset: int, length_bytes: int) -> bytes:
        """Return `length_bytes` bytes, bounded by the caller. Raises ShardError if the file ends before."""
        window_offset = offset - self._base
        if window_offset >= 0 and window_offset + length_bytes <= len(self._window):
            return self._window[window_offset : window_offset + length_bytes]
        self._read_window(offset, max(length_bytes, _WINDOW_BYTES))
        if len(self._window) < length_bytes:
            raise self.cut_short(offset)
        return self._window[:length_bytes]

    def window(self, offset: int) -> tuple[bytes, int, int]:
        """Return bytes of the file, the offset of their first, and the last offset at which a header is whole in them.

        A header at `offset` is. The bytes are many only where one header soon follows another.
        """
        base, size = self._base, len(self._window)
        if not base <= offset <= self._last_in_window:
            near = base <= offset <= base + 2 * size
            length_bytes = min(2 * size, _LARGE_WINDOW_BYTES) if near and size else _WINDOW_BYTES
            self._read_window(offset, length_bytes)
        return self._window, self._base, self._last_in_window

    def _read_window(self, offset: int, length_bytes: int) -> None:
        if self._steps is not None:
            self._steps.add(offset)
            if not self._file.is_at_hand(offset, offset + length_bytes):
                self._file.will_read([(offset, offset + length_bytes), *self._steps.ahead()])
        self._window, self._base = self._file.read(offset, length_bytes), offset

    @property
    def _last_in_window(self) -> int:
        end = self._base + len(self._window)
        return end if end == self.size_bytes else end - _HEADER_BYTES

    def cut_short(self, offset: int) -> ShardError:
        """Return the error for a file that ends within the field at `offset`."""
        return self.damage(
            "a shard ends in the middle of a value: it is truncated or damaged",
            offset,
            got=f"{self.size_bytes} bytes in all",
        )

    def field(self, offset: int, end: int) -> FieldHead:
        """Return the field at `offset` of a message that ends at `end`. Raises ShardError if there is none."""
        try:
            head = protobuf_wire.field_head(self.read(offset, min(2 * MAX_VARINT_BYTES, end - offset)), 0)
        except protobuf_wire.MessageCutShortError:
            raise self._overrun(offset, end) from None
        except protobuf_wire.WireError as error:
            raise self._damaged(error, offset) from None
        if offset + head.end > end:
            raise self._overrun(offset, end)
        return FieldHead(offset, head.number, head.wire_type, head.value, offset + head.start, offset + head.end)

    def fields(self, start: int, end: int) -> Iterator[FieldHead]:
        """Yield the fields of the message in the bytes from `start` to `end`. Raises ShardError as `field` does."""
        while start < end:
            field = self.field(start, end)
            self._fields += 1
            if self._fields > _MAX_FIELDS:
                raise self.damage("a shard's structure has too many fields", start, expected=f"{_MAX_FIELDS} at most")
            yield field
            start = field.end

    def varints(self, field: FieldHead) -> list[int]:
        """Return the numbers of a packed repeated field, whose length the caller bounds."""
        try:
            return list(protobuf_wire.varints(self.read(field.start, field.length_bytes)))
        except protobuf_wire.MessageCutShortError:
            raise self._overrun(field.start, field.end) from None
        except protobuf_wire.WireError as error:
            raise self._damaged(error, field.start) from None

    def _damaged(self, error: protobuf_wire.WireError, offset: int) -> ShardError:
        return self.damage(f"a field in a shard's structure has {error}: the shard is damaged", offset)

    def _overrun(self, offset: int, end: int) -> ShardError:
        if end == self.size_bytes:
            return self.cut_short(offset)
        return self.damage(
            "a field runs past the end of the message it is in: the shard is damaged",
            offset,
            expected=f"its end by {end}",
        )


# What `save_checkpoint(crc_check=True)` appends: this mark and a CRC-32 in ten bytes.
CRC_MARK = b"crc_num"
CRC_BYTES = len(CRC_MARK) + 10
EMPTY_CHECKPOINT = CRC_MARK + bytes(10)
# First four bytes of a file saved with enc_key, as a little-endian number (seen in files of MindSpore 2.10).
_ENCRYPTED = {0x7F3A5ED8: "AES-GCM", 0x7F3A5ED9: "AES-CBC", 0x7F3A5EDA: "SM4-CBC"}
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
    rb"\x12%b(?:\x08%b){0,%d}\x12[\x01-\x3f][0-9A-Za-z_]+\x1a%b" % (_VARINT, _VARINT, structure.MAX_DIMENSIONS, _VARINT)
)


class FileValue(NamedTuple):
    """One Value of the file, from byte `offset` to byte `end`: a tensor, or a piece of one."""

    offset: int
    tag: str
    dims: tuple[int, ...]
    type_name: str
    content: ByteRange
    end: int


def value_at(reader: WireReader, offset: int) -> FileValue:
    """Return the Value at `offset`. Raises ShardError if there is none."""
    if reader.read(offset, 1) != _VALUE_KEY:
        start = b"" if offset else reader.read(0, min(START_BYTES, reader.size_bytes))
        raise structure.other_kind(start, reader.path, "a MindSpore checkpoint") or reader.damage(
            "a shard goes on with bytes that are no checkpoint" if offset else "a shard is not a MindSpore checkpoint",
            offset,
            expected="a value, which begins with byte 0x0a",
            got=f"byte 0x{reader.read(offset, 1).hex()}, {reader.size_bytes - offset} bytes before the end of the file",
        )
    return _value(reader, reader.field(offset, reader.size_bytes))


def joined_bytes(reader: WireReader, pieces: list[FileValue]) -> int:
    """Return the length of all pieces together. Raises ShardError if they are not pieces of one tensor."""
    first = pieces[0]
    for piece in pieces:
        if piece.dims != first.dims or piece.type_name != first.type_name:
            raise disagreeing(reader, piece, first.type_name, first.dims)
    return sum(piece.content.length_bytes for piece in pieces)


def disagreeing(reader: WireReader, piece: FileValue, type_name: str, dims: tuple[int, ...]) -> ShardError:
    """Return the error for a piece of a tensor that is not of this type and these dims, as the tensor is."""
    return reader.damage(
        f"the pieces of {piece.tag!r} do not agree in shape and type",
        piece.offset,
        expected=f"{type_name} {list(dims)}",
        got=f"{piece.type_name} {list(piece.dims)}",
    )


def is_trailer(reader: WireReader, offset: int) -> bool:
    """Tell whether the file ends, from `offset` on, with the checksum of all before.

    To be asked only between Values: no Value can begin with `c`, which would be the key of a group, and a payload that
    ends like a checksum is not taken for one.
    """
    return reader.size_bytes - offset == CRC_BYTES and reader.read(offset, len(CRC_MARK)) == CRC_MARK


def size_without_checksum(file: SourceFile, end: int) -> int:
    """Return the length of a file without the checksum that may be at its end. end: of its last payload."""
    shorter_bytes = file.size_bytes - CRC_BYTES
    has_checksum = shorter_bytes >= max(end, 1) and file.read(shorter_bytes, len(CRC_MARK)) == CRC_MARK
    return shorter_bytes if has_checksum else file.size_bytes


def refuse_encrypted(reader: WireReader) -> None:
    """Raise ShardError for a file that MindSpore has encrypted."""
    if reader.size_bytes >= 4:
        cipher = _ENCRYPTED.get(int.from_bytes(reader.read(0, 4), "little"))
        if cipher:
            raise reader.damage(
                f"a shard is encrypted ({cipher})",
                0,
                remedy="load it with MindSpore and its dec_key, and save it without enc_key",
            )


def encoding_of(reader: WireReader, value: FileValue) -> tuple[bytes, bytes] | None:
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


def _value(reader: WireReader, value: FieldHead) -> FileValue:
    parts, _ = _fields_once(reader, value, _VALUE_FIELDS)
    if _MAP_TENSOR in parts:
        raise reader.damage(
            "a shard holds a map tensor (MapParameter), which is not supported",
            value.offset,
            remedy="export it as plain tensors, or leave it out when saving",
        )
    tag = _text(reader, _required(reader, value, parts, _TAG, "tag"), structure.MAX_NAME_BYTES, "tag")
    tensor = _required(reader, value, parts, _TENSOR, "tensor")
    parts, dims = _fields_once(reader, tensor, _TENSOR_FIELDS, with_dims=True)
    type_name = _text(reader, _required(reader, tensor, parts, _TYPE, "tensor_type"), _MAX_TYPE_BYTES, "tensor_type")
    content = _required(reader, tensor, parts, _CONTENT, "tensor_content")
    place = ByteRange(reader.path, content.start, content.length_bytes)
    return FileValue(value.offset, tag, tuple(dims), type_name, place, value.end)


def _fields_once(
    reader: WireReader, message: FieldHead, numbers: tuple[int, ...], *, with_dims: bool = False
) -> tuple[dict[int, FieldHead], list[int]]:
    """Return the fields of `message` by number, in whatever order they come; unknown ones are passed over.

    Args:
        with_dims: field 1 holds dimensions, packed or not, and may come more than once; they are returned as well.

    Raises ShardError for any other field that comes twice or has the wrong type.
    """
    fields: dict[int, FieldHead] = {}
    dims: list[int] = []
    for field in reader.fields(message.start, message.end):
        if with_dims and field.number == _DIMS and field.wire_type in (VARINT, LENGTH):
            dims += _dims(reader, field)
            if len(dims) > structure.MAX_DIMENSIONS:
                raise _too_many_dimensions(reader, field)
            continue
        if field.number not in numbers:
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


def _dims(reader: WireReader, field: FieldHead) -> list[int]:
    """Return the dimensions of a field: one, or a packed list."""
    if field.length_bytes > structure.MAX_DIMENSIONS * MAX_VARINT_BYTES:
        raise _too_many_dimensions(reader, field)
    dims = [field.value] if field.wire_type == VARINT else reader.varints(field)
    if any(number >> 63 for number in dims):
        raise reader.damage(
            "a dimension is negative", field.offset, got=str([number - (1 << 64) for number in dims if number >> 63])
        )
    return dims


def _too_many_dimensions(reader: WireReader, field: FieldHead) -> ShardError:
    return reader.damage(
        "a tensor has too many dimensions", field.offset, expected=f"{structure.MAX_DIMENSIONS} at most"
    )


def _required(reader: WireReader, message: FieldHead, parts: dict[int, FieldHead], number: int, name: str) -> FieldHead:
    if number not in parts:
        raise reader.damage(f"a value has no {name}: the shard is damaged or no MindSpore checkpoint", message.offset)
    return parts[number]


def _text(reader: WireReader, field: FieldHead, limit_bytes: int, name: str) -> str:
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


def header_bytes(tag_bytes: int, dims: tuple[int, ...], type_name: str, content_bytes: int) -> int:
    """Return the length of what `encode_header` returns, for a tag of `tag_bytes` bytes."""
    return tag_bytes + sum(map(len, encode_around(tag_bytes, dims, type_name, content_bytes)))
