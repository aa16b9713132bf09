"""Tensors seen in another type, and tensors that are in no file."""

from __future__ import annotations

import pytest
from support.plans import planned_singly

from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.locations import ByteRange, ByteRanges, Constant, Converted, StridedView
from reshard_mpi.formats.manifest import ShardIdentity, TensorSpec
from reshard_mpi.formats.tensor_table import (
    NOT_CONTIGUOUS,
    ChunkedTensors,
    ListedChunk,
    TensorEntry,
    TensorTable,
    TensorType,
)
from reshard_mpi.planning.made_tensors import constant, converted
from reshard_mpi.planning.rank_plan import RankPlan, ReadItem, TensorPlan
from reshard_mpi.sharding.box import Box

FLOAT32, BFLOAT16, INT32 = BY_NAME["float32"], BY_NAME["bfloat16"], BY_NAME["int32"]


def shard(path: str = "shard") -> TensorTable:
    """Two weights that are each one run of the file, one that is a view, a counter, and one that is small already."""
    tensors = TensorTable(path)
    weight = tensors.kind(TensorType(FLOAT32, (2, 3)))
    tensors.add("first", weight, 64)
    tensors.add("second", weight, 88)
    tensors.add_entry(TensorEntry("turned", FLOAT32, (3, 2), StridedView(path, 64, (4, 12))))
    tensors.add("step", tensors.kind(TensorType(INT32, ())), 112)
    tensors.add("small", tensors.kind(TensorType(BFLOAT16, (2,))), 116)
    return tensors


def test_only_other_floats_are_converted() -> None:
    stored = shard()
    seen = converted(stored, BFLOAT16)
    assert list(seen) == list(stored)
    assert [entry.dtype.name for entry in seen.values()] == ["bfloat16", "bfloat16", "bfloat16", "int32", "bfloat16"]
    assert seen["first"].source == Converted(ByteRanges((ByteRange("shard", 64, 24),)), FLOAT32)
    assert seen["first"].unconverted == stored["first"]
    assert seen["turned"].source == Converted(StridedView("shard", 64, (4, 12)), FLOAT32)
    assert seen["step"] == stored["step"] and seen["small"] == stored["small"]
    assert list(seen.offsets) == [NOT_CONTIGUOUS, NOT_CONTIGUOUS, NOT_CONTIGUOUS, 112, 116]
    assert seen.kind_named("second") == TensorType(BFLOAT16, (2, 3))
    assert not seen["first"].is_as_stored and seen["first"].stored is None and seen["small"].is_as_stored


def test_steps_of_a_converted_view_count_elements() -> None:
    assert converted(shard(), BFLOAT16)["turned"].steps == (1, 3)


def test_what_is_converted_takes_the_bytes_of_its_file() -> None:
    seen = converted(shard(), BFLOAT16)
    assert seen.element_bytes([0, 1, 2, 3, 4]) == 4 + 4 + 4 + 4 + 2
    twice = converted(seen, BY_NAME["float64"])
    assert twice["small"].unconverted.dtype == BFLOAT16
    assert twice["first"].unconverted == shard()["first"]
    assert twice.element_bytes([0, 4]) == 6


def test_an_equal_file_is_seen_alike() -> None:
    there = converted(shard(), BFLOAT16).at("other")
    assert there["first"].source == Converted(ByteRanges((ByteRange("other", 64, 24),)), FLOAT32)
    assert there == converted(shard("other"), BFLOAT16)
    assert there != shard("other") and there != converted(shard("other"), BY_NAME["float16"])


def test_listed_tensors_are_converted_piece_by_piece() -> None:
    file = shard()
    listed = ChunkedTensors("folder")
    pieces = [ListedChunk(Box((0, 0), (2, 3)), file, 0), ListedChunk(Box((2, 0), (4, 3)), file, 1)]
    listed.add_listed("w", FLOAT32, (4, 3), pieces)
    seen = converted(listed, BFLOAT16)
    assert isinstance(seen, ChunkedTensors) and seen["w"].dtype == BFLOAT16
    ((_, first), (_, second)) = seen.chunk_lists[seen.chunk_list_ids[0]]
    assert first is second  # a file's tensors are seen through one view
    assert first.source(seen.numbers[0][1]) == Converted(ByteRanges((ByteRange("shard", 88, 24),)), FLOAT32)
    assert listed["w"].dtype == FLOAT32


def test_nothing_is_converted_to_a_whole_number() -> None:
    with pytest.raises(ValueError, match="int32"):
        converted(shard(), INT32)


def test_a_constant_has_no_bytes_in_files() -> None:
    entry = constant("zeros", BFLOAT16, (4, 3), bytes(2))
    assert entry.source == Constant(bytes(2)) and not entry.is_as_stored and entry.stored is None
    tensors = TensorTable("", [entry])
    assert tensors["zeros"] == entry and tensors.element_bytes([0]) == 0
    with pytest.raises(ValueError, match="2 bytes, got 4"):
        constant("zeros", BFLOAT16, (4, 3), bytes(4))


def test_a_plan_needs_the_bytes_of_the_files() -> None:
    box = Box.whole((4, 3))
    seen = converted(shard(), BFLOAT16)
    reads = (
        ReadItem(0, seen["first"], Box((0, 0), (2, 3)), Box((0, 0), (2, 3))),
        ReadItem(0, constant("w", BFLOAT16, (2, 3), bytes(2)), Box((2, 0), (4, 3)), Box((2, 0), (4, 3))),
    )
    tensors = planned_singly([TensorPlan(TensorSpec("w", BFLOAT16, (4, 3), box), reads)])
    plan = RankPlan(0, 0, ShardIdentity(0, 1, ""), tensors, {}, (), (), (), (), frozenset())
    assert plan.needed_bytes == 24 and plan.written_bytes == 24
    assert [item.source.unconverted.dtype for item in plan.tensors[0].reads] == [FLOAT32, BFLOAT16]
