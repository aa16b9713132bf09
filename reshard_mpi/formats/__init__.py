"""The formats by name. A format's module, and with it a library, is imported only when it is needed."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

from reshard_mpi.errors import UsageError

if TYPE_CHECKING:
    from reshard_mpi.formats.protocol import FolderFormat, Format

# name -> (module, file name endings, name of the index that marks a folder as one checkpoint). The endings and indexes
# are here so that files and folders are recognized without importing a format's module.
_MODULES: dict[str, tuple[str, tuple[str, ...], str | None]] = {
    "ckpt": ("reshard_mpi.formats.ckpt", (".ckpt",), None),
    "hdf5": ("reshard_mpi.formats.hdf5", (".h5", ".hdf5"), None),
    "safetensors": ("reshard_mpi.formats.safetensors", (".safetensors",), None),
    "torch": ("reshard_mpi.formats.torch", (".pt", ".pth", ".bin"), None),
}
NAMES = tuple(_MODULES)
# The format that the functions with MindSpore's names write by default.
DEFAULT = "ckpt"
SUFFIXES = tuple(suffix for _, suffixes, _ in _MODULES.values() for suffix in suffixes)


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
    return _MODULES[name][2]


def folder_by_name(name: str) -> FolderFormat | None:
    """Return the format called `name` if its checkpoints are folders, else None. Raises UsageError if unknown."""
    module = by_name(name)
    return cast("FolderFormat", module) if module.TRAITS.is_folder else None


def names_of_folder(path: str) -> tuple[str, ...]:
    """Return the names of the formats whose index lies in the folder `path`."""
    return tuple(name for name, (*_, index) in _MODULES.items() if index and Path(path, index).is_file())


def title(name: str) -> str:
    """Return the words for a checkpoint of the format called `name`."""
    return by_name(name).TRAITS.title or name
