"""Paths that a user gives: whether they can be looked up, and whether a file may take such a name.

Only a regular file is ever replaced by one of ours. A symbolic link counts as what it leads to.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

from reshard_mpi.errors import SourceError, TargetError

_KINDS = (
    (stat.S_ISREG, "a file"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_url(path: str) -> bool:
    """Tell whether a path looks like a URL, as `s3://bucket/x`, which names nothing on a file system."""
    return _URL.match(path) is not None


def real_path(path: Path | str) -> Path:
    """Return the path without symbolic links; links that lead to themselves are kept."""
    return Path(os.path.realpath(path))


def described(path: Path) -> str:
    """Say what lies at `path`, or why that cannot be seen."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return "a symbolic link that leads nowhere" if path.is_symlink() else "nothing"
    except OSError as error:
        return _in_words(error)
    return kind_of(mode)


def _in_words(error: OSError) -> str:
    return "a symbolic link that leads to itself" if error.errno == errno.ELOOP else str(error.strerror)


def kind_of(mode: int) -> str:
    """Say what a file of the mode `mode` is, as `a folder`."""
    return next(name for is_kind, name in _KINDS if is_kind(mode))


def is_replaceable(path: Path) -> bool:
    """Tell whether a file may take the name `path`: a regular file is there, or nothing."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False


def require_replaceable(path: Path, purpose: str) -> None:
    """Raise TargetError if no file may take the name `path`. purpose: what is to be put there."""
    if not is_replaceable(path):
        raise TargetError(
            f"{described(path)} is in the place of {purpose}",
            expected="a file, or nothing",
            got=described(path),
            where=str(path),
            remedy="remove it, or choose another target",
        )


def require_reachable(source: str) -> None:
    """Raise SourceError if the file system refuses to say whether anything lies at the path `source`."""
    try:
        Path(source).stat()
    except (FileNotFoundError, NotADirectoryError):
        return  # the search for a checkpoint there says what is wrong
    except OSError as error:
        raise SourceError(
            "the source cannot be looked at",
            expected="a folder or a checkpoint file",
            got=_in_words(error),
            where=source,
            remedy="check the path, and the permissions of the folders it leads through",
        ) from None
