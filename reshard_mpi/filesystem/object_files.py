"""Read objects of a store as files are read (`ObjectFile`).

The structure of a file is read in few trips: its first and last bytes with one request each, other parts in blocks
that are kept. Payloads come from what `read_ahead.ReadAhead` has fetched, if there is one.
"""

from __future__ import annotations

import errno
import os
import threading
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from reshard_mpi.errors import ShardError
from reshard_mpi.filesystem import object_folders
from reshard_mpi.filesystem.object_store import ObjectPlace, ObjectState, read_range
from reshard_mpi.filesystem.source_files import FileVersion, SourceFile
from reshard_mpi.text import KIB, MIB

if TYPE_CHECKING:
    from mmap import mmap

    from reshard_mpi.filesystem.read_ahead import ReadAhead

# What is read with the first request for a part of a file's structure: at its beginning, at its end, and elsewhere.
_HEAD_BYTES, _TAIL_BYTES, _GRAIN_BYTES = 256 * KIB, 64 * KIB, 4 * KIB
# Longer reads are of payload, and are not kept.
_MOST_KEPT_BYTES = MIB
_ALL_KEPT_BYTES = 12 * MIB
# How many requests are under way at once.
UNDER_WAY = 8
# How much of a structure is fetched at once that a format says it is going to read.
_MOST_FORESEEN_BYTES = 8 * MIB
# A longer range is fetched by several requests.
BLOCK_BYTES = 8 * MIB
# What is fetched at least where reads follow one another.
_LEAST_RECENT_BYTES = 256 * KIB


