"""Reads regions of source tensors into buffers, and compares copies; numpy is loaded only to gather many runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from reshard_mpi.engine.files import Files, OnBytes
from reshard_mpi.engine.stream import Stream
from reshard_mpi.planning.model import Check, Copy, Limits, TensorPlan, meeting
from reshard_mpi.sharding.box import Box
from reshard_mpi.units import KIB

# Up to so many runs are read one by one, straight to their places; more are gathered by numpy from a mapped window.
_FEW_RUNS = 32
# By so many bytes at a time sums are told apart; most differ in their first elements.
_TELLING_BYTES = 64 * KIB
# Rows of an array in which axes change places lie so much farther apart than they are long. Without it, the elements of
# a column would all fall on a few lines of the processor's cache where rows are as long as a power of two.
_SPACE_BYTES = 64


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


def with_space(box: Box, itemsize: int) -> Box:
    """Return a box with some space behind each row, unless rows are short."""
    if not box.ndim or (box.stop[-1] - box.start[-1]) * itemsize < _SPACE_BYTES:
        return box
    return Box(box.start, (*box.stop[:-1], box.stop[-1] + max(1, _SPACE_BYTES // itemsize)))


def read_region(files: Files, copy: Copy, region: Box, buffer: memoryview, limits: Limits) -> None:
    """Fill `buffer` with the row-major bytes of a region of the target, which must lie in the copy's target region."""
    fill(files, copy.part(region), region, buffer, limits)


def first_difference(
    check: Check, *, limits: Limits, files: Files | None = None, on_bytes: OnBytes = lambda _: None
) -> tuple[Copy, tuple[int, ...]] | None:
    """Return a copy that differs from the check's first one, and the index of the first element that differs.

    The index is that in the target. None if all copies are equal. Every copy is read once. files: open files to use;
    None: they are opened for this check alone. on_bytes: called with the number of bytes just compared, of all copies.
    """
    if files is None:
        with Files() as files:
            return first_difference(check, limits=limits, files=files, on_bytes=on_bytes)
    first, *others = check.copies
    itemsize = first.source.dtype.itemsize_bytes
    most_elements = max(1, min(first.region.size, limits.buffer_bytes // 2 // itemsize))
    expected, got = bytearray(most_elements * itemsize), bytearray(most_elements * itemsize)
    for block in first.target_region.blocks(most_elements):
        # Behind the block, both contents have the same bytes of a larger block before, so all can be compared.
        expected_block, got_block = (memoryview(content)[: block.size * itemsize] for content in (expected, got))
        read_region(files, first, block, expected_block, limits)
        for copy in others:
            read_region(files, copy, block, got_block, limits)
            if expected != got:  # compared as bytes, which is far faster than through views
                return copy, _element(block, _first_differing_byte(expected, got) // itemsize)
        on_bytes(block.size * itemsize * len(check.copies))
    return None


def first_same(check: Check, *, limits: Limits, files: Files) -> tuple[int, int] | None:
    """Return two source ranks whose copies are the same, and not zeros all of them; None if there are no such.

    It ends with the first block by which all copies are told apart.
    """
    first = check.copies[0]
    itemsize = first.source.dtype.itemsize_bytes
    most_elements = max(1, min(first.region.size, _TELLING_BYTES // itemsize, limits.buffer_bytes // itemsize))
    content = memoryview(bytearray(most_elements * itemsize))
    alike, has_values = [check.copies], [False]  # copies that are the same so far, and whether they hold anything
    for block in first.target_region.blocks(most_elements):
        block_content = content[: block.size * itemsize]
        divided: dict[tuple[int, bytes], list[Copy]] = {}
        for number, copies in enumerate(alike):
            for copy in copies:
                read_region(files, copy, block, block_content, limits)
                divided.setdefault((number, hashlib.sha256(block_content).digest()), []).append(copy)
        zeros = hashlib.sha256(bytes(len(block_content))).digest()
        left = [(key, copies) for key, copies in divided.items() if len(copies) > 1]
        alike, has_values = (
            [tuple(copies) for _, copies in left],
            [has_values[number] or digest != zeros for (number, digest), _ in left],
        )
        if not alike:
            return None
    same = next((copies for copies, holds in zip(alike, has_values) if holds), None)
    return None if same is None else (same[0].source_rank, same[1].source_rank)


def digest_unless_zeros(copy: Copy, *, limits: Limits, files: Files) -> bytes | None:
    """Return a digest of all bytes of a copy; None if they are all zero."""
    itemsize = copy.source.dtype.itemsize_bytes
    most_elements = max(1, min(copy.region.size, _TELLING_BYTES // itemsize, limits.buffer_bytes // itemsize))
    content, zeros = memoryview(bytearray(most_elements * itemsize)), bytes(most_elements * itemsize)
    digest, has_values = hashlib.sha256(), False
    for block in copy.target_region.blocks(most_elements):
        block_content = content[: block.size * itemsize]
        read_region(files, copy, block, block_content, limits)
        digest.update(block_content)
        has_values = has_values or block_content != zeros[: len(block_content)]
    return digest.digest() if has_values else None


def first_difference_of_tensors(
    files: Files, first: TensorPlan, second: TensorPlan, limits: Limits, on_bytes: OnBytes = lambda _: None
) -> tuple[int, ...] | None:
    """Return the index of the first element, in row-major order, in which two tensors of the same box and type differ.

    None if they are equal. on_bytes: called with the number of bytes of a tensor that have just been compared.
    """
    box, itemsize = first.spec.box, first.spec.dtype.itemsize_bytes
    both = (_contents(files, tensor, box, limits) for tensor in (first, second))
    for (block, expected), (_, got) in zip(*both):
        if expected != got:
            return _element(block, _first_differing_byte(expected, got) // itemsize)
        on_bytes(block.size * itemsize)
    return None


def first_nonzero(files: Files, tensor: TensorPlan, box: Box, limits: Limits) -> tuple[int, ...] | None:
    """Return the index of the first element of a box, in row-major order, that is not zero; None if all are.

    All bytes of a zero are 0, so -0.0 is none.
    """
    for block, content in _contents(files, tensor, box, limits):
        zeros = bytearray(len(content))
        if content != zeros:
            return _element(block, _first_differing_byte(content, zeros) // tensor.spec.dtype.itemsize_bytes)
    return None


def _contents(files: Files, tensor: TensorPlan, box: Box, limits: Limits) -> Iterator[tuple[Box, bytearray]]:
    """Yield blocks of a box of a tensor with their bytes. Behind those of the last there are some of one before."""
    itemsize = tensor.spec.dtype.itemsize_bytes
    most_elements = max(1, min(box.size, limits.buffer_bytes // 2 // itemsize))
    content = bytearray(most_elements * itemsize)
    for block in box.blocks(most_elements):
        for part in meeting(tensor.copies, block):
            fill(files, part, block, memoryview(content)[: block.size * itemsize], limits)
        yield block, content


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


def _first_differing_byte(left: bytearray, right: bytearray) -> int:
    """Return the offset of the first byte in which two contents differ, found by halves. They must differ."""
    start, stop = 0, len(left)
    while stop - start > 1:
        middle = (start + stop) // 2
        if left[start:middle] == right[start:middle]:
            start = middle
        else:
            stop = middle
    return start


def _element(block: Box, number: int) -> tuple[int, ...]:
    """Return the global index of element `number` in the row-major order of a block."""
    index = []
    for start, length in zip(reversed(block.start), reversed(block.shape)):
        number, place = divmod(number, length)
        index.append(start + place)
    return tuple(reversed(index))
