"""What an earlier run has left in a target folder, and would be taken for a part of the checkpoint of another run."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from reshard_mpi import formats
from reshard_mpi.filesystem.folders import Folder
from reshard_mpi.journal.identity import RunIdentity
from reshard_mpi.journal.records import STATE, TargetRecord, record_path, recorded_ranks


def leftovers(folder: Path, identity: RunIdentity) -> dict[str, int]:
    """Return the files in a target folder that another run than `identity` has made, by path, with their target ranks.

    Only files that the run does not make itself, and that are as their records say: of the same size, and not modified
    after these were written. Paths are relative to the folder.
    """
    own = set(_target_files(identity))
    records = (record for record in _records(folder / STATE) if record.digest != identity.digest)
    return {record.file: record.rank for record in records if record.file not in own and _is_unchanged(folder, record)}


def remove_leftovers(folder: Folder, state: Folder, identity: RunIdentity) -> None:
    """Remove what `leftovers` finds, its records, and rank folders that become empty.

    Raises TargetError if a file is of another user.
    """
    found = leftovers(folder.path, identity)
    for path, rank in found.items():
        rank_folder, _, name = path.rpartition("/")
        with folder.inner(rank_folder or ".") as inner:
            inner.require_own_file(name)
            inner.remove(name)
            inner.sync()
        state.remove(record_path(state.path, rank).name)
        if rank_folder:
            folder.remove_empty(rank_folder)
    if found:
        folder.sync()


def _target_files(identity: RunIdentity) -> Iterator[str]:
    """Yield the paths of all targets of a run, relative to the target folder."""
    folder_format = formats.folder_by_name(identity.format)
    targets, prefix = identity.target_ranks, str(identity.facts.get("prefix", ""))
    ending = formats.by_name(identity.format).SUFFIXES[0]
    for rank in range(targets):
        if folder_format is not None:
            yield folder_format.file_name(rank, targets, prefix)
        else:
            yield f"rank_{rank}/{prefix}{rank}{ending}"


def _records(state: Path) -> Iterator[TargetRecord]:
    records = (TargetRecord.read(state, rank) for rank in recorded_ranks(state))
    return (record for record in records if record is not None)


def _is_unchanged(folder: Path, record: TargetRecord) -> bool:
    try:
        status = os.lstat(folder / record.file)
        recorded = os.lstat(record_path(folder / STATE, record.rank))
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and record.is_about(status) and status.st_mtime_ns <= recorded.st_mtime_ns
