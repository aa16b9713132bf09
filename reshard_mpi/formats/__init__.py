"""The formats by name. A format's module, and with it a library, is imported only when it is needed."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

from reshard_mpi.errors import UsageError

if TYPE_CHECKING:
    from reshard_mpi.formats.protocol import FolderFormat, Format

# name -> (module, file name endings, names of files that mark a folder as one checkpoint, the index first). These are
# here so that files and folders are recognized without importing a format's module. A file whose ending several formats
# have is a shard of the first.
_MODULES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "ckpt": ("reshard_mpi.formats.ckpt", (".ckpt",), ()),
    "hdf5": ("reshard_mpi.formats.hdf5", (".h5", ".hdf5"), ()),
    "safetensors": ("reshard_mpi.formats.safetensors", (".safetensors",), ()),
    "hf": (
        "reshard_mpi.formats.safetensors.huggingface",
        (".safetensors",),
        ("model.safetensors.index.json", "model.safetensors", "param_name_map.json"),
    ),
    "dcp": ("reshard_mpi.formats.dcp", (".distcp",), (".metadata",)),
    "torch": ("reshard_mpi.formats.torch", (".pt", ".pth", ".bin"), ()),
}
NAMES = tuple(_MODULES)
# The format that the functions with MindSpore's names write by default.
DEFAULT = "ckpt"
# What names of target files begin with, unless the user says otherwise or their format has names of its own.
DEFAULT_PREFIX = "checkpoint_"
SUFFIXES = tuple(dict.fromkeys(suffix for _, suffixes, _ in _MODULES.values() for suffix in suffixes))


def by_name(name: str) -> Format:
    """Return the format called `name`. Raises UsageError if there is none."""
    if name not in _MODULES:
        raise UsageError("unknown checkpoint format", expected=" or ".join(NAMES), got=repr(name))
    return cast("Format", import_module(_MODULES[name][0]))


def name_of(path: str) -> str | None:
    """Return the name of the format whose file name endings `path` has; None if there is none."""
    return next((name for name, (_, suffixes, _) in _MODULES.items() if path.endswith(suffixes)), None)


def index_of(name: str) -> str | None:
    """Return the name of the file that marks a folder as a checkpoint of the format; None if it has no such file."""
    return next(iter(_MODULES[name][2]), None)


def folder_by_name(name: str) -> FolderFormat | None:
    """Return the format called `name` if its checkpoints are folders, else None. Raises UsageError if unknown."""
    module = by_name(name)
    return cast("FolderFormat", module) if module.TRAITS.is_folder else None


def names_of_folder(path: str) -> tuple[str, ...]:
    """Return the names of the formats a file of which marks the folder `path`."""
    return tuple(name for name, (*_, marks) in _MODULES.items() if any(Path(path, mark).is_file() for mark in marks))


def title(name: str) -> str:
    """Return the words for a checkpoint of the format called `name`."""
    return by_name(name).TRAITS.title or name
