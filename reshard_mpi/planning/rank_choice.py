"""Choose the ranks that are read and written: of replicas (`choose_holders`), for a target (`needed_ranks`).

Partial sums are accumulated gradients: sums of gradients of a step that is not finished, of which each rank has added
up those of its own samples. All ranks that hold the same piece of one are needed.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from enum import StrEnum
from functools import lru_cache
from itertools import chain, islice

from reshard_mpi.errors import LayoutError, UsageError
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.layout import Layout, alignments, stand_in_shape
from reshard_mpi.sharding.placement import Piece, Placement
from reshard_mpi.sharding.strategy import (
    Strategy,
    Unlisted,
    everywhere,
    find_or_follow,
    is_dropped,
    require_common_parameters,
)

Demands = Mapping[Placement, Collection[Piece]]
ChosenHolders = dict[tuple[Placement, Piece], int]
# The needed pieces of one parameter, by placement; several if the layout can be divided in several ways (nesting).
NeededPieces = tuple[tuple[Placement, tuple[Piece, ...]], ...]
# `accu_grads.<parameter>` is MindSpore's name, `grad_sum.<parameter>` its guide's; either may have more before it.
ACCUMULATORS = ("accu_grads", "grad_sum")


class Accumulated(StrEnum):
    """The handling of accumulated gradients whose sums differ between ranks that hold the same piece.

    MEAN: every target rank gets the mean of all. SUM: the lowest of the target ranks that hold the same piece gets the
    sum of all, and the others zeros. REFUSE: the run is refused.
    """

    MEAN = "mean"
    SUM = "sum"
    REFUSE = "refuse"


class GradientShare(StrEnum):
    """The part of a tensor for a target rank: one rank's, the sum of all replicas, or zeros."""

    TAKEN = "taken"
    JOINED = "joined"
    ZEROS = "zeros"


def is_partial_sum(name: str) -> bool:
    """Tell whether copies of a parameter may differ because each is a part of a sum."""
    first, second = ACCUMULATORS
    return (first in name or second in name) and any(part in ACCUMULATORS for part in name.split(".")[:-1])


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
    for placement in sorted(demands, key=lambda placement: placement.replicas):
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


def pieces_written_by(rank: int, names: Iterable[str], placement: Placement, *, is_listed: bool) -> Iterator[str]:
    """Yield the tensors whose piece this rank writes: of the ranks that hold a piece, one is picked by its name.

    Args:
        placement: of the tensors, with their dimensions.
        is_listed: whether the source strategy places them. If not, ranks may hold different values, and all are taken
            from the first rank.
    """
    piece = placement.piece(rank)
    is_mine: dict[int, bool] = {}
    for name in names:
        number = _writer_number(name, placement, is_listed=is_listed)
        if number not in is_mine:
            is_mine[number] = placement.nth_holder(piece, number) == rank
        if is_mine[number]:
            yield name


def writer(name: str, piece: Piece, placement: Placement, *, is_listed: bool) -> int:
    """Return the rank that writes a piece of a tensor. placement, is_listed: as in `pieces_written_by`."""
    return placement.nth_holder(piece, _writer_number(name, placement, is_listed=is_listed))


def _writer_number(name: str, placement: Placement, *, is_listed: bool) -> int:
    """Return which of the ranks that hold a piece writes it, counted in the order of `Placement.holders`."""
    return zlib.crc32(name.encode("utf-8", "surrogatepass")) % placement.replicas if is_listed else 0


def check_target_rank(target_rank: int, target: Strategy) -> None:
    """Raise UsageError if the target has no such rank."""
    if not 0 <= target_rank < target.world_size:
        raise UsageError(
            "target rank out of range",
            expected=f"0 to {target.world_size - 1}",
            got=str(target_rank),
            where=target.origin,
        )


