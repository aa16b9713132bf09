"""Find the shard files of a folder that `--select` takes, and their ranks (`find_shards`)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from reshard_mpi import formats
from reshard_mpi.checkpoints.file_names import PART, choose, require_one_step
from reshard_mpi.checkpoints.find_branches import (
    branch_folders,
    group_in_ranks,
    loose_branches,
    warned_of_optimizer_alone,
)
from reshard_mpi.checkpoints.refuse_sources import require_no_lost_index, require_readable
from reshard_mpi.checkpoints.shard_files import (
    ShardFiles,
    common_name,
    is_strategy,
    name_left_out,
    name_left_out_beside,
    of_one_rank,
    rank_folders,
    shards_in,
)
from reshard_mpi.errors import ShardError, SourceError, told
from reshard_mpi.filesystem import source_files
from reshard_mpi.filesystem.paths import described, kind_at
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.structure import is_file_name
from reshard_mpi.journal.provenance import FirstLooks


def find_shards(
    path: str,
    select: str | None = None,
    *,
    role: str = "source",
    format_name: str | None = None,
    src_files: int | None = None,
) -> ShardFiles:
    """Return the shard files under `path`: `rank_*` folders, one file, or loose files of one full checkpoint.

    A folder that names the latest of the folders in it stands for that one.

    Args:
        select: a glob that file names must match.
        role: what errors call the checkpoint, "source" or "target".
        format_name: take only files of this format; one file is then of it whatever its ending.
        src_files: how many files were saved, if the caller knows.

    Raises SourceError where there is nothing or no clear choice.
    """
    latest = latest_in(path, format_name)
    folder = path if latest is None else latest.path
    shards = _found(folder, select, role, format_name, FirstLooks(path))
    if select is None and source_files.is_folder(folder):
        shards = name_left_out(warned_of_optimizer_alone(shards), folder, format_name)
    if latest is not None and select is None:
        shards = name_left_out_beside(shards, path)
    if latest is not None:
        notes, warnings = (latest.note, *shards.notes), (*latest.warnings, *shards.warnings)
        shards = shards._replace(notes=notes, warnings=warnings, latest=Path(latest.path).name)
    return shards._replace(src_files=src_files)


def _found(path: str, select: str | None, role: str, format_name: str | None, looks: FirstLooks) -> ShardFiles:
    given = Path(path)
    if source_files.is_file(path):
        name = format_name or formats.name_of(path)
        if name is None:
            raise _of_no_format(given, role)
        if is_strategy(given):
            raise _nothing(path, "a checkpoint", "a strategy file", role)
        _require_index(formats.name_of(path) or name, given.parent, path, role)
        return _by_own_rank(ShardFiles(path, name, {0: (path,)}, looks=looks))
    if not source_files.is_folder(path):
        raise SourceError(
            f"the {role} is not there",
            expected="a folder or a checkpoint file",
            got=described(given),
            where=path,
            remedy="check the path, and that this machine sees it",
        )
    folders = rank_folders(given)
    name = _indexed(path, folders, select, format_name)
    if name is not None and (folder_format := formats.folder_by_name(name)) is not None:
        if format_name is None:
            require_no_lost_index(path, role, name)
        return ShardFiles(path, name, {0: folder_format.files_of(path)}, is_folder=True, looks=looks)
    wanted = f"{_endings(format_name)}{_selected(select)}"
    if not folders and select is None:
        require_readable(path, role, format_name)
        if (joined := branch_folders(path, format_name)) is not None:
            return joined._replace(looks=looks)
    if folders:
        return _from_folders(path, folders, select, role, format_name)._replace(looks=looks)
    loose = shards_in(given, select, format_name)
    if not loose:
        raise _nothing(path, f"rank_* folders or files that end in {wanted}", "neither", role)
    name = _one_format({0: loose}, path)
    _require_index(name, given, path, role)
    _require_all_parts(loose, path)
    if select is None:
        _require_no_rest_of_unified(loose, path)
    files = ShardFiles(path, name, {0: tuple(str(entry) for entry in loose)}, looks=looks)
    return loose_branches(files) or _by_own_rank(files)


# Files that MindSpore's `unified_safetensors`, and ours, write.
_UNIFIED = re.compile(r"part\d+\.safetensors|hyper_param\.safetensors")


def _require_index(name: str, folder: Path, path: str, role: str) -> None:
    """Raise SourceError for files of a format whose checkpoints are folders, if the folder has no index.

    The index is written last, so such files may be only a part of a checkpoint.
    """
    if formats.folder_by_name(name) is not None and name not in formats.names_of_folder(str(folder)):
        index = formats.index_of(name)
        raise SourceError(
            f"the {role} has files of the format {name}, and no index of them"
            if index is not None
            else f"the {role} has no files of the format {name}",
            expected=f"{index} beside them, which is written when all are complete" if index else "all of its files",
            got="files alone" if index is not None else "others",
            where=path,
            remedy="finish what writes them, or restore the index",
        )


def _require_all_parts(loose: Iterable[Path], path: str) -> None:
    """Raise SourceError if names of loose files tell their number (`model-00001-of-00003`), and some are missing."""
    parts = [match for entry in loose if (match := PART.fullmatch(entry.name))]
    lying = [match for name in source_files.names(path) if (match := PART.fullmatch(name))] if parts else []
    present = {(match["stem"], match["rest"], int(match["number"])) for match in lying}
    for stem, total, rest in dict.fromkeys((match["stem"], match["total"], match["rest"]) for match in parts):
        missing = [number for number in range(1, int(total) + 1) if (stem, rest, number) not in present]
        if missing:
            raise SourceError(
                "a checkpoint lacks some of its files",
                expected=f"{int(total)} files, the last of them {stem}-{total}{rest}",
                got=f"number {missing[0]} is not there" + (f", nor are {len(missing) - 1} more" * (len(missing) > 1)),
                where=path,
                remedy="copy or download them again; a file that is given by itself is taken as it is",
            )


def _require_no_rest_of_unified(loose: Iterable[Path], path: str) -> None:
    """Raise SourceError for files of `unified_safetensors` without the map that it writes last."""
    names = [entry.name for entry in loose if _UNIFIED.fullmatch(entry.name)]
    if names:
        raise SourceError(
            "a checkpoint lacks the map of its files",
            expected="param_name_map.json, which unified_safetensors writes when all files are complete",
            got=", ".join(names[:4]),
            where=path,
            remedy="run unified_safetensors again; or give a file by itself, if it is known to be complete",
        )


def _indexed(path: str, folders: Mapping[int, Path], select: str | None, format_name: str | None) -> str | None:
    """Return the format whose index makes the folder `path` a checkpoint; None if there is none, or it is not wanted.

    Raises SourceError where two checkpoints lie there.
    """
    names = [
        name
        for name in formats.names_of_folder(path)
        if format_name in (None, name) and (select is None or fnmatchcase(formats.index_of(name) or "", select))
    ]
    less = {other for name in names for other in formats.info(name).also_marked_as}
    names = [name for name in names if name not in less]
    beside = {rank: folder for rank, folder in folders.items() if names and shards_in(folder, None)}
    if len(names) > 1 or (beside and format_name is None):
        lying = [f"{formats.index_of(name) or 'files'} ({name})" for name in names]
        raise SourceError(
            "two checkpoints lie together",
            expected="rank folders, or a folder with an index",
            got=" and ".join([*([f"{len(beside)} rank folders"] if beside else []), *lying]),
            where=path,
            remedy=f"move one of them to a folder of its own, or say which is meant, such as --from {names[0]}",
        )
    return names[0] if names else None


def shards_from_map(files: Mapping[int, str | os.PathLike[str]]) -> ShardFiles:
    """Return the shard files of an explicit map from rank to path. Raises SourceError if one is missing."""
    if not files:
        raise SourceError(
            "the map of checkpoint files is empty",
            expected="at least one rank",
            got="{}",
            remedy="give the path of each shard by its rank, such as {0: 'rank_0/net.ckpt'}",
        )
    paths = {int(rank): Path(path) for rank, path in files.items()}
    for rank, path in paths.items():
        if rank < 0:
            raise SourceError(
                "the map of checkpoint files has no such rank",
                expected="0 or more",
                got=str(rank),
                remedy="number the ranks from 0 on",
            )
        if not source_files.is_file(path):
            raise SourceError(
                "a shard file is not there",
                expected=f"the shard of rank {rank}",
                got="nothing",
                where=str(path),
                remedy="restore it, or mend its path",
            )
    folder = str(next(iter(paths.values())).parent)
    name = _one_format({rank: [path] for rank, path in paths.items()}, folder)
    require_one_step(paths, folder)
    by_rank = {rank: (str(path),) for rank, path in sorted(paths.items())}
    return ShardFiles(folder, name, by_rank, picked=True, looks=FirstLooks(folder))


def _from_folders(
    path: str, folders: Mapping[int, Path], select: str | None, role: str, format_name: str | None
) -> ShardFiles:
    shards = {rank: shards_in(folder, select, format_name) for rank, folder in sorted(folders.items())}
    candidates = {rank: entries for rank, entries in shards.items() if entries}
    if not candidates:
        wanted = f"files that end in {_endings(format_name)}{_selected(select)} in its rank folders"
        raise _nothing(path, wanted, f"{len(folders)} folders without", role)
    name = _one_format(candidates, path)
    if common_name(entry.name for entries in candidates.values() for entry in entries) is not None:
        return ShardFiles(path, name, {rank: (str(entry),) for rank, (entry,) in candidates.items()})
    if formats.info(name).has_branches:
        grouped = group_in_ranks(candidates, path, is_selected=select is not None)
        if grouped is not None:
            chosen, by_rank = grouped
            return ShardFiles(path, name, by_rank, chosen.notes, warnings=chosen.warnings, by_branch=True)
    chosen = choose(candidates, path, is_selected=select is not None)
    by_rank = {rank: (str(entry),) for rank, entry in chosen.files.items()}
    return ShardFiles(path, name, by_rank, chosen.notes, warnings=chosen.warnings)


def _one_format(candidates: Mapping[int, Iterable[Path]], path: str) -> str:
    names: dict[str, Path] = {}
    for entries in candidates.values():
        for entry in entries:
            name = formats.name_of(entry.name)
            if name is None:
                raise _nothing(str(entry), f"a file that ends in {_endings()}", entry.name, "source")
            names.setdefault(name, entry)
    if len(names) > 1:
        raise SourceError(
            "shards of two formats lie together",
            expected="one format",
            got=" and ".join(f"{name} ({entry.name} in {entry.parent.name})" for name, entry in names.items()),
            where=path,
            remedy=f"say which is meant, such as --from {next(iter(names))}, or choose files with --select",
        )
    return next(iter(names))


def _by_own_rank(files: ShardFiles) -> ShardFiles:
    """Return loose files by the ranks that they state; files that state none make up one full checkpoint."""
    if not formats.info(files.format).describes_itself:
        return files
    ranks: dict[int, str] = {}
    warnings = []
    first: Manifest | None = None
    for path in files.by_rank[0]:
        try:
            manifest = files.locate(path)
        except (ShardError, OSError) as error:
            warnings.append(f"whose shard {path} is cannot be told, so it is left out: {told(error)}")
            continue
        first, identity = first or manifest, manifest.identity
        if identity is None:
            return files._replace(read=first)
        if identity.rank in ranks:
            raise of_one_rank(identity.rank, ranks[identity.rank], path, files.path)
        ranks[identity.rank] = path
    if not ranks:
        return files
    by_rank = {rank: (ranks[rank],) for rank in sorted(ranks)}
    return files._replace(by_rank=by_rank, warnings=tuple(warnings), read=first)


def _endings(format_name: str | None = None) -> str:
    return ", ".join(formats.suffixes() if format_name is None else formats.info(format_name).suffixes)


def _selected(select: str | None) -> str:
    return "" if select is None else f" and match {select!r} (--select)"


def _of_no_format(given: Path, role: str) -> SourceError:
    """Return the error for a file whose name ends as no format's files do."""
    if formats.is_mark(given.name):
        problem = f"a file that lists what a checkpoint holds was given as the {role}"
        return SourceError(problem, expected="its folder", where=str(given), remedy=f"give {given.parent}")
    error = _nothing(str(given), f"a file that ends in {_endings()}", given.name, role)
    kind = kind_at(given)
    if kind is not None:
        error.got, error.remedy = f"{given.name}, {kind.what}", kind.remedy
    return error


