"""Kills a command at every instant at which the folder that it changes is in a state of its own."""

from __future__ import annotations

import marshal
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from support.command_line import run_here

_EVENTS = {"open", "fcntl.flock", *(f"os.{name}" for name in ("link", "mkdir", "remove", "rename", "rmdir"))}
_EVENTS |= {"os.truncate", "os.utime"}


def instants(arguments: Sequence[str], folder: Path) -> list[int]:
    """Run a command in a fork; return the things it does to `folder`, by number, before which that has changed.

    Killed before any other it would leave the folder as it was left before: a lock ends with its process.
    """
    numbers: list[int] = []
    seen: object = None
    count = 0

    def look() -> None:
        nonlocal count, seen
        count += 1
        if (state := _state(folder)) != seen:
            seen = state
            numbers.append(count)

    with tempfile.TemporaryFile() as found:
        ended = _run(arguments, folder, look, lambda: os.write(found.fileno(), marshal.dumps(numbers)))
        found.seek(0)
        assert ended == 0, ended
        return list(marshal.load(found))


def killed_before(arguments: Sequence[str], folder: Path, number: int) -> bool:
    """Run a command in a fork that is killed before the thing of this number (0: never); tell whether it was."""
    left = number

    def kill() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    ended = _run(arguments, folder, kill)
    assert ended in (0, signal.SIGKILL), (number, ended)
    return ended != 0


def _run(
    arguments: Sequence[str], folder: Path, before: Callable[[], object], at_end: Callable[[], object] = lambda: None
) -> int:
    """Run a command in a fork, which calls `before` before each thing that it does to the folder; return its status."""
    process = os.fork()
    if process == 0:

        def hook(event: str, values: tuple[object, ...]) -> None:
            if event in _EVENTS and (event != "open" or int(str(values[2])) & (os.O_WRONLY | os.O_RDWR)):
                path = str(values[0])  # some are relative to an open folder, or are numbers of open files
                if event == "fcntl.flock" or path.startswith(str(folder)) or not path.startswith(("/", "b'/")):
                    before()

        code = 99
        try:
            sys.addaudithook(hook)
            code = run_here(*arguments).code
            at_end()
        finally:
            os._exit(code)
    return os.waitpid(process, 0)[1]


def _state(folder: Path) -> list[tuple[str, int, bytes | None]]:
    """Return all that lies in a folder: paths, times of files, and contents."""
    found = ((path, path.is_file()) for path in sorted(folder.rglob("*")))
    return [
        (str(path), path.stat().st_mtime_ns if is_file else 0, path.read_bytes() if is_file else None)
        for path, is_file in found
    ]
