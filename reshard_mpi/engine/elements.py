"""Convert elements to another type as torch's `Tensor.to` does, or into another order (`convert_elements`).

That is torch 2.13 on a processor with AVX2 or AVX-512, for tensors that are large and contiguous. Others differ from
these in the bits of NaNs only. Numbers are rounded to the nearest, a tie to the even one; one that is too large becomes
infinite. Four things are not obvious, and torch's nonetheless:

- float64 becomes a smaller type by way of float32, so it is rounded twice;
- float8_e4m3fn has no infinity: whatever is too large for it, an infinity too, becomes 448, its largest number;
- a NaN in bfloat16 is 0xFFFF if it comes from float32 or float64, and 0x7FC0 if it comes from a smaller type;
- all other NaNs keep their sign, and as much of their upper bits as there is room for.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from reshard_mpi.errors import ReshardError
from reshard_mpi.formats.dtypes import BY_NAME, DType
from reshard_mpi.planning.rank_plan import ReadItem
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.strides import Strides

Array = np.ndarray[Any, np.dtype[Any]]

# Elements converted at a time: their memory stays in the processor's second cache. `_ALONE`: types that need no other.
_BLOCK, _BLOCK_ALONE = 1 << 15, 1 << 17

_FLOAT64, _FLOAT32, _FLOAT16 = BY_NAME["float64"], BY_NAME["float32"], BY_NAME["float16"]
_BFLOAT16, _E4M3, _E5M2 = BY_NAME["bfloat16"], BY_NAME["float8_e4m3fn"], BY_NAME["float8_e5m2"]
_ALONE = ((_FLOAT32, _BFLOAT16), (_E4M3, _FLOAT32))
_TINY = np.array([1e-40])
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

# The parts of a float32.
_MAGNITUDE, _EXPONENT, _MANTISSA_BITS, _BIAS = 0x7FFFFFFF, 0x7F800000, 23, 127
_INFINITY = _EXPONENT
# From this magnitude on a float32 becomes infinite in bfloat16.
_TOO_LARGE_FOR_BFLOAT16 = 0x7F7F8000
_SIGN_16, _BFLOAT16_INFINITY = 0x8000, 0x7F80
_BFLOAT16_NAN, _BFLOAT16_NAN_OF_SMALL = 0xFFFF, 0x7FC0


def _bits(value: float) -> int:
    """Return the bits of a number as a float32."""
    return int.from_bytes(struct.pack("<f", value), "little")


class _SmallFloat(NamedTuple):
    """A type smaller than float32."""

    mantissa_bits: int  # how many are stored
    least_exponent: int  # its smallest normal number, as float32 stores it
    largest: int  # magnitudes beyond this one, as a float32, become what this one becomes
    too_large: int  # the least magnitude, as a float32, that it has no number for
    has_infinity: bool  # whether infinities are not too large
    nan: int  # the bits of a NaN beside its sign and what it keeps of the mantissa


_FORMS = {
    _FLOAT16: _SmallFloat(10, _BIAS - 14, _bits(65536.0), _bits(65520.0), True, 0x7E00),
    _E5M2: _SmallFloat(2, _BIAS - 14, _bits(65536.0), _bits(61440.0), True, 0x7F),
    _E4M3: _SmallFloat(3, _BIAS - 6, _bits(448.0), _bits(464.0) + 1, False, 0x7F),
}
# Where float8_e4m3fn has its bits in a float32, how far they are shifted, and how much too small the number is then: by
# the exponents' biases, 127 and 7.
_E4M3_PARTS, _E4M3_SHIFT, _E4M3_SCALE = 0x87F00000, 20, np.float32(2.0**120)


def convert_elements(source: Array, stored: DType, out: Array, dtype: DType) -> int:
    """Convert the elements `source` of type `stored` to `dtype`; return how many finite ones are too large for it.

    Args:
        source, out: contiguous arrays of one dimension and of one length, of unsigned integers that are as wide as the
            elements. Where infinities are too large as well, they count too. Both types must be in `dtypes.FLOATS`.

    Raises ReshardError if this thread takes tiny numbers for zero.
    """
    if stored == dtype:
        out[...] = source
        return 0
    convert_block = _by_table if stored.itemsize_bytes <= 2 and dtype.itemsize_bytes <= 2 else _by_float32
    most_elements = _BLOCK_ALONE if (stored, dtype) in _ALONE else _BLOCK
    require_tiny_numbers()
    too_large = 0
    with np.errstate(all="ignore"):
        for first in range(0, len(source), most_elements):
            block = slice(first, first + most_elements)
            too_large += convert_block(source[block], stored, out[block], dtype)
    return too_large


def require_tiny_numbers() -> None:
    """Raise ReshardError if subnormal numbers become zero, as some libraries set the processor to do."""
    tiny = _TINY.astype(np.float32)
    if not tiny.view(np.uint32)[0] or not tiny.astype(np.float64).view(np.uint64)[0]:
        raise ReshardError(
            "elements cannot be converted: the processor is set to take tiny (subnormal) numbers for zero",
            remedy="leave this off in the process that calls, such as torch.set_flush_denormal(True)",
        )


def _by_float32(source: Array, stored: DType, out: Array, dtype: DType) -> int:
    if dtype == _FLOAT32:
        _to_float32(source, stored, out)
        return _overflowed(source, out) if stored == _FLOAT64 else 0
    wide = source
    if stored != _FLOAT32:
        wide = np.empty(len(source), np.uint32)
        _to_float32(source, stored, wide)
    if dtype == _FLOAT64:
        np.copyto(out.view(np.float64), wide.view(np.float32))
        return 0
    too_large = _to_bfloat16(wide, out) if dtype == _BFLOAT16 else _to_small(wide, out, _FORMS[dtype])
    counts_infinities = dtype in _FORMS and not _FORMS[dtype].has_infinity
    return too_large + (_overflowed(source, wide) if stored == _FLOAT64 and not counts_infinities else 0)


def _to_float32(source: Array, stored: DType, out: Array) -> None:
    if stored == _FLOAT64:
        np.copyto(out.view(np.float32), source.view(np.float64), casting="unsafe")
    elif stored == _BFLOAT16:
        np.copyto(out, source)
        np.left_shift(out, 16, out=out)
    elif stored == _E4M3:
        _widen_e4m3(source, out)
    else:
        np.take(_widened(stored), source, out=out, mode="clip")  # without a mode, numpy would make a copy of `out`


def _widen_e4m3(source: Array, out: Array) -> None:
    """Make float32 of 8-bit floats without a table, which takes half as long."""
    np.copyto(out.view(np.int32), source.view(np.int8))  # with the sign in all upper bits
    np.left_shift(out, _E4M3_SHIFT, out=out)
    out &= _E4M3_PARTS
    np.multiply(out.view(np.float32), _E4M3_SCALE, out=out.view(np.float32))
    if len(source) and (source.max() == 0xFF or source.view(np.int8).max() == 0x7F):
        nan = source & 0x7F == 0x7F
        out[nan] |= _INFINITY


def _overflowed(source: Array, wide: Array) -> int:
    """Return how many float64 are finite and became infinite in float32."""
    infinite = np.isinf(wide.view(np.float32))
    return int(np.count_nonzero(infinite & np.isfinite(source.view(np.float64)))) if infinite.any() else 0


def _to_bfloat16(wide: Array, out: Array) -> int:
    np.copyto(out.view(ml_dtypes.bfloat16), wide.view(np.float32), casting="unsafe")
    if not len(out) or _all_finite_in_bfloat16(out):
        return 0
    magnitude = wide & _MAGNITUDE
    out[magnitude > _INFINITY] = _BFLOAT16_NAN
    return int(np.count_nonzero((magnitude >= _TOO_LARGE_FOR_BFLOAT16) & (magnitude < _INFINITY)))


def _all_finite_in_bfloat16(elements: Array) -> bool:
    """Tell whether there is neither an infinity nor a NaN: as integers, these are the largest of either sign."""
    return bool(elements.max() < _SIGN_16 | _BFLOAT16_INFINITY and elements.view(np.int16).max() < _BFLOAT16_INFINITY)


def _to_small(wide: Array, out: Array, form: _SmallFloat) -> int:
    """Round float32 to a type with fewer bits of exponent.

    A power of two is added to each magnitude, so large that the sum has just those bits left that the small type has;
    the processor rounds them. It is one more power for each that the number is larger by, but the same for all numbers
    that are subnormal in the small type.
    """
    dropped = _MANTISSA_BITS - form.mantissa_bits
    magnitude = wide & _MAGNITUDE
    largest = int(magnitude.max()) if len(wide) else 0
    has_too_large = largest >= form.too_large
    if has_too_large:
        np.minimum(magnitude, form.largest, out=magnitude)
    exponent = magnitude & _EXPONENT
    np.maximum(exponent, form.least_exponent << _MANTISSA_BITS, out=exponent)
    exponent += dropped << _MANTISSA_BITS
    np.add(magnitude.view(np.float32), exponent.view(np.float32), out=magnitude.view(np.float32))
    magnitude -= exponent  # what is left is the mantissa, rounded, with its first bit
    exponent -= dropped + form.least_exponent << _MANTISSA_BITS
    exponent >>= dropped
    magnitude += exponent
    width = out.itemsize * 8
    sign = np.right_shift(wide, 32 - width, out=exponent)
    sign &= 1 << width - 1
    magnitude |= sign
    np.copyto(out, magnitude, casting="unsafe")
    if not has_too_large:
        return 0
    special = wide & _MAGNITUDE
    is_nan = special > _INFINITY
    kept = special[is_nan] >> dropped & (1 << form.mantissa_bits) - 1
    out[is_nan] = sign[is_nan] | form.nan | kept
    end = _INFINITY if form.has_infinity else _INFINITY + 1
    return int(np.count_nonzero((special >= form.too_large) & (special < end)))


class _Table(NamedTuple):
    """What each element of a type of one or two bytes becomes in another such type. too_large: which have no place."""

    values: Array
    too_large: Array
    least_too_large: int


def _by_table(source: Array, stored: DType, out: Array, dtype: DType) -> int:
    table = _table(stored, dtype)
    np.take(table.values, source, out=out, mode="clip")
    sign = 1 << 8 * stored.itemsize_bytes - 1
    if not len(source) or (source & (sign - 1)).max() < table.least_too_large:
        return 0
    return int(np.count_nonzero(table.too_large[source]))


@lru_cache(maxsize=20)
def _table(stored: DType, dtype: DType) -> _Table:
    """Return the table of a pair of types, made by way of float32. It takes 192 KiB at the most."""
    elements = np.arange(1 << 8 * stored.itemsize_bytes, dtype=_UNSIGNED[stored.itemsize_bytes])
    wide = np.empty(len(elements), np.uint32)
    _to_float32(elements, stored, wide)
    values = np.empty(len(elements), _UNSIGNED[dtype.itemsize_bytes])
    magnitude = wide & _MAGNITUDE
    if dtype == _BFLOAT16:
        _to_bfloat16(wide, values)
        values[magnitude > _INFINITY] = _BFLOAT16_NAN_OF_SMALL
        too_large = (magnitude >= _TOO_LARGE_FOR_BFLOAT16) & (magnitude < _INFINITY)
    else:
        form = _FORMS[dtype]
        _to_small(wide, values, form)
        too_large = (magnitude >= form.too_large) & (magnitude < _INFINITY + (not form.has_infinity))
    least = int(np.argmax(too_large)) if too_large.any() else len(elements)
    return _Table(values, too_large, least)


@lru_cache(maxsize=2)
def _widened(stored: DType) -> Array:
    """Return what each element of a type of one or two bytes that has infinities is as a float32, as bits."""
    if stored == _E5M2:  # it is the upper half of a float16
        return _widened(_FLOAT16)[:: 1 << 8].copy()
    form, width = _FORMS[stored], 8 * stored.itemsize_bytes
    elements = np.arange(1 << width, dtype=np.uint32)
    exponent = (elements & (1 << width - 1) - 1) >> form.mantissa_bits
    mantissa = elements & (1 << form.mantissa_bits) - 1
    significand = mantissa + np.where(exponent > 0, 1 << form.mantissa_bits, 0)
    power = np.maximum(exponent, 1).astype(np.int32) - 1 + form.least_exponent - _BIAS - form.mantissa_bits
    wide: Array = np.ldexp(significand.astype(np.float32), power).view(np.uint32)
    special = exponent == exponent.max()
    quiet = np.where(mantissa > 0, 1 << _MANTISSA_BITS - 1, 0)
    wide[special] = (_INFINITY | quiet | mantissa << _MANTISSA_BITS - form.mantissa_bits)[special]
    wide |= elements >> width - 1 << 31
    return wide


# Axes change places in blocks that stay in the processor's first cache: elements along the source, and the target.
_BLOCK_ACROSS, _BLOCK_ALONG = 64, 256
_UNSIGNED_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
}


def raw_dtype(dtype: DType) -> np.dtype[Any]:
    """Return a numpy dtype of the element's size that copies bits without interpreting them."""
    return _UNSIGNED_DTYPES.get(dtype.itemsize_bytes) or np.dtype((np.void, dtype.itemsize_bytes))


