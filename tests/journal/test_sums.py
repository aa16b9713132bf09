"""Sums of whole tensors from those that shards keep."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from reshard_mpi.engine.checksums import PartSum
from reshard_mpi.errors import DamageError
from reshard_mpi.journal.target_records import TensorSum, joined_sums, sums_of_wholes
from reshard_mpi.sharding.box import Box

WHOLE = np.random.default_rng(0).integers(0, 1 << 16, (6, 4), np.uint16)


def summed(start: tuple[int, int], shape: tuple[int, int], rows: slice = slice(None)) -> TensorSum:
    """Return the sum of a part, or of only some rows of it."""
    box = Box(start, (start[0] + shape[0], start[1] + shape[1]))
    part = PartSum(Box.whole(WHOLE.shape), WHOLE.itemsize)
    for row in range(box.start[0], box.stop[0])[rows]:
        line = Box((row, box.start[1]), (row + 1, box.stop[1]))
        part.add(line, memoryview(WHOLE[row, box.start[1] : box.stop[1]].tobytes()))
    return TensorSum("w", "uint16", WHOLE.shape, start, shape, part.value, may_differ=False)


def test_shards_of_a_stage() -> None:
    left, right = summed((0, 0), (6, 3)), summed((0, 3), (6, 1))
    assert dict(sums_of_wholes({0: [left], 1: [right], 5: [left]})) == {"w": zlib.crc32(WHOLE.tobytes())}


def test_processes_that_fill_a_shard_together() -> None:
    """In the order of the shard, whoever has summed what."""
    first, second = summed((0, 0), (6, 3), slice(2)), summed((0, 0), (6, 3), slice(2, None))
    other = first._replace(name="v")
    assert joined_sums([[first], [], [other, second]], ["v", "w"]) == (other, summed((0, 0), (6, 3)))


def test_stages_that_cut_it_in_different_ways() -> None:
    """Which of them make up the whole cannot be told."""
    parts = [summed((0, 0), (3, 4)), summed((3, 0), (3, 4)), summed((0, 0), (6, 4))]
    assert not dict(sums_of_wholes({rank: [part] for rank, part in enumerate(parts)}))


def test_shards_that_are_not_all_there() -> None:
    assert not dict(sums_of_wholes({0: [summed((0, 0), (3, 4))]}))


def test_copies_that_differ() -> None:
    part = summed((0, 0), (3, 4))
    other = part._replace(value=part.value ^ 1)
    with pytest.raises(DamageError, match=r"copies of 'w' differ(.|\n)*of rank 7"):
        dict(sums_of_wholes({3: [part], 7: [other]}))
    rest = summed((3, 0), (3, 4))
    of_their_own = [one._replace(may_differ=True) for one in (part, other, rest)]
    assert not dict(sums_of_wholes({rank: [one] for rank, one in enumerate(of_their_own)}))
