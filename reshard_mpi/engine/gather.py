"""Read regions of many runs into numpy arrays, also decoded, converted or joined (`gather`).

What a library decodes, or what is converted to another type or joined, is read a part at a time and then put in its
place.

Elements are added one tensor after another, beginning with 0.0, in float32, or in float64 where that is their type; a
mean is divided in that type as well; the result is rounded once to the type of the elements. So it depends on nothing
but the tensors and their order. In a mean, an element that is the same in all tensors, bit for bit, stays as it is if
`keeps_equal`. A result that is no number is the same NaN, whatever the NaNs were.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from reshard_mpi.engine.elements import (
    Array,
    assign,
    convert_elements,
    put,
    raw_dtype,
    require_tiny_numbers,
    source_view,
    strides_alone,
    swap,
    target_view,
)
from reshard_mpi.engine.open_files import Files, unreadable
from reshard_mpi.engine.read import Stream, with_space
from reshard_mpi.formats.dtypes import BY_NAME, DType, to_numpy
from reshard_mpi.formats.locations import ByteRange, Constant, Converted, Dequantized, LibraryRead, Reduced
from reshard_mpi.formats.tensor_table import TensorType
from reshard_mpi.planning.rank_plan import Limits, ReadItem, meeting
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.strides import Strides
from reshard_mpi.text import KIB, MIB

_FLOAT64, _FLOAT32 = BY_NAME["float64"], BY_NAME["float32"]


class Reduction:
    """The sum or the mean of as many tensors as are added. dtype: of their elements, one of `dtypes.FLOATS`.

    Attributes:
        size: how many elements each has.

    Raises ReshardError if this thread takes tiny numbers for zero.
    """

    def __init__(self, dtype: DType, size: int, *, is_mean: bool, keeps_equal: bool = True) -> None:
        require_tiny_numbers()
        self._dtype, self._is_mean, self._keeps_equal = dtype, is_mean, is_mean and keeps_equal
        self._wide = _FLOAT64 if dtype == _FLOAT64 else _FLOAT32
        self._total: Array = np.zeros(size, to_numpy(self._wide))
        self._count = 0
        self._first: Array | None = None
        self._is_same: Array = np.ones(size, np.bool_)  # as in all tensors that were added, bit for bit
        self._had_infinity: Array = np.zeros(size, np.bool_)

    def add(self, elements: Array) -> None:
        """Add a tensor. elements: contiguous, of unsigned integers that are as wide as its type."""
        values = self._widened(elements)
        with np.errstate(all="ignore"):
            self._total += values
        self._had_infinity |= np.isinf(values)
        if self._keeps_equal and self._first is None:
            self._first = elements.copy()
        elif self._first is not None:
            self._is_same &= elements == self._first
        self._count += 1

    def joined(self) -> tuple[Array, int]:
        """Return the elements of the sum or mean, and how many are too large for their type although no part was."""
        total = self._total
        if self._is_mean:
            total /= total.dtype.type(self._count)
        if self._first is not None:
            total[self._is_same] = 0  # what these are is known, and not too large
        # Which NaN comes of several is up to the processor, and would depend on how elements are divided into blocks.
        total[np.isnan(total)] = np.nan
        overflowed = np.isinf(total) & ~self._had_infinity
        elements, too_large = total.view(raw_dtype(self._wide)), int(np.count_nonzero(overflowed))
        if self._wide != self._dtype:
            # As the largest number it is too large for the smaller type as well, and told by it.
            total[overflowed] = np.copysign(np.finfo(total.dtype).max, total[overflowed])
            rounded = np.empty(len(total), raw_dtype(self._dtype))
            too_large = convert_elements(elements, self._wide, rounded, self._dtype)
            elements = rounded
        if self._first is not None:
            elements[self._is_same] = self._first[self._is_same]
        return elements, too_large

    def _widened(self, elements: Array) -> Array:
        wide = elements
        if self._wide != self._dtype:
            wide = np.empty(len(elements), raw_dtype(self._wide))
            convert_elements(elements, self._dtype, wide, self._wide)
        return wide.view(self._total.dtype)


# If axes change places, runs of the source are read one by one, unless they are too short.
_MIN_RUN_BYTES = 1024
# Long runs that go straight to their places are read one by one as well, if the region spans this many times its size.
_MIN_RUN_APART_BYTES, _FAR_APART = 4096, 2
# Reading as much as this takes about as long as a call.
_WIDE_GAP_BYTES = 8192
# The bytes taken at a time to be converted, and to be joined.
_CONVERTED_BYTES, _JOINED_BYTES = 4 * MIB, 2 * MIB
# Where one range of a file becomes one run, this much is read at a time: it stays in the processor's second cache.
_READ_TO_CONVERT_BYTES = 256 * KIB


def gather(files: Files, item: ReadItem, out: Array, out_box: Box, limits: Limits) -> None:
    """Read the source of an item into its target region of an array.

    Args:
        out: a C-contiguous array of raw elements (see `raw_dtype`) that holds `out_box`, in which the item's target
            region must lie. At most `limits.window_bytes` of the source are mapped at a time.

    Raises ShardError if the source cannot be read.
    """
    source = item.source.source
    if not item.region.size:
        return
    if isinstance(source, Constant):
        target_view(out, item.strides(out_box))[...] = np.frombuffer(source.element, out.dtype)[0]
        return
    if isinstance(source, LibraryRead | Reduced | Dequantized):
        for part, elements in _read_whole(files, item, source, limits):
            put(elements.view(out.dtype).reshape(-1), part, out, out_box)
        return
    places = item.strides(out_box)
    if places.is_transposed and _is_in_long_runs(item):
        _gather_turned(files, item, out, out_box, limits)
        return
    if isinstance(source, Converted):
        _gather_converted(files, item, source, out, out_box, limits)
        return
    stored = item.source.stored
    assert stored is not None
    if _is_read_singly(places, out.itemsize) or (files.is_sparing and _is_sparse(places, out.itemsize)):
        _read_runs(files, Stream(stored), places, memoryview(out.reshape(-1).view(np.uint8).data), out.itemsize)
    else:
        _gather_windows(files, Stream(stored), item, out, out_box, limits)
    if source.swapped:
        swap(out, places, item.source.dtype)


def _gather_windows(files: Files, stream: Stream, item: ReadItem, out: Array, out_box: Box, limits: Limits) -> None:
    """Read an item from windows, or straight where it is one run."""
    itemsize = out.dtype.itemsize
    flat = memoryview(out.reshape(-1).view(np.uint8).data)
    for strides, ranges in _readable(stream, item, out_box, itemsize, limits.window_bytes):
        if strides.run_length == strides.size:
            files.read_all(ranges, flat[strides.target_offset * itemsize :])
        else:
            with files.window(ranges[0], min(strides.size * itemsize, ranges[0].length_bytes)) as window:
                assign(target_view(out, strides), source_view(window, out.dtype, strides))


def gather_into(files: Files, item: ReadItem, block: Box, buffer: memoryview, limits: Limits) -> None:
    """Read the source of an item into its target region of `buffer`, which holds the elements of `block`, row-major."""
    array = np.frombuffer(buffer, raw_dtype(item.source.dtype), block.size).reshape(block.shape)
    gather(files, item, array, block, limits)


def _is_in_long_runs(item: ReadItem) -> bool:
    """Tell whether a region's runs in the source are long enough to be read one by one, and its axes turned then."""
    entry, part = item.source.unconverted, _InStoredOrder.of(item)
    if entry.stored is None:
        return False
    region = part.turned.region
    own = Strides.between(region, part.turned.source_box, region, region, steps=part.steps)
    return own.run_length * entry.dtype.itemsize_bytes >= _MIN_RUN_BYTES


