"""Compute sums (CRC-32) of tensors, from their sources or read back (`sum_shard`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from reshard_mpi.engine.crc import PartSum, has_short_runs
from reshard_mpi.engine.open_files import Files, OnBytes
from reshard_mpi.engine.read import Stream, read_region
from reshard_mpi.formats.locations import ByteRanges
from reshard_mpi.formats.manifest import Manifest, TensorSpec
from reshard_mpi.formats.tensor_table import ChunkedTensors, TensorEntry
from reshard_mpi.planning.chunk_reads import ChunkReads
from reshard_mpi.planning.rank_plan import Copy, Limits, RankPlan, TensorPlan, meeting
from reshard_mpi.sharding.box import Box

# The first byte of a range of a file, and the one after its last.
Span = tuple[int, int]


class Summed(NamedTuple):
    """The sum of one tensor's part. expected: by its sources; None if these were not read. found: by the shard."""

    tensor: TensorSpec
    expected: int | None
    found: int


def sum_shard(
    plan: RankPlan, target: Manifest, *, span: Span | None, limits: Limits, on_bytes: OnBytes = lambda _: None
) -> Iterator[Summed]:
    """Yield the sums of every tensor of `plan`, by its sources and by the shard `target`.

    Args:
        span: only elements that begin in this range of the target file, and tensors without elements; None: all.
        on_bytes: called with the number of bytes just summed; each byte of the target counts once, half of it for its
            source.

    Raises ShardError if a file cannot be read.
    """
    buffer = memoryview(bytearray(limits.buffer_bytes))
    with Files() as files:
        for tensor in plan.tensors:
            spec, entry = tensor.spec, target.tensors[tensor.spec.name]
            first, last = (0, spec.box.size) if span is None else _elements_within(entry, span)
            if first == last and spec.box.size:
                continue  # no element begins in the span; a tensor without elements belongs to every span
            blocks = tuple(spec.box.blocks(max(1, len(buffer) // spec.dtype.itemsize_bytes), first, last))
            expected = _sum(files, spec, tensor.copies, blocks, buffer, limits, lambda size: on_bytes(size // 2))
            own = held_tensor(spec, target).copies
            actual = _sum(files, spec, own, blocks, buffer, limits, lambda size: on_bytes(size - size // 2))
            yield Summed(spec, expected, actual)


def sum_tensors(
    tensors: Iterable[TensorSpec], shard: Manifest, *, limits: Limits, on_bytes: OnBytes
) -> Iterator[Summed]:
    """Yield the sums of `tensors` by the shard that holds them. Raises ShardError if it cannot be read.

    Args:
        on_bytes: called with the number of bytes just summed.
    """
    buffer = memoryview(bytearray(limits.buffer_bytes))
    with Files() as files:
        for spec in tensors:
            blocks = spec.box.blocks(max(1, len(buffer) // spec.dtype.itemsize_bytes))
            own = held_tensor(spec, shard).copies
            yield Summed(spec, None, _sum(files, spec, own, blocks, buffer, limits, on_bytes))


def sum_sources(tensors: Iterable[TensorPlan], *, limits: Limits, on_bytes: OnBytes) -> Iterator[Summed]:
    """Yield the sums of planned tensors by their sources. Raises ShardError if one cannot be read.

    Args:
        on_bytes: called with the number of bytes just summed.
    """
    buffer = memoryview(bytearray(limits.buffer_bytes))
    with Files() as files:
        for tensor in tensors:
            spec = tensor.spec
            blocks = spec.box.blocks(max(1, len(buffer) // spec.dtype.itemsize_bytes))
            yield Summed(spec, None, _sum(files, spec, tensor.copies, blocks, buffer, limits, on_bytes))


def takes_numpy(spec: TensorSpec, entry: TensorEntry) -> bool:
    """Tell whether numpy is loaded to sum a tensor of a shard."""
    return not entry.is_as_stored or has_short_runs(spec.box, Box.whole(spec.global_shape), spec.dtype.itemsize_bytes)


def held_tensor(spec: TensorSpec, shard: Manifest) -> TensorPlan:
    """Return a tensor as a shard that holds it gives it."""
    copy = Copy(-1, shard.tensors[spec.name], spec.box, spec.box)
    chunked = shard.tensors if isinstance(shard.tensors, ChunkedTensors) else None
    return TensorPlan(spec, (copy,) if chunked is None else ChunkReads(0, 1).copies(copy, chunked))


def _elements_within(entry: TensorEntry, span: Span) -> tuple[int, int]:
    """Return the first element that begins in a span of the file, and the one after the last."""
    assert isinstance(entry.source, ByteRanges)
    itemsize = entry.dtype.itemsize_bytes
    start, stop = Stream(entry.source).within(span)
    return -(-start // itemsize), -(-stop // itemsize)


def _sum(
    files: Files,
    spec: TensorSpec,
    copies: Sequence[Copy],
    blocks: Iterable[Box],
    buffer: memoryview,
    limits: Limits,
    on_bytes: OnBytes,
) -> int:
    """Return the sum of the elements in `blocks`, read by `copies`. on_bytes: called with the size of each block."""
    itemsize = spec.dtype.itemsize_bytes
    summed = PartSum(Box.whole(spec.global_shape), itemsize)
    for block in blocks:
        for part in meeting(copies, block):
            region = part.target_region
            content = buffer[: region.size * itemsize]
            read_region(files, part, region, content, limits)
            summed.add(region, content)
        on_bytes(block.size * itemsize)
    return summed.value
