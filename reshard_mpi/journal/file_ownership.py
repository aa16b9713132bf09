"""Tell a run's own files in a target folder from foreign ones (`require_own_target`, `remove_earlier_run`).

Others may have saved a checkpoint there, or copied one. A file is explained by the record of its target, which is
written before the file takes its name, or by the note in the target's lock. The note says which file was there when a
writer began: one that the user has given up with `--overwrite`, whose record is gone while its target is made again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from reshard_mpi import formats
from reshard_mpi.errors import TargetError
from reshard_mpi.filesystem.folders import Folder, closing, open_lock, try_lock
from reshard_mpi.filesystem.paths import described
from reshard_mpi.filesystem.source_files import (
    exists,
    first_bytes,
    is_file,
    is_folder,
    is_taken,
    names,
    open_stream,
    version_of,
)
from reshard_mpi.formats.structure import is_file_name
from reshard_mpi.journal.publication import remove_dead_partials
from reshard_mpi.journal.record_files import COMMIT_RECORD, STATE, lock_name, record_path, recorded_ranks
from reshard_mpi.journal.run_records import CommitRecord, RunIdentity, committed_times
from reshard_mpi.journal.target_folders import opened_inner, uncommit
from reshard_mpi.journal.target_records import RecordHead, TargetRecord

NOT_WRITTEN = "has not been written"
OF_ANOTHER_RUN = "is of another run"
_MOST_NOTE_BYTES = 64
_MOST_OF_POINTER = 4096  # bytes, more than the name of a folder has
_ELSEWHERE = "choose another target folder, or remove the file if nobody needs it"


def remove_note(lock: int) -> None:
    """Remove the note of `note_replaceable`, since that file has been replaced."""
    with contextlib.suppress(OSError):  # no other file is taken for that one
        if os.fstat(lock).st_size:
            os.ftruncate(lock, 0)


def note_replaceable(lock: int, path: Path) -> None:
    """Note in the open lock of a target which file lies at `path` now; its writer replaces that one."""
    note = _noted(path)
    if os.pread(lock, _MOST_NOTE_BYTES, 0) != note:
        os.ftruncate(lock, 0)
        if note:
            os.pwrite(lock, note, 0)


def require_own_target(state: Folder | None, folder: Path, target_rank: int, path: Path) -> None:
    """Raise TargetError if the file at `path`, where a target goes, is nobody's that this folder's records know.

    Args:
        state: the open folder of the records; None if there is none.
        folder: the target folder.
    """
    if not is_taken(path):
        return
    record = None if state is None else RecordHead.read(state.path, target_rank)
    if state is not None and (
        _is_explained(record, state, folder, target_rank, path) or _is_noted(state, target_rank, path)
    ):
        return
    got = f"{version_of(path).size_bytes} bytes of another origin" if is_file(path) else described(path)
    remedy = f"{_ELSEWHERE}, and --resume makes the target"
    if record is not None and folder / record.file == path and is_file(path):
        size_bytes = version_of(path).size_bytes
        got = f"{size_bytes} bytes, not the {record.size_bytes} that this run has written"
        if record.modified_ns is not None and _has_lost_its_time(record, path):
            got = f"{size_bytes} bytes that may be those which this run has written, with another time"
            seconds = f"{record.modified_ns // 10**9}.{record.modified_ns % 10**9:09}"
            remedy = (
                "if they are these, as reshard-mpi verify tells where sums are kept, give the file (of hard links, a"
                f" copy) the recorded time: touch -d @{seconds} {shlex.quote(str(path))}; or {remedy}"
            )
        elif size_bytes == record.size_bytes:
            got = f"{size_bytes} bytes, as many as this run has written, but others"
            remedy += "; a copy of a folder is to be made whole, with its records"
    raise TargetError(
        f"a file that this run has not written lies where target rank {target_rank} goes",
        expected="no file of that name, or the one that this run has put there",
        got=got,
        where=str(path),
        remedy=remedy,
    )


def _has_lost_its_time(record: RecordHead, path: Path) -> bool:
    """Tell whether a file may be a target that has been restored or linked without its time."""
    with contextlib.suppress(OSError):
        return record.announced is None and record.has_sample_of(path)
    return False


def require_no_other_records(state: Path, identity: RunIdentity) -> None:
    """Raise TargetError if a folder without a record of its run has records of targets that are of another one."""
    for record in _records(state):
        if record.digest != identity.digest:
            raise TargetError(
                "the target folder holds targets of another run",
                expected="an empty folder, or targets of this run",
                got=f"a record of {record.file}, and no run.json that says which run has made it",
                where=str(state),
                remedy="use another target, or --overwrite to replace them",
            )


def require_own_index(folder: Path, identity: RunIdentity, is_begun: Callable[[], bool]) -> None:
    """Raise TargetError if the folder has an index, or a commit record, that the run `identity` has not written.

    Args:
        is_begun: tells whether the folder's records are those of this run. It is asked after a file has been seen,
            since another process may begin the run, and end it, meanwhile.
    """
    for name in identity.index_names:
        if is_taken(folder / name):
            is_own = is_begun() and name in own_index_names(folder, identity)
            # It is looked for again: another process may have begun to make a target anew, and removed it.
            if not is_own and is_taken(folder / name):
                raise TargetError(
                    "the target folder has an index that is not known as this run's",
                    expected="no index, or this run's: as it was committed, or beside all of its targets and no others",
                    got=described(folder / name),
                    where=str(folder / name),
                    remedy=f"{_ELSEWHERE}: it is written again when all targets are complete",
                )
    if is_taken(folder / COMMIT_RECORD) and not is_begun():
        raise TargetError(
            "the target folder has the commit record of a checkpoint that this run has not written",
            expected="an empty folder, or what this run has put there",
            got=described(folder / COMMIT_RECORD),
            where=str(folder / COMMIT_RECORD),
            remedy=_ELSEWHERE,
        )


def own_index_names(folder: Path, identity: RunIdentity) -> tuple[str, ...]:
    """Return the names of the index files in a folder that the recorded run `identity` has written.

    They are as they were committed. Any other is damaged, or has no commit record yet, while all targets are complete
    and nobody else's shard lies there that it may list.
    """
    lying = tuple(name for name in identity.index_names if is_taken(folder / name))
    own = _committed_index(folder) if lying else ()
    return lying if not {*lying} <= {*own} and _are_all_in_place(folder, identity) else own


def _are_all_in_place(folder: Path, identity: RunIdentity) -> bool:
    """Tell whether all targets of a run lie in a folder as their records say, and no other file that is called so."""
    if "target_ranks" not in identity.facts:  # as in records of earlier versions
        return False
    files, endings = dict(enumerate(_target_files(identity))), formats.info(identity.format).suffixes
    if any(name.endswith(endings) for name in {*names(folder)}.difference(files.values())):
        return False
    return all(is_in_place(folder, identity, rank, file) for rank, file in files.items())


def is_in_place(folder: Path, identity: RunIdentity, target_rank: int, file: str) -> bool:
    """Tell whether the file in the place of a target is the one that the target's record is about."""
    head = RecordHead.read(folder / STATE, target_rank)
    return head is not None and head.digest == identity.digest and _is_about(folder, head, file)


