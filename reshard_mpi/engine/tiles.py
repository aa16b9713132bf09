"""Move items whose axes change places, tile by tile (`Tiles`)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from reshard_mpi.engine.open_files import Files, large_buffer
from reshard_mpi.engine.read import Stream, element_blocks, fill
from reshard_mpi.planning.rank_plan import Limits, ReadItem, TensorPlan, meeting
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.strides import Strides, paired

# Extra distance between rows of an array whose axes change places. Without it, the elements of a column would all fall
# on a few lines of the processor's cache where rows are as long as a power of two.
_SPACE_BYTES = 64


def with_space(box: Box, itemsize: int) -> Box:
    """Return a box with some space behind each row, unless rows are short."""
    if not box.ndim or (box.stop[-1] - box.start[-1]) * itemsize < _SPACE_BYTES:
        return box
    return Box(box.start, (*box.stop[:-1], box.stop[-1] + max(1, _SPACE_BYTES // itemsize)))


# The first of a tensor's row-major bytes, and the one after the last.
Span = tuple[int, int]


# A tile begins and ends between pages of both files, as far as it can.
_PAGE_BYTES = 4096


class Tiles:
    """Writes tensors in which axes change places. The memory in which tiles are put together is used again."""

    def __init__(self, files: Files, limits: Limits) -> None:
        self._files = files
        self._limits = limits
        self._buffer = memoryview(b"")

    def write(self, tensor: TensorPlan, place: Stream, span: Span) -> None:
        """Write the bytes `span` of a tensor to their place in the target. place: where all of its bytes go.

        A tile is put together from all items that it meets, so that what is written is not cut where the sources are.
        """
        box, itemsize = tensor.spec.box, tensor.spec.dtype.itemsize_bytes
        sides = _sides(tensor, max(1, self._limits.tile_bytes // itemsize))
        for block in element_blocks(self._files, box, span, itemsize, box.size):
            for tile, parts in _tiles(block, sides, meeting(tensor.reads, block)):
                spaced = with_space(tile, itemsize)
                content = self._memory(spaced.size * itemsize)
                for part in parts:
                    fill(self._files, part, spaced, content, self._limits)
                _write(self._files, content, Strides.between(tile, spaced, tile, box), itemsize, place, span)

    def _memory(self, length_bytes: int) -> memoryview:
        if length_bytes > len(self._buffer):
            self._buffer = memoryview(b"")  # given back before more is taken
            self._buffer = large_buffer(length_bytes)
        return self._buffer[:length_bytes]


def _write(files: Files, content: memoryview, strides: Strides, itemsize: int, place: Stream, span: Span) -> None:
    """Write the part of a tile that lies in `span`. strides: of its elements in `content` and in the target tensor."""
    for runs in strides.runs():
        length, distance, step = (count * itemsize for count in (runs.length, runs.source_step, runs.target_step))
        start, span_bytes = runs.target_offset * itemsize, (runs.repeats - 1) * step + length
        part = place.one_part(start, span_bytes) if span[0] <= start and start + span_bytes <= span[1] else None
        if part is not None:
            first = runs.source_offset * itemsize
            begins = range(first, first + runs.repeats * distance, distance)
            files.write_each(part.path, part.offset_bytes, step, [content[begin : begin + length] for begin in begins])
            continue
        for number in range(runs.repeats):
            source_start = (runs.source_offset + number * runs.source_step) * itemsize
            target_start = (runs.target_offset + number * runs.target_step) * itemsize
            first, last = max(span[0], target_start), min(span[1], target_start + runs.length * itemsize)
            for part in place.parts(first, last - first):
                offset = source_start + first - target_start
                files.write(part, content[offset : offset + part.length_bytes])
                first += part.length_bytes


def _sides(tensor: TensorPlan, limit: int) -> list[int]:
    """Return the lengths of a tile of at most `limit` elements, with long runs both in the sources and in the target.

    If sources lie in different ways, the largest item in which axes change places decides.
    """
    box, turned = tensor.spec.box, [item for item in tensor.reads if item.strides(tensor.spec.box).is_transposed]
    item = max(turned, key=lambda item: item.region.size)
    pairs, steps = paired(item.region, item.target_region, item.order), item.source.steps
    nearest = max(pairs) if steps is None else min(pairs, key=lambda pair: steps[pair[0]])
    dims = [dim for dim in reversed(range(box.ndim)) if box.shape[dim] > 1]
    across, along = nearest[1], dims[0]  # consecutive in the source, and in the target
    page = _PAGE_BYTES // tensor.spec.dtype.itemsize_bytes
    sides = [1] * box.ndim
    for dim, most in ((along, math.isqrt(limit)), (across, limit), *((dim, limit) for dim in dims)):
        room = most // (math.prod(sides) // sides[dim])
        sides[dim] = max(1, min(box.shape[dim], room - room % page if room > page else room))
    return sides


def _tiles(box: Box, sides: list[int], reads: list[ReadItem]) -> Iterator[tuple[Box, list[ReadItem]]]:
    """Yield tiles of a box, the first dimension's first, each with what `reads` have of it.

    They are found by halves, so that few items are asked for each tile, however many there are.
    """
    for dim, (first, last, side) in enumerate(zip(box.start, box.stop, sides)):
        count = -(-(last - first) // side)
        if count > 1:
            middle = first + count // 2 * side
            for low, high in ((first, middle), (middle, last)):
                half = box.within(dim, low, high)
                yield from _tiles(half, sides, meeting(reads, half))
            return
    yield box, reads
