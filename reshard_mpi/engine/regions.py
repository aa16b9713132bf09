"""Reads regions of source tensors into buffers; numpy is loaded only to gather many runs."""

from __future__ import annotations

from reshard_mpi.engine.files import Files
from reshard_mpi.engine.stream import Stream
from reshard_mpi.planning.model import Copy, Limits, TensorPlan, meeting
from reshard_mpi.sharding.box import Box

# Up to so many runs are read one by one, straight to their places; more are gathered by numpy from a mapped window.
_FEW_RUNS = 32


def takes_numpy(copy: Copy, place: Box, buffer_bytes: int) -> bool:
    """Tell whether numpy may be needed to read a copy into blocks of box `place`, each of `buffer_bytes` at most."""
    if not copy.source.is_as_stored:
        return True
    length = copy.strides(place).run_length
    length_bytes = length * copy.source.dtype.itemsize_bytes
    # A block may begin and end within a run.
    return copy.region.size > _FEW_RUNS * length and buffer_bytes > (_FEW_RUNS - 2) * length_bytes


def fill(files: Files, copy: Copy, block: Box, buffer: memoryview, limits: Limits) -> None:
    """Read the source of a copy into its target region of `buffer`, which holds the elements of `block`, row-major.

    All of the copy's target region must lie in `block`. Raises ShardError if the source cannot be read.
    """
    strides = copy.strides(block)
    stored = copy.source.stored
    if stored is not None and not stored.swapped and strides.size <= _FEW_RUNS * strides.run_length:
        stream, itemsize = Stream(stored), copy.source.dtype.itemsize_bytes
        for runs in strides.runs():
            length_bytes = runs.length * itemsize
            for number in range(runs.repeats):
                start_bytes = (runs.target_offset + number * runs.target_step) * itemsize
                for part in stream.parts((runs.source_offset + number * runs.source_step) * itemsize, length_bytes):
                    files.read_into(part, buffer[start_bytes : start_bytes + part.length_bytes])
                    start_bytes += part.length_bytes
        return
    from reshard_mpi.engine.gather import gather_into

    gather_into(files, copy, block, buffer, limits)


def read_region(files: Files, copy: Copy, region: Box, buffer: memoryview, limits: Limits) -> None:
    """Fill `buffer` with the row-major bytes of a region of the target, which must lie in the copy's target region."""
    fill(files, copy.part(region), region, buffer, limits)


def element_of(files: Files, tensor: TensorPlan, index: tuple[int, ...], limits: Limits) -> bytes:
    """Return the bytes of the element at a global index."""
    box = Box(index, tuple(number + 1 for number in index))
    content = bytearray(tensor.spec.dtype.itemsize_bytes)
    fill(files, meeting(tensor.copies, box)[0], box, memoryview(content), limits)
    return bytes(content)


def only_element(files: Files, tensor: TensorPlan, limits: Limits) -> bytes:
    """Return the bytes of a tensor of one element. Raises ValueError if it has more."""
    if tensor.spec.box.size != 1:
        raise ValueError(f"{tensor.spec.name} has {tensor.spec.box.size} elements")
    return element_of(files, tensor, tensor.spec.box.start, limits)
