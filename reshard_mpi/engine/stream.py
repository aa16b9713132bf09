"""A tensor's bytes as one stream, in however many ranges of files they are."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate

from reshard_mpi.engine.files import ByteRuns, Files
from reshard_mpi.formats.places import ByteRange, Segments
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.strides import Runs


class Stream:
    """Maps offsets in a tensor's row-major bytes to ranges of files."""

    __slots__ = ("_ranges", "_starts")

    def __init__(self, segments: Segments) -> None:
        self._ranges = tuple(part for part in segments.ranges if part.length_bytes)
        self._starts = (0, *accumulate(part.length_bytes for part in self._ranges))

    def within(self, span: tuple[int, int] | None) -> tuple[int, int]:
        """Return the first byte of the stream that lies in a span of the file, and the one after the last.

        span: first byte and end; None: all of the file. All ranges must be in that one file, ascending.
        """
        if span is None:
            return 0, self._starts[-1]
        inside = [
            (start + max(span[0] - part.offset_bytes, 0), start + min(span[1] - part.offset_bytes, part.length_bytes))
            for part, start in zip(self._ranges, self._starts)
            if part.offset_bytes < span[1] and part.offset_bytes + part.length_bytes > span[0]
        ]
        return (inside[0][0], inside[-1][1]) if inside else (0, 0)

    def one_part(self, offset_bytes: int, length_bytes: int) -> ByteRange | None:
        """Return the file range of `length_bytes` bytes from `offset_bytes` on; None if they are in several ranges."""
        number = bisect_right(self._starts, offset_bytes) - 1
        if not length_bytes or offset_bytes + length_bytes > self._starts[number + 1]:
            return None
        part = self._ranges[number]
        return ByteRange(part.path, part.offset_bytes + offset_bytes - self._starts[number], length_bytes)

    def parts(self, offset_bytes: int, length_bytes: int) -> Iterator[ByteRange]:
        """Yield the file ranges of `length_bytes` bytes from `offset_bytes` on."""
        number = bisect_right(self._starts, offset_bytes) - 1
        while length_bytes > 0:
            part = self._ranges[number]
            skip = offset_bytes - self._starts[number]
            count = min(length_bytes, part.length_bytes - skip)
            yield ByteRange(part.path, part.offset_bytes + skip, count)
            offset_bytes += count
            length_bytes -= count
            number += 1


def byte_runs(runs: Runs, itemsize: int, source: Stream, target: Stream, span: tuple[int, int]) -> Iterator[ByteRuns]:
    """Yield `runs` of elements as runs of bytes in files.

    itemsize: of an element, in bytes. span: only what lies between these bytes of the target stream.
    """
    length, source_step, target_step = runs.length * itemsize, runs.source_step * itemsize, runs.target_step * itemsize
    source_start, target_start = runs.source_offset * itemsize, runs.target_offset * itemsize
    target_bytes = (runs.repeats - 1) * target_step + length
    if target_start >= span[1] or target_start + target_bytes <= span[0]:
        return
    if span[0] <= target_start and target_start + target_bytes <= span[1]:
        read = source.one_part(source_start, (runs.repeats - 1) * source_step + length)
        written = target.one_part(target_start, target_bytes)
        if read and written:
            yield ByteRuns(
                source=read.path,
                source_offset=read.offset_bytes,
                source_step=source_step,
                target=written.path,
                target_offset=written.offset_bytes,
                target_step=target_step,
                length_bytes=length,
                repeats=runs.repeats,
            )
            return
    if runs.repeats > 1:
        for half in _halves(runs):
            yield from byte_runs(half, itemsize, source, target, span)
        return
    skipped, end = max(span[0] - target_start, 0), min(span[1] - target_start, length)
    target_offset = target_start + skipped
    for read in source.parts(source_start + skipped, end - skipped):
        read_offset = read.offset_bytes
        for written in target.parts(target_offset, read.length_bytes):
            yield ByteRuns(read.path, read_offset, 0, written.path, written.offset_bytes, 0, written.length_bytes, 1)
            read_offset += written.length_bytes
        target_offset += read.length_bytes


def element_blocks(files: Files, box: Box, span: tuple[int, int], itemsize: int, limit: int) -> Iterator[Box]:
    """Yield blocks of at most `limit` elements that cover the bytes `span` of a tensor's row-major order.

    An element that begins before the span is a block by itself, and if it turns out too large it is not counted: that
    is done where its first byte is written.
    """
    first, last = span[0] // itemsize, -(-span[1] // itemsize)
    if span[0] % itemsize:
        too_large = files.traffic.too_large
        yield from box.blocks(1, first, first + 1)
        files.traffic.too_large = too_large
        first += 1
    yield from box.blocks(limit, first, last)


def _halves(runs: Runs) -> tuple[Runs, Runs]:
    first = runs.repeats // 2
    second = runs._replace(
        source_offset=runs.source_offset + first * runs.source_step,
        target_offset=runs.target_offset + first * runs.target_step,
        repeats=runs.repeats - first,
    )
    return runs._replace(repeats=first), second
