"""What the engine does beside converting elements: it counts what is too large, once, and reads what it needs, once."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from support.examples import few
from support.float_oracle import became
from support.plans import planned_singly

from reshard_mpi.engine import elements
from reshard_mpi.engine.checksums import sum_shard
from reshard_mpi.engine.elements import convert_elements
from reshard_mpi.engine.first_difference import place_of
from reshard_mpi.engine.open_files import Traffic
from reshard_mpi.engine.read import takes_numpy
from reshard_mpi.engine.shard_transfer import OpenTarget, last_of, write_shard
from reshard_mpi.errors import ReshardError
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.locations import ByteRange, ByteRanges, LibraryRead
from reshard_mpi.formats.manifest import Manifest, ShardIdentity, TensorSpec
from reshard_mpi.formats.tensor_table import TensorEntry, TensorTable, TensorType
from reshard_mpi.planning.chunk_reads import held_tensor
from reshard_mpi.planning.made_tensors import constant, converted
from reshard_mpi.planning.rank_plan import Group, Limits, PlannedTensors, RankPlan, ReadGroup, ReadItem, TensorPlan
from reshard_mpi.sharding.box import Box
from reshard_mpi.text import MIB

FLOAT16, FLOAT32 = BY_NAME["float16"], BY_NAME["float32"]
LIMITS = Limits(2 * MIB, 16 * MIB)


def planned(*tensors: TensorPlan) -> RankPlan:
    return of_groups(planned_singly(tensors))


def of_groups(tensors: PlannedTensors) -> RankPlan:
    return RankPlan(0, 0, ShardIdentity(0, 1, ""), tensors, {}, (), (), (), (), frozenset())


def reserved(path: Path, *specs: TensorSpec, gap: int = 0) -> Manifest:
    """Return a target with room for these tensors, each `gap` bytes behind the one before."""
    places, offset = TensorTable(str(path)), gap
    for spec in specs:
        places.add(spec.name, places.kind(TensorType(spec.dtype, spec.box.shape)), offset)
        offset += spec.size_bytes + gap
    path.write_bytes(bytes(offset))
    return Manifest(str(path), "none", places)


def fill(plan: RankPlan, target: Manifest, span: tuple[int, int] | None = None, limits: Limits = LIMITS) -> Traffic:
    descriptor = os.open(target.path, os.O_RDWR)
    try:
        opened = OpenTarget(plan, target, descriptor, span)
        return last_of(write_shard(opened, limits=limits, on_bytes=lambda _: None))
    finally:
        os.close(descriptor)


def in_file(path: Path, array: np.ndarray) -> TensorEntry:
    """Write an array of float32 to a file, and return it as a tensor of float16."""
    array.astype(np.float32).tofile(path)
    source = ByteRanges((ByteRange(str(path), 0, array.size * 4),))
    (entry,) = converted(TensorTable(str(path), [TensorEntry("w", FLOAT32, array.shape, source)]), FLOAT16).values()
    return entry


def whole(entry: TensorEntry) -> tuple[TensorPlan, TensorSpec]:
    box = Box.whole(entry.shape)
    spec = TensorSpec(entry.name, entry.dtype, entry.shape, box)
    return TensorPlan(spec, (ReadItem(0, entry, box, box),)), spec


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("cut", range(1, 13))
def test_an_element_on_a_cut_is_counted_once(tmp_path: Path, cut: int, turned: bool) -> None:
    """The target begins at an odd byte, so processes that fill it together may each write one byte of an element."""
    entry = in_file(tmp_path / "source", np.full((2, 3), 1e6))
    box, to = Box.whole((2, 3)), Box.whole((3, 2))
    spec = TensorSpec("w", FLOAT16, to.shape if turned else box.shape, to if turned else box)
    item = ReadItem(0, entry, box, box, to, (1, 0)) if turned else ReadItem(0, entry, box, box)
    plan, target = planned(TensorPlan(spec, (item,))), reserved(tmp_path / "target", spec, gap=1)
    limits = Limits(buffer_bytes=4, window_bytes=64)
    first, second = fill(plan, target, (0, cut), limits), fill(plan, target, (cut, 14), limits)
    assert first.too_large + second.too_large == 6
    assert first.overflows.get("w", 0) + second.overflows.get("w", 0) == 6
    assert Path(target.path).read_bytes() == b"\0" + np.full(6, np.inf, np.float16).tobytes() + b"\0"


def test_each_tensor_has_its_own_count(tmp_path: Path) -> None:
    first, first_spec = whole(in_file(tmp_path / "a", np.array([1.0, 1e6, -1e7]))._replace(name="a"))
    second, second_spec = whole(in_file(tmp_path / "b", np.array([1.0, np.inf]))._replace(name="b"))
    third, third_spec = whole(in_file(tmp_path / "c", np.array([7e4]))._replace(name="c"))
    target = reserved(tmp_path / "target", first_spec, second_spec, third_spec)
    traffic = fill(planned(first, second, third), target)
    assert traffic.overflows == {"a": 2, "c": 1} and traffic.too_large == 3
    sums = list(sum_shard(planned(first, second, third), target, span=None, limits=LIMITS))
    assert all(summed.expected == summed.found for summed in sums)


def test_small_tensors_of_another_type_among_others(tmp_path: Path) -> None:
    """Hundreds of small tensors are moved many at a time, but for those that are converted."""
    count, path = 600, tmp_path / "source"
    content = np.random.default_rng(3).standard_normal((count, 8)).astype(np.float32)
    content.tofile(path)
    tensors = TensorTable(str(path))
    kind = tensors.kind(TensorType(FLOAT32, (8,)))
    for number in range(count):
        tensors.add(f"w{number}", kind, 32 * number)
    box = Box.whole((8,))
    groups = [
        Group(
            TensorType.of_box(seen.kinds[0].dtype, box, (8,)),
            [f"w{number}" for number in range(first, count, 2)],
            (ReadGroup(0, box, box, seen, range(first, count, 2)),),
        )
        for first, seen in ((0, tensors), (1, converted(tensors, FLOAT16)))
    ]
    plan = of_groups(PlannedTensors(groups, [number % 2 for number in range(count)]))
    target = reserved(tmp_path / "target", *plan.tensors.specs)
    traffic = fill(plan, target)
    rows = [row.astype(np.float16) if number % 2 else row for number, row in enumerate(content)]
    assert Path(target.path).read_bytes() == b"".join(row.tobytes() for row in rows)
    assert traffic.requested_bytes == plan.needed_bytes == count * 32


def test_a_place_in_the_file_is_told(tmp_path: Path) -> None:
    """Of an element that was converted, the bytes that it was; of a constant, none."""
    (tensor, spec) = whole(in_file(tmp_path / "source", np.arange(6.0).reshape(2, 3)))
    assert place_of(tensor.reads[0], (1, 1)) == ByteRange(str(tmp_path / "source"), 16, 4)
    zeros, _ = whole(constant("zeros", FLOAT16, (2, 3), bytes(2)))
    assert place_of(zeros.reads[0], (1, 1)) is None
    target = reserved(tmp_path / "target", spec)
    (own,) = held_tensor(spec, target).reads
    assert place_of(own, (1, 1)) == ByteRange(target.path, 8, 2)
    assert takes_numpy(tensor.reads[0], spec.box, MIB) and takes_numpy(zeros.reads[0], spec.box, MIB)


def test_a_chunk_is_decoded_once(tmp_path: Path) -> None:
    """What a library decodes is converted in blocks, but not decoded again for each of them."""
    values = np.random.default_rng(5).standard_normal((512, 1024)).astype(np.float32)
    boxes = []

    def read(box: Box) -> np.ndarray:
        boxes.append(box)
        return values[box.start[0] : box.stop[0], box.start[1] : box.stop[1]].view(np.uint32)

    stored = TensorEntry("w", FLOAT32, values.shape, LibraryRead("none", read, (512, 1024), 0, 0))
    (entry,) = converted(TensorTable("none", [stored]), FLOAT16).values()
    tensor, spec = whole(entry)
    target = reserved(tmp_path / "target", spec)
    fill(planned(tensor), target)
    assert len(boxes) == 1
    assert Path(target.path).read_bytes() == values.astype(np.float16).tobytes()


@pytest.mark.parametrize("turned", few(1, [False, True]))
def test_memory_does_not_grow_with_the_tensor(tmp_path: Path, turned: bool) -> None:
    shape = (4096, 3072)
    path = tmp_path / "source"
    with path.open("wb") as stream:
        stream.truncate(8 * shape[0] * shape[1])
    stored = TensorEntry("w", BY_NAME["float64"], shape, ByteRanges((ByteRange(str(path), 0, 96 * MIB),)))
    (entry,) = converted(TensorTable(str(path), [stored]), BY_NAME["bfloat16"]).values()
    box, to = Box.whole(shape), Box.whole(shape[::-1])
    spec = TensorSpec("w", entry.dtype, to.shape if turned else shape, to if turned else box)
    item = ReadItem(0, entry, box, box, to, (1, 0)) if turned else ReadItem(0, entry, box, box)
    target = reserved(tmp_path / "target", spec)
    tracemalloc.start()
    try:
        traffic = fill(planned(TensorPlan(spec, (item,))), target)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert traffic.requested_bytes == 96 * MIB
    most_bytes = LIMITS.buffer_bytes + (LIMITS.window_bytes if turned else 0) + 4 * MIB
    assert peak_bytes < most_bytes


@pytest.mark.parametrize("shape", [(1030, 1111), (3, 700_000), (70_000, 17), (90, 80, 100)])
@pytest.mark.parametrize("dtype", few(1, ["float16", "float64"]))
def test_turned_and_converted_at_once(tmp_path: Path, shape: tuple[int, ...], dtype: str) -> None:
    """Such a tensor passes through more than one buffer, of which none may take another's place."""
    path, values = tmp_path / "source", np.random.default_rng(9).standard_normal(shape).astype(np.float32)
    values.tofile(path)
    stored = TensorEntry("w", FLOAT32, shape, ByteRanges((ByteRange(str(path), 0, values.nbytes),)))
    (entry,) = converted(TensorTable(str(path), [stored]), BY_NAME[dtype]).values()
    box, to, order = Box.whole(shape), Box.whole(shape[::-1]), tuple(reversed(range(len(shape))))
    spec = TensorSpec("w", entry.dtype, to.shape, to)
    target = reserved(tmp_path / "target", spec)
    fill(planned(TensorPlan(spec, (ReadItem(0, entry, box, box, to, order),))), target)
    assert Path(target.path).read_bytes() == values.astype(dtype).T.tobytes()


