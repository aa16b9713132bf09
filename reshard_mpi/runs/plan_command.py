"""Do the command `plan`: plan the targets of a run and list them, without writing (`plan_targets`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from reshard_mpi import formats
from reshard_mpi.errors import ReshardError
from reshard_mpi.planning.rank_choice import Accumulated, is_partial_sum
from reshard_mpi.planning.rank_plan import LEFT_OUT, RankPlan
from reshard_mpi.planning.source_flaws import warnings_of
from reshard_mpi.processes.comm import Comm
from reshard_mpi.runs.open_run import Run
from reshard_mpi.runs.outcome import Outcome, together
from reshard_mpi.runs.planner import Planner
from reshard_mpi.runs.process_memory import RunProcess
from reshard_mpi.runs.progress import Progress
from reshard_mpi.runs.request import Request
from reshard_mpi.runs.target_plans import TargetPlans
from reshard_mpi.runs.transform import checked_plans, compare_within_source
from reshard_mpi.sharding.layout import whole_shape
from reshard_mpi.sharding.placement import Shape
from reshard_mpi.sharding.strategy import Strategy
from reshard_mpi.text import counted, format_bytes, one_line

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
        placement = strategy.of_rank(strategy.find(name), rank)
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
            copies=plan.read_count,
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
        total = f"{counted(len(self.targets), 'target')}, {format_bytes(self.written_bytes)}"
        most = f"each process needs at most {format_bytes(self.peak_bytes)} of memory"
        return "\n".join([f"source: {self.source}", *map(one_line, self.tensors), *lines, f"{total}; {most}"])


def plan_targets(
    request: Request, comm: Comm, progress: Progress, *, lists_tensors: bool = False
) -> tuple[Plan, Outcome]:
    """Plan the targets of `request` without writing; return the plan, and an outcome with notes and warnings.

    Args:
        lists_tensors: whether the plan has a line for each tensor.

    Raises, the same on every process, the errors for which `convert` refuses a run.
    """
    listing = _Listing(lists_tensors=lists_tensors)

    def make(damage: Mapping[int, ReshardError]) -> TargetPlans:
        nonlocal listing
        listing = _Listing(lists_tensors=lists_tensors)
        return TargetPlans.make(process, damage, listing.add)

    with RunProcess.begun(request, comm, progress) as process:
        plans, planned = checked_plans(make, comm, progress)
        outcome = compare_within_source(plans, planned)
        summaries = [summary for share in together(comm, lambda: listing.summaries) for summary in share]
        planner = plans.run.planner
        lines: Iterable[str] = ()
        if lists_tensors:
            lines = _tensor_lines(together(comm, lambda: listing.tensors), dict(_origins(planner)))
        rules = rules_of_source(planner, listing.summaries[0].rank if listing.summaries else None)
        summaries.sort(key=lambda summary: summary.rank)
        return Plan(tuple(summaries), planner.source.summary_text, tuple(lines), rules), outcome


class _TargetTensor(NamedTuple):
    """A tensor of a target. dtype: name of its type. shape: of the whole; piece: of what target `rank` holds of it."""

    dtype: str
    shape: Shape
    piece: Shape
    rank: int


class _Listing:
    """The targets that one process leads, as they are planned.

    Attributes:
        summaries: of each target.
        tensors: of all targets by name, if they are to be listed.
    """

    def __init__(self, *, lists_tensors: bool) -> None:
        self.summaries: list[RankSummary] = []
        self.tensors: dict[str, _TargetTensor] = {}
        self._lists_tensors = lists_tensors
        self._listed_stages: set[int] = set()

    def add(self, run: Run, plan: RankPlan, peak_bytes: int) -> None:
        """Add a target. All targets of a stage have the same tensors, unless they share them out."""
        self.summaries.append(RankSummary.of(plan, peak_bytes))
        are_shared_out = run.planner.is_one_checkpoint or formats.info(run.format).split_by_size
        if self._lists_tensors and (are_shared_out or plan.stage not in self._listed_stages):
            self._listed_stages.add(plan.stage)
            for name, tensor in _listed_tensors(plan).items():
                self.tensors.setdefault(name, tensor)


def _listed_tensors(plan: RankPlan) -> dict[str, _TargetTensor]:
    """Return the tensors of a target by name, in file order."""
    names, kinds, kind_of = plan.tensors.specs.names, plan.tensors.specs.kinds, plan.tensors.specs.kind_ids
    rank = plan.target_rank
    listed = [_TargetTensor(kind.dtype.name, kind.whole_shape, kind.shape, rank) for kind in kinds]
    return {name: listed[number] for name, number in zip(names, kind_of)}


def _tensor_lines(shares: Iterable[Mapping[str, _TargetTensor]], origins: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each tensor of the targets; then one for each that is left out.

    Args:
        shares: the tensors that each process has met.
        origins: by name, what a map makes of tensors and makes them of.
    """
    tensors: dict[str, _TargetTensor] = {}
    for share in shares:
        for name, tensor in share.items():
            tensors.setdefault(name, tensor)
    for name, tensor in tensors.items():
        piece = "" if tensor.piece == tensor.shape else f", on rank {tensor.rank} {list(tensor.piece)}"
        origin = f": {origins[name]}" if name in origins else ""
        yield f"{name} {tensor.dtype} {list(tensor.shape)}{piece}{origin}"
    yield from (f"{name}: {origin}" for name, origin in origins.items() if name not in tensors and origin == LEFT_OUT)


def _origins(planner: Planner) -> Iterator[tuple[str, str]]:
    """Yield names of tensors of the targets with their sources, where these are not the tensors of that name."""
    source = planner.source
    if planner.mapped is not None:
        yield from planner.mapped.origins()
    elif planner.policy.accumulated is not Accumulated.REFUSE:
        for rank in source.stage_ranks().values():
            for name in filter(is_partial_sum, source.manifest(rank).tensors):
                yield name, f"the {planner.policy.accumulated} of its replicas"


def rules_of_source(planner: Planner, target_rank: int | None) -> tuple[ShownRule, ...]:
    """Return, for each rule of the source's spec that cuts, its effect on one tensor.

    Args:
        target_rank: one that has been planned; None: none has.
    """
    shapes, source = {}, planner.source
    for name, ranks in source.rule_names().items():
        rank = next(iter(ranks.values()))
        shapes[name] = rank, source.manifest(rank).tensors[name].shape
    wholes: dict[str, Shape] = {}
    if any(placement.ceil for _, placement in source.strategy.rules):
        planned, opened_rank = (planner, target_rank) if planner.mapped is None else (planner.mapped.original, 0)
        both = {} if opened_rank is None else planned.held(opened_rank, shapes)
        wholes = {name: held.group.shape for name, held in both.items()}
    return tuple(shown_rules(source.strategy, shapes, wholes))
