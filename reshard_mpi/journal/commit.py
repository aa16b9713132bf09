"""Commit a target folder, if all targets are complete and of one checkpoint (`commit_if_complete`, `commit`).

Processes that know nothing of each other make the targets of one run. Whichever sees that all are complete compares
their records, and writes the index and `reshard.json`; `reshard-mpi commit` does so too, or says what is missing.
Before a target is written, the commit record is removed. `commit.lock` keeps the two apart: processes that write
targets share it, one that commits has it alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from reshard_mpi import formats
from reshard_mpi.errors import CoverageError, DisagreementError, ReshardError, TargetError, TransformError
from reshard_mpi.filesystem.folders import Folder, closing, holders, open_lock, try_lock
from reshard_mpi.filesystem.paths import is_object_path, require_file_or_nothing
from reshard_mpi.filesystem.source_files import names, version_of
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.journal.file_ownership import (
    NOT_WRITTEN,
    OF_ANOTHER_RUN,
    changed_index_files,
    complete_record,
    is_in_place,
    names_another_save,
    require_own_index,
    withdraw_commit,
)
from reshard_mpi.journal.provenance import MAX_NS, SourceStates, require_one_state
from reshard_mpi.journal.publication import publish_bytes, publish_text, remove_dead_partials, remove_dead_records
from reshard_mpi.journal.record_files import COMMIT_RECORD, STATE, record_path, recorded_ranks, written
from reshard_mpi.journal.run_records import (
    COMMIT_ROOM,
    CommitRecord,
    RunIdentity,
    committed_times,
    keep_times,
    run_to_commit,
)
from reshard_mpi.journal.target_folders import target_folder, uncommit
from reshard_mpi.journal.target_journal import COMMIT_LOCK
from reshard_mpi.journal.target_records import RecordHead, TargetRecord, require_one_source, sums_of_wholes
from reshard_mpi.planning.shared_facts import differing_stages, require_one_checkpoint, require_same_names
from reshard_mpi.planning.source_flaws import Differences, between_targets, difference_messages, without
from reshard_mpi.text import natural_key, ranges

# Larger records take more memory than a process has asked for when it plans.
_MOST_READ_EARLY_BYTES = 1 << 20
_ANEW = "make the targets anew from them with --overwrite"
# Committing takes moments: a process that is in the way for longer is stopped, or one of many that write all the time.
_WAIT_SECONDS = 10.0
_NAP_SECONDS = 0.05


class Committed(NamedTuple):
    """A commit record that has been written. targets: how many. size_bytes: of them all. told: to tell the user."""

    path: Path
    targets: int
    size_bytes: int
    told: Differences


class EarlierTarget(NamedTuple):
    """A complete target, and when its file was written: new targets must come from the same state of the source."""

    record: TargetRecord
    written_ns: int

    @classmethod
    def of(cls, folder: Path, identity: RunIdentity) -> EarlierTarget | None:
        """Return a complete target of the run in `folder`, the first whose record is small; None if there is none."""
        for rank in recorded_ranks(folder / STATE):
            with contextlib.suppress(OSError):  # it is being replaced
                if version_of(record_path(folder / STATE, rank)).size_bytes > _MOST_READ_EARLY_BYTES:
                    continue
                record = complete_record(folder, identity, rank)
                if isinstance(record, TargetRecord):
                    return cls(record, record.written_ns(folder / record.file))
        return None

    def require_same_state(self, target_rank: int, sources: SourceStates) -> None:
        """Raise DisagreementError if the source has changed since, and a target would be made from the new state.

        Committing would refuse it; this is before anything is written, and only as far as one target tells.
        """
        earlier = self.record.inputs.sources, self.written_ns
        require_one_state({self.record.rank: earlier, target_rank: (sources, MAX_NS)}, _ANEW)  # to be written later


def is_of_these_targets(folder: Path, committed: CommitRecord) -> bool:
    """Tell whether a commit record and its index are of the targets that lie there now, as far as records tell.

    They are not where a later run has made all targets anew and was killed, and a copy put these over the older ones;
    nor where the record is damaged and names other files.
    """
    if changed_index_files(folder, committed):
        return False
    times_ns = committed_times(folder, committed)
    heads = [head for rank in committed.files if (head := RecordHead.read(folder / STATE, rank)) is not None]
    return all(head.file == committed.files[head.rank] for head in heads) and (
        times_ns is None or all(head.modified_ns == times_ns.get(head.rank) for head in heads)
    )


def commit_if_complete(
    folder: Path, identity: RunIdentity, *, made_here: Collection[int], any_written: bool, already_told: Collection[str]
) -> Differences:
    """Write the commit record if all targets of the run are complete; return messages that are not in `already_told`.

    Args:
        made_here: the ranks of the targets that are complete, as the caller knows.
        any_written: some have just been written; if none has, an existing commit record is kept. While another process
            writes a target nothing is done, since that process calls this afterwards.

    Raises TransformError if the records do not say what the caller knows; DisagreementError or CoverageError as
    `commit` does.
    """
    committed = None if any_written else CommitRecord.read(folder)
    if committed is not None and committed.digest == identity.digest and is_of_these_targets(folder, committed):
        return Differences()
    are_all_made = len(made_here) == identity.target_ranks
    if not are_all_made and not _are_all_recorded(folder / STATE, identity.target_ranks, made_here):
        return Differences()
    with opened_to_commit(folder) as opened:
        if not opened.try_lock():
            by_another = f"{folder} is left to another process to commit, which is at work there"
            return Differences(notes=(by_another,) if are_all_made else ())
        records = []
        for target_rank in range(identity.target_ranks):
            record = complete_record(folder, identity, target_rank)
            if isinstance(record, TargetRecord):
                records.append(record)
            elif target_rank in made_here:
                raise _not_as_made(folder, target_rank, record)
            else:
                left = f"{folder} is not committed: target rank {target_rank} {record}"
                return Differences(notes=(left,) if record != OF_ANOTHER_RUN else ())  # which is replaced one by one
        return commit_locked(opened, identity, records, already_told).told


def commit(folder: Path) -> Committed:
    """Write the commit record of the run recorded under `folder`.

    Raises TargetError if there is no run, TransformError if targets of it are not complete, DisagreementError or
    CoverageError if they were made from shards that do not belong together. Then there is no new commit record, and one
    of other targets than are there now is removed, with its index.
    """
    run_to_commit(folder)
    require_file_or_nothing(folder / COMMIT_RECORD, "the commit record")
    deadline = time.monotonic() + _WAIT_SECONDS
    with opened_to_commit(folder) as opened:
        while not opened.try_lock():
            _require_complete(folder, run_to_commit(folder), "; a process is writing some of them now")
            if time.monotonic() >= deadline:
                raise TargetError(
                    "the targets are being written or committed by another process",
                    expected="nobody at work on them",
                    got=f"a lock on {folder / STATE / COMMIT_LOCK}, held by {holders(opened.lock)}",
                    where=str(folder),
                    remedy="wait for it",
                )
            time.sleep(_NAP_SECONDS)
        identity = run_to_commit(folder)
        try:
            records = _require_complete(folder, identity, "")
        except TransformError:
            withdraw_commit(opened.folder)
            raise
        return commit_locked(opened, identity, records, already_told=())


def _require_complete(folder: Path, identity: RunIdentity, besides: str) -> list[TargetRecord]:
    """Return the records of all targets. Raises TransformError, which names incomplete targets.

    Args:
        besides: what the error is to say besides.
    """
    target_ranks = identity.target_ranks
    targets = recorded_targets(folder, identity)
    records = [record for record in targets.values() if isinstance(record, TargetRecord)]
    if len(records) < target_ranks:
        lacking = [rank for rank in range(target_ranks) if not isinstance(targets.get(rank), TargetRecord)]
        first, missing = lacking[0], ranges(lacking)
        raise TransformError(
            f"{target_ranks - len(records)} of {target_ranks} targets are not complete: {missing}",
            expected="all of them written by this run, as their records say",
            got=f"target rank {first} {targets.get(first, NOT_WRITTEN)}{besides}",
            where=str(folder),
            remedy="run the same transform again with --resume, or the array tasks that make these targets"
            f" (sbatch --array={missing}, where a task is a target), then commit again",
        )
    return records


def recorded_targets(folder: Path, identity: RunIdentity) -> dict[int, TargetRecord | str]:
    """Return by rank the records of targets that have one, or why these targets are not complete; ranks ascend."""
    ranks = (rank for rank in recorded_ranks(folder / STATE) if rank < identity.target_ranks)
    return {rank: complete_record(folder, identity, rank) for rank in ranks}


class _LockedFolder(NamedTuple):
    """The open target folder, the open folder of its state, and the descriptor of the lock for committing.

    An object store has no locks (-1).
    """

    folder: Folder
    state: Folder
    lock: int

    def try_lock(self) -> bool:
        """Take the lock if nobody else has it; tell whether it was taken."""
        return self.lock < 0 or try_lock(self.lock, fcntl.LOCK_EX)


@contextlib.contextmanager
def opened_to_commit(path: Path) -> Iterator[_LockedFolder]:
    if is_object_path(path):
        from reshard_mpi.filesystem.object_folders import listed_anew

        prefix = listed_anew(path)
        yield _LockedFolder(prefix, prefix.inner(STATE), -1)
        return
    with Folder.open(path) as folder, folder.inner(STATE) as state, closing(open_lock(state, COMMIT_LOCK)) as lock:
        yield _LockedFolder(folder, state, lock)


def commit_locked(
    opened: _LockedFolder, identity: RunIdentity, records: Sequence[TargetRecord], already_told: Collection[str]
) -> Committed:
    """Compare the sources of the targets, and write the commit record. The lock must be held.

    Whoever makes a target removes the commit record. So one of another run, beside complete targets of this one, means
    that their records were copied over those of the other, and maybe not their files.
    """
    folder = opened.folder.path
    committed = CommitRecord.read(folder)
    if committed is not None and committed.digest != identity.digest:
        raise DisagreementError(
            "the target folder was committed by another run than its records tell of",
            expected="no commit record, or that of the run which has made the targets",
            got=str(folder / COMMIT_RECORD),
            where=str(folder),
            remedy="if an older folder was copied over this one, copy it again, whole; if you know that all targets are"
            f" of this run, remove {COMMIT_RECORD}, and run reshard-mpi commit",
        )
    size_bytes = sum(record.head.size_bytes for record in records)
    times_ns = {record.rank: record.head.modified_ns for record in records}
    remove_dead_partials(opened.folder, COMMIT_RECORD)
    remove_dead_records(opened.state)
    is_same = (
        committed is not None
        and committed_times(folder, committed) == times_ns
        and committed.files == {record.rank: record.file for record in records}
        and not changed_index_files(folder, committed)
    )
    try:
        _require_alike(folder, identity, records, is_committed=is_same)
        remarks = _told(identity, records, already_told)
        if is_same:
            return Committed(folder / COMMIT_RECORD, len(records), size_bytes, remarks)
        sums, index = _sums(records), _index_contents(folder, identity, records)
        require_own_index(folder, identity, lambda: True)
    except ReshardError:
        withdraw_commit(opened.folder)
        raise
    for record in records:
        if record.head.announced is not None:  # its writer died before it could say that the file is in place
            record._replace(head=record.head._replace(announced=None)).publish(opened.state)
    begun = RunIdentity.recorded(folder / STATE)  # which may name other files of the same strategies
    begun = begun if begun and begun.digest == identity.digest else identity
    for name, content in index.items():
        path = folder / name
        if names_another_save(folder, identity, name):  # --overwrite has removed it before
            continue
        with target_folder(opened.folder, path) as inner:
            remove_dead_partials(inner, path.name)
            publish_bytes(inner, path.name, content)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in index.items()}
    new = _commit_record(begun, records, sums, digests)
    keep_times(opened.state, new, times_ns)
    publish_text(opened.folder, COMMIT_RECORD, _as_text(new, records))
    if opened.lock < 0:
        _require_still_complete(opened, identity, records)
    return Committed(folder / COMMIT_RECORD, len(records), size_bytes, remarks)


def _require_still_complete(opened: _LockedFolder, identity: RunIdentity, records: Sequence[TargetRecord]) -> None:
    """Withdraw a commit, where nothing is locked, if a target was replaced meanwhile. Raises TransformError then."""
    from reshard_mpi.filesystem.object_folders import listed_anew

    folder = listed_anew(opened.folder.path).path
    for record in records:
        if not is_in_place(folder, identity, record.rank, record.file):
            uncommit(opened.folder, identity.index_names)
            raise _not_as_made(folder, record.rank, "was replaced while the targets were committed")


def _index_contents(folder: Path, identity: RunIdentity, records: Sequence[TargetRecord]) -> dict[str, bytes]:
    """Return the files of the index that makes the folder a checkpoint, by name, in the order of their writing.

    Raises TransformError if somebody has replaced a target since its record was looked at.
    """
    folder_format = formats.folder_by_name(identity.format)
    files: list[Manifest] = []
    for record in records:
        if folder_format is not None:
            files.append(folder_format.locate(str(folder / record.file)))
            files[-1].tensors.share_names(files[0].tensors)
        if not is_in_place(folder, identity, record.rank, record.file):
            raise _not_as_made(folder, record.rank, "has another file in its place")
    if folder_format is None:
        return {}
    contents = folder_format.index_contents(files)
    return {name: contents[name] for name in identity.index_names if name in contents}


def _sums(records: Sequence[TargetRecord]) -> dict[str, int]:
    """Return the CRC-32 of every whole tensor by name; none if a target has not been verified.

    Raises DamageError if copies have different sums.
    """
    if not all(record.is_verified for record in records):
        return {}
    return dict(sums_of_wholes({record.rank: record.sums for record in records}))


def _require_alike(folder: Path, identity: RunIdentity, records: Sequence[TargetRecord], *, is_committed: bool) -> None:
    """Compare the sources of the targets.

    Args:
        is_committed: whether the very targets have been committed, so that it does not matter what has become of the
            source since.

    Raises DisagreementError or CoverageError if they were made from different states of the source, or from shards
    that do not belong together.
    """
    try:
        require_one_checkpoint(moment for record in records for moment in record.inputs.shared_facts)
    except DisagreementError as error:
        error.remedy += f", and {_ANEW}"
        raise
    require_one_source([(record, folder / record.file) for record in records], _ANEW, is_committed=is_committed)
    for stage in differing_stages(record.inputs.held for record in records):
        of_stage = [record for record in records if record.inputs.held.stage == stage]
        differing = list({record.inputs.held.digest: record for record in reversed(of_stage)}.values())
        locate = formats.by_name(identity.format).locate
        names = {record.rank: locate(str(folder / record.file)).tensors for record in differing}
        require_same_names(names, identity.facts["source"])
        raise CoverageError(
            f"the targets of stage {stage} do not hold the same parameters",
            expected="all ranks of a stage alike",
            got=f"differences between target ranks {ranges(sorted(names))}",
            where=str(folder),
            remedy=_ANEW,
        )


def _told(identity: RunIdentity, records: Sequence[TargetRecord], already_told: Collection[str]) -> Differences:
    """Return messages on tensors that differ between targets, which are not in `already_told`."""
    unlike = between_targets(start for record in records for start in record.inputs.prefix_digests)
    strict = identity.facts.get("strict") is True
    return difference_messages(without(unlike, already_told), identity.facts["source"], strict=strict)


def _are_all_recorded(state: Path, target_ranks: int, made_here: Collection[int]) -> bool:
    """Tell whether all targets have records. Raises TransformError if a target made by this run has none."""
    try:
        listed = set(names(state))
    except FileNotFoundError:
        if made_here:
            raise
        return False
    unrecorded = [rank for rank in range(target_ranks) if record_path(state, rank).name not in listed]
    for rank in unrecorded:
        if rank in made_here:
            raise _not_as_made(state.parent, rank, NOT_WRITTEN)
    return not unrecorded


def _not_as_made(folder: Path, target_rank: int, problem: str) -> TransformError:
    """Return the error for a target that a run has made, and whose record or file is not found as it was made."""
    return TransformError(
        "the targets were made, and are not committed",
        expected=f"target rank {target_rank} as this run has made it",
        got=f"by its record and its file it {problem}",
        where=str(folder),
        remedy="see who else writes there, or look for a failing file system; then reshard-mpi commit, which says what"
        " is missing",
    )


def _commit_record(
    identity: RunIdentity, records: Sequence[TargetRecord], sums: Mapping[str, int], index_digests: Mapping[str, str]
) -> CommitRecord:
    """Return the record of a commit. index_digests: of the index, and before it of the files that belong to it."""
    files = {file.path: file.size_bytes for record in records for file in record.inputs.sources.files}
    return CommitRecord(
        digest=identity.digest,
        files={record.rank: record.file for record in records},
        sums={name: f"{sums[name]:08x}" for name in sorted(sums)},
        sizes_bytes={record.rank: record.head.size_bytes for record in records},
        sources=tuple((path, files[path]) for path in sorted(files, key=natural_key)),
        run=identity,
        index_digests=index_digests,
        besides={record.rank: record.besides for record in records if record.besides and not record.sums},
    )


def _as_text(committed: CommitRecord, records: Sequence[TargetRecord]) -> str:
    """Return the text of the commit record: a line for each target and source file, none on who made them, or when."""
    head = {"format": "reshard_mpi commit", "version": 1, "digest": committed.digest, **committed.run.as_json()}
    if committed.sums:
        head["sums"] = committed.sums
    *before_index, index = committed.index_digests or ("",)
    if index:
        head["index"] = committed.index_digests[index]
    if before_index:
        head["before_index"] = {name: committed.index_digests[name] for name in before_index}
    sources = ({"file": path, "size_bytes": size_bytes} for path, size_bytes in committed.sources)
    targets = (
        {
            "rank": record.rank,
            "file": record.file,
            "size_bytes": record.head.size_bytes,
            "read_ranks": record.inputs.read_ranks,
            **({"besides": committed.besides[record.rank]} if record.rank in committed.besides else {}),
        }
        for record in records
    )
    lists = (
        f' "{name}": [\n  ' + ",\n  ".join(map(json.dumps, entries)) + "\n ]"
        for name, entries in (("sources", sources), ("targets", targets))
    )
    text = ",\n".join([json.dumps(head, indent=1).removesuffix("\n}"), *lists]) + "\n}\n"
    return written(text, COMMIT_ROOM, "the commit")
