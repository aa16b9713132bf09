"""Find the record that a run keeps of a file (`RecordFinder`), and hold the file against it (`damage_besides`)."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from reshard_mpi import formats
from reshard_mpi.errors import DamageError, DisagreementError, ReshardError
from reshard_mpi.filesystem.paths import absolute_path, is_object_path, rank_of_folder, real_path
from reshard_mpi.filesystem.source_files import (
    FileCutShortError,
    exists,
    first_bytes,
    is_folder,
    is_taken,
    names,
    version_of,
)
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.structure import digest_besides, opened
from reshard_mpi.formats.tensor_table import TensorEntry, TensorTable
from reshard_mpi.journal.file_ownership import changed_index_files
from reshard_mpi.journal.provenance import digest_of_texts
from reshard_mpi.journal.publication import is_partial
from reshard_mpi.journal.record_files import COMMIT_RECORD, STATE, record_path, recorded_ranks, run_path
from reshard_mpi.journal.run_records import CommitRecord, RunIdentity, committed_times
from reshard_mpi.journal.target_records import RecordHead, TargetRecord, TensorSum, require_one_source
from reshard_mpi.planning.source_flaws import ModifiedShard
from reshard_mpi.sharding.placement import Shape

# What to do where a run has replaced some targets only.
_FINISH = "let the run that replaces them finish (transform with --resume; files of others, with --overwrite)"


class FoundHead(NamedTuple):
    """Where the record of a file is, and how it begins: None if it is damaged."""

    path: Path
    head: RecordHead | None


class RecordFinder:
    """Finds records of files: in the target folder that a file lies in, by its name or by what links lead to."""

    def __init__(self) -> None:
        self._rank_of: dict[Path, Mapping[str, int]] = {}  # by target folder: ranks by files
        self._holds_another = lru_cache(holds_another)

    def find(self, path: str, likely_rank: int) -> TargetRecord | None:
        """Return the record of the file at `path`; None if there is none, it is damaged, or about another file.

        Args:
            likely_rank: the target rank of the file, as it seems.
        """
        found = self.find_head(path, likely_rank)
        return None if found is None or found.head is None else TargetRecord.read(found.path.parent, found.head.rank)

    def find_head(self, path: str, likely_rank: int) -> FoundHead | None:
        """Return how the record of a file begins, as `find` returns the whole."""
        for place, head in self._records(path, likely_rank):
            if head is None or _is_about(head, path):
                return FoundHead(place, head)
            if head.announced is None and not self._holds_another(place.parent.parent):
                return FoundHead(place, head)
        return None

    def only_announces(self, path: str, likely_rank: int) -> bool:
        """Tell whether the record of a file announces another one in its place, though targets are committed there.

        A commit leaves no such record: it came with a copy of a run that was killed as it put its file in place.
        """
        for place, head in self._records(path, likely_rank):
            if head is not None and head.announced is not None and not _is_about(head, path):
                folder = place.parent.parent
                return CommitRecord.read(folder) is not None and not self._holds_another(folder)
        return False

    def _records(self, path: str, likely_rank: int) -> Iterator[tuple[Path, RecordHead | None]]:
        """Yield the place of each record that has the name of a file, and how it begins: None if it is damaged."""
        for folder, file in target_folders_of(path):
            head = RecordHead.read(folder / STATE, likely_rank)
            rank = likely_rank if head is not None and head.file == file else self._rank(folder, file)
            if rank is None:
                continue
            place = record_path(folder / STATE, rank)
            head = head if rank == likely_rank else RecordHead.read(folder / STATE, rank)
            is_damaged = head is None and is_taken(place) and not place.is_symlink()  # a link is to the true one
            if is_damaged or (head is not None and head.file == file):
                yield place, head

    def _rank(self, folder: Path, file: str) -> int | None:
        """Return the target rank of a file in a target folder; None if it is none."""
        of_folder = rank_of_folder(file.partition("/")[0]) if "/" in file else None
        if of_folder is not None:
            return of_folder
        if folder not in self._rank_of:
            self._rank_of[folder] = ranks_by_file(folder)
        return self._rank_of[folder].get(file)


def _is_about(head: RecordHead, path: str) -> bool:
    with contextlib.suppress(OSError):  # which is told where the file is read
        return head.is_about(Path(path))
    return False


def run_of(path: str, likely_rank: int, finder: RecordFinder | None = None) -> tuple[RunIdentity, Path] | None:
    """Return the run that has written the file at `path`, and its target folder; None if no run has a record of it.

    Args:
        finder: for many files of a folder.
    """
    found = (finder or RecordFinder()).find_head(path, likely_rank)
    if found is None or found.head is None:
        return None
    state = found.path.parent
    committed = CommitRecord.read(state.parent)
    runs = (RunIdentity.recorded(state), None if committed is None else committed.run)
    written_by = next((run for run in runs if run is not None and run.digest == found.head.digest), None)
    return None if written_by is None else (written_by, state.parent)


def run_to_replace(path: str) -> tuple[RunIdentity, Path] | None:
    """Return the run that has begun in the folder of the file at `path` and has a target called so, and that folder.

    It may have removed the record of the file already. None if there is no such run.
    """
    for folder, file in target_folders_of(path):
        begun = RunIdentity.recorded(folder / STATE)
        prefix = None if begun is None else begun.facts.get("prefix")
        rank = rank_of_folder(file.partition("/")[0])
        if begun is not None and prefix is not None and file.startswith(f"rank_{rank}/{prefix}{rank}."):
            return begun, folder
    return None


class RunOfFiles(NamedTuple):
    """The run that has made files."""

    digest: str
    modified: tuple[ModifiedShard, ...]  # files that are not, by their times, the ones that it has recorded
    folders: tuple[Path, ...]  # with its records: a folder of links may lead to several
    rank_of: Mapping[str, int]  # the ranks that it has written the files for, by path


def require_one_run(files: Mapping[int, Sequence[str]], where: str) -> RunOfFiles | None:
    """Return the run that has made files; None if no run has a record of any.

    Args:
        files: paths, by the ranks that they seem to be of.
        where: the checkpoint, for errors.

    Raises DisagreementError if they could not be committed together: they are of several runs, as where one has
    replaced some targets of the other, or a copy some files; they were made from two states of the source; or an index
    that has settings lies there of an earlier commit.
    """
    finder = RecordFinder()
    ranked = [(path, rank) for rank, paths in files.items() for path in paths]
    found = {path: finder.find_head(path, rank) for path, rank in ranked}
    heads = {path: each.head for path, each in found.items() if each is not None and each.head is not None}
    if not heads:
        for path, rank in ranked:
            _require_not_begun_anew(path, where)
            if finder.only_announces(path, rank):
                got = f"{path} of a run that was killed as it replaced them"
                expected = f"those that were committed with {COMMIT_RECORD}"
                raise _of_several_runs(expected, got, where, "make the targets anew (--overwrite)")
        return None
    first_path, first = next(iter(heads.items()))
    for path in found:
        head = heads.get(path)
        if head is None or head.digest != first.digest:
            got = f"{path} of another run" if head is not None else f"{path}, of which no run has a record"
            raise _of_several_runs(f"those of one run, as {first_path}", got, where)
    state_folders = dict.fromkeys(each.path.parent for each in found.values() if each is not None)
    folders = {state.parent: _is_committed(state.parent, first, heads.values(), where) for state in state_folders}
    if {*folders.values()} != {True}:
        targets = [(record, Path(path)) for path, rank in ranked if (record := finder.find(path, rank)) is not None]
        require_one_source(targets, _FINISH, is_committed=False not in folders.values())
    for folder, is_committed in folders.items():
        committed = CommitRecord.read(folder) if is_committed is False else None
        if committed is not None and formats.info(committed.run.format).own_index:
            got = f"files of a later run, {first.file} or others"
            raise _of_several_runs(f"files as they were committed with {folder / COMMIT_RECORD}", got, where)
    modified = _modified(heads)
    older = [each.path for each in modified if heads[each.path].is_newer_than(Path(each.path))]
    if older and len(modified) < len(heads):
        raise _of_several_runs("files as their records say", f"{older[0]}, which is older than its record", where)
    rank_of = {path: head.rank for path, head in heads.items()}
    return RunOfFiles(first.digest, modified, tuple(state.parent for state in state_folders), rank_of)


def _require_not_begun_anew(path: str, where: str) -> None:
    """Raise DisagreementError if a run has begun to replace a file without a record, and is not committed.

    The file is another's, and others beside it may have been removed. One that is newer than the run was saved there
    since; but copies have other times, so the partial file of its target tells as well.
    """
    to_replace = run_to_replace(path)
    if to_replace is None:
        return
    run, folder = to_replace
    committed = CommitRecord.read(folder)
    if committed is not None and committed.digest == run.digest:
        return
    try:
        is_newer = version_of(path).modified_ns > version_of(run_path(folder / STATE)).modified_ns
        beside = names(Path(path).parent)
    except OSError:  # which is told where the file is read
        return
    if not is_newer or any(is_partial(Path(name), Path(path).name) for name in beside):
        got = f"{path}, which was there before"
        raise _of_several_runs(f"those of the run that has begun in {folder}", got, where)


def modified_shards(files: Mapping[int, Sequence[str]]) -> tuple[ModifiedShard, ...]:
    """Return the files that are not, by their times, the ones that a run has recorded.

    Args:
        files: paths, by the ranks that they seem to be of.
    """
    finder = RecordFinder()
    found = ((path, finder.find_head(path, rank)) for rank, paths in files.items() for path in paths)
    return _modified({path: each.head for path, each in found if each is not None and each.head is not None})


def _modified(heads: Mapping[str, RecordHead]) -> tuple[ModifiedShard, ...]:
    """Return what `modified_shards` returns. heads: how the records of files begin, by path."""
    modified = []
    for path, head in heads.items():
        with contextlib.suppress(OSError):  # which is told where the file is read
            if not head.is_about(Path(path)):
                modified.append(ModifiedShard(head.rank, path))
    return tuple(modified)


def _is_committed(folder: Path, first: RecordHead, heads: Collection[RecordHead], where: str) -> bool | None:
    """Tell whether targets in a folder are the ones that were committed, as far as the times in their records tell.

    None if those of the commit are not known, as in folders of earlier versions: then the run is the same.

    Raises DisagreementError if it was another run that was committed.
    """
    committed = CommitRecord.read(folder)
    if committed is not None and committed.digest != first.digest:
        got = f"{COMMIT_RECORD} of another run in {folder}"
        raise _of_several_runs(f"that of the run which has made {first.file}", got, where)
    if committed is None:
        begun = RunIdentity.recorded(folder / STATE)
        if begun is not None and begun.digest != first.digest:
            raise _of_several_runs(
                f"those of the run that has begun in {folder}", f"{first.file} of another run", where
            )
        return False
    times_ns = committed_times(folder, committed)
    if formats.info(committed.run.format).own_index:  # it has settings, and not names of files alone
        changed = changed_index_files(folder, committed)
        others = [name for name in changed if exists(folder / name)]
        if others:
            expected = f"{others[0]} as it was committed with {first.file}"
            raise _of_several_runs(expected, f"another {folder / others[0]}", where)
    return None if times_ns is None else all(head.modified_ns == times_ns.get(head.rank) for head in heads)


def _of_several_runs(expected: str, got: str, where: str, mend: str = _FINISH) -> DisagreementError:
    return DisagreementError(
        "files of several runs lie in one checkpoint",
        expected=expected,
        got=got,
        where=where,
        remedy=f"{mend}, or give the files of one run alone (--select, or a folder of their own); what you know to"
        f" belong together is read without its records (a copy without {STATE})",
    )


def damage_besides(path: str, tensors: TensorTable, digest: str, whose: str = "its record") -> Iterator[DamageError]:
    """Yield the damage of a file's bytes besides its tensors.

    Args:
        digest: of these bytes; empty if it is not known.
        whose: what has the digest.
    """
    if not digest:
        return
    with opened(path) as file:
        try:
            is_same = digest_besides(file, tensors.payload_spans()) == digest
        except FileCutShortError:
            is_same = False
    if not is_same:
        yield DamageError(
            "the bytes of a shard besides its tensors are not what was written",
            expected=f"those that {whose} has the digest of",
            got="others: names, settings or the structure of the file have changed",
            where=path,
            remedy="restore the file",
        )


def folder_of_records(path: str, format_name: str) -> Path:
    """Return the folder that has the records of the run which made the checkpoint at `path`.

    A format that packs has a folder of its own in the target folder for each checkpoint; others may lie beside it, and
    links may lead to it.

    Args:
        format_name: of the checkpoint, as it seems; its index may be damaged.
    """
    folder, packs = Path(path), formats.info(format_name).packs
    if not packs and is_object_path(path):
        return folder
    named, whole, real = folder.name not in ("", ".."), absolute_path(folder), real_path(folder)
    targets = [folder.parent if named else whole.parent, *([] if real == whole else [real.parent])]
    for target, name in zip(targets, (whole.name, real.name)):
        committed = CommitRecord.read(target)
        if committed is not None:
            are_in_it = (file.startswith(f"{name}/") for file in committed.files.values())
            is_of_run = formats.info(committed.run.format).packs and any(are_in_it)
        else:
            is_of_run = packs and (is_folder(target / STATE) or is_taken(target / COMMIT_RECORD))
        if is_of_run:
            return target
    return folder


def damage_of_index(folder: Path) -> Iterator[DamageError]:
    """Yield the damage of a folder's index, if the commit record of the folder has digests of it."""
    committed = CommitRecord.read(folder)
    if committed is None or not committed.index_digests or holds_another(folder):
        return
    for name, digest in changed_index_files(folder, committed).items():
        yield DamageError(
            "the index of a checkpoint is not what was committed",
            expected=f"the SHA-256 {digest}, as {COMMIT_RECORD} says",
            got="another" if exists(folder / name) else "no index",
            where=str(folder / name),
            remedy="reshard-mpi commit makes it anew of the targets",
        )


