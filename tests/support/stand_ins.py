"""Stands in for parts of the package in every process of a run: something is done at a chosen instant."""

from __future__ import annotations

import os
from pathlib import Path

from reshard_mpi.processes.host import ONE_THREAD

# Stands in for the writing of a shard, in every process of a run; `{do}` is done once the partial file is complete.
STAND_IN = """
import os, signal, time
from reshard_mpi.runs import scheduling as division, target_writer

division.CUT_BYTES = 16  # so that the small files here are filled by several processes

fill = target_writer.write_shard

def stand_in(target, **more):
    filled = yield from fill(target, **more)
    plan, manifest, descriptor, span = target
    if {when}:
        {do}
    return filled
target_writer.write_shard = stand_in
"""


def doing(folder: Path, do: str, when: str = "plan.target_rank == 1") -> dict[str, str]:
    """Return the environment in which every process does `do` when it has written target 1 but not yet published it.

    when: another condition, of `plan` and of the `span` of the file that this process fills (None: all of it).
    """
    (folder / "stand_in").mkdir(exist_ok=True)
    (folder / "stand_in" / "sitecustomize.py").write_text(STAND_IN.format(do=do, when=when))
    path = os.pathsep.join([str(folder / "stand_in"), os.environ.get("PYTHONPATH", "")]).rstrip(":")
    return {"PYTHONPATH": path, **ONE_THREAD}


def refusing(folder: Path) -> dict[str, str]:
    """Return the environment in which the file system refuses to hold target 1."""
    return doing(folder, "raise OSError(28, 'No space left on device', str(manifest.path))")
