"""Say which bytes of sources a target is made of, in the order in which they are read (`source_ranges`).

An object store is asked for them before they are needed (`filesystem/object_files.ReadAhead`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from reshard_mpi.engine.read import Stream, byte_runs
from reshard_mpi.formats.locations import ByteRanges
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.planning.rank_plan import Copy, TensorPlan
from reshard_mpi.text import KIB, MIB

# Of a target tensor, what its sources are asked for in turn.
_TURN_BYTES = 8 * MIB
# Runs of this length are read one by one, shorter ones with what lies between them.
_LONG_RUN_BYTES = 128 * KIB

# The path of a file, the first byte, and how many.
SourceRange = tuple[str, int, int]


def source_ranges(
    tensors: Iterable[TensorPlan], target: Manifest, span: tuple[int, int] | None
) -> Iterator[SourceRange]:
    """Yield ranges of source files in the order in which `write_shard` reads them; some bytes between them are not.

    Args:
        span: the range of the target file that is written; None: all of it.
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
                    yield from _ranges_of(part, tensor, place, (first, last))


def _ranges_of(part: Copy, tensor: TensorPlan, place: Stream, span: tuple[int, int]) -> Iterator[SourceRange]:
    entry = part.source.unconverted
    if not isinstance(entry.source, ByteRanges):
        return  # chunks that a library decodes
    box, source = tensor.spec.box, Stream(entry.source)
    stored_itemsize = entry.dtype.itemsize_bytes
    if part.source.is_as_stored and part.strides(box).run_length * stored_itemsize >= _LONG_RUN_BYTES:
        for runs in part.strides(box).runs():
            for of_file in byte_runs(runs, stored_itemsize, source, place, span):
                for number in range(of_file.repeats):
                    yield of_file.source, of_file.source_offset + number * of_file.source_step, of_file.length_bytes
        return
    offset = part.source_box.offset_of(part.region) * stored_itemsize
    for piece in source.parts(offset, part.source_box.span_of(part.region) * stored_itemsize):
        yield piece.path, piece.offset_bytes, piece.length_bytes
