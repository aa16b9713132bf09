"""Objects that are files of a folder, without a server: quick, and every request is counted (`served`)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest

from reshard_mpi.filesystem import object_files, object_folders, object_store
from reshard_mpi.filesystem.object_store import ListedPage, ObjectPlace, ObjectState


class Read(NamedTuple):
    """A request for bytes of an object."""

    key: str
    offset: int
    length_bytes: int


@dataclass
class LocalObjects:
    """The bucket `local`. reads: all requests for bytes; trips: how many times a caller has waited for some."""

    folder: Path
    reads: list[Read] = field(default_factory=list)
    trips: int = 0
    lists: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __truediv__(self, key: str) -> str:
        return f"s3://local/{key}"

    @property
    def read_bytes(self) -> int:
        return sum(read.length_bytes for read in self.reads)

    def forget(self) -> None:
        """Count from nothing, and have the package keep nothing of what it has read and listed."""
        self.reads.clear()
        self.trips = self.lists = 0
        object_files._KEPT.__init__()  # type: ignore[misc]
        object_folders.forget()

    def state(self, path: Path) -> ObjectState:
        status = path.stat()
        return ObjectState(f"{status.st_ino}-{status.st_mtime_ns}", status.st_size, status.st_mtime_ns)

    def listing(self, place: ObjectPlace, prefix: str, *, by_folder: bool) -> Iterator[ListedPage]:
        self.lists += 1
        found, folders = dict[str, ObjectState](), set[str]()
        for path in sorted(path for path in self.folder.rglob("*") if path.is_file()):
            key = path.relative_to(self.folder).as_posix()
            if not key.startswith(prefix):
                continue
            inner, slash, _ = key[len(prefix) :].partition("/")
            if by_folder and slash:
                folders.add(f"{prefix}{inner}/")
            else:
                found[key] = self.state(path)
        yield ListedPage(found, tuple(sorted(folders)))

    def read_range(self, place: ObjectPlace, state: ObjectState, offset: int, buffer: memoryview) -> None:
        path = self.folder / place.key
        if self.state(path) != state:
            raise object_store.changed(place)
        with self.lock:
            self.reads.append(Read(place.key, offset, len(buffer)))
        with path.open("rb") as file:
            file.seek(offset)
            assert file.readinto(buffer) == len(buffer) > 0


@contextlib.contextmanager
def served(folder: Path) -> Iterator[LocalObjects]:
    """Serve the files of a folder as the objects of the bucket `local`, in this process and its forks."""
    local = LocalObjects(folder)
    fetch_ranges, fill = object_files.ObjectFile._fetch_ranges, object_files.ObjectFile._fill

    def counted_ranges(self: object_files.ObjectFile, ranges: list[tuple[int, int]]) -> list[tuple[int, bytes]]:
        local.trips += bool(ranges)
        return fetch_ranges(self, ranges)

    def counted(self: object_files.ObjectFile, offset: int, buffer: memoryview) -> None:
        local.trips += 1
        fill(self, offset, buffer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_folders, "listing", local.listing)
        patch.setattr(object_files, "read_range", local.read_range)
        patch.setattr(object_files.ObjectFile, "_fetch_ranges", counted_ranges)
        patch.setattr(object_files.ObjectFile, "_fill", counted)
        local.forget()
        yield local
        local.forget()
