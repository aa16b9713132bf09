"""A source strategy against the record of the run that made the shards: refused if a rank would hold another part."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from support.in_memory import entry, manifest

from reshard_mpi.checkpoints.opening import require_recorded_cut
from reshard_mpi.errors import DisagreementError, LayoutError, StrategyError
from reshard_mpi.planning.source_tensors import SourceTensors
from reshard_mpi.sharding.placement import Placement
from reshard_mpi.sharding.strategy import Strategy

RANKS = 4
EVEN = [
    Placement(mesh, split, optimizer)
    for mesh in ((4,), (2, 2), (1, 4), (4, 1))
    for split in ((), ((0,),), ((), (0,)), ((len(mesh) - 1,),), ((), (len(mesh) - 1,)), ((0,), (len(mesh) - 1,)))
    for optimizer in (1, 2)
    if all(len(set(split[0]) & set(axes)) == 0 for axes in split[1:])
    and (optimizer == 1 or len({axis for axes in split for axis in axes}) < len([n for n in mesh if n > 1]))
]
CUTS = [
    *(each.changed(split=(*each.split, ()) if len(each.split) == 1 else each.split) for each in EVEN),
    *(each.changed(ceil=True) for each in EVEN if len(each.split) == 2 and each.optimizer == 1),
    Placement((4,), ((0,), ()), ceil=True),
    *(each.changed(open_ended=True, whole_scalars=True) for each in EVEN if each.is_cut and len(each.split) == 1),
    Placement((4,), ((0,), ()), sizes=((0, (2, 2, 2, 2)),)),
    Placement((4,), ((0,), ()), sizes=((0, (1, 3, 1, 3)),)),
    Placement((4,), ((), (0,)), sizes=((1, (2, 2, 2, 2)),)),
    Placement((2, 2), ((0, 1), ())),
    Placement((2, 2), ((1, 0), ())),
]


def parts_by_rank(placement: Placement, shape: tuple[int, int]) -> list[np.ndarray] | None:
    """Return the numbers of the elements of a tensor that each rank holds, by numpy's splits alone; None: by no cut."""
    numbers, parts = np.arange(shape[0] * shape[1]).reshape(shape), []
    sizes = dict(placement.sizes)
    for rank in range(RANKS):
        part, place = numbers, np.unravel_index(rank, placement.mesh)
        for dim, axes in enumerate(placement.split):
            for axis in axes:
                count, length = placement.mesh[axis], part.shape[dim]
                if dim in sizes:
                    ends = np.cumsum(sizes[dim])
                elif placement.ceil:
                    ends = np.arange(1, count + 1) * -(-length // count)
                elif length % count == 0:
                    ends = np.arange(1, count + 1) * (length // count)
                else:
                    return None
                if dim in sizes and ends[-1] != length:
                    return None
                part = np.split(part, ends[:-1], dim)[place[axis]]
        if placement.optimizer > 1:
            used = {axis for axes in placement.split for axis in axes}
            position = 0
            for axis in sorted({*range(len(placement.mesh))} - used):
                position = position * placement.mesh[axis] + int(place[axis])
            if part.shape[0] % placement.optimizer:
                return None
            part = np.split(part, placement.optimizer, 0)[position % placement.optimizer]
        parts.append(part)
    return parts


@pytest.mark.parametrize("shape", [(8, 8), (7, 6), (4, 1)], ids=str)
def test_any_strategy_by_which_ranks_would_hold_other_parts_is_refused(shape: tuple[int, int]) -> None:
    """Strategies that contradict the shapes of the shards are refused before: the others, exactly if parts differ."""
    compared = refused = 0
    for recorded, given in product(CUTS, CUTS):
        truth, parts = parts_by_rank(recorded, shape), parts_by_rank(given, shape)
        if truth is None:
            continue
        recorded_strategy, strategy = (Strategy(RANKS, 1, {"w": (each,)}) for each in (recorded, given))
        shards = {rank: manifest(rank, entry("w", part.shape)) for rank, part in enumerate(truth)}
        tensors = SourceTensors(strategy, shards)
        try:
            tensors.group("w")
        except (DisagreementError, LayoutError):
            assert parts is None or [each.tolist() for each in parts] != [each.tolist() for each in truth]
            continue
        files = SimpleNamespace(path="src")
        source = SimpleNamespace(strategy=strategy, recorded_strategy=recorded_strategy, files=files)
        are_alike = parts is not None and all(map(np.array_equal, truth, parts))
        compared += 1
        try:
            require_recorded_cut(source, tensors, ["w"])
            assert are_alike, (recorded, given)
        except StrategyError:
            refused += 1
            assert not are_alike, (recorded, given)
    assert compared > refused > 20
