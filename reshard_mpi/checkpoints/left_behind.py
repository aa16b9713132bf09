"""Tensors that no target would get, since those that are to have them open no shard that holds them.

A target opens the shards that the strategies say it needs. What no strategy lists is taken from those; so a tensor that
one rank alone has saved, an expert or a part of a sharded optimizer, would be lost without a word if its rank were not
among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from itertools import islice
from typing import NamedTuple

from reshard_mpi.checkpoints.source import SourceCheckpoint
from reshard_mpi.errors import StrategyError

_MAX_NAMED = 5


class Share(NamedTuple):
    """Which of the shards are looked into: share `number` of `shares` that together are all of them."""

    number: int
    shares: int

    def ranks(self, world_size: int) -> range:
        """Return the ranks of this share."""
        first, end = (-(-number * world_size // self.shares) for number in (self.number, self.number + 1))
        return range(first, end)


def left_behind(
    source: SourceCheckpoint, taken: Set[str], share: Share, is_wanted: Callable[[str], bool]
) -> dict[str, int]:
    """Return the tensors of a share of the shards that a target does not take, each with a rank that holds it.

    taken: the tensors of the target. is_wanted: tells whether some target is to have a tensor that no strategy lists.
    Damaged shards are passed over, and so are names that the source's strategy lists, which planning looks for.
    """
    only_there: dict[str, int] = {}
    for rank in share.ranks(source.strategy.world_size):
        shard = source.find(rank) if rank in source else None
        if shard is not None and not shard.tensors.keys() <= taken:
            for name in shard.tensors:
                if name not in taken and name not in source.strategy.parameters and is_wanted(name):
                    only_there.setdefault(name, rank)
    return only_there


def refuse(names: Iterable[str], only_there: dict[str, int], source: SourceCheckpoint) -> StrategyError:
    """Return the error for tensors that no target would get."""
    lost = list(names)
    shown = ", ".join(f"{name!r} of rank {only_there[name]}" for name in islice(lost, _MAX_NAMED))
    return StrategyError(
        "no target would get a tensor that only some ranks hold, since no strategy says who holds it",
        expected="a strategy that lists what differs between ranks, or one by which their shards are read",
        got=shown + (f", and {len(lost) - _MAX_NAMED} more" if len(lost) > _MAX_NAMED else ""),
        where=source.place,
        remedy="list it in the source strategy (a TOML rule '*' takes all there is), or leave it out: with --exclude,"
        " or with --unlisted drop for all that is not listed",
    )
