"""Shards that contradict each other in the shape or type of a tensor: which of them the others outvote."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from reshard_mpi.errors import LayoutError
from reshard_mpi.layout import Layout, whole_shape
from reshard_mpi.manifest import Manifest
from reshard_mpi.placement import Placement, Shape, Strategy
from reshard_mpi.planning.parameters import find_or_follow


class Claim(NamedTuple):
    """What a shard says of a tensor: its type and whole shape; of one that does not fit the strategy, the part's."""

    dtype: str
    shape: Shape
    fits: bool

    def __str__(self) -> str:
        if self.fits:
            return f"{self.dtype} {list(self.shape)}"
        return f"{self.dtype}, a part of shape {list(self.shape)} that does not fit the strategy"


class Dispute(NamedTuple):
    """A tensor that shards contradict each other in, and what each of them says of it, by rank."""

    name: str
    claims: Mapping[int, Claim]

    def outvoted(self) -> dict[int, str]:
        """Return what is wrong with the shards that more than half of all contradict; nobody without such a majority.

        A majority that does not fit the strategy is none: then the strategy is wrong.
        """
        (winner, votes), *_ = Counter(self.claims.values()).most_common(1)
        if not winner.fits or votes * 2 <= len(self.claims):
            return {}
        return {
            rank: f"by it {self.name!r} is {claim}, but by those of {votes} other ranks {winner}"
            for rank, claim in self.claims.items()
            if claim != winner
        }


def disputes(strategy: Strategy, manifests: Mapping[int, Manifest]) -> Iterator[Dispute]:
    """Yield the tensors that these shards contradict each other in, as far as the strategy says who holds them."""
    names = dict.fromkeys(name for manifest in manifests.values() for name in manifest.tensors)
    for name in names:
        claims = {rank: said for rank, manifest in manifests.items() if (said := claim(strategy, name, rank, manifest))}
        if len(set(claims.values())) > 1:
            yield Dispute(name, claims)


def claim(strategy: Strategy, name: str, rank: int, manifest: Manifest) -> Claim | None:
    """Return what the shard of `rank` says of a tensor; None if it lacks it, or should not hold a part of it."""
    entry = manifest.tensors.get(name)
    placement = next((p for p in _placements(strategy, name) if strategy.stage_of(rank) in p.stages), None)
    if entry is None or placement is None:
        return None
    unfit = Claim(entry.dtype.name, entry.shape, fits=False)
    try:
        whole = entry.global_shape
        if whole is None:
            whole = whole_shape(placement, rank, entry.shape)
        box = Layout(placement, whole).box(rank)
    except LayoutError:
        return unfit
    return Claim(entry.dtype.name, whole, fits=True) if entry.shape == box.shape and entry.box in (None, box) else unfit


def witnesses(strategy: Strategy, name: str) -> Iterator[int]:
    """Yield the ranks whose shards should hold a part of a tensor."""
    for placement in _placements(strategy, name):
        for stage in placement.stages:
            yield from range(stage * strategy.stage_size, (stage + 1) * strategy.stage_size)


def _placements(strategy: Strategy, name: str) -> tuple[Placement, ...]:
    return find_or_follow(strategy, name, lambda _: True)
