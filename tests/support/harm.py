"""Runs of the command line that meet with a fault at a chosen instant, and what must be there when they are resumed."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from reshard_mpi.processes.host import ONE_THREAD
from support.conversions import Conversion, listing, timeless

# Kills the process, or all of the run, at the instant it is at.
KILL, KILL_ALL = "os.kill(os.getpid(), signal.SIGKILL)", "kill_all()"


def fault(
    c: Conversion, counter: Path, do: str = "pass", *, call: int = 0, on: str = "", path: str = ""
) -> dict[str, str]:
    """Return the environment in which `do` is done before a call for files of `c`: of that number, or of name `on`."""
    here = Path(__file__).parents[1]
    return {
        "PYTHONPATH": os.pathsep.join([str(here / "faults"), str(here.parent)]),
        "FAULT_FOLDERS": os.pathsep.join([str(c.src), str(c.dst)]),
        "FAULT_COUNTER": str(counter),
        "FAULT_DO": do,
        "FAULT_AT": str(call),
        "FAULT_ON": on,
        "FAULT_PATH": path,
        "FAULT_CUT": "16",
        **ONE_THREAD,
    }


def wait_for_the_killed(c: Conversion) -> None:
    """Wait until no process holds a lock of the run: one that was killed closes its output before it is gone."""
    for path in (c.dst / ".reshard_mpi").glob("*.lock"):
        with path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)


def assert_resumed(c: Conversion, whole: Conversion) -> None:
    """Resume a run, and check that nothing tells its target from that of `whole`, a run that was left in peace."""
    wait_for_the_killed(c)
    finished = c.run("transform", "--resume")
    assert finished.ended == (0, ""), finished
    files, expected = timeless(c.dst), timeless(whole.dst)
    assert set(files) == set(expected), set(files) ^ set(expected)
    differing = {name: (files[name], expected[name]) for name in files if files[name] != expected[name]}
    assert not differing, differing


def assert_nothing_half_done(c: Conversion, whole: Conversion) -> None:
    """Check that what has the name of a target is one."""
    files, expected = listing(c.dst), listing(whole.dst)
    shards = [name for name in files if name.startswith("rank_") and "/." not in name]
    broken = [name for name in shards if files[name] != expected[name]]
    assert not broken, broken