def holds_another(folder: Path) -> bool:
    """Tell whether another checkpoint has been saved in a folder where a run had committed one.

    Then it has another index, which a training has written, all files that this names are there, and none is a target
    as it was committed: those may lie there still, where the other has fewer files.
    """
    committed = CommitRecord.read(folder)
    if committed is None:
        return False
    name, files = committed.run.format, committed.files.values()
    packs = formats.info(name).packs
    place = folder / next((file.partition("/")[0] for file in files), "") if packs else folder
    folder_format = formats.folder_by_name(name) if name in formats.names_of_folder(str(place)) else None
    changed = changed_index_files(folder, committed)
    if folder_format is None or not changed:
        return False
    own = formats.info(name).own_index
    if own and any(first_bytes(folder / each, len(own), otherwise=b"") == own for each in changed):  # of another run
        return False
    try:
        named = folder_format.files_of(str(place))
    except (OSError, ReshardError):  # the index is damaged
        return False
    rank_of = {str(folder / file): rank for rank, file in committed.files.items()}
    for path in named:
        if not is_taken(path):
            return False
        if path in rank_of:
            head = RecordHead.read(folder / STATE, rank_of[path])
            # Records of another run, as a copy may have brought, do not tell what was committed.
            if head is None or head.digest != committed.run.digest or head.is_about(Path(path)):
                return False
    return True


