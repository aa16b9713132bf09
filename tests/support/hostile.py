"""Hostile files, read in a process of their own."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

import reshard_mpi
from support.processes import HANG_SECONDS

CHILD = Path(__file__).with_name("hostile_child.py")
# The most processor time that a hostile file may take, in units of the reference that the child measures beside it. The
# costliest takes a quarter of it; work that grew with the square of a size would take a hundred times as much.
MAX_WORK = 1000


# The process whose forks read, once there is one; it ends with this one, at the end of its input.
_parents: list[subprocess.Popen[str]] = []


def read_by_child(kind: str, path: Path, **env: str) -> dict[str, Any]:
    """Have a child read a file; return what came of it, as `hostile_child.py` says. env: added to its environment."""
    if not _parents:
        _parents.append(subprocess.Popen([sys.executable, CHILD], stdin=PIPE, stdout=PIPE, text=True, process_group=0))
    (parent,) = _parents
    assert parent.stdin is not None and parent.stdout is not None
    print(json.dumps([kind, os.fspath(path), env]), file=parent.stdin, flush=True)
    if not select.select([parent.stdout], [], [], HANG_SECONDS)[0]:
        os.killpg(_parents.pop().pid, signal.SIGKILL)
        pytest.fail(f"reading {path} took longer than {HANG_SECONDS:g} seconds")
    outcome: dict[str, Any] = json.loads(parent.stdout.readline())
    return outcome


def opened_elsewhere(outcome: dict[str, Any], path: Path) -> set[str]:
    """Return the files that were opened beside `path` and what Python and the package consist of."""
    ours = (sys.prefix, sys.base_prefix, str(Path(reshard_mpi.__file__).parent), "/proc/", os.devnull)
    return {file for file in outcome["opened"] if not file.startswith(ours) and not file.isdigit()} - {str(path)}
