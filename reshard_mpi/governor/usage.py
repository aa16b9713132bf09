"""How much memory there is and how much processes use (psutil), and whether these run (/proc).

psutil is loaded by who has to judge whether there is room: processes that only wait in line stay as small as they are.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
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


def total_bytes() -> int:
    """Return how much memory this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES


def available_bytes() -> int:
    """Return how much memory of this machine can be had without swapping."""
    import psutil

    available: int = psutil.virtual_memory().available
    return available


def anonymous_bytes(pid: int) -> int:
    """Return the memory of a process that could not be had again by dropping file cache; 0 if it has ended."""
    import psutil

    try:
        memory = psutil.Process(pid).memory_info()
    except psutil.Error:
        return 0
    return max(0, memory.rss - memory.shared)


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process, mapped files included; 0 if it has ended."""
    import psutil

    try:
        resident: int = psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0
    return resident


def resident_bytes_where(is_of: Callable[[Mapping[str, str]], bool]) -> int:
    """Return the resident memory of all processes whose environment, as they were started with, `is_of` accepts."""
    import psutil

    used_bytes = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if is_of(process.environ()):
                used_bytes += process.memory_info().rss
    return used_bytes


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
    return [int(words[4]) for words in lines if words[1] == "FLOCK" and words[5] == name and int(words[4]) > 0]