def target_folders_of(path: str) -> Iterator[tuple[Path, str]]:
    """Yield the folders of runs that a file lies in, and its path there: by its name first, then by its real path."""
    for whole in dict.fromkeys((absolute_path(path), real_path(path))):
        for folder in whole.parents[:2]:
            if is_folder(folder / STATE):
                yield folder, whole.relative_to(folder).as_posix()


def ranks_by_file(folder: Path) -> dict[str, int]:
    """Return the target ranks of the files in a target folder, as far as no rank folders say them."""
    committed = CommitRecord.read(folder)
    if committed is not None:
        return {file: rank for rank, file in committed.files.items()}
    heads = (RecordHead.read(folder / STATE, rank) for rank in recorded_ranks(folder / STATE))
    return {head.file: head.rank for head in heads if head is not None}


def damage_by_record(shard: Manifest, record: TargetRecord, recorded: Mapping[str, TensorSum]) -> Iterator[DamageError]:
    """Yield what differs between a shard and its record, besides the bytes of its tensors.

    A format that packs is given texts to make a file by, which the file does not hold.
    """
    size_bytes = version_of(shard.path).size_bytes
    if size_bytes != record.head.size_bytes:
        expected, got = f"{record.head.size_bytes} bytes, as it was written", f"{size_bytes}"
        yield DamageError(
            "a shard has another size", expected=expected, got=got, where=shard.path, remedy="restore the file"
        )
    if not formats.info(shard.format).packs and digest_of_texts(shard.strings) != record.inputs.texts:
        yield DamageError("the texts of a shard are not what was written", where=shard.path, remedy="restore the file")
    for name in dict.fromkeys((*recorded, *shard.tensors)) if recorded else ():
        tensor, entry = recorded.get(name), shard.tensors.get(name)
        if tensor is None or entry is None or not fits_record(tensor, entry):
            yield DamageError(
                f"{name!r} is not what was written",
                expected=type_and_shape(None if tensor is None else (tensor.dtype, tensor.shape)),
                got=type_and_shape(None if entry is None else (entry.dtype.name, entry.shape)),
                where=shard.path,
                remedy="restore the file",
            )


def type_and_shape(tensor: tuple[object, Shape] | None) -> str:
    """Return the type and the shape of a tensor in words. None: there is no tensor."""
    return "no such tensor" if tensor is None else f"{tensor[0]} of shape {list(tensor[1])}"


def fits_record(tensor: TensorSum, entry: TensorEntry) -> bool:
    """Tell whether a tensor of a shard has the type and shape that its record says."""
    return (tensor.dtype, tensor.shape) == (entry.dtype.name, entry.shape)
