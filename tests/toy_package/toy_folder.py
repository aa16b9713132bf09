"""Read and write folders of toys: files of pieces of tensors, and an index in JSON that lists the pieces.

A piece is called `[<shape of the whole>, <first element>]@<name>` in its file, so that it says itself where it lies.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toy_package import toy_format
from toy_package.toy_format import check_crc, seal, stored_sums

from reshard_mpi.errors import ShardError, told
from reshard_mpi.formats import structure
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.manifest import Manifest, ShardSpec, Specs
from reshard_mpi.formats.tensor_table import ChunkedTensors, ListedChunk, TensorTable, TensorType
from reshard_mpi.sharding.box import Box

__all__ = ["check_crc", "seal", "stored_sums"]

NAME, INDEX = "toys", "toys.index.json"
INFO = toy_format.INFO._replace(name=NAME, module=__name__, suffixes=(".toypart",), marks=(INDEX,), is_folder=True)
_MAX_INDEX_BYTES = 1 << 20
_WRONG = (ValueError, TypeError, LookupError, AttributeError, RecursionError)


def locate(path: str, like: Manifest | None = None) -> Manifest:
    file, tensors = toy_format.locate(path), TensorTable(path)
    for called, entry in file.tensors.items():
        place, _, name = called.partition("@")
        try:
            whole, start = map(tuple, json.loads(place))
            box = Box(start, tuple(low + length for low, length in zip(start, entry.shape, strict=True)))
            tensors.add_entry(entry._replace(name=name, box=box, global_shape=whole))
        except _WRONG as error:
            raise ShardError(f"{called!r} does not say where it lies", got=repr(error), where=path) from None
    return file._replace(format=NAME, tensors=tensors)


def read_back(meant: Manifest) -> None:
    if locate(meant.path) != meant:
        raise structure.not_as_written(meant.path)


def size_at_most_bytes(spec: ShardSpec, *, crc: bool = False) -> int:
    return toy_format.size_at_most_bytes(_with_places(spec))


def reserve(fd: int, path: str, spec: ShardSpec) -> Manifest:
    structure.check_names(path, [*spec.specs.names, *spec.strings])
    toy_format.reserve(fd, path, _with_places(spec))
    return locate(path)


def files_of(folder: str) -> tuple[str, ...]:
    tensors, _ = _read_index(folder)
    named = {file for _, _, pieces in tensors.values() for file, *_ in pieces}
    return (str(Path(folder, INDEX)), *(str(Path(folder, name)) for name in sorted(named)))


def open_folder(folder: str) -> dict[int, Manifest]:
    tensors, strings = _read_index(folder)
    listed, held, missing = ChunkedTensors(folder), dict[str, TensorTable](), []
    for path in files_of(folder)[1:]:
        try:
            held[Path(path).name] = toy_format.locate(path).tensors
        except ShardError as error:
            missing.append(f"{path}: {told(error)}")
    listed.missing = tuple(missing)
    try:
        for name, (dtype, shape, pieces) in tensors.items():
            chunks = [
                ListedChunk(Box(tuple(start), tuple(stop)), held[file], held[file].index_by_name[called])
                for file, called, start, stop in pieces
                if file in held
            ]
            listed.add_listed(name, BY_NAME[dtype], tuple(shape), chunks)
    except _WRONG as error:
        raise ShardError("the index does not fit the files", got=repr(error), where=folder) from None
    return {0: Manifest(folder, NAME, listed, strings)}


def file_name(target_rank: int, targets: int, prefix: str) -> str:
    return f"{prefix}part-{target_rank + 1}-of-{targets}.toypart"


def index_contents(held: Sequence[Manifest]) -> dict[str, bytes]:
    tensors: dict[str, Any] = {}
    strings: dict[str, str] = {}
    for file in held:
        strings.update(file.strings)
        for name, (_, dtype, _, _, box, whole) in file.tensors.items():
            assert box is not None and whole is not None  # as `locate` has found them
            piece = [Path(file.path).name, _called(name, whole, box), box.start, box.stop]
            tensors.setdefault(name, [dtype.name, whole, []])[2].append(piece)
    return {INDEX: json.dumps([tensors, strings]).encode()}


def _called(name: str, whole: Sequence[int], box: Box) -> str:
    return f"{json.dumps([whole, box.start])}@{name}"


def _with_places(spec: ShardSpec) -> ShardSpec:
    """Return the spec of a file whose tensors are called by their places too."""
    specs = spec.specs
    names = [_called(name, whole, box) for name, _, whole, box in specs]
    kinds = [TensorType.of_box(kind.dtype, Box.whole(kind.shape), kind.shape) for kind in specs.kinds]
    return spec._replace(tensors=Specs(names, kinds, specs.kind_ids))


def _read_index(folder: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what the index says: tensors and strings. What leads out of the folder is refused."""
    path = str(Path(folder, INDEX))
    with structure.opened(path) as file:
        content = file.read(0, _MAX_INDEX_BYTES)
    try:
        tensors, strings = json.loads(content)
        named = {file for _, _, pieces in tensors.values() for file, _, _, _ in pieces}
        if not all(map(structure.is_file_name, named)) or not all(type(text) is str for text in strings.values()):
            raise ValueError("a file that is not beside the index, or a string that is none")
    except _WRONG as error:
        raise ShardError("the index cannot be read", got=repr(error), where=path) from None
    return tensors, strings
