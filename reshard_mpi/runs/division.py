"""Which process makes which target: each makes whole targets alone; those left over are filled by several together.

Every process computes the same division, so none has to ask another.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# Files filled by several processes are cut at multiples of this, so no two of them write to one page.
CUT_BYTES = 1 << 20


class Share(NamedTuple):
    """The part of a target that a process fills: of `whole` equal parts, those from `start` up to `stop`."""

    target: int
    start: int
    stop: int
    whole: int

    def range_of(self, size_bytes: int) -> tuple[int, int]:
        """Return the first byte, and the one after the last, of this share of a file of `size_bytes`.

        Cuts are at multiples of `CUT_BYTES`, so a share of a small file may be empty.
        """
        pieces = -(-size_bytes // CUT_BYTES)
        first, last = (pieces * part // self.whole for part in (self.start, self.stop))
        return min(first * CUT_BYTES, size_bytes), min(last * CUT_BYTES, size_bytes)

    def bytes_of(self, size_bytes: int) -> int:
        """Return how many of `size_bytes` this share comes to; those of all shares add up to all of them."""
        return size_bytes * self.stop // self.whole - size_bytes * self.start // self.whole


class Work(NamedTuple):
    """What one process does: targets that it makes alone, and its shares of those it makes with others of its host."""

    alone: tuple[int, ...] = ()
    shares: tuple[Share, ...] = ()

    @property
    def leads(self) -> tuple[int, ...]:
        """The targets that this process begins and completes: its own, and shared ones whose first bytes it fills."""
        return (*self.alone, *(share.target for share in self.shares if share.start == 0))

    @property
    def helps(self) -> tuple[int, ...]:
        """The targets of which this process fills a part while another process leads."""
        return tuple(share.target for share in self.shares if share.start > 0)


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


def divide(weights: Mapping[int, int], hosts: Sequence[object]) -> list[Work]:
    """Return the work of each process.

    weights: the relative size of each target. hosts: the name of each process's host; only processes of one host fill a
    file together. Each process of a host makes equally many targets alone. The targets left over, the smallest ones,
    are cut so that all processes of the host finish at the same time.
    """
    weights = {target: max(1, weight) for target, weight in weights.items()}
    by_host: dict[object, list[int]] = {}
    for process, host in enumerate(hosts):
        by_host.setdefault(host, []).append(process)
    turns = sorted((turn, process) for processes in by_host.values() for turn, process in enumerate(processes))
    assigned = assign(weights, [process for _, process in turns])
    works = [Work()] * len(hosts)
    for processes in by_host.values():
        mine = [target for process in processes for target in assigned[process]]
        mine.sort(key=lambda rank: (-weights[rank], rank))
        whole = len(mine) - len(mine) % len(processes)
        made_alone = assign({target: weights[target] for target in mine[:whole]}, processes)
        loads = [sum(weights[target] for target in made_alone[process]) for process in processes]
        shares = _cut({target: weights[target] for target in sorted(mine[whole:])}, loads)
        for process, own in zip(processes, shares):
            works[process] = Work(tuple(made_alone[process]), own)
    return works


def _cut(weights: Mapping[int, int], loads: Sequence[int]) -> list[tuple[Share, ...]]:
    """Return the shares of each process, cut from the targets laid end to end; a larger load gets less."""
    scale = len(loads)  # makes the levels whole numbers
    lengths = _fill_up([load * scale for load in loads], sum(weights.values()) * scale)
    shares: list[tuple[Share, ...]] = []
    begin = 0
    for length in lengths:
        end, target_begin, own = begin + length, 0, []
        for target, weight in weights.items():
            whole = weight * scale
            start, stop = max(begin, target_begin) - target_begin, min(end, target_begin + whole) - target_begin
            if start < stop:
                own.append(Share(target, start, stop, whole))
            target_begin += whole
        shares.append(tuple(own))
        begin = end
    return shares


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