def needed_ranks(
    source: Strategy,
    target: Strategy,
    target_rank: int,
    *,
    names: Iterable[str],
    available: Container[int],
    unlisted: Unlisted,
    from_any_stage: bool = False,
) -> tuple[int, ...]:
    """Return the source ranks that target rank `target_rank` reads, ascending; at least one.

    Args:
        names: parameters that are known besides the listed ones (a strategy made of rules lists none).
        available: the ranks that may be chosen. A piece that none of them holds is reported later, by the plan, which
            knows the shapes.
        from_any_stage: a parameter that a rule places lies in one of the rule's stages, but it is not known in which,
            so ranks of all of them are returned.

    Raises UsageError, StrategyError or LayoutError.
    """
    check_target_rank(target_rank, target)
    require_common_parameters(source, target)
    home = home_rank(target_rank, target.world_size, source.world_size)
    demands: dict[Placement, dict[Piece, None]] = {}
    unplaced: dict[tuple[Placement, ...], None] = {}
    seen = set()
    for name, origins, placements in _distinct_placements(source, target, names, unlisted):
        if origins and not placements and unlisted is Unlisted.FOLLOW:
            unplaced[origins] = None
        placement = target.of_rank(placements, target_rank)
        pair = (origins, placement)
        if placement is None or pair in seen:
            continue
        seen.add(pair)
        alternatives = [origins]
        if from_any_stage and name not in source.parameters:
            alternatives = [(origin.with_stages((stage,)),) for origin in origins for stage in origin.stages]
        try:
            for options in alternatives:
                for held, pieces in _choose_alternative(options, placement, target_rank, home, available):
                    demands.setdefault(held, {}).update(dict.fromkeys(pieces))
        except LayoutError as error:
            error.where = f"parameter {name!r}, {source.origin or 'source'} to {target.origin or 'target'}"
            error.remedy = error.remedy or "check that both strategies belong to the same network"
            raise
    ranks = set(choose_holders(demands, home, available).values())
    if source.world_size == target.world_size and target_rank in available:
        # Its own shard is opened in any case, since it may hold values that no strategy lists.
        ranks = set(choose_holders(demands, home, {*ranks, target_rank}).values())
    for origins in unplaced:
        ranks.update(_one_of_its_stages(origins, source, ranks, home, available))
    if not ranks:
        by_preference = chain((home,), range(source.world_size))
        ranks.add(next((rank for rank in by_preference if rank in available), home))
    return tuple(sorted(ranks))


def joined_ranks(
    source: Strategy,
    target: Strategy,
    target_rank: int,
    *,
    names: Iterable[str],
    unlisted: Unlisted,
    accumulated: Accumulated,
) -> set[int]:
    """Return the source ranks whose accumulated gradients target rank `target_rank` needs, if it has any.

    All ranks that hold the same piece have a part of its sum. Where no strategy lists accumulated gradients, any
    parameter may have them, cut as it is.

    Args:
        names: as in `needed_ranks`.
    """
    if accumulated is Accumulated.REFUSE:
        return set()
    every_name = dict.fromkeys((*target.parameters, *source.parameters, *names))
    ranks: set[int] = set()
    for name in [name for name in every_name if is_partial_sum(name)] or every_name:
        origins, placements = _placements(source, target, name, unlisted, every_name)
        placement = target.of_rank(placements, target_rank)
        if placement is None:
            continue
        first = next(placement.holders(placement.piece(target_rank)))
        if accumulated is Accumulated.SUM and placement.replicas > 1 and first != target_rank:
            continue  # it gets zeros
        for origin in origins:
            for aligned, pieces in _needs(origin, placement, target_rank):
                ranks.update(rank for piece in pieces for rank in aligned.holders(piece))
    return ranks


def wants(
    source: Strategy, target: Strategy, target_rank: int, name: str, unlisted: Unlisted, present: Container[str]
) -> bool:
    """Tell whether the shards that hold a name must be opened for target rank `target_rank`.

    They must if the target needs parts of it. They also must if the source strategy cuts it and the target strategy
    does not place it, since the target is refused if any shard holds it.

    Args:
        present: the tensors that are known to be in the checkpoint.
    """
    origins, placements = _placements(source, target, name, unlisted, present)
    if origins and not placements:
        return unlisted is Unlisted.FOLLOW
    return target.of_rank(placements, target_rank) is not None


