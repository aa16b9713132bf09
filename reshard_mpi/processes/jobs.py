"""How many local processes are of use, each with one thread."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping

# Keeps libraries from starting threads: processes share the cores already.
ONE_THREAD: Mapping[str, str] = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
# So many processes move the bytes of even a single target faster; more would only wait for the same disk.
_ALWAYS_USEFUL = 8
# Where a file system is slow to answer more processes than cores may help; beyond this they only take memory.
_MOST_A_CORE = 32
# The pipes to a worker, and what is open in a process besides.
_DESCRIPTORS_A_WORKER = 2
_OTHER_DESCRIPTORS = 64


def processes_by_default(targets: int) -> int:
    """Return how many processes make `targets` where nobody says how many: one a core, but no more than are useful."""
    return min(_cores(), max(_ALWAYS_USEFUL, targets))


def processes_of_use(asked: int, units: int, unit: str, *, together: bool) -> tuple[int, tuple[str, ...]]:
    """Return how many processes are started where `asked` are asked for, and a note if these are fewer.

    units: how many there are of what they work on, which `unit` names. together: several may work on one.
    """
    each, cores = _ALWAYS_USEFUL if together else 1, _cores()
    limits = {
        units * each: f"there {_counted(units, unit)}, and no more than {each} can work on one",
        cores * _MOST_A_CORE: f"there {_counted(cores, 'core')}, and more than {_MOST_A_CORE} on one are of no use",
    }
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors != resource.RLIM_INFINITY:
        connected = max(1, (descriptors - _OTHER_DESCRIPTORS) // _DESCRIPTORS_A_WORKER)
        limits[connected] = f"no more than {descriptors} files may be open (ulimit -n)"
    size = min(limits)
    if asked <= size:
        return asked, ()
    return size, (f"{asked} processes were asked for, {size} started: {limits[size]}",)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _counted(count: int, what: str) -> str:
    return f"is 1 {what}" if count == 1 else f"are {count} {what}s"
