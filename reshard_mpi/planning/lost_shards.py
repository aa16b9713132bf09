"""Note source shards that are lost, and which replace them (`UnusableShard`), or that are others (`ModifiedShard`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

# Ranks named that have the same error.
_MAX_NAMED = 8
# Unusable shards described in one message.
_MAX_DESCRIBED = 4


class UnusableShard(NamedTuple):
    """A source shard that cannot be used."""

    rank: int
    where: str  # its path, or the folder in which it is missing
    problem: str  # what is wrong with it; empty if it is missing
    taken_from: tuple[int, ...] = ()  # the ranks whose shards are used in its place; none if nothing of it is needed

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.problem}, in {self.where}" if self.problem else f"rank {self.rank}: no shard"


NONE_LOST: Mapping[int, UnusableShard] = MappingProxyType({})


class MissingRanks(NamedTuple):
    """The ranks of a source strategy that have no shard in the folder at `where`. world_size: how many ranks it has."""

    ranks: tuple[int, ...]
    world_size: int
    where: str

    def __str__(self) -> str:
        present = self.world_size - len(self.ranks)
        return f"{present} of {self.world_size} ranks are there: no shard of {named(self.ranks)} in {self.where}"


class ModifiedShard(NamedTuple):
    """A file whose time is not the one that the run which has written it has recorded. rank: of that run's target."""

    rank: int
    path: str


def merged_losses(losses: Iterable[UnusableShard]) -> tuple[UnusableShard, ...]:
    """Return each lost shard once, by rank, with all the ranks that any target takes its data from instead."""
    sources: dict[UnusableShard, set[int]] = {}
    for lost in losses:
        sources.setdefault(lost._replace(taken_from=()), set()).update(lost.taken_from)
    return tuple(lost._replace(taken_from=tuple(sorted(sources[lost]))) for lost in sorted(sources))


def warnings_of(losses: Iterable[UnusableShard], missing: MissingRanks | None = None) -> Iterator[str]:
    """Yield warnings on unusable shards: a line for all missing ones, one for each damaged one.

    Args:
        missing: all ranks that have no shard, even if nothing of them is needed; None: tell only of those that are
            needed.
    """
    all_lost = merged_losses(losses)
    needed = [lost for lost in all_lost if not lost.problem and lost.taken_from]
    others = sorted({rank for lost in needed for rank in lost.taken_from})
    instead = f"; what should be there was taken from {named(others)} instead" if needed else ""
    if missing is not None:
        yield f"{missing}{instead}"
    elif needed:
        yield f"no shard of {named([lost.rank for lost in needed])} in {needed[0].where}{instead}"
    for lost in all_lost:
        if lost.problem:
            instead = f"; taken from {named(lost.taken_from)} instead" if lost.taken_from else ""
            yield f"the shard of rank {lost.rank} cannot be used, {lost.where}: {lost.problem}{instead}"


def modified_warning(modified: Collection[ModifiedShard], losses: Iterable[UnusableShard] = ()) -> Iterator[str]:
    """Yield a warning on shards that may be copies of others, if there are any besides those in `losses`."""
    lost = [shard.where for shard in losses]  # each a path, or a place in one
    paths = {rank: path for rank, path in modified if not any(where.startswith(path) for where in lost)}
    if len(paths) == 1:
        yield f"{min(paths.values())} was modified after its record was written; a copy of another shard?"
    elif paths:
        others = f"{len(paths) - 1} more shards ({named(sorted(paths))})"
        yield f"{paths[min(paths)]} and {others} were modified after their records were written; copies of others?"


def named(ranks: Collection[int]) -> str:
    """Return ranks in words: `rank 3`, or `ranks 1, 2`."""
    shown = ", ".join(str(rank) for rank in list(ranks)[:_MAX_NAMED])
    more = f" and {len(ranks) - _MAX_NAMED} more" if len(ranks) > _MAX_NAMED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"


def described(losses: Sequence[object]) -> str:
    """Describe errors of shards or files in words: of many, the first ones only."""
    return "; ".join([*map(str, losses[:_MAX_DESCRIBED]), *(["..."] if len(losses) > _MAX_DESCRIBED else [])])
