"""Folders that hold a checkpoint of each of several moments, and a file that names the latest of them.

MindFormers and Megatron write `latest_checkpointed_iteration.txt`: the number of an iteration, whose folder is called
by it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from reshard_mpi.errors import SourceError

TRACKER = "latest_checkpointed_iteration.txt"
# As releases of MindFormers and Megatron call the folder of an iteration.
_FOLDERS = ("iteration_{:08d}", "iter_{:08d}", "iter_{:07d}")
_RELEASE = "release"
_NUMBER = re.compile(rb"\s*(\d{1,12})\s*")
_MAX_BYTES = 64


class Latest(NamedTuple):
    """The folder of the latest moment, and a note that says which one it is."""

    path: str
    note: str


def latest_in(path: str) -> Latest | None:
    """Return the latest of the checkpoints in the folder `path`; None if no file in it names one.

    Raises SourceError if what the file names is no folder there.
    """
    tracker = Path(path, TRACKER)
    if not tracker.is_file():
        return None
    try:
        with tracker.open("rb") as stream:
            content = stream.read(_MAX_BYTES)
    except OSError as error:
        raise _unsound(tracker, "the number of an iteration", str(error)) from None
    number = _NUMBER.fullmatch(content)
    if number is None and content.strip() != _RELEASE.encode():
        raise _unsound(tracker, "the number of an iteration", repr(content)[1:])
    names = [_RELEASE] if number is None else [name.format(int(number[1])) for name in _FOLDERS]
    folders = [name for name in dict.fromkeys(names) if Path(path, name).is_dir()]
    if len(folders) != 1:
        raise _unsound(tracker, f"one folder called {' or '.join(names)}", " and ".join(folders) or "no such folder")
    return Latest(str(Path(path, folders[0])), f"{folders[0]} of {path} is read, the latest as {TRACKER} says")


def _unsound(tracker: Path, expected: str, got: str) -> SourceError:
    return SourceError(
        "the file that names the latest checkpoint does not lead to one",
        expected=expected,
        got=got,
        where=str(tracker),
        remedy="give the folder of the iteration that is meant, or copy what is missing",
    )