def source_view(window: memoryview, dtype: np.dtype[Any], strides: Strides) -> Array:
    """Return a view of the copied elements, in the order of the target; the first of them must begin the window."""
    shape = tuple(length for length, _, _ in strides.dimensions)
    return np.ndarray(shape, dtype, window, 0, tuple(step * dtype.itemsize for _, step, _ in strides.dimensions))


def target_view(out: Array, strides: Strides) -> Array:
    """Return a view of the places in `out` where the copied elements go."""
    shape, itemsize = tuple(length for length, _, _ in strides.dimensions), out.dtype.itemsize
    steps = tuple(step * itemsize for _, _, step in strides.dimensions)
    return np.ndarray(shape, out.dtype, out, strides.target_offset * itemsize, steps)


def put(elements: Array, item: ReadItem, out: Array, out_box: Box) -> None:
    """Put the elements of an item's region, row-major, in their places in `out`, which holds `out_box`."""
    strides = strides_alone(item, out_box)
    assign(target_view(out, strides), source_view(elements.data, out.dtype, strides))


def strides_alone(item: ReadItem, out_box: Box) -> Strides:
    """Return the strides of an item's elements in a row-major array of its region alone, and in one of `out_box`."""
    return Strides.between(item.region, item.region, item.target_region, out_box, item.order)


