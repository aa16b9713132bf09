"""Divide targets among the processes of a run by size, also parts of files (`divide`, `assign`)."""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

from reshard_mpi.errors import DisagreementError, LayoutError
from reshard_mpi.groups import grouped
from reshard_mpi.planning.source_tensors import SourceTensors
from reshard_mpi.runs.planner import Planner
from reshard_mpi.sharding.layout import Layout
from reshard_mpi.sharding.strategy import Strategy, find_or_follow

# Files filled by several processes are cut at multiples of this, so no two of them write to one page.
CUT_BYTES = 1 << 20


class TargetSlice(NamedTuple):
    """The part of a target that a process fills: of `whole` equal parts, those from `start` up to `stop`."""

    target: int
    start: int
    stop: int
    whole: int

    def range_of(self, size_bytes: int) -> tuple[int, int]:
        """Return the first byte, and the one after the last, of this slice of a file of `size_bytes`.

        Cuts are at multiples of `CUT_BYTES`, so a slice of a small file may be empty.
        """
        pieces = -(-size_bytes // CUT_BYTES)
        first, last = (pieces * part // self.whole for part in (self.start, self.stop))
        return min(first * CUT_BYTES, size_bytes), min(last * CUT_BYTES, size_bytes)

    def bytes_of(self, size_bytes: int) -> int:
        """Return how many of `size_bytes` this slice has; all slices add up to the total."""
        return size_bytes * self.stop // self.whole - size_bytes * self.start // self.whole


class Assignment(NamedTuple):
    """What one process does: targets that it makes alone, and its slices of those it makes with others of its host."""

    whole: tuple[int, ...] = ()
    slices: tuple[TargetSlice, ...] = ()

    @property
    def leads(self) -> tuple[int, ...]:
        """The targets that this process begins and completes: its own, and shared ones whose first bytes it fills."""
        return (*self.whole, *(each.target for each in self.slices if each.start == 0))

    @property
    def assists(self) -> tuple[int, ...]:
        """The targets to which this process contributes while another process leads."""
        return tuple(each.target for each in self.slices if each.start > 0)


def are_even(target: Strategy) -> bool:
    """Tell whether the shards of all targets will be equally large."""
    return target.stages == 1 and not _has_uneven_slices(target)


def _has_uneven_slices(target: Strategy) -> bool:
    return any(placement.is_uneven for placement in chain.from_iterable(target.parameters.values()))


def target_weights(planner: Planner, targets: Sequence[int]) -> dict[int, int]:
    """Return the relative sizes of the shards of `targets`: in bytes, or 1 each if all are equal."""
    target = planner.target
    if are_even(target):
        return dict.fromkeys(targets, 1)
    uneven = _has_uneven_slices(target)
    of_stage = _itemsizes_by_stage(planner)
    weights: dict[int, int] = {}
    by_stage: dict[int, int] = {}
    for rank in targets:
        stage = target.stage_of(rank)
        if uneven or stage not in by_stage:
            itemsizes = of_stage.get(stage, {})
            by_stage[stage] = sum(itemsize * layout.box(rank).size for layout, itemsize in itemsizes.items())
        weights[rank] = by_stage[stage]
    return weights


def _itemsizes_by_stage(planner: Planner) -> dict[int, dict[Layout, int]]:
    """Return, for each target stage, its layouts, each with the sum of the element sizes of the tensors it is of.

    The first shard of each stage of the source tells which tensors there are. A tensor that does not fit its
    strategy is left out; planning raises an error that names it.
    """
    source = planner.planned_source
    first = {rank: source.manifest(rank) for rank in source.stage_ranks().values()}
    tensors = SourceTensors(source.strategy, first)
    itemsizes: dict[Layout, int] = {}
    for name in tensors.names:
        with contextlib.suppress(LayoutError, DisagreementError):
            group = tensors.group(name)
            for placement in find_or_follow(planner.target, name, partial(tensors.same_shape, name)):
                layout = tensors.layout(placement, group.shape)
                itemsizes[layout] = itemsizes.get(layout, 0) + group.dtype.itemsize_bytes
    by_stage = grouped((stage, own) for own in itemsizes.items() for stage in own[0].placement.stages)
    return {stage: dict(own) for stage, own in by_stage.items()}


def assign(weights: Mapping[int, int], processes: Sequence[int]) -> dict[int, list[int]]:
    """Return the targets of each process: the largest targets are given out first, each to the least loaded process.

    Of equally loaded processes, the one with the fewest targets gets it, or else the first in the order given.
    """
    shares: dict[int, list[int]] = {process: [] for process in processes}
    loads = [(0, 0, order, process) for order, process in enumerate(processes)]
    for target in sorted(weights, key=lambda rank: (-weights[rank], rank)):
        load, count, order, process = heapq.heappop(loads)
        shares[process].append(target)
        heapq.heappush(loads, (load + weights[target], count + 1, order, process))
    return shares


def divide(weights: Mapping[int, int], hosts: Sequence[object]) -> list[Assignment]:
    """Return the work of each process.

    Args:
        weights: the relative size of each target.
        hosts: the name of each process's host; only processes of one host fill a file together. Each process of a host
            makes equally many targets alone. The targets left over, the smallest ones, are cut so that all processes of
            the host finish at the same time.
    """
    weights = {target: max(1, weight) for target, weight in weights.items()}
    by_host = grouped((host, process) for process, host in enumerate(hosts))
    turns = sorted((turn, process) for processes in by_host.values() for turn, process in enumerate(processes))
    assigned = assign(weights, [process for _, process in turns])
    works = [Assignment()] * len(hosts)
    for processes in by_host.values():
        mine = [target for process in processes for target in assigned[process]]
        mine.sort(key=lambda rank: (-weights[rank], rank))
        whole = len(mine) - len(mine) % len(processes)
        made_alone = assign({target: weights[target] for target in mine[:whole]}, processes)
        loads = [sum(weights[target] for target in made_alone[process]) for process in processes]
        slices = _cut({target: weights[target] for target in sorted(mine[whole:])}, loads)
        for process, own in zip(processes, slices):
            works[process] = Assignment(tuple(made_alone[process]), own)
    return works


def _cut(weights: Mapping[int, int], loads: Sequence[int]) -> list[tuple[TargetSlice, ...]]:
    """Return the slices of each process, cut from the targets laid end to end; a larger load gets less."""
    scale = len(loads)  # makes the levels whole numbers
    lengths = _fill_up([load * scale for load in loads], sum(weights.values()) * scale)
    slices: list[tuple[TargetSlice, ...]] = []
    begin = 0
    for length in lengths:
        end, target_begin, own = begin + length, 0, []
        for target, weight in weights.items():
            whole = weight * scale
            start, stop = max(begin, target_begin) - target_begin, min(end, target_begin + whole) - target_begin
            if start < stop:
                own.append(TargetSlice(target, start, stop, whole))
            target_begin += whole
        slices.append(tuple(own))
        begin = end
    return slices


def _fill_up(loads: Sequence[int], amount: int) -> list[int]:
    """Return how much to add to each load: `amount` in all, so that the lowest loads are raised to one level."""
    order = sorted(range(len(loads)), key=lambda number: (loads[number], number))
    added = [0] * len(loads)
    count = len(loads)
    while count > 1 and sum(loads[order[count - 1]] - loads[number] for number in order[:count]) > amount:
        count -= 1
    rest = amount - sum(loads[order[count - 1]] - loads[number] for number in order[:count])
    even, odd = divmod(rest, count)
    for place, number in enumerate(order[:count]):
        added[number] = loads[order[count - 1]] - loads[number] + even + (place < odd)
    return added
