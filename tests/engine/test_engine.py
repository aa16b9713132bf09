"""The engine moves exactly the planned bytes, whatever the boxes, cuts of files, byte orders and limits."""

from __future__ import annotations

import errno
import itertools
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import many
from support.finals import Finals
from support.float_oracle import TYPES, became
from support.plans import planned_singly

from reshard_mpi.engine import elements, shard_transfer
from reshard_mpi.engine import gather as engine_gather
from reshard_mpi.engine import open_files as engine_files
from reshard_mpi.engine import read as engine_read
from reshard_mpi.engine.checksums import sum_shard
from reshard_mpi.engine.first_difference import first_difference, first_difference_of_tensors
from reshard_mpi.engine.open_files import ByteRuns, Files, Traffic
from reshard_mpi.engine.shard_transfer import OpenTarget, last_of, write_shard
from reshard_mpi.errors import ShardError
from reshard_mpi.formats.dtypes import BY_NAME, FLOATS, DType
from reshard_mpi.formats.locations import ByteRange, ByteRanges, LibraryRead, StridedView
from reshard_mpi.formats.manifest import Manifest, ShardIdentity, TensorSpec
from reshard_mpi.formats.tensor_table import TensorEntry, TensorTable
from reshard_mpi.planning.chunk_reads import held_tensor
from reshard_mpi.planning.made_tensors import constant, converted
from reshard_mpi.planning.rank_plan import Check, Limits, RankPlan, ReadItem, TensorPlan
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.strides import Runs
from reshard_mpi.testing.checkpoints import load_shard

DTYPES = ("uint8", "float16", "float32", "float8_e5m2", "float64", "complex64", "complex128")
NOWHERE = ShardIdentity(0, 1, "")


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """Draw a box in a tensor of `shape`, which may be empty only where the tensor is."""
    start, stop = [], []
    for length in shape:
        low = draw(st.integers(0, max(0, length - 1)))
        start.append(low)
        stop.append(draw(st.integers(min(low + 1, length), length)))
    return Box(tuple(start), tuple(stop))


@st.composite
def cut_bytes(draw: st.DrawFn, length: int) -> list[int]:
    """Draw the lengths of the ranges that a stream of `length` bytes is cut into, at any byte."""
    cuts = sorted(draw(st.lists(st.integers(0, length), max_size=3)))
    return [high - low for low, high in zip([0, *cuts], [*cuts, length])]


class Drawn(NamedTuple):
    """A plan of one tensor. content: what the target must hold. too_large: how many of its elements are."""

    plan: RankPlan
    target: Manifest
    content: np.ndarray
    too_large: int


@st.composite
def plans(draw: st.DrawFn, folder: Path) -> Drawn:
    """Draw a tensor in several source files, some of other types, a target box of it, and the plan."""
    dtype = BY_NAME[draw(st.sampled_from(DTYPES))]
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    target = draw(boxes(shape))
    content = _elements(draw, dtype, target.shape)
    reads, all_too_large = [], 0
    for number, region in enumerate(_partition(draw, target)):
        path, inside = folder / f"source_{number}", _slices(region.relative_to(target))
        kind = draw(st.sampled_from(["as it is", "as it is", "converted", "constant"]))
        stored = BY_NAME[draw(st.sampled_from(TYPES))] if kind == "converted" and dtype in FLOATS else dtype
        array = _elements(draw, stored, shape)
        if kind == "constant":
            array = np.full(shape, array.flat[:1])
            content[inside] = array[_slices(region)]
            entry = constant("w", dtype, shape, array.tobytes()[: dtype.itemsize_bytes])
            reads.append(ReadItem(number, entry, Box.whole(shape), region))
            continue
        content[inside], too_large = _became(array[_slices(region)], stored, dtype)
        if draw(st.booleans()):
            item = _from_another(draw, number, path, stored, array, region)
        else:
            held = _around(draw, region, shape)
            item = ReadItem(number, _source(draw, path, stored, _cut(array, held)), held, region)
        if stored != dtype:
            (entry,) = converted(TensorTable(str(path), [item.source]), dtype).values()
            item = item._replace(source=entry)
            all_too_large += too_large
        reads.append(item)
    spec = TensorSpec("w", dtype, shape, target)
    tensors = planned_singly([TensorPlan(spec, tuple(reads))])
    plan = RankPlan(0, 0, NOWHERE, tensors, {}, (), (), (), (), frozenset())
    path = folder / "target"
    path.write_bytes(bytes(spec.size_bytes + 64))
    offset, ranges = 0, []
    for length in draw(cut_bytes(spec.size_bytes)):
        ranges.append(ByteRange(str(path), offset, length))
        offset += length + 7
    entry = TensorEntry("w", dtype, target.shape, ByteRanges(tuple(ranges)))
    return Drawn(plan, Manifest(str(path), "none", TensorTable(str(path), [entry])), content, all_too_large)


