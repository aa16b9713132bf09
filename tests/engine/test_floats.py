"""Elements become what whole numbers say, and what torch made of them."""

from __future__ import annotations

import functools
import hashlib
import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from support.examples import few
from support.float_oracle import FORMS, TYPES, Form, became, nearest, rounded, value

from reshard_mpi.engine import elements as floats
from reshard_mpi.engine.elements import convert_elements
from reshard_mpi.errors import ReshardError
from reshard_mpi.formats.dtypes import BY_NAME, FLOATS

PAIRS = [(source, target) for source in TYPES for target in TYPES if source != target]
SMALL = [pair for pair in PAIRS if FORMS[pair[0]].width <= 16]
LARGE = [pair for pair in PAIRS if FORMS[pair[0]].width > 16]
# The quick part asks the oracle of few elements; what torch made of these types is there as well.
MANY = {pair for pair in PAIRS if FORMS[pair[0]].width in (16, 64)}


def slow_if_many(pairs: list[tuple[str, str]]) -> list[Any]:
    return [pytest.param(*pair, marks=[pytest.mark.slow] if pair in MANY else []) for pair in pairs]


def unsigned(name: str) -> np.dtype[Any]:
    return np.dtype(f"u{FORMS[name].width // 8}")


def converted(elements: np.ndarray, source: str, target: str) -> tuple[np.ndarray, int]:
    out = np.empty(len(elements), unsigned(target))
    return out, convert_elements(elements, BY_NAME[source], out, BY_NAME[target])


def every(name: str) -> np.ndarray:
    """All elements of a type of one or two bytes."""
    return np.arange(1 << FORMS[name].width, dtype=unsigned(name))


@functools.cache
def around_boundaries(source: str) -> np.ndarray:
    """Elements of a wide type next to each number of a smaller one and half way between two, for both signs."""
    form, found = FORMS[source], set()
    for target in TYPES:
        smaller = FORMS[target]
        if smaller.width >= form.width:
            continue
        magnitudes = every_magnitude(smaller)
        for low, high in itertools.pairwise((*magnitudes, smaller.largest + 1)):
            first, second = (nearest(value(magnitude, smaller), form) for magnitude in (low, high))
            half = nearest((value(low, smaller) + value(high, smaller)) / 2, form)
            found.update(bits + step for bits in (first, half, second) for step in (-1, 0, 1))
    special = {form.infinity + step for step in (-2, -1, 0, 1, 2, 1 << form.mantissa_bits - 1)}
    found |= special | {form.sign - 1, form.sign - 2, 0, 1, 2}
    found = {bits for bits in found if 0 <= bits < form.sign}
    elements = np.array(sorted(found | {bits | form.sign for bits in found}), unsigned(source))
    elements.setflags(write=False)  # they are the same for all targets
    return elements


def every_magnitude(form: Form) -> list[int]:
    """The finite magnitudes of a type; of a wide one those near each power of two."""
    if form.width <= 8:
        return list(range(form.largest + 1))
    powers = range(0, form.infinity, 1 << form.mantissa_bits)
    near = {power + step for power in powers for step in (-2, -1, 0, 1, 2, 1 << form.mantissa_bits - 1)}
    return sorted(bits for bits in near | set(range(8)) | {form.largest} if 0 <= bits <= form.largest)


def random_bits(name: str, count: int) -> np.ndarray:
    """Elements of any bits, and as many whose exponents are those of the smaller types."""
    draw = np.random.default_rng(15)
    form, dtype = FORMS[name], unsigned(name)
    anything = draw.integers(0, 1 << form.width, count, dtype=dtype, endpoint=False) if form.width < 64 else None
    if anything is None:
        anything = draw.integers(0, (1 << 64) - 1, count, dtype=np.uint64, endpoint=True)
    exponents = draw.integers(form.bias - 26, form.bias + 18, count).astype(dtype) << dtype.type(form.mantissa_bits)
    keep = dtype.type(form.sign | (1 << form.mantissa_bits) - 1)
    return np.concatenate([anything, (anything & keep) | exponents])


