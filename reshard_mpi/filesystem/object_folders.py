"""Stand in for an open folder where it is a prefix in an object store (`ObjectFolder`).

Its files are objects, which appear whole; there are no owners, modes or locks, and nothing is to be synced.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Self

from reshard_mpi.filesystem import object_listing, object_writes
from reshard_mpi.filesystem.folders import Folder
from reshard_mpi.filesystem.object_store import ObjectPlace


class ObjectFolder(Folder):
    """A folder of an object store."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, -1)

    def __exit__(self, *_: object) -> None:
        """Do nothing: nothing is open."""

    @classmethod
    def open(cls, path: Path) -> Self:
        return cls(path)

    def inner(self, name: str) -> Folder:
        return ObjectFolder(self.path / name)

    def made_inner(self, name: str) -> Folder:
        return self.inner(name)

    def open_file(self, name: str, flags: int, purpose: str, mode: int = 0o666) -> int:
        """Raise FileNotFoundError: only locks are opened so, and a store has none."""
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path / name))

    def names(self) -> list[str]:
        try:
            return list(object_listing.children(ObjectPlace.of(self.path)))
        except FileNotFoundError:
            return []

    def remove(self, name: str) -> bool:
        place = ObjectPlace.of(self.path / name)
        if object_listing.state_of(place) is None:
            return False
        object_writes.remove(place)
        return True

    def put(self, name: str, content: bytes) -> bool:
        object_writes.put(ObjectPlace.of(self.path / name), content)
        return True

    def remove_empty(self, name: str) -> None:
        """Do nothing: a folder in which nothing lies is not there."""

    def blocks(self, name: str) -> int:
        return 0

    def sync(self) -> None:
        """Do nothing: an object that is written can be read."""

    def require_own_file(self, name: str) -> None:
        """Do nothing: objects have no owners that matter here."""


def listed_anew(path: Path) -> ObjectFolder:
    """Open a folder of an object store, and forget all that was listed there: others may have written to it."""
    object_listing.forget_below(ObjectPlace.of(path))
    return ObjectFolder.open(path)
