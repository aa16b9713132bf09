"""Open a MindFormers folder: files, and an index of slices (`open_folder`).

    iteration_00000002/metadata.json                        which file holds which slice (see `mindformers_index`)
                       net-model-0000000-0000004.safetensors    of the ranks, or of so many files without redundancy
                       net-opt-0000000-0000004.safetensors      the optimizer's, likewise
                       common.json                          numbers of the training: steps, loss scale, batch size

They are only read. A slice that several files hold is taken from any of them. What the index does not list, such as
step counters among the tensors, is taken only if it is a single number: anything else may be a slice. `common.json` is
kept as plain data under the key `common` (see `nest`). A training on one device saves no index; its files hold whole
tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from reshard_mpi.errors import ShardError, told
from reshard_mpi.filesystem import source_files
from reshard_mpi.filesystem.source_files import FileVersion
from reshard_mpi.formats import safetensors, structure
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.nest import flatten_tree, nodes
from reshard_mpi.formats.nest.nodes import Dict, NestTensor, Value, is_nest_tensor, no_constant
from reshard_mpi.formats.protocol import OnBytes, uncounted
from reshard_mpi.formats.protocol import no_sums as stored_sums
from reshard_mpi.formats.safetensors import mindformers_count, mindformers_index
from reshard_mpi.formats.safetensors.mindformers_index import INDEX, EqualCut, SlicedTensor
from reshard_mpi.formats.tensor_table import ChunkedTensors, ListedChunk, TensorTable
from reshard_mpi.sharding.box import Box
from reshard_mpi.text import KIB, MIB

NAME, _SUFFIX = "mindformers", ".safetensors"
COMMON = "common.json"
# The dictionary of the nest that has what it says: the optimizer may have a tensor `global_step` of its own.
_COMMON_KEY = "common"
# MindFormers writes five numbers there.
_MAX_COMMON_BYTES = 64 * KIB
_REMEDY = "restore index and files of one and the same save"


def locate(path: str, like: Manifest | None = None) -> Manifest:
    """Find the tensors of one of the files, as of any safetensors file."""
    return safetensors.locate(path, like)._replace(format=NAME)


def check_crc(path: str, on_bytes: OnBytes = uncounted) -> bool:
    """Tell whether a file has MindSpore's checksum. Raises ChecksumError if it does not fit that."""
    return path.endswith(_SUFFIX) and safetensors.check_crc(path, on_bytes)


class _FolderContents(NamedTuple):
    """The files and index of a folder."""

    tensors: Mapping[str, SlicedTensor] | None  # the tensors listed by the index, None if there is no index
    files: Sequence[str]  # the names of all files with tensors
    has_common: bool  # whether `COMMON` lies there


# Whoever asks for the files of a checkpoint opens it next: its index is kept until then, by path and version.
_kept: dict[tuple[str, FileVersion], Mapping[str, SlicedTensor]] = {}


def files_of(folder: str) -> tuple[str, ...]:
    """Return the paths of the index, of `COMMON`, and of all files that the index names or that are called like them.

    Raises ShardError if the index is damaged, or is not there though several files are.
    """
    listing = _listing(folder)
    beside = [*([INDEX] if listing.tensors is not None else []), *([COMMON] if listing.has_common else [])]
    return tuple(str(Path(folder, name)) for name in (*beside, *listing.files))


