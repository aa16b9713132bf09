"""The formats by name. A format's module, and so its library, is imported when a file of it is met."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

from reshard_mpi.errors import UsageError

if TYPE_CHECKING:
    from reshard_mpi.formats.protocol import FolderFormat, Format

# name -> (module, file name endings, name of the index that marks a folder as one checkpoint). What marks files and
# folders stands here too, so that they are told without importing h5py.
_MODULES: dict[str, tuple[str, tuple[str, ...], str | None]] = {
    "ckpt": ("reshard_mpi.formats.ckpt", (".ckpt",), None),
    "hdf5": ("reshard_mpi.formats.hdf5", (".h5", ".hdf5"), None),
    "dcp": ("reshard_mpi.formats.dcp", (".distcp",), ".metadata"),
    "safetensors": ("reshard_mpi.formats.safetensors", (".safetensors",), None),
    "torch": ("reshard_mpi.formats.torch", (".pt", ".pth", ".bin"), None),
}
NAMES = tuple(_MODULES)
# What the functions with MindSpore's names write, unless they are told.
DEFAULT = "ckpt"
SUFFIXES = tuple(suffix for _, suffixes, _ in _MODULES.values() for suffix in suffixes)


def by_name(name: str) -> Format:
    """Return the format called `name`. Raises UsageError if there is none."""
    if name not in _MODULES:
        raise UsageError("unknown checkpoint format", expected=" or ".join(NAMES), got=repr(name))
    return cast("Format", import_module(_MODULES[name][0]))


def name_of(path: str) -> str | None:
    """Return the name of the format that the ending of `path` marks, or None."""
    return next((name for name, (_, suffixes, _) in _MODULES.items() if path.endswith(suffixes)), None)


def index_of(name: str) -> str | None:
    """Return the name of the file that makes a folder a checkpoint of the format called `name`; None: no folder is."""
    return _MODULES[name][2]


def folder_by_name(name: str) -> FolderFormat | None:
    """Return the format called `name` if its checkpoints are folders. Raises UsageError if there is none."""
    module = by_name(name)
    return cast("FolderFormat", module) if module.TRAITS.is_folder else None


def names_of_folder(path: str) -> tuple[str, ...]:
    """Return the names of the formats whose index lies in the folder `path`."""
    return tuple(name for name, (*_, index) in _MODULES.items() if index and Path(path, index).is_file())


def title(name: str) -> str:
    """Return what people call checkpoints of the format called `name`."""
    return by_name(name).TRAITS.title or name
