"""Which of several holders of a piece is read: few files for each target, and not the same ones for all targets."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from enum import StrEnum

from reshard_mpi.sharding.placement import Piece, Placement

Demands = Mapping[Placement, Collection[Piece]]
Choice = dict[tuple[Placement, Piece], int]


class Replicas(StrEnum):
    """Which copies on several ranks are compared before one of them is taken: none, a sample of them, or all."""

    ANY = "any"
    SAMPLE = "sample"
    CHECK = "check"


def home_rank(target_rank: int, targets: int, sources: int) -> int:
    """Return the source rank that a target prefers to others that hold the same; targets spread evenly over sources."""
    return target_rank * sources // targets


def choose_holders(demands: Demands, home: int, available: Container[int]) -> Choice:
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


def _assign(demands: Demands, ranks: list[int], home: int) -> Choice:
    choice = {}
    for (placement, piece), holders in _holders_among(ranks, demands).items():
        nearest = placement.holder(piece, home)
        choice[placement, piece] = nearest if nearest in holders else holders[0]
    return choice
