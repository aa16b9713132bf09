"""Compute where parameters lie in the flat vectors of DeepSpeed's ZeRO (`in_partitions`, `in_slices`).

Stages 1 and 2 put the parameters of a group into one vector, row-major and one behind the other, and cut it into equal
partitions, one a data-parallel rank. Stage 3 cuts every parameter by itself into slices of ceil(elements / ranks), and
each rank has its slices of all parameters of a group one behind the other. What is left at the end is padding.
(deepspeed/runtime/zero/stage_1_and_2.py and stage3.py of release 0.19; the alignment of parameters since 0.19.7.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class FlatRun(NamedTuple):
    """A run of elements in the vector of one rank. All numbers are in elements."""

    rank: int  # its place among the ranks that share the group
    start: int  # in that rank's vector
    length: int


class SizeError(ValueError):
    """Sizes that contradict each other: the expected ones, and others."""

    def __init__(self, expected: str, got: str) -> None:
        super().__init__(expected, got)
        self.expected, self.got = expected, got


def in_partitions(sizes: Sequence[int], gaps: Sequence[int], held: Sequence[int]) -> Iterator[tuple[FlatRun, ...]]:
    """Yield for each parameter of a group of stages 1 and 2 its runs, in order.

    Args:
        sizes: how many elements each parameter has.
        gaps: how many elements lie between each and the next one.
        held: how many elements each rank's partition has in its file, with its padding or without.

    Raises SizeError if the parameters do not fill these partitions.
    """
    if len(gaps) != len(sizes):
        raise SizeError(f"{len(sizes)} gaps, one behind each parameter", str(len(gaps)))
    total = sum(sizes) + sum(gaps)
    partition = max(held)
    for rank, length in enumerate(held):
        needed = min(max(total - rank * partition, 0), partition)
        if length not in (needed, partition):
            raise SizeError(
                f"{needed} elements in the partition of rank {rank}, or {partition} with padding: the parameters have"
                f" {total} in all",
                str(length),
            )
    if total > partition * len(held):
        raise SizeError(f"{total} elements in all partitions", str(sum(held)))
    start = 0
    for size, gap in zip(sizes, gaps, strict=True):
        yield tuple(_runs(start, size, partition))
        start += size + gap


def _runs(start: int, size: int, partition: int) -> Iterator[FlatRun]:
    """Yield the runs of `size` elements from `start` on in a vector that is cut into partitions."""
    end = start + size
    while start < end:
        rank, inside = divmod(start, partition)
        length = min(partition - inside, end - start)
        yield FlatRun(rank, inside, length)
        start += length


def in_slices(sizes: Sequence[int], held: Sequence[int]) -> Iterator[tuple[FlatRun, ...]]:
    """Yield for each parameter of a group of stage 3 its runs, in order.

    Args:
        sizes: how many elements each parameter has.
        held: how many elements each rank's vector has.

    Raises SizeError if the slices do not fill these vectors.
    """
    ranks = len(held)
    slices = [math.ceil(size / ranks) for size in sizes]
    for rank, length in enumerate(held):
        if length != sum(slices):
            expected = f"{sum(slices)} elements in the vector of rank {rank}: a slice of each parameter"
            raise SizeError(expected, str(length))
    start = 0
    for size, length in zip(sizes, slices):
        yield tuple(
            FlatRun(rank, start, min(length, size - rank * length)) for rank in range(ranks) if rank * length < size
        )
        start += length


def round_robin(count: int, ranks: int) -> list[int]:
    """Return the numbers of a group's parameters in the order in which `round_robin_gradients` lays them out."""
    return [number for first in range(min(ranks, count)) for number in range(first, count, ranks)]


class OwnRun(NamedTuple):
    """The elements of a parameter in one rank's vector. All numbers but the first are in elements.

    Attributes:
        parameter: its number in the group.
        before: how many elements of it are in the vectors of lower ranks.
        start, length: of the run in the vector.
    """

    parameter: int
    before: int
    start: int
    length: int


def own_in_partition(sizes: Sequence[int], gaps: Sequence[int], partition: int, rank: int) -> Iterator[OwnRun]:
    """Yield the parameters in a rank's partition of stages 1 and 2. partition: its length, with padding."""
    low, high, start = rank * partition, (rank + 1) * partition, 0
    for number, (size, gap) in enumerate(zip(sizes, gaps, strict=True)):
        first, last = max(start, low), min(start + size, high)
        if first < last:
            yield OwnRun(number, first - start, first - low, last - first)
        start += size + gap


def own_slices(sizes: Sequence[int], ranks: int, rank: int) -> Iterator[OwnRun]:
    """Yield the slices of parameters in a rank's vector of stage 3."""
    start = 0
    for number, size in enumerate(sizes):
        length = math.ceil(size / ranks)
        before = rank * length
        if before < size:
            yield OwnRun(number, before, start, min(length, size - before))
        start += length
