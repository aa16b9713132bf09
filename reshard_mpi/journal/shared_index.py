"""Write the index of files that several runs make, when the last of them is complete (`SharedIndex`).

No run keeps a record, so each leaves a mark beside every file that it has completed: an empty hidden file, whose name
tells of what state of the source that file was made. An index is there only while all files are complete, so whoever
begins a file removes it; whoever completes the last file writes it, and removes the marks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from reshard_mpi.filesystem.folders import Folder
from reshard_mpi.journal.publication import publish_text

_COMPLETE = ".complete"


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
            for file in self.own:
                publish_text(folder, self._mark(file), "")
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
        digest = hashlib.sha256(f"{self.state}\0{self.text}".encode("utf-8", "surrogatepass")).hexdigest()
        return f".{file}.{digest[:32]}{_COMPLETE}"

    def _marks(self, folder: Folder, files: Collection[str]) -> list[str]:
        """Return the names of all marks of some files that lie in the folder, of whatever state."""
        beginnings = tuple(f".{file}." for file in files)
        return [name for name in folder.names() if name.startswith(beginnings) and name.endswith(_COMPLETE)]
