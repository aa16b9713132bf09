"""How much memory there is and how much processes use, as the kernel says it under /proc."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PROCESSES = Path("/proc")


def total_bytes() -> int:
    """Return the memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES


def available_bytes() -> int:
    """Return the memory of this machine that is available without swapping."""
    lines = (_PROCESSES / "meminfo").read_text().splitlines()
    kib = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    return kib["MemAvailable"] << 10


def anonymous_bytes(pid: int) -> int:
    """Return the resident memory of a process that is no file cache; 0 if it has ended."""
    resident, shared = _resident_and_shared_bytes(pid)
    return max(0, resident - shared)


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process, mapped files included; 0 if it has ended."""
    return _resident_and_shared_bytes(pid)[0]


def resident_bytes_where(is_of: Callable[[Mapping[str, str]], bool]) -> int:
    """Return the resident memory of all processes whose environment, as it was at their start, `is_of` accepts."""
    pids = [int(name) for name in os.listdir(_PROCESSES) if name.isdecimal()]  # noqa: PTH208
    return sum(resident_bytes(pid) for pid in pids if is_of(_environment(pid)))


def _resident_and_shared_bytes(pid: int) -> tuple[int, int]:
    try:
        _, resident, shared, *_ = (_PROCESSES / str(pid) / "statm").read_text().split()
    except OSError:  # it has ended, or it is hidden from this user
        return 0, 0
    return int(resident) * _PAGE_BYTES, int(shared) * _PAGE_BYTES


def _environment(pid: int) -> Mapping[str, str]:
    """Return the environment with which a process was started; nothing if it has ended, or is of another user."""
    try:
        content = (_PROCESSES / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    variables = (os.fsdecode(variable).partition("=") for variable in content.split(b"\0") if b"=" in variable)
    return {name: value for name, _, value in variables}
