"""A format as an author would begin one: what it costs to add one to the program is this module, and its `INFO`.

A file is a mark, the length of a head and its CRC-32, the head (JSON), and the payloads one after another.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from struct import Struct
from typing import Any

from reshard_mpi.errors import ShardError, UsageError
from reshard_mpi.formats import files
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.manifest import Manifest, ShardSpec
from reshard_mpi.formats.protocol import NO_SUMS, OnBytes, uncounted
from reshard_mpi.formats.registry import FormatInfo
from reshard_mpi.formats.tensor_table import TensorTable, TensorType
from reshard_mpi.text import KIB

NAME = "toy"
INFO = FormatInfo(NAME, __name__, (".toy",), read_tensor_bytes=KIB, written_tensor_bytes=KIB)
_START = Struct("<4sQI")
_MARK = b"TOY1"


def locate(path: str, like: Manifest | None = None) -> Manifest:
    with files.opened(path) as (fd, size_bytes):
        start = os.pread(fd, _START.size, 0)
        if len(start) < _START.size or not start.startswith(_MARK):
            raise ShardError("a shard is no toy", expected="its mark", got=repr(start[:4]), where=path)
        _, head_bytes, crc = _START.unpack(start)
        head = os.pread(fd, min(head_bytes, files.MAX_TEXT_BYTES), _START.size)
        if len(head) != head_bytes or zlib.crc32(head) != crc:
            raise ShardError("the head of a shard is damaged", where=path)
        facts: dict[str, Any] = json.loads(head)
        tensors, offset_bytes = TensorTable(path), _START.size + head_bytes
        for name, dtype, shape in facts["tensors"]:
            kind = TensorType(BY_NAME[dtype], tuple(shape))
            tensors.add(name, tensors.kind(kind), offset_bytes if kind.size_bytes else 0)
            offset_bytes += kind.size_bytes
        if offset_bytes != size_bytes:
            raise ShardError("a shard has another length", expected=str(offset_bytes), got=str(size_bytes), where=path)
        return Manifest(path, NAME, tensors, facts["strings"])


def read_back(meant: Manifest) -> None:
    if locate(meant.path) != meant:
        raise files.not_as_written(meant.path)


def size_at_most_bytes(spec: ShardSpec, *, crc: bool = False) -> int:
    return len(_start(spec)) + spec.specs.size_bytes


def reserve(fd: int, path: str, spec: ShardSpec) -> Manifest:
    files.check_names(path, [*spec.specs.names, *spec.strings])
    start = _start(spec)
    tensors, offset_bytes = TensorTable(path), len(start)
    for name, dtype, _, box in spec.specs:
        kind = TensorType(dtype, box.shape)
        tensors.add(name, tensors.kind(kind), offset_bytes if kind.size_bytes else 0)
        offset_bytes += kind.size_bytes
    files.write_all(fd, start, 0)
    os.ftruncate(fd, offset_bytes)
    return Manifest(path, NAME, tensors, dict(spec.strings))


def seal(fd: int, path: str, sums: Mapping[str, int] = NO_SUMS, *, crc: bool = False) -> None:
    if crc:
        raise UsageError("a toy has no checksum of the whole file", expected="no --crc", got="--crc", where=path)


def stored_sums(path: str) -> Mapping[str, int]:
    return NO_SUMS


def check_crc(path: str, on_bytes: OnBytes = uncounted) -> bool:
    return False


def _start(spec: ShardSpec) -> bytes:
    tensors = [(name, dtype.name, box.shape) for name, dtype, _, box in spec.specs]
    head = json.dumps({"tensors": tensors, "strings": dict(spec.strings)}).encode("utf-8", "surrogatepass")
    return _START.pack(_MARK, len(head), zlib.crc32(head)) + head
