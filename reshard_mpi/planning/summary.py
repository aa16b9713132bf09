"""Summarize a plan: sizes, files, memory of every target (`Plan`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from reshard_mpi.planning.lost_shards import warnings_of
from reshard_mpi.planning.rank_plan import RankPlan
from reshard_mpi.sharding.layout import whole_shape
from reshard_mpi.sharding.placement import Shape, Strategy
from reshard_mpi.text import format_bytes, one_line

_NONE_KNOWN: Mapping[str, Shape] = MappingProxyType({})
# Origin of a tensor of the source that targets do not have.
LEFT_OUT = "left out"
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

    Args:
        shapes: by name, a rank and the shape of its part.
        wholes: whole shapes by name, where one part does not tell them.
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
    """Return the lines to print: all, or the largest tensors and the number of the others."""
    if are_all or len(shown) <= _MOST_SHOWN:
        return tuple(rule.line for rule in shown)
    largest = sorted(range(len(shown)), key=lambda number: shown[number].elements, reverse=True)[:_MOST_SHOWN]
    more = f"and {len(shown) - _MOST_SHOWN} more rules that cut (plan -v lists all)"
    return (*(shown[number].line for number in sorted(largest)), more)


class RankSummary(NamedTuple):
    """The summary of one target rank's plan."""

    rank: int
    read_ranks: tuple[int, ...]  # the source ranks that its tensors come from
    tensors: int
    copies: int
    # written_bytes, needed_bytes: payload written, and read
    written_bytes: int
    needed_bytes: int
    peak_bytes: int  # the most resident memory that its process is projected to need
    absent: tuple[str, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()  # of shards that cannot be used

    @classmethod
    def of(cls, plan: RankPlan, peak_bytes: int) -> RankSummary:
        return cls(
            rank=plan.target_rank,
            read_ranks=plan.read_ranks,
            tensors=len(plan.tensors),
            copies=plan.copies,
            written_bytes=plan.written_bytes,
            needed_bytes=plan.needed_bytes,
            peak_bytes=peak_bytes,
            absent=plan.absent,
            notes=plan.notes,
            warnings=(*warnings_of(plan.lost), *plan.warnings, *plan.left_out),
        )


class Plan(NamedTuple):
    """The targets of a conversion, in the order of their ranks."""

    targets: tuple[RankSummary, ...]
    source: str  # one line that describes the checkpoint
    tensors: tuple[str, ...] = ()  # one for each tensor, with its whole shape and what it is made of
    rules: tuple[ShownRule, ...] = ()  # what the rules of the source's spec make of its tensors

    @property
    def peak_bytes(self) -> int:
        """The most memory that any process needs."""
        return max((target.peak_bytes for target in self.targets), default=0)

    @property
    def written_bytes(self) -> int:
        return sum(target.written_bytes for target in self.targets)

    def as_json(self) -> dict[str, Any]:
        """Return the plan as plain values; sizes in bytes."""
        return {
            "version": 1,
            "source": self.source,
            "written_bytes": self.written_bytes,
            "peak_bytes": self.peak_bytes,
            "targets": [target._asdict() for target in self.targets],
            **({"tensors": list(self.tensors)} if self.tensors else {}),
        }

    def as_table(self) -> str:
        """Return the plan as lines for people."""
        rows = [("target", "tensors", "writes", "reads", "peak memory", "source ranks")]
        for target in self.targets:
            ranks = " ".join(map(str, target.read_ranks[:12])) + (" ..." if len(target.read_ranks) > 12 else "")
            written, needed = format_bytes(target.written_bytes), format_bytes(target.needed_bytes)
            rows.append(
                (str(target.rank), str(target.tensors), written, needed, format_bytes(target.peak_bytes), ranks)
            )
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = ["  ".join([*(f"{cell:>{width}}" for cell, width in zip(row, widths)), row[5]]) for row in rows]
        count = len(self.targets)
        total = f"{count} {'target' if count == 1 else 'targets'}, {format_bytes(self.written_bytes)}"
        most = f"each process needs at most {format_bytes(self.peak_bytes)} of memory"
        return "\n".join([f"source: {self.source}", *map(one_line, self.tensors), *lines, f"{total}; {most}"])
