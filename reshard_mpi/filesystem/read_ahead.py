"""Fetch payloads of objects before they are asked for, in the order of a plan (`ReadAhead`)."""

from __future__ import annotations

import mmap
from bisect import bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from reshard_mpi.filesystem.object_files import BLOCK_BYTES, UNDER_WAY, ObjectFile, open_object
from reshard_mpi.filesystem.paths import is_object_path
from reshard_mpi.text import KIB, MIB

# Ranges with smaller gaps than this are fetched as one, which costs less than another request.
_GAP_BYTES = 64 * KIB
# How far a plan is looked ahead to put small ranges together. It must be less than there is room for: all files that
# are read in turn have a block then.
_FORESEEN_BYTES, _MOST_WAITING = 16 * MIB, 1024
# Memory for what is read ahead.
AHEAD_BYTES = 32 * MIB


class PlannedBlock:
    """A part of an object to fetch at once, which may still grow until it is fetched.

    Attributes:
        wanted_bytes: how many bytes are going to be asked for, some repeatedly.
    """

    __slots__ = ("begin", "end", "path", "wanted_bytes")

    def __init__(self, path: str, begin: int, end: int) -> None:
        self.path = path
        self.begin = begin
        self.end = end
        self.wanted_bytes = end - begin

    @property
    def length_bytes(self) -> int:
        return self.end - self.begin


class _FetchedBlock(NamedTuple):
    """A part of an object that is fetched, or being fetched."""

    number: int  # in the order of the plan
    wanted_bytes: int
    buffer: memoryview
    fetching: Future[None]


