"""Small tensors moved many at a time: what one costs by itself is more than moving its bytes.

Tensors that follow each other in the target are put together in one buffer, with whatever lies between them, and
written by one call. Their sources are mapped; numpy takes the runs of all that are alike from their places to their
places at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from reshard_mpi.engine.files import Files
from reshard_mpi.formats.columns import ELSEWHERE
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.places import ByteRange
from reshard_mpi.planning.model import Group, Limits, PlannedTensors
from reshard_mpi.sharding.strides import Strides

Numbers = np.ndarray[Any, np.dtype[np.int64]]
# From one byte of a file to another.
Span = tuple[int, int]

# So many runs are moved at once, by lists of their places; a tensor that has more of them in a part is moved by itself.
_MAX_RUNS = 1 << 16
_MAX_RUNS_OF_ONE = 1 << 13
# Together with what lies between them tensors are written only if they are smaller than this on average: that is read
# first, and so is their place.
_WRITTEN_TOGETHER_BYTES = 16 << 10
# No more of a source is mapped than so many times what is taken of it, but for a little.
_SPARSE, _LITTLE_BYTES = 16, 64 << 10


class _Route(NamedTuple):
    """Where a part of some tensors comes from: a file, and where each tensor begins there.

    first_bytes, span_bytes: where in what the source holds of a tensor the part begins, and how far it reaches.
    """

    path: str
    starts: Numbers
    first_bytes: int
    span_bytes: int
    strides: Strides
    itemsize: int

    @property
    def size_bytes(self) -> int:
        return self.strides.size * self.itemsize


class _Places(NamedTuple):
    """The tensors of a target in file order: group, place in the group, first byte, size; and what can be batched."""

    groups: Numbers
    in_group: Numbers
    starts: Numbers
    sizes: Numbers
    small: np.ndarray[Any, np.dtype[np.bool_]]


class Batches:
    """The small tensors of one target, where they are many. most_bytes: how large one of them is at the most."""

    def __init__(
        self, tensors: PlannedTensors, target: Manifest, span: Span | None, limits: Limits, most_bytes: int
    ) -> None:
        self._tensors = tensors
        self._path = target.path
        self._limits = limits
        self._routes: dict[int, tuple[_Route, ...]] = {}
        self._places = _places(tensors, target, span, limits, most_bytes)

    def stretches(self) -> Iterator[tuple[int, int, bool]]:
        """Yield stretches of tensors, in file order: the first, the one after the last, and whether they are small."""
        small = self._places.small
        ends = [*(np.flatnonzero(small[1:] != small[:-1]) + 1).tolist(), len(small)]
        first = 0
        for end in ends if len(small) else ():
            yield first, end, bool(small[first])
            first = end

    def move(self, files: Files, first: int, last: int, buffer: memoryview) -> None:
        """Move the small tensors from one number to another."""
        starts, sizes = self._places.starts[first:last], self._places.sizes[first:last]
        at = 0
        while at < len(starts):
            room = starts[at] + len(buffer)
            count = int(np.searchsorted(starts[at:] + sizes[at:], room, "right"))
            self._move(files, first + at, first + at + count, buffer)
            at += count

    def _move(self, files: Files, first: int, last: int, buffer: memoryview) -> None:
        """Move tensors that the buffer has room for; fewer at a time if their sources lie too far apart."""
        parts = list(self._parts(first, last))
        windows: dict[str, tuple[int, int]] = {}
        for route, starts, _ in parts:
            low = int(starts.min()) + route.first_bytes
            high = int(starts.max()) + route.first_bytes + route.span_bytes
            known = windows.get(route.path, (low, high))
            windows[route.path] = min(low, known[0]), max(high, known[1])
        mapped_bytes = sum(high - low for low, high in windows.values())
        needed_bytes = sum(len(starts) * route.size_bytes for route, starts, _ in parts)
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
            own = [part for part in parts if part[0].path == path]
            requested_bytes = sum(len(starts) * route.size_bytes for route, starts, _ in own)
            with files.window(ByteRange(path, low, high - low), requested_bytes) as window:
                for route, starts, targets in own:
                    _take(window, starts - low, content, targets - begin, route)
        if together:
            files.write(ByteRange(self._path, begin, len(content)), content, moved_bytes)
            return
        places = zip(self._places.starts[first:last].tolist(), self._places.sizes[first:last].tolist())
        for start, size in places:
            files.write(ByteRange(self._path, start, size), content[start - begin : start - begin + size])

    def _parts(self, first: int, last: int) -> Iterator[tuple[_Route, Numbers, Numbers]]:
        """Yield what comes by each route: where the tensors begin in its file, and where in the target."""
        groups = self._places.groups[first:last]
        for number in np.unique(groups).tolist():
            chosen = np.flatnonzero(groups == number) + first
            places, targets = self._places.in_group[chosen], self._places.starts[chosen]
            for route in self._routes_of(number):
                yield route, route.starts[places], targets

    def _routes_of(self, number: int) -> tuple[_Route, ...]:
        if number not in self._routes:
            self._routes[number] = tuple(_routes(self._tensors.groups[number]))
        return self._routes[number]


def _places(tensors: PlannedTensors, target: Manifest, span: Span | None, limits: Limits, most_bytes: int) -> _Places:
    groups = np.asarray(tensors.group_of, np.int64)
    numbers = target.tensors.number_of
    own = np.fromiter((numbers[name] for name in tensors.specs.names), np.int64, len(tensors))
    starts = np.asarray(target.tensors.starts, np.int64)[own]
    sizes = np.array([group.kind.size_bytes for group in tensors.groups], np.int64)[groups]
    is_small = [
        0 < group.kind.size_bytes <= most_bytes and _is_plain(group) and _is_close(group, limits) and _is_in_runs(group)
        for group in tensors.groups
    ]
    small = np.array(is_small, bool)[groups] & (starts != ELSEWHERE)
    # Only where they follow each other in the file, and nobody else fills a part of them.
    small[1:] &= starts[1:] >= starts[:-1] + sizes[:-1]
    if span is not None:
        small &= (starts >= span[0]) & (starts + sizes <= span[1])
    return _Places(groups, np.asarray(tensors.place_in_group, np.int64), starts, sizes, small)


def _is_plain(group: Group) -> bool:
    """Tell whether all parts of the tensors lie in one piece in their files, as this machine has them."""
    return all(ELSEWHERE not in _starts(route.tensors.starts, route.numbers) for route in group.routes)


def _is_in_runs(group: Group) -> bool:
    """Tell whether the tensors lie in runs that are not too many, on both sides."""
    every = (route.strides(group.kind.box) for route in group.routes)
    return all(strides.size <= _MAX_RUNS_OF_ONE * strides.run_length for strides in every)


def _is_close(group: Group, limits: Limits) -> bool:
    """Tell whether the parts of each of the tensors lie close enough together in their files."""
    itemsize = group.kind.dtype.itemsize_bytes
    span_bytes = sum(route.source_box.span_of(route.region) for route in group.routes) * itemsize
    return span_bytes <= min(limits.window_bytes, _LITTLE_BYTES + _SPARSE * group.kind.size_bytes)


def _starts(starts: Sequence[int], numbers: Sequence[int]) -> Numbers:
    return np.asarray(starts, np.int64)[np.asarray(numbers, np.int64)]


def _routes(group: Group) -> Iterator[_Route]:
    itemsize, box = group.kind.dtype.itemsize_bytes, group.kind.box
    for route in group.routes:
        strides = route.strides(box)
        if strides.size:
            starts = _starts(route.tensors.starts, route.numbers)
            span_bytes = route.source_box.span_of(route.region) * itemsize
            yield _Route(route.tensors.path, starts, strides.source_offset * itemsize, span_bytes, strides, itemsize)


# What a few copies have alike; each takes 128 KiB at the most.
@lru_cache(maxsize=16)
def _runs(strides: Strides, itemsize: int) -> tuple[Numbers, Numbers]:
    """Return where the runs begin, in bytes, in the source and in the target."""
    at = to = np.zeros(1, np.int64)
    for length, step, target_step in strides.dimensions[:-1] if strides.run_length > 1 else strides.dimensions:
        each = np.arange(length, dtype=np.int64)
        at, to = np.add.outer(at, each * step).reshape(-1), np.add.outer(to, each * target_step).reshape(-1)
    return (at + strides.source_offset) * itemsize, (to + strides.target_offset) * itemsize


def _take(window: memoryview, starts: Numbers, content: memoryview, targets: Numbers, route: _Route) -> None:
    """Take the runs of tensors that begin at `starts` of the window to their places in those at `targets`."""
    own, others = _runs(route.strides, route.itemsize)
    run_bytes = route.strides.run_length * route.itemsize
    held, places = _runs_anywhere(window, run_bytes), _runs_anywhere(content, run_bytes)
    step = max(1, _MAX_RUNS // len(own))
    for first in range(0, len(starts), step):
        at = np.add.outer(starts[first : first + step], own).reshape(-1)
        to = np.add.outer(targets[first : first + step], others).reshape(-1)
        places[to] = held[at]


def _runs_anywhere(data: memoryview, run_bytes: int) -> np.ndarray[Any, np.dtype[np.void]]:
    """Return an array in which every byte of `data` begins a run of so many bytes, as far as it has room."""
    return np.ndarray((len(data) - run_bytes + 1,), np.dtype((np.void, run_bytes)), data, 0, (1,))
