"""Make tensors with their bytes, write and read them, for tests (`SampleTensor`)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np

from reshard_mpi.formats import structure
from reshard_mpi.formats.dtypes import DType
from reshard_mpi.formats.locations import ByteRanges, LibraryRead, StridedView
from reshard_mpi.formats.manifest import Manifest, ShardIdentity, ShardSpec, TensorSpec
from reshard_mpi.formats.protocol import Format, reserve_file, seal_file
from reshard_mpi.formats.tensor_table import TensorEntry
from reshard_mpi.sharding.box import Box


@dataclass(frozen=True, slots=True)
class SampleTensor:
    """A tensor and its row-major bytes, in this machine's byte order."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    content: bytes

    @classmethod
    def random(cls, name: str, dtype: DType, shape: tuple[int, ...], *, seed: int = 0) -> SampleTensor:
        """Return a tensor of random bits (of 0 and 1 for booleans), the same for the same arguments."""
        length_bytes = dtype.itemsize_bytes * math.prod(shape)
        content = Random(f"{seed} {name} {dtype} {shape}").randbytes(length_bytes)
        if dtype.name == "bool":
            content = bytes(byte & 1 for byte in content)
        return cls(name, dtype, shape, content)


@dataclass(frozen=True, slots=True)
class ShardContents:
    """The contents of a shard, payloads included: tensors by name in file order, and strings."""

    tensors: Mapping[str, SampleTensor]
    strings: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, tensors: Iterable[SampleTensor], strings: Mapping[str, str] | None = None) -> ShardContents:
        return cls({tensor.name: tensor for tensor in tensors}, dict(strings or {}))


def spec_of(contents: ShardContents, identity: ShardIdentity | None = None) -> ShardSpec:
    """Return the spec of a shard with these contents; its tensors are whole."""
    tensors = tuple(
        TensorSpec(tensor.name, tensor.dtype, tensor.shape, Box.whole(tensor.shape))
        for tensor in contents.tensors.values()
    )
    return ShardSpec(identity or ShardIdentity(0, 1, ""), tensors, contents.strings)


def payload(entry: TensorEntry) -> bytes:
    """Return the bytes of a located tensor, in this machine's byte order."""
    if isinstance(entry.source, LibraryRead):
        return entry.source.read(Box.whole(entry.shape)).tobytes()
    assert isinstance(entry.source, ByteRanges | StridedView)
    assert entry.stored is not None
    content = b"".join(_read(part.path, part.offset_bytes, part.length_bytes) for part in entry.stored.ranges)
    if isinstance(entry.source, StridedView) and content:
        element = np.dtype((np.void, entry.dtype.itemsize_bytes))
        content = np.ndarray(entry.shape, element, content, 0, entry.source.strides_bytes).tobytes()
    if entry.source.swapped:
        content = np.frombuffer(content, dtype=f"u{entry.dtype.part_bytes}").byteswap().tobytes()
    return content


def contents_of(manifest: Manifest) -> ShardContents:
    """Return the contents of a located shard, payloads included."""
    entries = manifest.tensors.values()
    tensors = (SampleTensor(entry.name, entry.dtype, entry.shape, payload(entry)) for entry in entries)
    return ShardContents.of(tensors, manifest.strings)


def fill(manifest: Manifest, contents: ShardContents) -> None:
    """Write the payloads of `contents` to the ranges that a reserved shard has for them."""
    for name, entry in manifest.tensors.items():
        assert isinstance(entry.source, ByteRanges), f"{name} is reserved without byte ranges"
        content = contents.tensors[name].content
        done = 0
        for part in entry.source.ranges:
            with Path(part.path).open("r+b") as file:
                file.seek(part.offset_bytes)
                file.write(content[done : done + part.length_bytes])
            done += part.length_bytes
        assert done == len(content), f"{name} has {len(content)} bytes and room for {done}"


def write(module: Format, path: str, contents: ShardContents, identity: ShardIdentity | None = None) -> Manifest:
    """Write a shard by the format: reserve it, write the payloads, seal it."""
    manifest = reserve_file(module, path, spec_of(contents, identity))
    fill(manifest, contents)
    seal_file(module, path)
    return manifest


def all_ranges(manifest: Manifest) -> Sequence[tuple[int, int]]:
    """Return the first byte, and the one after the last, of every byte range of a shard, in file order."""
    return sorted(
        (part.offset_bytes, part.offset_bytes + part.length_bytes)
        for entry in manifest.tensors.values()
        if isinstance(entry.source, ByteRanges)
        for part in entry.source.ranges
    )


def outside(ranges: Sequence[tuple[int, int]], size_bytes: int) -> list[int]:
    """Return the offsets of the bytes of a file that are in none of `ranges`."""
    payload = {offset for first, last in ranges for offset in range(first, last)}
    return [offset for offset in range(size_bytes) if offset not in payload]


def require_possible(manifest: Manifest, size_bytes: int) -> None:
    """Require that the tensors, texts and identity of a located shard are possible ones in a file of this size."""
    assert all(0 <= first <= last <= size_bytes for first, last in all_ranges(manifest))
    for entry in manifest.tensors.values():
        assert 0 < len(entry.name.encode()) <= structure.MAX_NAME_BYTES
        assert len(entry.shape) <= structure.MAX_DIMENSIONS
        lengths = (*entry.shape, *(entry.global_shape or ()), *(entry.box.start if entry.box else ()))
        assert all(type(length) is int and length >= 0 for length in lengths), lengths
        if entry.box is not None and entry.global_shape is not None:
            assert entry.box.shape == entry.shape and Box.whole(entry.global_shape).contains(entry.box)
    if manifest.identity is not None:
        rank, world_size, strategy = manifest.identity
        assert type(rank) is type(world_size) is int and 0 <= rank < world_size and type(strategy) is str
    assert all(type(text) is str for text in manifest.strings.values())
    assert len(manifest.tensors) == len({*manifest.tensors}), "a name twice"


def _read(path: str, offset_bytes: int, length_bytes: int) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.pread(fd, length_bytes, offset_bytes)
    finally:
        os.close(fd)
