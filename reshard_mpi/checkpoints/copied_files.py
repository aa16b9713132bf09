"""Refuse a file that an index lists, and that is a copy of another one with other parts (`require_own_files`).

The index says which part of each tensor a file has, and the file itself says no more than its sizes. So a file that was
put in the place of another rank's would be read as the part of that. It is told by its elements: files that are to have
different parts of some tensors, and hold the same wherever they are compared, are copies.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
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
# Copies are looked for by a few chunks of each file, not all of one value, for each way to divide tensors; by no more
# such chunks than this in all, and no more chunks of any value.
_FEW_ALIKE, _MOST_TELLING, _MOST_READ = 4, 64, 1024


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
        """Return elements of a chunk; nothing if they cannot be read, which is left to planning."""
        content = self._read.get(id(part))
        if content is None:
            boxes, content = places(part.entry.name, part.entry.shape), b""
            with contextlib.suppress(ShardError, OSError):
                content = b"".join(excerpt(self._files, part.entry, box) for box in boxes)
            self._read[id(part)] = content
        return content

    def is_telling(self, part: _ListedPart) -> bool:
        """Tell whether a chunk varies enough that others would differ from it."""
        return is_telling(self.of(part), part.entry.dtype)


def require_own_files(source: SourceCheckpoint) -> None:
    """Raise DisagreementError if a file that an index lists is a copy of another one with other parts."""
    shard = source.find(0)
    tensors = None if shard is None else shard.tensors
    if not isinstance(tensors, ChunkedTensors) or is_object_path(tensors.path):
        return
    if len({table.path for chunks in tensors.chunk_lists for _, table in chunks}) > _MOST_FILES:
        return
    with Files() as files:
        contents = _Contents(files)
        shared_out = [*_shared_out(tensors, contents)]
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


def _shared_out(tensors: ChunkedTensors, contents: _Contents) -> Iterator[list[_ListedPart]]:
    """Yield the chunks of tensors that several files share out, until there are enough of each file.

    Those of many tensors that are divided alike may be alike by nature, so a file has enough in each way to divide.
    """
    alike, telling, read = Counter[tuple[str, int]](), Counter[str](), Counter[str]()
    done = set[int]()  # ways to divide for which every file has enough

    def has_enough(path: str, way: int) -> bool:
        return alike[path, way] >= _FEW_ALIKE or telling[path] >= _MOST_TELLING or read[path] >= _MOST_READ

    for name, number in tensors.index_by_name.items():
        way = tensors.chunk_list_ids[number]
        chunks = tensors.chunk_lists[way]
        if way in done or not 1 < len(chunks) <= _MOST_FILES:
            continue
        listed = [_listed_part(name, box, file, own) for (box, file), own in zip(chunks, tensors.numbers[number])]
        parts = [part for part in listed if part is not None]
        paths = {part.path for part in parts}
        if len(paths) > 1 and not all(has_enough(path, way) for path in paths):
            new = {part.path for part in parts if contents.is_telling(part)}
            read.update(paths)
            telling.update(new)
            alike.update((path, way) for path in new)
            yield parts
        elif all(table.path != tensors.path for _, table in chunks):  # else tensors divided alike lie in other files
            done.add(way)


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
    for parts in shared_out:
        held: defaultdict[tuple[object, bytes], list[_ListedPart]] = defaultdict(list)
        for part in filter(contents.is_telling, parts):
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
