"""Find what targets are made of in an object store: fetch it (`SharedReading`), or have it copied (`copied_runs`)."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from reshard_mpi.engine.open_files import Staging
from reshard_mpi.engine.read import Stream, byte_runs
from reshard_mpi.engine.shard_transfer import is_copied
from reshard_mpi.filesystem.object_files import BLOCK_BYTES
from reshard_mpi.filesystem.object_parts import LEAST_PART_BYTES, CopiedRun, joined
from reshard_mpi.filesystem.paths import is_object_path
from reshard_mpi.filesystem.read_ahead import ReadAhead
from reshard_mpi.formats.locations import ByteRanges
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.planning.rank_plan import Limits, PlannedTensors, ReadItem, TensorPlan
from reshard_mpi.text import KIB

# Runs of this length are read one by one, shorter ones with what lies between them.
_LONG_RUN_BYTES = 128 * KIB
# Targets that have at least this share of short parts are filled side by side.
_LEAST_SHARE = 0.02
# Shorter runs are no parts of an object, even where neighbours are joined.
_SHORTEST_BYTES = 64 * KIB

# The path of a file, the first byte, and how many.
SourceRange = tuple[str, int, int]


class _FilledTarget(NamedTuple):
    """A target file that is filled (see `SharedReading.add`)."""

    tensors: PlannedTensors
    manifest: Manifest
    span: tuple[int, int] | None
    staging: Staging | None


class SharedReading:
    """Fetches what targets are made of that are filled side by side; what several of them need, once.

    Args:
        limits: with which they are filled.
    """

    def __init__(self, limits: Limits) -> None:
        self._turn_bytes = limits.buffer_bytes
        self._targets: list[_FilledTarget] = []
        self._ahead: ReadAhead | None = None

    def add(
        self, tensors: PlannedTensors, manifest: Manifest, span: tuple[int, int] | None, staging: Staging | None
    ) -> None:
        """Add a target before any is filled.

        Args:
            manifest: of its file.
            span: the range of the file that is written; None: all of it.
            staging: says which bytes of the file a store copies by itself, so that they are not read.
        """
        self._targets.append(_FilledTarget(tensors, manifest, span, staging))

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


def _source_ranges(targets: Iterable[_FilledTarget], turn_bytes: int) -> Iterator[SourceRange]:
    """Yield ranges of source files in the order in which they are read; some bytes between them are not.

    Targets take turns: the next one is that of the target with the smallest share filled, as where they are filled.

    Args:
        turn_bytes: of a target tensor, what its sources are asked for in turn.
    """
    turns = (_turns(target, number, turn_bytes) for number, target in enumerate(targets))
    for _, _, ranges in heapq.merge(*turns, key=itemgetter(0, 1)):
        yield from ranges


def _turns(target: _FilledTarget, number: int, turn_bytes: int) -> Iterator[tuple[float, int, list[SourceRange]]]:
    """Yield for each step of a target the share that is filled before, its number, and the ranges that it needs."""
    size_bytes = max(1, sum(len(group.names) * group.kind.size_bytes for group in target.tensors.groups))
    done_bytes = 0
    for tensor in target.tensors:
        box, itemsize = tensor.spec.box, tensor.spec.dtype.itemsize_bytes
        place = Stream(target.manifest.payload(tensor.spec.name))
        first, last = place.within(target.span)
        if first >= last:
            continue
        for block in box.blocks(max(1, turn_bytes // itemsize), first // itemsize, -(-last // itemsize)):
            parts = filter(None, (item.meeting(block) for item in tensor.reads))
            ranges = (_ranges_of(part, tensor, place, (first, last), target.staging) for part in parts)
            yield done_bytes / size_bytes, number, list(chain.from_iterable(ranges))
            done_bytes += block.size * itemsize


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


def copied_runs(tensors: Iterable[TensorPlan], target: Manifest) -> list[CopiedRun]:
    """Return the ranges of a target, ascending, that are ranges of objects, and long enough for a store to copy.

    Shorter ones are among them where they may be longer together with a neighbour of another tensor. All ranges of a
    tensor of which a rank holds some columns would take more memory than its plan.
    """
    found = list[CopiedRun]()
    for tensor in tensors:
        runs = joined(sorted(_runs_of(tensor, target)))
        last = len(runs) - 1
        found += (run for at, run in enumerate(runs) if at in (0, last) or run.length_bytes >= LEAST_PART_BYTES)
    return sorted(found)


def _runs_of(tensor: TensorPlan, target: Manifest) -> Iterator[CopiedRun]:
    """Yield the ranges of a tensor that are ranges of objects, without short ones."""
    place, itemsize = Stream(target.payload(tensor.spec.name)), tensor.spec.dtype.itemsize_bytes
    if tensor.spec.size_bytes < _SHORTEST_BYTES or not is_copied(tensor):
        return
    for item in tensor.reads:
        stored = item.source.stored
        if stored is None or item.strides(tensor.spec.box).run_length * itemsize < _SHORTEST_BYTES:
            continue
        for runs in item.strides(tensor.spec.box).runs():
            for of_file in byte_runs(runs, itemsize, Stream(stored), place, place.within(None)):
                for number in range(of_file.repeats if is_object_path(of_file.source) else 0):
                    yield CopiedRun(
                        of_file.target_offset + number * of_file.target_step,
                        of_file.length_bytes,
                        of_file.source,
                        of_file.source_offset + number * of_file.source_step,
                    )


def _ranges_of(
    part: ReadItem, tensor: TensorPlan, place: Stream, span: tuple[int, int], staging: Staging | None
) -> Iterator[SourceRange]:
    entry = part.source.unconverted
    if not isinstance(entry.source, ByteRanges):
        return  # chunks that a library decodes
    box, source = tensor.spec.box, Stream(entry.source)
    stored_itemsize = entry.dtype.itemsize_bytes
    if part.source.is_as_stored and part.strides(box).run_length * stored_itemsize >= _LONG_RUN_BYTES:
        for runs in part.strides(box).runs():
            for of_file in byte_runs(runs, stored_itemsize, source, place, span):
                for number in range(of_file.repeats):
                    read = of_file.source_offset + number * of_file.source_step
                    target = of_file.target_offset + number * of_file.target_step
                    missing = [(target, of_file.length_bytes)]
                    for start, length in missing if staging is None else staging.missing_in(*missing[0]):
                        yield of_file.source, read + start - target, length
        return
    offset = part.source_box.offset_of(part.region) * stored_itemsize
    for piece in source.parts(offset, part.source_box.span_of(part.region) * stored_itemsize):
        yield piece.path, piece.offset_bytes, piece.length_bytes
