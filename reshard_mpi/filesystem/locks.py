"""Locks (flock) on files that processes of several hosts share; a process that waits for one says who holds it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from reshard_mpi.errors import TargetError
from reshard_mpi.filesystem.folders import Folder
from reshard_mpi.processes.kernel import holders_of_lock, state_of

_SHORTEST_NAP_SECONDS = 0.0005
_LONGEST_NAP_SECONDS = 0.02
_NOTICE_SECONDS = 1.0

Say = Callable[[str], None]


def open_lock(folder: Folder, name: str) -> int:
    """Open the file of a lock, which is made if it is not there, and return its descriptor.

    Raises TargetError if a link, something other than a file, or a file of another user is in its place.
    """
    return folder.open_file(name, os.O_RDWR | os.O_CREAT, "a lock")


def try_lock(fd: int, kind: int) -> bool:
    """Take a lock (LOCK_SH or LOCK_EX) if no other process is in the way; tell whether it was taken."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for_lock(
    fd: int,
    kind: int,
    path: Path,
    say: Say,
    patience_seconds: float,
    settled: Callable[[], bool] = lambda: False,
) -> bool:
    """Wait for a lock; tell whether it was taken. It was not if `settled` said meanwhile that it is needed no more.

    say: is told after a second who is in the way. Raises TargetError, which names them, after `patience_seconds`.
    """
    begin = time.monotonic()
    is_told, nap_seconds = False, _SHORTEST_NAP_SECONDS
    while not try_lock(fd, kind):
        if settled():
            return False
        waited_seconds = time.monotonic() - begin
        if waited_seconds >= patience_seconds:
            raise TargetError(
                "a lock of the target is held by another process",
                expected="nobody who holds it for longer than a moment",
                got=f"a lock held by {holders(fd)}",
                where=str(path),
                remedy="wait for that process or end it; if it is none of reshard-mpi's, remove the file",
            )
        if not is_told and waited_seconds >= _NOTICE_SECONDS:
            is_told = True
            say(f"waiting for the lock {path}, held by {holders(fd)}")
        time.sleep(nap_seconds)
        nap_seconds = min(2 * nap_seconds, _LONGEST_NAP_SECONDS)
    return True


def holders(fd: int) -> str:
    """Say who holds the lock on a file, as far as can be seen from this host."""
    processes = (f"process {pid} ({state_of(pid)})" for pid in holders_of_lock(fd))
    return ", ".join(processes) or "a process that cannot be seen from here, as on another host"
