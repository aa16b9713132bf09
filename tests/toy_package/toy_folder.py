"""A format whose checkpoints are folders: files of `toy_format`, and an index of the pieces that lie in them.

The index is JSON: for each tensor its type and shape, and for each of its pieces the file, what it is called there, and
the first element and the one after the last of its box. A piece by itself is called `<first element>@<name>`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reshard_mpi.errors import ShardError, told
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.manifest import Manifest, ShardSpec, Specs
from reshard_mpi.formats.tensor_table import ChunkedTensors, ListedChunk, TensorTable, TensorType
from reshard_mpi.sharding.box import Box
from support import toy_format
from support.toy_format import check_crc, seal, stored_sums

__all__ = ["check_crc", "seal", "stored_sums"]

NAME, INDEX = "toys", "toys.index.json"
INFO = toy_format.INFO._replace(name=NAME, module=__name__, suffixes=(".toypart",), marks=(INDEX,), is_folder=True)


def locate(path: str, like: Manifest | None = None) -> Manifest:
    file = toy_format.locate(path)
    tensors = TensorTable(path)
    for (name, start), entry in zip(map(_parted, file.tensors), file.tensors.values()):
        whole, low = start
        box = Box(low, tuple(map(sum, zip(low, entry.shape))))
        tensors.add_entry(entry._replace(name=name, box=box, global_shape=whole))
    return file._replace(format=NAME, tensors=tensors)


def read_back(meant: Manifest) -> None:
    if locate(meant.path) != meant:
        raise ShardError("a shard is not what was written", where=meant.path)


def size_at_most_bytes(spec: ShardSpec, *, crc: bool = False) -> int:
    return toy_format.size_at_most_bytes(_with_places(spec))


def reserve(fd: int, path: str, spec: ShardSpec) -> Manifest:
    toy_format.files.check_names(path, [*spec.specs.names, *spec.strings])
    toy_format.reserve(fd, path, _with_places(spec))
    return locate(path)


def files_of(folder: str) -> tuple[str, ...]:
    files = {piece[0] for tensor in _index(folder)["tensors"].values() for piece in tensor["pieces"]}
    return (str(Path(folder, INDEX)), *(str(Path(folder, name)) for name in sorted(files)))


def open_folder(folder: str) -> Manifest:
    facts, files, missing = _index(folder), dict[str, TensorTable](), []
    for path in files_of(folder)[1:]:
        try:
            files[Path(path).name] = toy_format.locate(path).tensors
        except ShardError as error:
            missing.append(f"{path}: {told(error)}")
    listed = ChunkedTensors(folder)
    listed.missing = tuple(missing)
    for name, tensor in facts["tensors"].items():
        pieces = [
            ListedChunk(Box(tuple(start), tuple(stop)), files[file], files[file].index_by_name[entry])
            for file, entry, start, stop in tensor["pieces"]
            if file in files
        ]
        try:
            listed.add_listed(name, BY_NAME[tensor["dtype"]], tuple(tensor["shape"]), pieces)
        except ValueError as error:
            raise ShardError("the index does not fit the files", got=str(error), where=folder) from None
    return Manifest(folder, NAME, listed, facts["strings"])


def file_name(target_rank: int, targets: int, prefix: str) -> str:
    return f"{prefix}part-{target_rank + 1}-of-{targets}.toypart"


def index(files: Sequence[Manifest]) -> bytes:
    tensors: dict[str, dict[str, Any]] = {}
    strings: dict[str, str] = {}
    for file in files:
        strings.update(file.strings)
        for name, entry in file.tensors.items():
            assert entry.box is not None and entry.global_shape is not None
            tensor = {"dtype": entry.dtype.name, "shape": entry.global_shape, "pieces": []}
            own = _called(name, entry.global_shape, entry.box.start)
            piece = [Path(file.path).name, own, entry.box.start, entry.box.stop]
            tensors.setdefault(name, tensor)["pieces"].append(piece)
    return json.dumps({"tensors": tensors, "strings": strings}).encode()


def _index(folder: str) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = json.loads(Path(folder, INDEX).read_text())
    except (OSError, ValueError) as error:
        raise ShardError("the index cannot be read", got=str(error), where=str(Path(folder, INDEX))) from None
    return facts


def _with_places(spec: ShardSpec) -> ShardSpec:
    """Return a shard whose tensors are called by their places too."""
    specs = spec.specs
    names = [_called(name, whole, box.start) for name, _, whole, box in specs]
    kinds = [TensorType.of_box(kind.dtype, Box.whole(kind.shape), kind.shape) for kind in specs.kinds]
    return spec._replace(tensors=Specs(names, kinds, specs.kind_ids))


def _called(name: str, whole: Sequence[int], start: Sequence[int]) -> str:
    return f"{json.dumps([list(whole), list(start)])}@{name}"


def _parted(called: str) -> tuple[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    place, _, name = called.partition("@")
    try:
        whole, start = json.loads(place)
    except ValueError:
        raise ShardError("a file of a toy folder has a tensor without a place", got=repr(called)) from None
    return name, (tuple(whole), tuple(start))
