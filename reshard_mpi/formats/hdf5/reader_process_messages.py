"""Send and receive the messages between `reader_process` and its child (`send`, `receive`)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from reshard_mpi.errors import ShardError
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.hdf5 import native_names
from reshard_mpi.formats.locations import ByteRange, ByteRanges, LibraryRead
from reshard_mpi.formats.manifest import Manifest, ShardIdentity
from reshard_mpi.formats.tensor_table import TensorEntry, TensorTable
from reshard_mpi.sharding.box import Box

_LENGTH_BYTES = 8
# The largest number of tensors and strings of a shard, with the longest names, as JSON.
_MAX_VALUE_BYTES = 512 << 20

# Reads a box of a dataset: path, version, route, name of the element type, whether bytes are swapped, chunk, box.
Read = Callable[..., Any]


def send(fd: int, value: Any, payload: memoryview | None = None) -> None:
    """Send a JSON value, and then the bytes of `payload`. Raises BrokenPipeError if nobody reads them."""
    text = json.dumps(value).encode()
    for part in (memoryview(len(text).to_bytes(_LENGTH_BYTES, "little") + text), payload):
        while part:
            part = part[os.write(fd, part) :]


def receive(fd: int) -> Any:
    """Wait for a JSON value and return it. Raises EOFError if the sender has ended, ValueError if it is too long."""
    head = bytearray(_LENGTH_BYTES)
    receive_into(fd, memoryview(head))
    length_bytes = int.from_bytes(head, "little")
    if length_bytes > _MAX_VALUE_BYTES:
        raise ValueError(f"a value of {length_bytes} bytes")
    text = bytearray(length_bytes)
    receive_into(fd, memoryview(text))
    return json.loads(text)


def receive_into(fd: int, payload: memoryview) -> None:
    """Wait for bytes until `payload` is full. Raises EOFError if the sender has ended."""
    while payload:
        count = os.readv(fd, [payload])
        if not count:
            raise EOFError
        payload = payload[count:]


def from_manifest(manifest: Manifest) -> list[Any]:
    """Return a manifest that was made with the library as values for JSON."""
    return [[_from_entry(entry) for entry in manifest.tensors.values()], dict(manifest.strings), manifest.identity]


def to_manifest(path: str, size_bytes: int, values: list[Any], read: Read) -> Manifest:
    """Return the manifest of `path` that `from_manifest` turned into `values`.

    Args:
        read: reads what must be decoded.

    Raises ValueError or TypeError if the values are of no manifest, or place something outside a file of `size_bytes`
    bytes.
    """
    tensors, strings, identity = values
    entries = (_to_entry(path, size_bytes, read, *tensor) for tensor in tensors)
    return Manifest(
        path,
        native_names.NAME,
        TensorTable(path, entries),
        strings,
        ShardIdentity(*identity) if identity else None,
    )


def _from_entry(entry: TensorEntry) -> list[Any]:
    source: list[Any]
    if isinstance(entry.source, ByteRanges):
        places = [[part.offset_bytes, part.length_bytes] for part in entry.source.ranges]
        source = [places, entry.source.swapped]
    else:
        assert isinstance(entry.source, LibraryRead)  # the library gives no views
        _, version, route, _, swapped = entry.source.read.args  # type: ignore[attr-defined]
        content = entry.source
        source = [version, route, swapped, content.chunk, content.decoding_bytes, content.kept_bytes]
    start = entry.box.start if entry.box is not None else None
    return [entry.name, entry.dtype.name, entry.shape, source, start, entry.global_shape]


def _to_entry(
    path: str,
    size_bytes: int,
    read: Read,
    name: str,
    dtype_name: str,
    shape: list[int],
    source: list[Any],
    start: list[int] | None,
    global_shape: list[int] | None,
) -> TensorEntry:
    dtype = BY_NAME[dtype_name]
    box = Box(tuple(start), tuple(low + length for low, length in zip(start, shape))) if start is not None else None
    return TensorEntry(
        name,
        dtype,
        tuple(shape),
        _to_source(path, size_bytes, dtype_name, source, read),
        box,
        tuple(global_shape) if global_shape is not None else None,
    )


def _to_source(path: str, size_bytes: int, dtype_name: str, source: list[Any], read: Read) -> ByteRanges | LibraryRead:
    if len(source) == 2:
        places, swapped = source
        if any(offset < 0 or length < 0 or offset + length > size_bytes for offset, length in places):
            raise ValueError("a place outside the file")
        return ByteRanges(tuple(ByteRange(path, offset, length) for offset, length in places), swapped)
    version, route, swapped, chunk, decoding_bytes, kept_bytes = source
    decode = partial(read, path, tuple(version), tuple(route), dtype_name, swapped, tuple(chunk))
    return LibraryRead(path, decode, tuple(chunk), int(decoding_bytes), int(kept_bytes))


def from_error(error: ShardError) -> list[str]:
    return [error.problem, error.expected, error.got, error.where, error.remedy]


def to_error(values: list[str]) -> ShardError:
    problem, expected, got, where, remedy = values
    return ShardError(problem, expected=expected, got=got, where=where, remedy=remedy)
