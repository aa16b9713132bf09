"""Sums of parts, put together, are the CRC-32 of the whole tensor, however it is cut."""

from __future__ import annotations

import zlib
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import few

from reshard_mpi.engine import checksums as engine_sums
from reshard_mpi.engine.checksums import (
    ContiguousPart,
    PartSum,
    crc_of_contiguous,
    sum_of_contiguous,
    sum_of_whole,
    sum_of_zeros,
)
from reshard_mpi.sharding.box import Box


def parts_of(shape: tuple[int, ...], cuts: list[list[int]]) -> list[Box]:
    """Cut a tensor at these places of each dimension."""
    edges = [sorted({0, length, *(cut for cut in at if cut < length)}) for length, at in zip(shape, cuts)]
    ranges = [list(pairwise(edge)) for edge in edges]
    return [Box(tuple(a for a, _ in part), tuple(b for _, b in part)) for part in product(*ranges)]


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[np.ndarray, list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=4)))
    dtype = draw(st.sampled_from([np.uint8, np.uint16, np.float32, np.complex128]))
    cuts = [draw(st.lists(st.integers(1, 8), max_size=3)) for _ in shape]
    whole = np.frombuffer(draw(st.randoms(use_true_random=False)).randbytes(int(np.prod(shape)) * 16), np.uint8)
    whole = whole[: int(np.prod(shape)) * np.dtype(dtype).itemsize].view(dtype).reshape(shape)
    return whole, draw(st.permutations(parts_of(shape, cuts)))


def sum_of_part(whole: np.ndarray, part: Box, block_elements: int = 1 << 30) -> int:
    box = Box.whole(whole.shape)
    summed = PartSum(box, whole.itemsize)
    for block in part.blocks(block_elements):
        held = whole[tuple(slice(a, b) for a, b in zip(block.start, block.stop))]
        summed.add(block, memoryview(held.tobytes()))
    return summed.value


@given(cut_tensors(), st.integers(1, 40))
def test_parts_make_up_the_whole(cut: tuple[np.ndarray, list[Box]], block_elements: int) -> None:
    whole, parts = cut
    sums = [sum_of_part(whole, part, block_elements) for part in parts]
    assert sum_of_whole(sums, whole.nbytes) == zlib.crc32(whole.tobytes())


@given(cut_tensors())
def test_a_part_is_the_whole_with_zeros_elsewhere(cut: tuple[np.ndarray, list[Box]]) -> None:
    whole, parts = cut
    for part in parts:
        alone = np.zeros_like(whole)
        place = tuple(slice(a, b) for a, b in zip(part.start, part.stop))
        alone[place] = whole[place]
        assert sum_of_part(whole, part) == zlib.crc32(alone.tobytes())


@given(cut_tensors())
def test_the_sum_of_a_contiguous_part_and_the_crc_of_its_bytes(cut: tuple[np.ndarray, list[Box]]) -> None:
    whole, parts = cut
    numbers = np.arange(whole.size).reshape(whole.shape)
    for part in parts:
        place = tuple(slice(a, b) for a, b in zip(part.start, part.stop))
        held = numbers[place].ravel()
        contiguous = ContiguousPart.of(part, whole.shape, whole.itemsize)
        assert (contiguous is not None) == bool(held[-1] - held[0] == held.size - 1)
        if contiguous is not None:
            crc = zlib.crc32(whole[place].tobytes())
            assert crc_of_contiguous(sum_of_part(whole, part), contiguous) == crc
            assert sum_of_contiguous(crc, contiguous) == sum_of_part(whole, part)


@pytest.mark.parametrize("behind", [0, 1, (1 << 32) - 1, 1 << 32, (1 << 40) + 7, (1 << 61) + 3, (1 << 70) + 1])
def test_the_crc_of_a_part_with_much_behind_it(behind: int) -> None:
    contiguous = ContiguousPart(5, behind, 5 + behind)
    assert crc_of_contiguous(sum_of_contiguous(zlib.crc32(b"bytes"), contiguous), contiguous) == zlib.crc32(b"bytes")


@pytest.mark.slow
@pytest.mark.parametrize("columns", few(1, [1, 11, 12, 13, 47, 48, 49, 500]))
def test_columns_of_any_width(columns: int) -> None:
    whole = np.random.default_rng(columns).integers(0, 256, (301, 1000), np.uint8)
    sums = [
        sum_of_part(whole, Box((0, number), (301, min(number + columns, 1000)))) for number in range(0, 1000, columns)
    ]
    assert sum_of_whole(sums, whole.nbytes) == zlib.crc32(whole.tobytes())


@pytest.mark.parametrize("columns", [1, 4, 16, 47, 48, 100])
@pytest.mark.parametrize("rows", [2, 3, 4, 63, 64, 65, 66])
def test_few_runs_are_summed_without_tables_and_without_numpy(
    monkeypatch: pytest.MonkeyPatch, rows: int, columns: int
) -> None:
    """Thousands of small tensors, each of a few short runs: what is made once for many runs costs more than these."""
    whole = np.random.default_rng(rows).integers(0, 256, (rows, 300), np.uint8)
    part = Box((0, 7), (rows, 7 + columns))
    alone = np.zeros_like(whole)
    alone[:, 7 : 7 + columns] = whole[:, 7 : 7 + columns]
    made: list[str] = []
    for name in ("_short_remainders", "_gap"):
        function = getattr(engine_sums, name)
        monkeypatch.setattr(
            engine_sums, name, lambda *given, name=name, function=function: made.append(name) or function(*given)
        )
    assert sum_of_part(whole, part) == zlib.crc32(alone.tobytes())
    assert bool(made) is (rows > 64)
    assert engine_sums.has_short_runs(part, Box.whole(whole.shape), 1) is ("_short_remainders" in made)


def test_zeros_and_nothing() -> None:
    for size_bytes in (0, 1, 7, 4096, 1_000_003):
        assert sum_of_zeros(size_bytes) == zlib.crc32(bytes(size_bytes))
    assert sum_of_zeros(1 << 50) == sum_of_whole([], 1 << 50)
    assert sum_of_part(np.zeros((0, 4), np.float32), Box((0, 0), (0, 4))) == 0


def test_one_flipped_bit_is_seen() -> None:
    whole = np.random.default_rng(1).integers(0, 256, (64, 64), np.uint8)
    part = Box((3, 5), (60, 9))
    before = sum_of_part(whole, part)
    whole[30, 7] ^= 16
    assert sum_of_part(whole, part) != before
    whole[30, 9] ^= 16  # outside
    whole[30, 7] ^= 16
    assert sum_of_part(whole, part) == before
