"""The commit record `reshard.json`, which describes the checkpoint in its folder; `commit` writes it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from reshard_mpi.journal import fields
from reshard_mpi.journal.identity import SETTINGS, RunIdentity
from reshard_mpi.journal.records import (
    COMMIT_RECORD,
    DAMAGE,
    checked_file,
    checked_rank,
    checked_sum,
    read_json,
)

# It has 60 bytes for each tensor of the checkpoint, 110 for each target, and 6 for each source rank that a target was
# made from: 100 MiB where each of 4,000 was made from all of 4,000.
COMMIT_ROOM = fields.Room(128 << 20, 512 << 20)
# Its names besides the settings of the run.
_COMMITTED = {"targets", "sources", "sums", "digest", "format", "version"}


class CommitRecord(NamedTuple):
    """The contents of `reshard.json`.

    digest: of the run that made the targets. files: of the targets, by rank. sums: CRC-32 of whole tensors by name, in
    hexadecimal; none if unknown. sizes_bytes: of the files, by rank, as far as recorded. sources: the files that the
    targets were made from, with their sizes. run: what the run was asked to do.
    """

    digest: str
    files: Mapping[int, str]
    sums: Mapping[str, str]
    sizes_bytes: Mapping[int, int]
    sources: tuple[tuple[str, int], ...]
    run: RunIdentity

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
        )
