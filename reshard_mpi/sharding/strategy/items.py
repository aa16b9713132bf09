"""A protobuf strategy file taken apart item by item, so that what it costs to parse is bounded whatever it says.

A ParallelStrategyMap is its stage, a number, and then operators and parameters, each a message of its own; other fields
are passed over, as protobuf does (protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from reshard_mpi.sharding.strategy.limits import MAX_ITEM_BYTES

CURRENT_STAGE, STRATEGY_ITEM, LAYOUT_ITEM = 1, 2, 3
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}


class DamageError(Exception):
    """What follows at this place is no protobuf."""


class Item(NamedTuple):
    """One field of the file: its number, its content (of a number: nothing), and how far it has been read with it."""

    number: int
    content: bytes
    end_bytes: int


def items(stream: BinaryIO) -> Iterator[Item]:
    """Yield the stage, the operators and the parameters of a strategy file. Raises DamageError where it is none."""
    end_bytes = 0
    while True:
        key, key_bytes = _varint(stream, at_end=True)
        if not key_bytes:
            return
        number, wire_type = key >> 3, key & 7
        content, value_bytes = b"", 0
        if wire_type == _VARINT:
            _, value_bytes = _varint(stream)
        elif wire_type == _LENGTH:
            length_bytes, value_bytes = _varint(stream)
            if length_bytes > MAX_ITEM_BYTES:
                raise DamageError(f"an item of {length_bytes} bytes at byte {end_bytes}")
            content = _read(stream, length_bytes)
            value_bytes += length_bytes
        elif wire_type in _FIXED_BYTES:
            value_bytes = len(_read(stream, _FIXED_BYTES[wire_type]))
        else:
            raise DamageError(f"wire type {wire_type} at byte {end_bytes}")
        if number == 0 or key >> 32:
            raise DamageError(f"field number {number} at byte {end_bytes}")
        end_bytes += key_bytes + value_bytes
        if (number, wire_type) in _KNOWN:
            yield Item(number, content, end_bytes)


_KNOWN = {(CURRENT_STAGE, _VARINT), (STRATEGY_ITEM, _LENGTH), (LAYOUT_ITEM, _LENGTH)}


def _varint(stream: BinaryIO, *, at_end: bool = False) -> tuple[int, int]:
    """Return a number and the bytes it takes; at the end of the file, if it may be `at_end`, none."""
    number = 0
    for count in range(10):
        byte = stream.read(1)
        if not byte:
            if at_end and not count:
                return 0, 0
            raise DamageError("the end of the file in a number")
        number |= (byte[0] & 0x7F) << 7 * count
        if byte[0] < 0x80:
            return number, count + 1
    raise DamageError("a number of more than 64 bits")


def _read(stream: BinaryIO, length_bytes: int) -> bytes:
    data = stream.read(length_bytes)
    if len(data) < length_bytes:
        raise DamageError("the end of the file in an item")
    return data
