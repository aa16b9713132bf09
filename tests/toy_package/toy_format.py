"""Read and write toys: a mark, length and CRC-32 of a head, the head in JSON, and the payloads one after another."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from struct import Struct

from reshard_mpi.errors import ShardError, TargetError, UsageError
from reshard_mpi.formats import structure
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.manifest import Manifest, ShardSpec
from reshard_mpi.formats.protocol import NO_SUMS, no_crc, no_sums
from reshard_mpi.formats.registry import FormatInfo
from reshard_mpi.formats.tensor_table import TensorTable, TensorType

NAME = "toy"
INFO = FormatInfo(NAME, __name__, (".toy",), read_tensor_bytes=1024, written_tensor_bytes=1024)
_START = Struct("<4sQI")
_MARK = b"TOY1"
_MAX_HEAD_BYTES = 1 << 20  # JSON takes up to 30 times as much memory once it is parsed


def locate(path: str, like: Manifest | None = None) -> Manifest:
    with structure.opened(path) as file:
        start = file.read(0, _START.size)
        if len(start) < _START.size or not start.startswith(_MARK):
            raise ShardError("a shard is no toy", expected="its mark", got=repr(start[:4]), where=path)
        _, head_bytes, crc = _START.unpack(start)
        head = file.read(_START.size, min(head_bytes, _MAX_HEAD_BYTES))
    if len(head) != head_bytes or zlib.crc32(head) != crc:
        raise ShardError("the head of a shard is damaged", where=path)
    kinds, strings = _read_head(head, path)
    end = _START.size + head_bytes + sum(kind.size_bytes for kind in kinds.values())
    if end != file.size_bytes:
        raise ShardError("a shard has another length", expected=str(end), got=str(file.size_bytes), where=path)
    return _placed(path, _START.size + head_bytes, kinds.items(), strings)


def size_at_most_bytes(spec: ShardSpec, *, crc: bool = False) -> int:
    return len(_start(spec, "")) + spec.specs.size_bytes


def reserve(fd: int, path: str, spec: ShardSpec) -> Manifest:
    structure.check_names(path, [*spec.specs.names, *spec.strings])
    start = _start(spec, path)
    structure.write_all(fd, start, 0)
    os.ftruncate(fd, len(start) + spec.specs.size_bytes)
    kinds = ((name, TensorType(dtype, box.shape)) for name, dtype, _, box in spec.specs)
    return _placed(path, len(start), kinds, spec.strings)


def seal(fd: int, path: str, sums: Mapping[str, int] = NO_SUMS, *, crc: bool = False) -> None:
    if crc:
        raise UsageError("a toy has no checksum of the whole file", expected="no --crc", got="--crc", where=path)


def read_back(meant: Manifest) -> None:
    if locate(meant.path) != meant:
        raise structure.not_as_written(meant.path)


stored_sums, check_crc = no_sums, no_crc


def _placed(path: str, start: int, kinds: Iterable[tuple[str, TensorType]], strings: Mapping[str, str]) -> Manifest:
    """Return a shard whose payloads begin at byte `start`."""
    tensors = TensorTable(path)
    for name, kind in kinds:
        tensors.add(name, tensors.kind(kind), start)
        start += kind.size_bytes
    return Manifest(path, NAME, tensors, dict(strings))


def _start(spec: ShardSpec, path: str) -> bytes:
    tensors = [(name, dtype.name, box.shape) for name, dtype, _, box in spec.specs]
    head = json.dumps([tensors, dict(spec.strings)]).encode()
    if len(head) > _MAX_HEAD_BYTES:
        raise TargetError("a toy has too many tensors", expected=f"a head of {_MAX_HEAD_BYTES} bytes", where=path)
    return _START.pack(_MARK, len(head), zlib.crc32(head)) + head


def _read_head(head: bytes, path: str) -> tuple[dict[str, TensorType], dict[str, str]]:
    """Return what a head says: tensors and strings. Anybody may have written it, so all of it is checked."""
    try:
        tensors, strings = json.loads(head)
        kinds = {name: TensorType(BY_NAME[dtype], tuple(shape)) for name, dtype, shape in tensors}
        lengths = [len(text.encode()) for text in (*kinds, *strings, *strings.values())]  # fails for what is no text
        if len(kinds) < len(tensors) or kinds.keys() & strings.keys() or not all(map(_is_sound, kinds.values())):
            raise ValueError("a name that is given twice, or a shape that cannot be")
        if not all(0 < length <= structure.MAX_NAME_BYTES for length in lengths[: len(kinds) + len(strings)]):
            raise ValueError("a name of an impossible length")
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ShardError("the head of a shard says what cannot be", got=repr(error), where=path) from None
    return kinds, strings


def _is_sound(kind: TensorType) -> bool:
    return len(kind.shape) <= structure.MAX_DIMENSIONS and all(
        type(length) is int and length >= 0 for length in kind.shape
    )
