"""Find what targets are made of in an object store: fetch it (`SharedReading`), or have it copied (`plan_parts`).

A store can copy a range of another object into a part by itself. But a part has 5 MiB at least, unless it is the last,
and there are 10,000 at most. So where less than that lies between two ranges that are copied, the client sends the end
of the one, or the beginning of the other, as well; or it sends a short range whole. Bytes that are sent though they
could be copied are lent: they make the part beside it long enough.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from operator import itemgetter
from typing import NamedTuple

from reshard_mpi.engine.open_files import Staging
from reshard_mpi.engine.read import Stream, byte_runs
from reshard_mpi.engine.shard_transfer import OpenTarget, WrittenPart, is_copied, parts_within
from reshard_mpi.filesystem.object_files import BLOCK_BYTES
from reshard_mpi.filesystem.paths import is_object_path
from reshard_mpi.filesystem.read_ahead import ReadAhead
from reshard_mpi.formats.locations import ByteRanges
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.planning.rank_plan import Limits, PlannedTensors, ReadItem, TensorPlan
from reshard_mpi.text import GIB, KIB, MIB

# Runs of this length are read one by one, shorter ones with what lies between them.
_LONG_RUN_BYTES = 128 * KIB
# Targets that have at least this share of short parts are filled side by side.
_LEAST_SHARE = 0.02
# Shorter runs are no parts of an object, even where neighbours are joined.
_SHORTEST_BYTES = 64 * KIB
# The smallest part but the last, and how many there may be (Amazon S3, "Multipart upload limits").
LEAST_PART_BYTES, MOST_PARTS = 5 * MIB, 10_000
# How long a part is that is sent, and one that is copied, which takes the store a while.
SENT_BYTES, COPIED_BYTES = 8 * MIB, GIB
# How many ranges in a row may be sent though they could be copied, and how many states of a range are kept.
_MOST_SENT_RUNS, _MOST_STATES = 3, 8

# The path of a file, the first byte, and how many.
SourceRange = tuple[str, int, int]


class SharedReading:
    """Fetches what targets are made of that are filled side by side; what several of them need, once.

    Args:
        limits: with which they are filled.
    """

    def __init__(self, limits: Limits) -> None:
        self._turn_bytes = limits.buffer_bytes
        self._targets: list[tuple[OpenTarget, Staging | None]] = []
        self._ahead: ReadAhead | None = None

    def add(self, target: OpenTarget, staging: Staging | None) -> None:
        """Add a target before any is filled.

        Args:
            staging: says which bytes of the file a store copies by itself, so that they are not read.
        """
        self._targets.append((target, staging))

    @property
    def ahead(self) -> ReadAhead:
        """What reads ahead for all targets that have been added."""
        if self._ahead is None:
            self._ahead = ReadAhead(_source_ranges(self._targets, self._turn_bytes))
        return self._ahead

    def close(self) -> None:
        """Wait for requests that are under way, and forget all."""
        if self._ahead is not None:
            self._ahead.close()


def _source_ranges(targets: Iterable[tuple[OpenTarget, Staging | None]], turn_bytes: int) -> Iterator[SourceRange]:
    """Yield ranges of source files in the order in which they are read; some bytes between them are not.

    Targets take turns: the next one is that of the target with the smallest share filled, as where they are filled.

    Args:
        turn_bytes: of a target tensor, what its sources are asked for in turn.
    """
    turns = (_turns(*target, number, turn_bytes) for number, target in enumerate(targets))
    for _, _, ranges in heapq.merge(*turns, key=itemgetter(0, 1)):
        yield from ranges


def _turns(
    target: OpenTarget, staging: Staging | None, number: int, turn_bytes: int
) -> Iterator[tuple[float, int, list[SourceRange]]]:
    """Yield for each step of a target the share that is filled before, its number, and the ranges that it needs."""
    size_bytes, done_bytes = max(1, target.plan.written_bytes), 0
    for filled in parts_within(target.plan.tensors, target.manifest, target.span):
        tensor, (first, last) = filled.tensor, filled.span
        box, itemsize = tensor.spec.box, tensor.spec.dtype.itemsize_bytes
        for block in box.blocks(max(1, turn_bytes // itemsize), first // itemsize, -(-last // itemsize)):
            parts = filter(None, (item.meeting(block) for item in tensor.reads))
            ranges = (_ranges_of(part, filled, staging) for part in parts)
            yield done_bytes / size_bytes, number, list(chain.from_iterable(ranges))
            done_bytes += block.size * itemsize


def _ranges_of(part: ReadItem, filled: WrittenPart, staging: Staging | None) -> Iterator[SourceRange]:
    """Yield the ranges of source files from which `part`, of a part of a tensor that is filled, is read."""
    entry = part.source.unconverted
    if not isinstance(entry.source, ByteRanges):
        return  # chunks that a library decodes
    box, source = filled.tensor.spec.box, Stream(entry.source)
    stored_itemsize = entry.dtype.itemsize_bytes
    if part.source.is_as_stored and part.strides(box).run_length * stored_itemsize >= _LONG_RUN_BYTES:
        for runs in part.strides(box).runs(stored_itemsize):
            for path, _, in_files in byte_runs(runs, source, filled.place, filled.span):
                for read, target in in_files.offsets():
                    missing = [(target, in_files.length)]
                    for start, length in missing if staging is None else staging.missing_in(*missing[0]):
                        yield path, read + start - target, length
        return
    offset = part.source_box.offset_of(part.region) * stored_itemsize
    for piece in source.parts(offset, part.source_box.span_of(part.region) * stored_itemsize):
        yield piece.path, piece.offset_bytes, piece.length_bytes


def shares_blocks(tensors: PlannedTensors) -> bool:
    """Tell whether much of a target is short parts of objects, with parts of other targets between them."""
    short_bytes = all_bytes = 0
    for group in tensors.groups:
        tensor, count = group.tensor(0), len(group.names)
        for item in tensor.reads:
            entry, strides = item.source.unconverted, item.strides(tensor.spec.box)
            if not isinstance(entry.source, ByteRanges):
                continue
            size_bytes = count * strides.size * entry.dtype.itemsize_bytes
            all_bytes += size_bytes
            if strides.size < item.source_box.size and strides.run_length * entry.dtype.itemsize_bytes < BLOCK_BYTES:
                short_bytes += size_bytes
    return short_bytes > _LEAST_SHARE * all_bytes


class TargetRange(NamedTuple):
    """A range of the target. path: of the object that it is copied from, at `offset`; empty: it is sent."""

    start: int
    length_bytes: int
    path: str = ""
    offset: int = 0

    @property
    def end(self) -> int:
        return self.start + self.length_bytes


def copied_runs(tensors: Iterable[TensorPlan], target: Manifest) -> list[TargetRange]:
    """Return the ranges of a target, ascending, that are ranges of objects, and long enough for a store to copy.

    Shorter ones are among them where they may be longer together with a neighbour of another tensor. All ranges of a
    tensor of which a rank holds some columns would take more memory than its plan.
    """
    found = list[TargetRange]()
    for tensor in tensors:
        runs = _joined(sorted(_runs_of(tensor, target)))
        last = len(runs) - 1
        found += (run for at, run in enumerate(runs) if at in (0, last) or run.length_bytes >= LEAST_PART_BYTES)
    return sorted(found)


def _runs_of(tensor: TensorPlan, target: Manifest) -> Iterator[TargetRange]:
    """Yield the ranges of a tensor that are ranges of objects, without short ones."""
    place, itemsize = Stream(target.payload(tensor.spec.name)), tensor.spec.dtype.itemsize_bytes
    if tensor.spec.size_bytes < _SHORTEST_BYTES or not is_copied(tensor):
        return
    for item in tensor.reads:
        stored = item.source.stored
        if stored is None or item.strides(tensor.spec.box).run_length * itemsize < _SHORTEST_BYTES:
            continue
        for runs in item.strides(tensor.spec.box).runs(itemsize):
            for path, _, in_files in byte_runs(runs, Stream(stored), place, place.within(None)):
                for offset, start in in_files.offsets() if is_object_path(path) else ():
                    yield TargetRange(start, in_files.length, path, offset)


def _joined(runs: Iterable[TargetRange]) -> list[TargetRange]:
    """Return runs, neighbours that are one range of one object as one."""
    all_runs: list[TargetRange] = []
    for run in runs:
        last = all_runs[-1] if all_runs else None
        behind = None if last is None else (last.end, last.path, last.offset + last.length_bytes)
        if last is not None and behind == (run.start, run.path, run.offset):
            all_runs[-1] = last._replace(length_bytes=last.length_bytes + run.length_bytes)
        elif run.length_bytes:
            all_runs.append(run)
    return all_runs


class _State(NamedTuple):
    """A way to make the target up to a run that is copied."""

    sent_bytes: int  # before the run, and of its beginning
    lent_bytes: int  # of its beginning, which are sent
    number: int  # of the run
    before: _State | None  # how the target is made up to the run that is copied before
    lent_before: int  # of the end of that run, which are sent


def plan_parts(
    size_bytes: int,
    runs: Iterable[TargetRange],
    *,
    is_uniform: bool = False,
    least: int = LEAST_PART_BYTES,
    sent: int = SENT_BYTES,
    copied: int = COPIED_BYTES,
    most: int = MOST_PARTS,
) -> list[TargetRange]:
    """Return the parts of a target of `size_bytes` bytes, in their order.

    Args:
        runs: what may be copied, ascending and apart.
        is_uniform: whether the store wants all parts but the last equally long; then those are copied that lie in one
            run.
        least, sent, copied, most: limits of parts, in bytes, and how many there may be.
    """
    all_runs, least_run = _joined(runs), least
    while True:
        usable = [run for run in all_runs if run.length_bytes >= least_run]
        if is_uniform or not usable:
            parts = list(_uniform(size_bytes, usable, sent))
        else:
            parts = [piece for part in _chosen(size_bytes, usable, least) for piece in _cut(part, least, sent, copied)]
        if len(parts) <= most:
            return parts
        least_run, sent = 2 * least_run, 2 * sent


def _chosen(size_bytes: int, runs: Sequence[TargetRange], least: int) -> Iterator[TargetRange]:
    """Yield parts of any length, so that as few bytes as possible are sent."""
    states: list[list[_State]] = []
    for number, run in enumerate(runs):
        # The last part may be short.
        kept = least if run.end < size_bytes else 1
        found = []
        if (first := _state(number, run, 0, kept, None, 0, least)) is not None:
            found.append(first)
        for earlier in range(max(0, number - 1 - _MOST_SENT_RUNS), number):
            for before in states[earlier]:
                spare = runs[earlier].length_bytes - before.lent_bytes - least
                state = _state(number, run, runs[earlier].end, kept, before, spare, least)
                if state is not None:
                    found.append(state)
        states.append(_best(found))

    def sent_bytes(state: _State) -> int:
        return state.sent_bytes + size_bytes - runs[state.number].end

    best = min((state for of_run in states for state in of_run), key=sent_bytes, default=None)
    if best is None or sent_bytes(best) >= size_bytes:
        yield TargetRange(0, size_bytes)
        return
    yield from _parts_of(best, runs, size_bytes)


def _state(
    number: int, run: TargetRange, done: int, kept: int, before: _State | None, spare: int, least: int
) -> _State | None:
    """Return the way to copy a run after `before`; None if the bytes between cannot be a part.

    Args:
        done: up to where the target is made, with the run before.
        kept: how many bytes of the run must be copied.
        spare: how many bytes the run before can lend.
    """
    between = run.start - done
    missing = max(0, least - between) if between else 0
    lent_before = min(missing, max(0, spare)) if before is not None else 0
    lent = missing - lent_before
    if run.length_bytes - lent < kept:
        return None
    sent_bytes = (0 if before is None else before.sent_bytes) + between + missing
    return _State(sent_bytes, lent, number, before, lent_before)


def _best(states: Iterable[_State]) -> list[_State]:
    """Return the states of a run, without any that sends more and has lent more than another."""
    best: list[_State] = []
    for state in sorted(states, key=lambda state: state[:2]):
        if not best or state.lent_bytes < best[-1].lent_bytes:
            best.append(state)
    return best[:_MOST_STATES]


def _parts_of(last: _State, runs: Sequence[TargetRange], size_bytes: int) -> Iterator[TargetRange]:
    copies: list[TargetRange] = []
    state: _State | None = last
    lent_behind = 0
    while state is not None:
        run = runs[state.number]
        length_bytes = run.length_bytes - state.lent_bytes - lent_behind
        copies.append(TargetRange(run.start + state.lent_bytes, length_bytes, run.path, run.offset + state.lent_bytes))
        lent_behind, state = state.lent_before, state.before
    done = 0
    for copy in reversed(copies):
        if copy.start > done:
            yield TargetRange(done, copy.start - done)
        yield copy
        done = copy.end
    if done < size_bytes:
        yield TargetRange(done, size_bytes - done)


def _cut(part: TargetRange, least: int, sent: int, copied: int) -> Iterator[TargetRange]:
    """Yield a part in equal pieces, none of them too long or too short."""
    count = -(-part.length_bytes // (copied if part.path else sent))
    count = max(1, min(count, part.length_bytes // least))
    bounds = [part.length_bytes * number // count for number in range(count + 1)]
    for first, end in pairwise(bounds):
        offset = part.offset + first if part.path else 0
        yield TargetRange(part.start + first, end - first, part.path, offset)


def _uniform(size_bytes: int, runs: Sequence[TargetRange], length_bytes: int) -> Iterator[TargetRange]:
    number = 0
    for start in range(0, max(1, size_bytes), length_bytes):
        end = min(start + length_bytes, size_bytes)
        while number < len(runs) and runs[number].end < end:
            number += 1
        run = runs[number] if number < len(runs) else None
        if run is not None and run.start <= start and end <= run.end:
            yield TargetRange(start, end - start, run.path, run.offset + start - run.start)
        else:
            yield TargetRange(start, end - start)