class _KeptBytes:
    """Parts of one object that have been read, ascending. Threads may use it at the same time."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._starts: list[int] = []
        self._parts: dict[int, bytes] = {}
        self._lock = threading.Lock()

    def add(self, start: int, content: bytes) -> None:
        """Keep bytes from `start` on; if there is too much by now, forget all others."""
        with self._lock:
            if self.size_bytes + len(content) > _ALL_KEPT_BYTES:
                self._starts, self._parts, self.size_bytes = [], {}, 0
            known_bytes = len(self._parts.get(start, b""))
            if start not in self._parts:
                insort(self._starts, start)
            if len(content) > known_bytes:
                self._parts[start] = content
                self.size_bytes += len(content) - known_bytes

    def content(self, offset: int, end: int) -> bytes:
        """Return bytes from `offset` on, up to `end` or to the first that has not been read."""
        pieces = []
        with self._lock:
            for number in range(max(bisect_right(self._starts, offset) - 1, 0), len(self._starts)):
                start = self._starts[number]
                part = self._parts[start]
                if start > offset or offset >= end:
                    break
                if offset < start + len(part):
                    pieces.append(part[offset - start : end - start])
                    offset += len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class _KeptObjects:
    """The parts of objects that are kept, the one that was read last at the end."""

    def __init__(self) -> None:
        self._of: OrderedDict[tuple[ObjectPlace, ObjectState], _KeptBytes] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, place: ObjectPlace, state: ObjectState) -> _KeptBytes:
        """Return the kept parts of an object; if all is too much, objects that were read longest ago are forgotten."""
        with self._lock:
            kept = self._of.setdefault((place, state), _KeptBytes())
            self._of.move_to_end((place, state))
            while len(self._of) > 1 and sum(each.size_bytes for each in self._of.values()) > _ALL_KEPT_BYTES:
                self._of.popitem(last=False)
            return kept


_KEPT = _KeptObjects()
# A thread of the parent may hold a lock while it forks.
os.register_at_fork(after_in_child=_KEPT.__init__)  # type: ignore[misc]


class ObjectFile(SourceFile):
    """An object that is read as a file is. Every request asks for the very object that was opened."""

    __slots__ = ("_ahead", "_place", "_recent", "_recent_bytes", "_recent_start", "_state")

    is_far = True

    def __init__(self, path: str, place: ObjectPlace, state: ObjectState) -> None:
        self.path = path
        self.version = version_of_state(state)
        self.size_bytes = state.size_bytes
        self._ahead: ReadAhead | None = None
        self._recent_start, self._recent, self._recent_bytes = 0, memoryview(b""), 0
        self._place = place
        self._state = state

    def close(self) -> None:
        """Do nothing: connections belong to the process."""

    def read_ahead_by(self, ahead: ReadAhead | None) -> None:
        self._ahead = ahead

    def is_still(self, version: FileVersion | None) -> bool:
        return version == self.version

    def read(self, offset: int, length_bytes: int) -> bytes:
        """Return bytes as `SourceFile.read` does; small parts are kept, for they are asked for again."""
        try:
            return self._read(offset, length_bytes)
        except OSError as error:  # it has been removed
            raise self._unreadable(error, offset) from error

    def _unreadable(self, error: OSError, offset: int) -> ShardError:
        return ShardError("a shard cannot be read", got=str(error), where=f"{self.path}, byte {offset}")

    def _read(self, offset: int, length_bytes: int) -> bytes:
        end = min(offset + length_bytes, self.size_bytes)
        if end <= offset:
            return b""
        if end - offset > _MOST_KEPT_BYTES:
            buffer = bytearray(end - offset)
            self._fill(offset, memoryview(buffer))
            return bytes(buffer)
        kept = _KEPT.of(self._place, self._state)
        content = kept.content(offset, end)
        if len(content) == end - offset:
            return content
        ((begin, fetched),) = self._fetch_ranges([self._grain(offset + len(content), end)])
        kept.add(begin, fetched)
        return content + fetched[offset + len(content) - begin : end - begin]

    def is_at_hand(self, offset: int, end: int) -> bool:
        end = min(end, self.size_bytes)
        return len(_KEPT.of(self._place, self._state).content(offset, end)) >= end - offset

    def will_read(self, spans: Iterable[tuple[int, int]]) -> None:
        """Fetch parts of the structure at once that are going to be read, each from one byte to another."""
        kept, missing, size_bytes = _KEPT.of(self._place, self._state), list[tuple[int, int]](), 0
        for offset, end in sorted(spans):
            stop = min(end, self.size_bytes)
            first = offset + len(kept.content(offset, stop))
            if first >= stop or (missing and stop <= missing[-1][1]):
                continue
            begin, stop = self._grain(first, stop)
            if missing and begin <= missing[-1][1] + _GRAIN_BYTES and stop - missing[-1][0] <= _MOST_KEPT_BYTES:
                missing[-1] = missing[-1][0], max(missing[-1][1], stop)
            else:
                missing.append((begin, stop))
            size_bytes += stop - begin
            if size_bytes > _MOST_FORESEEN_BYTES:
                break
        try:
            for begin, content in self._fetch_ranges(missing):
                kept.add(begin, content)
        except OSError as error:
            raise self._unreadable(error, missing[0][0]) from error

    def _grain(self, offset: int, end: int) -> tuple[int, int]:
        """Return the range that is fetched where the bytes from `offset` to `end` are asked for."""
        if offset < _HEAD_BYTES:
            return 0, max(end, min(_HEAD_BYTES, self.size_bytes))
        if end > self.size_bytes - _TAIL_BYTES:
            return min(offset, max(self.size_bytes - _TAIL_BYTES, 0)), self.size_bytes
        return offset, min(max(end, offset + _GRAIN_BYTES), self.size_bytes)

    def _fetch_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, bytes]]:
        """Fetch ranges, several at a time; return where each begins, and its bytes."""

        def fetched(span: tuple[int, int]) -> tuple[int, bytes]:
            buffer = bytearray(span[1] - span[0])
            read_range(self._place, self._state, span[0], memoryview(buffer))
            return span[0], bytes(buffer)

        if len(ranges) < 2:
            return [fetched(span) for span in ranges]
        with ThreadPoolExecutor(min(UNDER_WAY, len(ranges))) as pool:
            return list(pool.map(fetched, ranges))

    def read_into(self, offset: int, places: Sequence[memoryview]) -> int:
        done, length = 0, sum(map(len, places))
        length = max(0, min(length, self.size_bytes - offset))
        for place in places:
            wanted = place[: length - done]
            if wanted:
                self._read_part(offset + done, wanted)
                done += len(wanted)
        return done

    def read_each(self, offset: int, step: int, places: Iterable[memoryview]) -> int:
        return sum(self.read_into(offset + number * step, (place,)) for number, place in enumerate(places))

    def _read_part(self, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from blocks that were read ahead, from kept parts, or from the store."""
        while buffer and self._ahead is not None:
            count = self._ahead.take(self, offset, buffer)
            if not count:
                break
            offset += count
            buffer = buffer[count:]
        if not buffer:
            return
        begin = offset - self._recent_start
        if 0 <= begin < len(self._recent):
            piece = self._recent[begin : begin + len(buffer)]
            buffer[: len(piece)] = piece
            offset, buffer = offset + len(piece), buffer[len(piece) :]
            if not buffer:
                return
            self._recent_start, self._recent = offset, memoryview(b"")
        # A read that goes on where the one before has ended is one of many: more is fetched than it asks for, and
        # each time twice as much.
        is_next = offset == self._recent_start and offset > 0
        self._recent_bytes = min(max(2 * self._recent_bytes, _LEAST_RECENT_BYTES), BLOCK_BYTES) if is_next else 0
        self._recent_start, self._recent = offset + len(buffer), memoryview(b"")
        if is_next and len(buffer) < self._recent_bytes:
            block = memoryview(bytearray(min(self._recent_bytes, self.size_bytes - offset)))
            self._fill(offset, block)
            buffer[:] = block[: len(buffer)]
            self._recent_start, self._recent = offset, block
        elif len(buffer) <= _GRAIN_BYTES:
            buffer[:] = self.read(offset, len(buffer))
        else:
            self._fill(offset, buffer)

    def _fill(self, offset: int, buffer: memoryview) -> None:
        """Fill a long buffer from the store, several blocks at a time."""
        if len(buffer) <= BLOCK_BYTES:
            read_range(self._place, self._state, offset, buffer)
            return
        starts = range(0, len(buffer), BLOCK_BYTES)
        with ThreadPoolExecutor(min(UNDER_WAY, len(starts))) as pool:
            parts = (buffer[start : start + BLOCK_BYTES] for start in starts)
            list(pool.map(partial(read_range, self._place, self._state), (offset + start for start in starts), parts))

    def fetch(self, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from kept parts, as all of a small file is, or from the store.

        Raises as `object_store.asked` does.
        """
        if len(buffer) <= _MOST_KEPT_BYTES:
            content = _KEPT.of(self._place, self._state).content(offset, offset + len(buffer))
            if len(content) == len(buffer):
                buffer[:] = content
                return
        read_range(self._place, self._state, offset, buffer)

    def map(self, offset: int, length_bytes: int) -> tuple[mmap | memoryview, int]:
        """Return bytes that have been read ahead, or read them into memory of its own, in the place of a map."""
        import mmap

        if offset + length_bytes > self.size_bytes:
            raise ValueError("the object ends before")
        fetched = None if self._ahead is None else self._ahead.view(self, offset, length_bytes)
        if fetched is not None:
            return fetched, 0
        memory = mmap.mmap(-1, length_bytes)
        with memoryview(memory) as view:
            self._read_part(offset, view)
        return memory, 0

    def copy_into(self, target: int, offset: int, target_offset: int, length_bytes: int) -> int:
        """Raise the OSError of file systems that do not copy between each other."""
        raise OSError(errno.EXDEV, "an object is not copied by the kernel", self.path)

    def advise_random(self) -> None:
        """Do nothing: nothing else is fetched."""

    def advise(self, offset: int, length_bytes: int) -> None:
        """Do nothing: `ReadAhead` knows the plan."""


def version_of_state(state: ObjectState) -> FileVersion:
    """Return the version of an object as files have one: a tag of its content is in the place of an inode."""
    return FileVersion(state.inode, state.size_bytes, state.modified_ns, 1, 0)


def open_object(path: str) -> ObjectFile:
    """Open the object at an address. Raises OSError if there is none, StoreError if it cannot be asked for."""
    place = ObjectPlace.of(path)
    state = object_folders.state_of(place)
    if state is None:
        number = errno.EISDIR if object_folders.is_folder(place) else errno.ENOENT
        raise OSError(number, "no object is called so", str(place))  # of the class that the number has
    return ObjectFile(path, place, state)
