"""Compute the source ranks of a target rank from the strategies alone (`needed_ranks`)."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from functools import lru_cache
from itertools import chain, islice

from reshard_mpi.errors import LayoutError, UsageError
from reshard_mpi.planning.replicas import choose_holders, home_rank
from reshard_mpi.planning.tensor_names import (
    Accumulated,
    Unlisted,
    everywhere,
    find_or_follow,
    is_dropped,
    is_partial_sum,
    require_common_parameters,
)
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.layout import Layout, alignments, stand_in_shape
from reshard_mpi.sharding.placement import Piece, Placement
from reshard_mpi.sharding.strategy import Strategy

# The needed pieces of one parameter, by placement; several if the layout can be divided in several ways (nesting).
NeededPieces = tuple[tuple[Placement, tuple[Piece, ...]], ...]


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
    every_name = dict.fromkeys((*target.parameters, *source.parameters, *names))
    listed_ways = set()
    for name in every_name:
        way = (id(source.parameters.get(name)), id(target.parameters.get(name)))
        if way in listed_ways:
            continue
        if name in source.parameters and name in target.parameters:
            listed_ways.add(way)  # names that both strategies list in the same way need the same
        origins, placements = _placements(source, target, name, unlisted, every_name)
        if origins and not placements and unlisted is Unlisted.FOLLOW:
            unplaced[origins] = None
        placement = _of_stage(placements, target, target_rank)
        pair = (origins, placement)
        if placement is None or pair in seen:
            continue
        seen.add(pair)
        alternatives = [origins]
        if from_any_stage and name not in source.parameters:
            alternatives = [(origin.with_stages((stage,)),) for origin in origins for stage in origin.stages]
        try:
            needs = [
                need
                for options in alternatives
                for need in _choose_alternative(options, placement, target_rank, home, available)
            ]
        except LayoutError as error:
            error.where = f"parameter {name!r}, {source.origin or 'source'} to {target.origin or 'target'}"
            error.remedy = error.remedy or "check that both strategies belong to the same network"
            raise
        for placement, pieces in needs:
            demands.setdefault(placement, {}).update(dict.fromkeys(pieces))
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
        placement = _of_stage(placements, target, target_rank)
        if placement is None:
            continue
        first = next(placement.holders(placement.piece(target_rank)))
        if accumulated is Accumulated.SUM and placement.copies > 1 and first != target_rank:
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
    return _of_stage(placements, target, target_rank) is not None


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


def _of_stage(placements: tuple[Placement, ...], target: Strategy, target_rank: int) -> Placement | None:
    stage = target.stage_of(target_rank)
    return next((placement for placement in placements if stage in placement.stages), None)


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
