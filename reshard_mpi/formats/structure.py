"""Read the structure of untrusted files within bounds, and write it, for all formats (`opened`, `write_all`)."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter

from reshard_mpi.errors import ShardError, TargetError
from reshard_mpi.filesystem.paths import kind_of_start, real_path
from reshard_mpi.filesystem.source_files import IrregularFileError, SourceFile, open_file
from reshard_mpi.formats.locations import Span
from reshard_mpi.formats.manifest import HeaderDigest, Manifest

# Names of all tensors are kept in memory; no framework makes one this long.
MAX_NAME_BYTES = 4096
# Bounds the structure of one shard, so that a small hostile file can neither fill the memory nor take long. The largest
# checkpoints known, mixtures of experts, have some fifty thousand tensors.
MAX_TENSORS = 1 << 17
# The placement table of a checkpoint takes some 40 bytes for each parameter.
MAX_TEXT_BYTES = 16 << 20
# How much memory the kept structure of a shard may take, its strings included.
MAX_KEPT_BYTES = 48 << 20
# How much memory a tensor or string takes besides its text; a kind of tensors; each dimension of a kind.
_ENTRY_BYTES = 160
_KIND_BYTES = 700
_DIMENSION_BYTES = 60
MAX_STRING_BYTES = 16 << 20
# numpy stops at 64 dimensions, HDF5 at 32, MindSpore at 8.
MAX_DIMENSIONS = 32
# Spans of a file with smaller gaps than this are read by one call, which reads no more than the second number.
_CLOSE_BYTES, _READ_BYTES = 512, 64 << 10
_DIGEST_BYTES = 32
# An object store is told about as many spans at once before they are read.
_FORESEEN_SPANS = 1024
# Parts of a structure with smaller gaps than this are written by one call, which writes no more than the second number.
_SMALL_GAP_BYTES, _WRITTEN_BYTES = 16384, 256 << 10
_SUMMED_BYTES = 2 << 20


def kept_bytes(text: str) -> int:
    """Return how much memory a tensor of this name takes (without its kind), or a string."""
    return _ENTRY_BYTES + sys.getsizeof(text)


def kept_kind_bytes(dimensions: int) -> int:
    """Return the memory that a kind of tensors with this number of dimensions takes."""
    return _KIND_BYTES + _DIMENSION_BYTES * dimensions


@contextmanager
def opened(path: str) -> Iterator[SourceFile]:
    """Open the regular file `path` for reading, for a `with` block.

    Raises ShardError if it cannot be opened, is no regular file, or is empty.
    """
    try:
        file = open_file(path)
    except IrregularFileError as error:
        raise ShardError("a shard is not a regular file", where=path) from error
    except (OSError, ValueError) as error:
        remedy = "get the right to read it" if isinstance(error, PermissionError) else ""
        raise ShardError("a shard cannot be opened", got=str(error), where=path, remedy=remedy) from error
    with file:
        if file.size_bytes == 0:
            raise ShardError("a shard is empty", expected="a checkpoint", got="0 bytes", where=path)
        yield file


def ends_of(file: SourceFile) -> list[Span]:
    """Return the spans of the first and the last byte of a file, for one whose structure lies at both ends."""
    return [(0, 1), (file.size_bytes - 1, file.size_bytes)]


def foreseen(file: SourceFile, spans: Sequence[Span]) -> Iterator[Span]:
    """Yield spans of a file that are read one by one; an object store is asked for many at once before."""
    for number, span in enumerate(spans):
        if file.is_far and number % _FORESEEN_SPANS == 0:
            file.will_read(spans[number : number + _FORESEEN_SPANS])
        yield span


def crc32_of(file: SourceFile, span: Span, crc: int = 0, on_bytes: Callable[[int], None] = lambda _: None) -> int:
    """Return the CRC-32 of bytes of a file, continued from `crc`. Raises ShardError if the file has become shorter.

    Args:
        on_bytes: told how many bytes have just been read.
    """
    from zlib_ng.zlib_ng import crc32

    offset, end = span
    buffer = memoryview(bytearray(min(_SUMMED_BYTES, end - offset)))
    while offset < end:
        count = file.read_into(offset, [buffer[: end - offset]])
        if count == 0:
            raise file.became_shorter()
        crc = crc32(buffer[:count], crc)
        offset += count
        on_bytes(count)
    return crc


def other_kind(start: bytes, path: str, expected: str) -> ShardError | None:
    """Return the error for a file of another kind than `expected`, by its first bytes; None if they tell no kind."""
    kind = kind_of_start(start)
    if kind is None:
        return None
    return ShardError(f"a shard is {kind.what}", expected=expected, where=path, remedy=kind.remedy)


def is_file_name(text: str) -> bool:
    """Tell whether a text is the name of a file in a folder, and leads to no other folder."""
    return text not in ("", ".", "..") and "/" not in text and "\0" not in text


def step_in_name(folder: str, begin: str, digits: int, end: str = "") -> int | None:
    """Return the step that a folder is named after by a framework; None if it is called otherwise.

    Args:
        folder: its path, which may be `.` or a link.
        begin: of such a name, before the number of the step.
        digits: how many that has at least.
        end: of such a name, which it may lack.
    """
    match = re.fullmatch(rf"{begin}(\d{{{digits},12}})", real_path(folder).name.removesuffix(end), re.ASCII)
    return None if match is None else int(match[1])


def write_all(fd: int, data: bytes | memoryview, offset_bytes: int) -> None:
    """Write all of `data` at `offset_bytes`, however little a single call writes. Raises OSError."""
    left = memoryview(data)
    while left:
        written = os.pwrite(fd, left, offset_bytes)
        left = left[written:]
        offset_bytes += written


def contents(file: SourceFile, spans: Sequence[Span]) -> Iterator[bytes]:
    """Yield the bytes of ascending spans of a file; those close to each other are read by one call.

    Raises ShardError if it cannot be read, or ends before.
    """
    return chain.from_iterable(contents_by_call(file, spans))


def contents_by_call(file: SourceFile, spans: Sequence[Span]) -> Iterator[Sequence[bytes]]:
    """Yield what `contents` does, all that one call reads at once."""
    number = foreseen = 0
    while number < len(spans):
        if number >= foreseen:
            foreseen = number + _FORESEEN_SPANS
            file.will_read(spans[number:foreseen])
        base, end = spans[number]
        last, most = len(spans), base + _READ_BYTES
        for other in range(number + 1, last):
            start, stop = spans[other]
            if start - end > _CLOSE_BYTES or stop > most:
                last = other
                break
            end = stop
        content = file.read_exactly(base, end - base)
        if last == number + 1:
            yield (content,)
        else:
            yield [content[start - base : stop - base] for start, stop in spans[number:last]]
        number = last


def spans_besides(file: SourceFile, payloads: Iterable[Span], end: int) -> list[Span]:
    """Return the spans of a file besides payloads, up to byte `end`; a long one in parts.

    Args:
        payloads: ascending and apart.

    Raises ShardError if they do not lie before `end`.
    """
    spans, last = list[Span](), 0
    for start, stop in (*payloads, (end, end)):
        if not last <= start <= stop <= end:
            raise file.became_shorter()
        while start - last > _READ_BYTES:
            spans.append((last, last + _READ_BYTES))
            last += _READ_BYTES
        spans.append((last, start))
        last = stop
    return spans


def digest_besides(file: SourceFile, payloads: Iterable[Span]) -> str:
    """Return a digest of the length of a file and of all of its bytes but payloads, as hexadecimal digits.

    Args:
        payloads: ascending and apart.

    Raises ShardError if it cannot be read, FileCutShortError if it is shorter than they say.
    """
    digest = hashlib.blake2b(b"%d" % file.size_bytes, digest_size=_DIGEST_BYTES)
    for parts in contents_by_call(file, spans_besides(file, payloads, file.size_bytes)):
        digest.update(b"".join(parts))
    return digest.hexdigest()


class HeaderDigestWriter:
    """Writes a file's structure (all but payloads) in ascending order: neighbouring parts by one call."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._start = self._end = 0
        self._together: list[bytes] = []
        self._parts: list[bytes] = []
        self._digest = hashlib.blake2b()

    def add(self, offset: int, content: bytes) -> None:
        """Add what begins at byte `offset`, behind all that was added before; it is written later."""
        gap = offset - self._end
        if gap > _SMALL_GAP_BYTES or offset - self._start > _WRITTEN_BYTES:
            self._write()
            self._start = offset
        elif gap:
            self._together.append(bytes(gap))
        self._together.append(content)
        self._parts.append(content)
        self._end = offset + len(content)

    def _write(self) -> None:
        if self._together:
            write_all(self._fd, b"".join(self._together), self._start)
            self._digest.update(b"".join(self._parts))
            self._together.clear()
            self._parts.clear()

    def finish(self, size_bytes: int | None = None) -> HeaderDigest:
        """Write the rest, and give the file its length; None: it ends with what was added. Return its structure."""
        self._write()
        end = self._end if size_bytes is None else size_bytes
        os.ftruncate(self._fd, end)
        return HeaderDigest(end, self._digest.digest())


