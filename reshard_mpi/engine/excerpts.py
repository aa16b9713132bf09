"""A few elements of a tensor, read from its shard."""

from __future__ import annotations

from reshard_mpi.engine.files import Files
from reshard_mpi.engine.stream import Stream
from reshard_mpi.formats.manifest import ByteRange, Decoded, TensorEntry
from reshard_mpi.sharding.box import Box


def excerpt(files: Files, entry: TensorEntry, box: Box) -> bytes:
    """Return the bytes of `box`, a run of the row-major elements that a shard holds, in this machine's byte order.

    box: in coordinates of the part that the shard holds. Raises ShardError if the bytes cannot be read.
    """
    if isinstance(entry.source, Decoded):
        return entry.source.read(box).tobytes()
    itemsize, offset = entry.dtype.itemsize_bytes, 0
    for length, first in zip(entry.shape, box.start):
        offset = offset * length + first
    offset_bytes = offset * itemsize
    content = bytearray(box.size * itemsize)
    if len(entry.source.ranges) == 1:
        whole = entry.source.ranges[0]
        files.read_into(ByteRange(whole.path, whole.offset_bytes + offset_bytes, len(content)), memoryview(content))
    else:
        done = 0
        for part in Stream(entry.source).parts(offset_bytes, len(content)):
            files.read_into(part, memoryview(content)[done : done + part.length_bytes])
            done += part.length_bytes
    if entry.source.swapped:
        width = entry.dtype.part_bytes
        for start in range(0, len(content), width):
            content[start : start + width] = content[start : start + width][::-1]
    return bytes(content)
