"""Fill the shard file whose space a format has reserved, as its plan says (`write_shard`).

Copies of few or long runs are made by the kernel. Copies in which axes change places go tile by tile (`tiles`). Short
runs that follow one another in the source are read straight to their places in a buffer (`Scatter`). All other items
are read into a buffer region by region (`read.fill`), and small tensors are moved many at a time (`batches`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from reshard_mpi.engine.open_files import Files, OnBytes, Staging, Traffic
from reshard_mpi.engine.read import Stream, byte_runs, element_blocks, fill, takes_numpy
from reshard_mpi.formats.locations import ByteRanges, Location
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.tensor_table import TensorEntry
from reshard_mpi.planning.rank_plan import Limits, PlannedTensors, RankPlan, ReadItem, TensorPlan
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.strides import Runs
from reshard_mpi.text import KIB, MIB

if TYPE_CHECKING:
    from reshard_mpi.engine.batches import Batches
    from reshard_mpi.engine.tiles import Tiles
    from reshard_mpi.filesystem.read_ahead import ReadAhead

T = TypeVar("T")

# Blocks of a tensor, and tensors of one shape, have the same places for their runs, so the last few are kept.
_KEPT_PLACES = 8


class Scatter:
    """Fills blocks of target tensors from items whose elements are in the same order in source and target."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._places: OrderedDict[tuple[int, int, Runs], list[memoryview]] = OrderedDict()

    def fill(self, item: ReadItem, block: Box, buffer: memoryview) -> None:
        """Read an item's source into its target region of `buffer`, which holds the elements of `block`, row-major.

        The item must be one run in its source. Raises ShardError if the source cannot be read.
        """
        stored = item.source.stored
        assert stored is not None
        stream, itemsize = Stream(stored), item.source.dtype.itemsize_bytes
        for runs in item.strides(block).runs():
            offset = runs.source_offset * itemsize
            length = runs.length * itemsize
            part = stream.one_part(offset, runs.repeats * length)
            places = self._places_of(runs, itemsize, buffer)
            if part is not None:
                self._files.read_scattered(part, places)
                continue
            for place in places:
                self._files.read_all(stream.parts(offset, length), place)
                offset += length

    def _places_of(self, runs: Runs, itemsize: int, buffer: memoryview) -> list[memoryview]:
        """Return the places of the runs in a buffer."""
        key = (id(buffer.obj), itemsize, runs._replace(source_offset=0))
        places = self._places.get(key)
        if places is None:
            starts = range(runs.target_offset, runs.target_offset + runs.repeats * runs.target_step, runs.target_step)
            places = [buffer[start * itemsize : (start + runs.length) * itemsize] for start in starts]
            self._places[key] = places
            while len(self._places) > _KEPT_PLACES:
                self._places.popitem(last=False)
        return places


# Tensors up to this size are moved many at a time, unless they are so few that loading numpy takes longer.
SMALL_BYTES = 64 * KIB
_FEW_COPIES = 500
# Shorter runs take longer by system calls than through the buffer, unless there are just a few.
_MIN_KERNEL_COPY_BYTES = 128 * KIB
_FEW_RUNS = 4
# File systems that share blocks do so between multiples of this.
_BLOCK_BYTES = 4096
# How much of the next tensor is read ahead at most and at least, and how many times what is needed that may be.
_READ_AHEAD_BYTES = 32 * MIB
_MIN_READ_AHEAD_BYTES = 128 * KIB
_READ_AHEAD_OVER = 2
# A run that is read to its place costs an entry in a vector; below this, numpy does it faster.
_MIN_SCATTER_BYTES = 512
# If runs of several sources alternate in the target, this much of the target is completed before more is begun.
_INTERLEAVED_BYTES = 4 * MIB

# The first byte of a range (of a file, or of a tensor's row-major bytes), and the one after its last.
Span = tuple[int, int]
# Reads an item into a block of a tensor. Takes the item, the block, and the buffer that holds the block's elements.
FillBlock = Callable[[ReadItem, Box, memoryview], None]


