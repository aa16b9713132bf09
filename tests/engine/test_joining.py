"""Tensors added up element by element, beside an oracle of single numbers; wherever their elements are."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.examples import many
from support.float_oracle import FORMS, became

from reshard_mpi.engine.elements import raw_dtype
from reshard_mpi.engine.first_difference import first_same
from reshard_mpi.engine.gather import Reduction, gather
from reshard_mpi.engine.open_files import Files
from reshard_mpi.engine.read import fill
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.locations import ByteRange, ByteRanges, Converted, LibraryRead, Reduced, StridedView
from reshard_mpi.formats.tensor_table import TensorEntry, TensorTable
from reshard_mpi.planning.gradient_joining import JoinedTensors
from reshard_mpi.planning.made_tensors import converted
from reshard_mpi.planning.rank_plan import Check, Limits, ReadItem
from reshard_mpi.sharding.box import Box
from reshard_mpi.text import MIB

FLOAT32, FLOAT16 = BY_NAME["float32"], BY_NAME["float16"]
LIMITS = Limits(2 * MIB, 16 * MIB)
NUMPY = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}


def by_hand(parts: list[int], name: str, *, is_mean: bool) -> tuple[int, bool]:
    """Return the bits of one element of a sum or a mean, and whether it is too large. parts: the bits of its parts."""
    if is_mean and len(set(parts)) == 1:
        return parts[0], False
    wide = "float64" if name == "float64" else "float32"
    to_number = {"float64": np.float64, "float32": np.float32}[wide]
    raw = np.uint64 if wide == "float64" else np.uint32
    values = [raw(became(part, name, wide).bits).view(to_number) for part in parts]
    total = to_number(0)
    with np.errstate(all="ignore"):
        for value in values:
            total = total + value
        if is_mean:
            total = total / to_number(len(parts))
    overflowed = bool(np.isinf(total)) and not any(map(np.isinf, values))
    if name == wide:
        return int(total.view(raw)), overflowed
    rounded = became(int(total.view(raw)), wide, name)
    return rounded.bits, rounded.too_large or overflowed


@many(150)
@given(
    name=st.sampled_from(list(FORMS)),
    is_mean=st.booleans(),
    data=st.data(),
    size=st.integers(1, 40),
    count=st.integers(1, 5),
)
def test_each_element_is_as_by_hand(name: str, is_mean: bool, data: st.DataObject, size: int, count: int) -> None:
    dtype = BY_NAME[name]
    bits = st.integers(0, (1 << 8 * dtype.itemsize_bytes) - 1)
    parts = [data.draw(hnp.arrays(raw_dtype(dtype), size, elements=bits)) for _ in range(count)]
    joining = Reduction(dtype, size, is_mean=is_mean)
    for part in parts:
        joining.add(part)
    elements, too_large = joining.joined()
    expected = [by_hand([int(part[place]) for part in parts], name, is_mean=is_mean) for place in range(size)]
    wanted = np.array([element for element, _ in expected], elements.dtype)
    got_nan, want_nan = (np.isnan(array.view(NUMPY[name]).astype(np.float64)) for array in (elements, wanted))
    assert np.array_equal(got_nan, want_nan)
    assert elements[~want_nan].tobytes() == wanted[~want_nan].tobytes()
    assert too_large == sum(is_too_large for _, is_too_large in expected)


def test_what_is_no_number_is_always_the_same_nan() -> None:
    """Which of two NaNs a processor returns may depend on how many elements it adds at once."""
    nans = np.array([0x7FC00001, 0xFFC12345, 0x7F800001, 0xFF800000], np.uint32)
    for first, second in itertools.product(nans, nans):
        if first == second:
            continue
        for is_mean in (False, True):
            joining = Reduction(FLOAT32, 1, is_mean=is_mean)
            joining.add(np.array([first]))
            joining.add(np.array([second]))
            assert joining.joined()[0].tolist() == [0x7FC00000]


def test_a_mean_leaves_what_is_the_same() -> None:
    same = np.array([0x7F7FFFFF, 0x80000000, 0x7F800001, 0xFF800000, 0x3DCCCCCD], np.uint32)
    joining = Reduction(FLOAT32, len(same), is_mean=True)
    for _ in range(7):
        joining.add(same)
    elements, too_large = joining.joined()
    assert elements.tolist() == same.tolist() and too_large == 0


def test_other_orders_are_other_sums() -> None:
    """The order is that of the ranks, since it changes the last bits."""
    values = [np.array([value], np.float32).view(np.uint32) for value in (1e8, 1.0, -1e8)]
    sums = []
    for order in ((0, 1, 2), (0, 2, 1)):
        joining = Reduction(FLOAT32, 1, is_mean=False)
        for number in order:
            joining.add(values[number])
        sums.append(float(joining.joined()[0].view(np.float32)[0]))
    assert sums == [0.0, 1.0]


# Wherever the tensors are


def in_file(path: Path, array: np.ndarray) -> ByteRanges:
    array.tofile(path)
    return ByteRanges((ByteRange(str(path), 0, array.nbytes),))


def places(folder: Path, arrays: list[np.ndarray]) -> tuple[Reduced, list[Box]]:
    """Put the same array of each of four kinds: as it is, of the other byte order, turned, and decoded in chunks."""
    plain, other, turned, chunked = arrays
    read: list[Box] = []

    def decode(box: Box) -> np.ndarray:
        read.append(box)
        index = tuple(slice(low, high) for low, high in zip(box.start, box.stop))
        return np.ascontiguousarray(chunked[index]).view(np.uint32)

    swapped = in_file(folder / "other", other.byteswap())._replace(swapped=True)
    np.ascontiguousarray(turned.T).tofile(folder / "turned")
    strided = StridedView(str(folder / "turned"), 0, (4, 4 * turned.shape[0]))
    decoded = LibraryRead("chunks", decode, (7, chunked.shape[1]), 1000, 1000)
    return Reduced((in_file(folder / "plain", plain), swapped, strided, decoded), False), read


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("is_converted", [False, True])
@pytest.mark.parametrize("limits", [LIMITS, Limits(256, 512)], ids=["usual", "little"])
def test_parts_of_any_kind_are_joined(tmp_path: Path, is_transposed: bool, is_converted: bool, limits: Limits) -> None:
    random = np.random.default_rng(3)
    arrays = [random.standard_normal((23, 11), np.float32) for _ in range(4)]
    place, read = places(tmp_path, arrays)
    whole = Box.whole((23, 11))
    region = Box((3, 2), (21, 9))
    dtype = FLOAT16 if is_converted else FLOAT32
    entry = TensorEntry("g", dtype, (23, 11), Converted(place, FLOAT32) if is_converted else place)
    to, order = (Box((2, 3), (9, 21)), (1, 0)) if is_transposed else (region, None)
    item = ReadItem(0, entry, whole, region, to if is_transposed else None, order)
    out = np.zeros(to.shape, raw_dtype(dtype))
    with Files() as files:
        gather(files, item, out, to, limits)
    expected = (((arrays[0] + arrays[1]) + arrays[2]) + arrays[3])[3:21, 2:9].astype(NUMPY[dtype.name])
    assert out.tobytes() == np.ascontiguousarray(expected.T if is_transposed else expected).tobytes()
    assert sum(box.size for box in read) == region.size  # each chunk's rows are decoded once


@given(cut=st.integers(1, 252))
def test_blocks_do_not_change_it(cut: int) -> None:
    """Processes that fill a target together, and a verification, divide a tensor otherwise."""
    random = np.random.default_rng(4)
    with tempfile.TemporaryDirectory() as folder:
        arrays = [random.standard_normal(253).astype(np.float16) for _ in range(3)]
        sources = tuple(in_file(Path(folder, str(number)), array) for number, array in enumerate(arrays))
        box = Box.whole((253,))
        item = ReadItem(0, TensorEntry("g", FLOAT16, (253,), Reduced(sources, True)), box, box)
        whole, first, second = bytearray(506), bytearray(2 * cut), bytearray(2 * (253 - cut))
        with Files() as files:
            fill(files, item, box, memoryview(whole), LIMITS)
            for part, content in ((Box((0,), (cut,)), first), (Box((cut,), (253,)), second)):
                fill(files, item.part(part), part, memoryview(content), Limits(64, 64))
        assert first + second == whole


def test_the_view_of_several_shards() -> None:
    def shard(path: str, *names: str) -> TensorTable:
        return TensorTable(
            path,
            [
                TensorEntry(name, FLOAT32, (2, 3), ByteRanges((ByteRange(path, 24 * number, 24),)))
                for number, name in enumerate(names)
            ],
        )

    shards = [shard("a", "v", "w"), shard("b", "w", "more", "v")]
    seen = JoinedTensors(["w", "v"], shards, is_mean=True)
    assert seen.source(0) == Reduced((shards[0]["w"].source, shards[1]["w"].source), True)
    assert seen.source(1) == Reduced((shards[0]["v"].source, shards[1]["v"].source), True)
    assert seen.element_bytes([0, 1]) == 16 and seen.tables == (seen, *shards)
    assert seen == JoinedTensors(["w", "v"], shards, is_mean=True) != JoinedTensors(["w", "v"], shards, is_mean=False)
    half = converted(seen, FLOAT16)
    assert half.source(1) == Converted(seen.source(1), FLOAT32) and half.element_bytes([1]) == 8


# Sums that are the same


def same_of(folder: Path, *arrays: np.ndarray, limits: Limits = LIMITS) -> tuple[int, int] | None:
    reads = []
    for rank, array in enumerate(arrays):
        box = Box.whole(array.shape)
        reads.append(
            ReadItem(rank, TensorEntry("g", FLOAT32, array.shape, in_file(folder / str(rank), array)), box, box)
        )
    with Files() as files:
        return first_same(Check("g", tuple(reads), refuse=True, why=""), limits=limits, files=files)


def test_two_of_many_that_are_the_same(tmp_path: Path) -> None:
    a, b, c = (np.random.default_rng(number).standard_normal(1000).astype(np.float32) for number in range(3))
    zeros, late = np.zeros_like(a), a.copy()
    late[-1] += 1
    for limits in (LIMITS, Limits(64, 64)):
        assert same_of(tmp_path, a, b, c, limits=limits) is None
        assert same_of(tmp_path, a, b, c, b, limits=limits) == (1, 3)
        assert same_of(tmp_path, a, late, zeros, zeros, limits=limits) is None
        assert same_of(tmp_path, zeros, zeros, a, a, limits=limits) == (2, 3)


def test_few_bytes_are_read_of_sums_that_differ(tmp_path: Path) -> None:
    arrays = [np.random.default_rng(number).standard_normal(100_000).astype(np.float32) for number in range(3)]
    sources = [in_file(tmp_path / str(rank), array) for rank, array in enumerate(arrays)]
    box = Box.whole((100_000,))
    entries = (TensorEntry("g", FLOAT32, box.shape, source) for source in sources)
    reads = tuple(ReadItem(rank, entry, box, box) for rank, entry in enumerate(entries))
    check = Check("g", reads, refuse=True, why="")
    with Files() as files:
        assert first_same(check, limits=LIMITS, files=files) is None
        assert files.traffic.requested_bytes == 3 * (64 << 10)
