"""Lay out the tensors on one target rank, files and joined gradients included (`TargetLayouts`).

The replicas of an accumulated gradient are the ranks that hold the same piece of it by the source strategy. Sums differ
by nature, so nothing in them shows whether the strategy is right. But the gradient of a parameter has its shape, and
copies of the parameter are compared.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from itertools import islice

from reshard_mpi.errors import CoverageError, LayoutError, ReshardError, SourceError, StrategyError
from reshard_mpi.formats.derived import JoinedTensors, constant
from reshard_mpi.formats.dtypes import BY_NAME, FLOATS
from reshard_mpi.formats.manifest import Manifest, Specs
from reshard_mpi.formats.tensor_table import TensorTable, TensorType
from reshard_mpi.planning.parameters import (
    Accumulated,
    Sums,
    Unlisted,
    everywhere,
    find_or_follow,
    is_dropped,
    is_partial_sum,
    sums_like,
)
from reshard_mpi.planning.rank_plan import ReadGroup
from reshard_mpi.planning.replicas import ReplicaGroup
from reshard_mpi.planning.tensors import SourceGroup, SourceTensors, TensorPart
from reshard_mpi.planning.unusable_shards import UnusableShard, named
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.layout import Layout
from reshard_mpi.sharding.placement import Placement, Strategy, named_after

_NOT_DIVIDED = (
    "choose a target strategy whose cuts divide the tensor, or give the sizes of its slices (in a TOML rule"
    ' sizes = "ceil": as torch cuts)'
)
_NOT_DIVIDED_AGAIN = (
    "choose a target strategy whose cuts divide the tensor: in TOML give it a rule before this one, without optimizer,"
    ' or one with split and sizes = "ceil" instead of optimizer'
)


class TargetLayouts:
    """The layouts of tensors, and the boxes of one rank, on the target's side.

    Attributes:
        tensors: what the source has.
        unlisted: what becomes of parameters that the strategy does not list.
    """

    def __init__(self, strategy: Strategy, rank: int, tensors: SourceTensors, unlisted: Unlisted) -> None:
        self._strategy = strategy
        self._rank = rank
        self._stage = strategy.stage_of(rank)
        self._tensors = tensors
        self._unlisted = unlisted
        self._boxes: dict[Layout, Box] = {}
        self._layouts: dict[tuple[SourceGroup, int], Layout | None] = {}  # by the identity of kept placements

    def layout(self, name: str, group: SourceGroup) -> Layout | None:
        """Return how this target rank holds a tensor; None if it does not."""
        if self._unlisted is Unlisted.DROP and is_dropped(self._strategy, name, self._tensors):
            return None
        placements = self.placements(name)
        key = (group, id(placements))
        if key not in self._layouts:
            self._layouts[key] = self._placed(name, group, placements)
        return self._layouts[key]

    def _placed(self, name: str, group: SourceGroup, placements: tuple[Placement, ...]) -> Layout | None:
        """Return how this target rank holds the tensors of a group by these target placements; None if it does not."""
        is_cut = any(layout.placement.is_cut for layout in group.layouts)
        if not placements and self._unlisted is Unlisted.FOLLOW and is_cut:
            raise StrategyError(
                f"{name!r} is sharded in the source and the target strategy does not say how to place it",
                expected="it in the target strategy, or a parameter of the same shape whose whole name is in its own",
                got=_not_followed(self._strategy, name),
                where=self._strategy.origin,
                remedy="add it to the target strategy, or use --unlisted replicate or --unlisted drop",
            )
        placements = placements or (everywhere(self._strategy),)
        placement = next((option for option in placements if self._stage in option.stages), None)
        if placement is None:
            return None
        if group.has_whole_sums:
            placement = replace(placement, optimizer=1)
        try:
            return self._tensors.layout(placement, group.shape)
        except LayoutError as error:
            error.where = f"tensor {name!r}, target strategy {self._strategy.origin}".rstrip()
            error.remedy = error.remedy or (_NOT_DIVIDED_AGAIN if placement.optimizer > 1 else _NOT_DIVIDED)
            raise

    def placements(self, name: str) -> tuple[Placement, ...]:
        """Return how the target strategy places a tensor; empty where it does not."""
        listed = self._strategy.parameters.get(name)
        if listed or self._unlisted is not Unlisted.FOLLOW:
            return listed or self._strategy.find(name)
        return find_or_follow(self._strategy, name, lambda base: self._tensors.same_shape(name, base))

    def lists(self, name: str) -> bool:
        """Tell whether the target strategy lists a name, other than by a rule for every name."""
        return bool(self._strategy.find(name)) and not self._strategy.is_only_caught(name)

    def box(self, layout: Layout) -> Box:
        """Return what this target rank holds of a tensor."""
        if layout not in self._boxes:
            self._boxes[layout] = layout.box(self._rank)
        return self._boxes[layout]


def _not_followed(target: Strategy, name: str) -> str:
    others = [base for base in named_after(name) if target.find(base)]
    return f"{others[0]!r} listed, but of another shape" if others else "neither listed"


def filled_files(specs: Specs, most_bytes: int) -> list[list[str]]:
    """Return the names of the tensors that each file holds, in their order.

    A new file is begun when the next tensor would make the current one larger than `most_bytes`. A tensor that is
    larger by itself gets a file of its own, which comes before the current one.
    """
    sizes = [kind.size_bytes for kind in specs.kinds]
    done: list[list[str]] = []
    current: list[str] = []
    current_bytes = 0
    for name, kind in zip(specs.names, specs.kind_ids):
        size_bytes = sizes[kind]
        if size_bytes > most_bytes:
            done.append([name])
            continue
        if current_bytes + size_bytes > most_bytes:
            done.append(current)
            current, current_bytes = [], 0
        current.append(name)
        current_bytes += size_bytes
    return [*done, current] if current or not done else done


def strategy_of(named: Sequence[Sequence[str]]) -> Strategy:
    """Return the strategy of files with whole tensors: one stage of one rank for each file.

    Args:
        named: the names of the tensors in each file.
    """
    parameters: dict[str, tuple[Placement, ...]] = {}
    for stage, names in enumerate(named):
        placement = (Placement((1,), stages=(stage,)),)
        parameters |= dict.fromkeys(names, placement)
    return Strategy(len(named), len(named), parameters)


_MAX_DESCRIBED = 4
_TELLING_ELEMENTS = 8
_NOT_APART = "if they have been added already, or are copies of one sum, each would count once more"


class GradientShare(Enum):
    """The part of a tensor for a target rank: one rank's, the sum of all replicas, or zeros."""

    TAKEN = "taken"
    JOINED = "joined"
    ZEROS = "zeros"