def check(elements: np.ndarray, source: str, target: str) -> None:
    expected = [became(bits, source, target) for bits in elements.tolist()]
    got, too_large = converted(elements, source, target)
    wrong = [
        (hex(before), hex(after.bits), hex(own))
        for before, after, own in zip(elements.tolist(), expected, got.tolist())
        if after.bits != own
    ]
    assert not wrong, f"{len(wrong)} of {len(elements)}: element, expected, got: {wrong[:5]}"
    assert too_large == sum(element.too_large for element in expected)


@pytest.mark.parametrize(("source", "target"), SMALL + LARGE)
def test_oracle_rounds_whole_numbers_as_fractions(source: str, target: str) -> None:
    magnitudes = [bits for bits in random_bits(source, 50).tolist() if bits <= FORMS[source].largest]
    for magnitude in (0, 1, FORMS[source].largest, *magnitudes):
        assert rounded(magnitude, source, target) == nearest(value(magnitude, FORMS[source]), FORMS[target])


def test_these_types_are_converted() -> None:
    assert {dtype.name for dtype in FLOATS} == set(TYPES)


@pytest.mark.slow
def test_oracle_knows_python_and_numpy() -> None:
    assert value(nearest(Fraction(0.1), FORMS["float64"]), FORMS["float64"]) == Fraction(0.1)
    halves = every("float16")
    finite = halves[(halves & 0x7FFF) < 0x7C00]
    values = [
        -float(value(bits & 0x7FFF, FORMS["float16"])) if bits >> 15 else float(value(bits, FORMS["float16"]))
        for bits in finite.tolist()
    ]
    np.testing.assert_array_equal(np.array(values), finite.view(np.float16).astype(np.float64))


@pytest.mark.parametrize(("source", "target"), slow_if_many(SMALL))
def test_every_small_element(source: str, target: str) -> None:
    check(every(source), source, target)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), LARGE)
def test_elements_around_boundaries(source: str, target: str) -> None:
    check(around_boundaries(source), source, target)


@pytest.mark.parametrize(("source", "target"), few(1, LARGE))
def test_random_bits(source: str, target: str) -> None:
    check(random_bits(source, 4000), source, target)


@pytest.mark.parametrize("name", TYPES)
def test_the_same_type_keeps_every_bit(name: str) -> None:
    elements = random_bits(name, 100)
    got, too_large = converted(elements, name, name)
    assert got.tobytes() == elements.tobytes() and too_large == 0


