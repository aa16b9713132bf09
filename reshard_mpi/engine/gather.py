"""Brings a region of a source tensor into an array: read where it is one run, gathered from a mapped window if not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from reshard_mpi.engine.files import Files, unreadable
from reshard_mpi.engine.stream import Stream
from reshard_mpi.formats.dtypes import DType
from reshard_mpi.formats.manifest import ByteRange, Decoded
from reshard_mpi.planning.model import Copy, Limits
from reshard_mpi.sharding.box import Box

Array = np.ndarray[Any, np.dtype[Any]]

_UNSIGNED: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("u2"), 4: np.dtype("u4"), 8: np.dtype("u8")}


def raw_dtype(dtype: DType) -> np.dtype[Any]:
    """Return a numpy dtype of the element's size in which copying never looks at values."""
    return _UNSIGNED.get(dtype.itemsize_bytes) or np.dtype((np.void, dtype.itemsize_bytes))


def gather(files: Files, copy: Copy, region: Box, out: Array, out_box: Box, limits: Limits) -> None:
    """Fill what `out` has of `region` from the copy's source.

    out: a C-contiguous array of raw elements that holds `out_box`. `region` must lie in it and in the copy's region.
    At most `limits.window_bytes` of the source are mapped at a time.
    """
    source = copy.source.source
    view = region_view(out, region, out_box)
    if isinstance(source, Decoded):
        _decode(files, copy, source, region, view, limits)
        return
    itemsize = out.dtype.itemsize
    flat = memoryview(out.reshape(-1).view(np.uint8).data)
    strides = _strides(copy.source.shape, itemsize)
    for part, ranges in _readable(Stream(source), region, copy.source_box, out_box, itemsize, limits.window_bytes):
        if _is_one_run(part, copy.source_box, out_box):
            at = out_box.offset_of(part) * itemsize
            for byte_range in ranges:
                files.read_into(byte_range, flat[at : at + byte_range.length_bytes])
                at += byte_range.length_bytes
        else:
            with files.window(ranges[0], part.size * itemsize) as window:
                held: Array = np.ndarray(part.shape, out.dtype, window, strides=strides)
                region_view(out, part, out_box)[...] = held
                del held  # a window with views into it cannot be unmapped
    if source.swapped:
        _swap(view, copy.source.dtype)


def gather_into(files: Files, copy: Copy, region: Box, block: Box, buffer: memoryview, limits: Limits) -> None:
    """Fill what `buffer`, which holds the elements of `block`, has of `region` from the copy's source."""
    dtype = raw_dtype(copy.source.dtype)
    gather(files, copy, region, np.frombuffer(buffer, dtype).reshape(block.shape), block, limits)


def region_view(array: Array, region: Box, box: Box) -> Array:
    """Return the part of `array`, which holds `box`, that is `region`."""
    if not region.ndim:
        return array
    local = region.relative_to(box)
    view: Array = array[tuple(slice(low, high) for low, high in zip(local.start, local.stop))]
    return view


def _readable(
    stream: Stream, part: Box, held: Box, out_box: Box, itemsize: int, window_bytes: int
) -> Iterator[tuple[Box, tuple[ByteRange, ...]]]:
    """Cut `part` until each piece is one run, or lies in one file range that a window holds; row-major order."""
    if part.size == 0:
        return
    span_bytes = held.span_of(part) * itemsize
    one_run = _is_one_run(part, held, out_box)
    if one_run or span_bytes <= window_bytes:
        ranges = tuple(stream.parts(held.offset_of(part) * itemsize, span_bytes))
        if one_run or len(ranges) == 1:
            yield part, ranges
            return
    for half in _halves(part):
        yield from _readable(stream, half, held, out_box, itemsize, window_bytes)


def _is_one_run(part: Box, held: Box, out_box: Box) -> bool:
    return held.span_of(part) == part.size and out_box.span_of(part) == part.size


def _halves(part: Box) -> tuple[Box, Box]:
    dim = next(dim for dim, length in enumerate(part.shape) if length > 1)
    middle = (part.start[dim] + part.stop[dim]) // 2
    return (
        Box(part.start, (*part.stop[:dim], middle, *part.stop[dim + 1 :])),
        Box((*part.start[:dim], middle, *part.start[dim + 1 :]), part.stop),
    )


def _decode(files: Files, copy: Copy, source: Decoded, region: Box, view: Array, limits: Limits) -> None:
    """Read through the format's library, in blocks of whole chunks along the first dimension where they fit."""
    itemsize = copy.source.dtype.itemsize_bytes
    local = region.relative_to(copy.source_box)
    if not local.ndim:
        view[...] = _read(source, local).view(view.dtype)
        files.traffic.requested_bytes += itemsize
        return
    row_bytes = itemsize * math.prod(local.shape[1:])
    chunk = max(1, source.chunk[0])
    step = max(chunk, limits.buffer_bytes // max(1, row_bytes) // chunk * chunk)
    first = local.start[0]
    while first < local.stop[0]:
        last = min(local.stop[0], (first // step + 1) * step)
        block = Box((first, *local.start[1:]), (last, *local.stop[1:]))
        view[first - local.start[0] : last - local.start[0]] = _read(source, block).view(view.dtype)
        files.traffic.requested_bytes += block.size * itemsize
        first = last


def _read(source: Decoded, box: Box) -> Array:
    try:
        return source.read(box)
    except OSError as error:
        raise unreadable(source.path, error) from error


def _swap(view: Array, dtype: DType) -> None:
    if dtype.part_bytes == dtype.itemsize_bytes:
        view.byteswap(inplace=True)
    else:
        parts = view if view.ndim else view.reshape(1)
        parts.view(_UNSIGNED[dtype.part_bytes]).byteswap(inplace=True)


def _strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = [itemsize]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * length)
    return tuple(reversed(strides[: len(shape)]))
