"""Send the parts of a file as they become complete, or have the store copy them (`StagedParts`).

Parts whose bytes are all there are sent, and their payloads given back; the structure between them stays, so that it
can be read once more. Of a file that is kept whole, parts are sent at the end, and the ones that the store has copied
are compared with it by their sums.
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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from reshard_mpi.engine.checksums import crc_of_pieces
from reshard_mpi.engine.open_files import sync_and_drop_cache
from reshard_mpi.engine.source_ranges import MOST_PARTS, SENT_BYTES, TargetRange, plan_parts
from reshard_mpi.errors import StoreError, StoreUnreachableError, TransformError
from reshard_mpi.filesystem import object_folders
from reshard_mpi.filesystem.object_store import ObjectPlace, ObjectState, read_range
from reshard_mpi.filesystem.object_uploads import FilePart, SentPart, Upload, wants_uniform_parts
from reshard_mpi.filesystem.source_files import SourceFile
from reshard_mpi.formats.locations import Span
from reshard_mpi.formats.structure import digest_besides, write_all
from reshard_mpi.journal.target_records import sampled_pages

# How many parts a process sends at once; they lie in memory, and so do parts that are being filled. As many parts of a
# target are copied at once.
_UNDER_WAY = 4
_sending = threading.BoundedSemaphore(_UNDER_WAY)
# Memory for parts that are sent or being filled, and for parts of each further target that is filled at the same time.
STAGED_BYTES = (_UNDER_WAY + 4) * SENT_BYTES
FILLED_BYTES = 2 * SENT_BYTES
_PAGE_BYTES = 4096

# Takes the parts, and a digest of all bytes of the file but payloads; returns an upload, and the parts that it has.
Begin = Callable[[Sequence[TargetRange], str], tuple[Upload, Sequence[SentPart]]]


class StagedParts:
    """The parts of a file that are sent while it is filled, or when it is whole, or are copied inside the store.

    Attributes:
        upload: by which they are sent.
    """

    def __init__(
        self,
        descriptor: int,
        begin: Begin,
        payloads: Sequence[Span],
        runs: Sequence[TargetRange],
        *,
        is_streamed: bool,
        recorded: Sequence[Span] = (),
    ) -> None:
        """payloads: spans whose bytes are to come, ascending; all others are there.

        Args:
            begin: as for `ObjectPublication`.
            runs: what the store may copy by itself, ascending.
            is_streamed: whether parts are sent as soon as they are complete, and their bytes given back.
            recorded: spans whose sums are known, ascending: what the store copies of them need not be in the file.
        """
        self._descriptor = descriptor
        self._payloads = payloads
        self._is_streamed = is_streamed
        self._ends = [end for _, end in payloads]
        self._size_bytes = os.fstat(descriptor).st_size
        most = MOST_PARTS - 1  # one more may come when the file is sealed
        self._planned = plan_parts(self._size_bytes, runs, is_uniform=wants_uniform_parts(), most=most)
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
        # Whether the bytes of a part are not written to the file.
        self._is_left_out = [
            bool(part.path) or number in earlier if is_streamed else self._is_known(part, recorded)
            for number, part in enumerate(self._planned)
        ]
        self._missing = [sum(end - start for start, end in self._payloads_in(part)) for part in self._planned]
        is_mapped = is_streamed and payloads and self._size_bytes
        self._memory = mmap.mmap(descriptor, self._size_bytes) if is_mapped else None
        self._pool, self._copying = ThreadPoolExecutor(_UNDER_WAY), ThreadPoolExecutor(_UNDER_WAY)
        self._queue: deque[Future[SentPart]] = deque()
        self._sent: dict[int, Future[SentPart]] = {}
        self._copies: dict[int, Future[SentPart | None]] = {}  # None: the store cannot
        self._copied: dict[int, SentPart] | None = None  # the ones that are as they were asked for, once that is known
        for number, part in enumerate(self._planned):
            if number in earlier:
                there_already = Future[SentPart]()
                there_already.set_result(earlier[number])
                of_kind: dict[int, Any] = self._copies if part.path else self._sent
                of_kind[number] = there_already
            elif part.path:
                self._copies[number] = self._copying.submit(self._copy, number)

    def _is_known(self, part: TargetRange, recorded: Sequence[Span]) -> bool:
        """Tell whether a part that the store copies lies in a span whose sum is known, and the store tells sums."""
        if not part.path or not self.upload.has_crc:
            return False
        place = bisect_right(recorded, (part.start, self._size_bytes)) - 1
        return place >= 0 and part.end <= recorded[place][1]

    @property
    def copied_bytes(self) -> int:
        """How many bytes of the target the store has copied by itself, when all parts are made."""
        return sum(end - start for start, end in self.copied_spans)

    @property
    def copied_spans(self) -> list[Span]:
        """The parts that the store has copied as it was asked to, ascending; a whole file has the same bytes."""
        parts = (self._planned[number] for number in sorted(self._settle()))
        return [(part.start, part.end) for part in parts]

    def close(self) -> None:
        for pool in (self._pool, self._copying):
            pool.shutdown(cancel_futures=True)
        if self._memory is not None:
            self._memory.close()

    def final(self, offset: int, length_bytes: int) -> None:
        """Take note that bytes of payloads are complete; send the parts that are. Raises what sending raises.

        Where the engine has put together a part that the store has, nothing is sent.
        """
        if not self._is_streamed:
            return
        for number, start, stop in self._parts_within(offset, offset + length_bytes):
            self._missing[number] -= stop - start
            if self._missing[number] == 0 and self._is_left_out[number]:
                self._give_back(self._planned[number])
            elif self._missing[number] == 0:
                self._send(number)

    def missing_in(self, offset: int, length_bytes: int) -> Iterator[Span]:
        """Yield the ranges, first byte and length, of these bytes that must be written.

        Others are in parts that the store copies, or has got before; but pages of which a sample is taken are needed.
        """
        for number, start, stop in self._parts_within(offset, offset + length_bytes):
            if not self._is_left_out[number]:
                yield start, stop - start
                continue
            for page in self._sampled[bisect_right(self._sampled, start // _PAGE_BYTES - 1) :]:
                first, last = max(start, page * _PAGE_BYTES), min(stop, (page + 1) * _PAGE_BYTES)
                if first >= stop:
                    break
                yield first, last - first

    def crc_of(self, start: int, end: int) -> int:
        """Return the CRC-32 of a span of the target: of bytes that are not in the file, as the store tells it.

        It must hold whole every part that is left out of the file.
        """
        copied, pieces = self._settle(), list[tuple[int, int]]()
        for number, first, stop in self._parts_within(start, end):
            crc = copied[number].crc if self._is_left_out[number] else None
            if crc is None:
                crc, _ = FilePart(self._descriptor, first, stop - first).sums(with_md5=False)
            pieces.append((crc, stop - first))
        return crc_of_pieces(pieces)

    def fetch(self, start: int, end: int) -> None:
        """Write what was left out of a span to the file; have it sent, where the store has copied other bytes."""
        copied = self._settle()
        left_out = [number for number, _, _ in self._parts_within(start, end) if self._is_left_out[number]]
        self._fill_in(left_out)
        for number in left_out:
            if not self._content(number).is_told_by(copied[number]):
                del copied[number]

    def finish(self) -> list[SentPart]:
        """Send all that has not been sent; return the parts. Raises TransformError if bytes have not come."""
        self._require_filled()
        self._append_rest()
        if not self._is_streamed:  # they may be of a process that did not compare them
            for number, part in list(self._sent.items()):
                if not self._content(number).is_told_by(part.result()):
                    del self._sent[number]
        self._send_all(number for number, part in enumerate(self._planned) if not part.path)
        copied = self._settle()
        self._send_all(number for number in self._copies if number not in copied)
        return [copied.get(number) or self._sent[number].result() for number in range(len(self._planned))]

    def _require_filled(self) -> None:
        filled = (number for number, is_left_out in enumerate(self._is_left_out) if not is_left_out)
        incomplete = next((number for number in filled if self._missing[number]), None) if self._is_streamed else None
        if incomplete is not None:
            raise TransformError(
                "a target was not filled as it was planned",
                expected=f"all bytes of part {incomplete + 1}",
                got=f"{self._missing[incomplete]} bytes less",
                where=str(self.upload.place),
                remedy="report this as a bug of reshard-mpi",
            )

    def _append_rest(self) -> None:
        """Have the end of a file sent by which it became longer when it was sealed."""
        rest_bytes, last = os.fstat(self._descriptor).st_size - self._size_bytes, self._planned[-1]
        if rest_bytes and last.path:
            self._planned.append(TargetRange(self._size_bytes, rest_bytes))
            self._is_left_out.append(False)
        elif rest_bytes:
            self._planned[-1] = last._replace(length_bytes=last.length_bytes + rest_bytes)

    def _send_all(self, numbers: Iterable[int]) -> None:
        """Send parts that have not been sent, and wait for them."""
        unsent = [number for number in numbers if number not in self._sent]
        for number in unsent:
            self._send(number)
        for number in unsent:
            self._sent[number].result()

    def _send(self, number: int) -> None:
        """Have a part sent; wait while as many as may be are on their way."""
        while self._queue and self._queue[0].done():
            self._queue.popleft().result()
        _sending.acquire()
        sending = self._sent[number] = self._pool.submit(self._send_part, number)
        sending.add_done_callback(lambda _: _sending.release())
        self._queue.append(sending)

    def _send_part(self, number: int) -> SentPart:
        """Send a part from the file; one that is not there, since the store was to copy it, from its source."""
        if self._is_left_out[number]:
            with tempfile.TemporaryFile() as file:
                self._fetch(number, file.fileno(), 0)
                content = FilePart(file.fileno(), 0, self._planned[number].length_bytes)
                return self.upload.send(number + 1, content)
        sent = self.upload.send(number + 1, self._content(number))
        self._give_back(self._planned[number])
        return sent

    def _content(self, number: int) -> FilePart:
        part = self._planned[number]
        return FilePart(self._descriptor, part.start, part.length_bytes)

    def _fetch(self, number: int, descriptor: int, offset: int) -> None:
        """Write a part that the store was to copy to a file at `offset`, read from its source."""
        part = self._planned[number]
        source = ObjectPlace.of(part.path)
        state = _state_of(source)
        for done in range(0, part.length_bytes, SENT_BYTES):
            buffer = memoryview(bytearray(min(SENT_BYTES, part.length_bytes - done)))
            read_range(source, state, part.offset + done, buffer)
            write_all(descriptor, buffer, offset + done)

    def _fill_in(self, numbers: Sequence[int]) -> None:
        """Write parts to the file that were left out, down to the disk, from which they are compared and sent."""
        for number in numbers:
            self._fetch(number, self._descriptor, self._planned[number].start)
            self._is_left_out[number] = False
        if numbers:
            sync_and_drop_cache(self._descriptor)

    def _copy(self, number: int) -> SentPart | None:
        """Have the store copy a part; return None where the store cannot."""
        part = self._planned[number]
        source = ObjectPlace.of(part.path)
        try:
            return self.upload.copy(number + 1, source, _state_of(source), part.offset, part.length_bytes)
        except StoreUnreachableError:
            raise
        except StoreError:
            return None

    def _settle(self) -> dict[int, SentPart]:
        """Return the parts that the store has copied as it was asked to, by number, when it has copied all that it can.

        Others are sent. What is left out of a file that is to be whole is fetched, where the store tells no CRC-32 of
        it; it may tell an MD5, which is held against the file then.
        """
        if self._copied is None:
            copies = {number: copy.result() for number, copy in self._copies.items()}
            listed = {part.number - 1: part for part in self.upload.parts()} if any(copies.values()) else {}

            def as_asked(numbers: Collection[int]) -> dict[int, SentPart]:
                parts = self._pool.map(
                    lambda number: self._as_asked(number, copies[number], listed.get(number)), numbers
                )
                return {number: part for number, part in zip(numbers, parts) if part is not None}

            self._copied = as_asked(copies)
            if not self._is_streamed:
                untold = [number for number in copies.keys() - self._copied.keys() if self._is_left_out[number]]
                self._fill_in(untold)
                self._copied |= as_asked(untold)
        return self._copied

    def _as_asked(self, number: int, copied: SentPart | None, listed: SentPart | None) -> SentPart | None:
        """Return a copied part; None if it is another one than was asked for, or the store does not tell.

        Some stores copy all of an object where a range is asked for, and say that all is well. Bytes are compared with
        those of the file, if they are there.

        Args:
            listed: the same part in the store's list of them.
        """
        if copied is None or listed is None or listed.length_bytes != self._planned[number].length_bytes:
            return None
        if self._is_streamed:
            return copied
        if self._is_left_out[number]:
            crcs = {part.crc for part in (copied, listed) if part.crc is not None}
            return copied._replace(crc=crcs.pop()) if len(crcs) == 1 else None
        return copied if self._content(number).is_told_by(copied, listed) else None

    def _give_back(self, part: TargetRange) -> None:
        """Give back the memory of the payloads of a part, but for sampled pages."""
        if self._memory is None:
            return
        for start, end in self._payloads_in(part):
            for first, last in _between(-(-start // mmap.PAGESIZE), end // mmap.PAGESIZE, self._sampled):
                with contextlib.suppress(OSError, ValueError):  # it is kept then
                    length = (last - first) * mmap.PAGESIZE
                    self._memory.madvise(mmap.MADV_REMOVE, first * mmap.PAGESIZE, length)

    def _parts_within(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield the number of each part that has bytes of a span, with the first of them and the one after the last."""
        number = bisect_right(self._starts, start) - 1
        while start < end:
            stop = min(end, self._planned[number].end)
            yield number, start, stop
            start, number = stop, number + 1

    def _payloads_in(self, part: TargetRange) -> Iterator[Span]:
        """Yield what of payloads lies in a part."""
        for start, end in self._payloads[bisect_right(self._ends, part.start) :]:
            if start >= part.end:
                break
            yield max(part.start, start), min(part.end, end)


def _state_of(source: ObjectPlace) -> ObjectState:
    """Return a source object as it was listed, when the run began. Raises FileNotFoundError if it was not."""
    state = object_folders.state_of(source)
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