@pytest.mark.parametrize("length", few(2, [4, 0, 5, 1, 3, 8, 9]))
def test_blocks_of_any_length(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(floats, "_BLOCK", 4)
    monkeypatch.setattr(floats, "_BLOCK_ALONE", 4)
    elements = around_boundaries("float32")[-length:] if length else np.empty(0, np.uint32)
    for target in ("float64", "float16", "bfloat16", "float8_e4m3fn"):
        check(elements, "float32", target)


@pytest.mark.parametrize(
    ("source", "target", "bits", "expected"),
    [
        ("float32", "bfloat16", 0x3F808000, 0x3F80),  # a tie, to the even number
        ("float32", "bfloat16", 0x3F818000, 0x3F82),
        ("float32", "bfloat16", 0x7F7FFFFF, 0x7F80),  # the largest number becomes infinite
        ("float32", "bfloat16", 0x7F800001, 0xFFFF),  # a NaN whose kept bits are all zero stays one
        ("float32", "float16", 0x477FF000, 0x7C00),  # 65520, half way from the largest number to what comes next
        ("float32", "float16", 0x33000000, 0x0000),  # half of the smallest number
        ("float32", "float16", 0x33000001, 0x0001),
        ("float64", "float16", 0x3FF0020000000001, 0x3C00),  # rounded twice: just above a tie, then a tie
        ("float32", "float8_e4m3fn", 0x43E80000, 0x7E),  # 464 becomes 448, and is not too large
        ("float32", "float8_e4m3fn", 0x7F800000, 0x7E),  # infinity
        ("float16", "bfloat16", 0xFC01, 0x7FC0),
        ("float16", "float32", 0x7C01, 0x7FC02000),
        ("float8_e4m3fn", "float32", 0xFF, 0xFFF00000),
        ("float32", "float64", 0x80000001, 0xB6A0000000000000),
    ],
)
def test_what_is_easily_got_wrong(source: str, target: str, bits: int, expected: int) -> None:
    got, _ = converted(np.array([bits], unsigned(source)), source, target)
    assert hex(got[0]) == hex(expected)


def test_what_is_too_large_is_counted() -> None:
    numbers = np.array([1.0, 65519.0, 65520.0, -1e30, np.inf, -np.inf, np.nan], np.float32).view(np.uint32)
    assert converted(numbers, "float32", "float16")[1] == 2
    assert converted(numbers, "float32", "bfloat16")[1] == 0
    assert converted(numbers, "float32", "float8_e4m3fn")[1] == 5  # which has no infinity
    wide = np.array([1e300, 1e39, 65520.0, np.inf, -np.inf, np.nan]).view(np.uint64)
    assert converted(wide, "float64", "float32")[1] == 2
    assert converted(wide, "float64", "float16")[1] == 3
    assert converted(wide, "float64", "float8_e4m3fn")[1] == 5


class _FlushedToZero:
    """What the processor makes of a tiny number where it takes these for zero."""

    def astype(self, dtype: Any) -> np.ndarray:
        return np.zeros(1, dtype)


def test_a_processor_that_loses_tiny_numbers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floats, "_TINY", _FlushedToZero())
    with pytest.raises(ReshardError, match="subnormal"):
        converted(every("bfloat16"), "bfloat16", "float32")


# SHA-256 of what torch 2.13.0 makes of `golden_elements` (the beginning of it), recorded with `digest_by_torch`.
GOLDEN: dict[tuple[str, str], str] = {
    ("float64", "float32"): "b7b31a0862b54bb3ad89c2425c3e6520",
    ("float64", "float16"): "fb0066f6afd1de91dc4a5511f7494e1f",
    ("float64", "bfloat16"): "9d46b28b63b648e1c77df1f95ca9ca70",
    ("float64", "float8_e4m3fn"): "d3c58bb3cb2c7ef63fa9b422f3f815b1",
    ("float64", "float8_e5m2"): "3bb3e9e905ffa013205fadfeab1df99e",
    ("float32", "float64"): "0c851f1f130da704a8b3f629a7bb3c7b",
    ("float32", "float16"): "86288da5d1a006153a8d8d0b0778b566",
    ("float32", "bfloat16"): "80fd7c4e311830ffb0f2b0804e1f5909",
    ("float32", "float8_e4m3fn"): "409e9640a4af5cf3567dde4774b0d0bf",
    ("float32", "float8_e5m2"): "82a4582160f5e0ab1276467d1099d201",
    ("float16", "float64"): "0f233aaf46a3f923404343bb0ccecb1a",
    ("float16", "float32"): "b636c5716ff84d972782faf02d0194cb",
    ("float16", "bfloat16"): "37de2c9beecc2633296c26c38c769266",
    ("float16", "float8_e4m3fn"): "5fca763e3fe00eb890d13c36d5e9095d",
    ("float16", "float8_e5m2"): "92a1a336edf246100fcc85e3c61ae285",
    ("bfloat16", "float64"): "3a1dfdeaf0f7c870697701d0811581c9",
    ("bfloat16", "float32"): "9207d7eb28680a098c73dbe536d1ff7b",
    ("bfloat16", "float16"): "77a6185483423cf9e70d8767f91c87e2",
    ("bfloat16", "float8_e4m3fn"): "556222ae80c3498b4da64795f283e779",
    ("bfloat16", "float8_e5m2"): "875dd70a7c02e2f8dd7ba693a8764c02",
    ("float8_e4m3fn", "float64"): "5ab06031a4664881ad0f04964072cbe6",
    ("float8_e4m3fn", "float32"): "6fec1c2b11bd521f9b28b10e8771c120",
    ("float8_e4m3fn", "float16"): "522b4f6983411304ba3dd63c2756e17f",
    ("float8_e4m3fn", "bfloat16"): "e28c5eeca596bb8fc9c720b421f54f08",
    ("float8_e4m3fn", "float8_e5m2"): "6a5642d7e12f484f3fc9f952655a30db",
    ("float8_e5m2", "float64"): "f9ea071276f4dc33634c18e3ee9e85ea",
    ("float8_e5m2", "float32"): "0cab5ef8cd146b782024738728949381",
    ("float8_e5m2", "float16"): "5307a993ea39f781b4ec97ade41f892a",
    ("float8_e5m2", "bfloat16"): "96637d1b9ccd5cb91ab93ab42271ca1e",
    ("float8_e5m2", "float8_e4m3fn"): "38d1661570c396d589091d09595a5835",
}


