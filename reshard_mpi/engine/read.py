"""Read one region into a buffer (`fill`): choose how, and read few runs; many are read by `engine/gather`.

Short runs that follow one another in the source are read straight to their places (`Scatter`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from itertools import accumulate

from reshard_mpi.engine.open_files import ByteRuns, Files
from reshard_mpi.formats.locations import ByteRange, ByteRanges, LibraryRead, Location, Span, StridedView
from reshard_mpi.formats.tensor_table import TensorEntry
from reshard_mpi.planning.rank_plan import Limits, ReadItem, TensorPlan, meeting
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.strides import Runs, Strides
from reshard_mpi.text import KIB, MIB


class Stream:
    """Maps offsets in a tensor's row-major bytes to ranges of files."""

    __slots__ = ("_ranges", "_starts")

    def __init__(self, segments: ByteRanges) -> None:
        self._ranges = tuple(part for part in segments.ranges if part.length_bytes)
        self._starts = (0, *accumulate(part.length_bytes for part in self._ranges))

    def within(self, span: Span | None) -> Span:
        """Return the first byte of the stream that lies in a span of the file, and the one after the last.

        Args:
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


def byte_runs(runs: Runs, source: Stream, target: Stream, span: Span) -> Iterator[ByteRuns]:
    """Yield `runs` as they lie in files. span: only what lies between these bytes of the target stream."""
    first, last = max(span[0], runs.target_offset), min(span[1], runs.target_offset + runs.target_span)
    if first >= last:
        return
    if last - first == runs.target_span:
        read = source.one_part(runs.source_offset, runs.source_span)
        written = target.one_part(runs.target_offset, runs.target_span)
        if read and written:
            in_files = runs._replace(source_offset=read.offset_bytes, target_offset=written.offset_bytes)
            yield ByteRuns(read.path, written.path, in_files)
            return
    if runs.repeats > 1:
        for half in _halves(runs):
            yield from byte_runs(half, source, target, span)
        return
    for read in source.parts(runs.source_offset + first - runs.target_offset, last - first):
        read_offset = read.offset_bytes
        for written in target.parts(first, read.length_bytes):
            run = Runs(read_offset, written.offset_bytes, written.length_bytes)
            yield ByteRuns(read.path, written.path, run)
            read_offset += written.length_bytes
        first += read.length_bytes


def element_blocks(files: Files, box: Box, span: Span, itemsize: int, limit: int) -> Iterator[Box]:
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


# Extra distance between rows of an array whose axes change places. Without it, the elements of a column would all fall
# on a few lines of the processor's cache where rows are as long as a power of two.
_SPACE_BYTES = 64
# How much of the next tensor is read ahead at most and at least, and how many times what is needed that may be.
_READ_AHEAD_BYTES = 32 * MIB
_MIN_READ_AHEAD_BYTES = 128 * KIB
_READ_AHEAD_OVER = 2
# File systems that share blocks do so between multiples of this.
_BLOCK_BYTES = 4096
# Up to this number, runs are read one by one, straight to their places; more are gathered by numpy from a mapped
# window.
_FEW_RUNS = 32


def takes_numpy(item: ReadItem, place: Box, buffer_bytes: int) -> bool:
    """Tell whether numpy may be needed to read an item into blocks of box `place`, each of `buffer_bytes` at most."""
    if not item.source.is_as_stored:
        return True
    length = item.strides(place).run_length
    length_bytes = length * item.source.dtype.itemsize_bytes
    # A block may begin and end within a run.
    return item.region.size > _FEW_RUNS * length and buffer_bytes > (_FEW_RUNS - 2) * length_bytes


def fill(files: Files, item: ReadItem, block: Box, buffer: memoryview, limits: Limits) -> None:
    """Read the source of an item into its target region of `buffer`, which holds the elements of `block`, row-major.

    All of the item's target region must lie in `block`. Raises ShardError if the source cannot be read.
    """
    strides = item.strides(block)
    stored = item.source.stored
    if stored is not None and not stored.swapped and strides.size <= _FEW_RUNS * strides.run_length:
        stream = Stream(stored)
        for runs in strides.runs(item.source.dtype.itemsize_bytes):
            for source_offset, target_offset in runs.offsets():
                files.read_all(stream.parts(source_offset, runs.length), buffer[target_offset:])
        return
    from reshard_mpi.engine.gather import gather_into

    gather_into(files, item, block, buffer, limits)


# Blocks of a tensor, and tensors of one shape, have the same places for their runs, so the last few are kept.
_KEPT_PLACES = 8


class Scatter:
    """Fills blocks of target tensors from items whose elements are in the same order in source and target."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._places: OrderedDict[tuple[int, Runs], list[memoryview]] = OrderedDict()

    def fill(self, item: ReadItem, block: Box, buffer: memoryview) -> None:
        """Read an item's source into its target region of `buffer`, which holds the elements of `block`, row-major.

        The item must be one run in its source. Raises ShardError if the source cannot be read.
        """
        stored = item.source.stored
        assert stored is not None
        stream = Stream(stored)
        for runs in item.strides(block).runs(item.source.dtype.itemsize_bytes):
            part = stream.one_part(runs.source_offset, runs.source_span)
            places = self._places_of(runs, buffer)
            if part is not None:
                self._files.read_scattered(part, places)
                continue
            for (offset, _), place in zip(runs.offsets(), places):
                self._files.read_all(stream.parts(offset, runs.length), place)

    def _places_of(self, runs: Runs, buffer: memoryview) -> list[memoryview]:
        """Return the places of the runs in a buffer."""
        key = (id(buffer.obj), runs._replace(source_offset=0))
        places = self._places.get(key)
        if places is None:
            places = self._places[key] = runs.places_in(buffer)
            while len(self._places) > _KEPT_PLACES:
                self._places.popitem(last=False)
        return places


