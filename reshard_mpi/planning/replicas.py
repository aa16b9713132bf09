"""Choose which replica is read, written, compared (`choose_holders`, `pieces_written_by`, `partition_for`)."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from reshard_mpi.planning.source_tensors import SourceGroup, TensorPart, parts_meeting
from reshard_mpi.planning.tensor_names import is_partial_sum
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.layout import Layout
from reshard_mpi.sharding.placement import Piece, Placement

Demands = Mapping[Placement, Collection[Piece]]
ChosenHolders = dict[tuple[Placement, Piece], int]


class Replicas(StrEnum):
    """Which replicas are compared before one of them is taken: none, a sample of them, or all."""

    ANY = "any"
    SAMPLE = "sample"
    CHECK = "check"


def home_rank(target_rank: int, targets: int, sources: int) -> int:
    """Return the source rank that a target prefers to others that hold the same; targets spread evenly over sources."""
    return target_rank * sources // targets


def choose_holders(demands: Demands, home: int, available: Container[int]) -> ChosenHolders:
    """Return for each demanded piece an `available` rank that holds it, so that few ranks are chosen in all.

    Pieces with the fewest holders come first; what ranks chosen before hold is taken from them, and ranks that turn out
    to be superfluous are dropped. If stages share a parameter, each of these stages is tried as the preferred one, not
    only that of `home`. Pieces that no available rank holds are left out.
    """
    settled = (_settle(demands, start, available) for start in _starts(demands, home))
    return _assign(demands, min(settled, key=len), home)


def _starts(demands: Demands, home: int) -> list[int]:
    """Return `home` and, if stages share a parameter, the ranks that have the same place in those stages."""
    starts = {home: None}
    for placement in demands:
        if len(placement.stages) > 1:
            size = placement.stage_size
            starts.update((stage * size + home % size, None) for stage in placement.stages)
    return list(starts)


def _settle(demands: Demands, home: int, available: Container[int]) -> list[int]:
    chosen: dict[int, None] = {}
    for placement in sorted(demands, key=lambda placement: placement.copies):
        covered = {placement.piece(rank) for rank in chosen if rank // placement.stage_size in placement.stages}
        for piece in demands[placement]:
            if piece not in covered:
                rank = _available_holder(placement, piece, home, available)
                if rank is not None:
                    chosen[rank] = None
                    covered.add(placement.piece(rank))
    return _without_superfluous(demands, list(chosen))


def _available_holder(placement: Placement, piece: Piece, home: int, available: Container[int]) -> int | None:
    """Return the available holder of `piece` nearest to `home`, else the first available one, else None."""
    nearest = placement.holder(piece, home)
    if nearest in available:
        return nearest
    return next((rank for rank in placement.holders(piece) if rank in available), None)


def _holders_among(ranks: Collection[int], demands: Demands) -> dict[tuple[Placement, Piece], list[int]]:
    """Return which of the ranks hold each demanded piece; pieces that none of them holds are left out."""
    holders: dict[tuple[Placement, Piece], list[int]] = {}
    for placement, pieces in demands.items():
        wanted = set(pieces)
        for rank in ranks:
            if rank // placement.stage_size in placement.stages:
                piece = placement.piece(rank)
                if piece in wanted:
                    holders.setdefault((placement, piece), []).append(rank)
    return holders


def _without_superfluous(demands: Demands, chosen: list[int]) -> list[int]:
    serves: dict[int, list[list[int]]] = {rank: [] for rank in chosen}
    for ranks in _holders_among(chosen, demands).values():
        for rank in ranks:
            serves[rank].append(ranks)
    # Ranks chosen first hold pieces few others hold, so the last chosen are the likelier to be superfluous.
    for rank in reversed(chosen):
        if all(len(ranks) > 1 for ranks in serves[rank]):
            for ranks in serves[rank]:
                ranks.remove(rank)
            del serves[rank]
    return sorted(serves)


def _assign(demands: Demands, ranks: list[int], home: int) -> ChosenHolders:
    choice = {}
    for (placement, piece), holders in _holders_among(ranks, demands).items():
        nearest = placement.holder(piece, home)
        choice[placement, piece] = nearest if nearest in holders else holders[0]
    return choice


def pieces_written_by(rank: int, names: Iterable[str], placement: Placement, *, loose: bool) -> Iterator[str]:
    """Yield the tensors whose piece this rank writes: of the ranks that hold a piece, one is picked by its name.

    Args:
        placement: of the tensors, with their dimensions.
        loose: whether no source strategy places them; then ranks may hold different values, and all of such are taken
            from the first rank.
    """
    piece = placement.piece(rank)
    is_mine: dict[int, bool] = {}
    for name in names:
        number = _writer_number(name, placement, loose=loose)
        if number not in is_mine:
            is_mine[number] = placement.nth_holder(piece, number) == rank
        if is_mine[number]:
            yield name


def writer(name: str, piece: Piece, placement: Placement, *, loose: bool) -> int:
    """Return the rank that writes a piece of a tensor. placement, loose: as in `pieces_written_by`."""
    return placement.nth_holder(piece, _writer_number(name, placement, loose=loose))


def _writer_number(name: str, placement: Placement, *, loose: bool) -> int:
    """Return which of the ranks that hold a piece writes it, counted in the order of `Placement.holders`."""
    return 0 if loose else zlib.crc32(name.encode("utf-8", "surrogatepass")) % placement.copies


_PARTIAL_SUMS = (
    "they are partial sums of a step that is not finished: save at the end of a step, or say how to join them"
    " (--accumulated mean or sum)"
)

_ONE_SCALE = "parts of one quantized weight have scales of their own: they were quantized one by one"

# Identifies the ranks that hold the same parts: equal ones stand for the same ranks.
Holding = tuple[tuple[Placement, Piece], ...]


class ReplicaGroup(NamedTuple):
    """A region of some tensors whose replicas must be equal."""

    names: tuple[str, ...]  # of the tensors
    parts: tuple[TensorPart, ...]  # each lies in `region`, and all ranks that hold one of them have a copy
    region: Box
    why: str  # what a difference would mean
    itemsize_bytes: int  # of an element
    listed: bool = True  # whether the source strategy lists the tensors
    # instead, no two copies must be the same, unless they are zeros; why: what it would mean if they were
    expect_distinct: bool = False
    is_partial: bool = False  # whether each may be a part of a sum, so that one does not stand for the others

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


def replicas_to_compare(
    wanted: Iterable[tuple[Iterable[str], SourceGroup, Layout]],
    box_of: Callable[[Layout], Box],
    replicas: Replicas,
    always: Container[str] = (),
) -> Iterator[ReplicaGroup]:
    """Yield the replicas of needed parts to compare: those likely to differ, and with CHECK all others too.

    A tensor that the source strategy does not list should be whole on every rank. If the target strategy cuts it,
    targets take their parts from different ranks, and these make up one tensor only if all replicas are equal.

    Args:
        wanted: the names of the tensors of a target, with how the source and how the target hold them.
        box_of: returns the target's box by the latter.
        always: names of tensors to compare unless replicas are taken from anywhere.
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
            why_here = why or (_ONE_SCALE if replicas is not Replicas.ANY and name in always else "")
            if partial or why_here:
                reason, itemsize_bytes = _PARTIAL_SUMS if partial else why_here, group.dtype.itemsize_bytes
                key = (group.layouts, target, reason, itemsize_bytes, group.listed)
                names_by_key.setdefault(key, []).append(name)
    for (layouts, target, why, itemsize_bytes, listed), names in names_by_key.items():
        alternatives = [parts_meeting(layout, box_of(target)) for layout in layouts]
        for region, parts in _shared_regions(alternatives):
            is_partial = why is _PARTIAL_SUMS
            alike = ReplicaGroup(tuple(names), parts, region, why, itemsize_bytes, listed, is_partial=is_partial)
            if alike.copies > 1:
                yield alike


def _shared_regions(alternatives: Iterable[tuple[TensorPart, ...]]) -> Iterator[tuple[Box, tuple[TensorPart, ...]]]:
    """Yield the regions of the needed parts, each with the parts that have it.

    Args:
        alternatives: the needed parts, once for each placement of the tensors (stages that share them may cut them
            differently).
    """
    regions: list[tuple[Box, tuple[TensorPart, ...]]] = []
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


def partition_for(all_alike: Sequence[ReplicaGroup], process: int, processes: int) -> Iterator[ReplicaGroup]:
    """Yield process `process`'s share of the comparisons; groups held by the same ranks stay adjacent.

    Args:
        all_alike: what all targets need, equal in all processes. It is cut into stretches that take as much reading
            each, so nothing is compared twice and few processes open the same shard.
    """
    by_holding: dict[Holding, list[ReplicaGroup]] = {}
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


def _weight(alike: ReplicaGroup) -> int:
    """Return how many elements are read to compare one tensor; at least 1 a copy."""
    return alike.copies * max(1, alike.region.size)
