"""HDF5 shards with plain h5py: the native one, version 2, written and read; those of other programs, written."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import h5py
import numpy as np

from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.testing.sample_tensors import SampleTensor, ShardContents

_BYTES = {"int4": "i1", "hifloat8": "u1", "float8_e4m3fn": "u1", "float8_e5m2": "u1"}


def bfloat16() -> Any:
    """Return the HDF5 type of bfloat16."""
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_size(2)
    kind.set_ebias(127)
    return kind


def fixed(text: str) -> np.ndarray[Any, Any]:
    """Return an attribute of text as native shards have it."""
    content = text.encode()
    return np.array(content, dtype=h5py.string_dtype("utf-8", len(content)))


def write(path: Path, contents: ShardContents, **dataset_options: Any) -> None:
    """Write a native shard of whole tensors. Options go to h5py's `create_dataset` (chunks, compression)."""
    parts = {name: name.split("/") for name in contents.tensors}
    plain = {
        name: p
        for name, p in parts.items()
        if p[0] != "__reshard_mpi__" and not any(x in ("", ".") or "\0" in x for x in p)
    }
    folders = {"/".join(p[:depth]) for p in plain.values() for depth in range(1, len(p))}
    with h5py.File(path, "w") as file:
        file.attrs["format"] = fixed("reshard_mpi")
        for name, number in (("version", 2), ("rank", 0), ("world_size", 1)):
            file.attrs[name] = number
        reserved = file.create_group("__reshard_mpi__")
        listed = {"tensors": list(contents.tensors), "strings": dict(contents.strings)}
        reserved["strategy"] = np.zeros(0, np.uint8)
        reserved["contents"] = np.frombuffer(json.dumps(listed).encode(), np.uint8)
        reserved["boxes"] = boxes(contents.tensors.values())
        escaped = reserved.create_group("tensors")
        for tensor in contents.tensors.values():
            if tensor.name in plain and tensor.name not in folders:
                _create(file, tensor.name, tensor, dataset_options)
            else:
                link = "".join(
                    chr(b) if chr(b) in "_-" or (chr(b).isascii() and chr(b).isalnum()) else f"%{b:02X}"
                    for b in tensor.name.encode()
                )
                _create(escaped, link, tensor, dataset_options)


def boxes(tensors: Iterable[SampleTensor]) -> np.ndarray[Any, Any]:
    """Return the table of types and boxes of a native shard with whole tensors."""
    tensors = list(tensors)
    most = max([1, *(len(tensor.shape) for tensor in tensors)])
    padded = [(*tensor.shape, *[0] * (most - len(tensor.shape))) for tensor in tensors]
    kind = [("dtype", "S16"), ("global_shape", "<i8", (most,)), ("offset", "<i8", (most,))]
    return np.array([(tensor.dtype.name, shape, 0) for tensor, shape in zip(tensors, padded)], kind)


def write_foreign(path: Path, tensors: Iterable[SampleTensor]) -> None:
    """Write a shard as other programs do: datasets, without any attribute of ours."""
    with h5py.File(path, "w") as file:
        for tensor in tensors:
            _create(file, tensor.name, tensor, {})


def _create(group: Any, name: str, tensor: SampleTensor, options: dict[str, Any]) -> Any:
    if tensor.dtype.name == "bfloat16":
        group.require_group("/".join(name.split("/")[:-1]) or "/") if "/" in name else None
        space = h5py.h5s.create_simple(tensor.shape) if tensor.shape else h5py.h5s.create(h5py.h5s.SCALAR)
        kind = bfloat16()
        handle = h5py.h5d.create(group.id, name.encode(), kind, space)
        if tensor.content:
            raw = np.frombuffer(tensor.content, "u2").reshape(tensor.shape)
            handle.write(h5py.h5s.ALL, h5py.h5s.ALL, raw, mtype=kind)
        return h5py.Dataset(handle)
    kind = np.dtype(_BYTES.get(tensor.dtype.name, tensor.dtype.name))
    data = np.frombuffer(tensor.content, kind).reshape(tensor.shape)
    return group.create_dataset(name, data=data, **(options if data.size and data.shape else {}))


def read(path: Path, *, is_whole: bool = False) -> ShardContents:
    """Read a native shard: every dataset's raw elements through the library.

    is_whole: check that the table says of each dataset that it is all of its tensor.
    """
    tensors: dict[str, SampleTensor] = {}

    def visit(name: str, item: Any) -> None:
        inside = name.split("/")
        if not isinstance(item, h5py.Dataset) or (inside[0] == "__reshard_mpi__" and inside[1] != "tensors"):
            return
        name = unquote(inside[-1]) if inside[0] == "__reshard_mpi__" else name
        shown, global_shape, offset = rows[name]
        dtype = BY_NAME[shown.decode()]
        if is_whole:
            assert tuple(global_shape[: len(item.shape)]) == item.shape and not any(offset)
        raw = np.empty(item.shape, dtype=f"V{dtype.itemsize_bytes}")
        if raw.size:
            item.id.read(h5py.h5s.ALL, h5py.h5s.ALL, raw, mtype=item.id.get_type())
        tensors[name] = SampleTensor(name, dtype, item.shape, raw.tobytes())

    with h5py.File(path, "r") as file:
        assert file.attrs["format"] == b"reshard_mpi" and file.attrs["version"] == 2
        listed = json.loads(bytes(file["__reshard_mpi__/contents"][()]))
        rows = dict(zip(listed["tensors"], file["__reshard_mpi__/boxes"][()], strict=True))
        file.visititems(visit)
    assert sorted(tensors) == sorted(listed["tensors"])
    return ShardContents.of((tensors[name] for name in listed["tensors"]), listed["strings"])


def lookup3(data: bytes) -> int:
    """Return the checksum of HDF5's structures, Jenkins' lookup3 (File Format Specification, "Jenkins")."""

    def turned(word: int, by: int) -> int:
        return (word << by | word >> 32 - by) & 0xFFFFFFFF

    rounds = -(-len(data) // 12)
    words = struct.unpack(f"<{3 * rounds}I", data.ljust(12 * rounds, b"\0"))
    a = b = c = (0xDEADBEEF + len(data)) & 0xFFFFFFFF
    for number in range(0, len(words), 3):
        a, b, c = ((x + y) & 0xFFFFFFFF for x, y in zip((a, b, c), words[number : number + 3]))
        if number + 3 < len(words):
            for by in (4, 6, 8, 16, 19, 4):
                a, b, c = b, (c + b) & 0xFFFFFFFF, ((a - c) & 0xFFFFFFFF) ^ turned(c, by)
    for by in (14, 11, 25, 16, 4, 14, 24):
        a, b, c = b, ((c ^ b) - turned(b, by)) & 0xFFFFFFFF, a
    return b
