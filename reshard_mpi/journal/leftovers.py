"""What an earlier run has left in a folder whose files make up one checkpoint, and would be taken for a part of it."""

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
    """Return the files in a target folder that another run than `identity` has made, by name, with their target ranks.

    Only files that the run does not make itself, and that are as their records say: of the same size, and not modified
    after these were written. None if the run's format has a folder for each rank.
    """
    folder_format = formats.folder_by_name(identity.format)
    if folder_format is None:
        return {}
    targets, prefix = identity.target_ranks, str(identity.facts.get("prefix", ""))
    own = {folder_format.file_name(rank, targets, prefix) for rank in range(targets)}
    records = (record for record in _records(folder / STATE) if record.digest != identity.digest)
    return {
        record.file: record.rank
        for record in records
        if "/" not in record.file and record.file not in own and _is_unchanged(folder, record)
    }


def remove_leftovers(folder: Folder, state: Folder, identity: RunIdentity) -> None:
    """Remove what `leftovers` finds, and its records. Raises TargetError if one is of another user."""
    found = leftovers(folder.path, identity)
    for name in found:
        folder.require_own_file(name)
    for name, rank in found.items():
        folder.remove(name)
        state.remove(record_path(state.path, rank).name)
    if found:
        folder.sync()


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
