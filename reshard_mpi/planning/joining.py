"""Gradients that are still being accumulated: data-parallel ranks hold different parts of a sum, which may be joined.

The replicas of an accumulated gradient are the ranks that hold the same piece of it by the source strategy. Sums differ
by nature, so nothing in them shows whether the strategy is right. But the gradient of a parameter has its shape, and
copies of the parameter are compared.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import islice

from reshard_mpi.errors import CoverageError, ReshardError, SourceError, StrategyError
from reshard_mpi.formats.columns import Tensors
from reshard_mpi.formats.dtypes import BY_NAME, FLOATS
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.specs import SpecKind
from reshard_mpi.formats.views import JoinedTensors, constant
from reshard_mpi.planning.copies import Alike
from reshard_mpi.planning.losses import Lost, named
from reshard_mpi.planning.model import Route
from reshard_mpi.planning.partial_sums import Accumulated, Sums, is_partial_sum, sums_like
from reshard_mpi.planning.tensors import Part, SourceGroup, SourceTensors
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.placement import Placement, Strategy, named_after

_MAX_DESCRIBED = 4
_TELLING_ELEMENTS = 8
_NOT_APART = "if they have been added already, or are copies of one sum, each would count once more"


class Share(Enum):
    """What a target rank gets of a tensor: what one rank has, what all replicas have together, or zeros."""

    TAKEN = "taken"
    JOINED = "joined"
    ZEROS = "zeros"


class Joining:
    """Decides what one target rank gets of the accumulated gradients that it holds.

    tensors: of the opened shards, by the strategy `source`. keeps_errors: a tensor of which it cannot be told what the
    target gets may be one that nobody wants.
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

    def share(self, name: str, group: SourceGroup, target: Placement) -> Share | ReshardError:
        """Return what the target rank gets of a tensor, or, where that is asked for, why that cannot be told.

        target: how the target holds it. Raises what `_share` raises.
        """
        try:
            return self._share(name, group, target)
        except (SourceError, StrategyError) as error:
            if not self._keeps_errors:
                raise
            return error

    def _share(self, name: str, group: SourceGroup, target: Placement) -> Share:
        """Return what the target rank gets of a tensor.

        Raises StrategyError if it is not known which ranks hold parts of one sum, or what target ranks must hold of it;
        SourceError if its elements cannot be added.
        """
        if self._accumulated is Accumulated.REFUSE or not is_partial_sum(name):
            return Share.TAKEN
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
            return Share.ZEROS
        if not has_replicas:
            return Share.TAKEN
        self._require_parameter(name, group)
        return Share.JOINED

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
    part: Part,
    group: SourceGroup,
    manifests: Mapping[int, Manifest],
    lost: Mapping[int, Lost],
    *,
    is_mean: bool,
) -> Route:
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
    return Route(holders[0], part.box, part.region, tensors, numbers, joined_ranks=tuple(holders))


def zero_route(count: int, kind: SpecKind, rank: int) -> Route:
    """Return the route of so many tensors of zeros. rank: that which they are said to come from."""
    zeros = Tensors("", [constant("", kind.dtype, kind.box.shape, bytes(kind.dtype.itemsize_bytes))])
    whole = Box.whole(kind.box.shape)
    return Route(rank, whole, whole, zeros, array("I", bytes(array("I").itemsize * count)), kind.box)


def apart(names: Sequence[str], parts: Iterable[Part], itemsize_bytes: int) -> Iterator[Alike]:
    """Yield the copies of joined parts, which must not be the same, or their sum would be too large.

    Those of few elements are left out, since they may be the same by chance. itemsize_bytes: of an element.
    """
    for part in parts:
        if part.region.size >= _TELLING_ELEMENTS:
            yield Alike(tuple(names), (part,), part.region, _NOT_APART, itemsize_bytes, must_differ=True)
