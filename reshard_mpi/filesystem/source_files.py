"""Look at files and folders of checkpoints, and open them for reading (`entries`, `open_file`).

Any store can answer this: the names in a folder with kind and size, whether something is there, bytes of a file. A link
counts as the file or folder that it leads to. Addresses that begin with `s3://` lie in an object store
(`object_folders`, `object_files`); modules that know it are loaded where one is named.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, repeat
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

from reshard_mpi.errors import ShardError
from reshard_mpi.filesystem.paths import is_object_path

if TYPE_CHECKING:
    from mmap import mmap

    from reshard_mpi.filesystem.object_store import ObjectState
    from reshard_mpi.filesystem.read_ahead import ReadAhead

StrPath = str | os.PathLike[str]
# Nothing lies at a path that leads to one of these errors; after others that is not known.
_STREAM_BYTES = 64 << 10
_NOTHING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


class FileVersion(NamedTuple):
    """The version of a file: another one if it is written to, or if another file takes its place.

    The number of the device is no part of it, since hosts number a file system that they share differently.
    """

    inode: int
    size_bytes: int
    modified_ns: int  # since 1970
    links: int
    changed_ns: int  # when its status was last changed, which nobody can set back

    @classmethod
    def of(cls, status: os.stat_result) -> FileVersion:
        return cls(status.st_ino, status.st_size, status.st_mtime_ns, status.st_nlink, status.st_ctime_ns)

    def is_later_than(self, was: FileVersion) -> bool:
        """Tell whether the file was written or replaced since `was`.

        That another name was given to it, or taken from it, changes its status and nothing else: a target that replaces
        one does so if the source is a copy by hard links of what was there.
        """
        return self[:3] != was[:3] or (self.links == was.links and self.changed_ns != was.changed_ns)


class IrregularFileError(OSError):
    """A folder, pipe, socket or device is in the place of a file."""


class FileCutShortError(ShardError):
    """A file ends before bytes that it had when it was opened."""


class SourceFile:
    """A file that is open for reading.

    Attributes:
        version, size_bytes: as it was when it was opened, before anything was read of it.
    """

    __slots__ = ("_descriptor", "path", "size_bytes", "version")

    # Whether what was not read before is asked for from afar, so that it pays to ask for much at once.
    is_far: ClassVar[bool] = False

    def __init__(self, path: str, descriptor: int) -> None:
        """Read the file that is open as `descriptor`, and is closed by whoever opened it. Raises OSError for others."""
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise IrregularFileError(errno.EINVAL, "not a regular file", path)
        self.path = path
        self.version = FileVersion.of(status)
        self.size_bytes = status.st_size
        self._descriptor = descriptor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Kept here, since modules are emptied before the last objects go, when Python ends.
    _close = staticmethod(os.close)

    def close(self) -> None:
        self._close(self._descriptor)

    def will_read(self, spans: Iterable[tuple[int, int]]) -> None:
        """Be told which bytes are read next, from one to another: a store is asked for all of them at once."""

    def is_at_hand(self, offset: int, end: int) -> bool:
        """Tell whether bytes are read without a request to a store."""
        return True

    def read_ahead_by(self, ahead: ReadAhead | None) -> None:
        """Be told what fetches parts of it ahead, if it is an object."""

    def is_still(self, version: FileVersion | None) -> bool:
        """Tell whether the file that is open, be it where it was or not, is in this version. Raises OSError.

        An object is in the version that was opened: no other is ever read.
        """
        return version == FileVersion.of(os.fstat(self._descriptor))

    def read(self, offset: int, length_bytes: int) -> bytes:
        """Return bytes of the file from byte `offset` on, fewer only if it ends before.

        Raises ShardError if they cannot be read.
        """
        try:
            content = os.pread(self._descriptor, length_bytes, offset)
            # A system may read less than it is asked for.
            while len(content) < length_bytes and offset + len(content) < self.size_bytes:
                more = os.pread(self._descriptor, length_bytes - len(content), offset + len(content))
                if not more:
                    break
                content += more
        except (OSError, OverflowError) as error:
            raise ShardError("a shard cannot be read", got=str(error), where=f"{self.path}, byte {offset}") from error
        return content

    def read_exactly(self, offset: int, length_bytes: int) -> bytes:
        """Return as many bytes from byte `offset` on. Raises ShardError if they cannot be read or the file ends."""
        content = self.read(offset, length_bytes)
        if len(content) < length_bytes:
            raise self.became_shorter()
        return content

    def became_shorter(self) -> FileCutShortError:
        """Return the error for a file that ends before."""
        return FileCutShortError("a checkpoint became shorter while it was read", where=self.path)

    def read_into(self, offset: int, places: Sequence[memoryview]) -> int:
        """Read bytes from byte `offset` on into places, one after another; return how many, which may be too few.

        Raises OSError.
        """
        return os.preadv(self._descriptor, places, offset)

    def read_each(self, offset: int, step: int, places: Iterable[memoryview]) -> int:
        """Read bytes into each place, the first from byte `offset` on, each next one from `step` bytes further on.

        Returns how many bytes were read, which may be too few for any of the places. Raises OSError.
        """
        # Without a line of Python for each: there may be very many.
        return sum(map(os.preadv, repeat(self._descriptor), zip(places), count(offset, step)))

    def map(self, offset: int, length_bytes: int) -> tuple[mmap | memoryview, int]:
        """Map bytes from byte `offset` on; return the map, or what has them already, and where in it they begin.

        Raises ValueError if the file ends before, OSError if it cannot be mapped.
        """
        import mmap

        skipped = offset % mmap.ALLOCATIONGRANULARITY
        access = mmap.ACCESS_READ
        return mmap.mmap(self._descriptor, skipped + length_bytes, access=access, offset=offset - skipped), skipped

    def copy_into(self, target: int, offset: int, target_offset: int, length_bytes: int) -> int:
        """Copy bytes to the file `target` inside the kernel; return how many, which may be too few. Raises OSError."""
        return os.copy_file_range(self._descriptor, target, length_bytes, offset, target_offset)

    def advise_random(self) -> None:
        """Advise the kernel against reading ahead. Raises OSError if it takes no advice."""
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def advise(self, offset: int, length_bytes: int) -> None:
        """Advise the kernel to read bytes ahead. Raises OSError if it takes no advice."""
        os.posix_fadvise(self._descriptor, offset, length_bytes, os.POSIX_FADV_WILLNEED)


def open_file(path: str) -> SourceFile:
    """Open the file at `path`, to be closed after use.

    Raises OSError; ValueError for what can be no path; StoreError if an object store refuses to say what is there.
    """
    if is_object_path(path):
        from reshard_mpi.filesystem.object_files import open_object

        return open_object(path)
    # O_NONBLOCK: a pipe in the place of a shard must not make us wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return SourceFile(path, descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def open_stream(path: StrPath) -> io.BufferedReader:
    """Open a file as a stream, for what reads those. Raises as `open_file` does."""
    return stream_of(open_file(os.fspath(path))) if is_object_path(path) else open(path, "rb")


def stream_of(file: SourceFile) -> io.BufferedReader:
    """Return an open file as a stream; closing that leaves the file open."""
    return io.BufferedReader(FileStream(file), _STREAM_BYTES)


class FileStream(io.RawIOBase):
    """A file, or a range of one, as a stream of bytes that can be read from any place.

    Attributes:
        length_bytes: how many there are.
    """

    def __init__(self, file: SourceFile, start: int = 0, length_bytes: int | None = None) -> None:
        """start, length_bytes: the range; without a length it goes on to the end of the file."""
        super().__init__()
        self.length_bytes = file.size_bytes - start if length_bytes is None else length_bytes
        self._file = file
        self._start = start
        self._offset = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._offset, os.SEEK_END: self.length_bytes}[whence]
        self._offset = base + offset
        return self._offset

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        content = self._file.read(self._start + self._offset, max(0, min(len(view), self.length_bytes - self._offset)))
        view[: len(content)] = content
        self._offset += len(content)
        return len(content)


def first_bytes(path: StrPath, length_bytes: int, otherwise: bytes | None = None) -> bytes:
    """Return the first bytes of the file at `path`, or all if it is shorter.

    Args:
        otherwise: returned if it cannot be read; None: OSError is raised.
    """
    buffer = memoryview(bytearray(length_bytes))
    try:
        with open_file(os.fspath(path)) as file:
            return bytes(buffer[: file.read_into(0, [buffer])])
    except OSError:
        if otherwise is None:
            raise
        return otherwise


def version_of(path: StrPath) -> FileVersion:
    """Return the version of the file at `path` as it is now, of an object as it was listed. Raises OSError.

    What is read of an object is of the version that was listed: the store refuses every request once there is another.
    """
    if is_object_path(path):
        from reshard_mpi.filesystem.object_files import open_object

        return open_object(os.fspath(path)).version
    return FileVersion.of(os.stat(path))


def size_if_there(path: StrPath) -> int | None:
    """Return the size of the file at `path` in bytes; None if it is not there, or cannot be looked at."""
    try:
        return version_of(path).size_bytes
    except OSError:
        return None


def exists(path: StrPath) -> bool:
    """Tell whether anything lies at `path`. Raises OSError, as all who tell do, where the file system does not say."""
    return _mode(path) != 0


def is_file(path: StrPath, *, follow_link: bool = True) -> bool:
    """Tell whether a regular file lies at `path`. follow_link: whether one that a link leads to counts."""
    return stat.S_ISREG(_mode(path, follow_link=follow_link))


def is_folder(path: StrPath) -> bool:
    """Tell whether a folder lies at `path`."""
    return stat.S_ISDIR(_mode(path))


def is_taken(path: StrPath) -> bool:
    """Tell whether something is called so, be it a link that leads nowhere."""
    return _mode(path, follow_link=False) != 0


def _mode(path: StrPath, *, follow_link: bool = True) -> int:
    """Return the mode of what lies at `path`; 0 for nothing."""
    if is_object_path(path):
        from reshard_mpi.filesystem import object_folders
        from reshard_mpi.filesystem.object_store import ObjectPlace

        place = ObjectPlace.of(path)
        return (
            stat.S_IFREG if object_folders.state_of(place) else stat.S_IFDIR if object_folders.is_folder(place) else 0
        )
    try:
        return os.stat(path, follow_symlinks=follow_link).st_mode
    except ValueError:  # what can be no path
        return 0
    except OSError as error:
        if error.errno in _NOTHING:
            return 0
        raise


def look_again() -> None:
    """Forget what has been listed of object stores: a new command is told what lies there by then, in which store."""
    if "reshard_mpi.filesystem.object_folders" in sys.modules:
        from reshard_mpi.filesystem import object_folders, object_store

        object_folders.forget()
        object_store.look_again()


class FolderEntry(Protocol):
    """A name in a folder, with the kind and size of what lies there; these raise OSError where they are not known."""

    name: str

    @property
    def is_file(self) -> bool: ...

    @property
    def is_folder(self) -> bool: ...

    @property
    def size_bytes(self) -> int: ...


class _FileEntry:
    """A name in a folder of a file system."""

    __slots__ = ("_entry", "name")

    def __init__(self, entry: os.DirEntry[str]) -> None:
        self.name = entry.name
        self._entry = entry

    @property
    def is_file(self) -> bool:
        entry = self._entry
        return is_file(entry.path) if entry.is_symlink() else entry.is_file()

    @property
    def is_folder(self) -> bool:
        entry = self._entry
        return is_folder(entry.path) if entry.is_symlink() else entry.is_dir()

    @property
    def size_bytes(self) -> int:
        return self._entry.stat().st_size


class _ObjectEntry:
    """A name in a folder of an object store. state: of an object; None for a folder."""

    __slots__ = ("_state", "name")

    def __init__(self, name: str, state: ObjectState | None) -> None:
        self.name = name
        self._state = state

    @property
    def is_file(self) -> bool:
        return self._state is not None

    @property
    def is_folder(self) -> bool:
        return self._state is None

    @property
    def size_bytes(self) -> int:
        return 0 if self._state is None else self._state.size_bytes


def entries(folder: StrPath) -> list[FolderEntry]:
    """Return what lies in a folder, in the order of its names. Raises OSError if it cannot be listed."""
    if is_object_path(folder):
        return [_ObjectEntry(name, state) for name, state in sorted(_objects_in(folder).items())]
    with os.scandir(folder) as listed:
        return sorted(map(_FileEntry, listed), key=lambda entry: entry.name)


def _objects_in(folder: StrPath) -> dict[str, ObjectState | None]:
    from reshard_mpi.filesystem import object_folders
    from reshard_mpi.filesystem.object_store import ObjectPlace

    return object_folders.children(ObjectPlace.of(folder))


def names(folder: StrPath, otherwise: Sequence[str] | None = None) -> Sequence[str]:
    """Return the names in a folder.

    Args:
        otherwise: returned if it cannot be listed; None: OSError is raised.
    """
    try:
        return list(_objects_in(folder)) if is_object_path(folder) else os.listdir(folder)
    except OSError:
        if otherwise is None:
            raise
        return otherwise


def walk(folder: str) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the names of the folders and files in a folder, then in each folder whose name is left in the list.

    A folder that cannot be listed is passed over, as a link is.
    """
    if is_object_path(folder):
        return _walk_objects(folder)
    return ((folders, files) for _, folders, files in os.walk(folder))


def _walk_objects(folder: str) -> Iterator[tuple[list[str], list[str]]]:
    listed = _objects_in(folder)
    folders = [name for name, state in listed.items() if state is None]
    yield folders, [name for name, state in listed.items() if state is not None]
    for name in folders:
        yield from _walk_objects(f"{folder}/{name}")
