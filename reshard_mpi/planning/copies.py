"""Copies that must be the same: which ones a run compares, and which of its processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from reshard_mpi.planning.parameters import is_partial_sum
from reshard_mpi.planning.replicas import Replicas
from reshard_mpi.planning.tensors import Part, SourceGroup, parts_meeting
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.layout import Layout
from reshard_mpi.sharding.placement import Piece, Placement

_PARTIAL_SUMS = "they are partial sums of a step that is not finished: save at the end of a step"

# Who holds the same parts: the same ranks.
Holding = tuple[tuple[Placement, Piece], ...]


class Alike(NamedTuple):
    """`region` of each of the tensors `names`, which all holders of `parts` have.

    why: what a difference would mean. listed: whether the source strategy says that all of them have it.
    """

    names: tuple[str, ...]
    parts: tuple[Part, ...]
    region: Box
    why: str
    listed: bool = True

    @property
    def holding(self) -> Holding:
        return tuple((part.placement, part.piece) for part in self.parts)

    @property
    def copies(self) -> int:
        """How many ranks hold it."""
        return sum(part.placement.copies for part in self.parts)


def copies_alike(
    wanted: Iterable[tuple[Iterable[str], SourceGroup, Layout]], box_of: Callable[[Layout], Box], replicas: Replicas
) -> Iterator[Alike]:
    """Yield the copies of needed parts that must be the same: those that may well not be; with CHECK all others too.

    What the source strategy does not list should be whole on every rank. If the target cuts it, its targets take their
    parts from the copies of different ranks, which only together make it up if all of them are the same.

    wanted: the tensors of a target by how source and target hold them. box_of: which box that is.
    """
    names: dict[tuple[tuple[Layout, ...], Layout, str, bool], list[str]] = {}
    for every, group, target in wanted:
        if not group.listed:
            if not target.placement.is_cut:
                continue
            why = "the source strategy does not list it, and the target strategy cuts it"
        elif group.is_tied:
            why = "the stages that share the parameter have drifted apart"
        else:
            why = "these ranks should hold the same" if replicas is Replicas.CHECK else ""
        for name in every:
            partial = group.listed and is_partial_sum(name)
            if partial or why:
                key = (group.layouts, target, _PARTIAL_SUMS if partial else why, group.listed)
                names.setdefault(key, []).append(name)
    for (layouts, target, why, listed), found in names.items():
        for one in _alike(tuple(found), [parts_meeting(layout, box_of(target)) for layout in layouts], why):
            yield one._replace(listed=listed)


def _alike(names: tuple[str, ...], alternatives: Iterable[tuple[Part, ...]], why: str) -> Iterator[Alike]:
    """Yield what of the needed parts several ranks have.

    alternatives: the needed parts by each placement of the tensors (stages that share them may cut them differently).
    """
    regions: list[tuple[Box, tuple[Part, ...]]] = []
    for parts in alternatives:
        if not regions:
            regions = [(part.region, (part,)) for part in parts]
            continue
        regions = [
            (shared, (*same, part))
            for region, same in regions
            for part in parts
            if (shared := region.intersect(part.region)) is not None
        ]
    for region, same in regions:
        found = Alike(names, tuple(part._replace(region=region) for part in same), region, why)
        if found.copies > 1:
            yield found


def dealt(every: Sequence[Alike], process: int, processes: int) -> Iterator[Alike]:
    """Yield what one process of a run compares, those of the same holders one after another.

    What all targets need is laid end to end and cut where processes have as much to read, so nothing is compared twice
    and few processes open a shard. Every process must give the same `every`.
    """
    by_holding: dict[Holding, list[Alike]] = {}
    for one in every:
        by_holding.setdefault(one.holding, []).append(one)
    line = [one for group in by_holding.values() for one in group]
    whole = sum(len(one.names) * _weight(one) for one in line)
    start, stop = (whole * at // processes for at in (process, process + 1))
    at = 0
    for one in line:
        weight = _weight(one)
        first, last = (min(max(0, -(-(cut - at) // weight)), len(one.names)) for cut in (start, stop))
        if first < last:
            yield one if last - first == len(one.names) else one._replace(names=one.names[first:last])
        at += len(one.names) * weight


def _weight(one: Alike) -> int:
    return one.copies * max(1, one.region.size)
