"""Measure how far two tensors are apart, as numbers in float64 (`distance_of`).

Types may differ. Integers of 64 bits are compared with each other as they are, and rounded to float64 only for norms.
Elements of complex types are compared by the absolute value of their difference.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from reshard_mpi.engine.elements import Array, convert_elements, raw_dtype
from reshard_mpi.engine.first_difference import contents
from reshard_mpi.engine.open_files import Files
from reshard_mpi.formats.dtypes import BY_NAME, FLOATS, DType, to_numpy
from reshard_mpi.formats.protocol import OnBytes
from reshard_mpi.planning.rank_plan import Limits, TensorPlan

# Elements taken at a time: as float64 they stay in the processor's second cache.
_AT_ONCE = 1 << 15
# Sums of squares within these bounds have lost nothing to numbers that are too small, and none was too large.
_LEAST_SQUARES, _MOST_SQUARES = 1e-270, 1e290
_LEAST_NUMBER = float(np.nextafter(0.0, 1.0))
_MOST_EXPONENT = 1024
_FLOAT64 = BY_NAME["float64"]


class Tolerance(NamedTuple):
    """How far elements a and b may be apart: |a - b| <= atol + rtol * |b|, as in numpy.allclose."""

    atol: float = 0.0
    rtol: float = 0.0


class ValueDistance(NamedTuple):
    """How far two tensors of one shape are apart.

    NaN equals NaN, and 0.0 equals -0.0. A NaN or an infinity beside another number is infinitely far from it. Norms,
    cosine and the norm of the difference are of the elements that are finite in both.
    """

    elements: int
    differing: int  # elements that are not the same number
    outside: int  # elements that are further apart than is tolerated
    largest: float  # absolute difference
    relative: float  # largest difference of an element, divided by the larger of the two absolute values
    norms: tuple[float, float]
    norm_of_difference: float
    cosine: float | None  # None if either norm is 0
    not_finite: tuple[int, int]  # NaN and infinities in either

    @property
    def share(self) -> float:
        """How far apart they are as a whole: the norm of the difference divided by the larger norm."""
        if math.isinf(self.largest):
            return math.inf
        larger = max(self.norms)
        return self.norm_of_difference / larger if larger else 0.0


def is_comparable(first: DType, second: DType) -> bool:
    """Tell whether elements of two types are numbers that can be compared: of HiFloat8 only the bytes are known."""
    return first == second or "hifloat8" not in (first.name, second.name)


def distance_of(
    files: Files, first: TensorPlan, second: TensorPlan, limits: Limits, tolerance: Tolerance, on_bytes: OnBytes
) -> ValueDistance:
    """Return how far two tensors of the same box are apart. They are read once, block by block.

    Args:
        on_bytes: called with the number of bytes of the first tensor that have just been compared.
    """
    own, others = first.spec.dtype, second.spec.dtype
    most_elements = limits.buffer_bytes // 2 // max(own.itemsize_bytes, others.itemsize_bytes)
    box = first.spec.box
    measuring = _Measuring(tolerance, min(box.size, _AT_ONCE))
    both = (contents(files, tensor, box, limits, most_elements) for tensor in (first, second))
    with np.errstate(all="ignore"):
        for (block, content), (_, other_content) in zip(*both):
            is_same = own == others and content == other_content
            raw = np.frombuffer(content, raw_dtype(own), block.size)
            other_raw = np.frombuffer(other_content, raw_dtype(others), block.size)
            for begin in range(0, block.size, _AT_ONCE):
                part = slice(begin, begin + _AT_ONCE)
                measuring.add(raw[part], own, other_raw[part], others, is_same=is_same)
            on_bytes(block.size * own.itemsize_bytes)
    return measuring.distance()


class _ScaledSum:
    """A sum of numbers, each given as a factor of a power of 2: it may be too large or too small for a float.

    What an addition rounds away is added up as well (Neumaier's way).
    """

    __slots__ = ("exponent", "lost", "total")

    def __init__(self) -> None:
        self.total, self.lost, self.exponent = 0.0, 0.0, 0

    def add(self, value: float, exponent: int = 0) -> None:
        if not value:
            return
        if not self.total and not self.lost:
            self.exponent = exponent
        higher = exponent - self.exponent
        if higher > 0:
            self.total, self.lost = math.ldexp(self.total, -higher), math.ldexp(self.lost, -higher)
            self.exponent = exponent
        else:
            value = math.ldexp(value, higher)
        total = self.total + value
        larger, smaller = (self.total, value) if abs(self.total) >= abs(value) else (value, self.total)
        self.lost += larger - total + smaller
        self.total = total

    @property
    def value(self) -> float:
        """The sum as a factor of 2 ** `exponent`."""
        return self.total + self.lost

    @property
    def root(self) -> float:
        """The square root of a sum whose exponents are even."""
        return _scaled(math.sqrt(self.value), self.exponent // 2)


class _Measuring:
    """The distance of two tensors while it is measured. at_once: of how many elements, at the most."""

    def __init__(self, tolerance: Tolerance, at_once: int) -> None:
        self._memory = np.empty((4, at_once))  # new memory would be cleared by the kernel for each part
        self._tolerance = tolerance
        self._is_exact = tolerance == Tolerance()
        self._elements = self._differing = self._outside = 0
        self._largest = self._relative = 0.0
        self._not_finite = [0, 0]
        self._squares, self._products, self._of_difference = (_ScaledSum(), _ScaledSum()), _ScaledSum(), _ScaledSum()

    def add(self, first: Array, dtype: DType, second: Array, other_dtype: DType, *, is_same: bool) -> None:
        """Add elements, as raw bytes. is_same: whether these are of one type and have the same bytes."""
        size = len(first)
        self._elements += size
        numbers = _numbers(first, dtype, self._memory[0, :size])
        if is_same:
            self._add_same(numbers)
            return
        other_numbers = _numbers(second, other_dtype, self._memory[1, :size])
        gap = _gap(first, dtype, second, other_dtype)
        if gap is not None or numbers.dtype.kind == "c" or other_numbers.dtype.kind == "c":
            self._add_any(numbers, other_numbers, gap)
        else:
            self._add_usual(numbers, other_numbers)

    def _add_same(self, numbers: Array) -> None:
        squares = math.nan if numbers.dtype.kind == "c" else float(np.dot(numbers, numbers))
        if _LEAST_SQUARES < squares < _MOST_SQUARES:
            for each in (*self._squares, self._products):
                each.add(squares)
        elif squares or numbers.any():
            self._add_any(numbers, numbers, None)

    def _add_usual(self, first: Array, second: Array) -> None:
        """Add real numbers, all of them finite and neither too large nor too small, else as `_add_any` does.

        Both arrays are overwritten.
        """
        gap, larger = self._memory[2:, : len(first)]
        np.abs(np.subtract(first, second, out=gap), out=gap)
        largest = float(gap.max())
        if not largest:
            self._add_same(first)
            return
        squares = [float(np.dot(one, other)) for one, other in ((first, first), (second, second), (gap, gap))]
        if not math.isfinite(largest) or not all(_LEAST_SQUARES < each < _MOST_SQUARES for each in squares):
            self._add_any(first, second, None)
            return
        for each, value in zip((*self._squares, self._of_difference), squares):
            each.add(value)
        self._products.add(float(np.dot(first, second)))
        magnitude = np.abs(second, out=second)
        np.maximum(np.abs(first, out=first), magnitude, out=larger)
        relative = float(np.divide(gap, larger, out=first).max())
        if math.isnan(relative):  # 0 divided by 0
            relative = float(np.divide(gap, np.maximum(larger, _LEAST_NUMBER, out=larger), out=first).max())
        self._differ(gap, magnitude, largest, relative)

    def _differ(self, gap: Array, magnitude: Array, largest: float, relative: float) -> None:
        """Count finite elements by how far they are apart. magnitude: of the second; it is overwritten."""
        differing = int(np.count_nonzero(gap > 0))  # faster than to count what is not zero
        self._differing += differing
        self._largest, self._relative = max(self._largest, largest), max(self._relative, relative)
        if self._is_exact:
            self._outside += differing
            return
        magnitude *= self._tolerance.rtol
        magnitude += self._tolerance.atol
        self._outside += int(np.count_nonzero(gap > magnitude))

    def _add_any(self, first: Array, second: Array, gap: Array | None) -> None:
        """Add any numbers. gap: how far they are apart, where that is known better than by float64."""
        finite = np.isfinite(first) & np.isfinite(second)
        if not finite.all():
            others, other_seconds = first[~finite], second[~finite]
            same = (others == other_seconds) | (np.isnan(others) & np.isnan(other_seconds))
            apart = len(others) - int(np.count_nonzero(same))
            self._differing += apart
            self._outside += apart
            if apart:
                self._largest = self._relative = math.inf
            for side, numbers in enumerate((others, other_seconds)):
                self._not_finite[side] += len(numbers) - int(np.count_nonzero(np.isfinite(numbers)))
            first, second = first[finite], second[finite]
        if not len(first):
            return
        magnitude, own = np.abs(second), np.abs(first)
        larger = np.maximum(np.maximum(own, magnitude), _LEAST_NUMBER)
        if gap is None:
            gap = np.abs(first - second)
        relative = gap / larger
        too_far = np.isinf(gap) | np.isinf(larger)
        if too_far.any():
            halves = first[too_far] / 4, second[too_far] / 4
            relative[too_far] = np.abs(halves[0] - halves[1]) / np.maximum(*map(np.abs, halves))
        self._add_products(first, second, gap)
        self._differ(gap, magnitude, float(gap.max()), float(relative.max()))

    def _add_products(self, first: Array, second: Array, gap: Array) -> None:
        parts = [_parts(numbers) for numbers in _alike(first, second)]
        exponents = [_exponent(numbers) for numbers in parts]
        scaled = [np.ldexp(numbers, -exponent) for numbers, exponent in zip(parts, exponents)]
        for each, numbers, exponent in zip(self._squares, scaled, exponents):
            each.add(float(np.dot(numbers, numbers)), 2 * exponent)
        self._products.add(float(np.dot(*scaled)), sum(exponents))
        if math.isinf(float(gap.max())):  # the difference of two finite numbers
            exponent, difference = _MOST_EXPONENT, np.subtract(*(np.ldexp(each, -_MOST_EXPONENT) for each in parts))
        else:
            exponent = _exponent(gap)
            difference = np.ldexp(gap, -exponent)
        self._of_difference.add(float(np.dot(difference, difference)), 2 * exponent)

    def distance(self) -> ValueDistance:
        first, second = self._squares
        return ValueDistance(
            self._elements,
            self._differing,
            self._outside,
            self._largest,
            self._relative,
            (first.root, second.root),
            self._of_difference.root,
            self._cosine(),
            (self._not_finite[0], self._not_finite[1]),
        )

    def _cosine(self) -> float | None:
        first, second, products = *self._squares, self._products
        if first.value <= 0 or second.value <= 0:
            return None
        if not self._of_difference.value:
            return 1.0
        ratio = products.value / (math.sqrt(first.value) * math.sqrt(second.value))
        cosine = _scaled(ratio, products.exponent - (first.exponent + second.exponent) // 2)
        return max(-1.0, min(1.0, cosine))


def _exponent(numbers: Array) -> int:
    """Return the exponent of the power of 2 that is just larger than all numbers."""
    return math.frexp(float(np.abs(numbers).max()))[1]


def _scaled(value: float, exponent: int) -> float:
    """Return value * 2 ** exponent; infinity if that is too large."""
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        return math.inf


def _numbers(raw: Array, dtype: DType, out: Array) -> Array:
    """Return elements as float64 in `out`, or as complex128 if they are complex."""
    if dtype in FLOATS:
        convert_elements(raw, dtype, out.view(np.uint64), _FLOAT64)
        return out
    numbers: Array = raw.view(to_numpy(dtype))
    if numbers.dtype.kind == "c":
        return numbers.astype(np.complex128)
    np.copyto(out, numbers)
    return out


def _gap(first: Array, dtype: DType, second: Array, other_dtype: DType) -> Array | None:
    """Return how far integers are apart, if either type has 64 bits; None for other types.

    Beyond 2 ** 53 float64 does not tell them apart.
    """
    types = to_numpy(dtype), to_numpy(other_dtype)
    if not all(each.kind in "iub" for each in types) or max(each.itemsize for each in types) < 8:
        return None
    one, other = first.view(types[0]), second.view(types[1])
    apart = one.astype(np.uint64) - other.astype(np.uint64)  # modulo 2 ** 64
    gap = np.where(one < other, 0 - apart, apart).astype(np.float64)
    if {each.kind for each in types} == {"i", "u"}:
        is_negative = (one < 0) | (other < 0)  # then they may be further apart than 2 ** 64
        gap = np.where(is_negative, np.abs(one.astype(np.float64) - other.astype(np.float64)), gap)
    return gap


def _alike(first: Array, second: Array) -> tuple[Array, Array]:
    """Return both as complex numbers if one is."""
    if first.dtype == second.dtype:
        return first, second
    return first.astype(np.complex128), second.astype(np.complex128)


def _parts(numbers: Array) -> Array:
    """Return real numbers as they are, and complex ones as their parts."""
    return np.ascontiguousarray(numbers).view(np.float64)