@pytest.mark.parametrize("offset_bytes", few(1, [0, 8, 6]))
def test_elements_are_read_wherever_they_begin(tmp_path: Path, offset_bytes: int) -> None:
    """All of them become what they should, NaNs among them, and only what is asked for is read."""
    path, bits = tmp_path / "source", np.random.default_rng(7).integers(0, 1 << 32, (600, 1024), np.uint32)
    path.write_bytes(bytes(offset_bytes) + bits.tobytes())
    stored = TensorEntry("w", FLOAT32, bits.shape, ByteRanges((ByteRange(str(path), offset_bytes, bits.nbytes),)))
    (entry,) = converted(TensorTable(str(path), [stored]), BY_NAME["bfloat16"]).values()
    whole_box, box = Box.whole(bits.shape), Box((100, 0), (600, 1024))
    spec = TensorSpec("w", entry.dtype, bits.shape, box)
    target = reserved(tmp_path / "target", spec)
    traffic = fill(planned(TensorPlan(spec, (ReadItem(0, entry, whole_box, box),))), target)
    expected = [became(element, "float32", "bfloat16").bits for element in bits[100:102].reshape(-1).tolist()]
    written = np.fromfile(target.path, np.uint16)
    assert written[:2048].tolist() == expected
    rounded = np.empty(500 * 1024, np.uint16)
    convert_elements(bits[100:].reshape(-1), FLOAT32, rounded, BY_NAME["bfloat16"])
    assert written.tobytes() == rounded.tobytes()
    assert traffic.requested_bytes == 500 * 4096


def test_an_error_while_converting_is_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that was open for the conversion makes another error of it."""
    tensor, spec = whole(in_file(tmp_path / "source", np.zeros((256, 1024))))
    target = reserved(tmp_path / "target", spec)
    monkeypatch.setattr(elements, "_TINY", np.zeros(1))
    with pytest.raises(ReshardError, match="subnormal"):
        fill(planned(tensor), target)


def test_oracle_and_numpy_agree_where_both_know() -> None:
    """The named tests above take numpy's word for what is no NaN."""
    numbers = np.random.default_rng(1).standard_normal(200).astype(np.float32)
    bits = [became(element, "float32", "float16").bits for element in numbers.view(np.uint32).tolist()]
    assert bits == numbers.astype(np.float16).view(np.uint16).tolist()
