"""MindSpore's checkpoint files, of float32 tensors, read and written in its own few lines of protobuf.

Checking with this shares no code with what is checked. A file is a sequence of fields 1, one a tensor: its name (1) and
the tensor (2), which is its sizes (1), the name of its type (2) and its elements (3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float32]]

_LENGTH_DELIMITED = 2


def save(path: Path, tensors: Mapping[str, Array]) -> None:
    """Write a checkpoint file, and the folder it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for name, array in tensors.items():
            sizes = b"".join(b"\x08" + _varint(size) for size in array.shape)
            tensor = sizes + _field(2, b"Float32") + _field(3, np.ascontiguousarray(array).tobytes())
            file.write(_field(1, _field(1, name.encode()) + _field(2, tensor)))


def load(path: Path) -> dict[str, Array]:
    """Return the tensors of a checkpoint file."""
    tensors = {}
    for _, value in _fields(memoryview(path.read_bytes())):
        parts = dict(_fields(value))
        sizes, content = [], b""
        for number, part in _fields(parts[2]):
            if number == 1:
                sizes.append(part)
            elif number == 3:
                content = part
        tensors[bytes(parts[1]).decode()] = np.frombuffer(content, np.float32).reshape(sizes)
    return tensors


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | _LENGTH_DELIMITED) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _fields(message: memoryview) -> Iterator[tuple[int, Any]]:
    """Yield the number and the content of each field: bytes, or the number that it is."""
    start = 0
    while start < len(message):
        key, start = _read_varint(message, start)
        value, start = _read_varint(message, start)
        if key & 7 == _LENGTH_DELIMITED:
            value, start = message[start : start + value], start + value
        yield key >> 3, value


def _read_varint(message: memoryview, start: int) -> tuple[int, int]:
    value = shift = 0
    while message[start] & 0x80:
        value |= (message[start] & 0x7F) << shift
        shift, start = shift + 7, start + 1
    return value | message[start] << shift, start + 1
