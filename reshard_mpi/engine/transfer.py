"""Executes the plan of one target: into a reserved shard file, or into arrays."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from reshard_mpi.box import Box, common_runs, run_length
from reshard_mpi.dtypes import to_numpy
from reshard_mpi.engine.files import Files, OnBytes, Traffic
from reshard_mpi.engine.gather import Array, gather, raw_dtype
from reshard_mpi.engine.stream import Stream, byte_runs
from reshard_mpi.manifest import Manifest, Segments
from reshard_mpi.planning.model import Check, Copy, Limits, RankPlan, TensorPlan
from reshard_mpi.units import KIB, MIB

# Shorter runs cost more in system calls than gathering them through the buffer does, unless there are just a few.
_MIN_KERNEL_COPY_BYTES = 128 * KIB
_FEW_RUNS = 4
# Where runs of several sources alternate in the target, so much of it is completed before the next is begun.
_INTERLEAVED_BYTES = 4 * MIB

# From one byte of a file to another.
Span = tuple[int, int]


def write_shard(plan: RankPlan, target: Manifest, *, span: Span | None, limits: Limits, on_bytes: OnBytes) -> Traffic:
    """Write every tensor of `plan` to the ranges that `target` reserved, and return what was moved.

    span: only what lies between these bytes of the target file, which others fill elsewhere at the same time; None: all
    of it. on_bytes: called with the number of target bytes just written.
    """
    buffer = np.empty(limits.buffer_bytes, np.uint8)
    with Files(on_bytes) as files:
        for tensor in plan.tensors:
            place = target.tensors[tensor.spec.name].source
            assert isinstance(place, Segments)
            stream = Stream(place)
            first, last = stream.within(span)
            if first == last:
                continue
            if all(_in_long_runs(copy, tensor.spec.box) for copy in tensor.copies):
                _copy_runs(files, tensor, stream, (first, last), buffer)
            else:
                _gather_blocks(files, tensor, stream, (first, last), buffer, limits)
        return files.traffic


def load_shard(plan: RankPlan, *, limits: Limits) -> dict[str, np.ndarray[Any, Any]]:
    """Return every tensor of `plan` as an owned C-contiguous array of its own type."""
    arrays = {}
    with Files() as files:
        for tensor in plan.tensors:
            dtype = tensor.spec.dtype
            array = np.empty(tensor.spec.box.shape, raw_dtype(dtype))
            for copy in tensor.copies:
                gather(files, copy, copy.region, array, tensor.spec.box, limits)
            arrays[tensor.spec.name] = array.view(to_numpy(dtype))
    return arrays


def first_difference(check: Check, *, limits: Limits) -> tuple[Copy, tuple[int, ...]] | None:
    """Return the first copy that differs from the check's first one, and the element (global index) where it does."""
    first, *others = check.copies
    dtype = raw_dtype(first.source.dtype)
    elements = max(1, limits.buffer_bytes // 2 // dtype.itemsize)
    with Files() as files:
        for block in first.region.blocks(elements):
            expected = np.empty(block.shape, dtype)
            gather(files, first, block, expected, block, limits)
            got = np.empty(block.shape, dtype)
            for copy in others:
                gather(files, copy, block, got, block, limits)
                if got.tobytes() != expected.tobytes():
                    at = np.unravel_index(int(np.argmax((got != expected).reshape(-1))), block.shape or (1,))
                    return copy, tuple(low + int(i) for low, i in zip(block.start, at))
    return None


def _in_long_runs(copy: Copy, target: Box) -> bool:
    source = copy.source.source
    if not isinstance(source, Segments) or source.swapped:
        return False
    count = run_length(copy.region, copy.source_box, target)
    few = count * _FEW_RUNS >= copy.region.size
    return few or count * copy.source.dtype.itemsize_bytes >= _MIN_KERNEL_COPY_BYTES


def _copy_runs(files: Files, tensor: TensorPlan, place: Stream, span: Span, buffer: Array) -> None:
    """Copy what of the tensor lies in `span`, bytes of its row-major order, run by run."""
    box, itemsize = tensor.spec.box, tensor.spec.dtype.itemsize_bytes
    sources = [Stream(copy.source.source) for copy in tensor.copies if isinstance(copy.source.source, Segments)]
    if _alternate(tensor):
        blocks = box.blocks(max(1, _INTERLEAVED_BYTES // itemsize), *_elements(span, itemsize))
    else:
        blocks = iter((box,))
    for block in blocks:
        for copy, source in zip(tensor.copies, sources):
            region = copy.region if block is box else copy.region.intersect(block)
            if region is not None:
                for runs in common_runs(region, copy.source_box, box):
                    for part in byte_runs(runs, itemsize, source, place, span):
                        files.copy(part, buffer.data)


def _alternate(tensor: TensorPlan) -> bool:
    """Tell whether the copies' places in the target tensor lie between each other, instead of one after another."""
    if len(tensor.copies) == 1:
        return False
    box = tensor.spec.box
    spans = sorted((box.offset_of(copy.region), box.span_of(copy.region)) for copy in tensor.copies)
    return any(offset + length > following for (offset, length), (following, _) in pairwise(spans))


def _gather_blocks(files: Files, tensor: TensorPlan, place: Stream, span: Span, buffer: Array, limits: Limits) -> None:
    """Put together, block by block, what of the tensor lies in `span`, bytes of its row-major order."""
    dtype = raw_dtype(tensor.spec.dtype)
    box = tensor.spec.box
    for block in box.blocks(max(1, limits.buffer_bytes // dtype.itemsize), *_elements(span, dtype.itemsize)):
        at = box.offset_of(block) * dtype.itemsize
        length = block.size * dtype.itemsize
        array = buffer[:length].view(dtype).reshape(block.shape)
        for copy in tensor.copies:
            region = copy.region.intersect(block)
            if region is not None:
                gather(files, copy, region, array, block, limits)
        done, end = max(span[0] - at, 0), min(span[1] - at, length)
        for target in place.parts(at + done, end - done):
            files.write(target, buffer.data[done : done + target.length_bytes])
            done += target.length_bytes


def _elements(span: Span, itemsize: int) -> Span:
    """Return the elements that have bytes in `span`."""
    return span[0] // itemsize, -(-span[1] // itemsize)
