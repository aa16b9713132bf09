"""Protobuf's wire format: the fields of a message in memory, and how they are written.

The encoding is that of protobuf.dev/programming-guides/encoding: a field is a key (number x 8 + wire type) and a
value; a varint has 7 bits a byte, least significant first, and at most 64 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
FIXED_BYTES = {FIXED64: 8, FIXED32: 4}
_MAX_VARINT_BYTES = 10
_MASK = (1 << 64) - 1


class WireError(Exception):
    """What is at this place is no protobuf."""


class CutShortError(WireError):
    """The data ends within a field."""


class Field(NamedTuple):
    """One field of a message, which begins and ends there. value: of a varint. content: what a length goes before."""

    number: int
    wire_type: int
    value: int
    content: bytes
    start: int
    end: int

    @property
    def kind(self) -> tuple[int, int]:
        return self.number, self.wire_type


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the unsigned number at `at`, and where it ends. Raises WireError if it has more than 64 bits."""
    number = shift = 0
    for place in range(at, min(at + _MAX_VARINT_BYTES, len(data))):
        byte = data[place]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            if number >> 64:
                break
            return number, place + 1
        shift += 7
    else:
        if at + _MAX_VARINT_BYTES > len(data):
            raise CutShortError("the end of the data in a number")
    raise WireError("a number of more than 64 bits")


def field(data: bytes, at: int, most_bytes: int | None = None) -> Field:
    """Return the field at `at`.

    most_bytes: a longer content is an error, whether or not it is all there. Raises CutShortError if the data ends
    before, WireError for what is none.
    """
    key, start = varint(data, at)
    number, wire_type = key >> 3, key & 7
    if number == 0 or key >> 32:
        raise WireError(f"field number {number}")
    value, content = 0, b""
    if wire_type == VARINT:
        value, end = varint(data, start)
    elif wire_type == LENGTH:
        length_bytes, start = varint(data, start)
        if most_bytes is not None and length_bytes > most_bytes:
            raise WireError(f"an item of {length_bytes} bytes")
        end = start + length_bytes
        content = data[start:end]
    elif wire_type in FIXED_BYTES:
        end = start + FIXED_BYTES[wire_type]
    else:
        raise WireError(f"wire type {wire_type}")
    if end > len(data):
        raise CutShortError("the end of the data in a field")
    return Field(number, wire_type, value, content, at, end)


def fields(data: bytes) -> Iterator[Field]:
    """Yield the fields of a message. Raises WireError where it is none."""
    at, size_bytes = 0, len(data)
    while at < size_bytes:
        # Most keys, lengths and numbers are one byte.
        if at + 1 < size_bytes and data[at] & 0x87 == LENGTH and data[at] >> 3 and data[at + 1] < 0x80:
            start = at + 2
            end = start + data[at + 1]
            if end > size_bytes:
                raise CutShortError("the end of the data in a field")
            found = Field(data[at] >> 3, LENGTH, 0, data[start:end], at, end)
        elif at + 1 < size_bytes and data[at] & 0x87 == VARINT and data[at] >> 3 and data[at + 1] < 0x80:
            found = Field(data[at] >> 3, VARINT, data[at + 1], b"", at, at + 2)
        else:
            found = field(data, at)
        yield found
        at = found.end


def varints(data: bytes) -> Iterator[int]:
    """Yield the numbers that fill `data` (a packed repeated field). Raises WireError."""
    at = 0
    while at < len(data):
        number, at = varint(data, at)
        yield number


def encode_varint(number: int) -> bytes:
    """Return a number as a varint; a negative one in the two's complement of 64 bits."""
    number &= _MASK
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def encode_length(number: int, length_bytes: int) -> bytes:
    """Return what precedes a field of `length_bytes` bytes: its key, for field `number`, and its length."""
    return encode_varint(number << 3 | LENGTH) + encode_varint(length_bytes)


def encode_content(number: int, *parts: bytes) -> bytes:
    """Return the field `number` whose content are `parts`: a text, or a message of these fields."""
    content = b"".join(parts)
    return encode_length(number, len(content)) + content


def encode_number(number: int, value: int) -> bytes:
    """Return the field `number` that is a whole number."""
    return encode_varint(number << 3 | VARINT) + encode_varint(value)