def _is_about(folder: Path, head: RecordHead, file: str) -> bool:
    """Tell whether a file of a target folder is there, and is the one that this record of a target is about."""
    return head.file == file and exists(folder / file) and head.is_about(folder / file)


def complete_record(folder: Path, identity: RunIdentity, target_rank: int) -> TargetRecord | str:
    """Return the record of a complete target; of another, why it is not complete."""
    record = TargetRecord.read(folder / STATE, target_rank)
    if record is None:
        return NOT_WRITTEN
    if record.head.digest != identity.digest:
        return OF_ANOTHER_RUN
    if "prefix" in identity.facts and not _is_file_of(identity, record):
        return f"has a record of another file, {record.file}"
    try:
        size_bytes = version_of(folder / record.file).size_bytes
    except (FileNotFoundError, NotADirectoryError):
        return f"has lost its file {record.file}"
    if size_bytes != record.head.size_bytes:
        return f"has {size_bytes} bytes in {record.file}, not the {record.head.size_bytes} that were written"
    # Of a head that is read by itself it is also known whether the record's file has its time (`has_its_time`).
    head = RecordHead.read(folder / STATE, target_rank)
    if head is not None and head.is_about(folder / record.file):
        return record
    if record.head.announced is not None:
        return f"was about to be put in the place of {record.file}"
    if _has_lost_its_time(record.head, folder / record.file):
        return f"has another time at {record.file} than its record says"
    return f"has another file in the place of {record.file} than the one that was written"


