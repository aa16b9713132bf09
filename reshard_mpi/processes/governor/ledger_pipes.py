"""Pipes by which processes in a ledger wake each other, so that hardly anybody has to look again and again.

A process in line keeps a pipe of its own open for writing; the next one in line sleeps until that is closed, for
whatever reason. The bell is a pipe that is written to when a lease is given back; the head of the line sleeps on it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import stat
import time
from collections.abc import Iterator
from pathlib import Path

_PRIVATE = 0o600
_MAX_RINGS = 1 << 16


def make_line(path: Path) -> int:
    """Make the pipe of a process in line and return its descriptor, open until the process leaves the line."""
    os.mkfifo(path, _PRIVATE)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


def close_line(fd: int) -> None:
    """Wake the next in line, even where a fork of this process has the pipe open as well."""
    with contextlib.suppress(OSError):
        os.write(fd, b".")
    os.close(fd)


def wait_for_line(path: Path, seconds: float) -> bool:
    """Sleep until the pipe of another process is closed, at most so long; tell whether it could be opened."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.read(fd, 1)
    except BlockingIOError:  # open at its other end, so its closing will be noticed
        _wait_to_read(fd, max(0.0, seconds))
    finally:
        os.close(fd)
    return True


@contextlib.contextmanager
def opened_bell(path: Path) -> Iterator[int | None]:
    """Open the bell, made if it is not there; None if something else is in its place."""
    with contextlib.suppress(FileExistsError):
        os.mkfifo(path, _PRIVATE)
    bell = _open_pipe(path, os.O_RDWR)
    try:
        yield bell
    finally:
        if bell is not None:
            os.close(bell)


def wait_for_bell(bell: int | None, seconds: float) -> None:
    """Sleep until the bell is rung, at most so long."""
    if bell is None:
        time.sleep(seconds)
    elif _wait_to_read(bell, seconds):
        with contextlib.suppress(BlockingIOError):
            os.read(bell, _MAX_RINGS)


def ring(path: Path) -> None:
    """Wake whoever sleeps on the bell."""
    bell = _open_pipe(path, os.O_WRONLY)
    if bell is None:
        return  # nobody listens
    try:
        with contextlib.suppress(OSError):  # rung more often than anybody has listened
            os.write(bell, b".")
    finally:
        os.close(bell)


def _wait_to_read(fd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _open_pipe(path: Path, mode: int) -> int | None:
    """Open a pipe; None if there is none, something else is there, or nobody is at its other end."""
    try:
        if not stat.S_ISFIFO(path.lstat().st_mode):
            return None
        return os.open(path, mode | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return None
