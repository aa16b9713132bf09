"""Define element types (`DType`): sizes, names in numpy and MindSpore; read and make single numbers."""

from __future__ import annotations

import math
import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np


class DType(NamedTuple):
    """One element type.

    `itemsize_bytes` is the size of an element; `part_bytes` the width that a change of byte order reverses (half an
    element for complex numbers); `mindspore` the `tensor_type` string of a MindSpore checkpoint.
    """

    name: str
    itemsize_bytes: int
    part_bytes: int
    mindspore: str

    def __str__(self) -> str:
        return self.name


# MindSpore's names: `tensor_to_ms_type` in mindspore/train/serialization.py of 2.10. Int4 holds one value a byte.
_ALL = (
    DType("int8", 1, 1, "Int8"),
    DType("uint8", 1, 1, "UInt8"),
    DType("int16", 2, 2, "Int16"),
    DType("uint16", 2, 2, "UInt16"),
    DType("int32", 4, 4, "Int32"),
    DType("uint32", 4, 4, "UInt32"),
    DType("int64", 8, 8, "Int64"),
    DType("uint64", 8, 8, "UInt64"),
    DType("float16", 2, 2, "Float16"),
    DType("float32", 4, 4, "Float32"),
    DType("float64", 8, 8, "Float64"),
    DType("bfloat16", 2, 2, "BFloat16"),
    DType("bool", 1, 1, "Bool"),
    DType("int4", 1, 1, "Int4"),
    DType("complex64", 8, 4, "Complex64"),
    DType("complex128", 16, 8, "Complex128"),
    DType("float8_e4m3fn", 1, 1, "Float8E4M3FN"),
    DType("float8_e5m2", 1, 1, "Float8E5M2"),
    DType("hifloat8", 1, 1, "HiFloat8"),
)
BY_NAME = {dtype.name: dtype for dtype in _ALL}
BY_MINDSPORE_NAME = {dtype.mindspore: dtype for dtype in _ALL}

# The types whose elements can be converted to one another.
FLOATS = frozenset(
    BY_NAME[name] for name in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
)

# Format characters of the struct module; for other types see `numbers`.
_CODES = {
    "int8": "b",
    "uint8": "B",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "uint64": "Q",
    "float16": "e",
    "float32": "f",
    "float64": "d",
    "bool": "?",
    "int4": "b",
    "hifloat8": "B",
}
_E4M3_NAN = 0x7F
_BFLOAT16_INFINITY = 0x7F80


def numbers(content: bytes, dtype: DType) -> list[Any]:
    """Return the values of elements, whose bytes are in this machine's byte order, as Python numbers.

    They are those that an array of type `to_numpy(dtype)` shows.
    """
    if dtype.part_bytes < dtype.itemsize_bytes:
        parts = numbers(content, BY_NAME["float32" if dtype.part_bytes == 4 else "float64"])
        return [complex(real, imaginary) for real, imaginary in zip(parts[::2], parts[1::2])]
    if dtype.name == "bfloat16":  # the upper half of a float32
        count = len(content) // 2
        wide = struct.pack(f"={count}I", *(bits << 16 for bits in struct.unpack(f"={count}H", content)))
        return list(struct.unpack(f"={count}f", wide))
    if dtype.name == "float8_e5m2":  # the upper half of a float16
        halves = struct.pack(f"={len(content)}H", *(bits << 8 for bits in content))
        return list(struct.unpack(f"={len(content)}e", halves))
    if dtype.name == "float8_e4m3fn":
        return [_e4m3(bits) for bits in content]
    return list(struct.unpack(f"={len(content) // dtype.itemsize_bytes}{_CODES[dtype.name]}", content))


def encode_number(value: int | float, dtype: DType) -> bytes:
    """Return the bytes of one element. Raises ValueError, which says why, if the type cannot hold the value.

    Of types with neither a format character nor the form of bfloat16, only zeros are made.
    """
    try:
        if dtype.name == "bfloat16":  # the upper half of a float32, rounded to nearest even
            (bits,) = struct.unpack("=I", struct.pack("=f", value))
            upper = bits + 0x7FFF + (bits >> 16 & 1) >> 16
            if upper & 0x7FFF == _BFLOAT16_INFINITY and math.isfinite(value):
                raise ValueError("too large")
            return struct.pack("=H", upper)
        code = _CODES.get(dtype.name)
        if code is None or dtype.name in _AS_BYTES:
            if value != 0:
                raise ValueError("only zeros can be made up in this type")
            return bytes(dtype.itemsize_bytes)
        is_integral = code not in "efd"
        if is_integral and value != int(value):
            raise ValueError("no integer")
        if dtype.name == "bool" and value not in (0, 1):
            raise ValueError("neither 0 nor 1")
        return struct.pack(f"={code}", int(value) if is_integral else float(value))
    except (struct.error, OverflowError) as error:
        raise ValueError(str(error)) from error


def _e4m3(bits: int) -> float:
    """Return the value of an 8-bit float: 4 bits of exponent (bias 7), 3 of mantissa, NaN but no infinity."""
    sign, exponent, mantissa = -1.0 if bits & 0x80 else 1.0, bits >> 3 & 0xF, bits & 7
    if bits & _E4M3_NAN == _E4M3_NAN:
        return float("nan")
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


# Types that numpy does not have come from ml_dtypes, or are shown as raw integers if that lacks them too.
_FROM_ML_DTYPES = {"bfloat16", "float8_e4m3fn", "float8_e5m2"}
_AS_BYTES = {"int4": "int8", "hifloat8": "uint8"}


@lru_cache
def to_numpy(dtype: DType) -> np.dtype[Any]:
    """Return the numpy dtype that shows the values of `dtype` (int4 as int8, hifloat8 as raw uint8)."""
    import numpy as np

    if dtype.name in _FROM_ML_DTYPES:
        import ml_dtypes

        exotic: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype.name))
        return exotic
    return np.dtype(_AS_BYTES.get(dtype.name, dtype.name))
