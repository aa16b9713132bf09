"""Runs commands on a terminal of their own, presses keys, and returns what was shown."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import termios
import time
from collections.abc import Mapping
from pathlib import Path

from support.processes import HANG_SECONDS, clean_environment


def run_on_terminal(
    command: list[str],
    env: Mapping[str, str],
    *,
    columns: int = 0,
    key: bytes = b"",
    ready: Path | None = None,
    after: bytes = b"",
) -> tuple[int, str]:
    """Run a command on a terminal; return its exit code and all that was shown.

    columns: how wide the terminal is; 0: it does not say. key: pressed once the file `ready` is there, if it is given,
    and `after` is shown. The test fails if the command ends before that.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24 if columns else 0, columns, 0, 0))
        signal.alarm(int(HANG_SECONDS))  # which is kept by what takes the place of this process
        os.execvpe(command[0], command, {**clean_environment(), "TERM": "xterm", **env})
    shown = b""
    try:
        while ready is not None and not ready.exists():
            assert os.waitpid(pid, os.WNOHANG) == (0, 0)
            time.sleep(0.01)
        if key:
            while after not in shown:
                part = _read(terminal)
                assert part, shown
                shown += part
            os.write(terminal, key)
        while part := _read(terminal):
            shown += part
    finally:
        os.close(terminal)  # which hangs up on whoever is left
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # everybody has closed the other side
        return b""
