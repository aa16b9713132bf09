"""Hold the files of a checkpoint by rank (`ShardFiles`), and name those beside them that are left out.

A folder that is read as one checkpoint may hold more of the same save: settings, the state of schedulers, tensors in
another form. So every file in it is read, or named, or one of those that are known to be no part of a checkpoint.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from reshard_mpi import formats
from reshard_mpi.checkpoints.file_names import LEFT_OUT, branch_of_name
from reshard_mpi.errors import SourceError
from reshard_mpi.filesystem import source_files
from reshard_mpi.filesystem.paths import absolute_path, rank_of_folder, real_path
from reshard_mpi.filesystem.source_files import FileVersion, FolderEntry
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.journal.provenance import FirstLooks, SourceStates
from reshard_mpi.journal.record_files import STATE
from reshard_mpi.planning.source_flaws import ModifiedShard
from reshard_mpi.sharding.strategy import Strategy
from reshard_mpi.text import counted, natural_key, ranges, shortened

# A strategy file kept beside the shards may end in .ckpt too; it begins with the number field `current_stage`, a
# checkpoint with a nested message (facts of the two protobuf schemas).
_STRATEGY_FIRST_BYTE = b"\x08"


class ShardFiles(NamedTuple):
    """The files of a checkpoint by rank, all of one format. The files of a rank hold its tensors together."""

    path: str  # what the user named
    format: str
    by_rank: Mapping[int, tuple[str, ...]]
    notes: tuple[str, ...] = ()  # what was chosen if there was a choice
    picked: bool = False  # whether the caller named the files one by one, so that ranks without a file are not missing
    # on files whose rank is unknown, or whose names say that they may not belong together
    warnings: tuple[str, ...] = ()
    # whether an index lists the contents of the files, which make up one full checkpoint; their rank is then 0
    is_folder: bool = False
    by_branch: bool = False  # whether each file of a rank, or each folder, is a branch, which its name says
    # the folders (with an index, or with files that tell by their names what belongs together) that make up the
    # checkpoint, if it is not `path` itself
    folders: tuple[str, ...] = ()
    src_files: int | None = None  # how many files were saved, if the caller says so
    latest: str = ""  # the name of the folder, if a file beside it names it as the latest of several
    # the structure of the first file, if it was read to learn whose it is, so that it is parsed once
    read: Manifest | None = None
    # in words, which files lie beside these and may be of the same checkpoint, but are not read; empty if none
    left_out: str = ""
    modified: tuple[ModifiedShard, ...] = ()  # may be copies of others, as records tell
    # whether the run that wrote the files has recorded how they are cut, so that they say it as much as files that
    # describe themselves
    has_recorded_strategy: bool = False
    strategy: Strategy | None = None  # by which slices in the files of a folder join, where these need one
    config: str | None = None  # the file that says how the checkpoint is quantized, if the caller names one
    looks: FirstLooks | None = None  # of the files, each before anything was read of it; None: nobody asks for them

    def locate(self, path: str, like: Manifest | None = None) -> Manifest:
        """Read the structure of one of the files, unless it has been read. Raises as `Format.locate` does."""
        if self.read is not None and self.read.path == path:
            return self.read
        self.look(path)
        return formats.by_name(self.format).locate(path, like)

    def look(self, *paths: str) -> None:
        """Look at files that are going to be read, so that it is noticed if another one takes their place."""
        if self.looks is not None:
            self.looks.look(paths)

    def sources(self, ranks: Iterable[int]) -> SourceStates:
        """Return the files of these ranks, each as it was when it was first looked at.

        Of a folder with an index those that are there: for one that is missing others may hold the same.
        """
        assert self.looks is not None
        return self.looks.sources(self._paths(ranks), (path for paths in self.by_rank.values() for path in paths))

    def versions(self, ranks: Iterable[int]) -> dict[str, FileVersion]:
        """Return the versions of the same files by path."""
        assert self.looks is not None
        return self.looks.versions(self._paths(ranks))

    def _paths(self, ranks: Iterable[int]) -> list[str]:
        paths = (path for rank in ranks for path in self.by_rank[rank])
        return [path for path in paths if not self.is_folder or source_files.exists(path)]

    @property
    def shards(self) -> tuple[str, ...]:
        """The paths of the files that hold tensors, without an index."""
        paths = tuple(path for paths in self.by_rank.values() for path in paths)
        if not self.is_folder:
            return paths
        of_index = formats.info(self.format).before_index
        return tuple(path for path in paths if formats.name_of(path) is not None and Path(path).name not in of_index)

    @property
    def by_target_rank(self) -> Mapping[int, Sequence[str]]:
        """Paths by target rank, as far as their order tells: a folder with an index has one file for each."""
        return (self.one_by_one() if self.is_folder else self).by_rank

    def one_by_one(self) -> ShardFiles:
        """Return the files of a folder with an index, one for each target rank."""
        ordered = sorted(self.shards, key=lambda path: natural_key(Path(path).name))
        return self._replace(by_rank={rank: (path,) for rank, path in enumerate(ordered)}, is_folder=False)

    def folder_by_folder(self) -> tuple[ShardFiles, ...]:
        """Return the files of each folder with an index as a checkpoint by itself, if several make up this one."""
        if not self.folders:
            return (self,)
        paths = [path for of_rank in self.by_rank.values() for path in of_rank]
        own = {folder: tuple(path for path in paths if Path(folder) in Path(path).parents) for folder in self.folders}
        alone = self._replace(folders=(), by_branch=False, is_folder=True)
        return tuple(alone._replace(path=folder, by_rank={0: own[folder]}) for folder in self.folders)


def no_such_rank(files: ShardFiles, rank: int) -> SourceError:
    """Return the error for a rank without a shard in the checkpoint."""
    return SourceError(
        "the checkpoint has no shard of this rank",
        expected=f"one of its ranks, {ranges(sorted(files.by_rank))}",
        got=f"rank {rank}",
        where=files.path,
        remedy="choose among these ranks, or restore the shard",
    )


def of_one_rank(rank: int, first: str, second: str, where: str) -> SourceError:
    """Return the error for two shards that state the same rank. first, second: their paths; where: of all."""
    return SourceError(
        "two shards say they are the same rank",
        expected="one shard a rank",
        got=f"rank {rank} in {first} and {second}",
        where=where,
        remedy="take away the one that is of another checkpoint, or choose by names (--select)",
    )


def common_name(names: Iterable[str]) -> str | None:
    """Return the name that all files have; None if they have several, or one with a number, which may mean anything.

    Without a number it says nothing of ranks, steps or parts.
    """
    different = list(dict.fromkeys(names))
    return different[0] if len(different) == 1 and not any(map(str.isdigit, different[0])) else None


class SingleShard(NamedTuple):
    """A single rank that was given as a checkpoint. folder: the rank folder that holds its files."""

    rank: int
    folder: Path

    @classmethod
    def candidates(cls, files: ShardFiles) -> list[SingleShard]:
        """Return the one rank of `files`, first by the folder as it was named, then by the one that links lead to.

        Empty if `files` has several ranks; a folder that is no rank folder is left out.
        """
        if len(files.by_rank) != 1:
            return []
        ((path, *_),) = files.by_rank.values()
        folders = [way.parent for way in both_ways(Path(path))]
        return [cls(rank, folder) for folder in folders if (rank := rank_of_folder(folder.name)) is not None]

    @classmethod
    def of(cls, files: ShardFiles) -> SingleShard | None:
        """Return the candidate with other ranks beside it, or else the first one; None if there is no candidate."""
        candidates = cls.candidates(files)
        return next((lone for lone in candidates if lone.siblings()), candidates[0] if candidates else None)

    @property
    def checkpoint(self) -> Path:
        """The folder that holds the rank folders."""
        return self.folder.parent

    def siblings(self) -> dict[int, list[Path]]:
        """Return the shards in the rank folders beside this one, by rank."""
        return {rank: shards for rank, folder in self._folders_beside().items() if (shards := _shards(folder))}

    def empty_siblings(self) -> dict[int, Path]:
        """Return the rank folders beside this one that have no shards, by rank."""
        return {rank: folder for rank, folder in self._folders_beside().items() if not _shards(folder)}

    def _folders_beside(self) -> dict[int, Path]:
        try:
            folders = rank_folders(self.checkpoint)
        except (OSError, SourceError):
            return {}
        return {rank: folder for rank, folder in folders.items() if rank != self.rank}


def in_its_rank(files: ShardFiles) -> ShardFiles:
    """Return `files`; a file or rank folder given alone gets the rank of its folder instead of 0.

    A folder that is one checkpoint has a rank 0 alone, whatever it is called.
    """
    candidates = SingleShard.candidates(files)
    if not candidates or files.picked or files.is_folder:
        return files
    (paths,) = files.by_rank.values()
    if Path(files.path) not in (Path(paths[0]), Path(paths[0]).parent):
        return files  # found in the rank folders of a checkpoint, so its rank is known
    return files._replace(by_rank={candidates[0].rank: paths})


def _shards(folder: Path) -> list[Path]:
    try:
        return shards_in(folder, None)
    except OSError:  # it is a file, or not to be looked into
        return []


def name_left_out(files: ShardFiles, folder: str, format_name: str | None) -> ShardFiles:
    """Return files with a warning that names what lies beside them in `folder` and is not read.

    Args:
        format_name: the one that the user has chosen, so that files of others are left out by his will.
    """
    suffixes = formats.info(files.format).suffixes
    read: defaultdict[Path, set[str]] = defaultdict(set)  # by folder, relative to `folder`: what is read in it
    for path in (path for paths in files.by_rank.values() for path in paths):
        inside = Path(os.path.relpath(path, folder))
        for place in (inside, *inside.parents[:-1]):
            read[place.parent].add(place.name)
    are_loose = not files.is_folder and read.keys() == {Path()}

    def left_out_of(place: Path) -> str:
        # It is said elsewhere which of several files of a rank, or of loose files, are taken.
        are_others_told = are_loose or (not files.is_folder and place != Path())

        def is_taken(name: str) -> bool:
            entry = Path(folder, place, name)
            if name.endswith(suffixes):
                is_told = are_others_told and not (files.by_branch and branch_of_name(name) == LEFT_OUT)
                return is_told or is_strategy(entry)
            if rank_of_folder(name) is not None and _shards(entry):
                return True
            is_of_others = format_name is not None and formats.name_of(name) is not None
            return is_of_others or is_strategy(entry)

        return left_out_of_folder(str(Path(folder, place)), read[place], is_taken)

    of_folder = left_out_of(Path())
    below = ((place, left_out_of(place)) for place in tuple(read) if place != Path())
    in_folders = [f"in {place} {names}" for place, names in below if names]
    more = f", and files in {counted(len(in_folders) - 1, 'more folder')}" if len(in_folders) > 1 else ""
    left_out = "; ".join(filter(None, (of_folder, *in_folders[:1]))) + more
    return _with_left_out(files, left_out, f"{folder} beside what is read")


def name_left_out_beside(files: ShardFiles, folder: str) -> ShardFiles:
    """Return files with a warning that names files and folders of ranks beside the latest checkpoint in `folder`."""
    left_out = left_out_of_folder(
        folder, (), lambda name: rank_of_folder(name) is None and source_files.is_folder(Path(folder, name))
    )
    return _with_left_out(files, left_out, f"{folder} beside the checkpoint that is read")


def _with_left_out(files: ShardFiles, left_out: str, place: str) -> ShardFiles:
    if not left_out:
        return files
    warnings = (*files.warnings, f"left out, though it lies in {place}: {left_out}")
    return files._replace(left_out="; ".join(filter(None, (files.left_out, left_out))), warnings=warnings)


def strangers(path: Path) -> list[Path]:
    """Return other shards in the folder of the shard `path`."""
    if not source_files.is_folder(path.parent):
        return []
    return [entry for entry in shards_in(path.parent, None) if entry.name != path.name]


def both_ways(path: Path) -> tuple[Path, Path]:
    """Return the absolute path as it was named, and the one that links lead to: a folder may be known by either."""
    return absolute_path(path), real_path(path)


def rank_folders(folder: Path) -> dict[int, Path]:
    """Return the `rank_*` folders in `folder` by rank. Raises SourceError if two are of one rank."""
    folders: dict[int, Path] = {}
    for entry in source_files.entries(folder):
        rank = rank_of_folder(entry.name)
        if rank is not None and entry.is_folder:
            other = folders.setdefault(rank, folder / entry.name)
            if other.name != entry.name:
                raise SourceError(
                    "two folders are of one rank",
                    expected="one folder a rank",
                    got=f"{other.name} and {entry.name}",
                    where=str(folder),
                    remedy="remove the one that does not belong to the checkpoint",
                )
    return folders


def shards_in(folder: Path, select: str | None, format_name: str | None = None) -> list[Path]:
    """Return the shards directly in `folder`, in natural order of their names.

    Args:
        select: a glob that their names must match.
        format_name: only those of this format.
    """
    shards = [
        path
        for entry in source_files.entries(folder)
        if (name := formats.name_of(entry.name))
        and format_name in (None, name)
        and not entry.name.startswith(".")
        and (select is None or fnmatchcase(entry.name, select))
        and entry.is_file
        and not is_strategy(path := folder / entry.name)
    ]
    return sorted(shards, key=lambda path: natural_key(path.name))


def is_strategy(entry: Path) -> bool:
    # One that cannot be read is missed as a shard, unless others hold the same.
    return entry.suffix == ".ckpt" and source_files.first_bytes(entry, 1, b"") == _STRATEGY_FIRST_BYTE


# What people and programs put beside checkpoints: descriptions, tokenizers, settings of programs, logs, locks.
_NO_STATE_SUFFIXES = {
    *(".json", ".jsonl", ".txt", ".md", ".rst", ".html", ".pdf", ".csv", ".tsv", ".ipynb"),
    *(".py", ".sh", ".sbatch", ".yml", ".yaml", ".toml", ".cfg", ".conf", ".ini", ".prototxt"),
    *(".jinja", ".model", ".tiktoken", ".vocab", ".bpe", ".spm"),
    *(".log", ".out", ".err", ".lock", ".pid", ".sha256", ".md5"),
    *(".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".mp4"),
    *(".meta", ".mindir", ".ir", ".dot", ".pb"),
}
_NO_STATE = {
    *("readme", "license", "licence", "notice", "copying", "authors", "makefile", "dockerfile"),
    *("latest", "latest_universal", "done", "success", "_success", "training_args.bin"),
}
_EVENTS = "events.out.tfevents."
# The same weights once more, as Hugging Face's repositories have them for other programs.
_SAME_WEIGHTS = (
    r"(?:pytorch_model|tf_model|flax_model|rust_model)(?:-\d+-of-\d+)?\.(?:bin|h5|msgpack|ot)|.*\.(?:onnx|gguf|tflite)"
)
# Folders that are other saves of the same run, or none at all.
_OTHER_SAVES = r"checkpoint-\d+|__pycache__|wandb|mlruns|tensorboard|runs|logs?"
_SAID = {
    "common.pt": "Megatron's settings: arguments, iteration, scheduler, the optimizer's groups",
    "train_state.pt": "Megatron Bridge's step and consumed samples",
}
# Entries looked at in a folder within a folder, and files named.
_MAX_LOOKED_AT, _MAX_NAMED = 256, 8


def left_out_of_folder(folder: str, read: Collection[str], is_taken: Callable[[str], bool] = lambda _: False) -> str:
    """Return in words which files and folders in a folder are not read with the checkpoint in it; empty if none.

    Args:
        read: the names in the folder of which something is read.
        is_taken: tells of further names that they were chosen among, so that nothing is to be said of them.
    """
    try:
        entries = source_files.entries(folder)
    except OSError:
        return ""
    names = [
        entry.name + "/" * entry.is_folder + (f" ({_SAID[entry.name]})" if entry.name in _SAID else "")
        for entry in entries
        if entry.name not in read and not is_taken(entry.name) and _may_hold_state(folder, entry)
    ]
    return shortened(names, _MAX_NAMED)


def _may_hold_state(folder: str, entry: FolderEntry) -> bool:
    """Tell whether a file or folder may belong to a checkpoint, for all that its name says."""
    if entry.name.startswith("."):
        return False
    try:
        if entry.is_folder:
            return not re.fullmatch(_OTHER_SAVES, entry.name) and _folder_may_hold_state(str(Path(folder, entry.name)))
        return entry.is_file and _is_state(entry.name) and entry.size_bytes > 0
    except OSError:
        return True


def _is_state(name: str) -> bool:
    lower = name.lower()
    return not (
        lower.startswith((".", _EVENTS))
        or lower in _NO_STATE
        or lower[lower.rfind(".") :] in _NO_STATE_SUFFIXES
        or re.fullmatch(_SAME_WEIGHTS, name)
    )


def _folder_may_hold_state(folder: str) -> bool:
    """Tell whether any file in a folder may hold state, as far as it is looked into.

    One with the records of a run holds the targets of that.
    """
    if source_files.exists(Path(folder, STATE)):
        return False
    looked_at = 0
    for folders, files in source_files.walk(folder):
        looked_at += len(folders) + len(files)
        if any(map(_is_state, files)) or looked_at > _MAX_LOOKED_AT:
            return True
        folders[:] = [name for name in folders if not name.startswith(".")]
    return False
