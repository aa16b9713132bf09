"""Fill the shard file whose space a format has reserved, as its plan says (`write_shard`).

Copies of few or long runs are made by the kernel. Copies in which axes change places go tile by tile (`Tiles`). Short
runs that follow one another in the source are read straight to their places in a buffer (`read.Scatter`). All other
items are read into a buffer region by region (`read.fill`), and small tensors are moved many at a time (`batches`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from reshard_mpi.engine.open_files import Files, Staging, Traffic, large_buffer
from reshard_mpi.engine.read import (
    Scatter,
    Stream,
    byte_runs,
    element_blocks,
    fill,
    read_ahead,
    takes_numpy,
    with_space,
)
from reshard_mpi.formats.locations import Span
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.protocol import OnBytes
from reshard_mpi.planning.rank_plan import Limits, PlannedTensors, RankPlan, ReadItem, TensorPlan, meeting
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.strides import Runs, Strides, paired
from reshard_mpi.text import KIB, MIB

if TYPE_CHECKING:
    from reshard_mpi.engine.batches import Batches
    from reshard_mpi.filesystem.read_ahead import ReadAhead

T = TypeVar("T")

# Tensors up to this size are moved many at a time, unless they are so few that loading numpy takes longer.
SMALL_BYTES = 64 * KIB
_FEW_COPIES = 500
# Shorter runs take longer by system calls than through the buffer, unless there are just a few.
_MIN_KERNEL_COPY_BYTES = 128 * KIB
_FEW_RUNS = 4
# A run that is read to its place costs an entry in a vector; below this, numpy does it faster.
_MIN_SCATTER_BYTES = 512
# A tile begins and ends between pages of both files, as far as it can.
_PAGE_BYTES = 4096
# If runs of several sources alternate in the target, this much of the target is completed before more is begun.
_INTERLEAVED_BYTES = 4 * MIB

# Reads an item into a block of a tensor. Takes the item, the block, and the buffer that holds the block's elements.
FillBlock = Callable[[ReadItem, Box, memoryview], None]


class OpenTarget(NamedTuple):
    """A shard file whose space is reserved: it has everything but the payloads.

    Attributes:
        descriptor: of the file, open for reading and writing.
        span: only this range of the file is filled, while other processes fill the rest; None: all of it.
    """

    plan: RankPlan
    manifest: Manifest
    descriptor: int
    span: Span | None = None


def write_shard(
    target: OpenTarget,
    *,
    limits: Limits,
    on_bytes: OnBytes,
    staging: Staging | None = None,
    ahead: ReadAhead | None = None,
) -> Generator[float, None, Traffic]:
    """Write every tensor of a target to the ranges that are reserved for it; several targets may take turns.

    Yields after each step the share of the target that is written; returns how many bytes were moved.

    Args:
        on_bytes: called with the number of target bytes just written.
        staging: told which parts of the file are complete, where it is sent to a store meanwhile.
        ahead: has fetched what is read from an object store.

    Raises ShardError if a source cannot be read, OSError if the target cannot be written.
    """
    buffer = memoryview(bytearray(limits.buffer_bytes))
    plan, manifest, descriptor, span = target
    tensors, whole_bytes = plan.tensors, max(1, plan.written_bytes)
    with Files(on_bytes, descriptor, staging=staging, ahead=ahead) as files:
        batches = _batches(tensors, manifest, span, limits)
        for first, last, is_small in batches.stretches() if batches else [(0, len(tensors), False)]:
            if batches and is_small:
                for low, high in batches.move(files, first, last, buffer):
                    moved = (tensors[number] for number in range(low, high) if staging is not None)
                    for part in parts_within(moved, manifest, span):
                        _finish(files, part)
                    yield files.traffic.written_bytes / whole_bytes
            else:
                stretch = (tensors[number] for number in range(first, last))
                for _ in _write_each(files, parts_within(stretch, manifest, span), manifest, buffer, limits):
                    yield files.traffic.written_bytes / whole_bytes
        return files.traffic


def last_of(steps: Generator[object, None, T]) -> T:
    """Take all steps of a generator; return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def _finish(files: Files, written: WrittenPart) -> None:
    """Take note that a part of a tensor is complete."""
    first, last = written.span
    for part in written.place.parts(first, last - first):
        files.final(part.offset_bytes, part.length_bytes)


