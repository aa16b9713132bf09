"""Keep files of sources and a target open; read, write, map and copy byte ranges, and count them (`Files`)."""

from __future__ import annotations

import errno
import mmap
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

from reshard_mpi.errors import ShardError
from reshard_mpi.filesystem.source_files import FileVersion, SourceFile, open_file, version_of
from reshard_mpi.formats.locations import ByteRange
from reshard_mpi.formats.protocol import OnBytes
from reshard_mpi.sharding.strides import Runs
from reshard_mpi.text import MIB

if TYPE_CHECKING:
    from reshard_mpi.filesystem.read_ahead import ReadAhead

# Far below the usual limit of 1024 descriptors; a target rarely reads from more files than this at once.
_MAX_OPEN_FILES = 128
# One call moves at most this much, so that progress can be shown and signals are handled between calls.
_MAX_CALL_BYTES = 64 * MIB
# How many places one call can read into, or write from (IOV_MAX).
_MAX_VECTOR = 1024
# Errors of a file system that cannot copy between two files by itself; or that cannot read one or write the other, in
# which case the read or the write that is tried instead tells which.
_NO_KERNEL_COPY = {errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF, errno.EIO}
_REMEDY = (
    "make sure nothing writes to the source; restore the file, or remove it if other ranks hold the same, and run the"
    " same command with --resume"
)


