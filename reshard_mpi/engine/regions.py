"""A region of a source tensor in a buffer, and where copies of one differ; numpy is loaded only to gather its runs."""

from __future__ import annotations

from reshard_mpi.engine.files import Files
from reshard_mpi.engine.stream import Stream
from reshard_mpi.planning.model import Check, Copy, Limits, TensorPlan
from reshard_mpi.sharding.box import Box

# So many runs are read one by one, straight to their places; more are gathered by numpy from a mapped window.
_FEW_RUNS = 32


def takes_numpy(copy: Copy, place: Box, buffer_bytes: int) -> bool:
    """Tell whether bringing a copy into blocks of `place`, of so many bytes, may take numpy."""
    if not copy.source.is_as_stored:
        return True
    length = copy.strides(place).run_length
    length_bytes = length * copy.source.dtype.itemsize_bytes
    # A block may begin and end within a run.
    return copy.region.size > _FEW_RUNS * length and buffer_bytes > (_FEW_RUNS - 2) * length_bytes


def fill(files: Files, copy: Copy, block: Box, buffer: memoryview, limits: Limits) -> None:
    """Fill what `buffer` has of the copy; it holds the elements of `block`, where all of the copy goes, row-major."""
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
    """Fill `buffer` with the row-major bytes of a region of the target, all of which the copy gives."""
    fill(files, copy.part(region), region, buffer, limits)


def first_difference(
    check: Check, *, limits: Limits, files: Files | None = None
) -> tuple[Copy, tuple[int, ...]] | None:
    """Return the first copy that differs from the check's first one, and the element (index in the target) where.

    Every copy is read once. files: open files of the caller's, for many checks of the same ones.
    """
    if files is None:
        with Files() as files:
            return first_difference(check, limits=limits, files=files)
    first, *others = check.copies
    itemsize = first.source.dtype.itemsize_bytes
    most_elements = max(1, min(first.region.size, limits.buffer_bytes // 2 // itemsize))
    expected, got = bytearray(most_elements * itemsize), bytearray(most_elements * itemsize)
    for block in first.target_region.blocks(most_elements):
        # What is left of a larger block before is the same in both.
        expected_block, got_block = (memoryview(content)[: block.size * itemsize] for content in (expected, got))
        read_region(files, first, block, expected_block, limits)
        for copy in others:
            read_region(files, copy, block, got_block, limits)
            if expected != got:  # compared as bytes, which is far faster than through views
                return copy, _element(block, _first_differing_byte(expected, got) // itemsize)
    return None


def first_difference_of_tensors(
    files: Files, first: TensorPlan, second: TensorPlan, limits: Limits
) -> tuple[int, ...] | None:
    """Return the first element, in row-major order, in which two plans of the same box and type differ."""
    box, itemsize = first.spec.box, first.spec.dtype.itemsize_bytes
    most_elements = max(1, min(box.size, limits.buffer_bytes // 2 // itemsize))
    expected, got = bytearray(most_elements * itemsize), bytearray(most_elements * itemsize)
    for block in box.blocks(most_elements):
        for tensor, content in ((first, expected), (second, got)):
            for copy in tensor.copies:
                part = copy.meeting(block)
                if part is not None:
                    fill(files, part, block, memoryview(content)[: block.size * itemsize], limits)
        if expected != got:
            return _element(block, _first_differing_byte(expected, got) // itemsize)
    return None


def _first_differing_byte(left: bytearray, right: bytearray) -> int:
    """Return where two contents differ for the first time, by halves; they do differ."""
    start, stop = 0, len(left)
    while stop - start > 1:
        middle = (start + stop) // 2
        if left[start:middle] == right[start:middle]:
            start = middle
        else:
            stop = middle
    return start


def _element(block: Box, number: int) -> tuple[int, ...]:
    """Return the global index of an element, counted in the row-major order of a block."""
    index = []
    for start, length in zip(reversed(block.start), reversed(block.shape)):
        number, place = divmod(number, length)
        index.append(start + place)
    return tuple(reversed(index))
