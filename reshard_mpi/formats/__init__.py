"""The formats by name. A format's module, and with it a library, is imported only when it is needed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from reshard_mpi.errors import UsageError

if TYPE_CHECKING:
    from reshard_mpi.formats.protocol import FolderFormat, Format


class _Form(NamedTuple):
    """Where a format's module is, and how its files and folders are recognized without importing that."""

    module: str
    suffixes: tuple[str, ...]  # file name endings; a file whose ending several formats have is a shard of the first
    # names of files that mark a folder as one checkpoint, the index first; if `index_says`, only an index that has
    # these bytes near its beginning, since others use its name too
    marks: tuple[str, ...] = ()
    index_says: bytes = b""
    # the pattern of the names of a checkpoint's files, which mark their folder as well
    parts: re.Pattern[str] | None = None
    is_target: bool = True  # whether checkpoints of the format can be written


_FORMS = {
    "ckpt": _Form("reshard_mpi.formats.ckpt", (".ckpt",)),
    "hdf5": _Form("reshard_mpi.formats.hdf5", (".h5", ".hdf5")),
    "safetensors": _Form("reshard_mpi.formats.safetensors", (".safetensors",)),
    "hf": _Form(
        "reshard_mpi.formats.safetensors.huggingface",
        (".safetensors",),
        ("model.safetensors.index.json", "model.safetensors", "param_name_map.json"),
    ),
    "dcp": _Form("reshard_mpi.formats.dcp", (".distcp",), (".metadata",)),
    "torch": _Form("reshard_mpi.formats.torch", (".pt", ".pth", ".bin")),
    "mindformers": _Form(
        "reshard_mpi.formats.safetensors.mindformers",
        (".safetensors",),
        ("metadata.json",),
        index_says=b'"state_dict_metadata"',
        parts=re.compile(r".*-(model|opt)-\d{7}-\d{7}\.safetensors"),
        is_target=False,
    ),
    "dcp-safetensors": _Form(
        "reshard_mpi.formats.safetensors.torch_dcp",
        (".safetensors",),
        parts=re.compile(r"shard-\d{5,}-model-\d{5,}-of-\d{5,}\.safetensors"),
        is_target=False,
    ),
}
NAMES = tuple(_FORMS)
# The formats that can be written.
TARGETS = tuple(name for name, form in _FORMS.items() if form.is_target)
_BEGINNING_BYTES = 4096
# The format that the functions with MindSpore's names write by default.
DEFAULT = "ckpt"
# What names of target files begin with, unless the user says otherwise or their format has names of its own.
DEFAULT_PREFIX = "checkpoint_"
SUFFIXES = tuple(dict.fromkeys(suffix for form in _FORMS.values() for suffix in form.suffixes))


def by_name(name: str) -> Format:
    """Return the format called `name`. Raises UsageError if there is none.

    One that is no target (`TARGETS`) has none of the functions that write.
    """
    if name not in _FORMS:
        raise UsageError("unknown checkpoint format", expected=" or ".join(NAMES), got=repr(name))
    return cast("Format", import_module(_FORMS[name].module))


def require_target(name: str) -> str:
    """Return the name of a format that can be written. Raises UsageError if it is not one."""
    if name not in TARGETS:
        problem = "checkpoints of this form are only read" if name in NAMES else "unknown checkpoint format"
        raise UsageError(problem, expected=" or ".join(TARGETS), got=repr(name))
    return name


def name_of(path: str) -> str | None:
    """Return the name of the format whose file name endings `path` has; None if there is none."""
    return next((name for name, form in _FORMS.items() if path.endswith(form.suffixes)), None)


def index_of(name: str) -> str | None:
    """Return the name of the file that marks a folder as a checkpoint of the format; None if it has no such file."""
    return next(iter(_FORMS[name].marks), None)


def is_mark(name: str) -> bool:
    """Tell whether a file of this name lists what lies beside it, and is no shard itself."""
    return name_of(name) is None and any(name in form.marks for form in _FORMS.values())


def folder_by_name(name: str) -> FolderFormat | None:
    """Return the format called `name` if its checkpoints are folders, else None. Raises UsageError if unknown."""
    module = by_name(name)
    return cast("FolderFormat", module) if module.TRAITS.is_folder else None


def names_of_folder(path: str) -> tuple[str, ...]:
    """Return the names of the formats whose files mark the folder `path`."""
    names = _names_in(path)
    return tuple(name for name, form in _FORMS.items() if any(_marks(path, names, form)))


def marks_in(path: str) -> tuple[str, ...]:
    """Return the names of the files that mark the folder `path` as a checkpoint of any format."""
    names = _names_in(path)
    return tuple(dict.fromkeys(mark for form in _FORMS.values() for mark in _marks(path, names, form)))


def _names_in(folder: str) -> Sequence[str]:
    """Return the names in a folder; if it cannot be listed, the marking names that exist."""
    try:
        return os.listdir(folder)  # noqa: PTH208 - of names alone
    except OSError:  # a folder whose files may be opened, and not listed
        return [mark for form in _FORMS.values() for mark in form.marks]


def _marks(folder: str, names: Sequence[str], form: _Form) -> Iterator[str]:
    """Yield the names that mark a folder as a checkpoint of a form. names: of what lies in it."""
    if form.parts is not None:
        yield from filter(form.parts.fullmatch, names)
    for mark in form.marks:
        path = Path(folder, mark)
        if mark in names and path.is_file() and _begins_with(path, form.index_says):
            yield mark


def _begins_with(path: Path, content: bytes) -> bool:
    """Tell whether a file can be read, and has these bytes near its beginning; any file has no bytes."""
    if not content:
        return True
    try:
        with path.open("rb") as stream:
            return content in stream.read(_BEGINNING_BYTES)
    except OSError:
        return False


def title(name: str) -> str:
    """Return the words for a checkpoint of the format called `name`."""
    return by_name(name).TRAITS.title or name
