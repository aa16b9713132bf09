"""Copies in which the axes change places: moved tile by tile, so that on neither side bytes are met one by one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from reshard_mpi.engine.files import Files
from reshard_mpi.engine.regions import fill
from reshard_mpi.engine.stream import Stream
from reshard_mpi.planning.model import Copy, Limits, TensorPlan
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.strides import Strides, paired

# From one byte of a tensor's row-major order to another.
Span = tuple[int, int]


def fill_tiles(files: Files, tensor: TensorPlan, place: Stream, span: Span, buffer: memoryview, limits: Limits) -> None:
    """Write what of a tensor lies in `span`, bytes of its row-major order, to where `place` has it."""
    box, itemsize = tensor.spec.box, tensor.spec.dtype.itemsize_bytes
    for block in box.blocks(box.size, span[0] // itemsize, -(-span[1] // itemsize)):
        for copy in tensor.copies:
            part = copy.meeting(block)
            for tile in tiles(part, max(1, len(buffer) // itemsize)) if part is not None else ():
                region = tile.target_region
                content = buffer[: region.size * itemsize]
                fill(files, tile, region, content, limits)
                _write(files, content, Strides.between(region, region, region, box), itemsize, place, span)


def _write(files: Files, content: memoryview, strides: Strides, itemsize: int, place: Stream, span: Span) -> None:
    """Write a tile to its place. strides: how its elements lie in `content` and in the tensor."""
    for runs in strides.runs():
        for number in range(runs.repeats):
            start = (runs.source_offset + number * runs.source_step) * itemsize
            to = (runs.target_offset + number * runs.target_step) * itemsize
            first, last = max(span[0], to), min(span[1], to + runs.length * itemsize)
            for part in place.parts(first, last - first):
                at = start + first - to
                files.write(part, content[at : at + part.length_bytes])
                first += part.length_bytes


def tiles(copy: Copy, limit: int) -> Iterator[Copy]:
    """Cut a copy into parts of at most `limit` elements whose runs are long in the source as well as in the target."""
    region, to = copy.region, copy.target_region
    pairs = paired(region, to, copy.order)
    if not pairs:
        yield copy
        return
    lengths = dict.fromkeys((dim for _, dim in pairs), 1)
    steps = copy.source.steps
    nearest = max(pairs) if steps is None else min(pairs, key=lambda pair: steps[pair[0]])
    across, along = nearest[1], pairs[-1][1]  # consecutive in the source, and in the target
    others = ((dim, limit) for _, dim in reversed(pairs))
    for dim, most in ((along, math.isqrt(limit)), (across, limit), *others):
        room = most // (math.prod(lengths.values()) // lengths[dim])
        lengths[dim] = max(1, min(to.shape[dim], room))
    sides = [lengths.get(dim, 1) for dim in range(to.ndim)]
    for start in product(*(range(low, high, side) for low, high, side in zip(to.start, to.stop, sides))):
        stop = tuple(min(low + side, high) for low, side, high in zip(start, sides, to.stop))
        yield copy.part(Box(start, stop))
