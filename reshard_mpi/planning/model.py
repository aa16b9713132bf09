"""The records a plan consists of."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from reshard_mpi.formats.manifest import ShardIdentity, ShardSpec, TensorEntry, TensorSpec
from reshard_mpi.planning.copies import Alike
from reshard_mpi.planning.losses import Lost
from reshard_mpi.sharding.box import Box


class Limits(NamedTuple):
    """How much memory moving bytes may take, in one process.

    buffer_bytes: the buffer in which a run of target bytes is put together. window_bytes: how much of source files is
    mapped at any moment.
    """

    buffer_bytes: int
    window_bytes: int


class Copy(NamedTuple):
    """`region` of a tensor is taken from `source`, which holds `source_box` on `source_rank`. Boxes are global."""

    source_rank: int
    source: TensorEntry
    source_box: Box
    region: Box

    @property
    def size_bytes(self) -> int:
        return self.region.size * self.source.dtype.itemsize_bytes


class TensorPlan(NamedTuple):
    """One target tensor and the copies that make it up, disjoint and together exactly its box."""

    spec: TensorSpec
    copies: tuple[Copy, ...]


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
    tensors: tuple[TensorPlan, ...]
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

    @property
    def shard(self) -> ShardSpec:
        return ShardSpec(self.identity, tuple(tensor.spec for tensor in self.tensors), self.strings)

    @property
    def placed(self) -> dict[str, str]:
        """Type and whole shape of what strategies place here, by name; all ranks of a stage must have the same."""
        specs = sorted((tensor.spec for tensor in self.tensors if tensor.spec.name not in self.unplaced), key=_name)
        return {spec.name: f"{spec.dtype.name} {list(spec.global_shape)}" for spec in specs}

    @property
    def held(self) -> Held:
        digest = hashlib.sha256("\0".join(map("\0".join, self.placed.items())).encode()).hexdigest()
        return Held(self.stage, digest, self.target_rank)

    @property
    def read_ranks(self) -> tuple[int, ...]:
        """The source ranks that tensors are taken from, ascending; others were only opened, to compare."""
        return tuple(sorted({copy.source_rank for tensor in self.tensors for copy in tensor.copies}))

    @property
    def written_bytes(self) -> int:
        """Payload bytes of the target shard."""
        return sum(tensor.spec.size_bytes for tensor in self.tensors)

    @property
    def needed_bytes(self) -> int:
        """Payload bytes taken from the sources."""
        return sum(copy.size_bytes for tensor in self.tensors for copy in tensor.copies)


def _name(spec: TensorSpec) -> str:
    return spec.name
