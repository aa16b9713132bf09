"""Define the records of a plan (`RankPlan`, `Group`, `ReadItem`, `Limits`)."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from operator import eq
from typing import TYPE_CHECKING, NamedTuple, overload

from reshard_mpi.errors import ReshardError
from reshard_mpi.formats.manifest import ShardIdentity, ShardSpec, Specs, TensorSpec
from reshard_mpi.formats.tensor_table import TensorEntry, TensorTable, TensorType
from reshard_mpi.planning.source_flaws import Differing, PrefixDigest, UnusableShard
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.strides import Move, Strides, paired

if TYPE_CHECKING:
    from reshard_mpi.planning.comparison_choice import ReplicaGroup

# How much memory a plan takes for each tensor, and for each read item.
_TENSOR_BYTES, _READ_ITEM_BYTES = 24, 8


class Limits(NamedTuple):
    """How much memory one process may use to move bytes."""

    buffer_bytes: int  # size of the buffer in which a run of target bytes is put together
    window_bytes: int  # how much of source files is mapped at any moment

    @property
    def tile_bytes(self) -> int:
        """How large the tile of a tensor is at most whose axes change places: as read, and again as written."""
        return max(self.buffer_bytes, self.window_bytes)


class ReadItem(NamedTuple):
    """A region of a source tensor that becomes a region of a target tensor (torch's DCP has the word, too)."""

    source_rank: int
    source: TensorEntry  # the tensor as it is on `source_rank`, where it holds `source_box`
    source_box: Box
    region: Box  # what is taken, in coordinates of the source
    to: Box | None = None  # what that becomes, in coordinates of the target; None: the same region
    # the dimensions of the source in the order in which they come in the target; None: as in the source. Either region
    # may have further dimensions of length 1.
    order: tuple[int, ...] | None = None

    @property
    def target_region(self) -> Box:
        return self.region if self.to is None else self.to

    @property
    def size_bytes(self) -> int:
        return self.region.size * self.source.dtype.itemsize_bytes

    def strides(self, target: Box) -> Strides:
        """Return the strides of the copied elements in the source and in a row-major array that holds box `target`."""
        return Strides.between(self.region, self.source_box, self.target_region, target, self.order, self.source.steps)

    @property
    def source_strides(self) -> Strides:
        """Strides of the copied elements in the source, and in a row-major array of the source region alone."""
        return Strides.between(self.region, self.source_box, self.region, self.region, steps=self.source.steps)

    def part(self, target_region: Box) -> ReadItem:
        """Return the part of this item that becomes `target_region`, which must lie in its own."""
        if self.to is None:
            return self._replace(region=target_region)
        region = Move(self.region, self.to, self.order).source_of(target_region)
        return self._replace(region=region, to=target_region)

    def meeting(self, target_region: Box) -> ReadItem | None:
        """Return the part of this item that lies in `target_region`; None if nothing does."""
        shared = self.target_region.intersect(target_region)
        return None if shared is None else self.part(shared)

    def taking(self, region: Box) -> ReadItem:
        """Return the part of this item that takes `region` of the source, which must lie in its own."""
        to = None if self.to is None else Move(self.region, self.to, self.order).target_of(region)
        return self._replace(region=region, to=to)

    def rows(self, first: int, last: int) -> ReadItem:
        """Return the part of this item from row `first` up to `last` of the source region, counted from its start."""
        return self._cut(0, first, last)

    def _cut(self, dim: int, first: int, last: int) -> ReadItem:
        """Return the part between two indices of a source dimension, counted from the region's start.

        The region must be longer than 1 in that dimension.
        """
        region = _cut(self.region, dim, first, last)
        if self.to is None:
            return self._replace(region=region)
        other = dict(paired(self.region, self.to, self.order))[dim]
        return self._replace(region=region, to=_cut(self.to, other, first, last))

    def halves(self) -> tuple[ReadItem, ReadItem]:
        """Return two read items for this one, cut along the dimension that spans the most in the source.

        It must have two elements at least.
        """
        shape, steps = self.region.shape, self.source.steps
        dim = next(dim for dim, length in enumerate(shape) if length > 1)
        if steps is not None:
            dim = max((dim for dim, length in enumerate(shape) if length > 1), key=lambda dim: shape[dim] * steps[dim])
        length = shape[dim]
        return self._cut(dim, 0, length // 2), self._cut(dim, length // 2, length)


def _cut(box: Box, dim: int, first: int, last: int) -> Box:
    """Return the part of a box between two indices of one dimension, counted from its start."""
    return box.within(dim, box.start[dim] + first, box.start[dim] + last)


class TensorPlan(NamedTuple):
    """One target tensor and the read items that make it up: they are disjoint and together exactly its box."""

    spec: TensorSpec
    reads: tuple[ReadItem, ...]


class ReadGroup(NamedTuple):
    """Where one part of several target tensors comes from: a `ReadItem` for each, alike but for the source tensor."""

    source_rank: int
    source_box: Box
    region: Box
    tensors: TensorTable  # all that `source_rank` holds
    numbers: Sequence[int]  # of the source tensors among them, one for each target tensor
    to: Box | None = None
    order: tuple[int, ...] | None = None
    joined_ranks: tuple[int, ...] = ()  # if the tensors are sums or means of what several ranks hold, all of these

    def item(self, place: int, name: str) -> ReadItem:
        """Return the read item for the target tensor at `place` of the group; `name` is its source tensor's."""
        number = self.numbers[place]
        dtype, shape, box, whole = self.tensors.kinds[self.tensors.kind_ids[number]]
        entry = TensorEntry(name, dtype, shape, self.tensors.source(number), box, whole)
        return ReadItem(self.source_rank, entry, self.source_box, self.region, self.to, self.order)

    @property
    def move(self) -> Move:
        return Move(self.region, self.region if self.to is None else self.to, self.order)

    def strides(self, target: Box) -> Strides:
        """Return the strides of each item's elements in its source and in a row-major array that holds box `target`."""
        return Strides.between(self.region, self.source_box, self.move.to, target, self.order)


class Group(NamedTuple):
    """Target tensors of one kind of the same origin, which differ in names and source tensors only."""

    kind: TensorType
    names: Sequence[str]
    routes: tuple[ReadGroup, ...]  # the parts that make up each tensor, disjoint and together exactly its box

    def tensor(self, place: int) -> TensorPlan:
        name = self.names[place]
        return TensorPlan(TensorSpec.of(name, self.kind), tuple(route.item(place, name) for route in self.routes))

    def part(self, places: Sequence[int]) -> Group:
        """Return the group of its tensors at these places."""
        if len(places) == len(self.names):
            return self
        routes = (route._replace(numbers=array("I", map(route.numbers.__getitem__, places))) for route in self.routes)
        return Group(self.kind, [self.names[place] for place in places], tuple(routes))


class PlannedTensors(Sequence[TensorPlan]):
    """The tensors of one target in file order. They are kept in groups, since there may be a hundred thousand of them.

    Attributes:
        group_of: for each tensor, the number of its group. The tensors of a group come in the order of its names.
    """

    __slots__ = ("_place_in_group", "group_of", "groups")

    def __init__(self, groups: Sequence[Group], group_of: Sequence[int]) -> None:
        self.groups = groups
        self.group_of = group_of
        self._place_in_group: array[int] | None = None

    @property
    def place_in_group(self) -> Sequence[int]:
        """The place of each tensor in its group."""
        if self._place_in_group is None:
            counts = [0] * len(self.groups)
            self._place_in_group = array("I")
            for number in self.group_of:
                self._place_in_group.append(counts[number])
                counts[number] += 1
        return self._place_in_group

    @property
    def places(self) -> dict[str, tuple[int, int]]:
        """For each tensor by name, the number of its group and its place in that."""
        return {
            name: (number, place) for number, group in enumerate(self.groups) for place, name in enumerate(group.names)
        }

    @property
    def specs(self) -> Specs:
        names = [self.groups[number].names[place] for number, place in zip(self.group_of, self.place_in_group)]
        return Specs(names, [group.kind for group in self.groups], self.group_of)

    def without(self, names: Container[str]) -> PlannedTensors:
        """Return all tensors but the ones with these names."""
        kept = [[place for place, name in enumerate(group.names) if name not in names] for group in self.groups]
        number_of = {number: new for new, number in enumerate(number for number, places in enumerate(kept) if places)}
        groups = [self.groups[number].part(kept[number]) for number in number_of]
        places = zip(self.group_of, self.place_in_group)
        is_kept = (self.groups[number].names[place] not in names for number, place in places)
        group_of = array("I", (number_of[number] for number, own in zip(self.group_of, is_kept) if own))
        return PlannedTensors(groups, group_of)

    def __iter__(self) -> Iterator[TensorPlan]:
        return (self.groups[number].tensor(place) for number, place in zip(self.group_of, self.place_in_group))

    @overload
    def __getitem__(self, index: int) -> TensorPlan: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TensorPlan]: ...
    def __getitem__(self, index: int | slice) -> TensorPlan | Sequence[TensorPlan]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        return self.groups[self.group_of[index]].tensor(self.place_in_group[index])

    def __len__(self) -> int:
        return len(self.group_of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    def __hash__(self) -> int:
        return hash(len(self))


def meeting(reads: Iterable[ReadItem], box: Box) -> list[ReadItem]:
    """Return what read items have of a box of the target."""
    return [part for item in reads if (part := item.meeting(box)) is not None]


class Check(NamedTuple):
    """Copies of one region of one tensor that must hold the same bytes."""

    name: str
    reads: tuple[ReadItem, ...]
    refuse: bool  # whether a difference stops the target; else it is only reported
    why: str  # what a difference would mean


# The name of the moment that says which of several checkpoints in the source was chosen.
CHOSEN_FILES = "chosen files"


class SharedFact(NamedTuple):
    """One thing in which all shards of a checkpoint must agree, as the shard at `path` has it.

    It is the name and value of a step counter; or, where several stages of the target share tensors, the name of one
    with its type and whole shape, or the names of all; or which files were chosen as the checkpoint (`CHOSEN_FILES`).
    """

    name: str
    value: str
    path: str


# Origin of a tensor of the source that targets do not have.
LEFT_OUT = "left out"


class StageDigest(NamedTuple):
    """A digest of what strategies place on target rank `rank` (`RankPlan.placed`), the same on all ranks of a stage."""

    stage: int
    digest: str
    rank: int


class AccumulatedGradients(NamedTuple):
    """Accumulated gradients, and how many source ranks hold the same piece of each."""

    names: str  # a glob of their names
    replicas: int
    added_in: str  # the type in which they are added


class RankPlan(NamedTuple):
    """All that is needed to make one target: what to write, where it comes from, and what must be checked before.

    Example: target rank 1 of 2, whose half of `w` (8 rows of 4) lies in the shards of source ranks 2 and 3, is a plan
    with `source_ranks=(2, 3)` whose tensors have one group, of two routes with one `ReadItem` for `w` each: the region
    [0:2, 0:4] of the target from [0:2, 0:4] of rank 2, and [2:4, 0:4] from [0:2, 0:4] of rank 3.
    """

    target_rank: int
    stage: int  # pipeline stage of the target
    identity: ShardIdentity
    tensors: PlannedTensors  # the groups of tensors with their routes
    strings: Mapping[str, str]
    checks: tuple[Check, ...]  # copies to compare, for this target alone
    absent: tuple[str, ...]  # names that strategies list and no source shard holds
    notes: tuple[str, ...]  # for the user
    source_ranks: tuple[int, ...]  # ranks whose shards were opened
    unlisted: frozenset[str]  # names of tensors that the source strategy does not place
    shared_facts: tuple[
        SharedFact, ...
    ] = ()  # to agree with other targets: step counters, tensors that its stages share
    prefix_digests: tuple[PrefixDigest, ...] = ()  # of unlisted tensors that should be equal in other targets
    differing: tuple[Differing, ...] = ()  # unlisted tensors that differ between the opened shards
    to_compare: tuple[ReplicaGroup, ...] = ()  # replicas that must be equal; compared once for all targets of a process
    lost: tuple[UnusableShard, ...] = ()  # source shards that cannot be used
    warnings: tuple[str, ...] = ()  # other departures from the usual source of a tensor
    unplaced: frozenset[str] = frozenset()  # unlisted tensors that the target strategy does not place either
    left_out: tuple[str, ...] = ()  # in words, contents of the shards that no target gets
    written_by_others: Mapping[
        str, str | None
    ] = {}  # written by another target: name to "type [whole shape]", if placed
    gradients: tuple[AccumulatedGradients, ...] = ()  # accumulated ones among the tensors
    holes: Mapping[str, ReshardError] = {}  # if asked for: tensors that cannot be made; their groups have no routes
    value_ranks: tuple[int, ...] = ()  # the source ranks that strings, and numbers computed for a map, are taken from

    @property
    def shard(self) -> ShardSpec:
        return ShardSpec(
            self.identity, self.tensors.specs, self.strings, written_by_others=tuple(self.written_by_others)
        )

    def without(self, names: Collection[str]) -> RankPlan:
        """Return the plan of a target that leaves these tensors to others."""
        if not names:
            return self
        placed = self.placed
        elsewhere = {name: placed.get(name) for group in self.tensors.groups for name in group.names if name in names}
        return self._replace(tensors=self.tensors.without(names), written_by_others=elsewhere)

    def renamed(self, names: Mapping[str, str]) -> RankPlan:
        """Return the same plan with other names for the tensors of the target. names: the new one of each tensor."""
        groups = [group._replace(names=[names[name] for name in group.names]) for group in self.tensors.groups]
        unlisted = frozenset(names[name] for name in self.unlisted & names.keys())
        unplaced = frozenset(names[name] for name in self.unplaced & names.keys())
        return self._replace(
            tensors=PlannedTensors(groups, self.tensors.group_of), unlisted=unlisted, unplaced=unplaced
        )

    @property
    def placed(self) -> dict[str, str]:
        """Type and whole shape of each tensor that strategies place here, by name; alike on all ranks of a stage."""
        placed = {name: description for name, description in self.written_by_others.items() if description is not None}
        for kind, names, _ in self.tensors.groups:
            description = f"{kind.dtype.name} {list(kind.whole_shape)}"
            placed.update((name, description) for name in names if name not in self.unplaced)
        return dict(sorted(placed.items()))

    @property
    def held(self) -> StageDigest:
        placed = "\0".join(map("\0".join, self.placed.items())).encode("utf-8", "surrogatepass")
        digest = hashlib.sha256(placed).hexdigest()
        return StageDigest(self.stage, digest, self.target_rank)

    @property
    def read_ranks(self) -> tuple[int, ...]:
        """The source ranks that anything is taken from, ascending; the others were opened only to be compared."""
        routes = (route for group in self.tensors.groups for route in group.routes)
        of_tensors = (rank for route in routes for rank in route.joined_ranks or (route.source_rank,))
        return tuple(sorted({*of_tensors, *self.value_ranks}))

    @property
    def read_count(self) -> int:
        """How many read items make up all tensors."""
        return sum(len(group.names) * len(group.routes) for group in self.tensors.groups)

    @property
    def kept_bytes(self) -> int:
        """How much memory the plan takes, with the tables of the source shards that it refers to."""
        routes = (route for group in self.tensors.groups for route in group.routes)
        tables = {id(table): table for route in routes for table in route.tensors.tables}
        return (
            TensorTable.kept_bytes(tables.values())
            + _READ_ITEM_BYTES * self.read_count
            + _TENSOR_BYTES * len(self.tensors)
        )

    @property
    def written_bytes(self) -> int:
        """Payload bytes of the target shard."""
        return sum(len(group.names) * group.kind.size_bytes for group in self.tensors.groups)

    @property
    def needed_bytes(self) -> int:
        """Payload bytes taken from the sources."""
        return sum(
            route.region.size * route.tensors.element_bytes(route.numbers)
            for group in self.tensors.groups
            for route in group.routes
        )
