"""Send a target to an object store in parts, as they become complete, and name it at the end (`ObjectPublication`).

Formats and the engine write to a file in memory. Parts whose bytes are all there are sent, and their payloads given
back; the structure between them stays, so that it can be read once more. A format that writes among payloads when the
file is sealed, or what is to be verified, is kept whole until then, in a temporary file. The store copies by itself
what parts of either it can; those of a file that is whole are compared with it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

from reshard_mpi.errors import StoreError, StoreUnreachableError, TransformError
from reshard_mpi.filesystem import object_listing
from reshard_mpi.filesystem.folders import close
from reshard_mpi.filesystem.object_parts import SENT_BYTES, CopiedRun, PlannedPart, plan_parts
from reshard_mpi.filesystem.object_store import ObjectPlace, ObjectState, read_range
from reshard_mpi.filesystem.object_uploads import FilePart, SentPart, Upload, wants_uniform_parts
from reshard_mpi.filesystem.source_files import SourceFile
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.structure import digest_besides, write_all
from reshard_mpi.journal.publication import Publication
from reshard_mpi.journal.target_records import TensorSum, sample_of, sampled_pages

# How many parts a process sends at once; they lie in memory, and so do parts that are being filled. As many parts of a
# target are copied at once.
_UNDER_WAY = 4
_sending = threading.BoundedSemaphore(_UNDER_WAY)
# Memory for parts that are sent or being filled, and for parts of each further target that is filled at the same time.
STAGED_BYTES = (_UNDER_WAY + 4) * SENT_BYTES
FILLED_BYTES = 2 * SENT_BYTES
_PAGE_BYTES = 4096

# Takes the parts, and a digest of all bytes of the file but payloads; returns an upload, and the parts that it has.
Begin = Callable[[Sequence[PlannedPart], str], tuple[Upload, Sequence[SentPart]]]
Check = Callable[[], None]
Confirm = Callable[[ObjectState, str, Sequence[TensorSum], str], None]


class ObjectPublication(Publication):
    """A target that is made in a file of its own, and becomes an object when `publish` is called.

    If the block ends without that, what was sent is given up.

    Attributes:
        partial: the path of the file. descriptor: open for reading and writing as long as the block lasts.
    """

    def __init__(
        self, begin: Begin, check: Check, confirm: Confirm, *, only_new: Callable[[], bool], is_streamed: bool
    ) -> None:
        """begin: begins the upload, before anything is sent, or goes on with one; returns what of its parts is there.

        Args:
            check: called before the object takes its name; raises if it must not.
            confirm: called with the object, the sample of its bytes, and what `publish` was given.
            only_new: tells whether the object must not replace another one.
            is_streamed: whether the file is sent while it is filled, and so lies in memory; else on the disk.
        """
        self._begin = begin
        self._check = check
        self._confirm_object = confirm
        self._only_new = only_new
        self._is_streamed = is_streamed
        self._runs: Sequence[CopiedRun] = ()
        self._parts: StagedParts | None = None
        self.is_published = False

    @property
    def partial(self) -> Path:
        return Path(f"/proc/self/fd/{self.descriptor}")

    def __enter__(self) -> Self:
        if self._is_streamed:
            self.descriptor = os.memfd_create("target")
        else:
            self.descriptor = _disk_file()
        return self

    def move_to_disk(self) -> None:
        """Have an empty file on the disk, for a target whose parts do not become complete one after another."""
        close(self.descriptor)
        self.descriptor = _disk_file()

    def __exit__(self, *_: object) -> None:
        try:
            if self._parts is not None:
                self._parts.close()
            if self._parts is not None and not self.is_published:
                with contextlib.suppress(Exception):  # the error that led here is told; the next run gives it up too
                    self._parts.upload.abort()
        finally:
            close(self.descriptor)

    def stage(self, manifest: Manifest, runs: Sequence[CopiedRun]) -> StagedParts | None:
        """Send parts of the target as soon as they are complete; return the object that is told of complete bytes.

        None for a target that is kept whole: its parts are sent by `publish`.

        Args:
            manifest: of the file, which has everything but its payloads.
            runs: what the store may copy by itself, ascending.
        """
        self._runs = runs
        if self._is_streamed:
            self._parts = StagedParts(self.descriptor, self._begin, manifest.tensors.payload_spans(), runs)
        return self._parts

    def publish(self, sums: Sequence[TensorSum] = (), besides: str = "", *, synced: bool = True) -> None:
        """Send what has not been sent, and put the object in place of whatever is there.

        Args:
            sums: of its tensors, for its record; besides: a digest of all else (see `TargetRecord`).
            synced: without meaning here.
        """
        self._check()
        if self._parts is None:
            self._parts = StagedParts(self.descriptor, self._begin, (), self._runs)
        sent = self._parts.finish()
        self.store_copied_bytes = self._parts.copied_bytes
        sample = sample_of(SourceFile(str(self.partial), self.descriptor))
        self._check()
        state = self._parts.upload.complete(sent, only_new=self._only_new())
        self.is_published = True
        self._confirm_object(state, sample, sums, besides)


def _disk_file() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class StagedParts:
    """The parts of a file that are sent while it is filled, or when it is whole, or are copied inside the store.

    Attributes:
        upload: by which they are sent.
    """

    def __init__(
        self, descriptor: int, begin: Begin, payloads: Sequence[tuple[int, int]], runs: Sequence[CopiedRun]
    ) -> None:
        """payloads: spans whose bytes are to come, ascending; all others are there. Without any the file is whole.

        Args:
            begin: as for `ObjectPublication`.
            runs: what the store may copy by itself, ascending.
        """
        self._descriptor = descriptor
        self._payloads = payloads
        self._is_whole = not payloads
        self._ends = [end for _, end in payloads]
        self._size_bytes = os.fstat(descriptor).st_size
        self._planned = plan_parts(self._size_bytes, runs, is_uniform=wants_uniform_parts())
        self._starts = [part.start for part in self._planned]
        self._sampled = sampled_pages(self._size_bytes)
        file = SourceFile(f"/proc/self/fd/{descriptor}", descriptor)
        self.upload, there = begin(self._planned, digest_besides(file, payloads))
        earlier = {
            part.number - 1: part
            for part in there
            if 0 < part.number <= len(self._planned)
            and part.length_bytes == self._planned[part.number - 1].length_bytes
        }
        self._is_elsewhere = [bool(part.path) or number in earlier for number, part in enumerate(self._planned)]
        self._sent_instead = set[int]()  # numbers of parts that were to be copied
        self._missing = [sum(end - start for start, end in self._payloads_in(part)) for part in self._planned]
        self._memory = mmap.mmap(descriptor, self._size_bytes) if payloads and self._size_bytes else None
        self._pool, self._copying = ThreadPoolExecutor(_UNDER_WAY), ThreadPoolExecutor(_UNDER_WAY)
        self._queue: deque[Future[SentPart]] = deque()
        self._sent: dict[int, Future[SentPart]] = {}
        for number, part in enumerate(self._planned):
            if number in earlier:
                self._sent[number] = Future()
                self._sent[number].set_result(earlier[number])
            elif part.path:
                self._sent[number] = self._copying.submit(self._copy, number)

    @property
    def copied_bytes(self) -> int:
        """How many bytes of the target the store has copied by itself, when all parts are made."""
        numbered = enumerate(self._planned)
        return sum(part.length_bytes for number, part in numbered if part.path and number not in self._sent_instead)

    def close(self) -> None:
        for pool in (self._pool, self._copying):
            pool.shutdown(cancel_futures=True)
        if self._memory is not None:
            self._memory.close()

    def final(self, offset: int, length_bytes: int) -> None:
        """Take note that bytes of payloads are complete; send the parts that are. Raises what sending raises.

        Where the engine has put together a part that the store has, nothing is sent.
        """
        end, number = offset + length_bytes, bisect_right(self._starts, offset) - 1
        while offset < end:
            part = self._planned[number]
            stop = min(end, part.start + part.length_bytes)
            self._missing[number] -= stop - offset
            if self._missing[number] == 0 and self._is_elsewhere[number]:
                self._give_back(part)
            elif self._missing[number] == 0:
                self._send(number)
            offset = stop
            number += 1

    def missing_in(self, offset: int, length_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges, first byte and length, of these bytes that must be written.

        Others are in parts that the store copies, or has got before; but pages of which a sample is taken are needed.
        """
        end, number = offset + length_bytes, bisect_right(self._starts, offset) - 1
        while offset < end:
            part = self._planned[number]
            stop = min(end, part.start + part.length_bytes)
            if self._is_elsewhere[number]:
                for page in self._sampled[bisect_right(self._sampled, offset // _PAGE_BYTES - 1) :]:
                    first, last = max(offset, page * _PAGE_BYTES), min(stop, (page + 1) * _PAGE_BYTES)
                    if first >= stop:
                        break
                    yield first, last - first
            else:
                yield offset, stop - offset
            offset = stop
            number += 1

    def finish(self) -> list[SentPart]:
        """Send all that has not been sent; return the parts. Raises TransformError if bytes have not come."""
        unsent = (number for number, is_elsewhere in enumerate(self._is_elsewhere) if not is_elsewhere)
        incomplete = next((number for number in unsent if self._missing[number]), None)
        if incomplete is not None:
            raise TransformError(
                "a target was not filled as it was planned",
                expected=f"all bytes of part {incomplete + 1}",
                got=f"{self._missing[incomplete]} bytes less",
                where=str(self.upload.place),
                remedy="report this as a bug of reshard-mpi",
            )
        for number in range(len(self._planned)):
            if number not in self._sent:
                self._send(number)
        for number in range(len(self._planned)):
            self._sent[number].result()
        return self._settled()

    def _send(self, number: int) -> None:
        """Have a part sent; wait while as many as may be are on their way."""
        while self._queue and self._queue[0].done():
            self._queue.popleft().result()
        _sending.acquire()
        sending = self._sent[number] = self._pool.submit(self._send_part, number)
        sending.add_done_callback(lambda _: _sending.release())
        self._queue.append(sending)

    def _send_part(self, number: int) -> SentPart:
        sent = self.upload.send(number + 1, self._content(number))
        self._give_back(self._planned[number])
        return sent

    def _content(self, number: int) -> FilePart:
        part = self._planned[number]
        return FilePart(self._descriptor, part.start, part.length_bytes)

    def _settled(self) -> list[SentPart]:
        """Return all parts; send the ones that the store has not copied as it was asked to."""
        copied = [number for number, part in enumerate(self._planned) if part.path and number not in self._sent_instead]
        told = {part.number - 1: part for part in self.upload.parts()} if copied else {}
        settled = dict(zip(copied, self._pool.map(lambda number: self._as_asked(number, told.get(number)), copied)))
        return [settled.get(number) or self._sent[number].result() for number in range(len(self._planned))]

    def _as_asked(self, number: int, listed: SentPart | None) -> SentPart:
        """Return a copied part; send it instead if it is another one than was asked for.

        Some stores copy all of an object where a range is asked for, and say that all is well. Bytes are compared with
        those of the file, if that is whole.

        Args:
            listed: the same part in the store's list of them.
        """
        part = self._sent[number].result()
        if listed is None or listed.length_bytes != self._planned[number].length_bytes:
            return self._send_instead(number)
        if self._is_whole and not self._content(number).is_told_by(part, listed):
            return self._send_instead(number)
        return part

    def _copy(self, number: int) -> SentPart:
        """Have the store copy a part; send it where the store cannot."""
        part = self._planned[number]
        source = ObjectPlace.of(part.path)
        try:
            return self.upload.copy(number + 1, source, _state_of(source), part.offset, part.length_bytes)
        except StoreUnreachableError:
            raise
        except StoreError:
            return self._send_instead(number)

    def _send_instead(self, number: int) -> SentPart:
        """Send a part that was to be copied: from the file, if that is whole, or else fetched from its source."""
        self._sent_instead.add(number)
        if self._is_whole:
            return self._send_part(number)
        part = self._planned[number]
        source = ObjectPlace.of(part.path)
        state = _state_of(source)
        with tempfile.TemporaryFile() as file:
            for done in range(0, part.length_bytes, SENT_BYTES):
                buffer = memoryview(bytearray(min(SENT_BYTES, part.length_bytes - done)))
                read_range(source, state, part.offset + done, buffer)
                write_all(file.fileno(), buffer, done)
            return self.upload.send(number + 1, FilePart(file.fileno(), 0, part.length_bytes))

    def _give_back(self, part: PlannedPart) -> None:
        """Give back the memory of the payloads of a part, but for sampled pages."""
        if self._memory is None:
            return
        for start, end in self._payloads_in(part):
            for first, last in _between(-(-start // mmap.PAGESIZE), end // mmap.PAGESIZE, self._sampled):
                with contextlib.suppress(OSError, ValueError):  # it is kept then
                    length = (last - first) * mmap.PAGESIZE
                    self._memory.madvise(mmap.MADV_REMOVE, first * mmap.PAGESIZE, length)

    def _payloads_in(self, part: PlannedPart) -> Iterator[tuple[int, int]]:
        """Yield what of payloads lies in a part."""
        low, high = part.start, part.start + part.length_bytes
        for start, end in self._payloads[bisect_right(self._ends, low) :]:
            if start >= high:
                break
            yield max(low, start), min(high, end)


def _state_of(source: ObjectPlace) -> ObjectState:
    """Return a source object as it was listed, when the run began. Raises FileNotFoundError if it was not."""
    state = object_listing.state_of(source)
    if state is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(source))
    return state


def _between(first: int, last: int, kept: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield runs of pages, first and the one after the last, without pages to keep (ascending)."""
    for page in kept[bisect_right(kept, first - 1) :]:
        if page >= last:
            break
        if first < page:
            yield first, page
        first = page + 1
    if first < last:
        yield first, last
