"""Hostile files, read in a process of their own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import reshard_mpi
from support.processes import run_command

CHILD = Path(__file__).with_name("hostile_child.py")
# The most processor time that a hostile file may take, in units of the reference that the child measures beside it. The
# costliest takes a quarter of it; work that grew with the square of a size would take a hundred times as much.
MAX_WORK = 1000


def read_by_child(kind: str, path: Path, **env: str) -> dict[str, Any]:
    """Have a child read a file; return what came of it, as `hostile_child.py` says. env: added to its environment."""
    finished = run_command([sys.executable, CHILD, kind, path], env=env, check=True)
    outcome: dict[str, Any] = json.loads(finished.out)
    return outcome


def opened_elsewhere(outcome: dict[str, Any], path: Path) -> set[str]:
    """Return the files that were opened beside `path` and what Python and the package consist of."""
    ours = (sys.prefix, sys.base_prefix, str(Path(reshard_mpi.__file__).parent), "/proc/", os.devnull)
    return {file for file in outcome["opened"] if not file.startswith(ours) and not file.isdigit()} - {str(path)}
