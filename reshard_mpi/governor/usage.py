"""What the kernel says of memory, and of processes: how much they use, and whether they run. Read from /proc.

Light, since processes ask this before they have loaded anything else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

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
    return _meminfo("MemTotal:")


def available_bytes() -> int:
    """Return how much memory of this machine can be had without swapping."""
    return _meminfo("MemAvailable:")


def _meminfo(name: str) -> int:
    line = next(line for line in read_text("/proc/meminfo").splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10


def anonymous_bytes(pid: int) -> int:
    """Return the memory of a process that could not be had again by dropping file cache; 0 if it has ended."""
    resident, shared = _pages(pid)
    return max(0, resident - shared) * _PAGE_BYTES


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process, mapped files included; 0 if it has ended."""
    return _pages(pid)[0] * _PAGE_BYTES


def _pages(pid: int) -> tuple[int, int]:
    try:
        _, resident, shared, *_ = read_text(f"/proc/{pid}/statm").split()
    except (OSError, ValueError):
        return 0, 0
    return int(resident), int(shared)


def process_ids() -> Iterator[int]:
    """Yield the processes there are."""
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208 - pathlib is not light


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started; nothing if it has ended, or the kernel does not say."""
    try:
        return [int(child) for child in read_text(f"/proc/{pid}/task/{pid}/children").split()]
    except OSError:
        return []


def environment_of(pid: int) -> dict[str, str]:
    """Return what a process was started with; nothing if it has ended or is another user's."""
    try:
        entries = read_text(f"/proc/{pid}/environ").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


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
