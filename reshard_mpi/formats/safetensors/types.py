"""Element types by the names that safetensors has for them."""

from __future__ import annotations

from reshard_mpi.formats.dtypes import BY_NAME, DType

_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
BY_TAG: dict[str, DType] = {tag: BY_NAME[name] for tag, name in _NAMES.items()}
# Int4, one value a byte, is MindSpore's: I8, and an entry in the metadata that says so (see `metadata`).
TAG_OF: dict[str, str] = {name: tag for tag, name in _NAMES.items()} | {"int4": "I8"}
INT4 = BY_NAME["int4"]
