"""Moves copies in which axes change places tile by tile, so that runs are long both in the source and in the target."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from reshard_mpi.engine.files import Files
from reshard_mpi.engine.regions import fill, with_space
from reshard_mpi.engine.stream import Stream, element_blocks
from reshard_mpi.planning.model import Copy, Limits, TensorPlan
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.strides import Strides, paired

# The first of a tensor's row-major bytes, and the one after the last.
Span = tuple[int, int]


# A tile begins and ends between pages of both files, as far as it can.
_PAGE_BYTES = 4096


def fill_tiles(files: Files, tensor: TensorPlan, place: Stream, span: Span, limits: Limits) -> None:
    """Write the bytes `span` of a tensor to their place in the target. place: where all of its bytes go."""
    box, itemsize = tensor.spec.box, tensor.spec.dtype.itemsize_bytes
    most_elements = max(1, tile_bytes(limits) // itemsize)
    buffer = memoryview(bytearray(0))
    for block in element_blocks(files, box, span, itemsize, box.size):
        for copy in tensor.copies:
            part = copy.meeting(block)
            for tile in tiles(part, most_elements) if part is not None else ():
                region = tile.target_region
                spaced = with_space(region, itemsize)
                if spaced.size * itemsize > len(buffer):
                    buffer = memoryview(bytearray(spaced.size * itemsize))
                content = buffer[: spaced.size * itemsize]
                fill(files, tile, spaced, content, limits)
                _write(files, content, Strides.between(region, spaced, region, box), itemsize, place, span)


def tile_bytes(limits: Limits) -> int:
    """Return how large a tile is at most: as it is read, and again as it is written."""
    return max(limits.buffer_bytes, limits.window_bytes // 2)


def _write(files: Files, content: memoryview, strides: Strides, itemsize: int, place: Stream, span: Span) -> None:
    """Write the part of a tile that lies in `span`. strides: of its elements in `content` and in the target tensor."""
    for runs in strides.runs():
        length, distance, step = (count * itemsize for count in (runs.length, runs.source_step, runs.target_step))
        start, span_bytes = runs.target_offset * itemsize, (runs.repeats - 1) * step + length
        part = place.one_part(start, span_bytes) if span[0] <= start and start + span_bytes <= span[1] else None
        if part is not None:
            first = runs.source_offset * itemsize
            begins = range(first, first + runs.repeats * distance, distance)
            files.write_each(part.path, part.offset_bytes, step, (content[begin : begin + length] for begin in begins))
            continue
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
    page = _PAGE_BYTES // copy.source.dtype.itemsize_bytes
    others = ((dim, limit) for _, dim in reversed(pairs))
    for dim, most in ((along, math.isqrt(limit)), (across, limit), *others):
        room = most // (math.prod(lengths.values()) // lengths[dim])
        lengths[dim] = max(1, min(to.shape[dim], room - room % page if room > page else room))
    sides = [lengths.get(dim, 1) for dim in range(to.ndim)]
    for start in product(*(range(low, high, side) for low, high, side in zip(to.start, to.stop, sides))):
        stop = tuple(min(low + side, high) for low, side, high in zip(start, sides, to.stop))
        yield copy.part(Box(start, stop))