def _is_file_of(identity: RunIdentity, record: TargetRecord) -> bool:
    prefix, format_name = identity.facts["prefix"], identity.format
    folder_format = formats.folder_by_name(format_name)
    if folder_format is not None:
        return record.file == folder_format.file_name(record.rank, identity.target_ranks, prefix)
    is_named = record.file.startswith(f"rank_{record.rank}/{prefix}{record.rank}.")
    return is_named and formats.name_of(record.file) == format_name


def withdraw_commit(folder: Folder) -> None:
    """Remove the commit record and the index of a folder if it holds other targets than were committed.

    Nothing is removed where that is not certain: what is lost, cut or has another time may be restored, and nothing but
    its index makes it a checkpoint then. An index that is not the one that was committed stays in any case: a training
    may have saved its own there.
    """
    committed = CommitRecord.read(folder.path)
    if committed is None:
        return
    times_ns = committed_times(folder.path, committed)
    for rank, file in committed.files.items():
        head = RecordHead.read(folder.path / STATE, rank)
        if head is not None and _is_about(folder.path, head, file):
            is_as_committed = times_ns is None or head.modified_ns == times_ns.get(rank)
            if head.digest != committed.digest or not is_as_committed:
                uncommit(folder, _committed_index(folder.path))
                return


def _committed_index(folder: Path) -> tuple[str, ...]:
    """Return the names of the index files in a folder that are as they were committed."""
    committed = CommitRecord.read(folder)
    digests = {} if committed is None else committed.index_digests
    return tuple(name for name, digest in digests.items() if _digest(folder / name) == digest)


def changed_index_files(folder: Path, committed: CommitRecord) -> dict[str, str]:
    """Return the names of the index files in a folder that are not as they were committed, and the SHA-256 of each.

    Commits of earlier versions do not say what their index was, only that there is one: the SHA-256 is then empty.
    A file that names the latest of several folders may be changed: a training has gone on then, and saved another.
    """
    marks = formats.info(committed.run.format).marks
    if not committed.index_digests and marks and not any(exists(folder / name) for name in marks):
        return {marks[0]: ""}
    digests = committed.index_digests.items()
    changed = {name: digest for name, digest in digests if _digest(folder / name) != digest}
    pointers = formats.info(committed.run.format).pointer_files
    return {name: own for name, own in changed.items() if name not in pointers or not _named_folders(folder / name)}


def names_another_save(folder: Path, identity: RunIdentity, name: str) -> bool:
    """Tell whether a file of the index names the latest of several folders, and that is none in which the run saves.

    A training has gone on in the target folder then, and its pointer is its own, whatever lies there besides.
    """
    if name not in formats.info(identity.format).pointer_files or "target_ranks" not in identity.facts:
        return False
    named = _named_folders(folder / name)
    return bool(named) and named.isdisjoint(file.partition("/")[0] for file in _target_files(identity))


