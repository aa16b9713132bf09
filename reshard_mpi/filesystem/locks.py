"""Locks that processes of several hosts share (flock), kept in files; who waits for one says for whom."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from reshard_mpi.errors import TargetError
from reshard_mpi.filesystem.folders import Folder
from reshard_mpi.processes.kernel import holders_of_lock, state_of

_NAP_SECONDS = 0.02
_NOTICE_SECONDS = 1.0

Say = Callable[[str], None]


def open_lock(folder: Folder, name: str) -> int:
    """Open a lock, made if it is not there; what it holds is nobody's business.

    Raises TargetError if a link, something else, or another user's file is in its place.
    """
    return folder.open_file(name, os.O_RDWR | os.O_CREAT, "a lock")


def try_lock(descriptor: int, kind: int) -> bool:
    """Take a lock (LOCK_SH or LOCK_EX) if nobody is in the way."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for_lock(
    descriptor: int,
    kind: int,
    path: Path,
    say: Say,
    patience_seconds: float,
    settled: Callable[[], bool] = lambda: False,
) -> bool:
    """Take a lock; tell whether it was taken, and not `settled` first what it was wanted for.

    say: is told after a second who is in the way. Raises TargetError, which names them, when patience is at an end.
    """
    begin = time.monotonic()
    told = False
    while not try_lock(descriptor, kind):
        if settled():
            return False
        waited = time.monotonic() - begin
        if waited >= patience_seconds:
            raise TargetError(
                "a lock of the target is held by another process",
                expected="nobody who holds it for longer than a moment",
                got=f"a lock held by {holders(descriptor)}",
                where=str(path),
                remedy="wait for that process or end it; if it is none of reshard-mpi's, remove the file",
            )
        if not told and waited >= _NOTICE_SECONDS:
            told = True
            say(f"waiting for the lock {path}, held by {holders(descriptor)}")
        time.sleep(_NAP_SECONDS)
    return True


def holders(descriptor: int) -> str:
    """Say who holds the lock on a file, as far as can be seen from this host."""
    seen = (f"process {pid} ({state_of(pid)})" for pid in holders_of_lock(descriptor))
    return ", ".join(seen) or "a process that cannot be seen from here, as on another host"
