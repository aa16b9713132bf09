"""Compute where parameters lie in flat vectors of DeepSpeed (`in_partitions`, `in_slices`), as its settings say.

Stages 1 and 2 put the parameters of a group into one vector, row-major and one behind the other, and cut it into equal
partitions, one a data-parallel rank. Stage 3 cuts every parameter by itself into slices of ceil(elements / ranks), and
each rank has its slices of all parameters of a group one behind the other. What is left at the end is padding. The
settings (`ds_config`) say which order and which gaps the parameters have.
(deepspeed/runtime/config.py, zero/config.py, `_do_optimizer_sanity_check` of engine.py, zero/stage_1_and_2.py and
stage3.py of release 0.19; the alignment of parameters since 0.19.7. Settings are checked by pydantic, which takes
several words and numbers for true, and texts for numbers.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from reshard_mpi.formats.dtypes import BY_NAME, DType
from reshard_mpi.formats.nest.nodes import Global, Value, entry_of

_ON = ("1", "true", "t", "yes", "y", "on")
_FLOAT32 = ("torch.float32", "fp32", "float32", "float")
# Elements of a sub-group of stage 3, where the settings do not say it.
_USUAL_SUB_GROUP = 10**9


def is_on(value: Value) -> bool:
    """Tell whether a setting stands for true."""
    if type(value) in (bool, int, float):
        return bool(value == 1)
    return type(value) is str and value.lower() in _ON


def type_in(config: Value) -> DType:
    """Return the type of a model's parameters."""
    for key, name in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16")):
        if is_on(entry_of(entry_of(config, key), "enabled")):
            return BY_NAME[name]
    return BY_NAME["float32"]


def has_bf16_optimizer(config: Value, stage: int) -> bool:
    """Tell whether the engine takes BF16_Optimizer for this stage, which knows neither order nor alignment."""
    accumulated = entry_of(entry_of(config, "data_types"), "grad_accum_dtype")
    is_float32 = accumulated in _FLOAT32 if type(accumulated) is str else accumulated == Global("torch", "float32")
    zero = entry_of(config, "zero_optimization")
    device = entry_of(entry_of(zero, "offload_optimizer"), "device")
    is_offloaded = device == "cpu" or is_on(entry_of(zero, "cpu_offload"))
    return stage == 1 and type_in(config).name == "bfloat16" and is_float32 and not is_offloaded


def has_round_robin(config: Value, stage: int) -> bool:
    """Tell whether the parameters of a group are dealt out over the ranks (`round_robin`)."""
    zero = entry_of(config, "zero_optimization")
    return stage < 3 and is_on(entry_of(zero, "round_robin_gradients")) and not has_bf16_optimizer(config, stage)


def is_aligned(config: Value, stage: int) -> bool:
    """Tell whether parameters begin at multiples of a number of bytes in their vector."""
    zero = entry_of(config, "zero_optimization")
    return stage < 3 and is_on(entry_of(zero, "parameter_alignment")) and not has_bf16_optimizer(config, stage)


def sub_group_size(config: Value) -> int | None:
    """Return how many elements a sub-group of stage 3 has; None if the setting is no whole number."""
    size = entry_of(entry_of(config, "zero_optimization"), "sub_group_size")
    if size is None:
        return _USUAL_SUB_GROUP
    if type(size) is str and size.strip().isascii() and size.strip().isdigit():
        return int(size)
    if type(size) is int or (type(size) is float and math.isfinite(size) and size == int(size)):
        return int(size)
    return None


class FlatRun(NamedTuple):
    """A run of elements of a parameter in the vector of one rank. All numbers but the first are in elements.

    Attributes:
        parameter: its number in the group.
        before: how many elements of it are in the vectors of lower ranks.
        start, length: of the run in the vector.
    """

    parameter: int
    before: int
    start: int
    length: int


# A run of a parameter that is read: the number of the rank in its group of ranks, the start in its vector, the length.
RankRun = tuple[int, int, int]


class SizeError(ValueError):
    """Sizes that contradict each other: the expected ones, and others."""

    def __init__(self, expected: str, got: str) -> None:
        super().__init__(expected, got)
        self.expected, self.got = expected, got


def in_partitions(sizes: Sequence[int], gaps: Sequence[int], held: Sequence[int]) -> Iterator[list[RankRun]]:
    """Return the runs of each parameter of a group of stages 1 and 2, in order.

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
    return _cut_runs(sizes, gaps, partition)


def _cut_runs(sizes: Sequence[int], gaps: Sequence[int], partition: int) -> Iterator[list[RankRun]]:
    first = 0
    for size, gap in zip(sizes, gaps, strict=True):
        start, end, runs = first, first + size, list[RankRun]()
        while start < end:
            rank, inside = divmod(start, partition)
            length = min(partition - inside, end - start)
            runs.append((rank, inside, length))
            start += length
        yield runs
        first = end + gap


def in_slices(sizes: Sequence[int], held: Sequence[int]) -> Iterator[list[RankRun]]:
    """Return the runs of each parameter of a group of stage 3, in order.

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
    return _sliced_runs(sizes, slices, ranks)


def _sliced_runs(sizes: Sequence[int], slices: Sequence[int], ranks: int) -> Iterator[list[RankRun]]:
    start = 0
    for size, length in zip(sizes, slices, strict=True):
        yield [(rank, start, min(length, size - rank * length)) for rank in range(ranks) if rank * length < size]
        start += length


def round_robin(count: int, ranks: int) -> list[int]:
    """Return the numbers of a group's parameters in the order in which `round_robin_gradients` lays them out."""
    return [number for first in range(min(ranks, count)) for number in range(first, count, ranks)]


def own_in_partition(sizes: Sequence[int], gaps: Sequence[int], partition: int, rank: int) -> Iterator[FlatRun]:
    """Yield the parameters in a rank's partition of stages 1 and 2. partition: its length, with padding."""
    low, high, start = rank * partition, (rank + 1) * partition, 0
    for number, (size, gap) in enumerate(zip(sizes, gaps, strict=True)):
        first, last = max(start, low), min(start + size, high)
        if first < last:
            yield FlatRun(number, first - start, first - low, last - first)
        start += size + gap


def own_slices(sizes: Sequence[int], ranks: int, rank: int) -> Iterator[FlatRun]:
    """Yield the slices of parameters in a rank's vector of stage 3."""
    start = 0
    for number, size in enumerate(sizes):
        length = math.ceil(size / ranks)
        before = rank * length
        if before < size:
            yield FlatRun(number, before, start, min(length, size - before))
        start += length
