"""Name a file only when it is complete (`Publication`), and remove files of dead writers (`remove_dead_partials`).

A process that is killed leaves a partial file. Where one process at a time may write a file, the next one removes it.
Where several may, each holds a lock on its partial file as long as it lives, so a dead one's file has no lock.
Locks may not reach other hosts, so the name of a partial file has a digest of its host, and each removes its own only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from reshard_mpi.errors import TargetError
from reshard_mpi.filesystem.folders import FileIdentity, Folder, close, closing, replaced, try_lock
from reshard_mpi.filesystem.source_files import SourceFile
from reshard_mpi.journal.record_files import UPLOAD_ENDING

if TYPE_CHECKING:
    from reshard_mpi.journal.target_records import TensorSum

    Announce = Callable[[SourceFile, Sequence[TensorSum], str], None]

_PARTIAL = ".partial"
_TOKEN_BYTES = 6
# What `st_blocks` counts in, whatever the blocks of the file system.
_BLOCK_BYTES = 512


class Publication:
    """A file that is written in the folder of its final name, and takes that name when `publish` is called.

    If the block ends without that, the file is removed.

    Attributes:
        partial: its path until then. descriptor: open for reading and writing as long as the block lasts.
        announce: called before the file takes its name, with the open file and the sums given to `publish`.
        confirm: called when it is in place, with its descriptor.
        host: the name of this host if other processes may write the same file at once: then its partial file has a
            digest of this name, and is locked. Otherwise "".
        store_copied_bytes: how many bytes of it an object store has copied by itself, when it is published.
    """

    store_copied_bytes = 0

    def __init__(
        self,
        folder: Folder,
        name: str,
        announce: Announce = lambda *_: None,
        confirm: Callable[[int], None] = lambda _: None,
        host: str = "",
    ) -> None:
        self._folder = folder
        self._name = name
        self._announce = announce
        self._confirm = confirm
        self._host = host
        self._partial_name = self._new_name()
        self.is_published = False

    @property
    def partial(self) -> Path:
        return self._folder.path / self._partial_name

    @property
    def identity(self) -> FileIdentity:
        return FileIdentity.of(self.descriptor)

    def __enter__(self) -> Self:
        try:
            self._create()
        except TargetError:
            raise
        except BaseException:  # as when this process is told to stop
            with contextlib.suppress(OSError):
                self._folder.remove(self._partial_name)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # what stays is removed when the file is written again
            if not self.is_published:
                self._folder.remove(self._partial_name)
        close(self.descriptor)  # what was to be kept is on the disk

    def _create(self) -> None:
        """Make the partial file, locked where others may write the same file."""
        while True:
            self.descriptor = self._folder.create(self._partial_name)
            # Before it was locked, another process may have taken it for a dead writer's and removed it.
            if not self._host or (
                _try_lock(self.descriptor) is not False and self._folder.is_called(self._partial_name, self.descriptor)
            ):
                return
            close(self.descriptor)
            self._partial_name = self._new_name()

    def _new_name(self) -> str:
        head = _host_digest(self._host) if self._host else ""
        return partial_name(self._name, head + os.urandom(_TOKEN_BYTES - len(head) // 2).hex())

    def publish(self, sums: Sequence[TensorSum] = (), besides: str = "", *, synced: bool = True) -> None:
        """Put the file in place of whatever is there.

        Args:
            sums: of its tensors, for its record; besides: a digest of all else (see `TargetRecord`).
            synced: False if it need not survive a loss of power.
        """
        if synced:
            os.fsync(self.descriptor)
        os.close(os.dup(self.descriptor))  # on which network file systems may report an error of writing
        self._announce(SourceFile(str(self.partial), self.descriptor), sums, besides)
        self._folder.replace(self._partial_name, self._name, self.descriptor)
        self.is_published = True
        if synced:
            self._folder.sync()
        self._confirm(self.descriptor)


@contextlib.contextmanager
def opened_partial(path: Path, name: str, identity: FileIdentity) -> Iterator[int]:
    """Open the partial file `name` of the target `path`, which another process of this host has made, to write to it.

    Raises TargetError if it is another file by now.
    """
    rank_folder = path.absolute().parent  # which may be the working folder itself
    with Folder.open(rank_folder.parent) as folder, folder.inner(rank_folder.name) as inner:
        fd = inner.open_file(name, os.O_RDWR, "a target that is being written")
        try:
            if FileIdentity.of(fd) != identity:
                raise replaced(inner.path / name)
            yield fd
        finally:
            os.close(fd)


def partial_name(name: str, token: str = "0" * 2 * _TOKEN_BYTES) -> str:
    """Return the name of a file before it is published. token: tells it from the partial files of other writers."""
    return f".{name}.{token}{_PARTIAL}"


def partial_path(path: Path) -> Path:
    """Return a path as long as the partial path of `path`, to check the limits of names."""
    return path.with_name(partial_name(path.name))


def is_partial(path: Path, of: str = "") -> bool:
    """Tell whether `path` is named like a file that is not published yet. of: its name then, if not any."""
    return path.name.startswith(f".{of}." if of else ".") and path.name.endswith(_PARTIAL)


def publish_text(folder: Folder, name: str, text: str, *, synced: bool = True, modified_ns: int | None = None) -> None:
    """Write a small file in place of whatever is there.

    Args:
        synced: as for `Publication.publish`.
        modified_ns: the time of modification that it gets (nanoseconds since 1970); None: that of the writing.
    """
    publish_bytes(folder, name, text.encode(), synced=synced, modified_ns=modified_ns)


def publish_bytes(
    folder: Folder, name: str, content: bytes, *, synced: bool = True, modified_ns: int | None = None
) -> None:
    """Write a small file as `publish_text` does."""
    if folder.put(name, content):
        return
    with Publication(folder, name) as publication:
        with open(publication.descriptor, "wb", closefd=False) as stream:
            stream.write(content)
        if modified_ns is not None:
            with contextlib.suppress(OSError):  # a file system without such times
                os.utime(publication.descriptor, ns=(modified_ns, modified_ns))
        publication.publish(synced=synced)


def require_own_partials(folder: Folder, name: str) -> None:
    """Raise TargetError if a partial file of `name` belongs to another user, or may not be removed."""
    for partial in _partial_names(folder, f".{name}."):
        with contextlib.suppress(FileNotFoundError):  # whose writer has just published it
            folder.require_removable(partial)


def remove_dead_partials(folder: Folder, name: str, host: str = "") -> None:
    """Remove the partial files of `name` whose writers have died.

    Args:
        host: as for `Publication`: with it only those are removed that were made on this host and are not locked.
            Otherwise nobody else may be writing the file, so all are removed; raises TargetError if one belongs to
            another user.
    """
    if not host:
        require_own_partials(folder, name)
    for partial in _dead_partials(folder, name, host):
        folder.remove(partial)


def dead_partial_bytes(folder: Folder, name: str, host: str = "") -> int:
    """Return how much space `remove_dead_partials` would free."""
    return sum(folder.blocks(partial) for partial in _dead_partials(folder, name, host)) * _BLOCK_BYTES


def remove_dead_records(state: Folder) -> None:
    """Remove partial records, and upload records, of writers that have died; nobody may be writing targets."""
    for name in state.names():
        is_partial_record = name.startswith(".rank_") and ".json." in name and name.endswith(_PARTIAL)
        if is_partial_record or (name.startswith("rank_") and name.endswith(UPLOAD_ENDING)):
            state.remove(name)


def _dead_partials(folder: Folder, name: str, host: str) -> Iterator[str]:
    """Yield the partial files of `name`; with `host`, only those made on it that nobody has locked."""
    if not host:
        yield from _partial_names(folder, f".{name}.")
        return
    for partial in _partial_names(folder, f".{name}.{_host_digest(host)}"):
        try:
            fd = _opened_to_lock(folder, partial)
        except (OSError, TargetError):
            continue  # it is gone, or no file of ours
        with closing(fd):
            if _try_lock(fd) and folder.is_called(partial, fd):
                yield partial


def _partial_names(folder: Folder, beginning: str) -> list[str]:
    return [name for name in folder.names() if name.startswith(beginning) and name.endswith(_PARTIAL)]


def _opened_to_lock(folder: Folder, name: str) -> int:
    try:
        return folder.open_file(name, os.O_RDWR, "a partial file")  # as some network file systems want it for a lock
    except PermissionError:  # it has been sealed
        return folder.open_file(name, os.O_RDONLY, "a partial file")


def _try_lock(fd: int) -> bool | None:
    """Take a lock if nobody has it, and tell whether it was taken; None if the file system has no locks."""
    try:
        return try_lock(fd, fcntl.LOCK_EX)
    except OSError:
        return None


def _host_digest(host: str) -> str:
    return f"{zlib.crc32(host.encode(errors='replace')) & 0xFFFF:04x}"
