"""Keep the strategy of a run's targets in their folder, and read its shards again by it (`recorded_strategy`).

Shards of most formats do not say how they are cut. The run that wrote them knew, so the placement table of all targets
(`sharding.strategy.table`) lies beside its records. It is believed of a committed run alone, and only for the very
files that the commit record names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from reshard_mpi.filesystem.folders import Folder
from reshard_mpi.journal import fields
from reshard_mpi.journal.commit_record import CommitRecord
from reshard_mpi.journal.publication import publish_text, remove_stale
from reshard_mpi.journal.records import STATE, read_json
from reshard_mpi.sharding.strategy.limits import MAX_FILE_BYTES

STRATEGY_RECORD = "strategy.json"
# The table is one text, which is bounded again when it is read as a strategy.
_ROOM = fields.Room(MAX_FILE_BYTES, 2 * MAX_FILE_BYTES)


def strategy_record(digest: str, strategy: str) -> str:
    """Return the text of the record. digest: of the run. strategy: the placement table of all its targets."""
    return json.dumps({"format": "reshard_mpi strategy", "version": 1, "digest": digest, "strategy": strategy}) + "\n"


def keep_strategy(state: Folder, text: str) -> None:
    """Publish the record `text` in the folder of a run's state; one that is too large to be read again is left out."""
    remove_stale(state, STRATEGY_RECORD)
    if len(text) <= _ROOM.file_bytes:
        publish_text(state, STRATEGY_RECORD, text)


def recorded_strategy(folder: Path, files: Mapping[int, Sequence[str]]) -> tuple[str, str] | None:
    """Return the placement table of a committed run's targets and the path of the record; None if nothing says it.

    files: paths of the shards by rank, which must be those that the commit record of `folder` names, of the same sizes.
    Raises OSError if a record or a file cannot be looked at.
    """
    committed = CommitRecord.read(folder)
    if committed is None or not all(_is_recorded(folder, committed, rank, paths) for rank, paths in files.items()):
        return None
    path = folder / STATE / STRATEGY_RECORD
    facts = read_json(path, _ROOM) or {}
    try:
        if fields.digest(facts["digest"]) != committed.digest:
            return None
        return fields.text(facts["strategy"], MAX_FILE_BYTES), str(path)
    except (LookupError, ValueError):
        return None


def _is_recorded(folder: Path, committed: CommitRecord, rank: int, paths: Sequence[str]) -> bool:
    """Tell whether the shard of a rank is the file that the run has written for it."""
    file = committed.files.get(rank)
    if file is None or [Path(path) for path in paths] != [folder / file]:
        return False
    return (folder / file).stat().st_size == committed.sizes_bytes.get(rank)
