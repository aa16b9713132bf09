"""Move many small tensors at a time: handling one alone costs more than its bytes (`Batches`).

Tensors that follow each other in the target are put together in one buffer, with the bytes between them, and written by
one call. Their sources are mapped. For all tensors that are alike, numpy moves the runs of bytes at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from reshard_mpi.engine.open_files import Files
from reshard_mpi.formats.dtypes import DType
from reshard_mpi.formats.locations import ByteRange, Span
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.tensor_table import NOT_CONTIGUOUS
from reshard_mpi.planning.rank_plan import Group, Limits, PlannedTensors, ReadGroup
from reshard_mpi.sharding.strides import Strides

Numbers = np.ndarray[Any, np.dtype[np.int64]]

# How many runs are moved at once, by arrays of their places; and how many a tensor may have in one part to be batched.
_MAX_RUNS = 1 << 16
_MAX_RUNS_OF_ONE = 1 << 13
# Only tensors that are smaller than this on average are written together with the bytes between them, since those must
# be read first.
_WRITTEN_TOGETHER_BYTES = 16 << 10
# Bytes converted to another type at once.
_CONVERTED_BYTES = 1 << 20
# No more of a source is mapped than this many times the bytes taken from it, and this much besides.
_SPARSE, _LITTLE_BYTES = 16, 64 << 10


class _BatchSource(NamedTuple):
    """Where one part of several tensors comes from."""

    # path, starts: the source file, and the offset of each source tensor in it
    path: str
    starts: Numbers
    first_bytes: int  # offset of the part in its source tensor
    span_bytes: int  # from the part's first byte to the end of its last
    strides: Strides
    # stored, dtype: the type of the elements in the source, and in the target
    stored: DType
    dtype: DType

    @property
    def size_bytes(self) -> int:
        """How many bytes of each source tensor are taken."""
        return self.strides.size * self.stored.itemsize_bytes


class _Moved(NamedTuple):
    """Tensors of one group that a route moves a part of."""

    # group, places: the number of their group, and their places in it
    group: int
    places: Numbers
    route: _BatchSource
    # starts, targets: their offsets in the source file and in the target file
    starts: Numbers
    targets: Numbers


class _TargetColumns(NamedTuple):
    """The tensors of a target in file order, one array element for each."""

    groups: Numbers  # number of the tensor's group
    in_group: Numbers  # its place in that
    # starts, sizes: its offset in the target file and its size, in bytes
    starts: Numbers
    sizes: Numbers
    small: np.ndarray[Any, np.dtype[np.bool_]]  # whether it can be moved in a batch


class Batches:
    """Moves the small tensors of one target.

    Attributes:
        span: only tensors in this range of the target file; None: all.
        most_bytes: the largest size of a small tensor.
    """

    def __init__(
        self, tensors: PlannedTensors, target: Manifest, span: Span | None, limits: Limits, most_bytes: int
    ) -> None:
        self._tensors = tensors
        self._path = target.path
        self._limits = limits
        self._routes: dict[int, tuple[_BatchSource, ...]] = {}
        self._places = _places(tensors, target, span, limits, most_bytes)

    def stretches(self) -> Iterator[tuple[int, int, bool]]:
        """Yield stretches of tensors in file order: number of the first, that after the last, whether all are small."""
        small = self._places.small
        ends = [*(np.flatnonzero(small[1:] != small[:-1]) + 1).tolist(), len(small)]
        first = 0
        for end in ends if len(small) else ():
            yield first, end, bool(small[first])
            first = end

    def move(self, files: Files, first: int, last: int, buffer: memoryview) -> Iterator[tuple[int, int]]:
        """Move the small tensors from number `first` up to `last`, which is not included.

        Yields the numbers of those that have been moved together: that of the first, and the one after the last.
        """
        starts, sizes = self._places.starts[first:last], self._places.sizes[first:last]
        done = 0
        while done < len(starts):
            buffer_end = starts[done] + len(buffer)
            count = int(np.searchsorted(starts[done:] + sizes[done:], buffer_end, "right"))
            self._move(files, first + done, first + done + count, buffer)
            yield first + done, first + done + count
            done += count

    def _move(self, files: Files, first: int, last: int, buffer: memoryview) -> None:
        """Move tensors that fit into the buffer; fewer at a time if their sources are too far apart to be mapped."""
        parts = list(self._parts(first, last))
        windows: dict[str, tuple[int, int]] = {}
        for part in parts:
            low = int(part.starts.min()) + part.route.first_bytes
            high = int(part.starts.max()) + part.route.first_bytes + part.route.span_bytes
            earlier = windows.get(part.route.path, (low, high))
            windows[part.route.path] = min(low, earlier[0]), max(high, earlier[1])
        mapped_bytes = sum(high - low for low, high in windows.values())
        needed_bytes = sum(len(part.starts) * part.route.size_bytes for part in parts)
        if last - first > 1 and mapped_bytes > min(self._limits.window_bytes, _LITTLE_BYTES + _SPARSE * needed_bytes):
            middle = (first + last) // 2
            self._move(files, first, middle, buffer)
            self._move(files, middle, last, buffer)
            return
        begin = int(self._places.starts[first])
        end = int(self._places.starts[last - 1] + self._places.sizes[last - 1])
        content, moved_bytes = buffer[: end - begin], int(self._places.sizes[first:last].sum())
        together = moved_bytes < _WRITTEN_TOGETHER_BYTES * (last - first)
        if together and moved_bytes < len(content):
            files.read_target(ByteRange(self._path, begin, len(content)), content)
        for path, (low, high) in windows.items():
            of_file = [part for part in parts if part.route.path == path]
            requested_bytes = sum(len(part.starts) * part.route.size_bytes for part in of_file)
            with files.window(ByteRange(path, low, high - low), requested_bytes) as window:
                for part in of_file:
                    local = part._replace(starts=part.starts - low, targets=part.targets - begin)
                    if part.route.stored == part.route.dtype:
                        _take(window, content, local)
                    else:
                        self._note_too_large(files, part, _take_converted(window, content, local))
        if together:
            files.write(ByteRange(self._path, begin, len(content)), content, moved_bytes)
            return
        places = zip(self._places.starts[first:last].tolist(), self._places.sizes[first:last].tolist())
        for start, size in places:
            files.write(ByteRange(self._path, start, size), content[start - begin : start - begin + size])

    def _note_too_large(self, files: Files, part: _Moved, too_large: Numbers) -> None:
        """Count the elements of each tensor that were too large for its type."""
        files.traffic.too_large += int(too_large.sum())
        names, overflows = self._tensors.groups[part.group].names, files.traffic.overflows
        for number in np.flatnonzero(too_large).tolist():
            name = names[int(part.places[number])]
            overflows[name] = overflows.get(name, 0) + int(too_large[number])

    def _parts(self, first: int, last: int) -> Iterator[_Moved]:
        """Yield what each route moves."""
        groups = self._places.groups[first:last]
        for number in np.unique(groups).tolist():
            chosen = np.flatnonzero(groups == number) + first
            places, targets = self._places.in_group[chosen], self._places.starts[chosen]
            for route in self._routes_of(number):
                yield _Moved(number, places, route, route.starts[places], targets)

    def _routes_of(self, number: int) -> tuple[_BatchSource, ...]:
        if number not in self._routes:
            self._routes[number] = tuple(_routes(self._tensors.groups[number]))
        return self._routes[number]


def _places(
    tensors: PlannedTensors, target: Manifest, span: Span | None, limits: Limits, most_bytes: int
) -> _TargetColumns:
    groups = np.asarray(tensors.group_of, np.int64)
    numbers = target.tensors.index_by_name
    in_file_order = np.fromiter((numbers[name] for name in tensors.specs.names), np.int64, len(tensors))
    starts = np.asarray(target.tensors.offsets, np.int64)[in_file_order]
    sizes = np.array([group.kind.size_bytes for group in tensors.groups], np.int64)[groups]
    is_small = [
        0 < group.kind.size_bytes <= most_bytes and _is_plain(group) and _is_close(group, limits) and _is_in_runs(group)
        for group in tensors.groups
    ]
    small = np.array(is_small, bool)[groups] & (starts != NOT_CONTIGUOUS)
    # Batches need tensors that follow each other in the file, and that no other process writes a part of.
    small[1:] &= starts[1:] >= starts[:-1] + sizes[:-1]
    if span is not None:
        small &= (starts >= span[0]) & (starts + sizes <= span[1])
    return _TargetColumns(groups, np.asarray(tensors.place_in_group, np.int64), starts, sizes, small)


def _is_plain(group: Group) -> bool:
    """Tell whether each source tensor is one range of its file, in this machine's byte order."""
    return all(
        NOT_CONTIGUOUS not in _starts(route.tensors.unconverted.offsets, route.numbers) for route in group.routes
    )


