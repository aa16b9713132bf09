"""Copies that must be the same: which of them a run compares, and which of its processes does so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from reshard_mpi.planning.partial_sums import is_partial_sum
from reshard_mpi.planning.replicas import Replicas
from reshard_mpi.planning.tensors import Part, SourceGroup, parts_meeting
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.layout import Layout
from reshard_mpi.sharding.placement import Piece, Placement

_PARTIAL_SUMS = (
    "they are partial sums of a step that is not finished: save at the end of a step, or say how to join them"
    " (--accumulated mean or sum)"
)

# Identifies the ranks that hold the same parts: equal ones stand for the same ranks.
Holding = tuple[tuple[Placement, Piece], ...]


class Alike(NamedTuple):
    """A region of some tensors of which several ranks hold copies that must be the same.

    names: of the tensors. parts: each lies in `region`, and all ranks that hold one of them have a copy. why: what a
    difference would mean. itemsize_bytes: of an element. listed: whether the source strategy lists the tensors.
    must_differ: instead, no two copies must be the same, unless they are zeros; why: what it would mean if they were.
    is_partial: whether each may be a part of a sum, so that one does not stand for the others.
    """

    names: tuple[str, ...]
    parts: tuple[Part, ...]
    region: Box
    why: str
    itemsize_bytes: int
    listed: bool = True
    must_differ: bool = False
    is_partial: bool = False

    @property
    def holding(self) -> Holding:
        return tuple((part.placement, part.piece) for part in self.parts)

    @property
    def copies(self) -> int:
        """How many ranks hold a copy."""
        return sum(part.placement.copies for part in self.parts)

    @property
    def size_bytes(self) -> int:
        """How many bytes all copies of all its tensors have."""
        return len(self.names) * self.copies * self.region.size * self.itemsize_bytes


def copies_alike(
    wanted: Iterable[tuple[Iterable[str], SourceGroup, Layout]], box_of: Callable[[Layout], Box], replicas: Replicas
) -> Iterator[Alike]:
    """Yield the copies of needed parts to compare: those that are likely to differ, and with CHECK all others too.

    A tensor that the source strategy does not list should be whole on every rank. If the target strategy cuts it,
    targets take their parts from copies on different ranks, and these make up one tensor only if all copies are equal.

    wanted: the names of the tensors of a target, with how the source and how the target hold them. box_of: returns the
    target's box by the latter.
    """
    names_by_key: dict[tuple[tuple[Layout, ...], Layout, str, int, bool], list[str]] = {}
    for group_names, group, target in wanted:
        if not group.listed:
            if not target.placement.is_cut:
                continue
            why = "the source strategy does not list it, and the target strategy cuts it"
        elif group.is_tied:
            why = "the stages that share the parameter have drifted apart"
        else:
            why = "these ranks should hold the same" if replicas is Replicas.CHECK else ""
        for name in group_names:
            partial = group.listed and is_partial_sum(name)
            if partial or why:
                reason, itemsize_bytes = _PARTIAL_SUMS if partial else why, group.dtype.itemsize_bytes
                key = (group.layouts, target, reason, itemsize_bytes, group.listed)
                names_by_key.setdefault(key, []).append(name)
    for (layouts, target, why, itemsize_bytes, listed), names in names_by_key.items():
        alternatives = [parts_meeting(layout, box_of(target)) for layout in layouts]
        for region, parts in _shared_regions(alternatives):
            is_partial = why is _PARTIAL_SUMS
            alike = Alike(tuple(names), parts, region, why, itemsize_bytes, listed, is_partial=is_partial)
            if alike.copies > 1:
                yield alike


def _shared_regions(alternatives: Iterable[tuple[Part, ...]]) -> Iterator[tuple[Box, tuple[Part, ...]]]:
    """Yield the regions of the needed parts, each with the parts that have it.

    alternatives: the needed parts, once for each placement of the tensors (stages that share them may cut them
    differently).
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
        yield region, tuple(part._replace(region=region) for part in same)


def dealt(all_alike: Sequence[Alike], process: int, processes: int) -> Iterator[Alike]:
    """Yield what process number `process` of a run compares; what the same ranks hold follows one another.

    all_alike: what all targets need, equal in all processes. It is cut into stretches that take as much reading each,
    so nothing is compared twice and few processes open the same shard.
    """
    by_holding: dict[Holding, list[Alike]] = {}
    for alike in all_alike:
        by_holding.setdefault(alike.holding, []).append(alike)
    line = [alike for same_holders in by_holding.values() for alike in same_holders]
    total = sum(len(alike.names) * _weight(alike) for alike in line)
    start, stop = (total * number // processes for number in (process, process + 1))
    before = 0  # the weight of all that comes earlier in the line
    for alike in line:
        weight = _weight(alike)
        first, last = (min(max(0, -(-(cut - before) // weight)), len(alike.names)) for cut in (start, stop))
        if first < last:
            yield alike if last - first == len(alike.names) else alike._replace(names=alike.names[first:last])
        before += len(alike.names) * weight


def _weight(alike: Alike) -> int:
    """Return how many elements are read to compare one tensor; at least 1 a copy."""
    return alike.copies * max(1, alike.region.size)
