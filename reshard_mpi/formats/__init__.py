"""Find formats by name, recognize their files and folders, and name the files of targets (`by_name`, `target_file`).

A format's module, and with it a library, is imported only when it is needed. What is imported here `as` itself is the
registry's, and may be taken from here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

from reshard_mpi.errors import UsageError
from reshard_mpi.formats.registry import FormatInfo as FormatInfo
from reshard_mpi.formats.registry import all_formats as all_formats
from reshard_mpi.formats.registry import info as info
from reshard_mpi.formats.registry import left_out as left_out
from reshard_mpi.formats.registry import names as names
from reshard_mpi.formats.registry import register as register
from reshard_mpi.formats.registry import targets as targets
from reshard_mpi.formats.registry import unregister as unregister

if TYPE_CHECKING:
    from reshard_mpi.formats.protocol import FolderFormat, Format, PackingFormat

_BEGINNING_BYTES = 4096
# What frameworks call the folder of an iteration.
_FOLDERS = ("iteration_{:08d}", "iter_{:08d}", "iter_{:07d}")
_ITERATION = re.compile(r"\d{1,12}", re.ASCII)
# The format that the functions with MindSpore's names write by default.
DEFAULT = "ckpt"
# What names of target files begin with, unless the user says otherwise or their format has names of its own.
DEFAULT_PREFIX = "checkpoint_"


def target_file(name: str, target_rank: int, targets: int, prefix: str) -> str:
    """Return the path of a target, relative to the target folder, in the format called `name`."""
    folder_format = folder_by_name(name)
    if folder_format is not None:
        return folder_format.file_name(target_rank, targets, prefix)
    return f"rank_{target_rank}/{prefix}{target_rank}{info(name).suffixes[0]}"


def by_name(name: str) -> Format:
    """Return the module of the format called `name`. Raises UsageError if there is none."""
    return info(name).load()


def folder_by_name(name: str) -> FolderFormat | None:
    """Return the format called `name` if its checkpoints are folders, else None. Raises UsageError if unknown."""
    return info(name).load_folder()


def packing_by_name(name: str) -> PackingFormat | None:
    """Return the format called `name` if its files have parts of many tensors in a row, else None."""
    form = info(name)
    return cast("PackingFormat", form.load()) if form.packs else None


def require_target(name: str) -> str:
    """Return the name of a format that can be written. Raises UsageError if it is not one."""
    if name not in targets():
        problem = "checkpoints of this form are only read" if name in names() else "unknown checkpoint format"
        raise left_out().get(name) or UsageError(problem, expected=" or ".join(targets()), got=repr(name))
    return name


def suffixes() -> tuple[str, ...]:
    """Return the file name endings of all formats."""
    return tuple(dict.fromkeys(suffix for form in all_formats() for suffix in form.suffixes))


def name_of(path: str) -> str | None:
    """Return the name of the format whose file name endings `path` has; None if there is none."""
    return next((form.name for form in all_formats() if path.endswith(form.suffixes)), None)


def index_of(name: str) -> str | None:
    """Return the name of the file that marks a folder as a checkpoint of the format; None if it has no such file."""
    return next(iter(info(name).marks), None)


def is_mark(name: str) -> bool:
    """Tell whether a file of this name lists what lies beside it, and is no shard itself."""
    return name_of(name) is None and any(name in form.marks for form in all_formats())


def pointer_files(format_name: str | None = None) -> dict[str, tuple[FormatInfo, ...]]:
    """Return, by name, files that name the latest of the checkpoints beside them, with their formats.

    Args:
        format_name: of this format alone; None: of all.
    """
    forms = tuple(form for form in all_formats() if format_name in (None, form.name))
    names = dict.fromkeys(name for form in forms for name in form.pointer_files)
    return {name: tuple(form for form in forms if name in form.pointer_files) for name in names}


def folders_meant(named: str) -> list[str]:
    """Return the names that a folder may have which a file names so: by its own name, or the number of an iteration."""
    return [name.format(int(named)) for name in _FOLDERS] if _ITERATION.fullmatch(named) else [named]


def names_of_folder(path: str) -> tuple[str, ...]:
    """Return the names of the formats whose files mark the folder `path`."""
    return tuple(dict.fromkeys(name for name, _ in _marks(path)))


def marks_in(path: str) -> tuple[str, ...]:
    """Return the names of the files that mark the folder `path` as a checkpoint of any format."""
    return tuple(dict.fromkeys(mark for _, mark in _marks(path)))


def _marks(folder: str) -> Iterator[tuple[str, str]]:
    """Yield the names of a format and of a file that marks a folder as a checkpoint of this format."""
    from reshard_mpi.filesystem import source_files  # not before a folder is looked at

    forms = tuple(all_formats())
    # Files of a folder may be opened where it cannot be listed.
    lying = source_files.names(folder, otherwise=[mark for form in forms for mark in form.marks])
    for form in forms:
        if form.parts is not None:
            yield from ((form.name, name) for name in filter(form.parts.fullmatch, lying))
        for mark in form.marks:
            path = Path(folder, mark)
            is_there = mark in lying and source_files.is_file(path)
            if is_there and form.index_says in source_files.first_bytes(path, _BEGINNING_BYTES, b""):
                yield form.name, mark


def title(name: str) -> str:
    """Return the words for a checkpoint of the format called `name`."""
    return info(name).title or name