def _elements(draw: st.DrawFn, dtype: DType, shape: tuple[int, ...]) -> np.ndarray:
    """Draw an array of elements of any bits."""
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize_bytes
    content = np.random.default_rng(draw(st.integers(0, 99))).bytes(count)
    return np.frombuffer(content, np.dtype((np.void, dtype.itemsize_bytes))).reshape(shape).copy()


def _became(array: np.ndarray, stored: DType, dtype: DType) -> tuple[np.ndarray, int]:
    """Return what elements are in another type, by the oracle, and how many are too large for it."""
    if stored == dtype:
        return array, 0
    bits = np.ascontiguousarray(array).view(f"u{stored.itemsize_bytes}").reshape(-1).tolist()
    results = [became(element, stored.name, dtype.name) for element in bits]
    content = np.array([result.bits for result in results], f"u{dtype.itemsize_bytes}")
    as_raw = content.view(np.dtype((np.void, dtype.itemsize_bytes))).reshape(array.shape)
    return as_raw, sum(result.too_large for result in results)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in zip(box.start, box.stop))


def _partition(draw: st.DrawFn, box: Box) -> list[Box]:
    """Cut a box into a few disjoint ones that cover it."""
    parts = [box]
    for dim in range(box.ndim):
        if box.shape[dim] > 1 and draw(st.booleans()):
            at = draw(st.integers(box.start[dim] + 1, box.stop[dim] - 1))
            halves = []
            for part in parts:
                halves.append(Box(part.start, (*part.stop[:dim], at, *part.stop[dim + 1 :])))
                halves.append(Box((*part.start[:dim], at, *part.start[dim + 1 :]), part.stop))
            parts = halves
    return parts if box.size else []


def _from_another(draw: st.DrawFn, rank: int, path: Path, dtype: DType, array: np.ndarray, region: Box) -> ReadItem:
    """Return a copy of a region from a tensor with other axes, or in another order, in which it lies elsewhere."""
    axes = [dim for dim in range(region.ndim) if region.shape[dim] != 1 or draw(st.booleans())]
    axes = list(draw(st.permutations(axes)))
    for _ in range(draw(st.integers(0, 2))):
        axes.insert(draw(st.integers(0, len(axes))), -1)
    lengths = [1 if axis < 0 else region.shape[axis] for axis in axes]
    before = [draw(st.integers(0, 2)) for _ in axes]
    after = [draw(st.integers(0, 2)) for _ in axes]
    low = [draw(st.integers(0, 2)) for _ in axes]
    held = Box(tuple(low), tuple(map(sum, zip(low, before, lengths, after))))
    own = Box(tuple(map(sum, zip(low, before))), tuple(map(sum, zip(low, before, lengths))))
    content = np.frombuffer(b"x" * (held.size * array.itemsize), array.dtype).reshape(held.shape).copy()
    kept = [axis for axis in axes if axis >= 0]
    dropped = [dim for dim in range(region.ndim) if dim not in kept]
    turned = _cut(array, region).transpose((*kept, *dropped)).reshape(lengths)
    inner = own.relative_to(held)
    content[tuple(slice(low, high) for low, high in zip(inner.start, inner.stop))] = turned
    order = sorted(range(len(axes)), key=lambda at: axes[at])
    same = order == sorted(order) and draw(st.booleans())
    return ReadItem(rank, _source(draw, path, dtype, content), held, own, region, None if same else tuple(order))


def _around(draw: st.DrawFn, region: Box, shape: tuple[int, ...]) -> Box:
    return Box(
        tuple(draw(st.integers(0, low)) for low in region.start),
        tuple(draw(st.integers(high, length)) for high, length in zip(region.stop, shape)),
    )


def _swapped(content: bytes, dtype: DType) -> bytes:
    parts = np.frombuffer(content, np.uint8).reshape(-1, dtype.part_bytes)
    return parts[:, ::-1].tobytes()


