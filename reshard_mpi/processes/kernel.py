"""What the kernel says about processes in /proc: whether they run, their children, which locks they hold."""

from __future__ import annotations

import os

_MAX_READ_BYTES = 1 << 20
_STOPPED = ("T", "t")
_STATES = {"R": "running", "S": "sleeping", "D": "waiting for a device", "T": "stopped", "t": "stopped by a debugger"}
_ENDED = "ended"


def read_text(path: str) -> str:
    """Return the contents of a small file in /proc. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = b""
        while part := os.read(fd, _MAX_READ_BYTES):
            data += part
    finally:
        os.close(fd)
    return data.decode(errors="replace")


def children_of(pid: int) -> list[int]:
    """Return the children of a process; none if it has ended, or the kernel does not tell."""
    try:
        return [int(child) for child in read_text(f"/proc/{pid}/task/{pid}/children").split()]
    except OSError:
        return []


def state_of(pid: int) -> str:
    """Return what a process does, in a word or a few."""
    return _STATES.get(_state(pid), _ENDED)


def is_stopped(pid: int) -> bool:
    """Tell whether a process has been stopped (SIGSTOP, Ctrl-Z, a debugger), and does nothing until it is continued."""
    return _state(pid) in _STOPPED


def _state(pid: int) -> str:
    try:
        # The name before it may hold anything, brackets included.
        return read_text(f"/proc/{pid}/stat").rpartition(") ")[2][:1]
    except OSError:
        return ""


def holders_of_lock(fd: int) -> list[int]:
    """Return the processes that hold a lock (flock) on an open file, as far as this one can see them."""
    status = os.fstat(fd)
    own_file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        lines = [line.split() for line in read_text("/proc/locks").splitlines()]
    except OSError:
        return []
    # 1: FLOCK  ADVISORY  WRITE 708 00:13:16 0 EOF; "1: -> FLOCK ..." is one that waits
    pids_by_file: dict[str, list[int]] = {words[5]: [] for words in lines if words[1] == "FLOCK"}
    for words in lines:
        if words[1] == "FLOCK" and int(words[4]) > 0:
            pids_by_file[words[5]].append(int(words[4]))
    if own_file in pids_by_file:
        return pids_by_file[own_file]
    # For some file systems the kernel names another device there than in the status of their files.
    inode = f":{status.st_ino}"
    return [pid for file, pids in pids_by_file.items() if file.endswith(inode) for pid in pids]
