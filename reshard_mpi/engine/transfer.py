"""Executes the plan of one target: into a reserved shard file, or into arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from reshard_mpi.box import Box, common_runs, run_length
from reshard_mpi.dtypes import to_numpy
from reshard_mpi.engine.files import Files, Traffic
from reshard_mpi.engine.gather import Array, gather, raw_dtype
from reshard_mpi.engine.stream import Stream
from reshard_mpi.manifest import ByteRange, Manifest, Segments
from reshard_mpi.planning.model import Check, Copy, Limits, RankPlan, TensorPlan
from reshard_mpi.units import KIB

# Shorter runs cost more in system calls than gathering them through the buffer does.
_MIN_KERNEL_COPY_BYTES = 128 * KIB

OnBytes = Callable[[int], None]


def write_shard(plan: RankPlan, target: Manifest, *, limits: Limits, on_bytes: OnBytes) -> Traffic:
    """Write every tensor of `plan` to the ranges that `target` reserved, and return what was moved.

    on_bytes: called with the number of target bytes just written.
    """
    buffer = np.empty(limits.buffer_bytes, np.uint8)
    with Files() as files:
        for tensor in plan.tensors:
            place = target.tensors[tensor.spec.name].source
            assert isinstance(place, Segments)
            if all(_in_long_runs(copy, tensor.spec.box) for copy in tensor.copies):
                _copy_runs(files, tensor, Stream(place), buffer, on_bytes)
            else:
                _gather_blocks(files, tensor, Stream(place), buffer, limits, on_bytes)
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
    run_bytes = run_length(copy.region, copy.source_box, target) * copy.source.dtype.itemsize_bytes
    return run_bytes >= _MIN_KERNEL_COPY_BYTES


def _copy_runs(files: Files, tensor: TensorPlan, place: Stream, buffer: Array, on_bytes: OnBytes) -> None:
    itemsize = tensor.spec.dtype.itemsize_bytes
    through = buffer.data
    for copy in tensor.copies:
        assert isinstance(copy.source.source, Segments)
        stream = Stream(copy.source.source)
        for run in common_runs(copy.region, copy.source_box, tensor.spec.box):
            target_offset = run.target_offset * itemsize
            for source in stream.parts(run.source_offset * itemsize, run.count * itemsize):
                offset = source.offset_bytes
                for target in place.parts(target_offset, source.length_bytes):
                    files.copy(ByteRange(source.path, offset, target.length_bytes), target, through)
                    offset += target.length_bytes
                    on_bytes(target.length_bytes)
                target_offset += source.length_bytes


def _gather_blocks(
    files: Files, tensor: TensorPlan, place: Stream, buffer: Array, limits: Limits, on_bytes: OnBytes
) -> None:
    dtype = raw_dtype(tensor.spec.dtype)
    box = tensor.spec.box
    for block in box.blocks(max(1, limits.buffer_bytes // dtype.itemsize)):
        length = block.size * dtype.itemsize
        array = buffer[:length].view(dtype).reshape(block.shape)
        for copy in tensor.copies:
            region = copy.region.intersect(block)
            if region is not None:
                gather(files, copy, region, array, block, limits)
        done = 0
        for target in place.parts(box.offset_of(block) * dtype.itemsize, length):
            files.write(target, buffer.data[done : done + target.length_bytes])
            done += target.length_bytes
        on_bytes(length)
