"""Read the record of a committed run, and the strategy that it keeps (`CommitRecord`, `recorded_strategy`).

Shards of most formats do not say how they are cut. The run that wrote them knew, so the placement table of all targets
(`sharding.strategy_table`) lies beside its records. It is believed of a committed run alone, and only for the very
files that the commit record names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from reshard_mpi.filesystem.folders import Folder
from reshard_mpi.journal import fields
from reshard_mpi.journal.fields import DAMAGE, read_json
from reshard_mpi.journal.publication import publish_text, remove_stale
from reshard_mpi.journal.records import (
    COMMIT_RECORD,
    STATE,
    RecordHead,
    checked_file,
    checked_rank,
    checked_sum,
    read_json,
)
from reshard_mpi.journal.run_identity import SETTINGS, RunIdentity
from reshard_mpi.sharding.json_checks import MAX_FILE_BYTES

# It has 60 bytes for each tensor of the checkpoint, 110 for each target, and 6 for each source rank that a target was
# made from: 100 MiB where each of 4,000 was made from all of 4,000.
COMMIT_ROOM = fields.RecordLimits(128 << 20, 512 << 20)
# Its names besides the settings of the run.
_COMMITTED = {"targets", "sources", "sums", "index", "before_index", "digest", "format", "version"}


class CommitRecord(NamedTuple):
    """The contents of `reshard.json`."""

    digest: str  # of the run that made the targets
    files: Mapping[int, str]  # of the targets, by rank
    sums: Mapping[str, str]  # CRC-32 of whole tensors by name, in hexadecimal; none if unknown
    sizes_bytes: Mapping[int, int]  # of the files, by rank, as far as recorded
    sources: tuple[tuple[str, int], ...]  # the files that the targets were made from, with their sizes
    run: RunIdentity  # what the run was asked to do
    index_digest: str = ""  # SHA-256 of the index; empty if the targets have none
    before_index: Mapping[str, str] = MappingProxyType({})  # SHA-256 of files that belong to the index, by name

    @classmethod
    def read(cls, folder: Path) -> CommitRecord | None:
        """Return the commit record of a folder; None where there is none, or it is damaged."""
        try:
            return cls._of(read_json(folder / COMMIT_RECORD, COMMIT_ROOM, follow_link=True) or {})
        except DAMAGE:
            return None

    @classmethod
    def _of(cls, facts: Mapping[str, Any]) -> CommitRecord:
        """Return the record with these values. Raises LookupError, TypeError or ValueError if they are not of one."""
        targets = fields.each(facts["targets"], fields.table)
        files = {checked_rank(target["rank"]): checked_file(target["file"], target["rank"]) for target in targets}
        sizes = {target["rank"]: fields.number(target["size_bytes"]) for target in targets if "size_bytes" in target}
        settings = fields.settings({name: facts[name] for name in facts if name not in _COMMITTED}, SETTINGS)
        sources = fields.each(facts.get("sources", []), fields.table)
        sums = fields.table(facts.get("sums", {}))
        # Every rank has its line, from 0 on.
        if not targets or len(files) < len(targets) or max(files) >= len(files):
            raise ValueError("targets that are not those of all ranks")
        if settings.get("target_ranks", len(files)) != len(files):
            raise ValueError("another number of targets than the run has")
        return cls(
            fields.digest(facts["digest"]),
            files,
            {fields.text(name): f"{checked_sum(value):08x}" for name, value in sums.items()},
            sizes,
            tuple((fields.path_below(source["file"]), fields.number(source["size_bytes"])) for source in sources),
            RunIdentity.of(settings),
            fields.sha256(facts["index"]) if "index" in facts else "",
            {
                fields.text(name): fields.sha256(value)
                for name, value in fields.table(facts.get("before_index", {})).items()
            },
        )


STRATEGY_RECORD = "strategy.json"
# The table is one text, which is bounded again when it is read as a strategy.
_ROOM = fields.RecordLimits(MAX_FILE_BYTES, 2 * MAX_FILE_BYTES)


def keep_strategy(state: Folder, digest: str, strategy: str) -> None:
    """Publish how the targets of a run are cut, in the folder of its state, unless it is too large to be read again.

    Args:
        digest: of the run.
        strategy: the placement table of all its targets.
    """
    facts = {"format": "reshard_mpi strategy", "version": 2, "digest": digest, "sha256": _sha256(strategy)}
    text = json.dumps({**facts, "strategy": strategy}) + "\n"
    remove_stale(state, STRATEGY_RECORD)
    if len(text) <= _ROOM.file_bytes:
        publish_text(state, STRATEGY_RECORD, text)


def _sha256(strategy: str) -> str:
    return hashlib.sha256(strategy.encode()).hexdigest()


def recorded_strategy(folder: Path, files: Mapping[int, Sequence[str]]) -> tuple[str, str] | None:
    """Return the placement table of a committed run's targets and the path of the record; None if nothing says it.

    Args:
        files: paths of the shards by rank, which must be those that the commit record of `folder` names, of the same
            sizes.

    Raises OSError if a record or a file cannot be looked at.
    """
    committed = CommitRecord.read(folder)
    if committed is None or not all(_is_recorded(folder, committed, rank, paths) for rank, paths in files.items()):
        return None
    return strategy_of_run(folder, committed.digest)


def strategy_of_run(folder: Path, digest: str) -> tuple[str, str] | None:
    """Return the placement table of the run with this digest, and the path of its record.

    None if there is none, or it is damaged: a table with a flipped bit may be that of another sharding.
    """
    path = folder / STATE / STRATEGY_RECORD
    facts = read_json(path, _ROOM) or {}
    try:
        if fields.digest(facts["digest"]) != digest:
            return None
        strategy = fields.text(facts["strategy"], MAX_FILE_BYTES)
        return (strategy, str(path)) if fields.digest(facts["sha256"]) == _sha256(strategy) else None
    except (LookupError, ValueError):
        return None


def _is_recorded(folder: Path, committed: CommitRecord, rank: int, paths: Sequence[str]) -> bool:
    """Tell whether the shard of a rank is the file that the run has written for it. Another may have the same size."""
    file, head = committed.files.get(rank), RecordHead.read(folder / STATE, rank)
    if file is None or head is None or [Path(path) for path in paths] != [folder / file]:
        return False
    status = (folder / file).stat()
    if status.st_size != committed.sizes_bytes.get(rank) or head.modified_ns is None:
        return False
    return (head.digest, head.file) == (committed.digest, file) and head.is_about(status)
