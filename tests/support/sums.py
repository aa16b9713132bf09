"""Accumulated gradients of data-parallel ranks, and what is to become of them, added element by element.

Shares no code with the package: which ranks hold the same elements is seen from the slices that the oracle cuts out of
an array of numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from support.cases import Case, Side
from support.checkpoints import Arrays, expected_rank
from support.oracle import RawLayout, rank_holds, slice_for_rank


def holders(side: Side, name: str) -> list[int]:
    """Return the ranks that hold a part of a tensor."""
    return [rank for rank in range(side.world_size) if rank_holds(side.layouts[name], rank)]


def parts(side: Side, name: str, whole: np.ndarray, random: np.random.Generator) -> dict[int, np.ndarray]:
    """Return for each rank a sum of its own, of the shape and type of its part of `whole`."""
    arrays = {rank: slice_for_rank(whole, side.layouts[name], rank) for rank in holders(side, name)}
    return {rank: random.standard_normal(array.shape).astype(array.dtype) for rank, array in arrays.items()}


def joined(layout: RawLayout, whole: np.ndarray, ranks: Mapping[int, np.ndarray], how: str) -> np.ndarray:
    """Return the whole tensor of which ranks hold these parts: each element the sum or the mean of all ranks' own."""
    wide = np.float64 if whole.dtype == np.float64 else np.float32
    total, count = np.zeros(whole.size, wide), np.zeros(whole.size, wide)
    for rank in sorted(ranks):
        numbers = _numbers(layout, whole, rank).reshape(-1)
        total[numbers] = total[numbers] + ranks[rank].reshape(-1).astype(wide)
        count[numbers] += 1
    return (total / count if how == "mean" else total).astype(whole.dtype).reshape(whole.shape)


def expected(side: Side, name: str, whole: np.ndarray, rank: int, how: str) -> np.ndarray:
    """Return what a target rank gets of a joined tensor."""
    layout = side.layouts[name]
    own = slice_for_rank(whole, layout, rank)
    if how == "mean":
        return own
    numbers = _numbers(layout, whole, rank)
    same = [other for other in holders(side, name) if np.array_equal(_numbers(layout, whole, other), numbers)]
    return own if same[0] == rank else np.zeros_like(own)


def _numbers(layout: RawLayout, whole: np.ndarray, rank: int) -> np.ndarray:
    return slice_for_rank(np.arange(whole.size).reshape(whole.shape), layout, rank)


def with_sums(case: Case, dtypes: Mapping[str, np.dtype], prefix: str, listed: bool) -> tuple[Case, list[str]]:
    """Return the case with an accumulated gradient beside each of these parameters, and the names of these.

    listed: whether the strategies list them.
    """
    tensors, layouts = dict(case.tensors), (dict(case.src.layouts), dict(case.dst.layouts))
    names = []
    for name, dtype in dtypes.items():
        names.append(f"{prefix}.{name}")
        tensors[names[-1]] = np.zeros(case.tensors[name].shape, dtype)
        for side_layouts in layouts:
            side_layouts[names[-1]] = side_layouts[name]
    sides = (
        replace(side, layouts=own, unlisted=side.unlisted | (set() if listed else set(names)))
        for side, own in zip((case.src, case.dst), layouts)
    )
    return Case(*sides, tensors), names


def source_ranks(case: Case, sums: Mapping[str, Mapping[int, np.ndarray]]) -> dict[int, Arrays]:
    """Return what the shard of each source rank holds. sums: of each accumulated gradient, what each rank has."""
    return {
        rank: {
            name: sums[name][rank] if name in sums else array
            for name, array in expected_rank(case.src, case.tensors, rank).items()
        }
        for rank in range(case.src.world_size)
    }


def target_ranks(case: Case, sums: Mapping[str, Mapping[int, np.ndarray]], how: str) -> dict[int, Arrays]:
    """Return what the shard of each target rank must hold."""
    wholes = {name: joined(case.src.layouts[name], case.tensors[name], ranks, how) for name, ranks in sums.items()}
    return {
        rank: {
            name: expected(case.dst, name, wholes[name], rank, how) if name in sums else array
            for name, array in expected_rank(case.dst, case.tensors, rank).items()
        }
        for rank in range(case.dst.world_size)
    }
