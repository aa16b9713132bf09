"""Shards that contradict each other about the shape or type of a tensor, and which of them the others outvote."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from reshard_mpi.errors import LayoutError
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.planning.parameters import find_or_follow
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.layout import Layout, whole_shape
from reshard_mpi.sharding.placement import Placement, Shape, Strategy

# What another shard may have under the name of a tensor.
_STRING = "a string"


class Claim(NamedTuple):
    """What a shard says of a tensor.

    shape: of the whole tensor; of the shard's part if that does not fit the strategy, as `fits` tells.
    """

    dtype: str
    shape: Shape
    fits: bool

    def __str__(self) -> str:
        if self.dtype == _STRING:
            return _STRING
        if self.fits:
            return f"{self.dtype} {list(self.shape)}"
        return f"{self.dtype}, a part of shape {list(self.shape)} that does not fit the strategy"


class Dispute(NamedTuple):
    """A tensor about which shards contradict each other. claims: what each of them says of it, by rank."""

    name: str
    claims: Mapping[int, Claim]

    def outvoted(self) -> dict[int, str]:
        """Return what is wrong with each shard that contradicts the majority, by rank.

        Empty if no claim is made by more than half of all shards, or if that claim does not fit the strategy: then the
        strategy is wrong.
        """
        (winner, votes), *_ = Counter(self.claims.values()).most_common(1)
        if not winner.fits or votes * 2 <= len(self.claims):
            return {}
        return {
            rank: f"by it {self.name!r} is {claim}, but by those of {votes} other ranks {winner}"
            for rank, claim in self.claims.items()
            if claim != winner
        }


def disputes(strategy: Strategy, manifests: Mapping[int, Manifest], names: Iterable[str]) -> Iterator[Dispute]:
    """Yield those of the named tensors about which these shards contradict each other.

    A rank that should not hold a part of a tensor, by the strategy, has no say about it.
    """
    for name in names:
        claims = {rank: made for rank, manifest in manifests.items() if (made := claim(strategy, name, rank, manifest))}
        if len(set(claims.values())) > 1:
            yield Dispute(name, claims)


def claim(strategy: Strategy, name: str, rank: int, manifest: Manifest) -> Claim | None:
    """Return what the shard of `rank` says of a tensor; None if it lacks it, or should not hold a part of it."""
    entry = manifest.tensors.get(name)
    placement = next((p for p in _placements(strategy, name) if strategy.stage_of(rank) in p.stages), None)
    if placement is None:
        return None
    if entry is None:
        return Claim(_STRING, (), fits=False) if name in manifest.strings else None
    if placement.ceil and entry.global_shape is None:
        return None  # a part alone does not tell the whole
    whole = _whole(placement, rank, entry.shape, entry.box, entry.global_shape)
    if whole is None:
        return Claim(entry.dtype.name, entry.shape, fits=False)
    return Claim(entry.dtype.name, whole, fits=True)


def witnesses(
    strategy: Strategy, names: Iterable[str], opened: Collection[int], available: Collection[int], each: int
) -> Iterator[int]:
    """Yield the first available ranks not opened yet, `each` of every stage that holds one of the named tensors."""
    stages = {stage for name in names for placement in _placements(strategy, name) for stage in placement.stages}
    for stage in sorted(stages):
        yield from islice((rank for rank in strategy.ranks_of(stage) if rank in available and rank not in opened), each)


@lru_cache(maxsize=4096)
def _whole(placement: Placement, rank: int, part: Shape, box: Box | None, stated: Shape | None) -> Shape | None:
    """Return the shape of the whole tensor; None if the part that `rank` holds does not fit the placement.

    part: its shape. box, stated: its box and the shape of the whole tensor, where the shard says them.
    """
    try:
        whole = whole_shape(placement, rank, part) if stated is None else stated
        expected = Layout(placement, whole).box(rank)
    except LayoutError:
        return None
    return whole if part == expected.shape and box in (None, expected) else None


def _placements(strategy: Strategy, name: str) -> tuple[Placement, ...]:
    return find_or_follow(strategy, name, lambda _: True)
