"""Tell by names whose placement a tensor has (`find_or_follow`, `Unlisted`), or if it is a sum (`Accumulated`).

Partial sums are accumulated gradients: sums of gradients of a step that is not finished, of which each rank has added
up those of its own samples.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from enum import Enum, StrEnum

from reshard_mpi.errors import StrategyError
from reshard_mpi.sharding.placement import Placement
from reshard_mpi.sharding.strategy import Strategy, named_after

_WILDCARDS = frozenset("*?[")


class Unlisted(StrEnum):
    """What becomes of parameters that the target strategy does not list."""

    FOLLOW = "follow"
    REPLICATE = "replicate"
    DROP = "drop"


def find_or_follow(strategy: Strategy, name: str, fits: Callable[[str], bool]) -> tuple[Placement, ...]:
    """Return the placements that `strategy` gives `name`, else those given to the listed name that it follows.

    Args:
        fits: tells whether the parameter has the same whole shape as the one of a given name; it only follows such. A
            rule for every name (`*`) places what is neither listed nor follows another. Empty if nothing places the
            parameter.
    """
    listed = strategy.of_every_name or strategy.parameters.get(name)
    if listed:  # the common case, so it comes first
        return listed
    placing = placing_name(strategy, name, fits)
    return () if placing is None else strategy.find(placing)


def placing_name(strategy: Strategy, name: str, fits: Callable[[str], bool]) -> str | None:
    """Return the name whose placements `find_or_follow` gives a parameter: its own, or one that it is named after."""
    listed = strategy.find(name)
    if listed and not strategy.is_only_caught(name):
        return name
    base = next(filter(fits, strategy.followed(name)), None)
    return base if base is not None or not listed else name


def is_dropped(target: Strategy, name: str, present: Container[str]) -> bool:
    """Tell whether a target leaves out a tensor if it gets nothing but what its strategy lists (`Unlisted.DROP`).

    A tensor that only a rule for every name (`*`) places counts as listed, unless it is the state of a parameter: named
    after one that is listed, or that is `present` in the checkpoint.
    """
    if not target.is_only_caught(name):
        return not target.find(name)
    return bool(target.followed(name)) or any(base in present for base in named_after(name))


def may_be_held(target: Strategy, stage: int, name: str, unlisted: Unlisted, present: Container[str]) -> bool:
    """Tell whether a stage of the target may hold a tensor: False if it does not, whatever the tensor's shape.

    Args:
        present: the tensors that are known to be in the checkpoint. What nothing places may be held.
    """
    if unlisted is Unlisted.DROP and is_dropped(target, name, present):
        return False
    options = [target.find(name)]
    if unlisted is Unlisted.FOLLOW and (not options[0] or target.is_only_caught(name)):
        options += map(target.find, target.followed(name))
    return any(not placements or any(stage in each.stages for each in placements) for placements in options)


def listed_names(strategy: Strategy) -> Iterator[str]:
    """Yield names that a strategy lists one by one, and rules without wildcards."""
    yield from strategy.parameters
    yield from (glob for glob, _ in strategy.rules if not _WILDCARDS.intersection(glob))


def everywhere(strategy: Strategy) -> Placement:
    """Return the placement of a parameter that every rank of every stage holds whole."""
    return Placement((strategy.stage_size,), stages=tuple(range(strategy.stages)))


def require_common_parameters(source: Strategy, target: Strategy) -> None:
    """Raise StrategyError if neither strategy places any parameter that the other lists. Rules are not looked at."""
    if source.rules or target.rules:
        return
    if any(find_or_follow(source, name, lambda _: True) for name in target.parameters):
        return
    if any(find_or_follow(target, name, lambda _: True) for name in source.parameters):
        return
    raise StrategyError(
        "the two strategies have no parameter in common",
        expected=f"parameters of {source.origin or 'the source strategy'}, such as {_example(source)}",
        got=f"{len(target.parameters)} others, such as {_example(target)}",
        where=target.origin,
        remedy="check that both strategies belong to the same network",
    )


def _example(strategy: Strategy) -> str:
    return repr(next(iter(strategy.parameters), ""))


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


class GradientShare(Enum):
    """The part of a tensor for a target rank: one rank's, the sum of all replicas, or zeros."""

    TAKEN = "taken"
    JOINED = "joined"
    ZEROS = "zeros"


def is_partial_sum(name: str) -> bool:
    """Tell whether copies of a parameter may differ because each is a part of a sum."""
    first, second = ACCUMULATORS
    return (first in name or second in name) and any(part in ACCUMULATORS for part in name.split(".")[:-1])
