"""Targets that are written without a record of their run, as by functions that replace whatever was there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path

from reshard_mpi import formats
from reshard_mpi.filesystem.folders import Folder, make_folders
from reshard_mpi.filesystem.locks import Say
from reshard_mpi.journal.publication import Publication, partial_path, remove_stale
from reshard_mpi.journal.records import STATE, Evidence, TargetRecord, record_path
from reshard_mpi.journal.targets import (
    require_place,
    require_unchanged,
    require_writable,
    space_of_stale,
    target_folder,
    withdraw,
)
from reshard_mpi.processes.hosts import host_name


class Unrecorded:
    """Keeps no state: targets are published complete, whatever was there, so identical concurrent runs are harmless.

    The record that another run keeps of a target is removed when the target is replaced.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def check(self) -> None:
        """Raise TargetError if the folder cannot be written to."""
        require_writable(self._folder)

    def is_done(self, target_rank: int, path: Path) -> bool:
        """Return False. Raises TargetError if no file can take the name `path`."""
        require_place(self._folder, path)
        return False

    def is_verified(self, target_rank: int) -> bool:
        return False

    def leftovers(self) -> Collection[str]:
        return ()

    def begin(self, say: Say = lambda _: None) -> None:
        pass

    @contextlib.contextmanager
    def writing(
        self,
        target_rank: int,
        path: Path,
        evidence: Evidence | None = None,
        mode: int = 0o666,
        say: Say = lambda _: None,
    ) -> Iterator[Publication]:
        """Yield the file to write and publish; if it is not published, it is removed.

        mode: its permissions while it is written.
        """
        make_folders(self._folder)
        self._withdraw_record(target_rank, path)
        announce = partial(require_unchanged, target_rank, evidence)
        with (
            Folder.open(self._folder) as folder,
            target_folder(folder, path) as inner,
        ):
            host = host_name(os.environ)
            remove_stale(inner, path.name, host)
            with Publication(inner, path.name, mode, lambda *_: announce(), host=host) as publication:
                yield publication

    def left_bytes(self, path: Path) -> int:
        """Return how much space stale partial files of a target take, which is free again when it is begun."""
        return space_of_stale(self._folder, path, host_name(os.environ))

    def paths(self, target_rank: int, path: Path) -> tuple[Path, ...]:
        """Return the longest paths that are made for a target."""
        return (partial_path(path),)

    def _withdraw_record(self, target_rank: int, path: Path) -> None:
        folder = path.parent.parent
        record = TargetRecord.read(folder / STATE, target_rank)
        if record is not None and folder / record.file == path:
            with Folder.open(folder) as target, target.inner(STATE) as state:
                withdraw(target, formats.name_of(path.name) or formats.DEFAULT)
                state.remove(record_path(state.path, target_rank).name)