def _nothing(path: str, expected: str, got: str, role: str) -> SourceError:
    return SourceError(
        f"no checkpoint found in the {role}",
        expected=expected,
        got=got,
        where=path,
        remedy="give the folder that holds rank_0, rank_1 and so on (links will do), or a checkpoint file",
    )


# As releases of MindFormers and Megatron call the folder of an iteration.
_MAX_BYTES = 64


class Latest(NamedTuple):
    """The folder of the latest moment, and a note that says which one it is. pointer: the file that names it."""

    path: str
    note: str
    pointer: str
    warnings: tuple[str, ...] = ()  # of files that name other folders


def latest_in(path: str, format_name: str | None = None) -> Latest | None:
    """Return the latest of the checkpoints in the folder `path`; None if no file in it names one.

    Args:
        format_name: of this format alone; None: of any.

    Raises SourceError if what the file names is no folder there. Where other programs use its name too, only a folder
    that holds no checkpoint itself is refused for it.
    """
    problem: SourceError | None = None
    found: list[Latest] = []
    for name, forms in formats.pointer_files(format_name).items():
        pointer = Path(path, name)
        if not source_files.is_file(pointer):
            continue
        try:
            latest = _named_by(pointer, path)
        except SourceError as error:
            if not found and not all(form.pointers_are_common for form in forms):
                raise
            problem = problem or error
            continue
        marked = formats.names_of_folder(latest.path)
        if any(form.name in marked or not form.pointers_are_common for form in forms):
            found.append(latest)
    if found:
        others = [other for other in found if other.path != found[0].path]
        warnings = (f"left out: {Path(other.path).name}, the latest as {other.pointer} says" for other in others)
        return found[0]._replace(warnings=tuple(warnings))
    if problem is not None and not _holds_checkpoint(path):
        raise problem
    return None


