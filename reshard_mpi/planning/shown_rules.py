"""What the rules of a source's spec make of its tensors, so that people see which dimension is cut wrongly."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from reshard_mpi.sharding.layout import whole_shape
from reshard_mpi.sharding.placement import Shape, Strategy

_NONE_KNOWN: Mapping[str, Shape] = MappingProxyType({})
# More lines would hide the notes and warnings beside them.
_MOST_SHOWN = 5


class ShownRule(NamedTuple):
    """A line that shows one tensor as a rule has it, and how many elements that has as a whole."""

    line: str
    elements: int


def shown_rules(
    strategy: Strategy, shapes: Mapping[str, tuple[int, Shape]], wholes: Mapping[str, Shape] = _NONE_KNOWN
) -> Iterator[ShownRule]:
    """Yield for each rule of a spec that cuts the whole shape of one tensor by it, the first of most dimensions.

    shapes: by name, a rank and the shape of its part. wholes: whole shapes by name, where one part does not tell them.
    """
    if not strategy.is_spec:
        return

    def rating(name: str) -> tuple[bool, int]:
        return name in wholes, len(shapes[name][1])

    examples: dict[int, str] = {}
    for name in shapes:
        rule = strategy.rule_of(name)
        if rule is not None and (rule not in examples or rating(name) > rating(examples[rule])):
            examples[rule] = name
    for rule, name in sorted(examples.items()):
        glob = strategy.rules[rule][0]
        rank, shape = shapes[name]
        placement = next((p for p in strategy.find(name) if strategy.stage_of(rank) in p.stages), None)
        if placement is None or not placement.is_cut:
            continue
        part = f"by rule {glob!r}, {name!r} of shape {list(shape)} on a rank"
        if placement.ceil and name not in wholes:
            yield ShownRule(f"{part} is cut by ceiling division", math.prod(shape))
            continue
        whole = wholes[name] if placement.ceil else whole_shape(placement, rank, shape)
        yield ShownRule(f"{part} is {list(whole)} as a whole", math.prod(whole))


def told_rules(shown: Sequence[ShownRule], *, are_all: bool) -> tuple[str, ...]:
    """Return the lines that are printed: all, or those of the largest tensors and how many more there are."""
    if are_all or len(shown) <= _MOST_SHOWN:
        return tuple(rule.line for rule in shown)
    largest = sorted(range(len(shown)), key=lambda number: shown[number].elements, reverse=True)[:_MOST_SHOWN]
    more = f"and {len(shown) - _MOST_SHOWN} more rules that cut (plan -v lists all)"
    return (*(shown[number].line for number in sorted(largest)), more)
