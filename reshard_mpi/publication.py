"""Files that take their names whole and for good: written beside, synced, renamed."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from reshard_mpi.records import TensorSum

    Before = Callable[[Path, Sequence[TensorSum]], None]

_PARTIAL = ".partial"
_TOKEN_BYTES = 6
# What `st_blocks` counts in, whatever the blocks of the file system.
_BLOCK_BYTES = 512


class Publication:
    """A file that is written beside its final path and takes that name, synced, when `publish` is called.

    Left without that, for whatever reason, it is removed. before: called with the whole file, and the sums of what it
    holds where they are given, before it takes its name. then: called when it is in place.
    """

    def __init__(self, path: Path, before: Before = lambda *_: None, then: Callable[[], None] = lambda: None) -> None:
        self.partial = partial_path(path, os.urandom(_TOKEN_BYTES).hex())
        self._path = path
        self._before = before
        self._then = then
        self._is_published = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_published:
            self.partial.unlink(missing_ok=True)

    def publish(self, sums: Sequence[TensorSum] = (), *, synced: bool = True) -> None:
        """Put the file in place, whatever was there. synced: False where it need not outlive a loss of power."""
        if synced:
            sync(self.partial)
        self._before(self.partial, sums)
        self.partial.replace(self._path)
        self._is_published = True
        if synced:
            sync(self._path.parent)
        self._then()


def partial_path(path: Path, token: str = "0" * 2 * _TOKEN_BYTES) -> Path:
    """Return where a file is written before it is published; token: what tells this writer's from others'."""
    return path.with_name(f".{path.name}.{token}{_PARTIAL}")


def is_partial(path: Path) -> bool:
    """Tell whether a file has a name that files have before they are published."""
    return path.name.startswith(".") and path.name.endswith(_PARTIAL)


def publish_text(path: Path, text: str, *, synced: bool = True) -> None:
    """Put a small file in place, whatever was there. synced: as for `Publication.publish`."""
    with Publication(path) as publication:
        publication.partial.write_text(text)
        publication.publish(synced=synced)


def remove_stale(path: Path) -> None:
    """Remove what processes that died have left of `path`; nobody else may be writing it."""
    for stale in _stale(path):
        stale.unlink(missing_ok=True)


def stale_bytes(path: Path) -> int:
    """Return what `remove_stale` would make free."""
    return sum(stale.stat().st_blocks for stale in _stale(path)) * _BLOCK_BYTES


def remove_stale_records(state: Path) -> None:
    """Remove what writers of records that died have left; nobody else may be writing targets."""
    for stale in state.glob(f".rank_*.json.*{_PARTIAL}"):
        stale.unlink(missing_ok=True)


def _stale(path: Path) -> Iterator[Path]:
    return path.parent.glob(f".{glob.escape(path.name)}.*{_PARTIAL}")


def make_folder(folder: Path) -> None:
    """Make a folder and those it lies in, so that they last as what is written there does."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