def read_ahead(files: Files, tensor: TensorPlan, place: TensorEntry) -> None:
    """Have the kernel read the beginning of a tensor's sources ahead, while the tensor before it is moved.

    Sources whose blocks the target file may share are left out, since these are never read.
    """
    for item in tensor.reads:
        entry, region = item.source.unconverted, item.region
        source, itemsize = entry.source, entry.dtype.itemsize_bytes
        if (
            region.size * itemsize < _MIN_READ_AHEAD_BYTES
            or not isinstance(source, ByteRanges)
            or (item.source.is_as_stored and _is_aligned(source) and _is_aligned(place.source))
        ):
            continue
        span = item.source_box.span_of(region)
        if span <= _READ_AHEAD_OVER * region.size:
            length_bytes = min(span * itemsize, _READ_AHEAD_BYTES // len(tensor.reads))
            for part in Stream(source).parts(item.source_box.offset_of(region) * itemsize, length_bytes):
                files.advise(part)


def _is_aligned(content: Location) -> bool:
    return isinstance(content, ByteRanges) and all(part.offset_bytes % _BLOCK_BYTES == 0 for part in content.ranges)


def read_region(files: Files, item: ReadItem, region: Box, buffer: memoryview, limits: Limits) -> None:
    """Fill `buffer` with the row-major bytes of a region of the target, which must lie in the item's target region."""
    fill(files, item.part(region), region, buffer, limits)


def element_of(files: Files, tensor: TensorPlan, index: tuple[int, ...], limits: Limits) -> bytes:
    """Return the bytes of the element at a global index."""
    box = Box(index, tuple(number + 1 for number in index))
    content = bytearray(tensor.spec.dtype.itemsize_bytes)
    fill(files, meeting(tensor.reads, box)[0], box, memoryview(content), limits)
    return bytes(content)


def only_element(files: Files, tensor: TensorPlan, limits: Limits) -> bytes:
    """Return the bytes of a tensor of one element. Raises ValueError if it has more."""
    if tensor.spec.box.size != 1:
        raise ValueError(f"{tensor.spec.name} has {tensor.spec.box.size} elements")
    return element_of(files, tensor, tensor.spec.box.start, limits)


def excerpt(files: Files, entry: TensorEntry, box: Box) -> bytes:
    """Return the bytes of `box`, a run of the row-major elements that a shard holds, in this machine's byte order.

    Args:
        box: in coordinates of the part that the shard holds.

    Raises ShardError if the bytes cannot be read.
    """
    if isinstance(entry.source, LibraryRead):
        return entry.source.read(box).tobytes()
    assert isinstance(entry.source, ByteRanges | StridedView)  # since it is in a shard
    content = bytearray(box.size * entry.dtype.itemsize_bytes)
    for part, start in _parts(entry, box):
        files.read_into(part, memoryview(content)[start : start + part.length_bytes])
    if entry.source.swapped:
        width = entry.dtype.part_bytes
        for start in range(0, len(content), width):
            content[start : start + width] = content[start : start + width][::-1]
    return bytes(content)


def _parts(entry: TensorEntry, box: Box) -> Iterator[tuple[ByteRange, int]]:
    """Yield the file ranges that make up a box, each with its offset in the row-major bytes of the box."""
    stored, itemsize = entry.stored, entry.dtype.itemsize_bytes
    assert stored is not None
    if entry.steps is None and len(stored.ranges) == 1:
        path, first_byte, _ = stored.ranges[0]
        yield ByteRange(path, first_byte + Box.whole(entry.shape).offset_of(box) * itemsize, box.size * itemsize), 0
        return
    stream, start = Stream(stored), 0
    for runs in Strides.between(box, Box.whole(entry.shape), box, box, steps=entry.steps).runs(itemsize):
        for offset, _ in runs.offsets():
            for part in stream.parts(offset, runs.length):
                yield part, start
                start += part.length_bytes


def with_space(box: Box, itemsize: int) -> Box:
    """Return a box with some space behind each row, unless rows are short."""
    if not box.ndim or (box.stop[-1] - box.start[-1]) * itemsize < _SPACE_BYTES:
        return box
    return Box(box.start, (*box.stop[:-1], box.stop[-1] + max(1, _SPACE_BYTES // itemsize)))
