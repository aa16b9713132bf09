"""Who makes which target: whole targets for every process, and those that are left over filled together.

Everything here is computed alike by every process, so none has to ask another.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# Files filled by several processes are cut at multiples of this, so no two of them write to one page.
CUT_BYTES = 1 << 20


class Share(NamedTuple):
    """The part of a target that a process fills: from `start` to `stop` of its `whole` equal parts."""

    target: int
    start: int
    stop: int
    whole: int

    def range_of(self, size_bytes: int) -> tuple[int, int]:
        """Return the first byte, and the one after the last, of this share of a file of `size_bytes`.

        Cuts lie at multiples of `CUT_BYTES`; a share of a small file may hold nothing.
        """
        pieces = -(-size_bytes // CUT_BYTES)
        first, last = (pieces * at // self.whole for at in (self.start, self.stop))
        return min(first * CUT_BYTES, size_bytes), min(last * CUT_BYTES, size_bytes)


class Work(NamedTuple):
    """What one process does: targets it makes alone, and its shares of those it makes with others of its host."""

    alone: tuple[int, ...] = ()
    shares: tuple[Share, ...] = ()

    @property
    def leads(self) -> tuple[int, ...]:
        """The targets that this process begins and ends: who fills the first bytes of a shared one leads it."""
        return (*self.alone, *(share.target for share in self.shares if share.start == 0))

    @property
    def helps(self) -> tuple[int, ...]:
        """The targets that this process fills a part of for another one that leads."""
        return tuple(share.target for share in self.shares if share.start > 0)


def assign(weights: Mapping[int, int], processes: Sequence[int]) -> dict[int, list[int]]:
    """Share out targets over `processes`: the largest first, each to the process with the least so far.

    Of processes with as much, the first in the order given.
    """
    shares: dict[int, list[int]] = {process: [] for process in processes}
    loads = [(0, 0, order, process) for order, process in enumerate(processes)]
    for target in sorted(weights, key=lambda rank: (-weights[rank], rank)):
        load, count, order, process = heapq.heappop(loads)
        shares[process].append(target)
        heapq.heappush(loads, (load + weights[target], count + 1, order, process))
    return shares


def divide(weights: Mapping[int, int], hosts: Sequence[object]) -> list[Work]:
    """Return the work of every process.

    weights: the targets, with sizes relative to each other. hosts: for every process, what names its host; only
    processes of one host fill a file together. As many targets as go evenly over a host's processes are made alone;
    the rest, the smallest, are cut so that all of them end together.
    """
    weights = {target: max(1, weight) for target, weight in weights.items()}
    by_host: dict[object, list[int]] = {}
    for process, host in enumerate(hosts):
        by_host.setdefault(host, []).append(process)
    turns = sorted((at, process) for processes in by_host.values() for at, process in enumerate(processes))
    alone = assign(weights, [process for _, process in turns])
    works = [Work()] * len(hosts)
    for processes in by_host.values():
        mine = sorted((t for process in processes for t in alone[process]), key=lambda rank: (-weights[rank], rank))
        whole = len(mine) - len(mine) % len(processes)
        made_alone = assign({target: weights[target] for target in mine[:whole]}, processes)
        loads = [sum(weights[target] for target in made_alone[process]) for process in processes]
        shares = _cut({target: weights[target] for target in sorted(mine[whole:])}, loads)
        for process, own in zip(processes, shares):
            works[process] = Work(tuple(made_alone[process]), own)
    return works


def _cut(weights: Mapping[int, int], loads: Sequence[int]) -> list[tuple[Share, ...]]:
    """Cut the targets, laid end to end, into one piece a process, the longer the less the process has to do anyway."""
    scale = len(loads)  # levels are then whole numbers
    lengths = _fill_up([load * scale for load in loads], sum(weights.values()) * scale)
    shares: list[tuple[Share, ...]] = []
    begin = 0
    for length in lengths:
        end, at, own = begin + length, 0, []
        for target, weight in weights.items():
            whole = weight * scale
            start, stop = max(begin, at) - at, min(end, at + whole) - at
            if start < stop:
                own.append(Share(target, start, stop, whole))
            at += whole
        shares.append(tuple(own))
        begin = end
    return shares


def _fill_up(loads: Sequence[int], amount: int) -> list[int]:
    """Return how much to add to each load so that `amount` is added in all and the lowest come to one level."""
    order = sorted(range(len(loads)), key=lambda at: (loads[at], at))
    added = [0] * len(loads)
    count = len(loads)
    while count > 1 and sum(loads[order[count - 1]] - loads[at] for at in order[:count]) > amount:
        count -= 1
    rest = amount - sum(loads[order[count - 1]] - loads[at] for at in order[:count])
    even, odd = divmod(rest, count)
    for place, at in enumerate(order[:count]):
        added[at] = loads[order[count - 1]] - loads[at] + even + (place < odd)
    return added
