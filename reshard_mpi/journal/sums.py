"""Sums of the tensors of shards, joined to sums of whole tensors."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from reshard_mpi.engine.crc import sum_of_whole
from reshard_mpi.errors import DamageError
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.journal.records import TensorSum


def joined_sums(parts: Iterable[Sequence[TensorSum]], names: Iterable[str]) -> tuple[TensorSum, ...]:
    """Return the sums of the tensors of one shard from the sums of its parts, which have no elements in common.

    names: the tensors in file order.
    """
    values: defaultdict[str, list[int]] = defaultdict(list)
    sums = {}
    for part in parts:
        for tensor_sum in part:
            sums[tensor_sum.name] = tensor_sum
            values[tensor_sum.name].append(tensor_sum.value)
    return tuple(sums[name]._replace(value=sum_of_whole(values[name], _size_bytes(sums[name]))) for name in names)


def sums_of_wholes(shards: Mapping[int, Sequence[TensorSum]]) -> Iterator[tuple[str, int]]:
    """Yield the name and CRC-32 of every tensor of a checkpoint, from the sums of its shards by rank.

    Left out are tensors that stages share and cut differently, and loose ones that differ from rank to rank. Raises
    DamageError if shards that should hold the same part have different sums of it.
    """
    parts: defaultdict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], TensorSum]] = defaultdict(dict)
    of_their_own: set[str] = set()
    for rank, shard in shards.items():
        for tensor_sum in shard:
            other = parts[tensor_sum.name].setdefault((tensor_sum.start, tensor_sum.shape), tensor_sum)
            if other.value != tensor_sum.value and tensor_sum.loose:
                of_their_own.add(tensor_sum.name)
            elif other.value != tensor_sum.value:
                raise DamageError(
                    f"copies of {tensor_sum.name!r} differ",
                    expected=f"the sum {other.value:08x}, as in a shard before",
                    got=f"{tensor_sum.value:08x} in the shard of rank {rank}",
                    remedy="make the targets anew with --overwrite",
                )
    for name, by_box in parts.items():
        sums = list(by_box.values())
        if name in of_their_own or len({(tensor_sum.dtype, tensor_sum.global_shape) for tensor_sum in sums}) > 1:
            continue
        if sum(math.prod(tensor_sum.shape) for tensor_sum in sums) == math.prod(sums[0].global_shape):
            yield name, sum_of_whole((tensor_sum.value for tensor_sum in sums), _size_bytes(sums[0]))


def _size_bytes(tensor_sum: TensorSum) -> int:
    return BY_NAME[tensor_sum.dtype].itemsize_bytes * math.prod(tensor_sum.global_shape)
