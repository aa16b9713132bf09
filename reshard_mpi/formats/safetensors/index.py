"""The index of a folder: which of its files holds which tensor.

    {"metadata": {"total_size": BYTES, ...}, "weight_map": {NAME: FILE, ...}}

MindSpore's is of the same form, or the map alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import PurePosixPath

from reshard_mpi.errors import ShardError
from reshard_mpi.formats import files
from reshard_mpi.formats.safetensors.json_text import JsonText

_METADATA, _TOTAL, _MAP = "metadata", "total_size", "weight_map"
_ENDING = ".safetensors"
# As many bytes as a character can be written with, for each byte of a name.
_ESCAPED = 6
_MAX_FILE_BYTES = 1024
_REMEDY = "restore files and index of one and the same save, or choose files without the index (--select 'model-*')"


def read(path: str, *, may_be_flat: bool = False) -> dict[str, str]:
    """Return the file of each tensor, by the names in the index at `path`. may_be_flat: it may be the map alone.

    Raises ShardError if it is damaged, names a tensor twice, or a file that does not lie in its folder.
    """
    with files.opened(path) as (fd, size_bytes):
        text = JsonText(fd, path, 0, size_bytes, "the index of a checkpoint")
        nested, flat = None, _Map(text)
        for at, key in text.members(_ESCAPED * files.MAX_NAME_BYTES):
            if key == _MAP and text.next_is(b"{"):
                if nested is not None:
                    raise text.damage(f"the index of a checkpoint has {_MAP!r} twice", at, expected="it once")
                nested = _Map(text)
                nested.take()
            elif may_be_flat and text.next_is(b'"'):
                flat.take_file(at, key)
            else:
                text.pass_over()
        text.require_end()
        found = flat.files if nested is None else nested.files
        if not found:
            raise text.damage(f"the index of a checkpoint has no {_MAP!r}", 0, expected="a file for each tensor")
        return found


class _Map:
    """The files of tensors while they are read."""

    def __init__(self, text: JsonText) -> None:
        self.files: dict[str, str] = {}
        self._text = text
        self._known: dict[str, str] = {}
        self._kept_bytes = 0

    def take(self) -> None:
        """Take an object of names and files."""
        for at, name in self._text.members(_ESCAPED * files.MAX_NAME_BYTES):
            self.take_file(at, name)

    def take_file(self, at: int, name: str | None) -> None:
        """Take the file of the tensor that is called so at byte `at`; None: its name is too long."""
        text, known = self._text, self._known
        file = text.text(_ESCAPED * _MAX_FILE_BYTES)
        if not name or name in self.files:
            problem = f"the index of a checkpoint names {name!r} twice" if name else "a tensor's name is too long"
            raise text.damage(problem, at, expected=f"each tensor once, by 1 to {files.MAX_NAME_BYTES} bytes")
        if file is None or (file not in known and not _is_inside(file)):
            raise text.damage(
                f"the index of a checkpoint says that {name!r} lies outside of its folder, or in no file of it",
                at,
                expected=f"the name of a file in the folder, which ends in {_ENDING}",
                got=repr(file),
            )
        self._kept_bytes += files.kept_bytes(name)
        if self._kept_bytes > files.MAX_KEPT_BYTES or len(self.files) == files.MAX_TENSORS:
            raise text.damage(
                "the index of a checkpoint names too many tensors",
                at,
                expected=f"{files.MAX_TENSORS} at most, of {files.MAX_KEPT_BYTES} bytes together",
            )
        self.files[sys.intern(name)] = known.setdefault(file, file)


def _is_inside(file: str) -> bool:
    """Tell whether a path names a file of the folder, or of one in it, whatever the links there are."""
    parts = file.split("/")
    is_plain = all(part and part not in (".", "..") and "\0" not in part for part in parts)
    is_short = len(file.encode(errors="replace")) <= _MAX_FILE_BYTES
    return is_plain and is_short and not PurePosixPath(file).is_absolute() and file.endswith(_ENDING)


def write(files_of: Mapping[str, str], total_bytes: int) -> str:
    """Return the index of tensors that lie in these files and have so many bytes together."""
    facts = {_METADATA: {_TOTAL: total_bytes}, _MAP: dict(files_of)}
    return json.dumps(facts, indent=2, sort_keys=True) + "\n"


def require_listed(weight_map: Mapping[str, str], file: str, held: Iterable[str], folder: str) -> None:
    """Raise ShardError unless the index names this file for each of the tensors that it holds."""
    for name in held:
        listed = weight_map.get(name)
        if listed != file:
            raise ShardError(
                f"{name!r} lies in a file that the index does not name for it",
                expected=f"it in {listed} alone" if listed is not None else f"no {name!r}, which the index lacks",
                got=f"it in {file}",
                where=folder,
                remedy=_REMEDY,
            )


def require_all(weight_map: Mapping[str, str], held: Collection[str], folder: str) -> None:
    """Raise ShardError if the index names tensors that are in no file. held: those that are in one."""
    if len(held) < len(weight_map):
        missing = sorted(set(weight_map).difference(held))
        more = f", nor are {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ShardError(
            f"{missing[0]!r} is not in the file that the index names for it{more}",
            expected=f"it in {weight_map[missing[0]]}",
            got="other tensors",
            where=folder,
            remedy=_REMEDY,
        )
