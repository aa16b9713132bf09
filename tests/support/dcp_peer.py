"""Folders of torch.distributed.checkpoint by other means than the format under test: zipfile and the standard pickler.

The classes of its metadata are stand-ins with their names; torch itself is not needed.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reshard_mpi.checkpoints import discovery
from reshard_mpi.checkpoints.opening import open_source
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.runs.planner import Planner
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.strategy import unsharded
from reshard_mpi.testing.checkpoints import ArraysByName, load_shard
from reshard_mpi.testing.sample_tensors import SampleTensor
from support import torch_peer
from support.torch_peer import STAND_INS, Tensor


class Size(tuple[int, ...]):
    def __reduce__(self) -> tuple[Any, ...]:
        return Size, (tuple(self),)


@dataclass
class ChunkStorageMetadata:
    offsets: Size
    sizes: Size


class _MEM_FORMAT_ENCODING(Enum):  # noqa: N801 - torch's own name
    TORCH_CONTIGUOUS_FORMAT = 0


def _get_layout(name: str) -> Layout:
    return Layout()


class Layout:
    def __reduce__(self) -> tuple[Any, ...]:
        return _get_layout, ("torch.strided",)


@dataclass
class TensorProperties:
    dtype: Any

    def __getstate__(self) -> tuple[Any, ...]:
        return self.dtype, LAYOUT, False, _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT, False

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype, _, *rest = state
        assert rest == [False, _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT, False]


@dataclass
class TensorStorageMetadata:
    properties: TensorProperties
    size: Size
    chunks: list[ChunkStorageMetadata]


@dataclass
class BytesStorageMetadata:
    pass


@dataclass
class Metadata:
    state_dict_metadata: dict[str, Any]
    planner_data: Any
    storage_data: dict[Any, Any]
    storage_meta: Any = None
    version: Any = "1.0.0"


@dataclass(frozen=True)
class MetadataIndex:
    fqn: Any
    index: Any = None
    offset: Any = None

    def __hash__(self) -> int:
        return id(self)


@dataclass
class _StorageInfo:
    relative_path: Any
    offset: Any
    length: Any


LAYOUT = Layout()
METADATA, FILESYSTEM = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_PLACES = {
    METADATA: (
        *(ChunkStorageMetadata, TensorProperties, TensorStorageMetadata, BytesStorageMetadata, Metadata),
        *(MetadataIndex, _MEM_FORMAT_ENCODING),
    ),
    FILESYSTEM: (_StorageInfo,),
    "torch.serialization": (_get_layout,),
    "torch": (Size,),
}


def _modules() -> dict[str, types.ModuleType]:
    modules = dict(STAND_INS)
    for name, members in _PLACES.items():
        module = modules.setdefault(name, types.ModuleType(name))
        for member in members:
            member.__module__ = name  # type: ignore[attr-defined]
            setattr(module, member.__name__, member)
    return modules


MODULES = _modules()
# An element type of torch that no other format has.
quantized = torch_peer._Element("quint4x2")
quantized.__module__ = "torch"  # type: ignore[attr-defined]
MODULES["torch"].quint4x2 = quantized  # type: ignore[attr-defined]
Spoil = Callable[[Metadata], object]


class Listed(NamedTuple):
    """A tensor: its type, its shape, and the pieces in the files they lie in, each with its first element."""

    dtype: str
    shape: tuple[int, ...]
    pieces: Sequence[tuple[str, tuple[int, ...], SampleTensor]]


def item(value: Any) -> bytes:
    """Return an archive as torch.save writes it, but for the padding."""
    stream = io.BytesIO()
    torch_peer.save(stream, value)  # type: ignore[arg-type]
    return stream.getvalue()


def transposed(sample: SampleTensor) -> Tensor:
    """Return a tensor of two dimensions whose elements lie column by column."""
    rows, columns = sample.shape
    size = sample.dtype.itemsize_bytes
    elements = [sample.content[at : at + size] for at in range(0, len(sample.content), size)]
    content = b"".join(elements[row * columns + column] for column in range(columns) for row in range(rows))
    made = torch_peer.tensor(SampleTensor(sample.name, sample.dtype, (columns, rows), content), "0")
    stored, offset, _, _, *rest = made.args
    return Tensor(made.make, stored, offset, (rows, columns), (1, rows), *rest)


def write(
    folder: Path,
    tensors: Mapping[str, Listed],
    objects: Mapping[str, tuple[str, Any]] | None = None,
    *,
    paths: Mapping[str, tuple[str | int, ...]] | None = None,
    made: Callable[[SampleTensor], Any] = lambda sample: torch_peer.tensor(sample, "0"),
    spoil: Spoil = lambda _: None,
    protocol: int = 4,
) -> None:
    """Write a checkpoint. made: what is saved of a piece; spoil: changes the metadata before it is written."""
    contents: dict[str, bytes] = {}
    places: dict[Any, Any] = {}
    listed: dict[str, Any] = {}

    def add(key: MetadataIndex, file: str, value: Any) -> None:
        content, before = item(value), contents.get(file, b"")
        places[key] = _StorageInfo(file, len(before), len(content))
        contents[file] = before + content

    for name, (file, value) in (objects or {}).items():
        listed[name] = BytesStorageMetadata()
        add(MetadataIndex(name), file, value)
    for name, tensor in tensors.items():
        chunks = []
        for number, (file, offsets, sample) in enumerate(tensor.pieces):
            chunks.append(ChunkStorageMetadata(Size(offsets), Size(sample.shape)))
            add(MetadataIndex(name, number, Size(offsets)), file, made(sample))
        properties = TensorProperties(getattr(MODULES["torch"], tensor.dtype))
        listed[name] = TensorStorageMetadata(properties, Size(tensor.shape), chunks)
    for file, content in contents.items():
        (folder / file).write_bytes(content)
    metadata = Metadata(listed, paths, places)
    spoil(metadata)
    (folder / ".metadata").write_bytes(dumps(metadata, protocol))


def dumps(value: Any, protocol: int = 4, *, in_c: bool = True) -> bytes:
    """Return the pickle of metadata, by the pickler that torch uses or by the one in Python."""
    with torch_peer.in_place(MODULES):
        if in_c:
            return pickle.dumps(value, protocol)
        stream = io.BytesIO()
        pickle._Pickler(stream, protocol).dump(value)  # type: ignore[attr-defined]
        return stream.getvalue()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return getattr(MODULES[module], name)


class Checkpoint(NamedTuple):
    """What a folder holds: whole tensors as their row-major bytes, objects, and paths."""

    tensors: dict[str, SampleTensor]
    objects: dict[str, Any]
    paths: dict[str, tuple[str | int, ...]]
    metadata: Metadata


def read(folder: Path) -> Checkpoint:
    """Read a checkpoint whose items are row-major, as torch does: by its metadata, an item at a time."""
    metadata = _Unpickler(io.BytesIO((folder / ".metadata").read_bytes())).load()
    places = {(key.fqn, key.offset): place for key, place in metadata.storage_data.items()}
    tensors, objects = {}, {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            objects[name] = torch_peer.load(_item(folder, places[name, None]))
            continue
        whole, dtype = None, BY_NAME[entry.properties.dtype.name]
        for chunk in entry.chunks:
            made = torch_peer.load(_item(folder, places[name, chunk.offsets]), has_sums=False)
            sample = torch_peer.sample_of(name, made)
            assert (sample.dtype, sample.shape) == (dtype, tuple(chunk.sizes))
            element = np.dtype((np.void, dtype.itemsize_bytes))
            whole = np.zeros(entry.size, element) if whole is None else whole
            region = tuple(slice(low, low + length) for low, length in zip(chunk.offsets, chunk.sizes))
            whole[(..., *region)] = np.frombuffer(sample.content, element).reshape(sample.shape)
        assert whole is not None
        tensors[name] = SampleTensor(name, dtype, tuple(entry.size), whole.tobytes())
    return Checkpoint(tensors, objects, metadata.planner_data, metadata)


def _item(folder: Path, place: _StorageInfo) -> Any:
    content = (folder / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
    assert len(content) == place.length
    return io.BytesIO(content)


def arrays_of(folder: Path) -> ArraysByName:
    """Return the whole tensors of a checkpoint."""
    source = open_source(discovery.find_shards(str(folder)), None)
    planner = Planner(source, unsharded())
    return load_shard(planner.plan(0), limits=planner.limits)


def sample(array: np.ndarray[Any, Any]) -> SampleTensor:
    return SampleTensor("", BY_NAME[array.dtype.name], array.shape, array.tobytes())


def listed(array: np.ndarray[Any, Any], pieces: list[tuple[str, Box]]) -> Listed:
    """Return a tensor whose pieces lie in these files."""
    parts = [
        (file, box.start, sample(np.array(array[tuple(map(slice, box.start, box.stop))], order="C").reshape(box.shape)))
        for file, box in pieces
    ]
    return Listed(array.dtype.name, array.shape, parts)