class Staging(Protocol):
    """A target that is sent to an object store while it is filled."""

    def final(self, offset: int, length_bytes: int) -> None:
        """Take note that bytes are complete, each byte once. Raises what sending raises."""

    def missing_in(self, offset: int, length_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges, first byte and length, of these bytes that the store does not copy by itself."""


class Traffic:
    """How many bytes were read from sources, mapped of them, and written to the target."""

    def __init__(self) -> None:
        self.requested_bytes = self.mapped_bytes = self.written_bytes = 0
        self.too_large = 0  # how many elements were too large for the type that they were converted to
        self.overflows: dict[str, int] = {}  # how many of these went into each target tensor, by name


class ByteRuns(NamedTuple):
    """Runs of bytes in one source file and in one target file. source, target: their paths."""

    source: str
    target: str
    runs: Runs


class Files:
    """Source files, opened on first use and closed together, and a target file, if there is one.

    Attributes:
        on_bytes: called with the number of target bytes just written.
        target: descriptor that is open for writing (and for reading, if `read_target` is called); the caller closes it.
        staging: told which parts of the target are complete, where it is sent to a store meanwhile.
        ahead: has objects fetched before they are asked for; the caller closes it.
        is_sparing: whether as little as possible is read of sources besides what is asked for; else the kernel reads
            ahead, and short runs are read with what lies between them.
    """

    def __init__(
        self,
        on_bytes: OnBytes = lambda _: None,
        target: int = -1,
        *,
        staging: Staging | None = None,
        ahead: ReadAhead | None = None,
        is_sparing: bool = False,
    ) -> None:
        self.staging = staging
        self.ahead = ahead
        self.is_sparing = is_sparing
        self._sources: OrderedDict[str, SourceFile] = OrderedDict()
        self._target = target
        self._kernel_copies = True
        self._on_bytes = on_bytes
        self._scratch = memoryview(b"")
        self.traffic = Traffic()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        for source in self._sources.values():
            source.close()
        self._sources.clear()

    def read_into(self, part: ByteRange, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of `part`. Raises ShardError if they cannot be read."""
        source, done = self._source(part.path), 0
        while done < part.length_bytes:
            count = _read(source, part.offset_bytes + done, [buffer[done:]])
            if count == 0:
                raise _became_shorter(part)
            done += count
        self.traffic.requested_bytes += part.length_bytes

    def read_all(self, parts: Iterable[ByteRange], buffer: memoryview) -> None:
        """Read ranges of files, one behind the other, into the beginning of `buffer`, as `read_into` does."""
        done = 0
        for part in parts:
            self.read_into(part, buffer[done : done + part.length_bytes])
            done += part.length_bytes

    def read_scattered(self, part: ByteRange, places: Sequence[memoryview]) -> None:
        """Read the bytes of `part` into `places`, one after another.

        The places must be equally long, and together as long as `part`. Raises ShardError if the bytes cannot be read.
        """
        source, offset, length = self._source(part.path), part.offset_bytes, len(places[0])
        for first in range(0, len(places), _MAX_VECTOR):
            vector = places[first : first + _MAX_VECTOR]
            count = _read(source, offset, vector)
            self.traffic.requested_bytes += count
            if count < length * len(vector):  # interrupted by a signal, or the file ends
                self._read_rest(part.path, offset, vector, count)
            offset += length * len(vector)

    def read_each(self, path: str, offset: int, step: int, places: Sequence[memoryview]) -> None:
        """Fill each place from the file: the first from `offset` on, each next one from `step` bytes further on.

        Raises ShardError if the bytes cannot be read.
        """
        source, length_bytes = self._source(path), sum(map(len, places))
        if source.is_far and self.ahead is None:
            self._fetch_each(source, offset, step, places)
            return
        try:
            read = source.read_each(offset, step, places)
        except OSError as error:
            raise unreadable(source.path, error) from error
        if read < length_bytes:  # interrupted by a signal, or the file ends
            for number, place in enumerate(places):
                self.read_into(ByteRange(path, offset + number * step, len(place)), place)
            return
        self.traffic.requested_bytes += length_bytes

    def _fetch_each(self, source: SourceFile, offset: int, step: int, places: Sequence[memoryview]) -> None:
        """Fill places as `read_each` does, from an object; the store is asked for all parts at once."""
        from reshard_mpi.filesystem.read_ahead import ReadAhead

        starts = [offset + number * step for number in range(len(places))]
        with closing(ReadAhead((source.path, start, len(place)) for start, place in zip(starts, places))) as ahead:
            source.read_ahead_by(ahead)
            try:
                for start, place in zip(starts, places):
                    self.read_into(ByteRange(source.path, start, len(place)), place)
            finally:
                source.read_ahead_by(None)

    def _read_rest(self, path: str, offset: int, places: Sequence[memoryview], done: int) -> None:
        """Read the bytes from `offset` on into `places`, whose first `done` bytes have been read."""
        for place in places:
            skipped = min(done, len(place))
            if skipped < len(place):
                self.read_into(ByteRange(path, offset + skipped, len(place) - skipped), place[skipped:])
            done -= skipped
            offset += len(place)

    def is_open_as(self, path: str, version: FileVersion | None) -> bool:
        """Tell whether a file is open and still this version, with as many names as it had."""
        source = self._sources.get(path)
        try:
            return source is not None and source.is_still(version)
        except OSError:
            return False

    def advise(self, part: ByteRange) -> None:
        """Advise the kernel to read `part` ahead; does nothing if that is not possible."""
        with suppress(OSError, ShardError):
            self._source(part.path).advise(part.offset_bytes, part.length_bytes)

    @contextmanager
    def window(self, part: ByteRange, requested_bytes: int) -> Iterator[memoryview]:
        """Map the bytes of `part` for reading. requested_bytes: how many of them are used, for `traffic`.

        Raises ShardError if they cannot be mapped.
        """
        source = self._source(part.path)
        try:
            mapped, skipped = source.map(part.offset_bytes, part.length_bytes)
        except ValueError:
            raise _became_shorter(part) from None
        except OSError as error:
            raise unreadable(part.path, error) from error
        self.traffic.requested_bytes += requested_bytes
        self.traffic.mapped_bytes += len(mapped)
        view = memoryview(mapped)
        inner = view[skipped:]
        yield inner  # an error may keep arrays of it, and with them the map; closing it then would be another error
        inner.release()
        view.release()
        if isinstance(mapped, memoryview):
            mapped.release()
        else:
            mapped.close()

    def scratch(self, length_bytes: int) -> memoryview:
        """Return a buffer for bytes on their way to their place. It is valid until the next call."""
        if length_bytes > len(self._scratch):
            self._scratch = memoryview(b"")  # given back before more is taken
            self._scratch = large_buffer(length_bytes)
        return self._scratch[:length_bytes]

    def read_target(self, part: ByteRange, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of `part`, a range of the target. Raises OSError."""
        done = 0
        while done < part.length_bytes:
            count = os.preadv(self._target, [buffer[done:]], part.offset_bytes + done)
            if count == 0:
                raise OSError(errno.EIO, "the target became shorter while it was written", part.path)
            done += count

    def write(self, part: ByteRange, buffer: memoryview, moved_bytes: int | None = None) -> None:
        """Write `buffer` to `part`, a range of the target.

        Args:
            moved_bytes: how many of the bytes count as written (others were there before); None: all.

        Raises OSError.
        """
        done = 0
        while done < part.length_bytes:
            try:
                done += os.pwrite(self._target, buffer[done:], part.offset_bytes + done)
            except OSError as error:
                raise _about(error, part.path) from None
        self._wrote(part.length_bytes if moved_bytes is None else moved_bytes)

    def write_each(self, path: str, offset: int, step: int, contents: Sequence[memoryview]) -> None:
        """Write each content to the target, the first to `offset`, each next one `step` bytes further on.

        The contents must be equally long. Those that follow one another go many at a time. Raises OSError.
        """
        length = len(contents[0])
        together = _MAX_VECTOR if step == length else 1
        for first in range(0, len(contents), together):
            vector = contents[first : first + together]
            try:
                count = os.pwritev(self._target, vector, offset)
            except OSError as error:
                raise _about(error, path) from None
            self._wrote(count)
            while count < length * len(vector):  # interrupted by a signal, or the disk is full
                number, done = divmod(count, length)
                self.write(ByteRange(path, offset + count, length - done), vector[number][done:])
                count += length - done
            offset += step * len(vector)

    def copy(self, copied: ByteRuns, buffer: memoryview) -> None:
        """Copy runs of bytes: inside the kernel if the file systems can do that, else through `buffer`.

        Raises ShardError if the source cannot be read, OSError if the target cannot be written.
        """
        if self.staging is None:
            self._copy(copied, buffer)
            return
        length = copied.runs.length
        for source, target in copied.runs.offsets():
            written_bytes = 0
            for offset, missing_bytes in self.staging.missing_in(target, length):
                run = Runs(source + offset - target, offset, missing_bytes)
                self._copy(copied._replace(runs=run), buffer)
                written_bytes += missing_bytes
            if written_bytes < length:
                self._wrote(length - written_bytes)

    def _copy(self, copied: ByteRuns, buffer: memoryview) -> None:
        """Copy runs of bytes as `copy` does, all of them."""
        done = self._copy_in_kernel(copied) if self._kernel_copies else 0
        whole, done = divmod(done, copied.runs.length)
        for source, target in copied.runs.offsets(whole):
            for start in range(done, copied.runs.length, len(buffer)):
                count = min(len(buffer), copied.runs.length - start)
                self.read_into(ByteRange(copied.source, source + start, count), buffer[:count])
                self.write(ByteRange(copied.target, target + start, count), buffer[:count])
                self.final(target + start, count)
            done = 0

    def _copy_in_kernel(self, copied: ByteRuns) -> int:
        """Copy runs in order; return how many bytes. It stops early if the file systems turn out not to support it."""
        source, length = self._source(copied.source), copied.runs.length
        copied_bytes = reported = 0
        try:
            for source_offset, target_offset in copied.runs.offsets():
                done = 0
                while done < length:
                    start, most_bytes = source_offset + done, min(length - done, _MAX_CALL_BYTES)
                    count = source.copy_into(self._target, start, target_offset + done, most_bytes)
                    if count == 0:
                        raise _became_shorter(ByteRange(copied.source, start, length - done))
                    self.final(target_offset + done, count)
                    done += count
                    copied_bytes += count
                if copied_bytes - reported >= _MAX_CALL_BYTES:
                    self._wrote(copied_bytes - reported)
                    reported = copied_bytes
        except OSError as error:
            if error.errno not in _NO_KERNEL_COPY:
                raise _about(error, copied.source, copied.target) from None
            self._kernel_copies = False
        self.traffic.requested_bytes += copied_bytes
        self._wrote(copied_bytes - reported)
        return copied_bytes

    def final(self, offset: int, length_bytes: int) -> None:
        """Take note that these bytes of the target are complete. Raises what `Staging.final` raises."""
        if self.staging is not None:
            self.staging.final(offset, length_bytes)

    def _wrote(self, count_bytes: int) -> None:
        self.traffic.written_bytes += count_bytes
        self._on_bytes(count_bytes)

    def _source(self, path: str) -> SourceFile:
        source = self._sources.get(path)
        if source is None:
            try:
                source = self._sources[path] = open_file(path)
                source.read_ahead_by(self.ahead)
            except OSError as error:
                raise unreadable(path, error) from error
            if self.is_sparing:
                with suppress(OSError):
                    source.advise_random()
            if len(self._sources) > _MAX_OPEN_FILES:
                self._sources.popitem(last=False)[1].close()
        return source


def _read(source: SourceFile, offset: int, places: Sequence[memoryview]) -> int:
    """Read as `SourceFile.read_into` does. Raises ShardError."""
    try:
        return source.read_into(offset, places)
    except OSError as error:
        raise unreadable(source.path, error) from error


def large_buffer(length_bytes: int) -> memoryview:
    """Return zeroed memory, in large pages if there are any: what moves to and fro in it is found faster."""
    memory = mmap.mmap(-1, max(1, length_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # a kernel without them; a system that is not Linux
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)[:length_bytes]


# MADV_POPULATE_WRITE of Linux 5.14 and later, which Python has no name for.
_POPULATE_WRITE = 23


def populate(address: int, length_bytes: int) -> None:
    """Have the kernel give all pages of memory that is about to be filled; one by one, as they are met, costs more."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + length_bytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0:
        _madvise()(start, length, _POPULATE_WRITE)  # if it fails, they are given one by one


@cache
def _madvise() -> Callable[[int, int, int], object]:
    """Return the C library's function; one that does nothing where numbers of advice are others than Linux's."""
    import ctypes

    if sys.platform != "linux":
        return lambda *_: None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def _about(error: OSError, path: str, other: str | None = None) -> OSError:
    """Return a file system's error with the paths it is about, which calls by descriptor leave out."""
    return OSError(error.errno, error.strerror, path, None, other)


def sync_and_drop_cache(descriptor: int) -> None:
    """Write a file to the disk and drop it from the page cache, so that it is read back from the disk if possible."""
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def unreadable(path: str, error: OSError) -> ShardError:
    """Return the error for a source file that was sound when it was opened."""
    return ShardError("a source file cannot be read", got=error.strerror or str(error), where=path, remedy=_REMEDY)


def _became_shorter(part: ByteRange) -> ShardError:
    return ShardError(
        "a source file became shorter while it was read",
        expected=f"{part.offset_bytes + part.length_bytes} bytes or more",
        got=f"{version_of(part.path).size_bytes} bytes",
        where=part.path,
        remedy=_REMEDY,
    )
