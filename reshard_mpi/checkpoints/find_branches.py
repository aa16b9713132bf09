"""Find files and folders that are branches of one checkpoint (`branch_folders`, `loose_branches`, `group_in_ranks`).

Files that belong together have the same numbers in their names, of ranks or steps, but for files without any.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from reshard_mpi import formats
from reshard_mpi.checkpoints.file_names import (
    MODEL,
    OPTIMIZER,
    FileChoice,
    branch_of_name,
    branches_in,
    choose,
    numbers_of,
)
from reshard_mpi.checkpoints.shard_files import ShardFiles, of_one_rank
from reshard_mpi.errors import DisagreementError, ShardError, SourceError, told
from reshard_mpi.filesystem import source_files
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.registry import FormatInfo
from reshard_mpi.groups import grouped
from reshard_mpi.text import first_few, shortened

_MAX_NAMED = 4
# Files, or lists of them, by branch.
Branches = Mapping[str, Sequence[Path]]


def branch_folders(path: str, format_name: str | None) -> ShardFiles | None:
    """Return the checkpoint whose branches are folders with an index, as `pytorch_model_fsdp_0` beside `optimizer_0`.

    None if there are no such folders, or no model among them. Raises SourceError if there are several of one branch,
    or an index is missing; DisagreementError if they have different numbers.
    """
    held = branches_in(Path(path, entry.name) for entry in source_files.entries(path) if entry.is_folder)
    for form in formats.all_formats() if held else ():
        if not (form.is_folder and form.has_branches and format_name in (None, form.name)):
            continue
        of_format = {branch: [each for each in own if _has_files(each, form)] for branch, own in held.items() if branch}
        of_format = {branch: own for branch, own in of_format.items() if own}
        if MODEL in of_format and len(of_format) > 1:
            return _joined_folders(path, form, of_format)
    return None


def _has_files(folder: Path, form: FormatInfo) -> bool:
    return any(name in form.marks or name.endswith(form.suffixes) for name in source_files.names(folder, ()))


def _joined_folders(path: str, form: FormatInfo, held: Branches) -> ShardFiles:
    several = next((own for own in held.values() if len(own) > 1), ())
    if several:
        raise SourceError(
            "several models or optimizers lie together",
            expected="one folder of each, such as pytorch_model_fsdp_0 and optimizer_0",
            got=_listed(several),
            where=path,
            remedy="give one of these folders by itself, or move those that belong together to a folder of their own",
        )
    _require_one_moment(held, path)
    folders = tuple(str(own) for (own,) in held.values())
    for folder in folders:
        if form.name not in formats.names_of_folder(folder):
            raise SourceError(
                "a folder of a checkpoint lacks its index",
                expected=f"{formats.index_of(form.name)}, which is written when all its files are complete",
                got="files alone",
                where=folder,
                remedy="finish what writes it, or give the folder beside it by itself",
            )
    module = form.load_folder()
    assert module is not None
    files = tuple(file for folder in folders for file in module.files_of(folder))
    return ShardFiles(path, form.name, {0: files}, (_told(folders),), is_folder=True, by_branch=True, folders=folders)


def loose_branches(files: ShardFiles) -> ShardFiles | None:
    """Return loose files that are branches by the ranks that they state; of one full checkpoint if they state none.

    None if they are no branches. One file of a rank at least must state it. Raises SourceError or DisagreementError
    if they do not belong together.
    """
    held = branches_in(map(Path, files.by_rank[0])) if formats.info(files.format).has_branches else {}
    if not held:
        return None
    files = files._replace(by_rank={0: _paths(held)}, by_branch=True)
    by_rank: dict[int, dict[str, list[Path]]] = {}
    warnings: list[str] = []
    of_no_rank: list[Path] = []
    first: Manifest | None = None
    for group in _by_moment(held):
        manifest, problem = _telling_file(files, group)
        first, identity = first or manifest, None if manifest is None else manifest.identity
        if identity is not None and identity.rank in by_rank:
            raise of_one_rank(identity.rank, _paths(by_rank[identity.rank])[0], _paths(group)[0], files.path)
        if identity is not None:
            by_rank[identity.rank] = group
        elif problem:
            warnings.append(f"whose shard {_paths(group)[0]} is cannot be told, so it is left out: {problem}")
        else:
            of_no_rank += map(Path, _paths(group))
    if not by_rank:
        _require_one_moment(held, files.path)
        return files._replace(notes=(*files.notes, _told(files.by_rank[0])), read=first)
    unclear = [*of_no_rank, *(path for group in by_rank.values() for path in group.get("", ()))]
    if unclear:
        raise SourceError(
            "a file beside the shards of ranks does not say whose it is, or what it holds",
            expected="the numbers of its rank, and one of the words model, optim, extra, scheduler, scaler in its name",
            got=_listed(unclear),
            where=files.path,
            remedy="move it elsewhere, or choose the others with --select",
        )
    example = _examples(by_rank.values())
    for rank, group in by_rank.items():
        _require_all(group, example, rank, files.path)
        several = next((own for own in group.values() if len(own) > 1), ())
        if several:
            raise SourceError(
                "several files of one rank",
                expected="one file of each branch",
                got=f"{_listed(several)} of rank {rank}",
                where=files.path,
                remedy="choose with --select, and convert the others into another folder",
            )
    paths = {rank: _paths(by_rank[rank]) for rank in sorted(by_rank)}
    note = _told(next(iter(paths.values())), of_ranks=True)
    return files._replace(by_rank=paths, notes=(*files.notes, note), warnings=(*files.warnings, *warnings), read=first)


def _by_moment(held: Branches) -> list[dict[str, list[Path]]]:
    """Group files by the numbers in their names; in each group, by branch."""
    by_numbers = grouped((numbers_of(path), (branch, path)) for branch, paths in held.items() for path in paths)
    return [grouped(own) for own in by_numbers.values()]


def _telling_file(files: ShardFiles, group: Branches) -> tuple[Manifest | None, str]:
    """Return the first file that states its rank, or else the first that can be read; if none can, why not."""
    first, problems = None, []
    for path in _paths(group):
        try:
            manifest = files.locate(path)
        except (ShardError, OSError) as error:
            problems.append(told(error))
            continue
        if manifest.identity is not None:
            return manifest, ""
        first = first or manifest
    return first, "" if first is not None else problems[0]


def group_in_ranks(
    candidates: Mapping[int, list[Path]], path: str, *, is_selected: bool
) -> tuple[FileChoice, Mapping[int, tuple[str, ...]]] | None:
    """Choose the files of one moment in rank folders whose files are branches: a choice, and all files by rank.

    None if no rank has files of two branches. Raises SourceError if a rank lacks what others have, or has files that
    are no branch; DisagreementError if those of a rank are of different moments; both as `choose` does.
    """
    example = _examples(branches_in(paths) for paths in candidates.values())
    if not example:
        return None
    chosen: dict[int, list[Path]] = {}
    group_of: dict[Path, dict[str, list[Path]]] = {}
    for rank, paths in candidates.items():
        by_branch = grouped((branch_of_name(each.name), each) for each in paths)
        held = {branch: by_branch.get(branch, []) for branch in example}
        _require_all(held, example, rank, path)
        if all(len(own) == 1 for own in held.values()):
            _require_one_moment(held, path)
            groups = [held]
        else:
            groups = [group for group in _by_moment(held) if group.keys() == example.keys()]
        if not groups:
            raise _other_moments([own[0] for own in held.values()], path)
        firsts = {next(iter(group.values()))[0]: group for group in groups}
        group_of |= firsts
        # What is beside a branch is to be chosen among, which refuses other words.
        several = [each for group in groups for own in group.values() if len(own) > 1 for each in own]
        chosen[rank] = list(dict.fromkeys([*firsts, *several, *by_branch.get("", [])]))
    choice = choose(chosen, path, is_selected=is_selected)
    groups_by_rank = {rank: group_of[each] for rank, each in choice.files.items()}
    for branch in [*example][1:]:  # each by itself too: of a model there may be no numbers
        choose({rank: group[branch] for rank, group in groups_by_rank.items()}, path, is_selected=is_selected)
    by_rank = {rank: _paths(group) for rank, group in groups_by_rank.items()}
    notes = (*choice.notes, _told(next(iter(by_rank.values())), of_ranks=len(by_rank) > 1))
    return choice._replace(notes=notes), by_rank


def warned_of_optimizer_alone(files: ShardFiles) -> ShardFiles:
    """Return files with a warning if their names say that they are an optimizer's, and none is a model's."""
    if not formats.info(files.format).has_branches or files.is_folder or not files.by_rank:
        return files
    paths = next(iter(files.by_rank.values()))
    branches = {branch_of_name(Path(path).name) for path in paths}
    if OPTIMIZER not in branches or MODEL in branches or "" in branches:
        return files
    names = _listed([Path(path) for path in paths])
    warning = f"{names} in {files.path}: an optimizer's state, as the name says, and no file of the model beside it"
    return files._replace(warnings=(*files.warnings, warning))


def _paths(group: Branches) -> tuple[str, ...]:
    return tuple(str(path) for own in group.values() for path in own)


def _examples(groups: Iterable[Branches]) -> dict[str, Path]:
    """Return a file of each branch that any of the ranks has, in the order of branches."""
    example: dict[str, Path] = {}
    for branch, own in (each for group in groups for each in group.items()):
        example.setdefault(branch, own[0])
    return {branch: own[0] for branch, own in branches_in(example.values()).items() if branch}


def _require_all(held: Branches, example: Mapping[str, Path], rank: int, where: str) -> None:
    """Raise SourceError if a rank lacks a branch that other ranks have."""
    if any(not held.get(branch) for branch in example):
        raise SourceError(
            "a rank does not have all files that others have",
            expected=f"{_listed([*example.values()])}, or the same but for the rank",
            got=f"{_listed([path for own in held.values() for path in own]) or 'none of them'} of rank {rank}",
            where=where,
            remedy="restore the one that is missing, or choose what all ranks have with --select",
        )


def _require_one_moment(held: Branches, where: str) -> None:
    """Raise DisagreementError if files of two branches have other numbers in their names.

    One without numbers says nothing, nor do several files of a branch.
    """
    numbered = [own[0] for branch, own in held.items() if branch and len(own) == 1 and numbers_of(own[0])]
    if len({numbers_of(path) for path in numbered}) > 1:
        raise _other_moments(numbered, where)


def _other_moments(paths: Sequence[Path], where: str) -> DisagreementError:
    return DisagreementError(
        "the files of a checkpoint are of different moments, or of different ranks",
        expected="the same numbers in the names of its files",
        got=_listed(paths),
        where=where,
        remedy="restore the missing files, or choose one of these with --select",
    )


def _listed(paths: Sequence[Path]) -> str:
    return first_few([path.name for path in paths], _MAX_NAMED)


def _told(paths: Sequence[str], *, of_ranks: bool = False) -> str:
    """Return in words which files become which branches. of_ranks: they are one rank's, and all ranks have such."""
    names = [Path(path).name for path in paths]
    shown = [f"{name} is {branch_of_name(name) or 'at the top'}" for name in names]
    return f"joined: {shortened(shown, 2 * _MAX_NAMED)}" + ", and so on every rank" * of_ranks
