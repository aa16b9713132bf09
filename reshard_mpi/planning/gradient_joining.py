"""Join accumulated gradients over their replicas (`GradientJoining`), and say so (`gradient_texts`).

The replicas of an accumulated gradient are the ranks that hold the same piece of it by the source strategy. They differ
by nature, so nothing in them shows whether the strategy is right. But the gradient of a parameter has its shape, and
copies of the parameter are compared.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from reshard_mpi.errors import CoverageError, ReshardError, SourceError, StrategyError
from reshard_mpi.formats.dtypes import BY_NAME, FLOATS
from reshard_mpi.formats.locations import Location, Reduced
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.tensor_table import NOT_CONTIGUOUS, TensorTable, TensorType
from reshard_mpi.planning.comparison_choice import ReplicaGroup
from reshard_mpi.planning.made_tensors import constant
from reshard_mpi.planning.rank_choice import ACCUMULATORS, Accumulated, GradientShare, is_partial_sum
from reshard_mpi.planning.rank_plan import AccumulatedGradients, ReadGroup
from reshard_mpi.planning.source_flaws import UnusableShard, named
from reshard_mpi.planning.source_tensors import SourceGroup, SourceTensors, TensorPart
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.placement import Placement
from reshard_mpi.sharding.strategy import Strategy, named_after

_MAX_DESCRIBED = 4
# Shorter ones may be the same by chance: parts that targets need, since there are many, and whole pieces.
_TELLING_PART_BYTES, _TELLING_BYTES = 64, 4
_NOT_APART = "if they have been added already, or are copies of one sum, each would count once more"


class JoinedTensors(TensorTable):
    """The sums of the tensors that several shards have by some names, or their means; numbered in the order of these.

    Attributes:
        shards: in the order in which they are added; all have these tensors, of the same kinds.
    """

    __slots__ = ("_is_mean", "_numbers", "_shards")

    def __init__(self, names: Sequence[str], shards: Sequence[TensorTable], *, is_mean: bool) -> None:
        first, *_ = shards
        super().__init__(first.path)
        self._shards, self._is_mean = tuple(shards), is_mean
        by_table: dict[int, array[int]] = {}  # shards of replicas have their table of names in common, as a rule
        for shard in shards:
            if id(shard.index_by_name) not in by_table:
                by_table[id(shard.index_by_name)] = array("I", map(shard.index_by_name.__getitem__, names))
        self._numbers = tuple(by_table[id(shard.index_by_name)] for shard in shards)
        for number in self._numbers[0]:
            self.add_unnamed(self.kind(first.kinds[first.kind_ids[number]]), NOT_CONTIGUOUS)
        for shard, numbers in zip(shards, self._numbers):
            if shard.locations:
                self.locations |= {
                    place: self.source(place) for place, number in enumerate(numbers) if number in shard.locations
                }

    def source(self, number: int) -> Location:
        sources = (shard.source(numbers[number]) for shard, numbers in zip(self._shards, self._numbers))
        return Reduced(tuple(sources), self._is_mean)

    def element_bytes(self, numbers: Sequence[int]) -> int:
        return sum(
            shard.element_bytes([own[number] for number in numbers]) for shard, own in zip(self._shards, self._numbers)
        )

    @property
    def tables(self) -> tuple[TensorTable, ...]:
        return (self, *self._shards)

    def _columns(self) -> tuple[object, ...]:
        shards = tuple(shard._columns() for shard in self._shards)
        return self._is_mean, self.kinds, self.kind_ids, self._numbers, shards


class GradientJoining(NamedTuple):
    """Decides what one target rank gets of the accumulated gradients that it holds."""

    accumulated: Accumulated
    source: Strategy
    tensors: SourceTensors  # of the opened shards, by the strategy `source`
    target_rank: int
    manifests: Mapping[int, Manifest]  # of the opened shards, by rank
    lost: Mapping[int, UnusableShard]  # shards that cannot be used, by rank
    keeps_errors: bool  # whether `share` returns errors: a tensor that it cannot decide on may be one that nobody wants

    def share(self, name: str, group: SourceGroup, target: Placement) -> GradientShare | ReshardError:
        """Return the part of a tensor for the target rank, or, if asked, the reason why it is unknown.

        Args:
            target: how the target holds it.

        Raises what `_share` raises.
        """
        try:
            return self._share(name, group, target)
        except (SourceError, StrategyError) as error:
            if not self.keeps_errors:
                raise
            return error

    def _share(self, name: str, group: SourceGroup, target: Placement) -> GradientShare:
        """Return the part of a tensor for the target rank.

        Raises StrategyError if it is not known which ranks hold parts of one sum, or what target ranks must hold of it;
        SourceError if its elements cannot be added.
        """
        if not is_partial_sum(name):
            return GradientShare.TAKEN
        self._require_known_replicas(name, group, target)
        has_replicas = replicas(group) > 1
        is_divided = self.accumulated is Accumulated.SUM and target.replicas > 1
        if (has_replicas or is_divided) and group.dtype not in FLOATS:
            raise SourceError(
                f"{name!r} is called like an accumulated gradient, and holds no floating-point numbers",
                expected=f"such as float32, of which --accumulated {self.accumulated} takes the {self.accumulated}",
                got=str(group.dtype),
                remedy="give it another name if it is none; leave out --accumulated if all ranks have the same",
            )
        if is_divided and next(target.holders(target.piece(self.target_rank))) != self.target_rank:
            return GradientShare.ZEROS
        if not has_replicas:
            return GradientShare.TAKEN
        self._require_parameter(name, group)
        return GradientShare.JOINED

    def _require_known_replicas(self, name: str, group: SourceGroup, target: Placement) -> None:
        if not group.listed and self.source.world_size > 1:
            raise StrategyError(
                f"the source strategy does not place {name!r}, so it is not known which ranks hold parts of one sum",
                expected="it, or the parameter whose gradient it is, in the source strategy",
                got="neither",
                where=self.source.origin,
                remedy="add it to the source strategy",
            )
        if group.is_tied or len(target.stages) > 1:
            raise StrategyError(
                f"stages share {name!r}, and nothing says whether their sums are added or averaged",
                expected="an accumulated gradient of one stage, on both sides",
                got="several stages of the " + ("source" if group.is_tied else "target"),
                where=self.source.origin if group.is_tied else "",
                remedy="save at the end of a step, when there are no sums, and leave out --accumulated",
            )

    def _require_parameter(self, name: str, group: SourceGroup) -> None:
        """Raise StrategyError if the parameter is not there whose gradient it is; its copies tell the replicas."""
        others = [base for base in named_after(name) if base in self.tensors and not is_partial_sum(base)]
        shapes = [self.tensors.group(base).shape for base in others]
        if group.shape not in shapes:
            raise StrategyError(
                f"it is not certain which ranks hold parts of the same sum in {name!r}",
                expected=f"the parameter whose gradient it is, of shape {list(group.shape)} as well",
                got=f"{others[0]!r} of shape {list(shapes[0])}" if others else "no parameter that it is named after",
                where=self.source.origin,
                remedy="check the source strategy; the parameter must be in the checkpoint, as its copies are compared",
            )

    def read_groups(
        self,
        names: Sequence[str],
        kind: TensorType,
        share: GradientShare,
        group: SourceGroup,
        parts: Iterable[TensorPart],
    ) -> tuple[ReadGroup, ...]:
        """Return where tensors come from that are joined or zeros. Raises CoverageError if a replica lacks them.

        Args:
            names, kind: of the tensors, which have the same `share`, `group` and `parts`.
        """
        if share is GradientShare.ZEROS:
            return (_zeros(len(names), kind, min(self.manifests)),)
        return tuple(self._joined(names, part, group) for part in parts)

    def _joined(self, names: Sequence[str], part: TensorPart, group: SourceGroup) -> ReadGroup:
        holders = sorted(part.placement.holders(part.piece))
        lacking = [rank for rank in holders if rank not in group.ranks]
        if lacking:
            reasons = [str(self.lost[rank]) for rank in lacking if rank in self.lost]
            where = (self.manifests[rank].path for rank in lacking[:_MAX_DESCRIBED] if rank in self.manifests)
            raise CoverageError(
                f"parts of the sums in {names[0]!r} are missing",
                expected=f"them in the shards of {named(holders)}",
                got="; ".join(islice(reasons, _MAX_DESCRIBED)) or f"shards without it: {named(lacking)}",
                where=", ".join(where),
                remedy="restore these shards: each has a sum of its own, which no other shard has",
            )
        shards = [self.manifests[rank].tensors for rank in holders]
        tensors = JoinedTensors(names, shards, is_mean=self.accumulated is Accumulated.MEAN)
        numbers = array("I", range(len(names)))
        return ReadGroup(holders[0], part.box, part.region, tensors, numbers, joined_ranks=tuple(holders))

    def distinct_copies(
        self, names: Sequence[str], parts: Iterable[TensorPart], itemsize_bytes: int
    ) -> Iterator[ReplicaGroup]:
        """Yield the copies of joined parts, which must not be the same, or their sum would be too large.

        Where the target needs little of a source's piece, the whole piece is compared. A mean of copies is right.

        Args:
            itemsize_bytes: of an element.
        """
        for part in parts if self.accumulated is Accumulated.SUM else ():
            is_telling = part.region.size * itemsize_bytes >= _TELLING_PART_BYTES
            region = part.region if is_telling else part.box
            if region.size * itemsize_bytes >= _TELLING_BYTES:
                compared = (part._replace(region=region),)  # the same for all targets, and so compared once
                yield ReplicaGroup(tuple(names), compared, region, _NOT_APART, itemsize_bytes, expect_distinct=True)

    def gradients(self, groups: Iterable[tuple[Iterable[str], SourceGroup]]) -> tuple[AccumulatedGradients, ...]:
        """Return what accumulated gradients there are among tensors. groups: the names of each group."""
        pairs = ((gradients_like(name), group) for names, group in groups for name in names if is_partial_sum(name))
        wide = BY_NAME["float64"]
        facts = ((names, replicas(group), "float64" if group.dtype == wide else "float32") for names, group in pairs)
        return tuple(map(AccumulatedGradients._make, dict.fromkeys(facts)))


def replicas(group: SourceGroup) -> int:
    """Return how many ranks hold the same piece of each tensor of a group."""
    return sum(layout.placement.replicas for layout in group.layouts) if group.listed else 1


def _zeros(count: int, kind: TensorType, rank: int) -> ReadGroup:
    """Return where a number of tensors of zeros come from. rank: the rank named as their source."""
    zeros = TensorTable("", [constant("", kind.dtype, kind.shape, bytes(kind.dtype.itemsize_bytes))])
    whole = Box.whole(kind.shape)
    return ReadGroup(rank, whole, whole, zeros, array("I", bytes(array("I").itemsize * count)), kind.own_box)


def gradients_like(name: str) -> str:
    """Return a glob of the accumulated gradients that this one belongs to, such as `opt.grad_sum.*`."""
    parts = name.split(".")
    place = next(place for place, part in enumerate(parts) if part in ACCUMULATORS)
    return ".".join([*parts[: place + 1], "*"])


def gradient_texts(accumulated: Accumulated, all_gradients: Iterable[AccumulatedGradients]) -> Iterator[str]:
    """Yield words on the accumulated gradients taken from a checkpoint; there are none to tell of with REFUSE."""
    for names, count, added_in in all_gradients:
        joined = f"the {accumulated} of {count} replicas, added in {added_in} in the order of their ranks"
        yield f"accumulated gradients {names}: {joined if count > 1 else 'each piece is on one rank, nothing to join'}"


def notes_on(accumulated: Accumulated, all_gradients: Iterable[AccumulatedGradients]) -> Iterator[str]:
    """Yield notes for the user on the accumulated gradients in a target."""
    whose = {
        Accumulated.MEAN: "every rank of the target that holds a piece gets it",
        Accumulated.SUM: "of the ranks of the target that hold a piece the lowest gets it, the others zeros",
    }
    return (f"{text}; {whose[accumulated]}" for text in gradient_texts(accumulated, all_gradients))


def note_on_none(accumulated: Accumulated) -> str:
    """Return the note for the user if no target holds any accumulated gradient."""
    names = " or ".join(f"{name}.*" for name in ACCUMULATORS)
    return f"no target has a tensor called {names}, as accumulated gradients are: --accumulated {accumulated} is no use"