def _is_in_runs(group: Group) -> bool:
    """Tell whether no part of the tensors has too many runs."""
    all_strides = (route.strides(group.kind.own_box) for route in group.routes)
    return all(strides.size <= _MAX_RUNS_OF_ONE * strides.run_length for strides in all_strides)


def _is_close(group: Group, limits: Limits) -> bool:
    """Tell whether the parts of each tensor are close enough together in their files to be mapped."""
    span_bytes = sum(route.source_box.span_of(route.region) * _stored(route).itemsize_bytes for route in group.routes)
    return span_bytes <= min(limits.window_bytes, _LITTLE_BYTES + _SPARSE * group.kind.size_bytes)


def _starts(starts: Sequence[int], numbers: Sequence[int]) -> Numbers:
    return np.asarray(starts, np.int64)[np.asarray(numbers, np.int64)]


def _stored(route: ReadGroup) -> DType:
    """Return the type that the source tensors of a route have in their file; they are all of one kind."""
    tensors = route.tensors.unconverted
    return tensors.kinds[tensors.kind_ids[route.numbers[0]]].dtype


def _routes(group: Group) -> Iterator[_BatchSource]:
    for route in group.routes:
        strides, stored = route.strides(group.kind.own_box), _stored(route)
        if strides.size:
            tensors, itemsize = route.tensors.unconverted, stored.itemsize_bytes
            starts = _starts(tensors.offsets, route.numbers)
            span_bytes = route.source_box.span_of(route.region) * itemsize
            first_bytes = strides.source_offset * itemsize
            yield _BatchSource(tensors.path, starts, first_bytes, span_bytes, strides, stored, group.kind.dtype)