def require_own(is_valid: bool) -> None:
    """Raise ValueError unless what this program should have written into a file is valid."""
    if not is_valid:
        raise ValueError("not what this program has written")


def not_as_written(path: str) -> ShardError:
    """Return the error for a shard that is read back and does not have the structure that was written."""
    return ShardError(
        "a shard is not what was written a moment ago",
        expected="the structure that was meant",
        got="something else",
        where=path,
        remedy="look for a failing disk or memory, and make sure that nobody else writes there",
    )


def require_as_written(read_again: Manifest, meant: Manifest) -> None:
    """Raise ShardError if what was read back differs from what was meant in tensors, strings or structure."""
    parts = attrgetter("tensors", "strings", "header_digest")
    if parts(read_again) != parts(meant):
        raise not_as_written(meant.path)


def check_names(path: str, names: list[str]) -> None:
    """Check the names of a shard that is to be written. Raises TargetError if one could not be read back."""
    seen, remedy = set[str](), "rename it with a map (--map), or leave it out (--exclude)"
    for name in names:
        try:
            length_bytes = len(name.encode())
        except UnicodeEncodeError as error:
            raise TargetError(
                "a tensor's name is no Unicode text", got=repr(name), where=path, remedy=remedy
            ) from error
        if not 0 < length_bytes <= MAX_NAME_BYTES:
            raise TargetError(
                "a tensor's name has a length that cannot be stored",
                expected=f"1 to {MAX_NAME_BYTES} bytes",
                got=f"{length_bytes} bytes: {name[:60]!r}",
                where=path,
                remedy=remedy,
            )
        if name in seen:
            raise TargetError("two entries of one shard have the same name", got=repr(name), where=path, remedy=remedy)
        seen.add(name)