def open_folder(folder: str) -> dict[int, Manifest]:
    """Return the tensors of the checkpoint as lists of slices, and what `COMMON` says as a nest.

    Raises ShardError if index and files do not fit each other, or a tensor that is not listed may be a slice.
    """
    listing = _listing(folder)
    _kept.clear()
    tensors = listing.tensors or {}
    located, missing = dict[str, TensorTable](), dict[str, str]()
    for file in listing.files:
        path = str(Path(folder, file))
        try:
            located[file] = safetensors.locate(path).tensors
        except ShardError as error:
            if listing.tensors is None:
                raise
            missing[file] = f"{path}: {told(error)}"
    listed = ChunkedTensors(folder)
    listed.missing = tuple(missing.values())
    boxes: dict[EqualCut, list[Box]] = {}
    for name, tensor in tensors.items():
        cut = tensor.cut
        own_boxes = boxes.get(cut) or boxes.setdefault(cut, list(cut.boxes()))
        listed.add_listed(name, cut.dtype, cut.shape, list(_pieces(name, tensor, own_boxes, located)))
    for name, pieces in _others(tensors, located, are_whole=listing.tensors is None).items():
        held = pieces[0].tensors
        kind = held.kinds[held.kind_ids[pieces[0].number]]
        try:
            listed.add_listed(name, kind.dtype, kind.shape, pieces)
        except ValueError as error:
            raise ShardError(
                f"files of a checkpoint contradict each other on {name!r}", got=str(error), where=folder
            ) from None
    strings = _strings(folder, listed) if listing.has_common else {}
    return {0: Manifest(folder, NAME, listed, strings)}


def _listing(folder: str) -> _FolderContents:
    """Return the files and index of a folder. Raises ShardError as `files_of` does."""
    lying = source_files.names(folder)
    counts = {name: count for name in lying if (count := mindformers_count(name)) is not None}
    if INDEX in lying:
        tensors = _indexed(str(Path(folder, INDEX)))
        named = {file for tensor in tensors.values() for holders in tensor.holders for file in holders}
        return _FolderContents(tensors, sorted(named | counts.keys()), COMMON in lying)
    several = next((name for name in sorted(counts) if counts[name] != 1), None)
    if several is not None or not counts:
        raise ShardError(
            "a MindFormers checkpoint does not say how it is sharded",
            expected=f"{INDEX}, which is there unless one device alone has saved it",
            got=f"files such as {several}" if several else "no files of one",
            where=folder,
            remedy="restore it",
        )
    return _FolderContents(None, sorted(counts), COMMON in lying)


def _indexed(path: str) -> Mapping[str, SlicedTensor]:
    """Return the tensors of an index, if it has just been read without reading it again."""
    with structure.opened(path) as file:
        key = path, file.version
        if key not in _kept:
            _kept.clear()
            _kept[key] = mindformers_index.read(file)
    return _kept[key]


def _pieces(
    name: str, tensor: SlicedTensor, boxes: Sequence[Box], located: Mapping[str, TensorTable]
) -> Iterator[ListedChunk]:
    """Yield the slices of a tensor in the files that can be read. Raises ShardError if a file has them not."""
    taken: dict[str, int] = {}
    expected = tensor.cut.dtype, tensor.cut.slice_shape
    for number, (box, holders) in enumerate(zip(boxes, tensor.holders)):
        for file in holders:
            if taken.setdefault(file, number) != number:
                raise ShardError(
                    f"the index of a checkpoint says that {file} holds two slices of {name!r}",
                    expected="one: a file has a name once",
                    got=f"slices {taken[file]} and {number}",
                    where=located[file].path if file in located else file,
                    remedy=_REMEDY,
                )
            if file not in located:
                continue
            held = located[file]
            own = held.index_by_name.get(name)
            kind = None if own is None else held.kinds[held.kind_ids[own]]
            if own is None or kind is None or (kind.dtype, kind.shape) != expected:
                raise ShardError(
                    f"slice {number} of {name!r} is not what the index of the checkpoint says",
                    expected=f"{expected[0]} {list(expected[1])}",
                    got="no such tensor" if kind is None else f"{kind.dtype} {list(kind.shape)}",
                    where=held.path,
                    remedy=_REMEDY,
                )
            yield ListedChunk(box, held, own)


