"""Files that take their names whole and for good: written beside, synced, renamed."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from reshard_mpi.folders import FileIdentity, Folder, close, replaced

if TYPE_CHECKING:
    from reshard_mpi.records import TensorSum

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
    then: called when it is in place.
    """

    def __init__(
        self,
        folder: Folder,
        name: str,
        mode: int = 0o666,
        before: Before = lambda *_: None,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder = folder
        self._name = name
        self._partial_name = partial_name(name, os.urandom(_TOKEN_BYTES).hex())
        self._before = before
        self._then = then
        self._is_published = False
        self.partial = folder.path / self._partial_name
        self.descriptor = folder.create(self._partial_name, mode)

    @property
    def identity(self) -> FileIdentity:
        return FileIdentity.of(self.descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # what stays is removed when the file is written again
            if not self._is_published:
                self._folder.remove(self._partial_name)
        close(self.descriptor)  # what was to be kept is on the disk

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
    with Publication(folder, name) as publication:
        with open(publication.descriptor, "w", encoding="utf-8", closefd=False) as stream:
            stream.write(text)
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


def stale_bytes(path: Path) -> int:
    """Return what `remove_stale` would make free of the file at `path`."""
    found = path.parent.glob(f".{glob.escape(path.name)}.*{_PARTIAL}")
    return sum(stale.lstat().st_blocks for stale in found) * _BLOCK_BYTES


def remove_stale_records(state: Folder) -> None:
    """Remove what writers of records that died have left; nobody else may be writing targets."""
    for name in state.names():
        if name.startswith(".rank_") and ".json." in name and name.endswith(_PARTIAL):
            state.remove(name)


def _stale(folder: Folder, name: str) -> Iterator[str]:
    return (found for found in folder.names() if found.startswith(f".{name}.") and found.endswith(_PARTIAL))
