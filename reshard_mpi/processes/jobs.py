"""How many local processes are of use, each with one thread."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping

from reshard_mpi.text import counted

# Keeps libraries from starting threads: processes share the cores already.
ONE_THREAD: Mapping[str, str] = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
# Up to so many processes make even a single target faster; more would only wait for the same disk.
_ALWAYS_USEFUL = 8
# On a slow file system more processes than cores may help; beyond this they only take memory.
_MOST_A_CORE = 32
# The pipes to a worker, and other files that a process has open.
_DESCRIPTORS_A_WORKER = 2
_OTHER_DESCRIPTORS = 64


def processes_by_default(targets: int) -> int:
    """Return how many processes make `targets` targets unless the user says: one a core, as far as they are of use."""
    return min(_cores(), max(_ALWAYS_USEFUL, targets))


def processes_of_use(asked: int, units: int, unit: str, *, together: bool) -> tuple[int, tuple[str, ...]]:
    """Return how many processes to start if the user asks for `asked`, and a note if they are fewer.

    units: how many things there are to work on. unit: what these are called. together: several may work on one.
    """
    per_unit, cores = _ALWAYS_USEFUL if together else 1, _cores()
    limits = {
        units * per_unit: f"{_there_are(units, unit)}, and no more than {per_unit} can work on one",
        cores * _MOST_A_CORE: f"{_there_are(cores, 'core')}, and more than {_MOST_A_CORE} on one are of no use",
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


def _there_are(count: int, what: str) -> str:
    return f"there {'is' if count == 1 else 'are'} {counted(count, what)}"
