"""Compare copies and tensors, find the first difference, and say it in words (`first_difference`)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from reshard_mpi.engine.open_files import Files
from reshard_mpi.engine.read import Stream, element_of, fill, read_region
from reshard_mpi.errors import DamageError
from reshard_mpi.formats.dtypes import numbers
from reshard_mpi.formats.locations import ByteRange, Dequantized, LibraryRead, Reduced
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.protocol import OnBytes
from reshard_mpi.planning.chunk_reads import held_tensor
from reshard_mpi.planning.rank_choice import is_partial_sum
from reshard_mpi.planning.rank_plan import Check, Limits, RankPlan, ReadItem, TensorPlan, meeting
from reshard_mpi.sharding.box import Box
from reshard_mpi.text import KIB

# Sums are told apart by blocks of this size in bytes; most differ in their first elements.
_TELLING_BYTES = 64 * KIB


def first_difference(
    check: Check, *, limits: Limits, files: Files, on_bytes: OnBytes = lambda _: None
) -> tuple[ReadItem, tuple[int, ...]] | None:
    """Return a copy that differs from the check's first one, and the index of the first element that differs.

    The index is that in the target. None if all copies are equal. Every copy is read once.

    Args:
        on_bytes: called with the number of bytes just compared, of all copies.
    """
    first, *others = check.reads
    itemsize = first.source.dtype.itemsize_bytes
    most_elements = max(1, min(first.region.size, limits.buffer_bytes // 2 // itemsize))
    expected, got = bytearray(most_elements * itemsize), bytearray(most_elements * itemsize)
    for block in first.target_region.blocks(most_elements):
        # Behind the block, both contents have the same bytes of a larger block before, so all can be compared.
        expected_block, got_block = (memoryview(content)[: block.size * itemsize] for content in (expected, got))
        read_region(files, first, block, expected_block, limits)
        for item in others:
            read_region(files, item, block, got_block, limits)
            if expected != got:  # compared as bytes, which is far faster than through views
                return item, _element(block, _first_differing_byte(expected, got) // itemsize)
        on_bytes(block.size * itemsize * len(check.reads))
    return None


def first_same(check: Check, *, limits: Limits, files: Files) -> tuple[int, int] | None:
    """Return two source ranks whose copies are the same, and not zeros all of them; None if there are no such.

    It ends with the first block by which all copies are told apart.
    """
    alike, has_values = [check.reads], [False]  # copies that are the same so far, and whether they hold anything
    for block, content in _telling_blocks(check.reads[0], limits):
        divided: dict[tuple[int, bytes], list[ReadItem]] = {}
        for number, reads in enumerate(alike):
            for item in reads:
                read_region(files, item, block, content, limits)
                divided.setdefault((number, hashlib.sha256(content).digest()), []).append(item)
        zeros = hashlib.sha256(bytes(len(content))).digest()
        left = [(key, reads) for key, reads in divided.items() if len(reads) > 1]
        alike, has_values = (
            [tuple(reads) for _, reads in left],
            [has_values[number] or digest != zeros for (number, digest), _ in left],
        )
        if not alike:
            return None
    same = next((reads for reads, holds in zip(alike, has_values) if holds), None)
    return None if same is None else (same[0].source_rank, same[1].source_rank)


def digest_unless_zeros(item: ReadItem, *, limits: Limits, files: Files) -> bytes | None:
    """Return a digest of all bytes of a copy; None if they are all zero."""
    digest, has_values = hashlib.sha256(), False
    for block, content in _telling_blocks(item, limits):
        read_region(files, item, block, content, limits)
        digest.update(content)
        has_values = has_values or content != bytes(len(content))
    return digest.digest() if has_values else None


def _telling_blocks(item: ReadItem, limits: Limits) -> Iterator[tuple[Box, memoryview]]:
    """Yield the blocks of a copy by which it is told apart from others, each with a buffer for its bytes."""
    itemsize = item.source.dtype.itemsize_bytes
    most_elements = max(1, min(item.region.size, _TELLING_BYTES // itemsize, limits.buffer_bytes // itemsize))
    content = memoryview(bytearray(most_elements * itemsize))
    return ((block, content[: block.size * itemsize]) for block in item.target_region.blocks(most_elements))


def first_difference_of_tensors(
    files: Files, first: TensorPlan, second: TensorPlan, limits: Limits, on_bytes: OnBytes = lambda _: None
) -> tuple[int, ...] | None:
    """Return the index of the first element, in row-major order, in which two tensors of the same box and type differ.

    None if they are equal.

    Args:
        on_bytes: called with the number of bytes of a tensor that have just been compared.
    """
    box, itemsize = first.spec.box, first.spec.dtype.itemsize_bytes
    both = (contents(files, tensor, box, limits) for tensor in (first, second))
    for (block, expected), (_, got) in zip(*both):
        if expected != got:
            return _element(block, _first_differing_byte(expected, got) // itemsize)
        on_bytes(block.size * itemsize)
    return None


def difference_from_source(
    files: Files, tensor: TensorPlan, target: Manifest, limits: Limits, on_bytes: OnBytes = lambda _: None
) -> DamageError | None:
    """Return the error for a tensor of the shard `target` that differs from its sources; None if it does not.

    Args:
        on_bytes: called with the number of bytes just compared.
    """
    own = held_tensor(tensor.spec, target)
    element = first_difference_of_tensors(files, tensor, own, limits, on_bytes)
    if element is None:
        return None
    remedy = "make the target anew with --overwrite; if it differs again, look for a failing disk or memory"
    if is_partial_sum(tensor.spec.name):
        remedy = f"give the --accumulated that it was made with; if you did, {remedy}"
    return DamageError(
        f"{tensor.spec.name!r} differs from its source at element {list(element)}",
        expected=value_at(files, tensor, element, limits),
        got=value_at(files, own, element, limits),
        where=target.path,
        remedy=remedy,
    )


def where_it_differs(plan: RankPlan, target: Manifest, name: str, limits: Limits) -> DamageError:
    """Return the error for a tensor of the shard `target` whose sum differs from the sum of its sources."""
    tensor = next(tensor for tensor in plan.tensors if tensor.spec.name == name)
    with Files() as files:
        difference = difference_from_source(files, tensor, target, limits)
    return difference or DamageError(
        f"{name!r} was read as something else a moment ago",
        expected="the same bytes whenever they are read",
        got="sums that differed, and bytes that do not",
        where=target.path,
        remedy="make sure nothing writes to source or target; look for failing memory",
    )


def value_at(files: Files, tensor: TensorPlan, element: tuple[int, ...], limits: Limits) -> str:
    """Return the value of an element of a tensor, its bytes, and their place in the files, as words."""
    content = element_of(files, tensor, element, limits)
    (item,) = meeting(tensor.reads, Box(element, tuple(index + 1 for index in element)))
    return f"{numbers(content, tensor.spec.dtype)[0]} ({content.hex()}) {_place(item, element)}"


def _place(item: ReadItem, element: tuple[int, ...]) -> str:
    place, source = place_of(item, element), item.source.unconverted.source
    if place is not None:
        return f"at byte {place.offset_bytes} of {place.path}"
    if isinstance(source, Reduced):
        return "joined of several ranks"
    if isinstance(source, Dequantized):
        return f"dequantized from {source.weight.stored}"
    return f"in {source.path}" if isinstance(source, LibraryRead) else "in no file"


def place_of(item: ReadItem, element: tuple[int, ...]) -> ByteRange | None:
    """Return the first file range of an element's bytes. element: its index in the target.

    None if it is compressed, or in no file.
    """
    entry = item.source.unconverted
    stored = entry.stored
    if stored is None:
        return None
    part = item.part(Box(element, tuple(index + 1 for index in element)))
    itemsize = entry.dtype.itemsize_bytes
    return next(Stream(stored).parts(part.source_strides.source_offset * itemsize, itemsize))


def first_nonzero(files: Files, tensor: TensorPlan, box: Box, limits: Limits) -> tuple[int, ...] | None:
    """Return the index of the first element of a box, in row-major order, that is not zero; None if all are.

    All bytes of a zero are 0, so -0.0 is none.
    """
    for block, content in contents(files, tensor, box, limits):
        zeros = bytearray(len(content))
        if content != zeros:
            return _element(block, _first_differing_byte(content, zeros) // tensor.spec.dtype.itemsize_bytes)
    return None


def contents(
    files: Files, tensor: TensorPlan, box: Box, limits: Limits, most_elements: int | None = None
) -> Iterator[tuple[Box, bytearray]]:
    """Yield blocks of a tensor's box with their bytes. The buffer may hold older bytes behind the last block.

    Args:
        most_elements: of a block; None: as many as half the buffer of `limits` holds.
    """
    itemsize = tensor.spec.dtype.itemsize_bytes
    most_elements = max(1, min(box.size, most_elements or limits.buffer_bytes // 2 // itemsize))
    content = bytearray(most_elements * itemsize)
    for block in box.blocks(most_elements):
        for part in meeting(tensor.reads, block):
            fill(files, part, block, memoryview(content)[: block.size * itemsize], limits)
        yield block, content


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
