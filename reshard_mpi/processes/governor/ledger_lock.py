"""The lock of a ledger: held for listing and renaming only, and never waited for without a word."""

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
# It is held for milliseconds, so whoever holds it for so long has been stopped in the middle.
PATIENCE_SECONDS = 1.0
_REPEAT_SECONDS = 30.0


class BusyError(Exception):
    """Somebody has held the lock for a long time."""


def open_lock(path: Path) -> int:
    """Open the file that is locked, and make it if it is not there.

    Raises FileNotFoundError if its folder is not there, ReshardError if something else is in its place.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, _PRIVATE)
    except FileNotFoundError:
        raise
    except (IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise strange_entry(path, error.strerror or str(error)) from None
    except OSError as error:
        if path.is_symlink():
            raise strange_entry(path, "a symbolic link") from None
        raise error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(descriptor)
        raise strange_entry(path, "no file" if status.st_uid == os.geteuid() else f"a file of user {status.st_uid}")
    return descriptor


def strange_entry(path: Path, got: str) -> ReshardError:
    """Return the error for something that lies in the place of a file of a ledger."""
    return ReshardError(
        "what memory processes use cannot be kept: something else is in the place of a file for it",
        expected=f"a file of user {os.geteuid()}, or none",
        got=got,
        where=str(path),
        remedy="remove it",
    )


def take(descriptor: int, tell: Callable[[Sequence[int]], None] | None) -> None:
    """Lock the open file.

    Nobody goes on without the lock: its holder may be in the middle of looking who is there, and when it is continued
    would admit itself beside whoever was admitted meanwhile, or remove the folder from under them. So whoever waits
    says for whom (`tell`, after a moment and then now and then), as the holder has to be continued or killed from
    outside; without `tell`, BusyError is raised then.
    """
    nap_seconds = _SHORTEST_NAP_SECONDS
    due = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        if time.monotonic() >= due:
            if tell is None:
                raise BusyError
            tell(holders_of_lock(descriptor))
            due = time.monotonic() + _REPEAT_SECONDS
        time.sleep(nap_seconds)
        nap_seconds = min(2 * nap_seconds, _LONGEST_NAP_SECONDS)


def unlock(descriptor: int) -> None:
    """Close a locked file, and drop the lock also where a fork of this process has it open."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def is_free(descriptor: int) -> bool:
    """Tell whether nobody holds the lock of the open file; what asks this must close it soon."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
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
            descriptor = open_lock(path)
        except FileNotFoundError:
            if folder.is_symlink():
                raise strange_entry(folder, "a symbolic link that leads nowhere") from None
            continue  # the last one has just left and removed the folder
        try:
            take(descriptor, tell)
            if os.fstat(descriptor).st_nlink:
                yield
                return
        finally:
            unlock(descriptor)


def holders_of(folder: Path) -> list[int]:
    """Return who holds the lock of the ledger `folder` now, as far as that can be seen."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return []
    try:
        return holders_of_lock(descriptor)
    finally:
        os.close(descriptor)
