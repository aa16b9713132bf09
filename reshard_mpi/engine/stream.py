"""A tensor's bytes as one stream, whatever the ranges of a file they lie in."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate

from reshard_mpi.manifest import ByteRange, Segments


class Stream:
    """Maps offsets in a tensor's row-major bytes to ranges of files."""

    __slots__ = ("_ranges", "_starts")

    def __init__(self, segments: Segments) -> None:
        self._ranges = tuple(part for part in segments.ranges if part.length_bytes)
        self._starts = (0, *accumulate(part.length_bytes for part in self._ranges))

    def parts(self, offset_bytes: int, length_bytes: int) -> Iterator[ByteRange]:
        """Yield the file ranges of `length_bytes` bytes from `offset_bytes` on."""
        at = bisect_right(self._starts, offset_bytes) - 1
        while length_bytes > 0:
            part = self._ranges[at]
            skip = offset_bytes - self._starts[at]
            count = min(length_bytes, part.length_bytes - skip)
            yield ByteRange(part.path, part.offset_bytes + skip, count)
            offset_bytes += count
            length_bytes -= count
            at += 1