def _holds_checkpoint(path: str) -> bool:
    return bool(formats.names_of_folder(path) or rank_folders(Path(path)) or shards_in(Path(path), None))


def _named_by(pointer: Path, path: str) -> Latest:
    """Return the folder in `path` that a file there names. Raises SourceError if there is none."""
    try:
        named = source_files.first_bytes(pointer, _MAX_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise _unsound(pointer, _EXPECTED, str(error)) from None
    names = formats.folders_meant(named)
    if not all(map(is_file_name, names)):
        raise _unsound(pointer, _EXPECTED, repr(named))
    folders = [name for name in dict.fromkeys(names) if source_files.is_folder(Path(path, name))]
    if len(folders) != 1:
        raise _unsound(pointer, f"one folder called {' or '.join(names)}", " and ".join(folders) or "no such folder")
    note = f"{folders[0]} of {path} is read, the latest as {pointer.name} says"
    return Latest(str(Path(path, folders[0])), note, pointer.name)


def pointers_in(path: str) -> Iterator[str]:
    """Yield the names of files in the folder `path` that name the latest checkpoint, for whoever reads the folder.

    One that leads nowhere counts too, unless other programs use its name.
    """
    try:
        latest = latest_in(path)
    except SourceError as error:
        yield Path(error.where).name
    else:
        if latest is not None:
            yield latest.pointer


_EXPECTED = "the number of an iteration, or the name of a folder beside it"


def _unsound(pointer: Path, expected: str, got: str) -> SourceError:
    return SourceError(
        "the file that names the latest checkpoint does not lead to one",
        expected=expected,
        got=got,
        where=str(pointer),
        remedy="give the folder of the iteration that is meant, or copy what is missing",
    )
