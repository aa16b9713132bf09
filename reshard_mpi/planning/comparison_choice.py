"""Choose comparisons: of replicas that must be equal (`replicas_to_compare`), of samples of shards (`rank_pairs`).

If a strategy does not fit its checkpoint, ranks that should hold the same part of a tensor hold different ones, or
ranks that should hold different parts hold the same. Either shows in the shards of two ranks that are neighbours along
one axis of a mesh, so a few pairs of shards show it for every axis, however many ranks there are.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import accumulate, islice
from typing import NamedTuple, TypeVar

from reshard_mpi.formats.tensor_table import TensorTable
from reshard_mpi.groups import grouped
from reshard_mpi.planning.rank_choice import Replicas, is_partial_sum
from reshard_mpi.planning.source_tensors import SourceGroup, TensorPart, parts_meeting
from reshard_mpi.planning.step_counters import MOMENTS
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.layout import Layout
from reshard_mpi.sharding.placement import Piece, Placement, Shape, unravel
from reshard_mpi.sharding.state_names import STATE_KEY, dotted
from reshard_mpi.sharding.strategy import Strategy, find_or_follow

T = TypeVar("T")

# How many pairs of shards a run compares. If there are so few shards, further pairs show which shard is damaged.
MAX_PAIRS = 16
MAX_SHARDS = 8
# Tensors compared of a pair, and of a further pair; elements in each of three places of one.
MAX_TENSORS = 48
FEW_TENSORS = 8
PLACE_ELEMENTS = 32
# Since shards may be missing or damaged, this number of a stage is tried as the first of a pair.
_MAX_TRIED = 64
# A checkpoint has few combinations of a mesh and a set of stages. If it has more than this, only some are looked at.
_MAX_WAYS = 256
_DIGITS = re.compile(r"\d+")
_OF_NUMBER = re.compile(rf"(?:^|\.){STATE_KEY}\.\d+\.")
_PARTIAL_SUMS = (
    "they are partial sums of a step that is not finished: save at the end of a step, or say how to join them"
    " (--accumulated mean or sum)"
)

NUMBERED_BY_STAGES = "the stages that share it have drifted apart, or each has numbered parameters of its own"
_ONE_SCALE = "parts of one quantized weight have scales of their own: they were quantized one by one"

# Identifies the ranks that hold the same parts: equal ones stand for the same ranks.
Holding = tuple[tuple[Placement, Piece], ...]


class ReplicaGroup(NamedTuple):
    """A region of some tensors whose replicas must be equal."""

    names: tuple[str, ...]  # of the tensors
    parts: tuple[TensorPart, ...]  # each lies in `region`, and all ranks that hold one of them have a copy
    region: Box
    why: str  # what a difference would mean
    itemsize_bytes: int  # of an element
    listed: bool = True  # whether the source strategy lists the tensors
    expect_distinct: bool = False  # instead, all copies must differ, but for zeros; `why`: what it means if not
    is_partial: bool = False  # whether each may be a part of a sum, so that one does not stand for the others

    @property
    def holding(self) -> Holding:
        return tuple((part.placement, part.piece) for part in self.parts)

    @property
    def replicas(self) -> int:
        """How many ranks hold a replica."""
        return sum(part.placement.replicas for part in self.parts)

    @property
    def size_bytes(self) -> int:
        """How many bytes all replicas of all its tensors have."""
        return len(self.names) * self.replicas * self.region.size * self.itemsize_bytes


def replicas_to_compare(
    wanted: Iterable[tuple[Iterable[str], SourceGroup, Layout]],
    box_of: Callable[[Layout], Box],
    replicas: Replicas,
    always: Container[str] = (),
) -> Iterator[ReplicaGroup]:
    """Yield the replicas of needed parts to compare: those likely to differ, and with CHECK all others too.

    A tensor that the source strategy does not list should be whole on every rank. If the target strategy cuts it,
    targets take their parts from different ranks, and these make up one tensor only if all replicas are equal.

    Args:
        wanted: the names of the tensors of a target, with how the source and how the target hold them.
        box_of: returns the target's box by the latter.
        always: names of tensors to compare unless replicas are taken from anywhere.
    """
    names_by_key: dict[tuple[tuple[Layout, ...], Layout, str, int, bool], list[str]] = {}
    for group_names, group, target in wanted:
        if not group.listed:
            if not target.placement.is_cut:
                continue
            why = "the source strategy does not list it, and the target strategy cuts it"
        elif group.is_tied:
            why = "the stages that share the parameter have drifted apart"
        else:
            why = "these ranks should hold the same" if replicas is Replicas.CHECK else ""
        for name in group_names:
            partial = group.listed and is_partial_sum(name)
            why_here = why or (_ONE_SCALE if replicas is not Replicas.ANY and name in always else "")
            if group.listed and group.is_tied and _OF_NUMBER.search(dotted(name)):
                why_here = NUMBERED_BY_STAGES
            if partial or why_here:
                reason, itemsize_bytes = _PARTIAL_SUMS if partial else why_here, group.dtype.itemsize_bytes
                key = (group.layouts, target, reason, itemsize_bytes, group.listed)
                names_by_key.setdefault(key, []).append(name)
    for (layouts, target, why, itemsize_bytes, listed), names in names_by_key.items():
        alternatives = [parts_meeting(layout, box_of(target)) for layout in layouts]
        for region, parts in _shared_regions(alternatives):
            is_partial = why is _PARTIAL_SUMS
            alike = ReplicaGroup(tuple(names), parts, region, why, itemsize_bytes, listed, is_partial=is_partial)
            if alike.replicas > 1:
                yield alike


def _shared_regions(alternatives: Iterable[tuple[TensorPart, ...]]) -> Iterator[tuple[Box, tuple[TensorPart, ...]]]:
    """Yield the regions of the needed parts, each with the parts that have it.

    Args:
        alternatives: the needed parts, once for each placement of the tensors (stages that share them may cut them
            differently).
    """
    regions: list[tuple[Box, tuple[TensorPart, ...]]] = []
    for parts in alternatives:
        if not regions:
            regions = [(part.region, (part,)) for part in parts]
            continue
        regions = [
            (shared, (*same, part))
            for region, same in regions
            for part in parts
            if (shared := region.intersect(part.region)) is not None
        ]
    return ((region, tuple(part._replace(region=region) for part in same)) for region, same in regions)


def partition_for(all_alike: Sequence[ReplicaGroup], process: int, processes: int) -> Iterator[ReplicaGroup]:
    """Yield process `process`'s share of the comparisons; groups held by the same ranks stay adjacent.

    Args:
        all_alike: what all targets need, equal in all processes. It is cut into stretches that take as much reading
            each, so nothing is compared twice and few processes open the same shard.
    """
    by_holding = grouped((alike.holding, alike) for alike in all_alike)
    line = [alike for same_holders in by_holding.values() for alike in same_holders]
    total = sum(len(alike.names) * _weight(alike) for alike in line)
    start, stop = (total * number // processes for number in (process, process + 1))
    before = 0  # the weight of all that comes earlier in the line
    for alike in line:
        weight = _weight(alike)
        first, last = (min(max(0, -(-(cut - before) // weight)), len(alike.names)) for cut in (start, stop))
        if first < last:
            yield alike if last - first == len(alike.names) else alike._replace(names=alike.names[first:last])
        before += len(alike.names) * weight


def _weight(alike: ReplicaGroup) -> int:
    """Return how many elements are read to compare one tensor; at least 1 a copy."""
    return alike.replicas * max(1, alike.region.size)


class RankPair(NamedTuple):
    """Two ranks of one stage whose shards are compared. tensors: in how many tensors at most.

    A stage with one rank has a pair of this one twice, for tensors that should be in other stages alone.
    """

    first: int
    second: int
    tensors: int = MAX_TENSORS


class _AxisStep(NamedTuple):
    """A step along one axis of a mesh, from a rank to another, around the end if need be."""

    stride: int  # how many ranks neighbours on the axis lie apart
    length: int  # of the axis
    distance: int  # of the step, in coordinates

    def partner(self, rank: int) -> int:
        coordinate = rank // self.stride % self.length
        return rank + ((coordinate + self.distance) % self.length - coordinate) * self.stride


def rank_pairs(strategy: Strategy, present: Collection[int]) -> tuple[RankPair, ...]:
    """Return the pairs of `present` ranks to compare; equal arguments give the same pairs.

    Along each axis of each mesh, ranks are paired whose coordinates differ by a divisor of the axis' length or by its
    whole length less 1, in a stage that has tensors on that mesh; for each kind of tensor, so that those of a single
    stage are compared as well. Further pairs are taken from the stages in turn, up to MAX_PAIRS in all. In a checkpoint
    of at most MAX_SHARDS shards, each is also compared with all its neighbours, in FEW_TENSORS tensors. Of several
    stages, those with a single rank get a pair of this one with itself.
    """
    steps = _spread(_steps(_meshes(strategy)), MAX_PAIRS)
    by_stage = grouped((strategy.stage_of(rank), rank) for rank in sorted(present))
    if not by_stage:
        return ()
    pairs: dict[RankPair, None] = {}

    def take(stage: int, step: _AxisStep) -> None:
        tried = islice(by_stage[stage], _MAX_TRIED)
        first = next((rank for rank in tried if step.partner(rank) in present), None)
        if first is not None and len(pairs) < MAX_PAIRS:
            pairs[_pair(first, step.partner(first))] = None

    for stage, step in _covering(_held_ways(strategy), by_stage):
        take(stage, step)
    stages = _spread(list(by_stage), MAX_PAIRS)
    for turn in range(len(steps)):
        for number, stage in enumerate(stages):
            take(stage, steps[(turn + number) % len(steps)])
    if len(present) <= MAX_SHARDS:
        neighbours = ((rank, step.partner(rank)) for step in steps for rank in sorted(present))
        further = dict.fromkeys(_pair(*both) for both in neighbours if both[1] in present)
        pairs.update((pair._replace(tensors=FEW_TENSORS), None) for pair in further if pair not in pairs)
    if len(by_stage) > 1:
        alone = (ranks[0] for ranks in by_stage.values() if len(ranks) == 1)
        pairs.update((RankPair(rank, rank), None) for rank in islice(alone, max(0, MAX_PAIRS - len(pairs))))
    return tuple(pairs)


def share(pairs: Iterable[RankPair], process: int, processes: int) -> list[RankPair]:
    """Return the pairs that one process compares: neighbouring ones, with about as many tensors as others compare.

    It has opened some of these shards for its own targets.
    """
    line = sorted(pairs)
    ends = list(accumulate(pair.tensors for pair in line))
    return [pair for pair, end in zip(line, ends) if (end - 1) * processes // ends[-1] == process]


def _meshes(strategy: Strategy) -> dict[Shape, None]:
    """Return the different meshes of a strategy, in the order in which it uses them."""
    placements = {id(placement): placement for listed in strategy.parameters.values() for placement in listed}
    placements |= {id(placement): placement for _, placement in strategy.rules}
    return dict.fromkeys(placement.mesh for placement in placements.values())


def _steps(meshes: Iterable[Shape]) -> list[_AxisStep]:
    """Return the steps along the axes of meshes; of several steps from rank 0 to one rank, only the first."""
    steps: dict[int, _AxisStep] = {}
    for mesh in meshes:
        stride = 1
        for length in reversed(mesh):
            for distance in range(1, length):
                if length % distance == 0 or distance == length - 1:
                    steps.setdefault(stride * distance, _AxisStep(stride, length, distance))
            stride *= length
    return [steps[rank] for rank in sorted(steps)]


def _held_ways(strategy: Strategy) -> set[tuple[Shape, frozenset[int]]]:
    """Return a mesh and the stages for each kind of tensor and each way in which tensors of that kind are placed."""
    stages_of: dict[tuple[str, Shape, tuple[object, ...]], set[int]] = {}
    for name, listed in strategy.parameters.items():
        for placement in listed:
            way = placement.split, placement.optimizer, placement.sizes, placement.ceil  # in whatever stage
            stages_of.setdefault((kind_of(name), placement.mesh, way), set()).update(placement.stages)
    return {(mesh, frozenset(stages)) for (_, mesh, _), stages in stages_of.items()}


def _covering(
    held: Iterable[tuple[Shape, frozenset[int]]], present: Collection[int]
) -> Iterator[tuple[int, _AxisStep]]:
    """Yield stages and steps to make in them, until every mesh has had all its steps in one of its stages.

    Args:
        held: meshes, each with the stages that have tensors on it.
        present: the stages that have shards. Stages and steps that serve the most meshes come first; MAX_PAIRS are
            yielded at most.
    """
    ways = _spread(sorted(held, key=lambda way: (way[0], sorted(way[1]))), _MAX_WAYS)
    needs = [(stages, step) for mesh, stages in ways for step in _steps([mesh])]
    step_to: dict[int, _AxisStep] = {}  # by the rank that it leads to from rank 0
    served_by: dict[tuple[int, int], set[int]] = {}  # the numbers of the needs
    for number, (stages, step) in enumerate(needs):
        partner = step.partner(0)
        step_to.setdefault(partner, step)
        for stage in _spread(sorted(stages.intersection(present)), MAX_PAIRS):
            served_by.setdefault((stage, partner), set()).add(number)
    for _ in range(MAX_PAIRS):
        best = min(served_by, key=lambda option: (-len(served_by[option]), option), default=None)
        if best is None or not served_by[best]:
            return
        stage, partner = best
        yield stage, step_to[partner]
        done = served_by.pop(best)
        for needed in served_by.values():
            needed -= done


def _spread(values: list[T], limit: int) -> list[T]:
    """Return at most `limit` of the values, the first and the last among them."""
    if len(values) <= limit:
        return values
    return [values[number * (len(values) - 1) // (limit - 1)] for number in range(limit)]


def _pair(first: int, second: int) -> RankPair:
    return RankPair(min(first, second), max(first, second))


class Sampled(NamedTuple):
    """A tensor in which the shards of a pair are compared."""

    name: str
    placement: Placement | None  # how their stage holds it; None: the strategy does not list it there
    home_stage: int | None = None  # a stage in which the strategy lists it, if that is only in others


class Sampler:
    """Chooses the tensors in which pairs of shards are compared.

    Attributes:
        is_wanted: tells whether targets need the tensor of a given name, given all names.
    """

    def __init__(self, strategy: Strategy, is_wanted: Callable[[str, Container[str]], bool]) -> None:
        self._strategy = strategy
        self._is_wanted = is_wanted
        self._ways: dict[int, int] = {}  # by the identity of a placement, a number that equal ones share
        self._numbers: dict[Placement, int] = {}
        self._chosen: dict[int, tuple[frozenset[str], tuple[Sampled, ...]]] = {}

    def choose(self, stage: int, first: TensorTable, second: TensorTable) -> tuple[Sampled, ...]:
        """Return the tensors to compare in two shards of `stage`, which both hold them; the most telling first.

        Tensors that are placed alike, and have the same name but for the numbers in it, are a kind. Kinds take turns:
        the first of each, the last of each, then others, MAX_TENSORS in all. Where a pattern covers only some of such
        names by mistake, these are kinds of their own, so both are looked at.
        """
        names = frozenset(first.keys() & second.keys())
        cached = self._chosen.get(stage)
        if cached is None or cached[0] != names:
            cached = names, self._choose(stage, first, names)
            self._chosen[stage] = cached
        return cached[1]

    def _choose(self, stage: int, tensors: TensorTable, names: frozenset[str]) -> tuple[Sampled, ...]:
        kinds: dict[int, dict[str, list[Sampled]]] = {}
        empty, parameters = [not kind.size_bytes for kind in tensors.kinds], self._strategy.parameters
        for name, kind in zip(tensors, tensors.kind_ids):
            if empty[kind] or name not in names or name in MOMENTS or not self._is_wanted(name, names):
                continue
            placements = parameters.get(name) or find_or_follow(
                self._strategy, name, partial(_same_shape, tensors, names, name)
            )
            near = next((placement for placement in placements if stage in placement.stages), None)
            home_stage = placements[0].stages[0] if placements and near is None else None
            by_name = kinds.setdefault(self._way(near), {})
            by_name.setdefault(kind_of(name), []).append(Sampled(name, near, home_stage))
        queues = [_in_turn(list(map(_ends_first, by_name.values()))) for by_name in kinds.values()]
        return tuple(islice(_in_turn([list(queue) for queue in queues]), MAX_TENSORS))

    def _way(self, placement: Placement | None) -> int:
        if placement is None:
            return -1
        way = self._ways.get(id(placement))
        if way is None:
            way = self._ways[id(placement)] = self._numbers.setdefault(placement, len(self._numbers))
        return way


def kind_of(name: str) -> str:
    """Return a name with its numbers replaced: the same for a parameter in all layers."""
    return _DIGITS.sub("#", name)


def _same_shape(tensors: TensorTable, names: Container[str], name: str, base: str) -> bool:
    if base not in names:
        return True
    kind, other = tensors.kind_named(name), tensors.kind_named(base)
    return (other.shape, other.global_shape) == (kind.shape, kind.global_shape)


def _ends_first(tensors: list[Sampled]) -> list[Sampled]:
    """Return the first, the last, and the others in a shuffled order, always the same."""
    others = sorted(tensors[1:-1], key=lambda tensor: zlib.crc32(tensor.name.encode("utf-8", "surrogatepass")))
    return [tensors[0], *tensors[-1:], *others] if len(tensors) > 1 else tensors


def _in_turn(queues: list[list[Sampled]]) -> Iterator[Sampled]:
    """Yield the first of every queue, then the second, and so on."""
    for turn in range(max(map(len, queues), default=0)):
        yield from (queue[turn] for queue in queues if turn < len(queue))


@lru_cache(maxsize=4 * MAX_TENSORS)
def places(name: str, shape: Shape) -> tuple[Box, ...]:
    """Return the boxes in which a part of a tensor is compared; each is one run of the part's row-major bytes.

    They are the beginning, the end, and one place between them that depends on the name; of a small part, all of it.

    Args:
        shape: of the part.
    """
    box = Box.whole(shape)
    if box.size <= 3 * PLACE_ELEMENTS:
        return (box,)
    dim, below = len(shape), 1  # a place can hold the dimensions from `dim` on whole
    while below * shape[dim - 1] <= PLACE_ELEMENTS:
        dim -= 1
        below *= shape[dim]
    cut = dim - 1
    count = max(1, PLACE_ELEMENTS // below)
    rows = box.size // below
    drawn_row = zlib.crc32(name.encode("utf-8", "surrogatepass")) % rows
    boxes = []
    for row in (0, drawn_row, rows - 1):
        start = list(unravel(row, shape[:dim]))
        start[cut] = min(start[cut], shape[cut] - count)
        boxes.append(Box.at((*start, *(0,) * (len(shape) - dim)), (*(1,) * cut, count, *shape[dim:])))
    return tuple(boxes)
