"""Read all values of a tensor once, and describe them (`ContentPass`): range, norm, zeros, a digest.

A float's bits without its sign grow with its magnitude, and are the largest in infinity and NaN. So the least and
the greatest bits of a block tell at once whether it has zeros, subnormal numbers, infinities or NaN; they are counted
only where there are any. Blocks are so small that they stay in the processor's second cache from pass to pass.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from zlib_ng.zlib_ng import crc32

from reshard_mpi.engine.elements import Array, convert_elements
from reshard_mpi.engine.open_files import Files
from reshard_mpi.engine.read import fill
from reshard_mpi.formats.dtypes import BY_NAME, DType, to_numpy
from reshard_mpi.formats.protocol import OnBytes
from reshard_mpi.planning.rank_plan import Limits, TensorPlan, meeting

# Elements of a block: 128 KiB of float32, and twice as much as float64.
_BLOCK = 1 << 15


class FloatBits(NamedTuple):
    """The bits of a type's floats, without the sign.

    Example: `FloatBits(0x7C00, 0x7C01, 0x0400, 1 << 15)`, of float16.
    """

    infinity: int  # of infinity; of the first NaN in a type without infinities
    nan: int  # of the least NaN
    normal: int  # of the least number that is not subnormal
    bound: float  # magnitudes beyond which no value of a training is


# In float32 and types of its range uninitialised memory is beyond this bound in a third of its elements, and no weight
# or moment is. Types of 8 bits have scales, and use all of their range.
_BOUND = 2.0**40
_FORMS = {
    "float64": FloatBits(0x7FF << 52, (0x7FF << 52) + 1, 1 << 52, _BOUND),
    "float32": FloatBits(0x7F800000, 0x7F800001, 1 << 23, _BOUND),
    "bfloat16": FloatBits(0x7F80, 0x7F81, 1 << 7, _BOUND),
    "float16": FloatBits(0x7C00, 0x7C01, 1 << 10, 2.0**15),
    "float8_e5m2": FloatBits(0x7C, 0x7D, 1 << 2, math.inf),
    "float8_e4m3fn": FloatBits(0x7F, 0x7F, 1 << 3, math.inf),
}
_PARTS = {"complex64": BY_NAME["float32"], "complex128": BY_NAME["float64"]}
_FLOAT64 = BY_NAME["float64"]
# Numpy widens floats of this size and larger faster than `convert_elements` does.
_FLOAT32_BYTES = 4


class TensorContent(NamedTuple):
    """A description of the values of a tensor; of complex numbers, it is about their parts.

    Example: `TensorContent("w", "float32", (2, 3), least=-1.0, greatest=2.0, zeros=1, norm=2.5, digest=0x1234abcd)`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    least: float | int | None = None  # of the values that are neither NaN nor infinite; None: there are none
    greatest: float | int | None = None
    nan: int = 0  # how many
    infinite: int = 0
    zeros: int = 0
    subnormal: int = 0
    parts: int = 0  # how many values there are; two of a complex number
    norm: float = 0.0  # of all finite values, computed in float64
    digest: int = 0  # CRC-32 of all elements
    is_constant: bool = True  # all elements have the same bits
    first_bad: int | None = None  # number of the first element that is NaN, infinite or beyond the bound
    # rows (first dimension) whose elements are all zero: how many, the first and the last
    zero_rows: tuple[int, int, int] = (0, 0, 0)

    @property
    def magnitude(self) -> float:
        """The largest magnitude of the finite values."""
        return float(max(abs(self.least or 0), abs(self.greatest or 0)))

    @property
    def is_mask(self) -> bool:
        """Whether there are zeros and one other value, as in a mask that scores are multiplied by or that is added."""
        if self.nan or self.infinite or 0 not in (self.least, self.greatest) or not self.magnitude:
            return False
        return math.isclose(self.norm, self.magnitude * math.sqrt(self.parts - self.zeros), rel_tol=1e-9)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def key(self) -> tuple[object, ...]:
        """A value that copies of this tensor have too; another tensor has it by chance in one of 2^64 cases."""
        return self.dtype, self.shape, self.digest, self.norm, self.least, self.greatest


def bound_of(dtype: str) -> float:
    """Return the magnitude beyond which no value of a training is, in a type; infinity where there is none."""
    form = _FORMS.get(_PARTS[dtype].name if dtype in _PARTS else dtype)
    return math.inf if form is None else form.bound


def lowest_of(dtype: str) -> float:
    """Return the lowest finite number of a type of floats, as masks that are added have; minus infinity of others."""
    form = _FORMS.get(dtype)
    if form is None:
        return -math.inf
    kind = BY_NAME[dtype]
    return -float(np.array([form.infinity - 1], f"u{kind.itemsize_bytes}").view(to_numpy(kind))[0])


