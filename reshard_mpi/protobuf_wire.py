"""Read and write protobuf's wire format in memory (`fields`).

The encoding is that of protobuf.dev/programming-guides/encoding: a field is a key (number x 8 + wire type) and a
value; a varint has 7 bits a byte, least significant first, and at most 64 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
FIXED_BYTES = {FIXED64: 8, FIXED32: 4}
MAX_VARINT_BYTES = 10
_MASK = (1 << 64) - 1


class WireError(Exception):
    """The data is not protobuf."""


class MessageCutShortError(WireError):
    """The data ends in the middle of a field."""


class MessageField(NamedTuple):
    """One field, from byte `start` to byte `end` of a message."""

    number: int
    wire_type: int
    value: int  # the number, if the field is a varint
    content: bytes  # the bytes, if the field has a length
    start: int
    end: int

    @property
    def kind(self) -> tuple[int, int]:
        return self.number, self.wire_type


class FieldHead(NamedTuple):
    """One field without its content: its key is at byte `offset`, its content from byte `start` to byte `end`."""

    offset: int
    number: int
    wire_type: int
    value: int  # the number, if the field is a varint
    start: int
    end: int

    @property
    def length_bytes(self) -> int:
        return self.end - self.start


def varint(data: bytes, offset: int) -> tuple[int, int]:
    """Return the unsigned number at byte `offset` of `data`, and the offset after it.

    Raises MessageCutShortError if the data ends in the middle of it, WireError if it has more than 64 bits.
    """
    number = shift = 0
    for position in range(offset, min(offset + MAX_VARINT_BYTES, len(data))):
        byte = data[position]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            if number >> 64:
                break
            return number, position + 1
        shift += 7
    else:
        if offset + MAX_VARINT_BYTES > len(data):
            raise MessageCutShortError("the end of the data in a number")
    raise WireError("a number of more than 64 bits")


def field_head(data: bytes, offset: int) -> FieldHead:
    """Return the field at byte `offset` of `data`, where a content need not be.

    Raises MessageCutShortError if the data ends before the content, WireError if it is not a field.
    """
    key, start = varint(data, offset)
    number, wire_type = key >> 3, key & 7
    if number == 0 or key >> 32:
        raise WireError(f"the impossible field number {number}")
    if wire_type == VARINT:
        value, end = varint(data, start)
        return FieldHead(offset, number, wire_type, value, start, end)
    if wire_type == LENGTH:
        length_bytes, start = varint(data, start)
    elif wire_type in FIXED_BYTES:
        length_bytes = FIXED_BYTES[wire_type]
    else:
        raise WireError(f"the impossible type {wire_type}")
    return FieldHead(offset, number, wire_type, 0, start, start + length_bytes)


def field(data: bytes, offset: int, most_bytes: int | None = None) -> MessageField:
    """Return the field at byte `offset` of `data`.

    Args:
        most_bytes: a longer content is an error, even where the data ends before it does.

    Raises MessageCutShortError if the data ends in the middle of the field, WireError if it is not a field.
    """
    _, number, wire_type, value, start, end = head = field_head(data, offset)
    if most_bytes is not None and head.length_bytes > most_bytes:
        raise WireError(f"an item of {head.length_bytes} bytes")
    if end > len(data):
        raise MessageCutShortError("the end of the data in a field")
    return MessageField(number, wire_type, value, data[start:end] if wire_type == LENGTH else b"", offset, end)


def fields(data: bytes) -> Iterator[MessageField]:
    """Yield the fields of a message. Raises WireError where the data is not protobuf."""
    offset, size_bytes = 0, len(data)
    while offset < size_bytes:
        # Most keys, lengths and numbers are one byte.
        key, value, start = data[offset], data[offset + 1] if offset + 1 < size_bytes else 0x80, offset + 2
        is_short = 8 <= key < 0x80 and value < 0x80
        if is_short and key & 7 == LENGTH:
            end = start + value
            if end > size_bytes:
                raise MessageCutShortError("the end of the data in a field")
            item = MessageField(key >> 3, LENGTH, 0, data[start:end], offset, end)
        elif is_short and key & 7 == VARINT:
            item = MessageField(key >> 3, VARINT, value, b"", offset, start)
        else:
            item = field(data, offset)
        yield item
        offset = item.end


def varints(data: bytes) -> Iterator[int]:
    """Yield the numbers of a packed repeated field, which is all of `data`. Raises WireError if it holds others."""
    offset = 0
    while offset < len(data):
        number, offset = varint(data, offset)
        yield number


def encode_varint(number: int) -> bytes:
    """Return a number as a varint; a negative one in the two's complement of 64 bits."""
    number &= _MASK
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def encode_length(number: int, length_bytes: int) -> bytes:
    """Return the key and the length that precede the `length_bytes` bytes of field `number`."""
    return encode_varint(number << 3 | LENGTH) + encode_varint(length_bytes)


def encode_content(number: int, *parts: bytes) -> bytes:
    """Return the field `number` with the content `parts`: a text, or the encoded fields of a message."""
    content = b"".join(parts)
    return encode_length(number, len(content)) + content


def encode_number(number: int, value: int) -> bytes:
    """Return the field `number` with the whole number `value`."""
    return encode_varint(number << 3 | VARINT) + encode_varint(value)
