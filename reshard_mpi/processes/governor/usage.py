"""How much memory there is and how much processes use.

psutil is loaded by who has to judge whether there is room: processes that only wait in line stay as small as they are.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


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
