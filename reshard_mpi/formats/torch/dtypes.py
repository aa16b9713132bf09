"""Element types as torch's checkpoints name them."""

from __future__ import annotations

from typing import NamedTuple

from reshard_mpi.formats.dtypes import BY_NAME, DType

# Types that have a class of storages of their own; the elements of others lie in untyped ones.
_STORAGE_NAMES = {
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}
_UNTYPED = ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")

STORAGE_OF: dict[DType, str] = {BY_NAME[name]: storage for name, storage in _STORAGE_NAMES.items()}
BY_STORAGE: dict[str, DType] = {storage: dtype for dtype, storage in STORAGE_OF.items()}
BY_TORCH_NAME: dict[str, DType] = {name: BY_NAME[name] for name in (*_STORAGE_NAMES, *_UNTYPED)}


class Storage(NamedTuple):
    """A run of elements in a file, which several tensors may share.

    key: its name. dtype: None where it is untyped, or of a type that this program does not know (`unknown`).
    elements: how many there are, or bytes if it is untyped.
    """

    key: str
    dtype: DType | None
    unknown: str | None
    elements: int

    @property
    def size_bytes(self) -> int:
        return self.elements * (1 if self.dtype is None else self.dtype.itemsize_bytes)