def golden_elements(name: str) -> np.ndarray:
    """Elements of which torch's results are recorded, so many that all of them go through its vectorized loops."""
    if FORMS[name].width <= 16:
        return np.tile(every(name), 1 << 16 >> FORMS[name].width)
    draw = np.random.default_rng(2026)
    raw = np.frombuffer(draw.bytes(4 << 18), np.uint32)
    if name == "float32":
        uppers = every("bfloat16").astype(np.uint32) << np.uint32(16)
        return np.concatenate(
            [raw, *(uppers + np.uint32(low) for low in (0, 1, 0x1000, 0x7FFF, 0x8000, 0x8001, 0xFFFF))]
        )
    small = every("float16").view(np.float16).astype(np.float64)[every("float16") & 0x7FFF < 0x7C00][:63488]
    near = small.view(np.uint64)
    return np.concatenate([raw.view(np.uint64), near, near + np.uint64(1), near + np.uint64(1 << 41)])[: 5 << 16]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_what_torch_made(source: str, target: str) -> None:
    elements = golden_elements(source)
    got, _ = converted(elements, source, target)
    assert hashlib.sha256(got.tobytes()).hexdigest()[:32] == GOLDEN[source, target]


def by_torch(elements: np.ndarray, source: str, target: str) -> np.ndarray:
    """What torch makes of elements."""
    import torch

    signed = elements.view(f"i{elements.itemsize}")
    tensor = torch.from_numpy(signed.copy()).view(getattr(torch, source)).to(getattr(torch, target))
    as_bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[unsigned(target).itemsize]
    bits: np.ndarray = tensor.view(as_bits).numpy().view(unsigned(target))
    return bits


@pytest.mark.torch
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_torch_makes_the_same(source: str, target: str) -> None:
    import torch

    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("torch's own loops differ in the bits of NaNs on this processor")
    boundaries = np.resize(around_boundaries(source), 1 << 16) if FORMS[source].width > 16 else every(source)
    for elements in (golden_elements(source), boundaries, np.resize(random_bits(source, 1 << 15), 1 << 16)):
        got, _ = converted(elements, source, target)
        theirs = by_torch(elements, source, target)
        wrong = np.flatnonzero(got != theirs)[:5]
        assert not wrong.size, [(hex(elements[at]), hex(theirs[at]), hex(got[at])) for at in wrong]


if __name__ == "__main__":  # prints GOLDEN anew, with torch
    for pair in PAIRS:
        digest = hashlib.sha256(by_torch(golden_elements(pair[0]), *pair).tobytes()).hexdigest()[:32]
        print(f'    {pair}: "{digest}",'.replace("'", '"'))
