"""Brings a region of a source tensor into an array: read where it is one run, gathered from a mapped window elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from reshard_mpi.box import Box
from reshard_mpi.dtypes import DType
from reshard_mpi.engine.files import Files
from reshard_mpi.engine.stream import Stream
from reshard_mpi.manifest import ByteRange, Decoded, Segments
from reshard_mpi.planning.model import Copy, Limits

Array = np.ndarray[Any, np.dtype[Any]]

_UNSIGNED = {1: np.dtype("u1"), 2: np.dtype("u2"), 4: np.dtype("u4"), 8: np.dtype("u8")}


def raw_dtype(dtype: DType) -> np.dtype[Any]:
    """Return a numpy dtype of the element's size in which copying never looks at values."""
    return _UNSIGNED.get(dtype.itemsize_bytes) or np.dtype(f"V{dtype.itemsize_bytes}")


def gather(files: Files, copy: Copy, region: Box, out: Array, limits: Limits) -> None:
    """Fill `out`, a view of raw elements of shape `region.shape`, with `region` of the copy's source.

    `region` must lie in the copy's region. At most `limits.window_bytes` of the source are mapped at a time.
    """
    source = copy.source.source
    local = region.relative_to(copy.source_box)
    held = Box.whole(copy.source.shape)
    if isinstance(source, Decoded):
        _decode(files, source, copy.source.dtype, local, out, limits)
        return
    stream = Stream(source)
    itemsize = copy.source.dtype.itemsize_bytes
    for part, ranges in _readable(stream, local, held, local, itemsize, limits.window_bytes):
        view = out[_slices(part, local)] if part.ndim else out
        if _is_one_run(part, held, local):
            target = memoryview(view.reshape(-1).view(np.uint8))
            done = 0
            for byte_range in ranges:
                files.read_into(byte_range, target[done : done + byte_range.length_bytes])
                done += byte_range.length_bytes
        else:
            with files.window(ranges[0], part.size * itemsize) as window:
                view[...] = np.ndarray(part.shape, out.dtype, window, strides=_strides(held.shape, itemsize))
    _swap(source, copy.source.dtype, out)


def _readable(
    stream: Stream, part: Box, held: Box, target: Box, itemsize: int, window_bytes: int
) -> Iterator[tuple[Box, tuple[ByteRange, ...]]]:
    """Cut `part` until each piece is one run, or lies in one file range that a window holds; row-major order."""
    if part.size == 0:
        return
    span_bytes = held.span_of(part) * itemsize
    one_run = _is_one_run(part, held, target)
    if one_run or span_bytes <= window_bytes:
        ranges = tuple(stream.parts(held.offset_of(part) * itemsize, span_bytes))
        if one_run or len(ranges) == 1:
            yield part, ranges
            return
    for half in _halves(part):
        yield from _readable(stream, half, held, target, itemsize, window_bytes)


def _is_one_run(part: Box, held: Box, target: Box) -> bool:
    return held.span_of(part) == part.size and target.span_of(part) == part.size


def _halves(part: Box) -> tuple[Box, Box]:
    dim = next(dim for dim, length in enumerate(part.shape) if length > 1)
    middle = (part.start[dim] + part.stop[dim]) // 2
    return (
        Box(part.start, (*part.stop[:dim], middle, *part.stop[dim + 1 :])),
        Box((*part.start[:dim], middle, *part.start[dim + 1 :]), part.stop),
    )


def _decode(files: Files, source: Decoded, dtype: DType, local: Box, out: Array, limits: Limits) -> None:
    """Read through the format's library, in blocks of whole chunks along the first dimension where they fit."""
    if not local.ndim:
        out[...] = source.read(local)
        files.traffic.requested_bytes += dtype.itemsize_bytes
        return
    row_bytes = dtype.itemsize_bytes
    for length in local.shape[1:]:
        row_bytes *= max(1, length)
    chunk = max(1, source.chunk[0] if source.chunk else 1)
    step = max(chunk, limits.buffer_bytes // row_bytes // chunk * chunk)
    first = local.start[0]
    while first < local.stop[0]:
        last = min(local.stop[0], (first // step + 1) * step)
        block = Box((first, *local.start[1:]), (last, *local.stop[1:]))
        out[first - local.start[0] : last - local.start[0]] = source.read(block)
        files.traffic.requested_bytes += block.size * dtype.itemsize_bytes
        first = last


def _swap(source: Segments, dtype: DType, out: Array) -> None:
    if not source.swapped or dtype.part_bytes == 1:
        return
    if dtype.part_bytes == dtype.itemsize_bytes:
        out.byteswap(inplace=True)
    else:
        parts = out if out.ndim else out.reshape(1)
        parts.view(_UNSIGNED[dtype.part_bytes]).byteswap(inplace=True)


def _slices(part: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(slice(a - low, b - low) for a, b, low in zip(part.start, part.stop, outer.start))


def _strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = [itemsize]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * length)
    return tuple(reversed(strides[: len(shape)]))
