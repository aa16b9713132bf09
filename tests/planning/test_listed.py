"""Pieces of a list: overlaps are looked for where a target takes its part."""

from __future__ import annotations

from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.tensor_table import ChunkedTensors, ListedChunk, TensorTable, TensorType
from reshard_mpi.planning.chunk_reads import ChunkReads
from reshard_mpi.planning.rank_choice import Replicas
from reshard_mpi.planning.rank_plan import Group, ReadGroup
from reshard_mpi.sharding.box import Box


def test_all_overlaps_are_compared_whole_after_a_sample_of_them() -> None:
    file, dtype = TensorTable("f"), BY_NAME["int8"]
    listed, pieces = ChunkedTensors("folder"), []
    for number in range(100):  # each overlaps the next by one element
        box = Box((number,), (number + 2,))
        file.add(f"{number}", file.kind(TensorType(dtype, box.shape)), 0)
        pieces.append(ListedChunk(box, file, number))
    listed.add_listed("w", dtype, (101,), pieces)
    whole = Box.whole((101,))
    groups = [Group(TensorType.of_box(dtype, whole, (101,)), ("w",), (ReadGroup(0, whole, whole, listed, (0,)),))]
    reads = ChunkReads(0, 1)
    sampled = [*reads.checks(groups, Replicas.SAMPLE)]
    assert 0 < len(sampled) < 99
    assert len([*reads.checks(groups, Replicas.CHECK)]) == 99
    assert len([*reads.checks(groups, Replicas.SAMPLE)]) == len(sampled)
