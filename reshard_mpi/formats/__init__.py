"""The formats by name. A format's module, and so its library, is imported when a file of it is met."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from reshard_mpi.errors import UsageError

if TYPE_CHECKING:
    from reshard_mpi.formats.protocol import Format

# name -> (module, file name endings). The endings stand here too so that a folder is listed without importing h5py.
_MODULES = {
    "ckpt": ("reshard_mpi.formats.ckpt", (".ckpt",)),
    "hdf5": ("reshard_mpi.formats.hdf5", (".h5", ".hdf5")),
}
NAMES = tuple(_MODULES)
# What the functions with MindSpore's names write, unless they are told.
DEFAULT = "ckpt"
SUFFIXES = tuple(suffix for _, suffixes in _MODULES.values() for suffix in suffixes)


def by_name(name: str) -> Format:
    """Return the format called `name`. Raises UsageError if there is none."""
    if name not in _MODULES:
        raise UsageError("unknown checkpoint format", expected=" or ".join(NAMES), got=repr(name))
    return cast("Format", import_module(_MODULES[name][0]))


def name_of(path: str) -> str | None:
    """Return the name of the format that the ending of `path` marks, or None."""
    return next((name for name, (_, suffixes) in _MODULES.items() if path.endswith(suffixes)), None)