def _batches(tensors: PlannedTensors, target: Manifest, span: Span | None, limits: Limits) -> Batches | None:
    """Return what moves small tensors many at a time; None if they are few."""
    if not are_many(tensors):
        return None
    from reshard_mpi.engine.batches import Batches  # which loads numpy

    return Batches(tensors, target, span, limits, SMALL_BYTES)


def _write_each(
    files: Files, parts: Iterator[WrittenPart], target: Manifest, buffer: memoryview, limits: Limits
) -> Iterator[None]:
    """Write tensors one after another, each in the way that suits its items, and read the next one ahead.

    Yields after each step.
    """
    scatter, tiles = Scatter(files), Tiles(files, limits)
    for part, following in pairwise(chain(parts, (None,))):
        assert part is not None
        if following is not None and following.span[0] == 0:
            read_ahead(files, following.tensor, target.tensors[following.tensor.spec.name])
        tensor, too_large = part.tensor, files.traffic.too_large
        if is_transposed(tensor, limits):
            tiles.write(tensor, part.place, part.span)
            _finish(files, part)
            yield
        elif is_copied(tensor):
            yield from _copy_runs(files, tensor, part.place, part.span, buffer)
        elif _is_scattered(tensor):
            yield from _fill_blocks(files, tensor, part.place, part.span, buffer, scatter.fill)
        else:
            read = partial(fill, files, limits=limits)
            yield from _fill_blocks(files, tensor, part.place, part.span, buffer, read)
        if files.traffic.too_large > too_large:
            files.traffic.overflows[tensor.spec.name] = files.traffic.too_large - too_large


def are_many(tensors: PlannedTensors) -> bool:
    """Tell whether the small tensors of a target are moved many at a time, with numpy."""
    small = (group for group in tensors.groups if 0 < group.kind.size_bytes <= SMALL_BYTES)
    return sum(len(group.names) * len(group.routes) for group in small) >= _FEW_COPIES


def is_gathered(tensor: TensorPlan, limits: Limits) -> bool:
    """Tell whether a tensor may be written through windows of its sources, with numpy."""
    if is_transposed(tensor, limits):
        return True
    if is_copied(tensor) or _is_scattered(tensor):
        return False
    return any(takes_numpy(item, tensor.spec.box, limits.buffer_bytes) for item in tensor.reads)


class WrittenPart(NamedTuple):
    """The part of one tensor to write: the bytes `span` of its row-major order. place: where all of its bytes go."""

    tensor: TensorPlan
    place: Stream
    span: Span


def parts_within(tensors: Iterable[TensorPlan], target: Manifest, span: Span | None) -> Iterator[WrittenPart]:
    """Yield the parts of tensors that lie in a span of the target file; None: all of it."""
    for tensor in tensors:
        place = Stream(target.payload(tensor.spec.name))
        first, last = place.within(span)
        if first < last:
            yield WrittenPart(tensor, place, (first, last))


def is_transposed(tensor: TensorPlan, limits: Limits) -> bool:
    """Tell whether axes change places in a tensor that is too large for the buffer."""
    if tensor.spec.size_bytes <= limits.buffer_bytes:
        return False
    if all(item.order is None and item.source.steps is None for item in tensor.reads):
        return False
    return any(item.strides(tensor.spec.box).is_transposed for item in tensor.reads)


def is_copied(tensor: TensorPlan) -> bool:
    """Tell whether a tensor is made of runs of its sources that are copied one by one."""
    return all(_in_long_runs(item, tensor.spec.box) for item in tensor.reads)


def _is_scattered(tensor: TensorPlan) -> bool:
    return all(_in_source_order(item, tensor.spec.box) for item in tensor.reads)


