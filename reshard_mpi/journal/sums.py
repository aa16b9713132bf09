"""Sums of the tensors of shards, and what they come to for whole tensors."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from reshard_mpi.engine.crc import sum_of_whole
from reshard_mpi.errors import DamageError
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.journal.records import TensorSum


def joined_sums(parts: Iterable[Sequence[TensorSum]], names: Iterable[str]) -> tuple[TensorSum, ...]:
    """Return the sums of the tensors of one shard, of which every sequence has summed other elements.

    names: the tensors in file order.
    """
    values: defaultdict[str, list[int]] = defaultdict(list)
    sums = {}
    for part in parts:
        for one in part:
            sums[one.name] = one
            values[one.name].append(one.value)
    return tuple(sums[name]._replace(value=sum_of_whole(values[name], _size_bytes(sums[name]))) for name in names)


def sums_of_wholes(shards: Mapping[int, Sequence[TensorSum]]) -> Iterator[tuple[str, int]]:
    """Yield the name and CRC-32 of every tensor of a checkpoint, from the sums that its shards hold, by rank.

    Tensors that stages share, and cut in different ways, are left out, and so are loose ones of which each rank has its
    own. Raises DamageError if shards that should hold the same part have different sums of it.
    """
    parts: defaultdict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], TensorSum]] = defaultdict(dict)
    of_their_own: set[str] = set()
    for rank, shard in shards.items():
        for one in shard:
            other = parts[one.name].setdefault((one.start, one.shape), one)
            if other.value != one.value and one.loose:
                of_their_own.add(one.name)
            elif other.value != one.value:
                raise DamageError(
                    f"copies of {one.name!r} differ",
                    expected=f"the sum {other.value:08x}, as in a shard before",
                    got=f"{one.value:08x} in the shard of rank {rank}",
                    remedy="make the targets anew with --overwrite",
                )
    for name, held in parts.items():
        ones = list(held.values())
        if name in of_their_own or len({(one.dtype, one.global_shape) for one in ones}) > 1:
            continue
        if sum(math.prod(one.shape) for one in ones) == math.prod(ones[0].global_shape):
            yield name, sum_of_whole((one.value for one in ones), _size_bytes(ones[0]))


def _size_bytes(one: TensorSum) -> int:
    size_bytes = BY_NAME[one.dtype].itemsize_bytes
    for length in one.global_shape:
        size_bytes *= length
    return size_bytes
