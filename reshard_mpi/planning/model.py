"""The records a plan consists of."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import eq
from typing import NamedTuple, overload

from reshard_mpi.formats.columns import TensorEntry, Tensors
from reshard_mpi.formats.manifest import ShardIdentity
from reshard_mpi.formats.specs import ShardSpec, SpecKind, Specs, TensorSpec
from reshard_mpi.planning.copies import Alike
from reshard_mpi.planning.losses import Lost
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.strides import Strides, paired

# What a plan keeps of each tensor, and of each copy.
_TENSOR_BYTES, _COPY_BYTES = 24, 8


class Limits(NamedTuple):
    """How much memory moving bytes may take, in one process.

    buffer_bytes: the buffer in which a run of target bytes is put together. window_bytes: how much of source files is
    mapped at any moment.
    """

    buffer_bytes: int
    window_bytes: int


class Copy(NamedTuple):
    """What is taken from `source`, which holds `source_box` on `source_rank`: `region` of it, in its coordinates.

    to: which region of the target that becomes, in the target's coordinates; None: the same. order: the dimensions of
    the source as they follow each other in the target; None: as in the source. Either region may have further
    dimensions of length 1.
    """

    source_rank: int
    source: TensorEntry
    source_box: Box
    region: Box
    to: Box | None = None
    order: tuple[int, ...] | None = None

    @property
    def target_region(self) -> Box:
        return self.region if self.to is None else self.to

    @property
    def size_bytes(self) -> int:
        return self.region.size * self.source.dtype.itemsize_bytes

    def strides(self, target: Box) -> Strides:
        """Return how its elements lie in the source and in an array that holds `target`."""
        return Strides.between(self.region, self.source_box, self.target_region, target, self.order, self.source.steps)

    @property
    def source_strides(self) -> Strides:
        """How its elements lie in the source and in a row-major array of the region alone, in the source's order."""
        return Strides.between(self.region, self.source_box, self.region, self.region, steps=self.source.steps)

    def part(self, target_region: Box) -> Copy:
        """Return what becomes `target_region`, which lies in that of this copy."""
        if self.to is None:
            return self._replace(region=target_region)
        start, stop = list(self.region.start), list(self.region.stop)
        for dim, other in paired(self.region, self.to, self.order):
            start[dim] += target_region.start[other] - self.to.start[other]
            stop[dim] = start[dim] + target_region.stop[other] - target_region.start[other]
        return self._replace(region=Box(tuple(start), tuple(stop)), to=target_region)

    def meeting(self, target_region: Box) -> Copy | None:
        """Return what becomes a part of `target_region`; None if nothing does."""
        shared = self.target_region.intersect(target_region)
        return None if shared is None else self.part(shared)

    def rows(self, first: int, last: int) -> Copy:
        """Return what comes from some rows of the region in the source, counted from its own first one."""
        return self._cut(0, first, last)

    def _cut(self, dim: int, first: int, last: int) -> Copy:
        """Return what comes from a part of the region along one dimension of the source that is longer than 1."""
        region = _cut(self.region, dim, first, last)
        if self.to is None:
            return self._replace(region=region)
        other = dict(paired(self.region, self.to, self.order))[dim]
        return self._replace(region=region, to=_cut(self.to, other, first, last))

    def halves(self) -> tuple[Copy, Copy]:
        """Cut it in two where that brings the most apart in the source. It has two elements or more."""
        shape, steps = self.region.shape, self.source.steps
        dim = next(dim for dim, length in enumerate(shape) if length > 1)
        if steps is not None:
            dim = max((dim for dim, length in enumerate(shape) if length > 1), key=lambda dim: shape[dim] * steps[dim])
        length = shape[dim]
        return self._cut(dim, 0, length // 2), self._cut(dim, length // 2, length)


def _cut(box: Box, dim: int, first: int, last: int) -> Box:
    """Return the part of a box that lies between two indices of one dimension, counted from its own first one."""
    low = box.start[dim]
    start = (*box.start[:dim], low + first, *box.start[dim + 1 :])
    return Box(start, (*box.stop[:dim], low + last, *box.stop[dim + 1 :]))


class TensorPlan(NamedTuple):
    """One target tensor and the copies that make it up, disjoint and together exactly its box."""

    spec: TensorSpec
    copies: tuple[Copy, ...]


class Route(NamedTuple):
    """Where one part of some target tensors comes from: what is alike of their copies (see `Copy`).

    tensors: all that this rank holds. numbers: of the tensors in it that are taken, one for each target tensor.
    """

    source_rank: int
    source_box: Box
    region: Box
    tensors: Tensors
    numbers: Sequence[int]
    to: Box | None = None
    order: tuple[int, ...] | None = None

    def copy(self, at: int, name: str) -> Copy:
        """Return this part of the target tensor at place `at`, which is called `name` in the source."""
        dtype, shape, box, whole = self.tensors.kinds[self.tensors.kind_of[self.numbers[at]]]
        entry = TensorEntry(name, dtype, shape, self.tensors.source(self.numbers[at]), box, whole)
        return Copy(self.source_rank, entry, self.source_box, self.region, self.to, self.order)

    def taking(self, region: Box) -> Box | None:
        """Return what a part of the region becomes in the target, as `to` says it."""
        if self.to is None:
            return None
        start, stop = list(self.to.start), list(self.to.stop)
        for dim, other in paired(self.region, self.to, self.order):
            start[other] += region.start[dim] - self.region.start[dim]
            stop[other] = start[other] + region.stop[dim] - region.start[dim]
        return Box(tuple(start), tuple(stop))

    def strides(self, target: Box) -> Strides:
        """Return how the elements of each of them lie in its source and in an array that holds `target`."""
        to = self.region if self.to is None else self.to
        return Strides.between(self.region, self.source_box, to, target, self.order)


class Group(NamedTuple):
    """Target tensors that are alike, and come from the same ranks in the same way: nothing but names and places differ.

    routes: the parts that make up each of them, disjoint and together exactly its box.
    """

    kind: SpecKind
    names: Sequence[str]
    routes: tuple[Route, ...]

    def tensor(self, at: int) -> TensorPlan:
        name = self.names[at]
        return TensorPlan(TensorSpec(name, *self.kind), tuple(route.copy(at, name) for route in self.routes))


class PlannedTensors(Sequence[TensorPlan]):
    """The tensors of one target in file order, kept by groups, since there may be a hundred thousand of them.

    group_of: the number of each tensor's group; those of a group are in its order.
    """

    __slots__ = ("_place_in_group", "group_of", "groups")

    def __init__(self, groups: Sequence[Group], group_of: Sequence[int]) -> None:
        self.groups = groups
        self.group_of = group_of
        self._place_in_group: array[int] | None = None

    @classmethod
    def of(cls, tensors: Iterable[TensorPlan]) -> PlannedTensors:
        """Return tensors that were planned one by one, each as a group of its own."""
        groups = []
        for spec, copies in tensors:
            routes = tuple(
                Route(rank, source_box, region, Tensors("", [source]), (0,), to, order)
                for rank, source, source_box, region, to, order in copies
            )
            groups.append(Group(SpecKind(*spec[1:]), (spec.name,), routes))
        return cls(groups, range(len(groups)))

    @property
    def place_in_group(self) -> Sequence[int]:
        """The place of each tensor in its group."""
        if self._place_in_group is None:
            met = [0] * len(self.groups)
            self._place_in_group = array("I")
            for number in self.group_of:
                self._place_in_group.append(met[number])
                met[number] += 1
        return self._place_in_group

    @property
    def specs(self) -> Specs:
        names = [self.groups[number].names[at] for number, at in zip(self.group_of, self.place_in_group)]
        return Specs(names, [group.kind for group in self.groups], self.group_of)

    def __iter__(self) -> Iterator[TensorPlan]:
        return (self.groups[number].tensor(at) for number, at in zip(self.group_of, self.place_in_group))

    @overload
    def __getitem__(self, at: int) -> TensorPlan: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[TensorPlan]: ...
    def __getitem__(self, at: int | slice) -> TensorPlan | Sequence[TensorPlan]:
        if isinstance(at, slice):
            return [self[one] for one in range(*at.indices(len(self)))]
        return self.groups[self.group_of[at]].tensor(self.place_in_group[at])

    def __len__(self) -> int:
        return len(self.group_of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    def __hash__(self) -> int:
        return hash(len(self))


class Check(NamedTuple):
    """Copies of one region of one tensor that must hold the same bytes.

    refuse: a difference stops the target; otherwise it is only reported. why: what a difference would mean.
    """

    name: str
    copies: tuple[Copy, ...]
    refuse: bool
    why: str


class Moment(NamedTuple):
    """What all shards of a checkpoint say alike, as the shard at `path` says it.

    When it was saved: the name and value of a counter. Or what several stages of the target hold: the name of a
    tensor with its type and whole shape, and which tensors there are.
    """

    name: str
    value: str
    path: str


class Beginning(NamedTuple):
    """How a tensor that no strategy places begins on source rank `rank`: a digest of its first bytes."""

    name: str
    digest: str
    rank: int


class Held(NamedTuple):
    """What the target ranks of a stage hold, as far as strategies place it: `digest` of `RankPlan.placed` of `rank`."""

    stage: int
    digest: str
    rank: int


class RankPlan(NamedTuple):
    """All that one target rank needs: what to write, from where, and what must hold first.

    source_ranks: the shards opened. absent: names the strategies list that no source shard holds. notes: what the user
    should be told. loose: tensors that the source strategy does not place. moments: the step counters of the shards
    opened, and what stages of the target share. beginnings: of the loose tensors, where other targets should have the
    same. alike: copies that must be the same, which whoever plans all targets of a process compares at once. lost:
    source shards that could not be used. warnings: what besides was taken from elsewhere than it should have been.
    unplaced: the loose tensors that the target strategy does not place either.
    """

    target_rank: int
    stage: int
    identity: ShardIdentity
    tensors: PlannedTensors
    strings: Mapping[str, str]
    checks: tuple[Check, ...]
    absent: tuple[str, ...]
    notes: tuple[str, ...]
    source_ranks: tuple[int, ...]
    loose: frozenset[str]
    moments: tuple[Moment, ...] = ()
    beginnings: tuple[Beginning, ...] = ()
    alike: tuple[Alike, ...] = ()
    lost: tuple[Lost, ...] = ()
    warnings: tuple[str, ...] = ()
    unplaced: frozenset[str] = frozenset()
    left_out: tuple[str, ...] = ()

    @property
    def shard(self) -> ShardSpec:
        return ShardSpec(self.identity, self.tensors.specs, self.strings)

    @property
    def placed(self) -> dict[str, str]:
        """Type and whole shape of what strategies place here, by name; all ranks of a stage must have the same."""
        placed: dict[str, str] = {}
        for kind, names, _ in self.tensors.groups:
            what = f"{kind.dtype.name} {list(kind.global_shape)}"
            placed.update((name, what) for name in names if name not in self.unplaced)
        return dict(sorted(placed.items()))

    @property
    def held(self) -> Held:
        digest = hashlib.sha256("\0".join(map("\0".join, self.placed.items())).encode()).hexdigest()
        return Held(self.stage, digest, self.target_rank)

    @property
    def read_ranks(self) -> tuple[int, ...]:
        """The source ranks that tensors are taken from, ascending; others were only opened, to compare."""
        return tuple(sorted({route.source_rank for group in self.tensors.groups for route in group.routes}))

    @property
    def copies(self) -> int:
        """How many copies all tensors are made of."""
        return sum(len(group.names) * len(group.routes) for group in self.tensors.groups)

    @property
    def kept_bytes(self) -> int:
        """How much memory the plan takes, with the shards that it refers to."""
        shards = {id(route.tensors): route.tensors for group in self.tensors.groups for route in group.routes}
        return Tensors.kept_bytes(shards.values()) + _COPY_BYTES * self.copies + _TENSOR_BYTES * len(self.tensors)

    @property
    def written_bytes(self) -> int:
        """Payload bytes of the target shard."""
        return sum(len(group.names) * group.kind.size_bytes for group in self.tensors.groups)

    @property
    def needed_bytes(self) -> int:
        """Payload bytes taken from the sources."""
        return sum(
            len(group.names) * group.kind.dtype.itemsize_bytes * sum(route.region.size for route in group.routes)
            for group in self.tensors.groups
        )
