"""Safetensors files made and read with the standard library's JSON, from the description of the format alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.testing.sample_tensors import SampleTensor, ShardContents

_TYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int4": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_STRING = "__reshard_mpi__:"


def file_of(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """Return a file with this header: bytes as they are, anything else as JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def write(path: Path, contents: ShardContents) -> None:
    """Write a file with its tensors in the order given, as any program may: metadata last, spaces here and there."""
    header: dict[str, Any] = {}
    data = b""
    for tensor in contents.tensors.values():
        offsets = [len(data), len(data) + len(tensor.content)]
        header[tensor.name] = {"dtype": _TYPES[tensor.dtype.name], "shape": tensor.shape, "data_offsets": offsets}
        data += tensor.content
    header["__metadata__"] = {_STRING + name: text for name, text in contents.strings.items()}
    header["__metadata__"] |= {t.name: "Int4" for t in contents.tensors.values() if t.dtype.name == "int4"}
    path.write_bytes(file_of(json.dumps(header).encode(), data))


def read(path: Path) -> ShardContents:
    """Read a file."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    metadata = header.pop("__metadata__", {})
    names = {tag: name for name, tag in _TYPES.items() if name != "int4"}
    tensors, end = [], 0
    for name, entry in header.items():
        begin, end = entry["data_offsets"][0], entry["data_offsets"][1]
        dtype = BY_NAME["int4" if metadata.get(name) == "Int4" else names[entry["dtype"]]]
        tensors.append(SampleTensor(name, dtype, tuple(entry["shape"]), data[begin:end]))
    assert end == len(data)
    about_the_file = {"format", "crc_num", "remove_redundancy", *(tensor.name for tensor in tensors)}
    strings = {key.removeprefix(_STRING): text for key, text in metadata.items() if key not in about_the_file}
    return ShardContents.of(tensors, strings)
