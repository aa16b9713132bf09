"""Files that take their names whole and for good: written beside, synced, renamed.

Who is killed leaves what it has written so far. Where one process at a time may write a file, the next one removes it
(`remove_stale`). Where several may, each holds a lock on its partial file as long as it lives, and by that is told what
the dead have left (`remove_dead`). Locks may not reach other hosts, so the dead are looked for on their own: a name has
a digest of the host that it was made on.
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
from reshard_mpi.filesystem.folders import FileIdentity, Folder, close, replaced
from reshard_mpi.filesystem.locks import try_lock

if TYPE_CHECKING:
    from reshard_mpi.journal.records import TensorSum

    Before = Callable[[os.stat_result, Sequence[TensorSum]], None]

_PARTIAL = ".partial"
_TOKEN_BYTES = 6
# What `st_blocks` counts in, whatever the blocks of the file system.
_BLOCK_BYTES = 512


class Publication:
    """A file that is written beside its final path and takes that name, synced, when `publish` is called.

    Left without that, for whatever reason, it is removed. partial: what it is called until then; descriptor: it is
    open, for reading and writing, as long as the block lasts. mode: its permissions, before the user's mask. before:
    called with what the whole file is, and the sums of what it holds where they are given, before it takes its name.
    then: called when it is in place. host: the name of this host, where others may write the same file at once.
    """

    def __init__(
        self,
        folder: Folder,
        name: str,
        mode: int = 0o666,
        before: Before = lambda *_: None,
        then: Callable[[], None] = lambda: None,
        host: str = "",
    ) -> None:
        self._folder = folder
        self._name = name
        self._before = before
        self._then = then
        self._mode = mode
        self._host = host
        self._is_published = False

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
        except BaseException:  # as where this process is told to stop
            with contextlib.suppress(OSError):
                self._folder.remove(self._partial_name)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # what stays is removed when the file is written again
            if not self._is_published:
                self._folder.remove(self._partial_name)
        close(self.descriptor)  # what was to be kept is on the disk

    def _create(self) -> None:
        """Make the partial file, locked where others may write the same file."""
        while True:
            head = _host_digest(self._host) if self._host else ""
            self._partial_name = partial_name(self._name, head + os.urandom(_TOKEN_BYTES - len(head) // 2).hex())
            self.descriptor = self._folder.create(self._partial_name, self._mode)
            # Before it was locked, it may have been taken for what one of the dead has left.
            if not self._host or (
                _try_lock(self.descriptor) is not False and self._folder.is_called(self._partial_name, self.descriptor)
            ):
                return
            close(self.descriptor)

    def publish(self, sums: Sequence[TensorSum] = (), *, synced: bool = True) -> None:
        """Put the file in place, whatever was there. synced: False where it need not outlive a loss of power."""
        if synced:
            os.fsync(self.descriptor)
        os.close(os.dup(self.descriptor))  # at which network file systems may say what they have not said before
        self._before(os.fstat(self.descriptor), sums)
        self._folder.replace(self._partial_name, self._name, self.descriptor)
        self._is_published = True
        if synced:
            self._folder.sync()
        self._then()


@contextlib.contextmanager
def opened_partial(path: Path, name: str, identity: FileIdentity) -> Iterator[int]:
    """Open the file of the target `path` that another process of this host has made under `name`, to write to it.

    Raises TargetError if that is another file by now.
    """
    with Folder.open(path.parent.parent) as folder, folder.inner(path.parent.name) as place:
        descriptor = place.open_file(name, os.O_RDWR, "a target that is being written")
        try:
            if FileIdentity.of(descriptor) != identity:
                raise replaced(place.path / name)
            yield descriptor
        finally:
            os.close(descriptor)


def partial_name(name: str, token: str = "0" * 2 * _TOKEN_BYTES) -> str:
    """Return what a file is called before it is published; token: what tells this writer's from others'."""
    return f".{name}.{token}{_PARTIAL}"


def partial_path(path: Path) -> Path:
    """Return a path as long as that where a file is written before it is published."""
    return path.with_name(partial_name(path.name))


def is_partial(path: Path) -> bool:
    """Tell whether a file has a name that files have before they are published."""
    return path.name.startswith(".") and path.name.endswith(_PARTIAL)


def publish_text(folder: Folder, name: str, text: str, *, synced: bool = True) -> None:
    """Put a small file in place, whatever was there. synced: as for `Publication.publish`."""
    publish_bytes(folder, name, text.encode(), synced=synced)


def publish_bytes(folder: Folder, name: str, content: bytes, *, synced: bool = True) -> None:
    """Put a small file in place, as `publish_text` does."""
    with Publication(folder, name) as publication:
        with open(publication.descriptor, "wb", closefd=False) as stream:
            stream.write(content)
        publication.publish(synced=synced)


def require_own_stale(folder: Folder, name: str) -> None:
    """Raise TargetError if another user has left something of the file `name`."""
    for stale in _stale(folder, name):
        with contextlib.suppress(FileNotFoundError):  # whose writer has just published it
            folder.require_own_file(stale)


def remove_stale(folder: Folder, name: str) -> None:
    """Remove what processes that died have left of the file `name`; nobody else may be writing it."""
    require_own_stale(folder, name)
    for stale in _stale(folder, name):
        folder.remove(stale)


def stale_bytes(folder: Folder, name: str) -> int:
    """Return what `remove_stale` would make free."""
    return sum(folder.blocks(stale) for stale in _stale(folder, name)) * _BLOCK_BYTES


def remove_dead(folder: Folder, name: str, host: str) -> None:
    """Remove what writers of the file `name` on this host that died have left; others may be writing it."""
    for dead in _dead(folder, name, host):
        folder.remove(dead)


def dead_bytes(folder: Folder, name: str, host: str) -> int:
    """Return what `remove_dead` would make free."""
    return sum(folder.blocks(dead) for dead in _dead(folder, name, host)) * _BLOCK_BYTES


def remove_stale_records(state: Folder) -> None:
    """Remove what writers of records that died have left; nobody else may be writing targets."""
    for name in state.names():
        if name.startswith(".rank_") and ".json." in name and name.endswith(_PARTIAL):
            state.remove(name)


def _dead(folder: Folder, name: str, host: str) -> Iterator[str]:
    """Yield the partial files that nobody holds a lock on, each of them locked for the moment."""
    beginning = f".{name}.{_host_digest(host)}"
    for found in folder.names():
        if not (found.startswith(beginning) and found.endswith(_PARTIAL)):
            continue
        try:
            descriptor = _opened_to_lock(folder, found)
        except (OSError, TargetError):
            continue  # it is gone, or no file of ours
        try:
            if _try_lock(descriptor) and folder.is_called(found, descriptor):
                yield found
        finally:
            close(descriptor)


def _opened_to_lock(folder: Folder, name: str) -> int:
    try:
        return folder.open_file(name, os.O_RDWR, "a partial file")  # as some network file systems want it for a lock
    except PermissionError:  # it has been sealed
        return folder.open_file(name, os.O_RDONLY, "a partial file")


def _try_lock(descriptor: int) -> bool | None:
    """Take a lock if nobody has it, and tell whether that is so; None where the file system has no locks."""
    try:
        return try_lock(descriptor, fcntl.LOCK_EX)
    except OSError:
        return None


def _host_digest(host: str) -> str:
    return f"{zlib.crc32(host.encode(errors='replace')) & 0xFFFF:04x}"


def _stale(folder: Folder, name: str) -> Iterator[str]:
    return (found for found in folder.names() if found.startswith(f".{name}.") and found.endswith(_PARTIAL))
