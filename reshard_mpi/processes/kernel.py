"""What the kernel says of processes: whether they run, what they have started, which locks they hold (/proc)."""

from __future__ import annotations

import os

_MAX_READ_BYTES = 1 << 20
_STOPPED = ("T", "t")
_STATES = {"R": "running", "S": "sleeping", "D": "waiting for a device", "T": "stopped", "t": "stopped by a debugger"}
_ENDED = "ended"


def read_text(path: str) -> str:
    """Return the contents of a small file of the kernel's. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = b""
        while part := os.read(descriptor, _MAX_READ_BYTES):
            data += part
    finally:
        os.close(descriptor)
    return data.decode(errors="replace")


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started; nothing if it has ended, or the kernel does not say."""
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


def holders_of_lock(descriptor: int) -> list[int]:
    """Return the processes that hold a lock (flock) on an open file, as far as they can be seen from this one."""
    status = os.fstat(descriptor)
    name = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        lines = [line.split() for line in read_text("/proc/locks").splitlines()]
    except OSError:
        return []
    # 1: FLOCK  ADVISORY  WRITE 708 00:13:16 0 EOF; "1: -> FLOCK ..." is one that waits
    held: dict[str, list[int]] = {words[5]: [] for words in lines if words[1] == "FLOCK"}
    for words in lines:
        if words[1] == "FLOCK" and int(words[4]) > 0:
            held[words[5]].append(int(words[4]))
    if name in held:
        return held[name]
    # Some file systems have another device there than the one that files are said to be on.
    return [pid for place, pids in held.items() if place.rpartition(":")[2] == str(status.st_ino) for pid in pids]