def _named_folders(pointer: Path) -> set[str]:
    """Return the names under which the folder that a file names lies beside it; none if it does not."""
    try:
        name = first_bytes(pointer, _MOST_OF_POINTER).decode().strip()
    except (OSError, UnicodeDecodeError):
        return set()
    return {own for own in formats.folders_meant(name) if is_file_name(own) and is_folder(pointer.parent / own)}


def _digest(path: Path) -> str | None:
    """Return the SHA-256 of a file; None if it cannot be read."""
    try:
        with open_stream(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def _is_explained(record: RecordHead | None, state: Folder, folder: Path, target_rank: int, path: Path) -> bool:
    """Tell whether a target's record explains its file; a record that cannot be read was lost with the power."""
    if record is None:
        return is_taken(record_path(state.path, target_rank))
    with contextlib.suppress(OSError):
        return folder / record.file == path and record.is_about(path)
    return False


def _is_noted(state: Folder, target_rank: int, path: Path) -> bool:
    """Tell whether the file at `path` is the one that a writer of the target has found there, and was to replace."""
    try:
        lock = state.open_file(lock_name(target_rank), os.O_RDONLY, "a lock")
    except FileNotFoundError:
        return False
    with closing(lock):
        note = os.pread(lock, _MOST_NOTE_BYTES, 0)
    return bool(note) and note == _noted(path)


def _noted(path: Path) -> bytes:
    """Return the note on the file at `path`, which no other file has; an empty one if there is none."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return b""
    return f"replaces {status.st_size} bytes of {status.st_mtime_ns}\n".encode()


def leftovers(folder: Path, identity: RunIdentity) -> dict[str, int]:
    """Return the files in a target folder that another run than `identity` has made, by path, with their target ranks.

    Only files that the run does not make itself: those that are by their times and a sample what their records are
    about, and those that were to be replaced. A save in a folder of its own stays. Paths are relative to the folder.
    """
    earlier = RunIdentity.recorded(folder / STATE)
    if earlier is not None and other_saves(earlier, identity):
        return {}
    own = set(_target_files(identity))
    records = (record for record in _records(folder / STATE) if record.digest != identity.digest)
    made = {record.file: record.rank for record in records if record.file not in own and _is_unchanged(folder, record)}
    given_up = () if earlier is None or "target_ranks" not in earlier.facts else _given_up(folder, earlier)
    return made | {file: rank for file, rank in given_up if file not in own}


def other_saves(earlier: RunIdentity, identity: RunIdentity) -> tuple[str, ...]:
    """Return the names of the folders in which an earlier run has made a save that stays beside another run's.

    It does so where a pointer names the latest of several folders, and both runs have others; else there are none.
    """
    if earlier.format != identity.format or not formats.info(identity.format).pointer_files:
        return ()
    if not all("target_ranks" in run.facts for run in (earlier, identity)):
        return ()
    theirs, ours = ({file.rpartition("/")[0] for file in _target_files(run)} for run in (earlier, identity))
    return () if theirs & ours else tuple(sorted(theirs))


def leftover_index(folder: Path, identity: RunIdentity) -> tuple[str, ...]:
    """Return the names of the index files in a target folder that another run than `identity` has written.

    None if a shard of that run's stays, which is somebody's by now: nothing but the index makes it a checkpoint. An
    index that is not the one that was committed stays in any case, and so does a pointer to another save.
    """
    earlier = RunIdentity.recorded(folder / STATE)
    if earlier is None:
        return ()
    named = _target_files(earlier) if "target_ranks" in earlier.facts else ()
    shards = {*named, *(record.file for record in _records(folder / STATE))}
    staying = shards.difference(leftovers(folder, identity), _target_files(identity))
    if any(is_taken(folder / file) for file in staying):
        return ()
    committed = CommitRecord.read(folder)
    changed = {} if committed is None else changed_index_files(folder, committed)
    own = (name for name in own_index_names(folder, earlier) if name not in changed)
    return tuple(name for name in own if not names_another_save(folder, earlier, name))


def _given_up(folder: Path, earlier: RunIdentity) -> Iterator[tuple[str, int]]:
    """Yield the files, and their target ranks, that writers of a run were to replace when they were killed."""
    # One that was killed just before the file would have taken its name has left a record of that file.
    announced = {head.rank for head in _records(folder / STATE) if head.announced is not None}
    recorded = set(recorded_ranks(folder / STATE)) - announced
    with opened_inner(folder, STATE) as state:
        if state is None:
            return
        names = set(state.names())  # there may be millions of targets without a lock
        for rank, file in enumerate(_target_files(earlier)):
            if rank not in recorded and lock_name(rank) in names and _is_noted(state, rank, folder / file):
                yield file, rank


def remove_earlier_run(folder: Folder, state: Folder, identity: RunIdentity, index_names: Iterable[str]) -> None:
    """Remove indexes and the commit record, what `leftovers` finds with its records, and partial files of that run.

    Records of a save that stays go too: those of this run take their places one by one.

    Rank folders that become empty go as well. Raises TargetError, before anything is removed, if something cannot go.
    """
    earlier, rank_of = RunIdentity.recorded(folder.path / STATE), leftovers(folder.path, identity)
    for path in rank_of:  # all of them can go, or none does
        rank_folder, _, name = path.rpartition("/")
        with folder.inner(rank_folder or ".") as inner:
            inner.require_removable(name)
    uncommit(folder, (*leftover_index(folder.path, identity), *index_names))
    if earlier is not None and other_saves(earlier, identity):
        for rank in recorded_ranks(state.path):
            state.remove(record_path(state.path, rank).name)
    for path, rank in rank_of.items():
        rank_folder, _, name = path.rpartition("/")
        with folder.inner(rank_folder or ".") as inner:
            inner.require_removable(name)
            inner.remove(name)
            inner.sync()
        state.remove(record_path(state.path, rank).name)
        if rank_folder:
            folder.remove_empty(rank_folder)
    if rank_of:
        folder.sync()
    if earlier is not None and "target_ranks" in earlier.facts:
        _remove_partial_files(folder, state, earlier)


def _remove_partial_files(folder: Folder, state: Folder, earlier: RunIdentity) -> None:
    """Remove the partial files of a run's targets whose writers are dead, and rank folders that become empty."""
    names = set(state.names())  # there may be millions of targets without a lock
    for rank, file in enumerate(_target_files(earlier)):
        if lock_name(rank) not in names:
            continue
        rank_folder, _, name = file.rpartition("/")
        # What is of another user, or was given up as a whole, is no matter of this run.
        with contextlib.suppress(FileNotFoundError, TargetError), closing(open_lock(state, lock_name(rank))) as lock:
            if not try_lock(lock, fcntl.LOCK_EX):
                continue
            with folder.inner(rank_folder or ".") as inner:
                remove_dead_partials(inner, name)
            if rank_folder:
                folder.remove_empty(rank_folder)


def _target_files(identity: RunIdentity) -> Iterator[str]:
    """Yield the paths of all targets of a run, relative to the target folder."""
    targets, prefix = identity.target_ranks, str(identity.facts.get("prefix", ""))
    return (formats.target_file(identity.format, rank, targets, prefix) for rank in range(targets))


def _records(state: Path) -> Iterator[RecordHead]:
    """Yield how the records of targets begin, as far as they can be read."""
    records = (RecordHead.read(state, rank) for rank in recorded_ranks(state))
    return (record for record in records if record is not None)


def _is_unchanged(folder: Path, record: RecordHead) -> bool:
    """Tell whether nobody has changed a target; without its time, as in a copy, a sample does not tell that."""
    path, record = folder / record.file, record._replace(has_its_time=True)
    with contextlib.suppress(OSError):
        return record.sample is not None and is_file(path, follow_link=False) and record.is_about(path)
    return False
