"""The lock of a ledger: held only to list and rename files, so whoever waits for it long says for whom."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from reshard_mpi.errors import ReshardError
from reshard_mpi.processes.kernel import holders_of_lock

LOCK = "lock"
_PRIVATE = 0o600
_SHORTEST_NAP_SECONDS = 0.0001
_LONGEST_NAP_SECONDS = 0.02
# It is held for milliseconds, so a process that holds it for so long has been stopped in the middle.
PATIENCE_SECONDS = 1.0
_REPEAT_SECONDS = 30.0


class BusyError(Exception):
    """Another process has held the lock for a long time."""


def open_lock(path: Path) -> int:
    """Open the file that is locked, which is made if it is not there, and return its descriptor.

    Raises FileNotFoundError if its folder is not there, ReshardError if it is not a regular file of this user's.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, _PRIVATE)
    except (IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise strange_entry(path, error.strerror or str(error)) from None
    except OSError:
        if path.is_symlink():
            raise strange_entry(path, "a symbolic link") from None
        raise
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(fd)
        raise strange_entry(path, "no file" if status.st_uid == os.geteuid() else f"a file of user {status.st_uid}")
    return fd


def strange_entry(path: Path, got: str) -> ReshardError:
    """Return the error for something other than a file of this user's at `path`, in a ledger."""
    return ReshardError(
        "what memory processes use cannot be kept: something else is in the place of a file for it",
        expected=f"a file of user {os.geteuid()}, or none",
        got=got,
        where=str(path),
        remedy="remove it",
    )


def take(fd: int, tell: Callable[[Sequence[int]], None] | None) -> None:
    """Lock the open file.

    The lock is never broken: its holder may be stopped while it looks who is there, and once continued would admit
    itself beside whoever was admitted meanwhile, or remove the folder that they use. Only the user can continue or kill
    it. So `tell` is called with the holders after a moment and then now and then; without it, BusyError is raised.
    """
    nap_seconds = _SHORTEST_NAP_SECONDS
    due = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        if time.monotonic() >= due:
            if tell is None:
                raise BusyError
            tell(holders_of_lock(fd))
            due = time.monotonic() + _REPEAT_SECONDS
        time.sleep(nap_seconds)
        nap_seconds = min(2 * nap_seconds, _LONGEST_NAP_SECONDS)


def unlock(fd: int) -> None:
    """Unlock and close a file; it is unlocked even if a fork of this process has it open."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def is_free(fd: int) -> bool:
    """Tell whether nobody holds the lock of the open file, which the caller must close soon."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(folder: Path, tell: Callable[[Sequence[int]], None] | None) -> Iterator[None]:
    """Hold the lock of the ledger `folder`, which is made if it is not there.

    Raises FileNotFoundError if what the folder is in is not there, and what `open_lock` and `take` do.
    """
    path = folder / LOCK
    while True:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        try:
            fd = open_lock(path)
        except FileNotFoundError:
            if folder.is_symlink():
                raise strange_entry(folder, "a symbolic link that leads nowhere") from None
            continue  # the last one has just left and removed the folder
        try:
            take(fd, tell)
            if os.fstat(fd).st_nlink:
                yield
                return
        finally:
            unlock(fd)


def holders_of(folder: Path) -> list[int]:
    """Return the processes that hold the lock of the ledger `folder` now, as far as this one can see them."""
    try:
        fd = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return []
    try:
        return holders_of_lock(fd)
    finally:
        os.close(fd)
