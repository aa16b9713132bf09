"""Interpreters and what is installed in them: a peer may live in an environment of its own."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path

_VERSIONS = """
import importlib.metadata, json, sys
print(json.dumps({d.metadata["Name"].lower().replace("_", "-"): d.version for d in importlib.metadata.distributions()}))
"""


@functools.cache
def versions(interpreter: str) -> dict[str, str] | None:
    """Return the versions of all packages installed for `interpreter`, by name; None if it cannot be started."""
    try:
        answer = subprocess.run([interpreter, "-c", _VERSIONS], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    found: dict[str, str] = json.loads(answer.stdout)
    return found


def lacks(interpreter: str, package: str, option: str) -> str | None:
    """Return why `package` cannot be used through `interpreter`, and which option mends it; None if it can."""
    found = versions(interpreter)
    if found is None:
        return f"the interpreter given by {option} cannot be started"
    if package not in found:
        return f"{package} is not installed ({option} names an interpreter that has it)"
    return None


def lacks_mpi() -> str | None:
    """Return what is missing for ranks under MPI; None if all is there."""
    if "mpi4py" not in (versions(sys.executable) or {}):
        return "mpi4py is not installed"
    return None if mpirun(1) is not None else "mpirun is not installed"


def mpirun(ranks: int) -> list[str] | None:
    """Return the beginning of a command for so many ranks, by the MPI of this environment or else of the system."""
    # An environment may have two: MPICH, which needs no options, goes by a name that others do not use.
    for name in ("mpiexec.hydra", "mpirun"):
        beside = Path(sys.executable).parent / name
        found = str(beside) if beside.exists() else shutil.which(name)
        if found is not None:
            return [*_library(Path(found)), found, "-n", str(ranks)]
    return None


def _library(launcher: Path) -> list[str]:
    """Return what makes ranks load the library that belongs to MPICH's launcher."""
    library = launcher.parent.parent / "lib" / "libmpi.so.12"
    known = launcher.name == "mpiexec.hydra" and library.exists()
    return ["env", f"MPI4PY_LIBMPI={library}"] if known else []