def assign(target: Array, source: Array) -> None:
    """Copy `source` to `target`, of the same shape; block by block if their axes of consecutive elements differ."""
    axes = [axis for axis, length in enumerate(source.shape) if length > 1]
    if len(axes) < 2:
        target[...] = source
        return
    across, along = min(axes, key=lambda axis: source.strides[axis]), axes[-1]
    if across == along:
        target[...] = source
        return
    ahead: list[slice] = [slice(None)] * source.ndim
    for first in range(0, source.shape[across], _BLOCK_ACROSS):
        ahead[across] = slice(first, first + _BLOCK_ACROSS)
        for start in range(0, source.shape[along], _BLOCK_ALONG):
            ahead[along] = slice(start, start + _BLOCK_ALONG)
            block = tuple(ahead)
            target[block] = source[block]


def swap(out: Array, strides: Strides, dtype: DType) -> None:
    """Reverse the byte order of the copied elements in `out`; of a complex element, each half separately."""
    itemsize, width = dtype.itemsize_bytes, dtype.part_bytes
    shape = (*(length for length, _, _ in strides.dimensions), itemsize // width)
    steps = (*(step * itemsize for _, _, step in strides.dimensions), width)
    parts: Array = np.ndarray(shape, _UNSIGNED_DTYPES[width], out, strides.target_offset * itemsize, steps)
    parts.byteswap(inplace=True)
