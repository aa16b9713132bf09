"""Element types: their size, and their names in numpy and in MindSpore's checkpoints.

Bytes are moved, never converted, so a type is little more than a size; numpy is imported only where values are shown.
"""

from __future__ import annotations

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


def _plain(name: str, size: int, mindspore: str) -> DType:
    return DType(name, size, size, mindspore)


# MindSpore's names: `tensor_to_ms_type` in mindspore/train/serialization.py of 2.10. Int4 holds one value a byte.
_ALL = (
    _plain("int8", 1, "Int8"),
    _plain("uint8", 1, "UInt8"),
    _plain("int16", 2, "Int16"),
    _plain("uint16", 2, "UInt16"),
    _plain("int32", 4, "Int32"),
    _plain("uint32", 4, "UInt32"),
    _plain("int64", 8, "Int64"),
    _plain("uint64", 8, "UInt64"),
    _plain("float16", 2, "Float16"),
    _plain("float32", 4, "Float32"),
    _plain("float64", 8, "Float64"),
    _plain("bfloat16", 2, "BFloat16"),
    _plain("bool", 1, "Bool"),
    _plain("int4", 1, "Int4"),
    DType("complex64", 8, 4, "Complex64"),
    DType("complex128", 16, 8, "Complex128"),
    _plain("float8_e4m3fn", 1, "Float8E4M3FN"),
    _plain("float8_e5m2", 1, "Float8E5M2"),
    _plain("hifloat8", 1, "HiFloat8"),
)
BY_NAME = {dtype.name: dtype for dtype in _ALL}
BY_MINDSPORE_NAME = {dtype.mindspore: dtype for dtype in _ALL}

# Types numpy has no number for come from ml_dtypes, or stay raw bytes where even that has none.
_FROM_ML_DTYPES = {"bfloat16", "float8_e4m3fn", "float8_e5m2"}
_AS_BYTES = {"int4": "int8", "hifloat8": "uint8"}


def to_numpy(dtype: DType) -> np.dtype[Any]:
    """Return the numpy dtype that shows the values of `dtype` (int4 as int8, hifloat8 as raw uint8)."""
    import numpy as np

    if dtype.name in _FROM_ML_DTYPES:
        import ml_dtypes

        exotic: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype.name))
        return exotic
    return np.dtype(_AS_BYTES.get(dtype.name, dtype.name))
