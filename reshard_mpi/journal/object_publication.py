"""Send a target to an object store in parts, as they become complete, and name it at the end (`ObjectPublication`).

Formats and the engine write to a file in memory. Parts whose bytes are all there are sent, and their payloads given
back; the structure between them stays, so that it can be read once more. A format that writes among payloads when the
file is sealed, or what is to be verified, is kept whole until then, in a temporary file.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

from reshard_mpi.errors import TransformError
from reshard_mpi.filesystem.folders import FileIdentity, close
from reshard_mpi.filesystem.object_store import ObjectState
from reshard_mpi.filesystem.object_uploads import LEAST_PART_BYTES, MOST_PARTS, FilePart, SentPart, Upload
from reshard_mpi.filesystem.source_files import SourceFile
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.journal.publication import Publication
from reshard_mpi.journal.target_records import TensorSum, sample_of, sampled_pages
from reshard_mpi.text import MIB

# Of a target that is not too large for as many parts as a store takes.
_PART_BYTES = 8 * MIB
# How many parts are sent at once; as many lie in memory besides those that are being filled.
_UNDER_WAY = 4
# Memory for parts that are sent, and for those that are being filled.
STAGED_BYTES = (_UNDER_WAY + 4) * _PART_BYTES

Begin = Callable[[], Upload]
Check = Callable[[], None]
Confirm = Callable[[ObjectState, str, Sequence[TensorSum], str], None]


def part_bytes_of(size_bytes: int) -> int:
    """Return how long the parts are that an object of this size is sent in."""
    least = -(-size_bytes // MOST_PARTS)
    return max(_PART_BYTES, LEAST_PART_BYTES, -(-least // MIB) * MIB)


class ObjectPublication(Publication):
    """A target that is made in a file of its own, and becomes an object when `publish` is called.

    If the block ends without that, what was sent is given up.

    Attributes:
        partial: the path of the file. descriptor: open for reading and writing as long as the block lasts.
    """

    def __init__(
        self, begin: Begin, check: Check, confirm: Confirm, *, only_new: Callable[[], bool], in_memory: bool
    ) -> None:
        """begin: begins the upload, before anything is sent.

        Args:
            check: called before the object takes its name; raises if it must not.
            confirm: called with the object, the sample of its bytes, and what `publish` was given.
            only_new: tells whether the object must not replace another one.
            in_memory: whether the file is kept in memory, as one that is sent while it is filled; else on the disk.
        """
        self._begin = begin
        self._check = check
        self._confirm_object = confirm
        self._only_new = only_new
        self._in_memory = in_memory
        self._upload: Upload | None = None
        self._parts: _Parts | None = None
        self.is_published = False

    @property
    def partial(self) -> Path:
        return Path(f"/proc/self/fd/{self.descriptor}")

    @property
    def identity(self) -> FileIdentity:
        return FileIdentity.of(self.descriptor)

    def __enter__(self) -> Self:
        if self._in_memory:
            self.descriptor = os.memfd_create("target")
            return self
        with tempfile.TemporaryFile() as file:
            self.descriptor = os.dup(file.fileno())
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._parts is not None:
                self._parts.close()
            if self._upload is not None and not self.is_published:
                with contextlib.suppress(Exception):  # the error that led here is told; the next run gives it up too
                    self._upload.abort()
        finally:
            close(self.descriptor)

    def stream(self, manifest: Manifest) -> Callable[[int, int], None]:
        """Send parts of the target as soon as they are complete; return what is to be told of complete bytes.

        Args:
            manifest: of the file, which has everything but its payloads.
        """
        self._upload = self._begin()
        spans = manifest.tensors.payload_spans()
        self._parts = _Parts(self.descriptor, self._upload, spans)
        return self._parts.final

    def publish(self, sums: Sequence[TensorSum] = (), besides: str = "", *, synced: bool = True) -> None:
        """Send what has not been sent, and put the object in place of whatever is there.

        Args:
            sums: of its tensors, for its record; besides: a digest of all else (see `TargetRecord`).
            synced: without meaning here.
        """
        self._check()
        sample = sample_of(SourceFile(str(self.partial), self.descriptor))
        if self._parts is None:
            self._upload = self._begin()
            self._parts = _Parts(self.descriptor, self._upload, ())
        assert self._upload is not None
        sent = self._parts.finish()
        self._check()
        state = self._upload.complete(sent, only_new=self._only_new())
        self.is_published = True
        self._confirm_object(state, sample, sums, besides)


class _Parts:
    """The parts of a file that is sent while it is filled."""

    def __init__(self, descriptor: int, upload: Upload, payloads: Sequence[tuple[int, int]]) -> None:
        """payloads: spans whose bytes are to come, ascending; all others are there."""
        self._descriptor = descriptor
        self._upload = upload
        self._payloads = payloads
        self._ends = [end for _, end in payloads]
        self._size_bytes = os.fstat(descriptor).st_size
        self._length = part_bytes_of(self._size_bytes)
        count = max(1, -(-self._size_bytes // self._length))
        self._missing = [sum(end - start for start, end in self._payloads_in(number)) for number in range(count)]
        self._pool = ThreadPoolExecutor(_UNDER_WAY)
        self._sending: dict[int, Future[SentPart]] = {}
        self._queue: deque[int] = deque()
        self._memory = mmap.mmap(descriptor, self._size_bytes) if payloads and self._size_bytes else None

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        if self._memory is not None:
            self._memory.close()

    def final(self, offset: int, length_bytes: int) -> None:
        """Take note that bytes of payloads are complete; send the parts that are. Raises what sending raises."""
        end = offset + length_bytes
        while offset < end:
            number = offset // self._length
            stop = min(end, (number + 1) * self._length)
            self._missing[number] -= stop - offset
            if self._missing[number] == 0:
                self._send(number)
            offset = stop

    def finish(self) -> list[SentPart]:
        """Send all that has not been sent; return the parts. Raises TransformError if bytes have not come."""
        incomplete = next((number for number, missing in enumerate(self._missing) if missing), None)
        if incomplete is not None:
            raise TransformError(
                "a target was not filled as it was planned",
                expected=f"all bytes of part {incomplete + 1}",
                got=f"{self._missing[incomplete]} bytes less",
                where=str(self._upload.place),
                remedy="report this as a bug of reshard-mpi",
            )
        for number in range(len(self._missing)):
            if number not in self._sending:
                self._send(number)
        return [self._sending[number].result() for number in sorted(self._sending)]

    def _send(self, number: int) -> None:
        """Have a part sent; wait while as many as may be are on their way."""
        while len(self._queue) >= _UNDER_WAY:
            self._sending[self._queue.popleft()].result()
        self._sending[number] = self._pool.submit(self._sent, number)
        self._queue.append(number)

    def _sent(self, number: int) -> SentPart:
        start = number * self._length
        length_bytes = min(self._length, self._size_bytes - start)
        sent = self._upload.send(number + 1, FilePart(self._descriptor, start, length_bytes))
        self._give_back(number)
        return sent

    def _give_back(self, number: int) -> None:
        """Give back the memory of the payloads of a part, but for pages of which a sample is taken."""
        if self._memory is None:
            return
        kept = sampled_pages(self._size_bytes)
        for start, end in self._payloads_in(number):
            for first, last in _between(-(-start // mmap.PAGESIZE), end // mmap.PAGESIZE, kept):
                with contextlib.suppress(OSError, ValueError):  # it is kept then
                    length = (last - first) * mmap.PAGESIZE
                    self._memory.madvise(mmap.MADV_REMOVE, first * mmap.PAGESIZE, length)

    def _payloads_in(self, number: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of payloads that lie in a part of the file."""
        low, high = number * self._length, (number + 1) * self._length
        for start, end in self._payloads[bisect_right(self._ends, low) :]:
            if start >= high:
                break
            yield max(low, start), min(high, end)


def _between(first: int, last: int, kept: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield runs of pages, from one to the one after the last, without those that are kept (ascending)."""
    for page in kept[bisect_right(kept, first - 1) :]:
        if page >= last:
            break
        if first < page:
            yield first, page
        first = page + 1
    if first < last:
        yield first, last