def content_of(files: Files, tensor: TensorPlan, limits: Limits, buffer: Array, on_bytes: OnBytes) -> TensorContent:
    """Read a tensor, and return a description of its values. Raises ShardError if it cannot be read.

    Args:
        buffer: of bytes, for what is read at once.
        on_bytes: called with the number of bytes just read.
    """
    spec, itemsize = tensor.spec, tensor.spec.dtype.itemsize_bytes
    content, view = ContentPass(spec.name, spec.dtype, spec.global_shape), memoryview(buffer.data)
    for block in spec.box.blocks(max(1, len(buffer) // itemsize)):
        size_bytes = block.size * itemsize
        for part in meeting(tensor.reads, block):
            fill(files, part, block, view[:size_bytes], limits)
        content.add(buffer[:size_bytes])
        on_bytes(size_bytes)
    return content.result()


class ContentPass:
    """Takes the elements of one tensor in their order, and describes them at the end (`result`)."""

    def __init__(self, name: str, dtype: DType, shape: tuple[int, ...]) -> None:
        self._name, self._dtype, self._shape = name, dtype, shape
        number = _PARTS.get(dtype.name, dtype)
        self._number = number
        self._parts = dtype.itemsize_bytes // number.itemsize_bytes
        self._form = _FORMS.get(number.name)
        self._raw = np.dtype(f"u{number.itemsize_bytes}")
        self._signed = np.dtype(f"i{number.itemsize_bytes}")
        self._values = to_numpy(number)
        self._sign = 1 << (8 * number.itemsize_bytes - 1)
        self._without_sign = self._raw.type(self._sign - 1)
        self._wide = np.empty(_BLOCK, np.float64)
        length = math.prod(shape[1:]) * self._parts
        self._rows = _ZeroRows(length) if len(shape) > 1 and shape[0] > 1 and length else None
        self._done = self._digest = self._nan = self._infinite = self._zeros = self._subnormal = 0
        self._squares: list[float] = []
        self._first_bad: int | None = None
        # by the bits of all elements, as signed and as unsigned integers
        self._signed_ends: tuple[int, int] | None = None
        self._least: float | int | None = None
        self._greatest: float | int | None = None

    def add(self, content: Array) -> None:
        """Add the next elements. content: their bytes, contiguous, beginning where elements may."""
        self._digest = crc32(content.data, self._digest)
        raw = content.view(self._raw)
        for first in range(0, len(raw), _BLOCK):
            self._add_block(raw[first : first + _BLOCK])

    def result(self) -> TensorContent:
        """Return the description of all elements that were added."""
        ends = self._signed_ends
        return TensorContent(
            self._name,
            self._dtype.name,
            self._shape,
            self._least,
            self._greatest,
            self._nan,
            self._infinite,
            self._zeros,
            self._subnormal,
            self._done,
            math.sqrt(math.fsum(self._squares)),
            self._digest,
            ends is None or ends[0] == ends[1],
            None if self._first_bad is None else self._first_bad // self._parts,
            (0, 0, 0) if self._rows is None else self._rows.found,
        )

    def _add_block(self, raw: Array) -> None:
        signed = raw.view(self._signed)
        low, high = int(signed.min()), int(signed.max())
        ends = self._signed_ends
        self._signed_ends = (low, high) if ends is None else (min(ends[0], low), max(ends[1], high))
        has_zeros = self._add_integers(raw) if self._form is None else self._add_floats(raw, low, high, self._form)
        if self._rows is not None:
            self._rows.add(raw, self._sign - 1 if self._form else None, has_zeros=has_zeros)
        self._done += len(raw)

    def _add_integers(self, raw: Array) -> bool:
        """Add a block of integers; tell whether there are zeros."""
        values = raw.view(self._values)
        low, high = int(values.min()), int(values.max())
        self._widen(low, high)
        has_zeros = low <= 0 <= high
        if has_zeros:
            self._zeros += len(raw) - int(np.count_nonzero(raw))
        self._add_squares(values)
        return has_zeros

    def _add_floats(self, raw: Array, low: int, high: int, form: FloatBits) -> bool:
        """Add a block of floats; tell whether there are zeros. low, high: the ends of their bits as signed integers."""
        ends = _Ends.of(raw, low, high, self._sign)
        has_zeros = ends.smallest == 0
        if ends.smallest < form.normal:
            without_sign = raw & self._without_sign
            zeros = len(raw) - int(np.count_nonzero(without_sign))
            self._zeros += zeros
            self._subnormal += int(np.count_nonzero(without_sign < form.normal)) - zeros
        finite, is_finite = raw, None
        if ends.largest >= form.infinity:
            without_sign = raw & self._without_sign
            is_finite = without_sign < form.infinity
            self._nan += int(np.count_nonzero(without_sign >= form.nan))
            self._infinite += int(np.count_nonzero((without_sign >= form.infinity) & (without_sign < form.nan)))
            finite = raw[is_finite]
            if not len(finite):
                self._found_bad(~is_finite)
                return has_zeros
            signed = finite.view(self._signed)
            ends = _Ends.of(finite, int(signed.min()), int(signed.max()), self._sign)
        least, greatest = map(float, np.array([ends.least, ends.greatest], self._raw).view(self._values))
        self._widen(least, greatest)
        is_beyond = max(-least, greatest) > form.bound
        if is_finite is not None or is_beyond:
            with np.errstate(invalid="ignore"):
                is_in_bounds = np.abs(raw.view(self._values).astype(np.float64)) <= form.bound
            self._found_bad(~is_in_bounds if is_finite is None else ~(is_in_bounds & is_finite))
        if self._number.itemsize_bytes >= _FLOAT32_BYTES:
            self._add_squares(finite.view(self._values))
        else:
            wide = self._wide[: len(finite)]
            convert_elements(finite, self._number, wide.view(np.uint64), _FLOAT64)
            self._squares.append(float(np.dot(wide, wide)))
        return has_zeros

    def _add_squares(self, values: Array) -> None:
        wide = self._wide[: len(values)]
        np.copyto(wide, values)
        with np.errstate(over="ignore"):
            self._squares.append(float(np.dot(wide, wide)))

    def _found_bad(self, is_bad: Array) -> None:
        if self._first_bad is None:
            self._first_bad = self._done + int(np.argmax(is_bad))

    def _widen(self, low: float, high: float) -> None:
        self._least = low if self._least is None else min(self._least, low)
        self._greatest = high if self._greatest is None else max(self._greatest, high)


class _Ends(NamedTuple):
    """The bits of the ends of some floats: of their magnitudes without the sign, of their values with it."""

    smallest: int
    largest: int
    least: int
    greatest: int

    @classmethod
    def of(cls, raw: Array, low: int, high: int, sign: int) -> _Ends:
        """Return the ends of elements. low, high: the ends of their bits as signed integers; sign: the sign's bit."""
        least_unsigned, greatest_unsigned = int(raw.min()), int(raw.max())
        # The bits of positive numbers are their magnitudes; negative ones have the sign besides, and are negative as
        # signed integers, the least magnitude first.
        positive = (least_unsigned, high) if high >= 0 else ()
        negative = (low + sign, greatest_unsigned - sign) if low < 0 else ()
        both = (*positive, *negative)
        least = greatest_unsigned if negative else least_unsigned
        return cls(min(both), max(both), least, high if positive else low + 2 * sign)


class _ZeroRows:
    """Finds rows whose elements are all zero, in elements that come in their order.

    Args:
        length: of a row, in values.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._next = 0  # the number of the next value
        self._has_values = False  # whether the row that is not complete has a value that is not zero
        self._count, self._first, self._last = 0, 0, 0

    @property
    def found(self) -> tuple[int, int, int]:
        """How many there are, the first and the last."""
        return self._count, self._first, self._last

    def add(self, raw: Array, mask: int | None, *, has_zeros: bool) -> None:
        """Add the next values. mask: of the bits without the sign; has_zeros: whether there are zeros among them."""
        row, offset = divmod(self._next, self._length)
        self._next += len(raw)
        if not has_zeros:
            self._has_values = self._next % self._length != 0
            return
        values = raw if mask is None else raw & raw.dtype.type(mask)
        first = min(self._length - offset, len(raw)) if offset else 0
        if first:
            self._has_values = self._has_values or bool(values[:first].any())
            if self._next < (row + 1) * self._length:
                return
            self._complete(np.array([not self._has_values]), row)
            row += 1
        whole = (len(raw) - first) // self._length
        last = first + whole * self._length
        if whole:
            self._complete(np.logical_not(values[first:last].reshape(whole, self._length).any(axis=1)), row)
        self._has_values = bool(values[last:].any())

    def _complete(self, are_zero: Array, first_row: int) -> None:
        rows = np.flatnonzero(are_zero)
        if not len(rows):
            return
        if not self._count:
            self._first = first_row + int(rows[0])
        self._last = first_row + int(rows[-1])
        self._count += len(rows)