def _one_of_its_stages(
    origins: tuple[Placement, ...], source: Strategy, chosen: Collection[int], home: int, available: Container[int]
) -> tuple[int, ...]:
    """Return an available rank whose shard shows if a parameter was saved; none if a `chosen` rank's shard shows it."""
    stages = [stage for origin in origins for stage in origin.stages]
    if any(source.stage_of(rank) in stages for rank in chosen):
        return ()
    near = (stage * source.stage_size + home % source.stage_size for stage in stages)
    others = (rank for stage in stages for rank in source.ranks_of(stage))
    return tuple(islice((rank for rank in chain(near, others) if rank in available), 1))


def _choose_alternative(
    alternatives: tuple[Placement, ...], target: Placement, target_rank: int, home: int, available: Container[int]
) -> NeededPieces:
    """Return the needed pieces by one of a parameter's source placements.

    That of the stage of `home` is taken; but if needed pieces of it are not available, the first one that has them all.
    """
    ordered = sorted(alternatives, key=lambda placement: home // placement.stage_size not in placement.stages)
    options = [_needs(placement, target, target_rank) for placement in ordered]
    if len(options) == 1:
        return options[0]
    complete = (
        needs
        for needs in options
        if all(
            any(rank in available for rank in placement.holders(piece))
            for placement, pieces in needs
            for piece in pieces
        )
    )
    return next(complete, options[0])


def _distinct_placements(
    source: Strategy, target: Strategy, names: Iterable[str], unlisted: Unlisted
) -> Iterator[tuple[str, tuple[Placement, ...], tuple[Placement, ...]]]:
    """Yield names, each with its placements in both strategies; one of all that both list in the same way."""
    every_name = dict.fromkeys((*target.parameters, *source.parameters, *names))
    listed_ways = set()
    for name in every_name:
        own, others = source.parameters.get(name), target.parameters.get(name)
        way = (id(own), id(others))
        if way in listed_ways:
            continue
        if own is not None and others is not None:
            listed_ways.add(way)
        yield name, *_placements(source, target, name, unlisted, every_name)


def _placements(
    source: Strategy, target: Strategy, name: str, unlisted: Unlisted, present: Container[str]
) -> tuple[tuple[Placement, ...], tuple[Placement, ...]]:
    """Return the placements of `name` in the source and in the target.

    Both are empty if the source strategy does not place it or the target drops it. With FOLLOW, only the second is
    empty if the source cuts the parameter and the target strategy does not place it.
    """
    origins = find_or_follow(source, name, lambda _: True)
    if not origins or (unlisted is Unlisted.DROP and is_dropped(target, name, present)):
        return (), ()
    follow = unlisted is Unlisted.FOLLOW
    placements = find_or_follow(target, name, lambda _: True) if follow else target.find(name)
    if not placements and not (follow and any(origin.is_cut for origin in origins)):
        placements = (everywhere(target),)
    return origins, placements


@lru_cache(maxsize=4096)
def _needs(source: Placement, target: Placement, target_rank: int) -> NeededPieces:
    needs = []
    both: tuple[tuple[Placement, Placement], ...] = ((source, target),)
    if source.expanded_shape is not None or target.expanded_shape is not None:
        both = alignments(source, target)
    for aligned, other in both:
        shape = stand_in_shape(aligned, other)
        # Without the shape it is unknown which slices of a ceiling division overlap, and all of them are needed to
        # learn the length. So all are asked for.
        is_open = aligned.ceil or other.ceil
        if aligned.ceil:  # in the sizes that the target gives some slices may be empty
            shape = tuple(aligned.cuts(dim) for dim in range(len(shape)))
        box = Box((0,) * len(shape), shape) if is_open else Layout(other, shape).box(target_rank)
        layout = Layout(aligned, shape)  # its placement has the dimensions by which it counts pieces
        needs.append((layout.placement, tuple(piece for piece, _ in layout.pieces_meeting(box))))
    return tuple(needs)