def _others(
    tensors: Mapping[str, SlicedTensor], located: Mapping[str, TensorTable], *, are_whole: bool
) -> dict[str, list[ListedChunk]]:
    """Return the tensors that are not listed, by name. are_whole: there is no index, so all are whole.

    Raises ShardError if one may be a slice, or a file holds what the index says is in others.
    """
    listed: dict[str, set[str]] = {file: set() for file in located}
    for name, tensor in tensors.items():
        for file in {file for holders in tensor.holders for file in holders}:
            listed.get(file, set()).add(name)
    others: dict[str, list[ListedChunk]] = {}
    for file, held in located.items():
        for name in held.keys() - listed[file] if len(held) > len(listed[file]) else ():
            number = held.index_by_name[name]
            shape = held.kinds[held.kind_ids[number]].shape
            if name in tensors:
                raise ShardError(
                    f"{name!r} lies in a file that the index of the checkpoint does not name for it",
                    expected=f"it in {tensors[name].holders[0][0]} and others that are named",
                    got=f"it in {file} too",
                    where=held.path,
                    remedy="remove what is left from another save",
                )
            if math.prod(shape) != 1 and not are_whole:
                raise ShardError(
                    f"{name!r} may be a slice: the index of the checkpoint does not list it",
                    expected="tensors that it lists, or single numbers",
                    got=f"a tensor of shape {list(shape)}",
                    where=held.path,
                    remedy="save the checkpoint again with the optimizer, so that all is listed",
                )
            others.setdefault(name, []).append(ListedChunk(Box.whole(shape), held, number))
    return others


def _strings(folder: str, tensors: TensorTable) -> Mapping[str, str]:
    """Return the strings of a checkpoint: its nest, if `COMMON` says anything.

    Raises ShardError if it is damaged, or of another save.
    """
    path = str(Path(folder, COMMON))
    with structure.opened(path) as file:
        content = file.read(0, min(file.size_bytes, _MAX_COMMON_BYTES + 1))
    try:
        if len(content) > _MAX_COMMON_BYTES:
            raise ValueError(f"more than {_MAX_COMMON_BYTES} bytes")
        root = json.loads(
            content.decode(), object_pairs_hook=_dictionary, parse_constant=no_constant, parse_float=_finite
        )
        if type(root) is not Dict:
            raise ValueError("no object")
        if _COMMON_KEY in tensors:
            raise ValueError(f"a tensor called {_COMMON_KEY!r}, in the place of what the file says")
        leaves: list[Value] = [part for name in tensors for part in (name, NestTensor(name))]
        tree = Dict([_COMMON_KEY, root, *leaves])
        strings = flatten_tree.flatten(tree, is_nest_tensor, has_order=False).strings
    except (ValueError, RecursionError, nodes.NestError) as error:
        raise ShardError(
            f"{COMMON} of a checkpoint cannot be read",
            expected="an object of numbers and texts as JSON, each name once",
            got=str(error),
            where=path,
        ) from None
    _require_step_of_folder(root, folder)
    return strings


def _require_step_of_folder(common: Dict, folder: str) -> None:
    """Raise ShardError if the folder is named after another step: `COMMON` is of another save.

    MindFormers names it after `step_num`, which counts all steps, or where that counts those of an epoch after
    `global_step` (save_checkpoint and its callbacks, master of 2026-01).
    """
    named = structure.step_in_name(folder, "iteration_", 8)
    steps = [value for key in ("step_num", "global_step") if type(value := common.get(key)) is int]
    if named is not None and steps and named not in steps:
        raise ShardError(
            f"{COMMON} of a checkpoint is of another save than its folder",
            expected=f"step {named}, after which the folder is named",
            got=f"step {steps[-1]}",
            where=str(Path(folder, COMMON)),
            remedy="copy or restore all files of one save; if only the folder has been renamed, give it its own name",
        )


def _dictionary(pairs: list[tuple[str, Any]]) -> Dict:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a name twice")
    return Dict.of(pairs)


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text}, which is too large")
    return number
