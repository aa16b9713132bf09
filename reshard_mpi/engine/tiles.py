"""Moves copies in which axes change places tile by tile, so that runs are long both in the source and in the target."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from reshard_mpi.engine.files import Files
from reshard_mpi.engine.regions import fill
from reshard_mpi.engine.stream import Stream, element_blocks
from reshard_mpi.planning.model import Copy, Limits, TensorPlan
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.strides import Strides, paired

# The first of a tensor's row-major bytes, and the one after the last.
Span = tuple[int, int]


def fill_tiles(files: Files, tensor: TensorPlan, place: Stream, span: Span, buffer: memoryview, limits: Limits) -> None:
    """Write the bytes `span` of a tensor to their place in the target. place: where all of its bytes go."""
    box, itemsize = tensor.spec.box, tensor.spec.dtype.itemsize_bytes
    for block in element_blocks(files, box, span, itemsize, box.size):
        for copy in tensor.copies:
            part = copy.meeting(block)
            for tile in tiles(part, max(1, len(buffer) // itemsize)) if part is not None else ():
                region = tile.target_region
                content = buffer[: region.size * itemsize]
                fill(files, tile, region, content, limits)
                _write(files, content, Strides.between(region, region, region, box), itemsize, place, span)


def _write(files: Files, content: memoryview, strides: Strides, itemsize: int, place: Stream, span: Span) -> None:
    """Write the part of a tile that lies in `span`. strides: of its elements in `content` and in the target tensor."""
    for runs in strides.runs():
        for number in range(runs.repeats):
            source_start = (runs.source_offset + number * runs.source_step) * itemsize
            target_start = (runs.target_offset + number * runs.target_step) * itemsize
            first, last = max(span[0], target_start), min(span[1], target_start + runs.length * itemsize)
            for part in place.parts(first, last - first):
                offset = source_start + first - target_start
                files.write(part, content[offset : offset + part.length_bytes])
                first += part.length_bytes


def tiles(copy: Copy, limit: int) -> Iterator[Copy]:
    """Yield parts of a copy that have at most `limit` elements, with long runs both in the source and in the target."""
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
