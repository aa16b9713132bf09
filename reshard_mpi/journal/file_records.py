"""Find the record that a run keeps of a file (`RecordFinder`), and hold the file against it (`damage_besides`)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from reshard_mpi import formats
from reshard_mpi.errors import DamageError, DisagreementError
from reshard_mpi.filesystem.paths import real_path
from reshard_mpi.formats.files import digest_besides, opened
from reshard_mpi.formats.tensor_table import TensorTable
from reshard_mpi.journal.commit import has_committed_index
from reshard_mpi.journal.identity import CommitRecord, RunIdentity
from reshard_mpi.journal.provenance import require_one_state, require_same_sources
from reshard_mpi.journal.records import (
    COMMIT_RECORD,
    STATE,
    TargetRecord,
    rank_of_folder,
    record_path,
    recorded_ranks,
)

# What to do where a run has replaced some targets only.
_FINISH = "let the run that replaces them finish (transform with --resume; files of others, with --overwrite)"


class FoundRecord(NamedTuple):
    """Where the record of a file is, and the record itself: None if it is damaged."""

    path: Path
    record: TargetRecord | None


class RecordFinder:
    """Finds records of files: in the target folder that a file lies in, by its name or by what links lead to."""

    def __init__(self) -> None:
        self._rank_of: dict[Path, Mapping[str, int]] = {}  # by target folder: ranks by files

    def find(self, path: str, likely_rank: int) -> FoundRecord | None:
        """Return the record of the file at `path`; None if there is none, or it is about another file.

        Args:
            likely_rank: the target rank of the file, as it seems.
        """
        for folder, file in _ways(path):
            record = TargetRecord.read(folder / STATE, likely_rank)
            rank = likely_rank if record is not None and record.file == file else self._rank(folder, file)
            if rank is None:
                continue
            place = record_path(folder / STATE, rank)
            record = record if rank == likely_rank else TargetRecord.read(folder / STATE, rank)
            if record is None and os.path.lexists(place):
                return FoundRecord(place, None)
            if record is not None and record.file == file and _is_in_place(record, path):
                return FoundRecord(place, record)
        return None

    def _rank(self, folder: Path, file: str) -> int | None:
        """Return the target rank of a file in a target folder; None if it is none."""
        if "/" in file:
            return rank_of_folder(file.partition("/")[0])
        if folder not in self._rank_of:
            self._rank_of[folder] = _ranks_by_file(folder)
        return self._rank_of[folder].get(file)


def run_of(path: str, likely_rank: int) -> tuple[RunIdentity, Path] | None:
    """Return the run that has written the file at `path`, and its target folder; None if no run has a record of it.

    For a file without a record, or with that of an earlier run, it is the run that is about to replace it.
    """
    found = RecordFinder().find(path, likely_rank)
    for folder, file in _ways(path):
        committed, begun = CommitRecord.read(folder), RunIdentity.recorded(folder / STATE)
        if found is not None and found.record is not None:
            for run in (begun, None if committed is None else committed.run):
                if run is not None and run.digest == found.record.digest:
                    return run, folder
        prefix = None if begun is None else begun.facts.get("prefix")
        rank = rank_of_folder(file.partition("/")[0])
        if begun is not None and prefix is not None and file.startswith(f"rank_{rank}/{prefix}{rank}."):
            return begun, folder
    return None


def records_of_one_run(folder: Path, files: Mapping[int, Sequence[str]]) -> Mapping[str, TargetRecord]:
    """Return the records of files in a target folder that is not committed, by path; none if it has no records.

    Args:
        files: paths, by the ranks that they seem to be of.

    Raises DisagreementError if they could not be committed together: they are of two runs, as where one has replaced
    some targets of the other, or were made from two states of the source.
    """
    if not (folder / STATE).is_dir() or CommitRecord.read(folder) is not None:
        return {}
    finder = RecordFinder()
    found = {path: finder.find(path, rank) for rank, paths in files.items() for path in paths}
    records = {path: each.record for path, each in found.items() if each is not None and each.record is not None}
    first_path, first = next(iter(records.items()), ("", None))
    if first is None:
        return {}
    for path in found:
        record = records.get(path)
        if record is None or record.digest != first.digest:
            raise DisagreementError(
                "files of several runs lie in one target folder",
                expected=f"those of one run, as {first_path}",
                got=f"{path} of another run" if record is not None else f"{path}, of which no run has a record",
                where=str(folder),
                remedy=f"{_FINISH}, or give the files of one run alone (--select, or a folder of their own)",
            )
    require_same_sources({record.rank: record.evidence.sources for record in records.values()}, _FINISH)
    written = ((path, record.rank, record.evidence.sources) for path, record in records.items())
    require_one_state({rank: (sources, Path(path).stat().st_mtime_ns) for path, rank, sources in written}, _FINISH)
    return records


def damage_besides(path: str, tensors: TensorTable, record: TargetRecord | None) -> Iterator[DamageError]:
    """Yield the damage of a file's bytes besides its tensors, if its record has a digest of them."""
    if record is None or not record.besides:
        return
    with opened(path) as (fd, _):
        try:
            is_same = digest_besides(fd, tensors.payload_spans()) == record.besides
        except ValueError:
            is_same = False
    if not is_same:
        yield DamageError(
            "the bytes of a shard besides its tensors are not what was written",
            expected="those that its record has the digest of",
            got="others: names, settings or the structure of the file have changed",
            where=path,
            remedy="restore the file",
        )


def damage_of_index(folder: Path, format_name: str) -> Iterator[DamageError]:
    """Yield the damage of a folder's index, if the commit record of the folder has a digest of it."""
    name = formats.index_of(format_name)
    committed = None if name is None else CommitRecord.read(folder)
    if name is None or committed is None or not committed.index_digest:
        return
    if not has_committed_index(folder, format_name, committed):
        yield DamageError(
            "the index of a checkpoint is not what was committed",
            expected=f"the SHA-256 {committed.index_digest}, as {COMMIT_RECORD} says",
            got="another" if (folder / name).exists() else "no index",
            where=str(folder / name),
            remedy="reshard-mpi commit makes it anew of the targets",
        )


def _ways(path: str) -> Iterator[tuple[Path, str]]:
    """Yield the folders of runs that a file lies in, and its path there: by its name first, then by its real path."""
    for whole in dict.fromkeys((Path(os.path.abspath(path)), real_path(path))):  # noqa: PTH100 - not to follow links
        for folder in whole.parents[:2]:
            if (folder / STATE).is_dir():
                yield folder, whole.relative_to(folder).as_posix()


def _ranks_by_file(folder: Path) -> dict[str, int]:
    """Return the target ranks of the files that lie in a target folder itself."""
    committed = CommitRecord.read(folder)
    if committed is not None:
        return {file: rank for rank, file in committed.files.items()}
    records = (TargetRecord.read(folder / STATE, rank) for rank in recorded_ranks(folder / STATE))
    return {record.file: record.rank for record in records if record is not None}


def _is_in_place(record: TargetRecord, path: str) -> bool:
    """Tell whether a record is about the file at `path`, rather than about one that was going to replace it."""
    return record.announced is None or record.is_about(Path(path).stat())
