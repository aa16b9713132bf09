"""Which placement a parameter has: its own where a strategy lists it, else that of the parameter it is named after."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from enum import StrEnum

from reshard_mpi.errors import StrategyError
from reshard_mpi.sharding.placement import Placement, Strategy, named_after

# Gradients in mid-accumulation: every data-parallel rank holds its own partial sum, so copies of them may differ.
_PARTIAL_SUMS = ("accu_grads", "grad_sum")
_WILDCARDS = frozenset("*?[")


class Unlisted(StrEnum):
    """What becomes of parameters that the target strategy does not list."""

    FOLLOW = "follow"
    REPLICATE = "replicate"
    DROP = "drop"


def find_or_follow(strategy: Strategy, name: str, fits: Callable[[str], bool]) -> tuple[Placement, ...]:
    """Return the placements `strategy` gives `name`, or those of the listed name it follows; empty if neither.

    fits: tells whether the parameter has the same whole shape as the one of the given name. A rule that catches every
    name (`*`) is for what neither is listed nor follows.
    """
    listed = strategy.parameters.get(name)
    if listed:  # as nearly all are
        return listed
    listed = strategy.find(name)
    if listed and not strategy.is_only_caught(name):
        return listed
    base = next(filter(fits, strategy.followed(name)), None)
    return listed if base is None else strategy.find(base)


def is_dropped(target: Strategy, name: str, present: Container[str]) -> bool:
    """Tell whether a target leaves out a tensor when it is to have nothing but what its strategy lists.

    What only a rule for every name (`*`) catches is listed, unless it is named after a parameter that is listed or
    `present` in the checkpoint: then it is state of that parameter.
    """
    if not target.is_only_caught(name):
        return not target.find(name)
    return bool(target.followed(name)) or any(base in present for base in named_after(name))


def listed_names(strategy: Strategy) -> Iterator[str]:
    """Yield the names that a strategy lists one by one, also in rules without wildcards."""
    yield from strategy.parameters
    yield from (glob for glob, _ in strategy.rules if not _WILDCARDS.intersection(glob))


def everywhere(strategy: Strategy) -> Placement:
    """Return the placement of a parameter that every rank of every stage holds whole."""
    return Placement((strategy.stage_size,), stages=tuple(range(strategy.stages)))


def is_partial_sum(name: str) -> bool:
    """Tell whether copies of a parameter may differ because each is a part of a sum."""
    return any(part in _PARTIAL_SUMS for part in name.split(".")[:-1])


def require_common_parameters(source: Strategy, target: Strategy) -> None:
    """Raise StrategyError if no parameter that one strategy lists means anything to the other."""
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