def _in_long_runs(item: ReadItem, target: Box) -> bool:
    if not item.source.is_as_stored:
        return False
    count = item.strides(target).run_length
    few = count * _FEW_RUNS >= item.region.size
    return few or count * item.source.dtype.itemsize_bytes >= _MIN_KERNEL_COPY_BYTES


def _in_source_order(item: ReadItem, target: Box) -> bool:
    """Tell whether an item is one run in its source, and its runs in the target are not too short to be read singly."""
    if not item.source.is_as_stored:
        return False
    strides = item.strides(target)
    return strides.is_in_source_order and strides.run_length * item.source.dtype.itemsize_bytes >= _MIN_SCATTER_BYTES


def _copy_runs(files: Files, tensor: TensorPlan, place: Stream, span: Span, buffer: memoryview) -> Iterator[None]:
    """Copy the bytes `span` of a tensor run by run; yield after each step."""
    box, itemsize = tensor.spec.box, tensor.spec.dtype.itemsize_bytes
    sources = [Stream(stored) for item in tensor.reads if (stored := item.source.stored) is not None]
    if files.ahead is not None or _alternate(tensor):
        block_bytes = _INTERLEAVED_BYTES if files.ahead is None else len(buffer)
        blocks = box.blocks(max(1, block_bytes // itemsize), span[0] // itemsize, -(-span[1] // itemsize))
    else:
        blocks = iter((box,))
    for block in blocks:
        for item, source in zip(tensor.reads, sources):
            part = item if block is box else item.meeting(block)
            if part is not None:
                for runs in part.strides(box).runs(itemsize):
                    for in_files in byte_runs(runs, source, place, span):
                        files.copy(in_files, buffer)
        yield


def _alternate(tensor: TensorPlan) -> bool:
    """Tell whether items interleave in the target tensor, instead of following one another."""
    if len(tensor.reads) == 1:
        return False
    box = tensor.spec.box
    regions = (item.target_region for item in tensor.reads)
    spans = sorted((box.offset_of(region), box.span_of(region)) for region in regions)
    return any(offset + length > following for (offset, length), (following, _) in pairwise(spans))


def _fill_blocks(
    files: Files, tensor: TensorPlan, place: Stream, span: Span, buffer: memoryview, read: FillBlock
) -> Iterator[None]:
    """Write the bytes `span` of a tensor, block by block: each is put together in the buffer first.

    Yields after each block.
    """
    box, itemsize = tensor.spec.box, tensor.spec.dtype.itemsize_bytes
    for block in element_blocks(files, box, span, itemsize, max(1, len(buffer) // itemsize)):
        offset, length = box.offset_of(block) * itemsize, block.size * itemsize
        for item in tensor.reads:
            part = item.meeting(block)
            if part is not None:
                read(part, block, buffer[:length])
        done, end = max(span[0] - offset, 0), min(span[1] - offset, length)
        for target in place.parts(offset + done, end - done):
            files.write(target, buffer[done : done + target.length_bytes])
            files.final(target.offset_bytes, target.length_bytes)
            done += target.length_bytes
        yield


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
                for runs in Strides.between(tile, spaced, tile, box).runs(itemsize):
                    _write_runs(self._files, content, runs, place, span)

    def _memory(self, length_bytes: int) -> memoryview:
        if length_bytes > len(self._buffer):
            self._buffer = memoryview(b"")  # given back before more is taken
            self._buffer = large_buffer(length_bytes)
        return self._buffer[:length_bytes]


def _write_runs(files: Files, content: memoryview, runs: Runs, place: Stream, span: Span) -> None:
    """Write what of a tile's runs lies in `span`. runs: from `content` to the target tensor."""
    start, end = runs.target_offset, runs.target_offset + runs.target_span
    part = place.one_part(start, end - start) if span[0] <= start and end <= span[1] else None
    if part is not None:
        contents = [content[offset : offset + runs.length] for offset, _ in runs.offsets()]
        files.write_each(part.path, part.offset_bytes, runs.target_step, contents)
        return
    for source_offset, target_offset in runs.offsets():
        first, last = max(span[0], target_offset), min(span[1], target_offset + runs.length)
        for part in place.parts(first, last - first):
            offset = source_offset + first - target_offset
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
