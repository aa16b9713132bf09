"""Write into target folders without records (`Unrecorded`, `SharedIndex`); check, open and clear any of them."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from reshard_mpi.errors import TargetError
from reshard_mpi.filesystem.folders import Folder, make_folders, open_folder
from reshard_mpi.filesystem.paths import described, require_file_or_nothing
from reshard_mpi.filesystem.source_files import is_taken
from reshard_mpi.journal.provenance import TargetInputs
from reshard_mpi.journal.publication import (
    Publication,
    dead_partial_bytes,
    partial_path,
    publish_text,
    remove_dead_partials,
    require_own_partials,
)
from reshard_mpi.journal.record_files import COMMIT_RECORD, STATE, record_path
from reshard_mpi.journal.run_records import CommitRecord
from reshard_mpi.journal.target_records import TargetRecord
from reshard_mpi.planning.source_flaws import Differences
from reshard_mpi.processes.host import host_name
from reshard_mpi.text import Say

# The ending of the mark of a file that is complete, where several runs make the files of one index.
_COMPLETE = ".complete"


def require_writable(folder: Path) -> None:
    """Raise TargetError if `folder` is there but cannot be written to, or cannot be made where it is not."""
    nearest = folder
    while nearest != nearest.parent and not is_taken(nearest):
        nearest = nearest.parent
    if not nearest.is_dir():
        raise TargetError(
            "the target is not a folder" if nearest == folder else f"{described(nearest)} is in the way of the target",
            expected="a folder",
            got=described(nearest),
            where=str(nearest),
            remedy="choose another target",
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise TargetError(
            "the target cannot be written",
            expected="the right to make files",
            got="a folder that is read-only to this user",
            where=str(nearest),
            remedy="choose another target, or change its permissions",
        )


def require_place(folder: Path, path: Path) -> None:
    """Raise TargetError if no file can take the name `path` below the target folder, whatever is there."""
    with _opened_folder_of(folder, path) as inner:
        if inner is not None:
            require_own_partials(inner, path.name)
    require_writable(path.parent)
    require_file_or_nothing(path, "a target")


def space_of_dead_partials(folder: Path, path: Path, host: str = "") -> int:
    """Return how many bytes partial files of the target `path` take whose writers have died."""
    with _opened_folder_of(folder, path) as inner:
        return 0 if inner is None else dead_partial_bytes(inner, path.name, host)


def _opened_folder_of(folder: Path, path: Path) -> AbstractContextManager[Folder | None]:
    """Open the folder of the target `path`; None if it is not there."""
    return opened_inner(folder, "" if path.parent == folder else path.parent.name)


@contextlib.contextmanager
def opened_inner(folder: Path, name: str) -> Iterator[Folder | None]:
    """Open a folder in a target folder, or with no name that itself; None if it is not there."""
    with contextlib.ExitStack() as folders:
        inner = None
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            target = folders.enter_context(open_folder(folder))
            inner = folders.enter_context(target.inner(name)) if name else target
        yield inner


def target_folder(folder: Folder, path: Path) -> AbstractContextManager[Folder]:
    """Return the folder of the target `path`: the target folder, or one in it, which is made if it is not there."""
    return contextlib.nullcontext(folder) if path.parent == folder.path else folder.made_inner(path.parent.name)


def uncommit(folder: Folder, index_names: Sequence[str]) -> None:
    """Remove and sync the commit record of a target folder, and files of an index, the last of them first.

    That one makes the folder a checkpoint.
    """
    removed = [_remove(folder, name) for name in (*reversed(index_names), COMMIT_RECORD)]
    if any(removed):
        folder.sync()


def _remove(folder: Folder, name: str) -> bool:
    """Remove a file of a folder, or of one in it; tell whether it was there."""
    inner_name, slash, name = name.rpartition("/")
    if not slash:
        return folder.remove(name)
    try:
        with folder.inner(inner_name) as inner:
            if is_removed := inner.remove(name):
                inner.sync()
            return is_removed
    except FileNotFoundError:
        return False


class Unrecorded:
    """Keeps no state: targets are published complete, whatever was there, so identical concurrent runs are harmless.

    The record that another run keeps of a target is removed when the target is replaced, and so is that of a commit.
    """

    def __init__(self, folder: str | Path, index: Callable[[], SharedIndex | None] = lambda: None) -> None:
        """index: returns the index of the files that the request names; None if it names none."""
        self._folder, self._given_folder = Path(folder), folder
        self._index = index

    def check(self) -> None:
        """Raise TargetError if the folder cannot be written to."""
        require_writable(self._folder)

    def skips(self, target_rank: int, path: Path) -> bool:
        """Return False. Raises TargetError if no file can take the name `path`."""
        require_place(self._folder, path)
        return False

    def is_verified(self, target_rank: int) -> bool:
        return False

    def leftovers(self) -> Collection[str]:
        return ()

    def begin(self, say: Say = lambda _: None) -> None:
        """Remove the index, if there is one, since its files will change."""
        if index := self._index():
            index.withdraw()

    def commit_if_complete(
        self, made_here: Collection[int], *, any_written: bool, any_failed: bool, already_told: Collection[str]
    ) -> Differences:
        """Write the index if all of its files are complete. Arguments as of `Journal.commit_if_complete`."""
        index = self._index()
        missing = () if index is None or any_failed else index.complete()
        named = f"{missing[0]} and {len(missing) - 1} others" if len(missing) > 1 else "".join(missing)
        note = f"{self._given_folder} has no index yet, which is written when these are complete as well: {named}"
        return Differences(notes=(note,) if missing else ())

    @contextlib.contextmanager
    def writing(
        self, target_rank: int, path: Path, inputs: TargetInputs, say: Say = lambda _: None
    ) -> Iterator[Publication]:
        """Yield the file to write and publish; if it is not published, it is removed."""
        make_folders(self._folder)
        self._withdraw_record(target_rank, path)
        with Folder.open(self._folder) as folder, target_folder(folder, path) as inner:
            host = host_name(os.environ)
            remove_dead_partials(inner, path.name, host)
            require_unchanged = inputs.require_sources_unchanged
            with Publication(inner, path.name, lambda *_: require_unchanged(target_rank), host=host) as publication:
                yield publication

    def left_bytes(self, path: Path) -> int:
        """Return how much space partial files of dead writers take, which is free again when the target is begun."""
        return space_of_dead_partials(self._folder, path, host_name(os.environ))

    def paths(self, target_rank: int, path: Path) -> tuple[Path, ...]:
        """Return the longest paths that are made for a target."""
        return (partial_path(path),)

    def _withdraw_record(self, target_rank: int, path: Path) -> None:
        for folder in (path.parent, path.parent.parent):
            record = TargetRecord.read(folder / STATE, target_rank)
            is_recorded = record is not None and folder / record.file == path
            commit = CommitRecord.read(folder)
            if is_recorded or (commit is not None and path in map(folder.joinpath, commit.files.values())):
                with Folder.open(folder) as target:
                    uncommit(target, ())
            if is_recorded:
                with open_folder(folder / STATE) as state:
                    state.remove(record_path(state.path, target_rank).name)


class SharedIndex(NamedTuple):
    """The index of files in one folder, as a run that makes some of them sees it.

    Example: with the files `part0.safetensors` and `part1.safetensors`, the run of the first one leaves
    `.part0.safetensors.<digest>.complete`; the run of the second finds it, and writes the index.
    """

    folder: Path
    name: str
    text: str
    files: Collection[str]  # the names of all files
    own: Collection[str]  # the names of the ones this run makes
    stale: Collection[str]  # the names of files that an earlier index has had, and which are read with any index
    state: str  # a text that differs if the files would be made of another state of the source, or in another way

    def withdraw(self) -> None:
        """Remove the index, stale files, and the marks of this run's files, which will change."""
        if not self.folder.is_dir():
            return
        with Folder.open(self.folder) as folder:
            removed = [folder.remove(name) for name in (self.name, *self.stale, *self._marks(folder, self.own))]
            if any(removed):
                folder.sync()

    def complete(self) -> tuple[str, ...]:
        """Mark this run's files as complete, and write the index if all are; return the files that are still missing.

        Several runs may do so at the same time: they write the same.
        """
        with Folder.open(self.folder) as folder:
            for mark in filter(None, map(self._mark, self.own)):
                publish_text(folder, mark, "")
            lying = set(folder.names())
            if self.name in lying:  # another run has completed the last file, and removed the marks
                return ()
            missing = tuple(file for file in self.files if self._mark(file) not in lying)
            if not missing:
                publish_text(folder, self.name, self.text)
                for mark in self._marks(folder, self.files):
                    folder.remove(mark)
        return missing

    def _mark(self, file: str) -> str:
        """Return the name of the mark of a file as it is now, with its size and time; empty if it is not there."""
        try:
            status = (self.folder / file).stat()
        except FileNotFoundError:
            return ""
        state = f"{self.state}\0{self.text}\0{status.st_size} {status.st_mtime_ns}"
        digest = hashlib.sha256(state.encode("utf-8", "surrogatepass")).hexdigest()
        return f".{file}.{digest[:32]}{_COMPLETE}"

    def _marks(self, folder: Folder, files: Collection[str]) -> list[str]:
        """Return the names of all marks of some files that lie in the folder, of whatever state."""
        beginnings = tuple(f".{file}." for file in files)
        return [name for name in folder.names() if name.startswith(beginnings) and name.endswith(_COMPLETE)]
