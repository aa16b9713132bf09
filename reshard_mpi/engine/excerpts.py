"""A few elements of a tensor, read from its shard."""

from __future__ import annotations

from collections.abc import Iterator

from reshard_mpi.engine.files import Files
from reshard_mpi.engine.stream import Stream
from reshard_mpi.formats.columns import TensorEntry
from reshard_mpi.formats.places import ByteRange, Decoded, Segments, Strided
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.strides import Strides


def excerpt(files: Files, entry: TensorEntry, box: Box) -> bytes:
    """Return the bytes of `box`, a run of the row-major elements that a shard holds, in this machine's byte order.

    box: in coordinates of the part that the shard holds. Raises ShardError if the bytes cannot be read.
    """
    if isinstance(entry.source, Decoded):
        return entry.source.read(box).tobytes()
    assert isinstance(entry.source, Segments | Strided)  # since it is in a shard
    content = bytearray(box.size * entry.dtype.itemsize_bytes)
    for part, start in _parts(entry, box):
        files.read_into(part, memoryview(content)[start : start + part.length_bytes])
    if entry.source.swapped:
        width = entry.dtype.part_bytes
        for start in range(0, len(content), width):
            content[start : start + width] = content[start : start + width][::-1]
    return bytes(content)


def _parts(entry: TensorEntry, box: Box) -> Iterator[tuple[ByteRange, int]]:
    """Yield the file ranges that make up a box, each with its offset in the row-major bytes of the box."""
    stored, itemsize = entry.stored, entry.dtype.itemsize_bytes
    assert stored is not None
    if entry.steps is None and len(stored.ranges) == 1:
        path, first_byte, _ = stored.ranges[0]
        yield ByteRange(path, first_byte + Box.whole(entry.shape).offset_of(box) * itemsize, box.size * itemsize), 0
        return
    stream, start = Stream(stored), 0
    for runs in Strides.between(box, Box.whole(entry.shape), box, box, steps=entry.steps).runs():
        for number in range(runs.repeats):
            source_offset = runs.source_offset + number * runs.source_step
            for part in stream.parts(source_offset * itemsize, runs.length * itemsize):
                yield part, start
                start += part.length_bytes
