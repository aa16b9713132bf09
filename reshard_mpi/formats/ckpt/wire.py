"""Protobuf's messages walked in a file by byte range: fields are found, payloads are never loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

from reshard_mpi import protobuf
from reshard_mpi.errors import ShardError
from reshard_mpi.protobuf import FIXED_BYTES, LENGTH, VARINT

# One read brings a header, and with it the small values that follow; larger ones would read payload for nothing.
_WINDOW_BYTES = 1024
_LARGE_WINDOW_BYTES = 64 << 10
_HEADER_BYTES = 320
# Fields of messages that are not encoded as MindSpore does it; a value has ten. They are walked one by one.
_MAX_FIELDS = 3 << 16


class Field(NamedTuple):
    """One field: its key is at byte `at`, its content from `start` to `end`; `value` is the number of a varint."""

    at: int
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

    def damage(self, problem: str, at: int, *, expected: str = "", got: str = "", remedy: str = "") -> ShardError:
        """Return the error that says `problem` was found at byte `at`."""
        return ShardError(problem, expected=expected, got=got, where=f"{self.path}, byte {at}", remedy=remedy)

    def read(self, at: int, length_bytes: int) -> bytes:
        """Return the bytes from `at` on. The caller has bounded `length_bytes`."""
        first = at - self._base
        if first >= 0 and first + length_bytes <= len(self._window):
            return self._window[first : first + length_bytes]
        self._window = self._pread(at, max(length_bytes, _WINDOW_BYTES))
        self._base = at
        if len(self._window) < length_bytes:
            raise self.cut_short(at)
        return self._window[:length_bytes]

    def peek(self, at: int) -> bytes:
        """Return some bytes from `at` on: enough for a header as MindSpore writes it, fewer at the end of the file."""
        first = at - self._base
        if not 0 <= first <= len(self._window) - _HEADER_BYTES:
            self._window = self._pread(at, _WINDOW_BYTES)
            self._base = at
            first = 0
        return self._window[first : first + _HEADER_BYTES]

    def window(self, at: int) -> tuple[bytes, int, int]:
        """Return bytes of the file with enough from byte `at` on for a header, and which byte is their first.

        And the last byte that a header may begin with to be among them as a whole. They are many only where headers
        follow soon on each other.
        """
        base, size = self._base, len(self._window)
        if not base <= at <= self._last_in_window:
            near = base <= at <= base + 2 * size
            self._window = self._pread(at, min(2 * size, _LARGE_WINDOW_BYTES) if near and size else _WINDOW_BYTES)
            self._base = at
        return self._window, self._base, self._last_in_window

    @property
    def _last_in_window(self) -> int:
        end = self._base + len(self._window)
        return end if end == self.size_bytes else end - _HEADER_BYTES

    def cut_short(self, at: int) -> ShardError:
        """Return the error of a file that ends within the field at `at`."""
        return self.damage(
            "a shard ends in the middle of a value: it is truncated or damaged",
            at,
            got=f"{self.size_bytes} bytes in all",
            remedy="save or copy it again",
        )

    def varint(self, at: int, end: int) -> tuple[int, int]:
        """Return the unsigned varint at `at`, which must end before `end`, and the offset after it."""
        first = at - self._base
        if 0 <= first < len(self._window) and at < end:
            byte = self._window[first]
            if byte < 0x80:
                return byte, at + 1
        chunk = self.read(at, min(10, end - at)) if at < end else b""
        try:
            number, length_bytes = protobuf.varint(chunk, 0)
        except protobuf.CutShortError:
            raise self._overrun(at, end) from None
        except protobuf.WireError:
            raise self.damage(
                "a number in a shard's structure has more than 64 bits: the shard is damaged", at
            ) from None
        return number, at + length_bytes

    def field(self, at: int, end: int) -> Field:
        """Return the field whose key is at byte `at`, in a message that ends at `end`, which is after `at`."""
        # Keys and short lengths are one byte and in the window; taken from there, a file is walked twice as fast.
        window, base = self._window, self._base
        first = at - base
        if 0 <= first < len(window) and window[first] < 0x80:
            key, start = window[first], at + 1
        else:
            key, start = self.varint(at, end)
        number, wire_type = key >> 3, key & 7
        if number == 0 or key >> 32:
            raise self.damage("a field number in a shard's structure is impossible: the shard is damaged", at)
        value = 0
        if wire_type == LENGTH:
            first = start - base
            if start < end and 0 <= first < len(window) and window[first] < 0x80:
                value, start = window[first], start + 1
            else:
                value, start = self.varint(start, end)
            stop = start + value
        elif wire_type == VARINT:
            value, stop = self.varint(start, end)
        elif wire_type in FIXED_BYTES:
            stop = start + FIXED_BYTES[wire_type]
        else:
            raise self.damage(
                "a field in a shard's structure has an impossible type: the shard is damaged",
                at,
                expected="wire type 0, 1, 2 or 5",
                got=str(wire_type),
            )
        if stop > end:
            raise self._overrun(at, end)
        return Field(at, number, wire_type, value, start, stop)

    def fields(self, start: int, end: int) -> Iterator[Field]:
        """Yield the fields of the message in the bytes from `start` to `end`."""
        at = start
        while at < end:
            field = self.field(at, end)
            self._fields += 1
            if self._fields > _MAX_FIELDS:
                raise self.damage("a shard's structure has too many fields", at, expected=f"{_MAX_FIELDS} at most")
            yield field
            at = field.end

    def varints(self, start: int, end: int) -> Iterator[int]:
        """Yield the varints that fill the bytes from `start` to `end` (a packed repeated field)."""
        while start < end:
            number, start = self.varint(start, end)
            yield number

    def _overrun(self, at: int, end: int) -> ShardError:
        if end == self.size_bytes:
            return self.cut_short(at)
        return self.damage(
            "a field runs past the end of the message it is in: the shard is damaged", at, expected=f"its end by {end}"
        )

    def _pread(self, at: int, length_bytes: int) -> bytes:
        try:
            return os.pread(self._fd, length_bytes, at)
        except OSError as error:
            raise self.damage("a shard cannot be read", at, got=str(error)) from error