# Many copies have the same strides. One entry takes 128 KiB at the most.
@lru_cache(maxsize=16)
def _runs(strides: Strides, stored: DType, dtype: DType) -> tuple[Numbers, Numbers]:
    """Return the offsets of the runs, in bytes, in a source tensor and in the target tensor."""
    sources = targets = np.zeros(1, np.int64)
    for length, step, target_step in strides.dimensions[:-1] if strides.run_length > 1 else strides.dimensions:
        indices = np.arange(length, dtype=np.int64)
        sources = np.add.outer(sources, indices * step).reshape(-1)
        targets = np.add.outer(targets, indices * target_step).reshape(-1)
    source_offsets = (sources + strides.source_offset) * stored.itemsize_bytes
    return source_offsets, (targets + strides.target_offset) * dtype.itemsize_bytes


def _take(window: memoryview, content: memoryview, moved: _Moved) -> None:
    """Copy the runs of a route from source tensors to target tensors.

    Args:
        moved: with the offsets of these tensors in `window` and in `content`.
    """
    for _, sources, targets in _steps(window, content, moved):
        targets.array[targets.offsets] = sources.array[sources.offsets]


def _take_converted(window: memoryview, content: memoryview, moved: _Moved) -> Numbers:
    """Do what `_take` does, with elements that become another type; return how many of each tensor are too large."""
    from reshard_mpi.engine.elements import convert_elements, raw_dtype

    stored, dtype, size = moved.route.stored, moved.route.dtype, moved.route.strides.size
    too_large = np.zeros(len(moved.starts), np.int64)
    for first, sources, targets in _steps(window, content, moved):
        elements = sources.array[sources.offsets].view(raw_dtype(stored))
        converted = np.empty(len(elements), raw_dtype(dtype))
        if convert_elements(elements, stored, converted, dtype):  # whose they are is looked at only then
            for number, start in enumerate(range(0, len(elements), size), first):
                part = slice(start, start + size)
                too_large[number] = convert_elements(elements[part], stored, converted[part], dtype)
        targets.array[targets.offsets] = converted.view(targets.array.dtype)
    return too_large


class _EqualRuns(NamedTuple):
    """Runs of equal length. array: its element number n is the run that begins at byte n. offsets: where they begin."""

    array: np.ndarray[Any, np.dtype[np.void]]
    offsets: Numbers


def _steps(window: memoryview, content: memoryview, moved: _Moved) -> Iterator[tuple[int, _EqualRuns, _EqualRuns]]:
    """Yield the number of the first of some tensors, and their runs in the source and in the target."""
    route = moved.route
    source_runs, target_runs = _runs(route.strides, route.stored, route.dtype)
    length = route.strides.run_length
    read = _runs_anywhere(window, length * route.stored.itemsize_bytes)
    written = _runs_anywhere(content, length * route.dtype.itemsize_bytes)
    step = max(1, _MAX_RUNS // len(source_runs))
    if route.stored != route.dtype:
        step = max(1, min(step, _CONVERTED_BYTES // route.size_bytes))
    for first in range(0, len(moved.starts), step):
        source_offsets = np.add.outer(moved.starts[first : first + step], source_runs).reshape(-1)
        target_offsets = np.add.outer(moved.targets[first : first + step], target_runs).reshape(-1)
        yield first, _EqualRuns(read, source_offsets), _EqualRuns(written, target_offsets)


def _runs_anywhere(data: memoryview, run_bytes: int) -> np.ndarray[Any, np.dtype[np.void]]:
    """Return an array whose element number n is the run of `run_bytes` bytes that begins at byte n of `data`."""
    return np.ndarray((len(data) - run_bytes + 1,), np.dtype((np.void, run_bytes)), data, 0, (1,))
