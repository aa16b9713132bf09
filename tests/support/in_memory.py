"""A Case without any files: strategies and shards as the package's own values, and what they imply by brute force."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping

import numpy as np

from reshard_mpi.checkpoints.shard_files import ShardFiles
from reshard_mpi.checkpoints.source import SourceCheckpoint
from reshard_mpi.errors import ReshardError, ShardError
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.locations import ByteRange, ByteRanges
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.protocol import OnBytes, uncounted
from reshard_mpi.formats.tensor_table import TensorEntry, TensorTable
from reshard_mpi.planning.rank_plan import RankPlan
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.placement import Placement
from reshard_mpi.sharding.strategy import Strategy
from support.cases import Case, Side
from support.oracle import RawLayout, rank_holds, slice_for_rank


def placement_of(layout: RawLayout) -> Placement:
    """Return the placement that MindSpore's terms mean."""
    axes = [
        tuple(len(layout.dev_matrix) - 1 - number for number in np.atleast_1d(entry) if number != -1)
        for entry in layout.tensor_map
    ]
    cutting = [axis for dim in axes for axis in dim]
    sharing = np.prod([length for axis, length in enumerate(layout.dev_matrix) if axis not in cutting], dtype=int)
    return Placement(
        mesh=layout.dev_matrix,
        split=tuple(tuple(map(int, dim)) for dim in axes),
        optimizer=int(sharing) if layout.opt_size == -1 else max(layout.opt_size, 1),
        sizes=() if layout.split_sizes is None else ((0, tuple(layout.split_sizes)),),
        stages=layout.stages,
    )


def strategy_of(side: Side) -> Strategy:
    """Return what the strategy files of one side of a Case say."""
    listed = {name: (placement_of(layout),) for name, layout in side.listed.items()}
    return Strategy(side.world_size, side.stages, listed)


def entry(name: str, shape: tuple[int, ...], dtype: str = "float32") -> TensorEntry:
    """Return a tensor of a shard that no file holds."""
    kind = BY_NAME[dtype]
    size_bytes = int(np.prod(shape, dtype=int)) * kind.itemsize_bytes
    return TensorEntry(name, kind, shape, ByteRanges((ByteRange("", 0, size_bytes),)))


def manifest(rank: int, *entries: TensorEntry, strings: Mapping[str, str] | None = None) -> Manifest:
    """Return a shard that is in no file; rank 3 is at `rank_3`."""
    return Manifest(f"rank_{rank}", "none", TensorTable(f"rank_{rank}", entries), strings or {})


def manifests_of(side: Side, tensors: Mapping[str, np.ndarray]) -> dict[int, Manifest]:
    """Return the shards of all ranks, by the oracle."""
    return {
        rank: manifest(
            rank,
            *(
                entry(name, slice_for_rank(whole, side.layouts[name], rank).shape, whole.dtype.name)
                for name, whole in tensors.items()
                if rank_holds(side.layouts[name], rank)
            ),
        )
        for rank in range(side.world_size)
    }


def needed_holders(
    layouts: Mapping[str, tuple[RawLayout, RawLayout]], shapes: Mapping[str, tuple[int, ...]], sources: int, target: int
) -> set[frozenset[int]]:
    """Return, for each element that rank `target` needs, the source ranks that hold it (each such set once).

    layouts: how source and target hold each tensor.
    """
    every_set = set()
    for name, (source, wanted) in layouts.items():
        if not rank_holds(wanted, target):
            continue
        kind_of, kinds = _kinds_of_elements(source, shapes[name], sources)
        needed = np.unique(slice_for_rank(kind_of, wanted, target))
        every_set.update(kinds[number] for number in needed)
    return every_set


@functools.lru_cache(maxsize=64)
def _kinds_of_elements(
    layout: RawLayout, shape: tuple[int, ...], ranks: int
) -> tuple[np.ndarray, tuple[frozenset[int], ...]]:
    """Return for each element of a tensor which of the sets of ranks hold it, and these sets."""
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    holders = np.zeros((numbers.size, ranks), bool)
    for rank in range(ranks):
        if rank_holds(layout, rank):
            holders[slice_for_rank(numbers, layout, rank).ravel(), rank] = True
    kinds, kind_of = np.unique(holders, axis=0, return_inverse=True)
    return kind_of.reshape(shape), tuple(frozenset(np.flatnonzero(row).tolist()) for row in kinds)


def fewest(holders: Iterable[frozenset[int]]) -> int:
    """Return how many ranks it takes at least to have one of each of the sets `holders`, by trying all."""
    least = [ranks for ranks in set(holders) if not any(other < ranks for other in holders)]
    everyone = set().union(*least)
    sets = [sum(1 << rank for rank in ranks) for ranks in least]
    return next(
        count
        for count in range(len(everyone) + 1)
        for chosen in map(sum, itertools.combinations([1 << rank for rank in everyone], count))
        if all(map(chosen.__and__, sets))
    )


class Described(SourceCheckpoint):
    """A checkpoint of shards that are in no file, some of them damaged."""

    def __init__(self, files: ShardFiles, strategy: Strategy, manifests: Mapping[int, Manifest]) -> None:
        super().__init__(files, strategy)
        self.manifests = manifests

    def _located(self, rank: int) -> Manifest:
        if rank not in self.manifests:
            raise ShardError("a shard is damaged", got="nothing", where=f"rank_{rank}", remedy="restore it")
        return self.manifests[rank]

    def check_crc(self, rank: int, on_bytes: OnBytes = uncounted) -> ReshardError | None:
        return None


def numbers(whole: np.ndarray) -> np.ndarray:
    """Return an array of the same shape that numbers the elements."""
    return np.arange(whole.size).reshape(whole.shape)


def part(array: np.ndarray, box: Box) -> np.ndarray:
    """Return what lies in a box of an array."""
    return array[(..., *(slice(low, high) for low, high in zip(box.start, box.stop)))]


def check_every_element(case: Case, plan: RankPlan) -> None:
    """Check that each tensor of the target gets every element once, from a rank that has it where the plan says."""
    rank = plan.target_rank
    expected = {name for name in case.tensors if rank_holds(case.dst.layouts[name], rank)}
    assert {tensor.spec.name for tensor in plan.tensors} == expected
    for tensor in plan.tensors:
        whole = numbers(case.tensors[tensor.spec.name])
        wanted = slice_for_rank(whole, case.dst.layouts[tensor.spec.name], rank)
        np.testing.assert_array_equal(part(whole, tensor.spec.box), wanted)
        moved = []
        for item in tensor.reads:
            source_part = slice_for_rank(whole, case.src.layouts[tensor.spec.name], item.source_rank)
            np.testing.assert_array_equal(part(whole, item.source_box), source_part)
            assert item.source.shape == source_part.shape
            assert item.source_box.contains(item.region)
            moved.append(part(whole, item.region).ravel())
        np.testing.assert_array_equal(np.sort(np.concatenate([np.array([], int), *moved])), np.sort(wanted.ravel()))
        assert tensor.spec.dtype.name == case.tensors[tensor.spec.name].dtype.name
    assert plan.needed_bytes == plan.written_bytes
    assert plan.written_bytes == sum(
        slice_for_rank(case.tensors[n], case.dst.layouts[n], rank).nbytes for n in expected
    )
