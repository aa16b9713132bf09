"""Refuse a file that an index lists, and that is a copy of another one with other parts (`require_own_files`).

The index says which part of each tensor a file has, and the file itself says no more than its sizes. So a file that was
put in the place of another rank's would be read as the part of that. It is told by its elements: files that are to have
different parts of some tensors, and hold the same wherever they are compared, are copies.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from reshard_mpi.checkpoints.compare_samples import is_telling
from reshard_mpi.checkpoints.source import SourceCheckpoint
from reshard_mpi.engine.open_files import Files
from reshard_mpi.engine.read import excerpt
from reshard_mpi.errors import DisagreementError, ShardError
from reshard_mpi.filesystem.paths import is_object_path
from reshard_mpi.formats.locations import ByteRanges
from reshard_mpi.formats.tensor_table import ChunkedTensors, TensorEntry, TensorTable
from reshard_mpi.planning.comparison_choice import places
from reshard_mpi.sharding.box import Box

# Of more files none is compared, and no tensor in more chunks; none in an object store, where each place is a request.
_MOST_FILES = 256
# Numbers of tensors that are compared, of tensors among them that are divided alike, and of chunks of each file, not
# all of one value, by which copies are looked for.
_MOST_TENSORS, _MOST_ALIKE, _FEW_CHUNKS = 64, 4, 4


class _ListedPart(NamedTuple):
    """A chunk of a tensor: the path of the file that has it, its place there, and its box in the whole."""

    path: str
    entry: TensorEntry
    box: Box


class _Contents:
    """Reads chunks in a few places, and keeps what was read."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._read: dict[int, bytes] = {}

    def of(self, part: _ListedPart) -> bytes:
        """Return elements of a chunk. Raises ShardError if they cannot be read."""
        content = self._read.get(id(part))
        if content is None:
            boxes = places(part.entry.name, part.entry.shape)
            content = self._read[id(part)] = b"".join(excerpt(self._files, part.entry, box) for box in boxes)
        return content


def require_own_files(source: SourceCheckpoint) -> None:
    """Raise DisagreementError if a file that an index lists is a copy of another one with other parts.

    Files that cannot be read are left to planning.
    """
    shard = source.find(0)
    tensors = None if shard is None else shard.tensors
    if not isinstance(tensors, ChunkedTensors) or is_object_path(tensors.path):
        return
    shared_out = [*islice(_shared_out(tensors), _MOST_TENSORS)]
    if len({part.path for parts in shared_out for part in parts}) > _MOST_FILES:
        return
    with Files() as files, contextlib.suppress(ShardError, OSError):
        contents = _Contents(files)
        for first, second in _suspects(shared_out, contents):
            if _are_copies(shared_out, first.path, second.path, contents):
                raise DisagreementError(
                    "two files of a checkpoint are copies of one",
                    expected=f"other parts of {first.entry.name!r}, {first.box} and {second.box}, as the index says",
                    got="the same elements wherever they were compared, of all tensors that both have parts of",
                    where=f"{first.path} and {second.path}",
                    remedy="restore the files of the save; if all parts really have the same values, --replicas any"
                    " takes the index at its word",
                )


def _shared_out(tensors: ChunkedTensors) -> Iterator[list[_ListedPart]]:
    """Yield the chunks of each tensor that several files share out; of tensors that are divided alike, of a few."""
    seen = Counter[int]()
    for name, number in tensors.index_by_name.items():
        list_number = tensors.chunk_list_ids[number]
        chunks = tensors.chunk_lists[list_number]
        if seen[list_number] == _MOST_ALIKE or not 1 < len(chunks) <= _MOST_FILES:
            continue
        seen[list_number] += 1
        listed = [_listed_part(name, box, file, own) for (box, file), own in zip(chunks, tensors.numbers[number])]
        known = [chunk for chunk in listed if chunk is not None]
        if len({chunk.path for chunk in known}) > 1:
            yield known


def _listed_part(name: str, box: Box, tensors: TensorTable, number: int) -> _ListedPart | None:
    """Return a chunk that lies in one file as it is; None for any other."""
    place = tensors.source(number)
    if not isinstance(place, ByteRanges) or len({run.path for run in place.ranges}) != 1:
        return None
    dtype, shape, *_ = tensors.kinds[tensors.kind_ids[number]]
    return _ListedPart(place.ranges[0].path, TensorEntry(name, dtype, shape, place), box)


def _suspects(
    shared_out: Iterable[Sequence[_ListedPart]], contents: _Contents
) -> Iterator[tuple[_ListedPart, _ListedPart]]:
    """Yield two chunks of one tensor, in different files, that are different parts of it and hold the same."""
    looked_at = Counter[str]()
    for parts in shared_out:
        held: defaultdict[tuple[object, bytes], list[_ListedPart]] = defaultdict(list)
        for part in parts:
            if looked_at[part.path] == _FEW_CHUNKS or not is_telling(contents.of(part), part.entry.dtype):
                continue
            looked_at[part.path] += 1
            others = held[part.entry.shape, contents.of(part)]
            yield from ((other, part) for other in others if other.box != part.box and other.path != part.path)
            others.append(part)


def _are_copies(shared_out: Iterable[Sequence[_ListedPart]], first: str, second: str, contents: _Contents) -> bool:
    """Tell whether two files hold the same of all tensors that both have parts of, as far as they are compared."""
    for parts in shared_out:
        of_both = [[contents.of(part) for part in parts if part.path == path] for path in (first, second)]
        if all(of_both) and of_both[0] != of_both[1]:
            return False
    return True