def _strided(draw: st.DrawFn, path: Path, dtype: DType, held: np.ndarray) -> TensorEntry:
    """Return a tensor that is a view of a larger array in another order of axes, with every second or third element."""
    axes = draw(st.permutations(range(held.ndim)))
    every = [draw(st.sampled_from([1, 1, 2, 3])) for _ in axes]
    before = [draw(st.integers(0, 2)) for _ in axes]
    shape = [first + held.shape[axis] * step for axis, first, step in zip(axes, before, every)]
    whole = np.zeros(shape, held.dtype)
    whole[tuple(slice(first, None, step) for first, step in zip(before, every))] = held.transpose(axes)
    steps = {axis: stride * step for axis, stride, step in zip(axes, whole.strides, every)}
    swapped = draw(st.booleans())
    content = _swapped(whole.tobytes(), dtype) if swapped else whole.tobytes()
    path.write_bytes(b"abc" + content)
    offset_bytes = 3 + sum(map(int, np.multiply(before, whole.strides)))
    strides_bytes = tuple(steps[axis] for axis in range(held.ndim))
    return TensorEntry("w", dtype, held.shape, StridedView(str(path), offset_bytes, strides_bytes, swapped))


def _source(draw: st.DrawFn, path: Path, dtype: DType, held: np.ndarray) -> TensorEntry:
    content = held.tobytes()
    kind = draw(st.sampled_from(["plain", "swapped", "decoded", "strided"]))
    if kind == "decoded":
        raw = np.frombuffer(content, held.dtype).reshape(held.shape)
        chunk = tuple(draw(st.integers(1, 4)) for _ in held.shape)
        return TensorEntry("w", dtype, held.shape, LibraryRead(str(path), lambda box: _cut(raw, box), chunk, 0, 0))
    if kind == "strided":
        return _strided(draw, path, dtype, held)
    if kind == "swapped":
        content = _swapped(content, dtype)
    ranges, offset = [], 3
    with path.open("wb") as stream:
        for length in draw(cut_bytes(len(content))):
            stream.seek(offset)
            done = sum(part.length_bytes for part in ranges)
            stream.write(content[done : done + length])
            ranges.append(ByteRange(str(path), offset, length))
            offset += length + 5
    return TensorEntry("w", dtype, held.shape, ByteRanges(tuple(ranges), swapped=kind == "swapped"))


def _cut(array: np.ndarray, box: Box) -> np.ndarray:
    return np.array(array[_slices(box)], order="C")


def write(plan: RankPlan, target: Manifest, span: tuple[int, int] | None, **settings: Any) -> Traffic:
    descriptor = os.open(target.path, os.O_WRONLY | os.O_CREAT)
    try:
        return last_of(write_shard(OpenTarget(plan, target, descriptor, span), **settings))
    finally:
        os.close(descriptor)


def _written(manifest: Manifest) -> bytes:
    data = Path(manifest.path).read_bytes()
    return b"".join(data[r.offset_bytes : r.offset_bytes + r.length_bytes] for r in manifest.tensors["w"].source.ranges)


LIMITS = st.builds(Limits, buffer_bytes=st.sampled_from([16, 64, 4096]), window_bytes=st.sampled_from([1, 64, 4096]))


