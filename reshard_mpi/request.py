"""What a user asks for. Light, so that a parent of workers needs nothing else."""

from __future__ import annotations

from typing import NamedTuple

from reshard_mpi import strategy
from reshard_mpi.planning.parameters import Unlisted


class Request(NamedTuple):
    """What is to be converted, as the options of `reshard-mpi transform` say it.

    src_strategy, dst_strategy: files or folders; None as the options left out. ranks: the targets to make (None: all).
    part: (i, n) for the i-th of n shares of them. to: a format's name, None for the source's. recorded: keep a journal
    in the target folder; without one, existing target files are replaced.
    """

    source: str
    target: str
    src_strategy: str | None
    dst_strategy: str | None
    prefix: str
    select: str | None
    to: str | None
    ranks: tuple[int, ...] | None
    part: tuple[int, int] | None
    resume: bool
    overwrite: bool
    unlisted: Unlisted
    strict: bool
    recorded: bool = True

    def most_targets(self) -> int:
        """Return how many targets are asked for, at most. Raises StrategyError if the target strategy is unreadable."""
        if self.ranks is not None:
            return len(set(self.ranks))
        every = strategy.load(self.dst_strategy).world_size if self.dst_strategy else 1
        return every if self.part is None else -(-every // self.part[1])
