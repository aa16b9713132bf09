"""Open files by path, exact reads and writes, bounded windows into them, and the count of what was asked for."""

from __future__ import annotations

import errno
import mmap
import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from reshard_mpi.errors import ShardError
from reshard_mpi.manifest import ByteRange

# Far below the usual limit of 1024 descriptors; a target rarely reads from more files than this at once.
_MAX_OPEN_FILES = 128
# What a file system says when it cannot copy between two files by itself.
_NO_KERNEL_COPY = {errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}


@dataclass(slots=True)
class Traffic:
    """Bytes counted while moving: asked of sources, lying in mapped windows, written to the target."""

    requested_bytes: int = 0
    mapped_bytes: int = 0
    written_bytes: int = 0


class Files:
    """Descriptors of source and target files, opened on first use and closed together."""

    def __init__(self) -> None:
        self._sources: OrderedDict[str, int] = OrderedDict()
        self._targets: dict[str, int] = {}
        self.traffic = Traffic()

    def __enter__(self) -> Files:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in (*self._sources.values(), *self._targets.values()):
            os.close(descriptor)
        self._sources.clear()
        self._targets.clear()

    def read_into(self, part: ByteRange, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of `part`. Raises ShardError if the file has become shorter."""
        descriptor = self._source(part.path)
        done = 0
        while done < part.length_bytes:
            count = os.preadv(descriptor, [buffer[done:]], part.offset_bytes + done)
            if count == 0:
                raise _became_shorter(part)
            done += count
        self.traffic.requested_bytes += part.length_bytes

    @contextmanager
    def window(self, part: ByteRange, requested_bytes: int) -> Iterator[memoryview]:
        """Map the bytes of `part` for reading; `requested_bytes` of them are going to be used."""
        start = part.offset_bytes - part.offset_bytes % mmap.ALLOCATIONGRANULARITY
        length = part.offset_bytes + part.length_bytes - start
        try:
            mapped = mmap.mmap(self._source(part.path), length, access=mmap.ACCESS_READ, offset=start)
        except ValueError:
            raise _became_shorter(part) from None
        self.traffic.requested_bytes += requested_bytes
        self.traffic.mapped_bytes += length
        with mapped, memoryview(mapped) as view, view[part.offset_bytes - start :] as inner:
            yield inner

    def write(self, part: ByteRange, buffer: memoryview) -> None:
        """Write `buffer` to the bytes of `part`."""
        descriptor = self._target(part.path)
        done = 0
        while done < part.length_bytes:
            done += os.pwrite(descriptor, buffer[done:], part.offset_bytes + done)
        self.traffic.written_bytes += part.length_bytes

    def copy(self, source: ByteRange, target: ByteRange, buffer: memoryview) -> None:
        """Copy a range of equal length, inside the kernel where the file systems can, else through `buffer`."""
        descriptors = self._source(source.path), self._target(target.path)
        done = 0
        while done < source.length_bytes:
            try:
                count = os.copy_file_range(
                    *descriptors,
                    source.length_bytes - done,
                    source.offset_bytes + done,
                    target.offset_bytes + done,
                )
            except OSError as error:
                if error.errno not in _NO_KERNEL_COPY:
                    raise
                self._copy_through(_rest(source, done), _rest(target, done), buffer)
                break
            if count == 0:
                raise _became_shorter(source)
            done += count
        self.traffic.requested_bytes += done
        self.traffic.written_bytes += done

    def _copy_through(self, source: ByteRange, target: ByteRange, buffer: memoryview) -> None:
        for at in range(0, source.length_bytes, len(buffer)):
            count = min(len(buffer), source.length_bytes - at)
            self.read_into(ByteRange(source.path, source.offset_bytes + at, count), buffer[:count])
            self.write(ByteRange(target.path, target.offset_bytes + at, count), buffer[:count])

    def _source(self, path: str) -> int:
        descriptor = self._sources.get(path)
        if descriptor is None:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._sources[path] = descriptor
            if len(self._sources) > _MAX_OPEN_FILES:
                os.close(self._sources.popitem(last=False)[1])
        return descriptor

    def _target(self, path: str) -> int:
        descriptor = self._targets.get(path)
        if descriptor is None:
            descriptor = self._targets[path] = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        return descriptor


def _rest(part: ByteRange, done: int) -> ByteRange:
    return ByteRange(part.path, part.offset_bytes + done, part.length_bytes - done)


def _became_shorter(part: ByteRange) -> ShardError:
    return ShardError(
        "a source file became shorter while it was read",
        expected=f"{part.offset_bytes + part.length_bytes} bytes or more",
        got=f"{Path(part.path).stat().st_size} bytes",
        where=part.path,
        remedy="make sure nothing writes to the source, and run again",
    )
