"""Find the folder of a user's ledgers on this host (`find_place`), and open a file in it."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from reshard_mpi.errors import ReshardError
from reshard_mpi.processes.host import host_name

STATE_VARIABLE = "RESHARD_MPI_STATE_DIR"
LEDGER_SUFFIX = ".ledger"
# Shared by all processes of a host, unless a job has been given its own; what follows is for systems without the first.
_SHARED = (Path("/dev/shm"), Path("/tmp"))
_TEMPORARY = ("/dev/shm", "/tmp", "/var/tmp")
_MOUNTS = Path("/proc/self/mountinfo")
_NO_NAME = re.compile(r"[^A-Za-z0-9._-]|^\.+")
# How systemd and pam_namespace call folders that they give to one service or user only.
_PRIVATE_NAMES = ("systemd-private-", ".inst")


class LedgerFolder(NamedTuple):
    """The folder for the ledgers of one host. private: why other processes of the host may not see it, or empty."""

    folder: Path
    private: str

    def path_of(self, key: str) -> Path:
        """Return the path of the ledger of a scope."""
        return self.folder / f"{key}{LEDGER_SUFFIX}"


def find_place(environment: Mapping[str, str]) -> LedgerFolder:
    """Return this user's place on this host, which is made when it is needed (`make_place`).

    Raises ReshardError if there is something other than a folder of this user's, closed to all others, since somebody
    else could have put that there; or if the folder does not exist and cannot be made.
    """
    base = _base(environment)
    place = LedgerFolder(
        base / _NO_NAME.sub("_", host_name(environment)),
        why_private(base, _read_mounts(), environment.get("SLURM_JOB_ID")),
    )
    for folder in (base, place.folder):
        if os.path.lexists(folder):
            _require_own(folder)
    nearest = next(folder for folder in place.folder.parents if os.path.lexists(folder))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        number = errno.EACCES if nearest.is_dir() else errno.ENOTDIR
        raise no_place(place.folder, OSError(number, os.strerror(number)))
    return place


def make_place(place: LedgerFolder) -> None:
    """Make the place if it does not exist. Raises ReshardError as `find_place` does."""
    place.folder.parent.parent.mkdir(parents=True, exist_ok=True)
    for folder in (place.folder.parent, place.folder):
        _make_own(folder)


def no_place(folder: Path, error: OSError) -> ReshardError:
    """Return the error for a `folder` in which no ledger can be kept."""
    return ReshardError(
        "there is no place to keep what memory processes use",
        expected="room for small files, and the right to make and lock them",
        got=error.strerror or str(error),
        where=str(folder),
        remedy=f"name a folder on this host in {STATE_VARIABLE}, or use --memory unlimited",
    )


def open_ledger_file(path: Path, flags: int) -> int:
    """Open a file of this user's, which is made if need be and `flags` say so, and return its descriptor.

    Raises FileNotFoundError if its folder is not there, ReshardError if something else is in its place.
    """
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except (IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise _strange_entry(path, error.strerror or str(error)) from None
    except OSError:
        if path.is_symlink():
            raise _strange_entry(path, "a symbolic link") from None
        raise
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(fd)
        raise _strange_entry(path, "no file" if status.st_uid == os.geteuid() else f"a file of user {status.st_uid}")
    return fd


def _strange_entry(path: Path, got: str) -> ReshardError:
    return ReshardError(
        "what memory processes use cannot be kept: something else is in the place of a file for it",
        expected=f"a file of user {os.geteuid()}, or none",
        got=got,
        where=str(path),
        remedy="remove it",
    )


def _base(environment: Mapping[str, str]) -> Path:
    named = environment.get(STATE_VARIABLE)
    if named:
        return Path(named).absolute()
    shared = next((folder for folder in _SHARED if folder.is_dir() and os.access(folder, os.W_OK)), _SHARED[-1])
    return shared / f"reshard_mpi-{os.geteuid()}"


def _make_own(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        pass  # not a folder, or a link that leads nowhere: told below
    except OSError as error:
        raise no_place(folder, error) from None
    _require_own(folder)


def _require_own(folder: Path) -> None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        got = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "a file"
    elif status.st_uid != os.geteuid():
        got = f"a folder of user {status.st_uid}"
    elif status.st_mode & 0o077:
        got = f"a folder that others may use (mode {stat.S_IMODE(status.st_mode):04o})"
    else:
        return
    raise ReshardError(
        "what memory processes use cannot be kept in a place that is not this user's alone",
        expected=f"a folder of user {os.geteuid()}, mode 0700",
        got=got,
        where=str(folder),
        remedy=f"remove it, or name another folder on this host in {STATE_VARIABLE}",
    )


def _read_mounts() -> list[str]:
    try:
        return _MOUNTS.read_text().splitlines()
    except OSError:
        return []


def why_private(folder: Path, mounts: Iterable[str], job: str | None) -> str:
    """Return why perhaps only some processes of the host see `folder`; empty if all do, as far as is known.

    Args:
        mounts: lines of /proc/self/mountinfo. SLURM's job_container/tmpfs mounts folders that are named after the job
            over /tmp and /dev/shm; systemd and pam_namespace do the like.
    """
    # A job that has its own /tmp has its own /dev/shm, which has no name.
    shared = job and any(folder.is_relative_to(place) for place in _SHARED)
    for line in mounts:
        root, mount_point = line.split()[3:5]
        if mount_point == "/":
            continue
        names = root.split("/")
        if shared and mount_point in _TEMPORARY and any(name.lstrip(".") == job for name in names):
            return f"job {job} has folders of its own in the place of {mount_point} and the like"
        is_private = any(name.startswith(_PRIVATE_NAMES[0]) or name.endswith(_PRIVATE_NAMES[1]) for name in names)
        if is_private and folder.is_relative_to(mount_point):
            return f"{mount_point} is {root} of its file system"
    return ""
