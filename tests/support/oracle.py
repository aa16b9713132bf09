"""What every rank must hold, found by brute force in MindSpore's own terms.

Shares no code with the package on purpose: no boxes, no planning, no arithmetic shortcut. Every rank of a stage is
listed, every dimension is an explicit list of element indices, and ranks are compared with each other to see which of
them hold the same slice. Slow, and plain enough to be checked by reading it beside MindSpore's rules.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class RawLayout:
    """One parameter's entry in a strategy, as MindSpore writes it.

    dev_matrix: ranks of a stage, last dimension fastest. tensor_map: for each tensor dimension the device dimension
    that cuts it, counted from the right, or -1; nested maps give a tuple for every tensor dimension, major first,
    (-1,) for one that is not cut. opt_size: how many pieces optimizer sharding makes of dimension 0 of a slice; 0 for
    none, -1 for as many as ranks hold that slice. split_sizes: the heights of the slices of dimension 0, where they
    differ. stages: the pipeline stages that hold the parameter.
    """

    dev_matrix: tuple[int, ...]
    tensor_map: tuple[int, ...] | tuple[tuple[int, ...], ...]
    opt_size: int = 0
    split_sizes: tuple[int, ...] | None = None
    stages: tuple[int, ...] = (0,)

    @property
    def is_nested(self) -> bool:
        return any(isinstance(entry, tuple) for entry in self.tensor_map)

    @property
    def stage_size(self) -> int:
        return int(np.prod(self.dev_matrix))


def rank_holds(layout: RawLayout, global_rank: int) -> bool:
    """Tell whether the stage of `global_rank` holds the parameter at all."""
    return global_rank // layout.stage_size in layout.stages


def slice_for_rank(whole: np.ndarray, layout: RawLayout, global_rank: int) -> np.ndarray:
    """Return the part of `whole` that `global_rank` holds, as a C-contiguous array of its own."""
    if not rank_holds(layout, global_rank):
        raise ValueError(f"the stage of rank {global_rank} does not hold this parameter")
    local_rank = global_rank % layout.stage_size
    slice_numbers = [_slice_numbers(layout, rank) for rank in range(layout.stage_size)]

    part = whole
    for dim, number in enumerate(slice_numbers[local_rank]):
        pieces = _pieces(whole.shape[dim], _slice_count(layout, dim), layout.split_sizes if dim == 0 else None)
        part = np.take(part, pieces[number], axis=dim)

    same = [rank for rank in range(layout.stage_size) if slice_numbers[rank] == slice_numbers[local_rank]]
    cuts = len(same) if layout.opt_size == -1 else max(layout.opt_size, 1)
    if cuts > 1:
        pieces = _pieces(part.shape[0], cuts, None)
        part = np.take(part, pieces[same.index(local_rank) % cuts], axis=0)
    return np.array(part, order="C", copy=True)


def optimizer_step(layout: RawLayout) -> int:
    """Return how far apart in rank the holders of neighbouring optimizer pieces are, on average; 0 for no pieces."""
    slice_numbers = [_slice_numbers(layout, rank) for rank in range(layout.stage_size)]
    same = [rank for rank in range(layout.stage_size) if slice_numbers[rank] == slice_numbers[0]]
    cuts = len(same) if layout.opt_size == -1 else max(layout.opt_size, 1)
    return (same[cuts - 1] - same[0]) // (cuts - 1) if cuts > 1 else 0


def _device_dims(layout: RawLayout, dim: int) -> list[int]:
    """Return the device dimensions, counted from the left, that cut tensor dimension `dim`, major first."""
    entry = layout.tensor_map[dim]
    from_right = entry if isinstance(entry, tuple) else (entry,)
    return [len(layout.dev_matrix) - 1 - number for number in from_right if number != -1]


def _slice_count(layout: RawLayout, dim: int) -> int:
    return int(np.prod([layout.dev_matrix[device_dim] for device_dim in _device_dims(layout, dim)], dtype=int))


@functools.lru_cache(maxsize=4096)
def _slice_numbers(layout: RawLayout, local_rank: int) -> tuple[int, ...]:
    """Return which slice of each tensor dimension a rank holds."""
    coordinates = np.unravel_index(local_rank, layout.dev_matrix)
    numbers = []
    for dim in range(len(layout.tensor_map)):
        device_dims = _device_dims(layout, dim)
        lengths = [layout.dev_matrix[device_dim] for device_dim in device_dims]
        grid = np.arange(int(np.prod(lengths, dtype=int))).reshape(lengths)
        numbers.append(int(grid[tuple(coordinates[device_dim] for device_dim in device_dims)]))
    return tuple(numbers)


def _pieces(length: int, count: int, sizes: Sequence[int] | None) -> list[np.ndarray]:
    """Return the element indices of each of `count` pieces of a dimension."""
    if sizes is None:
        if length % count:
            raise ValueError(f"{length} elements cannot be cut into {count} equal pieces")
        sizes = [length // count] * count
    if len(sizes) != count or sum(sizes) != length:
        raise ValueError(f"sizes {sizes} do not cut {length} elements into {count} pieces")
    indices = iter(range(length))
    return [np.array([next(indices) for _ in range(size)], dtype=int) for size in sizes]
