"""Locating the tensors of a file that torch saved."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping

from reshard_mpi.errors import ShardError
from reshard_mpi.filesystem.file_kinds import START_BYTES
from reshard_mpi.formats import files, nest
from reshard_mpi.formats.columns import Kind, TensorEntry, Tensors
from reshard_mpi.formats.dtypes import DType
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.nest.trees import Value
from reshard_mpi.formats.torch import archive, legacy, structure
from reshard_mpi.formats.torch.content import Content
from reshard_mpi.formats.torch.dtensors import Whole, described
from reshard_mpi.formats.torch.legacy import of_pickles
from reshard_mpi.formats.torch.tensors import DistributedTensor, StoredTensor, is_tensor, place_of
from reshard_mpi.formats.torch.trainers import RankShare, require_weights, share_of
from reshard_mpi.formats.torch.zipped import of_archive

NAME = "torch"

# That so many tensors have a class or attributes of their own is said, and of how many more there are.
_MAX_BESIDES = 100


def locate(path: str, like: Manifest | None = None) -> Manifest:
    """Find the tensors of the file at `path` without executing anything, and without reading any payload.

    like: another shard; one of the same structure has its tensors at the same places.

    Names of nested dictionaries are joined by dots; the nest is kept as a string (`nest.NEST`). What is neither tensor
    nor plain data is left out and named. Raises ShardError if the file is not sound, or would run code.
    """
    with files.opened(path) as (fd, size_bytes):
        known = None if like is None else like.structure
        if like is not None and known is not None and structure.of_file(fd, size_bytes, like.tensors) == known:
            return like.at(path)
        found = _parsed(path, _content(fd, path, size_bytes))
        if found.identity is None:  # the files of different ranks say different ranks
            found = found._replace(structure=structure.of_file(fd, size_bytes, found.tensors))
    return found


def _parsed(path: str, content: Content) -> Manifest:
    """Return what the content of a file is."""
    strings = _own_strings(content)
    is_of_others = strings is None  # what this program has written may have settings of what it was made from
    if is_of_others:
        require_weights(content.root, path)
    try:
        flattened = nest.flatten(content.root, is_tensor)
    except nest.NestError as error:
        problem = f"a shard cannot be read: {error.problem}"
        raise ShardError(problem, got=error.got, where=path, remedy=error.remedy) from None
    found = flattened.tensors
    if strings is not None:
        # Its dictionaries are in the order of the nest, its storages in that of the shard.
        found = sorted(found, key=_storage_number)
    wholes, identity = described(found, path)
    tensors = Tensors(path)
    _add(tensors, found, content, wholes)
    if not tensors and flattened.left_out:
        raise ShardError(
            "a shard holds no tensor that can be read",
            expected="a state_dict()",
            got="; ".join(flattened.left_out[:3]),
            where=path,
            remedy="load it with torch, and save its state_dict()",
        )
    texts = flattened.strings if strings is None else strings
    besides = tuple(f"{name}: {tensor.besides}" for name, tensor in found if getattr(tensor, "besides", ""))
    left_out = (*flattened.left_out, *besides[:_MAX_BESIDES])
    part_of, to_have_all = share_of(content.root) if is_of_others else RankShare()
    return Manifest(path, NAME, tensors, texts, identity, left_out=left_out, part_of=part_of, to_have_all=to_have_all)


def read_back(meant: Manifest) -> None:
    """Read the structure of a file that was just written. Raises ShardError if it is not what was meant.

    All of its bytes but payloads are compared, and it is parsed as it will be later.
    """
    with files.opened(meant.path) as (fd, size_bytes):
        if structure.of_file(fd, size_bytes, meant.tensors) != meant.structure:
            raise files.not_as_written(meant.path)
    files.require_as_written(locate(meant.path)._replace(structure=meant.structure), meant)


def _content(fd: int, path: str, size_bytes: int) -> Content:
    try:
        start = os.pread(fd, START_BYTES, 0)
        if archive.is_archive(start):
            return of_archive(fd, path, size_bytes)
        if start.startswith(legacy.START):
            return of_pickles(fd, path, size_bytes)
    except OSError as error:
        raise ShardError("a shard cannot be read", got=str(error), where=path) from error
    raise files.other_kind(start, path, "a file that torch.save writes") or ShardError(
        "a shard is no file that torch.save writes",
        expected="a zip archive, or the older layout with its number",
        got=f"a file that begins with {start[:8]!r}",
        where=path,
        remedy="if it is a bare pickle or a tar file, load it with torch, and save its state_dict()",
    )


def _storage_number(named: tuple[str, Value]) -> int:
    key = named[1].storage.key if type(named[1]) is StoredTensor else ""
    return int(key) if key.isdecimal() and len(key) < 20 else 0


def _add(tensors: Tensors, found: Iterable[tuple[str, Value]], content: Content, wholes: Mapping[str, Whole]) -> None:
    """Add the tensors of the file, each with its part of the whole where the file says that it has one."""
    starts, path = content.starts, tensors.path
    # Most tensors are like others before, so what is known of a kind is looked up.
    known: dict[tuple[DType, tuple[int, ...], tuple[int, ...], Whole | None], tuple[Kind, int, bool]] = {}
    for name, tensor in found:
        stored: StoredTensor = tensor.local if type(tensor) is DistributedTensor else tensor
        storage, dtype, offset, shape, strides, _ = stored
        whole = wholes.get(name)
        alike = known.get((dtype, shape, strides, whole))
        if alike is None:
            kind = Kind(dtype, shape, *whole) if whole is not None else Kind(dtype, shape)
            alike = known[dtype, shape, strides, whole] = kind, tensors.kind(kind), stored.is_row_major
        kind, number, is_row_major = alike
        swapped = content.swapped and dtype.part_bytes > 1
        start = starts[storage.key] + offset * dtype.itemsize_bytes
        if not kind.size_bytes:
            tensors.add(name, number, 0)
        elif is_row_major and not swapped:
            tensors.add(name, number, start)
        else:
            source = place_of(path, stored, start, swapped)
            assert source is not None
            tensors.add_entry(TensorEntry(name, dtype, shape, source, kind.box, kind.global_shape))


def _own_strings(content: Content) -> Mapping[str, str] | None:
    """Return the strings with which this program wrote the file; None if others wrote it, or changed it."""
    if content.own_record is None:
        return None
    try:
        record = json.loads(content.own_record)
    except (ValueError, RecursionError):
        return None
    match record:
        case {"pickle_crc": int() as crc, "strings": dict() as strings} if crc == content.pickle_crc:
            if all(type(text) is str for text in strings.values()):
                return strings
    return None