@pytest.mark.slow
@many(125)
@given(
    data=st.data(),
    limits=LIMITS,
    long_run_bytes=st.sampled_from([1, 8, 32, 1 << 17]),
    kernel=st.booleans(),
    interleaved_bytes=st.sampled_from([1, 64, 1 << 22]),
    few_runs=st.sampled_from([0, 1, 4]),
    scatter_bytes=st.sampled_from([1, 512]),
    vector=st.sampled_from([1, 3, 1024]),
    far_apart=st.sampled_from([0, 1, 4]),
    block_across=st.sampled_from([1, 2, 64]),
    page_bytes=st.sampled_from([16, 4096]),
    space_bytes=st.sampled_from([1, 4, 64]),
    run_bytes=st.sampled_from([0, 4, 1024]),
    converted_bytes=st.sampled_from([8, 64, 1 << 19]),
    read_bytes=st.sampled_from([1, 1 << 18]),
)
def test_every_path_moves_the_same_bytes(
    data: st.DataObject,
    limits: Limits,
    long_run_bytes: int,
    kernel: bool,
    interleaved_bytes: int,
    few_runs: int,
    scatter_bytes: int,
    vector: int,
    far_apart: int,
    block_across: int,
    page_bytes: int,
    space_bytes: int,
    run_bytes: int,
    converted_bytes: int,
    read_bytes: int,
) -> None:
    """Kernel copy, its fall-back, reads of runs and gathering from windows all give what numpy's slicing gives.

    So do several processes that fill the target together, cut at any byte.
    """
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        plan, target, expected, too_large = data.draw(plans(Path(name)))
        patch.setattr(shard_transfer, "_MIN_KERNEL_COPY_BYTES", long_run_bytes)
        patch.setattr(shard_transfer, "_INTERLEAVED_BYTES", interleaved_bytes)
        patch.setattr(shard_transfer, "_FEW_RUNS", few_runs)
        patch.setattr(shard_transfer, "_MIN_SCATTER_BYTES", scatter_bytes)
        patch.setattr(engine_files, "_MAX_VECTOR", vector)
        patch.setattr(engine_gather, "_FAR_APART", far_apart)
        patch.setattr(engine_gather, "_MIN_RUN_APART_BYTES", run_bytes)
        patch.setattr(elements, "_BLOCK_ACROSS", block_across)
        patch.setattr(elements, "_BLOCK_ALONG", 2)
        patch.setattr(shard_transfer, "_PAGE_BYTES", page_bytes)
        patch.setattr(engine_read, "_SPACE_BYTES", space_bytes)
        patch.setattr(engine_gather, "_MIN_RUN_BYTES", run_bytes)
        patch.setattr(engine_gather, "_CONVERTED_BYTES", converted_bytes)
        patch.setattr(engine_gather, "_JOINED_BYTES", converted_bytes)
        patch.setattr(engine_gather, "_READ_TO_CONVERT_BYTES", read_bytes)
        if not kernel:
            patch.setattr(engine_files.os, "copy_file_range", _unsupported)
        moved = []
        size_bytes = Path(target.path).stat().st_size
        cuts = sorted(data.draw(st.lists(st.integers(0, size_bytes), max_size=3)))
        spans = [*itertools.pairwise([0, *cuts, size_bytes])] if cuts else [None]
        finals = Finals(target.path)
        traffic = [
            write(plan, target, span=span, limits=limits, on_bytes=moved.append, staging=finals)
            for span in data.draw(st.permutations(spans))
        ]
        finals.assert_each_once(target.tensors.payload_spans())
        assert _written(target) == expected.tobytes()
        assert sum(moved) == sum(part.written_bytes for part in traffic) == plan.written_bytes
        # A cut within an element makes both sides ask for it.
        twice = len(cuts) * max(8, plan.tensors[0].spec.dtype.itemsize_bytes)
        assert 0 <= sum(part.requested_bytes for part in traffic) - plan.needed_bytes <= twice
        assert sum(part.too_large for part in traffic) == too_large
        assert sum(part.overflows.get("w", 0) for part in traffic) == too_large
        (summed,) = sum_shard(plan, target, span=None, limits=limits)
        assert summed.expected == summed.found
        with Files() as files:
            tensor = plan.tensors[0]
            assert first_difference_of_tensors(files, tensor, held_tensor(tensor.spec, target), limits) is None
        loaded = load_shard(plan, limits=limits)["w"]
        assert loaded.shape == expected.shape and loaded.tobytes() == expected.tobytes()
        assert loaded.flags.c_contiguous


def _unsupported(*_: object) -> int:
    raise OSError(38, "Function not implemented")


@many(50)
@given(data=st.data(), limits=LIMITS)
def test_first_difference_is_the_first(data: st.DataObject, limits: Limits) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=3)))
    first = np.random.default_rng(1).integers(0, 255, shape, np.uint8)
    second = np.array(first)
    at = tuple(data.draw(st.integers(0, length - 1)) for length in shape)
    differs = data.draw(st.booleans())
    if differs:
        second[at] ^= 1
    box = Box.whole(shape)
    with tempfile.TemporaryDirectory() as name:
        reads = []
        for rank, array in enumerate((first, first, second)):
            path = Path(name, str(rank))
            path.write_bytes(array.tobytes())
            source = ByteRanges((ByteRange(str(path), 0, array.size),))
            reads.append(ReadItem(rank, TensorEntry("w", BY_NAME["uint8"], shape, source), box, box))
        with Files() as files:
            difference = first_difference(Check("w", tuple(reads), refuse=True, why=""), limits=limits, files=files)
    assert difference == ((reads[2], at) if differs else None)


@pytest.mark.parametrize("gap", [0, 10])
def test_source_that_became_shorter_is_named(tmp_path: Path, gap: int) -> None:
    path = tmp_path / "source"
    path.write_bytes(bytes(100 - gap - 1))
    part = ByteRange(str(path), 0, 100)
    (tmp_path / "target").write_bytes(bytes(100))
    with (tmp_path / "target").open("r+b") as target, Files(target=target.fileno()) as opened:
        with pytest.raises(ShardError, match="became shorter") as read:
            opened.read_into(part, memoryview(bytearray(100)))
        with pytest.raises(ShardError, match="became shorter"), opened.window(part, 100):
            raise AssertionError("a window beyond the end was mapped")
        with pytest.raises(ShardError, match="became shorter"):
            opened.copy(ByteRuns(str(path), str(tmp_path / "target"), Runs(0, 0, 100)), memoryview(bytearray(8)))
    assert read.value.where == str(path)