def _is_read_singly(places: Strides, itemsize: int) -> bool:
    """Tell whether long runs follow one another, or lie too far apart for mapping the gaps to pay."""
    if places.run_length * itemsize < _MIN_RUN_APART_BYTES:
        return False
    return places.is_in_source_order or places.source_span >= _FAR_APART * places.size


def _is_sparse(places: Strides, itemsize: int) -> bool:
    """Tell whether runs are so long, or so far apart, that reading what lies between them costs more than a call."""
    gaps = places.size // places.run_length - 1
    gap_bytes = (places.source_span - places.size) * itemsize // max(1, gaps)
    return gap_bytes >= _WIDE_GAP_BYTES or places.run_length * itemsize >= _MIN_RUN_APART_BYTES


def _gather_turned(files: Files, item: ReadItem, out: Array, out_box: Box, limits: Limits) -> None:
    """Read an item in the order in which its elements lie, a part at a time, and then turn its axes."""
    part, itemsize = _InStoredOrder.of(item), out.itemsize
    for block in part.turned.region.blocks(max(1, limits.window_bytes // 2 // itemsize)):
        spaced = with_space(block, itemsize)
        content = np.frombuffer(files.scratch(spaced.size * itemsize), out.dtype)
        array = content.reshape(spaced.shape)
        gather(files, part.alone(block), array, spaced, limits)
        turned = part.turned.taking(block)
        strides = Strides.between(block, spaced, turned.target_region, out_box, turned.order)
        assign(target_view(out, strides), source_view(content[strides.source_offset :].data, out.dtype, strides))


def _read_runs(files: Files, stream: Stream, strides: Strides, content: memoryview, itemsize: int) -> None:
    """Read runs one by one to their places in `content`."""
    for runs in strides.runs(itemsize):
        places = runs.places_in(content)
        part = stream.one_part(runs.source_offset, runs.source_span)
        if part is not None and runs.source_step == runs.length:
            files.read_scattered(part, places)
        elif part is not None:
            files.read_each(part.path, part.offset_bytes, runs.source_step, places)
        else:
            for (offset, _), place in zip(runs.offsets(), places):
                files.read_all(stream.parts(offset, runs.length), place)


def _readable(
    stream: Stream, item: ReadItem, out_box: Box, itemsize: int, window_bytes: int
) -> Iterator[tuple[Strides, tuple[ByteRange, ...]]]:
    """Yield the parts of an item, cut until each is one run or lies in one file range that fits a window.

    Each comes with its strides and file ranges, in the order of the source.
    """
    strides = item.strides(out_box)
    span_bytes = strides.source_span * itemsize
    one_run = strides.run_length == strides.size
    if one_run or span_bytes <= window_bytes:
        ranges = tuple(stream.parts(strides.source_offset * itemsize, span_bytes))
        if one_run or len(ranges) == 1:
            yield strides, ranges
            return
    for half in item.halves():
        yield from _readable(stream, half, out_box, itemsize, window_bytes)


def _decoded(files: Files, item: ReadItem, source: LibraryRead, limits: Limits) -> Iterator[tuple[ReadItem, Array]]:
    """Read an item through the format's library; yield blocks of whole chunks along the first dimension."""
    for part in _decodable(item, source, limits):
        local = part.region.relative_to(part.source_box)
        try:
            elements = source.read(local)
        except OSError as error:
            raise unreadable(source.path, error) from error
        yield part, elements
        files.traffic.requested_bytes += local.size * item.source.dtype.itemsize_bytes


def _decodable(item: ReadItem, source: LibraryRead, limits: Limits) -> Iterator[ReadItem]:
    """Yield the parts of an item, cut between chunks along the source's first dimension to decode little at once."""
    local = item.region.relative_to(item.source_box)
    if not local.ndim or local.shape[0] < 2:
        yield item
        return
    row_bytes = item.source.dtype.itemsize_bytes * math.prod(local.shape[1:])
    chunk = max(1, source.chunk[0])
    step = max(chunk, limits.buffer_bytes // max(1, row_bytes) // chunk * chunk)
    first = local.start[0]
    while first < local.stop[0]:
        last = min(local.stop[0], (first // step + 1) * step)
        yield item.rows(first - local.start[0], last - local.start[0])
        first = last


def _joined(files: Files, item: ReadItem, source: Reduced, limits: Limits) -> Iterator[tuple[ReadItem, Array]]:
    """Read the tensors whose sum or mean an item is; yield its parts, with the row-major elements of their regions."""
    dtype = item.source.dtype
    chunked = [place for place in source.places if isinstance(place, LibraryRead)]
    if chunked:
        parts = _decodable(item, max(chunked, key=lambda place: place.chunk[:1]), limits)
    else:
        most_elements = max(1, _JOINED_BYTES // dtype.itemsize_bytes)
        parts = (item.taking(block) for block in item.region.blocks(most_elements))
    for part in parts:
        joining = Reduction(dtype, part.region.size, is_mean=source.is_mean, keeps_equal=source.keeps_equal)
        content = np.empty(part.region.shape, raw_dtype(dtype))
        for place in source.places:
            alone = part._replace(source=part.source._replace(source=place), to=None, order=None)
            gather(files, alone, content, part.region, limits)
            joining.add(content.reshape(-1))
        elements, too_large = joining.joined()
        files.traffic.too_large += too_large
        yield part, elements


def _dequantized(files: Files, item: ReadItem, source: Dequantized, limits: Limits) -> Iterator[tuple[ReadItem, Array]]:
    """Compute an item of a quantized weight; yield its parts, with their elements."""
    from reshard_mpi.engine.dequantize import dequantized

    kinds = {name: TensorType(own.spec.dtype, own.spec.box.shape) for name, own in source.stored.items()}

    def read(name: str, box: Box) -> Array:
        elements = np.empty(box.shape, raw_dtype(kinds[name].dtype))
        for part in meeting(source.stored[name].reads, box):
            gather(files, part, elements, box, limits)
        return elements

    for block in item.region.blocks(max(1, _CONVERTED_BYTES // _FLOAT32.itemsize_bytes)):
        part = item.taking(block)
        yield part, dequantized(source.weight, part.region, kinds, read)


def _gather_converted(
    files: Files, item: ReadItem, source: Converted, out: Array, out_box: Box, limits: Limits
) -> None:
    """Convert an item part by part, in the order in which it lies, and put each part in its place."""
    dtype, stored = item.source.dtype, source.dtype
    most_elements = max(1, _CONVERTED_BYTES // max(dtype.itemsize_bytes, stored.itemsize_bytes))
    most_elements = min(most_elements, item.region.size)
    unconverted = item._replace(source=item.source._replace(dtype=stored, source=source.place))
    scratch, flat = np.empty(most_elements, out.dtype), out.reshape(-1)

    def put_converted(part: ReadItem, elements: Array) -> None:
        converted = _one_run(part, out_box, flat)
        place = scratch[: len(elements)] if converted is None else converted
        files.traffic.too_large += convert_elements(elements, stored, place, dtype)
        if converted is None:
            put(place, part, out, out_box)

    if isinstance(source.place, LibraryRead | Reduced | Dequantized):
        for part, read in _read_whole(files, unconverted, source.place, limits):
            elements, done = read.view(raw_dtype(stored)).reshape(-1), 0
            for block in part.region.blocks(most_elements):
                put_converted(part.taking(block), elements[done : done + block.size])
                done += block.size
        return
    as_stored, raw = _InStoredOrder.of(unconverted), raw_dtype(stored)
    few = np.empty(min(most_elements, max(1, _READ_TO_CONVERT_BYTES // raw.itemsize)), raw)
    for block in as_stored.turned.region.blocks(most_elements):
        alone, part = as_stored.alone(block), as_stored.turned.taking(block)
        stored_range, converted = _one_range(alone, block), _one_run(part, out_box, flat)
        if stored_range is not None and converted is not None:
            _convert_range(files, stored_range, stored, few, converted, dtype)
        else:
            elements = np.empty(block.shape, raw)
            gather(files, alone, elements, block, limits)
            put_converted(part, elements.reshape(-1))


def _one_run(part: ReadItem, out_box: Box, flat: Array) -> Array | None:
    """Return the elements of `flat`, which holds `out_box`, that an item goes to; None if they are several runs."""
    strides = strides_alone(part, out_box)
    if strides.run_length != strides.size:
        return None
    return flat[strides.target_offset : strides.target_offset + strides.size]


def _one_range(item: ReadItem, block: Box) -> ByteRange | None:
    """Return where an item to `block` is stored if that is one range of a file in the block's order; else None."""
    stored, strides = item.source.stored, item.strides(block)
    if stored is None or stored.swapped or not strides.run_length == strides.size == block.size:
        return None
    itemsize = item.source.dtype.itemsize_bytes
    return Stream(stored).one_part(strides.source_offset * itemsize, block.size * itemsize)


def _convert_range(files: Files, part: ByteRange, stored: DType, elements: Array, out: Array, dtype: DType) -> None:
    """Convert the elements in a range of a file into `out`. elements: how many are read at a time."""
    files.advise(part)
    for first in range(0, len(out), len(elements)):
        converted = out[first : first + len(elements)]
        read = elements[: len(converted)]
        place = ByteRange(part.path, part.offset_bytes + first * elements.itemsize, read.nbytes)
        files.read_into(place, read.view(np.uint8).data)
        files.traffic.too_large += convert_elements(read, stored, converted, dtype)


def _read_whole(
    files: Files, item: ReadItem, source: LibraryRead | Reduced | Dequantized, limits: Limits
) -> Iterator[tuple[ReadItem, Array]]:
    """Read an item of what can be read in no other order than its own; yield its parts, with their elements."""
    if isinstance(source, LibraryRead):
        return _decoded(files, item, source, limits)
    if isinstance(source, Dequantized):
        return _dequantized(files, item, source, limits)
    return _joined(files, item, source, limits)


class _InStoredOrder(NamedTuple):
    """An item whose source has its axes in the order in which elements lie: those farthest apart come first."""

    item: ReadItem  # the item as it was
    axes: tuple[int, ...]  # of its source, in that order
    turned: ReadItem  # the item with its regions so turned, which is good for nothing but to tell where its parts go
    steps: tuple[int, ...] | None  # along the turned axes; None: it is row-major

    @classmethod
    def of(cls, item: ReadItem) -> _InStoredOrder:
        steps, axes = item.source.steps, tuple(range(item.region.ndim))
        if steps is not None:
            axes = tuple(sorted(axes, key=lambda axis: -steps[axis] if steps[axis] else -math.inf))
        turned = item._replace(
            source_box=_turned(item.source_box, axes),
            region=_turned(item.region, axes),
            to=item.target_region,
            order=tuple(axes.index(dim) for dim in item.order or range(item.region.ndim)),
        )
        return cls(item, axes, turned, None if steps is None else tuple(steps[axis] for axis in axes))

    def alone(self, block: Box) -> ReadItem:
        """Return the item of a part of the turned region to the same place of an array with turned axes."""
        inverse = tuple(self.axes.index(dim) for dim in range(len(self.axes)))
        return self.item._replace(region=_turned(block, inverse), to=block, order=self.axes)


def _turned(box: Box, axes: tuple[int, ...]) -> Box:
    return Box(tuple(box.start[axis] for axis in axes), tuple(box.stop[axis] for axis in axes))
