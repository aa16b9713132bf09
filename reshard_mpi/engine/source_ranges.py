"""Say which bytes of sources a target is made of: ranges to read (`source_ranges`) and to copy (`copied_runs`).

An object store is asked for the former before they are needed (`filesystem/read_ahead.ReadAhead`), and copies the
latter from object to object by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from reshard_mpi.engine.open_files import Staging
from reshard_mpi.engine.read import Stream, byte_runs
from reshard_mpi.engine.shard_transfer import is_copied
from reshard_mpi.filesystem.object_parts import CopiedRun
from reshard_mpi.filesystem.paths import is_object_path
from reshard_mpi.formats.locations import ByteRanges
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.planning.rank_plan import Copy, TensorPlan
from reshard_mpi.text import KIB, MIB

# Of a target tensor, what its sources are asked for in turn.
_TURN_BYTES = 8 * MIB
# Runs of this length are read one by one, shorter ones with what lies between them.
_LONG_RUN_BYTES = 128 * KIB
# Shorter runs are no parts of an object, even where neighbours are joined.
_SHORTEST_BYTES = 64 * KIB

# The path of a file, the first byte, and how many.
SourceRange = tuple[str, int, int]


def source_ranges(
    tensors: Iterable[TensorPlan], target: Manifest, span: tuple[int, int] | None, staging: Staging | None = None
) -> Iterator[SourceRange]:
    """Yield ranges of source files in the order in which `write_shard` reads them; some bytes between them are not.

    Args:
        span: the range of the target file that is written; None: all of it.
        staging: says which bytes of the target a store copies by itself, so that they are not read.
    """
    for tensor in tensors:
        box, itemsize = tensor.spec.box, tensor.spec.dtype.itemsize_bytes
        content = target.tensors[tensor.spec.name].source
        assert isinstance(content, ByteRanges)
        place = Stream(content)
        first, last = place.within(span)
        if first >= last:
            continue
        for block in box.blocks(max(1, _TURN_BYTES // itemsize), first // itemsize, -(-last // itemsize)):
            for copy in tensor.copies:
                part = copy.meeting(block)
                if part is not None:
                    yield from _ranges_of(part, tensor, place, (first, last), staging)


def copied_runs(tensors: Iterable[TensorPlan], target: Manifest) -> list[CopiedRun]:
    """Return the ranges of a target, ascending, that are ranges of objects, and long enough for a store to copy."""
    found = []
    for tensor in tensors:
        content = target.tensors[tensor.spec.name].source
        assert isinstance(content, ByteRanges)
        place, itemsize = Stream(content), tensor.spec.dtype.itemsize_bytes
        if tensor.spec.size_bytes < _SHORTEST_BYTES or not is_copied(tensor):
            continue
        for copy in tensor.copies:
            stored = copy.source.stored
            if stored is None or copy.strides(tensor.spec.box).run_length * itemsize < _SHORTEST_BYTES:
                continue
            for runs in copy.strides(tensor.spec.box).runs():
                for of_file in byte_runs(runs, itemsize, Stream(stored), place, place.within(None)):
                    found += [
                        CopiedRun(
                            of_file.target_offset + number * of_file.target_step,
                            of_file.length_bytes,
                            of_file.source,
                            of_file.source_offset + number * of_file.source_step,
                        )
                        for number in range(of_file.repeats)
                        if is_object_path(of_file.source)
                    ]
    return sorted(found)


def _ranges_of(
    part: Copy, tensor: TensorPlan, place: Stream, span: tuple[int, int], staging: Staging | None
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