@pytest.mark.parametrize("call", ["preadv", "preadv of many", "mmap", "open", "copy_file_range"])
def test_source_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Where the kernel copies, and cannot, it does not say which of the two files is at fault: the source is asked."""
    path = tmp_path / "source"
    path.write_bytes(bytes(100))
    (tmp_path / "target").write_bytes(bytes(100))
    part, runs = ByteRange(str(path), 0, 100), ByteRuns(str(path), str(tmp_path / "target"), Runs(0, 0, 100))

    def failing(*_: object, **__: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    names = {"copy_file_range": ["copy_file_range", "preadv"], "preadv of many": ["preadv"]}.get(call, [call])
    with Files() as opened:
        for name in names:
            monkeypatch.setattr(engine_files.mmap if name == "mmap" else engine_files.os, name, failing)
        buffer = memoryview(bytearray(100))
        with pytest.raises(ShardError, match=r"cannot be read\n  got: Input/output error\n.*source") as read:
            if call == "mmap":
                with opened.window(part, 100):
                    raise AssertionError("it was mapped")
            elif call == "copy_file_range":
                opened.copy(runs, buffer)
            elif call == "preadv of many":
                opened.read_scattered(part, [buffer[:50], buffer[50:]])
            else:
                opened.read_into(part, buffer)
    assert read.value.where == str(path) and "--resume" in read.value.remedy


def test_compressed_source_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "rank_3").touch()

    def read(_: Box) -> np.ndarray:
        raise OSError("Can't read data (inflate() failed)")

    whole = Box((0,), (4,))
    source = TensorEntry("w", BY_NAME["uint8"], (4,), LibraryRead(str(tmp_path / "rank_3"), read, (4,), 0, 0))
    plan = RankPlan(
        0,
        0,
        NOWHERE,
        planned_singly([TensorPlan(TensorSpec("w", source.dtype, (4,), whole), (ReadItem(3, source, whole, whole),))]),
        {},
        (),
        (),
        (),
        (),
        frozenset(),
    )
    with pytest.raises(ShardError, match=r"cannot be read\n  got: .*inflate(.|\n)*where: .*rank_3"):
        load_shard(plan, limits=Limits(1 << 10, 1 << 10))


def test_more_sources_than_may_be_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_files, "_MAX_OPEN_FILES", 3)
    with Files() as opened:
        for round_number in range(2):
            for number in range(8):
                path = tmp_path / str(number)
                path.write_bytes(bytes([number]))
                buffer = bytearray(1)
                opened.read_into(ByteRange(str(path), 0, 1), memoryview(buffer))
                assert buffer[0] == number, round_number
        assert len(list(Path("/proc/self/fd").iterdir())) < 100


@pytest.mark.parametrize(
    ("span", "advised"), [(None, ["b"]), ((0, 1 << 18), []), ((1 << 18, 1 << 19), []), ((5, 1 << 19), ["b"])]
)
def test_only_what_a_process_fills_is_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, span: tuple[int, int] | None, advised: list[str]
) -> None:
    size, box = 1 << 18, Box.whole((1 << 18,))
    target = tmp_path / "target"
    target.write_bytes(bytes(2 * size))
    tensors, places = [], TensorTable(str(target))
    for number, name in enumerate("ab"):
        path = tmp_path / name
        path.write_bytes(bytes([number + 1]) * (size + 1))
        source = TensorEntry(name, BY_NAME["uint8"], box.shape, ByteRanges((ByteRange(str(path), 1, size),)))
        tensors.append(TensorPlan(TensorSpec(name, BY_NAME["uint8"], box.shape, box), (ReadItem(0, source, box, box),)))
        place = ByteRanges((ByteRange(str(target), number * size, size),))
        places.add_entry(TensorEntry(name, BY_NAME["uint8"], box.shape, place))
    plan = RankPlan(0, 0, NOWHERE, planned_singly(tensors), {}, (), (), (), (), frozenset())
    seen = []
    monkeypatch.setattr(Files, "advise", lambda _, part: seen.append(Path(part.path).name))
    limits = Limits(buffer_bytes=4096, window_bytes=4096)
    write(plan, Manifest(str(target), "none", places), span=span, limits=limits, on_bytes=lambda _: None)
    assert seen == advised