class GradientJoining:
    """Decides what one target rank gets of the accumulated gradients that it holds.

    Attributes:
        tensors: of the opened shards, by the strategy `source`.
        keeps_errors: a tensor of which it cannot be told what the target gets may be one that nobody wants.
    """

    def __init__(
        self,
        accumulated: Accumulated,
        source: Strategy,
        tensors: SourceTensors,
        target_rank: int,
        *,
        keeps_errors: bool = False,
    ) -> None:
        self._accumulated = accumulated
        self._source = source
        self._tensors = tensors
        self._target_rank = target_rank
        self._keeps_errors = keeps_errors

    def share(self, name: str, group: SourceGroup, target: Placement) -> GradientShare | ReshardError:
        """Return the part of a tensor for the target rank, or, if asked, the reason why it is unknown.

        Args:
            target: how the target holds it.

        Raises what `_share` raises.
        """
        try:
            return self._share(name, group, target)
        except (SourceError, StrategyError) as error:
            if not self._keeps_errors:
                raise
            return error

    def _share(self, name: str, group: SourceGroup, target: Placement) -> GradientShare:
        """Return the part of a tensor for the target rank.

        Raises StrategyError if it is not known which ranks hold parts of one sum, or what target ranks must hold of it;
        SourceError if its elements cannot be added.
        """
        if self._accumulated is Accumulated.REFUSE or not is_partial_sum(name):
            return GradientShare.TAKEN
        self._require_known_replicas(name, group, target)
        has_replicas = replicas(group) > 1
        is_divided = self._accumulated is Accumulated.SUM and target.copies > 1
        if (has_replicas or is_divided) and group.dtype not in FLOATS:
            raise SourceError(
                f"{name!r} is called like an accumulated gradient, and holds no floating-point numbers",
                expected=f"such as float32, of which --accumulated {self._accumulated} takes the {self._accumulated}",
                got=str(group.dtype),
                remedy="give it another name if it is none; leave out --accumulated if all ranks have the same",
            )
        if is_divided and next(target.holders(target.piece(self._target_rank))) != self._target_rank:
            return GradientShare.ZEROS
        if not has_replicas:
            return GradientShare.TAKEN
        self._require_parameter(name, group)
        return GradientShare.JOINED

    def _require_known_replicas(self, name: str, group: SourceGroup, target: Placement) -> None:
        if not group.listed and self._source.world_size > 1:
            raise StrategyError(
                f"the source strategy does not place {name!r}, so it is not known which ranks hold parts of one sum",
                expected="it, or the parameter whose gradient it is, in the source strategy",
                got="neither",
                where=self._source.origin,
                remedy="add it to the source strategy",
            )
        if group.is_tied or len(target.stages) > 1:
            raise StrategyError(
                f"stages share {name!r}, and nothing says whether their sums are added or averaged",
                expected="an accumulated gradient of one stage, on both sides",
                got="several stages of the " + ("source" if group.is_tied else "target"),
                where=self._source.origin if group.is_tied else "",
                remedy="save at the end of a step, when there are no sums, and leave out --accumulated",
            )

    def _require_parameter(self, name: str, group: SourceGroup) -> None:
        """Raise StrategyError if the parameter is not there whose gradient it is; its copies tell the replicas."""
        others = [base for base in named_after(name) if base in self._tensors and not is_partial_sum(base)]
        shapes = [self._tensors.group(base).shape for base in others]
        if group.shape not in shapes:
            raise StrategyError(
                f"it is not certain which ranks hold parts of the same sum in {name!r}",
                expected=f"the parameter whose gradient it is, of shape {list(group.shape)} as well",
                got=f"{others[0]!r} of shape {list(shapes[0])}" if others else "no parameter that it is named after",
                where=self._source.origin,
                remedy="check the source strategy; the parameter must be in the checkpoint, as its copies are compared",
            )


