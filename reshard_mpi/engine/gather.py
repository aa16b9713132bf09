"""Brings a region of a source tensor into an array: reads it if it is one run, else gathers it from a mapped window."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from reshard_mpi.engine.files import Files, unreadable
from reshard_mpi.engine.stream import Stream
from reshard_mpi.formats.dtypes import DType
from reshard_mpi.formats.places import ByteRange, Decoded
from reshard_mpi.planning.model import Copy, Limits
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.strides import Strides

Array = np.ndarray[Any, np.dtype[Any]]

# If a region spans so many times its own size in the source, its runs are read one by one, unless they are too short.
_FAR_APART = 4
_MIN_RUN_BYTES = 1024

_UNSIGNED: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("u2"), 4: np.dtype("u4"), 8: np.dtype("u8")}


def raw_dtype(dtype: DType) -> np.dtype[Any]:
    """Return a numpy dtype of the element's size that copies bits without interpreting them."""
    return _UNSIGNED.get(dtype.itemsize_bytes) or np.dtype((np.void, dtype.itemsize_bytes))


def gather(files: Files, copy: Copy, out: Array, out_box: Box, limits: Limits) -> None:
    """Read the source of a copy into its target region of an array.

    out: a C-contiguous array of raw elements (see `raw_dtype`) that holds `out_box`, in which the copy's target region
    must lie. At most `limits.window_bytes` of the source are mapped at a time. Raises ShardError if the source cannot
    be read.
    """
    source = copy.source.source
    if not copy.region.size:
        return
    if isinstance(source, Decoded):
        _decode(files, copy, source, out, out_box, limits)
        return
    itemsize = out.dtype.itemsize
    flat = memoryview(out.reshape(-1).view(np.uint8).data)
    stored = copy.source.stored
    assert stored is not None
    stream = Stream(stored)
    if _is_far_apart(copy, out_box, itemsize):
        _gather_runs(files, stream, copy, out, out_box)
        if source.swapped:
            _swap(out, copy.strides(out_box), copy.source.dtype)
        return
    for strides, ranges in _readable(stream, copy, out_box, itemsize, limits.window_bytes):
        if strides.run_length == strides.size:
            offset = strides.target_offset * itemsize
            for byte_range in ranges:
                files.read_into(byte_range, flat[offset : offset + byte_range.length_bytes])
                offset += byte_range.length_bytes
        else:
            with files.window(ranges[0], min(strides.size * itemsize, ranges[0].length_bytes)) as window:
                elements = _source_view(window, out.dtype, strides)
                _target_view(out, strides)[...] = elements
                del elements  # a window with views into it cannot be unmapped
    if source.swapped:
        _swap(out, copy.strides(out_box), copy.source.dtype)


def gather_into(files: Files, copy: Copy, block: Box, buffer: memoryview, limits: Limits) -> None:
    """Read the source of a copy into its target region of `buffer`, which holds the elements of `block`, row-major."""
    dtype = raw_dtype(copy.source.dtype)
    array = np.frombuffer(buffer, dtype, block.size).reshape(block.shape)
    gather(files, copy, array, block, limits)


def _source_view(window: memoryview, dtype: np.dtype[Any], strides: Strides) -> Array:
    """Return a view of the copied elements, in the order of the target; the first of them must begin the window."""
    shape = tuple(length for length, _, _ in strides.dimensions)
    return np.ndarray(shape, dtype, window, 0, tuple(step * dtype.itemsize for _, step, _ in strides.dimensions))


def _target_view(out: Array, strides: Strides) -> Array:
    """Return a view of the places in `out` where the copied elements go."""
    shape, itemsize = tuple(length for length, _, _ in strides.dimensions), out.dtype.itemsize
    steps = tuple(step * itemsize for _, _, step in strides.dimensions)
    return np.ndarray(shape, out.dtype, out, strides.target_offset * itemsize, steps)