def write_shard(
    plan: RankPlan,
    target: Manifest,
    descriptor: int,
    *,
    span: Span | None,
    limits: Limits,
    on_bytes: OnBytes,
    staging: Staging | None = None,
    ahead: ReadAhead | None = None,
) -> Generator[float, None, Traffic]:
    """Write every tensor of `plan` to the ranges that `target` reserved; several targets may take turns.

    Yields after each step the share of the target that is written; returns how many bytes were moved.

    Args:
        descriptor: of the target file, open for reading and writing.
        span: write only this range of the file, while other processes write the rest; None: all of it.
        on_bytes: called with the number of target bytes just written.
        staging: told which parts of the file are complete, where it is sent to a store meanwhile.
        ahead: has fetched what is read from an object store.

    Raises ShardError if a source cannot be read, OSError if the target cannot be written.
    """
    buffer = memoryview(bytearray(limits.buffer_bytes))
    tensors, whole_bytes = plan.tensors, max(1, plan.written_bytes)
    with Files(on_bytes, descriptor, staging=staging, ahead=ahead) as files:
        batches = _batches(tensors, target, span, limits)
        for first, last, is_small in batches.stretches() if batches else [(0, len(tensors), False)]:
            if batches and is_small:
                for low, high in batches.move(files, first, last, buffer):
                    for tensor in (tensors[number] for number in range(low, high) if staging is not None):
                        place = Stream(target.payload(tensor.spec.name))
                        _finish(files, place, place.within(span))
                    yield files.traffic.written_bytes / whole_bytes
            else:
                stretch = (tensors[number] for number in range(first, last))
                for _ in _write_each(files, _parts_within(stretch, target, span), target, buffer, limits):
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


def _finish(files: Files, place: Stream, span: Span) -> None:
    """Take note that the bytes `span` of a tensor are complete."""
    for part in place.parts(span[0], span[1] - span[0]):
        files.final(part.offset_bytes, part.length_bytes)


def _batches(tensors: PlannedTensors, target: Manifest, span: Span | None, limits: Limits) -> Batches | None:
    """Return what moves small tensors many at a time; None if they are few."""
    if not are_many(tensors):
        return None
    from reshard_mpi.engine.batches import Batches  # which loads numpy

    return Batches(tensors, target, span, limits, SMALL_BYTES)


def _write_each(
    files: Files, parts: Iterator[_WrittenPart], target: Manifest, buffer: memoryview, limits: Limits
) -> Iterator[None]:
    """Write tensors one after another, each in the way that suits its items, and read the next one ahead.

    Yields after each step.
    """
    scatter = Scatter(files)
    tiles: Tiles | None = None
    for part, following in pairwise(chain(parts, (None,))):
        assert part is not None
        if following is not None and following.span[0] == 0:
            _read_ahead(files, following.tensor, target.tensors[following.tensor.spec.name])
        tensor, too_large = part.tensor, files.traffic.too_large
        if is_transposed(tensor, limits):
            from reshard_mpi.engine.tiles import Tiles

            tiles = tiles or Tiles(files, limits)
            tiles.write(tensor, part.place, part.span)
            _finish(files, part.place, part.span)
            yield
        elif is_copied(tensor):
            yield from _copy_runs(files, tensor, part.place, part.span, buffer)
        elif _is_scattered(tensor):
            yield from _fill_blocks(files, tensor, part.place, part.span, buffer, scatter.fill)
        else:
            read = partial(_read, files, limits)
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


class _WrittenPart(NamedTuple):
    """The part of one tensor to write: the bytes `span` of its row-major order. place: where all of its bytes go."""

    tensor: TensorPlan
    place: Stream
    span: Span


def _parts_within(tensors: Iterable[TensorPlan], target: Manifest, span: Span | None) -> Iterator[_WrittenPart]:
    """Yield the parts of tensors that lie in a span of the target file; None: all of it."""
    for tensor in tensors:
        place = Stream(target.payload(tensor.spec.name))
        first, last = place.within(span)
        if first < last:
            yield _WrittenPart(tensor, place, (first, last))


def _read_ahead(files: Files, tensor: TensorPlan, place: TensorEntry) -> None:
    """Have the kernel read the beginning of a tensor's sources ahead, while the tensor before it is moved.

    Sources whose blocks the target file may share are left out, since these are never read.
    """
    for item in tensor.reads:
        entry, region = item.source.unconverted, item.region
        source, itemsize = entry.source, entry.dtype.itemsize_bytes
        if (
            region.size * itemsize < _MIN_READ_AHEAD_BYTES
            or not isinstance(source, ByteRanges)
            or (item.source.is_as_stored and _is_aligned(source) and _is_aligned(place.source))
        ):
            continue
        span = item.source_box.span_of(region)
        if span <= _READ_AHEAD_OVER * region.size:
            length_bytes = min(span * itemsize, _READ_AHEAD_BYTES // len(tensor.reads))
            for part in Stream(source).parts(item.source_box.offset_of(region) * itemsize, length_bytes):
                files.advise(part)


def _is_aligned(content: Location) -> bool:
    return isinstance(content, ByteRanges) and all(part.offset_bytes % _BLOCK_BYTES == 0 for part in content.ranges)


def _read(files: Files, limits: Limits, item: ReadItem, block: Box, buffer: memoryview) -> None:
    fill(files, item, block, buffer, limits)


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
                for runs in part.strides(box).runs():
                    for file_runs in byte_runs(runs, itemsize, source, place, span):
                        files.copy(file_runs, buffer)
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