def replicas(group: SourceGroup) -> int:
    """Return how many ranks hold the same piece of each tensor of a group."""
    return sum(layout.placement.copies for layout in group.layouts) if group.listed else 1


def sums_among(groups: Iterable[tuple[Iterable[str], SourceGroup]]) -> tuple[Sums, ...]:
    """Return what accumulated gradients there are among tensors. groups: the names of each group."""
    pairs = ((sums_like(name), group) for names, group in groups for name in names if is_partial_sum(name))
    wide = BY_NAME["float64"]
    sums = (Sums(names, replicas(group), "float64" if group.dtype == wide else "float32") for names, group in pairs)
    return tuple(dict.fromkeys(sums))


def joined_route(
    names: Sequence[str],
    part: TensorPart,
    group: SourceGroup,
    manifests: Mapping[int, Manifest],
    lost: Mapping[int, UnusableShard],
    *,
    is_mean: bool,
) -> ReadGroup:
    """Return the route of a part that is joined of all its replicas. Raises CoverageError if one of them lacks it."""
    holders = sorted(part.placement.holders(part.piece))
    lacking = [rank for rank in holders if rank not in group.ranks]
    if lacking:
        reasons = [str(lost[rank]) for rank in lacking if rank in lost]
        raise CoverageError(
            f"parts of the sums in {names[0]!r} are missing",
            expected=f"them in the shards of {named(holders)}",
            got="; ".join(islice(reasons, _MAX_DESCRIBED)) or f"shards without it: {named(lacking)}",
            where=", ".join(manifests[rank].path for rank in lacking[:_MAX_DESCRIBED] if rank in manifests),
            remedy="restore these shards: each has a sum of its own, which no other shard has",
        )
    shards = [manifests[rank].tensors for rank in holders]
    tensors = JoinedTensors(names, shards, is_mean=is_mean)
    numbers = array("I", range(len(names)))
    return ReadGroup(holders[0], part.box, part.region, tensors, numbers, joined_ranks=tuple(holders))


def zero_route(count: int, kind: TensorType, rank: int) -> ReadGroup:
    """Return a route for a number of tensors of zeros. rank: the rank named as their source."""
    zeros = TensorTable("", [constant("", kind.dtype, kind.shape, bytes(kind.dtype.itemsize_bytes))])
    whole = Box.whole(kind.shape)
    return ReadGroup(rank, whole, whole, zeros, array("I", bytes(array("I").itemsize * count)), kind.own_box)


def apart(names: Sequence[str], parts: Iterable[TensorPart], itemsize_bytes: int) -> Iterator[ReplicaGroup]:
    """Yield the copies of joined parts, which must not be the same, or their sum would be too large.

    Those of few elements are left out, since they may be the same by chance.

    Args:
        itemsize_bytes: of an element.
    """
    for part in parts:
        if part.region.size >= _TELLING_ELEMENTS:
            yield ReplicaGroup(tuple(names), (part,), part.region, _NOT_APART, itemsize_bytes, expect_distinct=True)
