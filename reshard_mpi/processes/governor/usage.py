"""How much memory there is and how much processes use.

psutil is loaded only to judge whether there is room where there may be none, so processes that wait in line stay small.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def prepare() -> None:
    """Load now what the first question would load."""
    import psutil  # noqa: F401


def total_bytes() -> int:
    """Return the memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES


def unused_bytes() -> int:
    """Return the memory of this machine that nothing uses, not even for files that could be read again."""
    return os.sysconf("SC_AVPHYS_PAGES") * _PAGE_BYTES


def available_bytes() -> int:
    """Return the memory of this machine that is available without swapping."""
    import psutil

    return int(psutil.virtual_memory().available)


def anonymous_bytes(pid: int) -> int:
    """Return the resident memory of a process that is no file cache; 0 if it has ended."""
    import psutil

    with contextlib.suppress(psutil.Error):
        memory = psutil.Process(pid).memory_info()
        return max(0, memory.rss - memory.shared)
    return 0


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process, mapped files included; 0 if it has ended."""
    import psutil

    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return 0


def resident_bytes_where(is_of: Callable[[Mapping[str, str]], bool]) -> int:
    """Return the resident memory of all processes whose environment, as it was at their start, `is_of` accepts."""
    import psutil

    used_bytes = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if is_of(process.environ()):
                used_bytes += process.memory_info().rss
    return used_bytes
