"""Every tensor of the targets in a line: its type and whole shape, a rank's piece, and what a map makes it of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from reshard_mpi.checkpoints.source import LEFT_OUT
from reshard_mpi.planning.model import RankPlan
from reshard_mpi.sharding.placement import Shape


class ListedTensor(NamedTuple):
    """A tensor of a target. dtype: name of its type. shape: of the whole; piece: of what target `rank` holds of it."""

    dtype: str
    shape: Shape
    piece: Shape
    rank: int


def listed_tensors(plan: RankPlan) -> dict[str, ListedTensor]:
    """Return the tensors of a target by name, in file order."""
    names, kinds, kind_of = plan.tensors.specs.names, plan.tensors.specs.kinds, plan.tensors.specs.kind_of
    rank = plan.target_rank
    listed = [ListedTensor(kind.dtype.name, kind.global_shape, kind.box.shape, rank) for kind in kinds]
    return {name: listed[number] for name, number in zip(names, kind_of)}


def tensor_lines(shares: Iterable[Mapping[str, ListedTensor]], origins: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each tensor of the targets; then one for each that is left out.

    shares: the tensors that each process has met. origins: by name, what a map makes of tensors and makes them of.
    """
    tensors: dict[str, ListedTensor] = {}
    for share in shares:
        for name, tensor in share.items():
            tensors.setdefault(name, tensor)
    for name, tensor in tensors.items():
        piece = "" if tensor.piece == tensor.shape else f", on rank {tensor.rank} {list(tensor.piece)}"
        origin = f": {origins[name]}" if name in origins else ""
        yield f"{name} {tensor.dtype} {list(tensor.shape)}{piece}{origin}"
    yield from (f"{name}: {LEFT_OUT}" for name, origin in origins.items() if name not in tensors and origin == LEFT_OUT)