def _is_far_apart(copy: Copy, out_box: Box, itemsize: int) -> bool:
    """Tell whether axes change places and the region's runs, not too short, lie far apart in the source."""
    own = copy.source_strides
    if own.source_span < _FAR_APART * copy.region.size or not copy.strides(out_box).is_turned:
        return False
    return own.run_length * itemsize >= _MIN_RUN_BYTES


def _gather_runs(files: Files, stream: Stream, copy: Copy, out: Array, out_box: Box) -> None:
    """Read the runs of a copy one by one, in the order of the source, and then put its elements in their places."""
    itemsize = out.dtype.itemsize
    content = memoryview(bytearray(copy.region.size * itemsize))
    for runs in copy.source_strides.runs():
        for number in range(runs.repeats):
            source_offset = (runs.source_offset + number * runs.source_step) * itemsize
            offset = (runs.target_offset + number * runs.target_step) * itemsize
            for part in stream.parts(source_offset, runs.length * itemsize):
                files.read_into(part, content[offset : offset + part.length_bytes])
                offset += part.length_bytes
    strides = Strides.between(copy.region, copy.region, copy.target_region, out_box, copy.order)
    _target_view(out, strides)[...] = _source_view(content, out.dtype, strides)


def _readable(
    stream: Stream, copy: Copy, out_box: Box, itemsize: int, window_bytes: int
) -> Iterator[tuple[Strides, tuple[ByteRange, ...]]]:
    """Yield the parts of a copy, cut until each is one run or lies in one file range that fits a window.

    Each comes with its strides and file ranges, in the order of the source.
    """
    strides = copy.strides(out_box)
    span_bytes = strides.source_span * itemsize
    one_run = strides.run_length == strides.size
    if one_run or span_bytes <= window_bytes:
        ranges = tuple(stream.parts(strides.source_offset * itemsize, span_bytes))
        if one_run or len(ranges) == 1:
            yield strides, ranges
            return
    for half in copy.halves():
        yield from _readable(stream, half, out_box, itemsize, window_bytes)


def _decode(files: Files, copy: Copy, source: Decoded, out: Array, out_box: Box, limits: Limits) -> None:
    """Read a copy through the format's library, in blocks of whole chunks along the first dimension."""
    itemsize = copy.source.dtype.itemsize_bytes
    for part in _decodable(copy, source, limits):
        local = part.region.relative_to(part.source_box)
        decoded = _read(source, local).view(out.dtype)
        strides = Strides.between(part.region, part.region, part.target_region, out_box, part.order)
        _target_view(out, strides)[...] = _source_view(decoded.reshape(-1).data, out.dtype, strides)
        files.traffic.requested_bytes += local.size * itemsize


def _decodable(copy: Copy, source: Decoded, limits: Limits) -> Iterator[Copy]:
    """Yield the parts of a copy, cut between chunks along the source's first dimension to decode little at once."""
    local = copy.region.relative_to(copy.source_box)
    if not local.ndim or local.shape[0] < 2:
        yield copy
        return
    row_bytes = copy.source.dtype.itemsize_bytes * math.prod(local.shape[1:])
    chunk = max(1, source.chunk[0])
    step = max(chunk, limits.buffer_bytes // max(1, row_bytes) // chunk * chunk)
    first = local.start[0]
    while first < local.stop[0]:
        last = min(local.stop[0], (first // step + 1) * step)
        yield copy.rows(first - local.start[0], last - local.start[0])
        first = last


def _read(source: Decoded, box: Box) -> Array:
    try:
        return source.read(box)
    except OSError as error:
        raise unreadable(source.path, error) from error


def _swap(out: Array, strides: Strides, dtype: DType) -> None:
    """Reverse the byte order of the copied elements in `out`; of a complex element, that of each part."""
    itemsize, width = dtype.itemsize_bytes, dtype.part_bytes
    shape = (*(length for length, _, _ in strides.dimensions), itemsize // width)
    steps = (*(step * itemsize for _, _, step in strides.dimensions), width)
    parts: Array = np.ndarray(shape, _UNSIGNED[width], out, strides.target_offset * itemsize, steps)
    parts.byteswap(inplace=True)