class ReadAhead:
    """Fetches ranges of objects before they are asked for, in the order in which they will be.

    A block stays until as many of its bytes have been asked for as the plan says; several targets may share it.
    """

    def __init__(self, ranges: Iterable[tuple[str, int, int]], room_bytes: int = AHEAD_BYTES) -> None:
        """ranges: (path, offset, length), in the order of their use, as a plan has them; ranges of files are left out.

        Args:
            room_bytes: memory for blocks, fetched or on their way.
        """
        self._coming = blocks_of(ranges)
        self._room_bytes = room_bytes
        self._pool = ThreadPoolExecutor(min(UNDER_WAY, max(1, room_bytes // BLOCK_BYTES)))
        self._blocks: OrderedDict[tuple[str, int], _FetchedBlock] = OrderedDict()
        self._starts: dict[str, list[int]] = {}
        self._files: dict[str, ObjectFile] = {}
        self._used: dict[str, int] = {}  # the number of the block of each file that was used last
        self._served: dict[tuple[str, int], int] = {}
        self._held_bytes = self._count = 0
        self._next = deque[PlannedBlock]()  # blocks that were looked at, and are not fetched yet

    def close(self) -> None:
        """Wait for requests that are under way, and forget all."""
        self._coming = iter(())
        self._next.clear()
        self._pool.shutdown(cancel_futures=True)
        self._blocks.clear()

    def take(self, file: ObjectFile, offset: int, buffer: memoryview) -> int:
        """Fill the beginning of a buffer; return how many bytes, 0 if nothing has fetched them ahead.

        Raises as `object_store.asked` does.
        """
        key = self._sought(file.path, offset)
        if key is None:
            self._top_up()
            return 0
        content = self._fetched(key, offset, len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def view(self, file: ObjectFile, offset: int, length_bytes: int) -> memoryview | None:
        """Return bytes where they were fetched to, not to be changed; None if no block has all of them.

        Raises as `object_store.asked` does.
        """
        key = self._sought(file.path, offset)
        if key is None or offset + length_bytes > key[1] + len(self._blocks[key].buffer):
            return None
        return self._fetched(key, offset, length_bytes)

    def _sought(self, path: str, offset: int) -> tuple[str, int] | None:
        """Return the block that has this byte of a file; fetch on until there is one, or all room is full."""
        key = self._found(path, offset)
        if key is None and self._is_coming(path, offset):
            key = self._found(path, offset)
        return key

    def _fetched(self, key: tuple[str, int], offset: int, most_bytes: int) -> memoryview:
        """Return the bytes that a block has from `offset` on, `most_bytes` at most; they count as asked for."""
        path, block = key[0], self._blocks[key]
        block.fetching.result()
        content = block.buffer[offset - key[1] :][:most_bytes]
        self._served[key] = self._served.get(key, 0) + len(content)
        self._used[path] = max(self._used.get(path, 0), block.number)
        if self._served[key] >= block.wanted_bytes:
            self._drop(key)
        self._top_up()
        return content

    def _found(self, path: str, offset: int) -> tuple[str, int] | None:
        """Return the block that has this byte of a file."""
        starts = self._starts.get(path, [])
        number = bisect_right(starts, offset) - 1
        if number < 0:
            return None
        key = path, starts[number]
        return key if offset < key[1] + len(self._blocks[key].buffer) else None

    def _is_coming(self, path: str, offset: int) -> bool:
        """Fetch on until a block has this byte; return False if none comes before all room is full."""
        number = looked_bytes = 0
        while looked_bytes <= self._room_bytes and self._looks_at(number):
            block = self._next[number]
            number, looked_bytes = number + 1, looked_bytes + block.length_bytes
            if block.path == path and block.begin <= offset < block.end:
                for _ in range(number):
                    self._make_room(self._next[0].length_bytes, forced=True)
                    self._submit()
                return True
        return False

    def _looks_at(self, number: int) -> bool:
        """Look at a block that is to be fetched, by its number among these; False if there are fewer."""
        while len(self._next) <= number:
            block = next(self._coming, None)
            if block is None:
                return False
            self._next.append(block)
        return True

    def _top_up(self) -> None:
        while self._looks_at(0) and self._make_room(self._next[0].length_bytes, forced=False):
            self._submit()

    def _make_room(self, length: int, *, forced: bool) -> bool:
        """Drop blocks whose file is read further on, and, if `forced`, the oldest; tell whether there is room."""
        for key, block in list(self._blocks.items()):
            if self._held_bytes + length <= self._room_bytes:
                return True
            if forced or (key in self._served and block.number < self._used.get(key[0], 0) - UNDER_WAY):
                self._drop(key)
        return self._held_bytes + length <= self._room_bytes or not self._blocks

    def _submit(self) -> None:
        planned = self._next.popleft()
        path, start, length = planned.path, planned.begin, planned.length_bytes
        if (path, start) in self._blocks:
            return
        file = self._files.get(path)
        if file is None:
            file = self._files[path] = open_object(path)
        memory = mmap.mmap(-1, length)  # which goes back to the kernel when nobody looks at it any more
        with suppress(OSError, AttributeError):  # a kernel without large pages; a system that is not Linux
            memory.madvise(mmap.MADV_HUGEPAGE)
        buffer = memoryview(memory)
        block = _FetchedBlock(self._count, planned.wanted_bytes, buffer, self._pool.submit(file.fetch, start, buffer))
        self._blocks[path, start] = block
        insort(self._starts.setdefault(path, []), start)
        self._held_bytes += length
        self._count += 1

    def _drop(self, key: tuple[str, int]) -> None:
        block = self._blocks.pop(key)
        block.fetching.cancel()
        self._starts[key[0]].remove(key[1])
        self._served.pop(key, None)
        self._held_bytes -= len(block.buffer)


class _WaitingBlocks:
    """Blocks in the order in which they are first used, which ranges are added to. size_bytes: of all of them."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._in_order = deque[PlannedBlock]()
        self._by_path: dict[str, list[PlannedBlock]] = {}  # ascending

    def __len__(self) -> int:
        return len(self._in_order)

    def add(self, path: str, offset: int, end: int) -> None:
        """Add a range: to blocks that have parts of it, to one that ends shortly before, or else as new blocks."""
        own = self._by_path.setdefault(path, [])
        while offset < end:
            number = bisect_right(own, offset, key=lambda block: block.begin)
            before = own[number - 1] if number else None
            stop = min(end, own[number].begin) if number < len(own) else end
            if before is not None and offset < before.end:
                stop = min(end, before.end)
                before.wanted_bytes += stop - offset
            elif before is not None and offset <= before.end + _GAP_BYTES and stop - before.begin <= BLOCK_BYTES:
                self.size_bytes += stop - before.end
                before.wanted_bytes += stop - offset
                before.end = stop
            else:
                stop = min(stop, offset + BLOCK_BYTES)
                block = PlannedBlock(path, offset, stop)
                own.insert(number, block)
                self._in_order.append(block)
                self.size_bytes += stop - offset
            offset = stop

    def take(self) -> PlannedBlock:
        """Remove the first block, and return it."""
        block = self._in_order.popleft()
        self._by_path[block.path].remove(block)
        self.size_bytes -= block.length_bytes
        return block


def blocks_of(ranges: Iterable[tuple[str, int, int]]) -> Iterator[PlannedBlock]:
    """Yield the blocks in which ranges are fetched: those with small gaps between them as one, long ones cut.

    Blocks come in the order in which they are first used, as far as that is looked ahead.
    """
    waiting = _WaitingBlocks()
    for path, offset, length in ranges:
        if not is_object_path(path):
            continue
        waiting.add(path, offset, offset + length)
        while len(waiting) > 1 and (waiting.size_bytes > _FORESEEN_BYTES or len(waiting) > _MOST_WAITING):
            yield waiting.take()
    while len(waiting):
        yield waiting.take()
