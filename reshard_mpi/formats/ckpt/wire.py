"""The fields of protobuf messages in a file, as byte ranges; payloads are never loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

from reshard_mpi import protobuf
from reshard_mpi.errors import ShardError
from reshard_mpi.protobuf import FIXED_BYTES, LENGTH, VARINT

# One read takes a header, and with it the small values that follow; a larger one would read payload for nothing.
_WINDOW_BYTES = 1024
_LARGE_WINDOW_BYTES = 64 << 10
_HEADER_BYTES = 320
# Fields that are read one by one, which those of values that are like others are not; a value has ten.
_MAX_FIELDS = 1 << 20


class Field(NamedTuple):
    """One field: its key is at `offset`, its content from `start` to `end`. value: the number, if it is a varint."""

    offset: int
    number: int
    wire_type: int
    value: int
    start: int
    end: int

    @property
    def length_bytes(self) -> int:
        return self.end - self.start


class Reader:
    """A file read through a small window. `path` and offsets are named in every error."""

    def __init__(self, fd: int, path: str, size_bytes: int) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self._fd = fd
        self._base = 0
        self._window = b""
        self._fields = 0

    def damage(self, problem: str, offset: int, *, expected: str = "", got: str = "", remedy: str = "") -> ShardError:
        """Return the error that says `problem` was found at byte `offset`."""
        return ShardError(problem, expected=expected, got=got, where=f"{self.path}, byte {offset}", remedy=remedy)

    def read(self, offset: int, length_bytes: int) -> bytes:
        """Return `length_bytes` bytes, bounded by the caller. Raises ShardError if the file ends before."""
        window_offset = offset - self._base
        if window_offset >= 0 and window_offset + length_bytes <= len(self._window):
            return self._window[window_offset : window_offset + length_bytes]
        self._window = self._pread(offset, max(length_bytes, _WINDOW_BYTES))
        self._base = offset
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
            self._window = self._pread(offset, min(2 * size, _LARGE_WINDOW_BYTES) if near and size else _WINDOW_BYTES)
            self._base = offset
        return self._window, self._base, self._last_in_window

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
            remedy="save or copy it again",
        )

    def varint(self, offset: int, end: int) -> tuple[int, int]:
        """Return the unsigned varint at `offset` and the offset after it. Raises ShardError if it passes `end`."""
        window_offset = offset - self._base
        if 0 <= window_offset < len(self._window) and offset < end:
            byte = self._window[window_offset]
            if byte < 0x80:
                return byte, offset + 1
        data = self.read(offset, min(10, end - offset)) if offset < end else b""
        try:
            number, length_bytes = protobuf.varint(data, 0)
        except protobuf.CutShortError:
            raise self._overrun(offset, end) from None
        except protobuf.WireError:
            raise self.damage(
                "a number in a shard's structure has more than 64 bits: the shard is damaged", offset
            ) from None
        return number, offset + length_bytes

    def field(self, offset: int, end: int) -> Field:
        """Return the field at `offset` of a message that ends at `end`. Raises ShardError if there is none."""
        key, start = self.varint(offset, end)
        number, wire_type = key >> 3, key & 7
        if number == 0 or key >> 32:
            raise self.damage("a field number in a shard's structure is impossible: the shard is damaged", offset)
        value = 0
        if wire_type == LENGTH:
            value, start = self.varint(start, end)
            field_end = start + value
        elif wire_type == VARINT:
            value, field_end = self.varint(start, end)
        elif wire_type in FIXED_BYTES:
            field_end = start + FIXED_BYTES[wire_type]
        else:
            raise self.damage(
                "a field in a shard's structure has an impossible type: the shard is damaged",
                offset,
                expected="wire type 0, 1, 2 or 5",
                got=str(wire_type),
            )
        if field_end > end:
            raise self._overrun(offset, end)
        return Field(offset, number, wire_type, value, start, field_end)

    def fields(self, start: int, end: int) -> Iterator[Field]:
        """Yield the fields of the message in the bytes from `start` to `end`. Raises ShardError as `field` does."""
        while start < end:
            field = self.field(start, end)
            self._fields += 1
            if self._fields > _MAX_FIELDS:
                raise self.damage("a shard's structure has too many fields", start, expected=f"{_MAX_FIELDS} at most")
            yield field
            start = field.end

    def varints(self, start: int, end: int) -> Iterator[int]:
        """Yield the numbers of a packed repeated field, which is the bytes from `start` to `end`."""
        while start < end:
            number, start = self.varint(start, end)
            yield number

    def _overrun(self, offset: int, end: int) -> ShardError:
        if end == self.size_bytes:
            return self.cut_short(offset)
        return self.damage(
            "a field runs past the end of the message it is in: the shard is damaged",
            offset,
            expected=f"its end by {end}",
        )

    def _pread(self, offset: int, length_bytes: int) -> bytes:
        try:
            return os.pread(self._fd, length_bytes, offset)
        except OSError as error:
            raise self.damage("a shard cannot be read", offset, got=str(error)) from error
