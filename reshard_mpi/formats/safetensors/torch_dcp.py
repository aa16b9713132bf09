"""Open torch's DCP checkpoints in safetensors, not yet consolidated (`open_folder`).

`HuggingFaceStorageWriter(save_distributed=True)` writes for each rank, counted from 1, a file of what that rank saves,
or several if names are dealt out to files: `shard-00001-model-00001-of-00002.safetensors`, with the rank, the number of
the file and the number of files. A file says in its metadata (`DCP_SHARDING_INFO`) at which element each of its tensors
begins in the whole one. There is no index, and nothing tells how large a tensor is, or how many files there were: the
size is as far as pieces reach. So without its last files a checkpoint looks complete, and smaller; the user must say
how many files there were (`FormatInfo.knows_file_count`), and numbers that are missing before the last are refused.
Facts are of torch 2.13. The form is only read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from reshard_mpi.errors import ShardError
from reshard_mpi.filesystem import source_files
from reshard_mpi.formats import safetensors, structure
from reshard_mpi.formats.dtypes import DType
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.protocol import no_crc as check_crc
from reshard_mpi.formats.protocol import no_sums as stored_sums
from reshard_mpi.formats.safetensors import file_header
from reshard_mpi.formats.safetensors.file_header import SHARDING
from reshard_mpi.formats.safetensors.json_reader import JsonReader, as_numbers, as_object, shown
from reshard_mpi.formats.tensor_table import ChunkedTensors, ListedChunk, TensorTable
from reshard_mpi.sharding.box import Box
from reshard_mpi.text import KIB, MIB, shortened

_FIELD = "saved_offsets"


def saved_offsets(text: str, path: str) -> dict[str, tuple[int, ...]]:
    """Return where each tensor begins in the whole one. path: of the file. Raises ShardError if the text is damaged."""
    content = text.encode()
    reader = JsonReader(
        lambda start, length_bytes: content[start : start + length_bytes],
        *(path, 0, len(content), "what a file says of its pieces"),
    )
    offsets: dict[str, tuple[int, ...]] = {}
    for name in reader.members():
        place = reader.value()
        reader.require_new(name, offsets, f"a file says twice where {shown(name)} lies")
        fields = as_object(place)
        start = as_numbers(fields[_FIELD]) if fields is not None and fields.keys() == {_FIELD} else None
        if start is None:
            raise reader.damage(
                f"a file does not say where {name!r} lies",
                expected=f"{_FIELD} alone: whole numbers, 0 or more",
                got=shown(place),
            )
        offsets[name] = start
    reader.require_end()
    return offsets


NAME, _SUFFIX = "dcp-safetensors", ".safetensors"
# Number of the rank, then number and count of its files.
_PART = re.compile(r"shard-(\d{5,9})-model-(\d{5,9})-of-(\d{5,9})\.safetensors")
_MAX_LENGTH = 1 << 62
_MAX_NAMED = 3
# What a piece takes in a list, with its number and its share of boxes.
_PIECE_BYTES = 120
_REMEDY = "copy the folder again, all files of it"


def locate(path: str, like: Manifest | None = None) -> Manifest:
    """Find the pieces of tensors in one of the files, as of any safetensors file."""
    return safetensors.locate(path)._replace(format=NAME)


def files_of(folder: str) -> tuple[str, ...]:
    """Return the paths of all files, by their numbers.

    Raises ShardError if numbers are missing among them, or other safetensors files lie beside them.
    """
    lying = sorted(name for name in source_files.names(folder) if name.endswith(_SUFFIX))
    numbers = {name: tuple(map(int, match.groups())) for name in lying if (match := _PART.fullmatch(name))}
    others = [name for name in lying if name not in numbers]
    if others:
        raise ShardError(
            "other files lie beside those of a distributed checkpoint",
            expected="files such as shard-00001-model-00001-of-00001.safetensors alone: torch reads all that lie there",
            got=shortened(others, _MAX_NAMED),
            where=folder,
            remedy="move what does not belong to it to another folder",
        )
    _require_numbers(numbers, folder)
    return tuple(str(Path(folder, name)) for name in sorted(numbers, key=numbers.__getitem__))


def _require_numbers(numbers: Mapping[str, tuple[int, ...]], folder: str) -> None:
    """Raise ShardError if the numbers of files do not begin at 1, leave one out, or are of several checkpoints.

    Args:
        numbers: of each file, those of its rank, of the file, and how many files the names are dealt out to.
    """
    totals = sorted({total for _, _, total in numbers.values()})
    if len(totals) > 1:
        examples = [next(name for name in numbers if numbers[name][2] == total) for total in totals]
        raise ShardError(
            "files of several distributed checkpoints lie together",
            expected="names that end in one and the same number",
            got=" and ".join(examples[:_MAX_NAMED]),
            where=folder,
            remedy="remove those that are left from another save",
        )
    _require_all("the files of rank", {rank for rank, _, _ in numbers.values()}, None, folder)
    _require_all("file", {number for _, number, _ in numbers.values()}, totals[0] if totals else 1, folder)


def _require_all(what: str, numbers: set[int], total: int | None, folder: str) -> None:
    """Raise ShardError unless these are the numbers from 1 up to `total`; None: up to the highest of them."""
    last = max(numbers, default=1) if total is None else total
    missing = next((number for number in range(1, last + 1) if number not in numbers), None)
    if missing is not None or min(numbers) < 1 or max(numbers) > last:
        raise ShardError(
            f"a distributed checkpoint lacks {what} {missing}" if missing else "files have impossible numbers",
            expected=f"numbers from 1 to {last}",
            got=f"{len(numbers)} numbers, from {min(numbers, default=0)} to {max(numbers, default=0)}",
            where=folder,
            remedy=_REMEDY,
        )


def open_folder(folder: str) -> dict[int, Manifest]:
    """Return the tensors of the checkpoint as lists of pieces.

    Raises ShardError if a file is damaged, since nothing else tells what it held; if one does not say where its tensors
    lie, or files contradict each other.
    """
    pieces: dict[str, list[ListedChunk]] = {}
    budget_bytes = structure.MAX_KEPT_BYTES
    before: TensorTable | None = None
    for path in files_of(folder):
        held, starts = _read(path)
        if before is not None:
            held.share_names(before)
        before = held
        boxes: dict[tuple[tuple[int, ...], int], Box] = {}
        for name, number in held.index_by_name.items():
            kind = held.kind_ids[number]
            start = starts[name]
            box = boxes.get((start, kind)) or boxes.setdefault((start, kind), _box(path, name, start, held))
            chunks = pieces.setdefault(name, [])
            budget_bytes -= _PIECE_BYTES if chunks else _PIECE_BYTES + structure.kept_bytes(name)
            chunks.append(ListedChunk(box, held, number))
        if budget_bytes < 0:
            raise ShardError(
                "a distributed checkpoint has too many pieces",
                expected=f"so many as take {structure.MAX_KEPT_BYTES} bytes of memory at most",
                where=path,
            )
    listed = ChunkedTensors(folder)
    for name, own in pieces.items():
        listed.add_listed(name, *_whole(name, own), own)
    return {0: Manifest(folder, NAME, listed)}


def _read(path: str) -> tuple[TensorTable, Mapping[str, tuple[int, ...]]]:
    """Return the tensors of a file, and where each begins in the whole one."""
    with structure.opened(path) as file:
        contents = file_header.read(file)
    if contents.sharding is None:
        raise ShardError(
            "a file of a distributed checkpoint does not say where its tensors lie in the whole ones",
            expected=f"{SHARDING} in its metadata, as torch writes it",
            got="a file without it",
            where=path,
            remedy="remove it if it is left from another save, or copy it again",
        )
    starts, tensors = saved_offsets(contents.sharding, path), contents.tensors
    unlike = next(iter(tensors.keys() ^ starts.keys()), None)
    if unlike is not None:
        raise ShardError(
            f"a file of a distributed checkpoint {'does not say where' if unlike in tensors else 'lacks'} {unlike!r}"
            + (" lies" if unlike in tensors else ""),
            expected=f"a place in {SHARDING} for each tensor",
            got=f"{len(tensors)} tensors, {len(starts)} places",
            where=path,
            remedy=_REMEDY,
        )
    return tensors, starts


def _box(path: str, name: str, start: tuple[int, ...], held: TensorTable) -> Box:
    shape = held.kind_named(name).shape
    if len(start) != len(shape) or any(low + length > _MAX_LENGTH for low, length in zip(start, shape)):
        raise ShardError(
            f"{name!r} cannot lie where its file says",
            expected=f"a first element of {len(shape)} coordinates, each below 2^62",
            got=f"{list(start)} for a piece of shape {list(shape)}",
            where=path,
            remedy=_REMEDY,
        )
    return Box.at(start, shape)


def _whole(name: str, pieces: Iterable[ListedChunk]) -> tuple[DType, tuple[int, ...]]:
    """Return the type of a tensor, and its shape: as far as its pieces reach. Raises ShardError if they differ."""
    first, *others = ((held.kinds[held.kind_ids[number]].dtype, box.stop, held.path) for box, held, number in pieces)
    dtype, stop, path = first
    for own_dtype, own_stop, own_path in others:
        if own_dtype is not dtype or len(own_stop) != len(stop):
            raise ShardError(
                f"files of a distributed checkpoint contradict each other on {name!r}",
                expected=f"{dtype} in {len(stop)} dimensions, as {Path(path).name} has it",
                got=f"{own_dtype} in {len(own_stop)} dimensions",
                where=own_path,
                remedy="remove what is left from another save",
            )
        stop = tuple(map(max, stop, own_stop))
    return dtype, stop
