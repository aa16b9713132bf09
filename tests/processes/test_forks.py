"""Forked processes: one never goes on as the process that it was forked from."""

from __future__ import annotations

import sys

import pytest
from support.processes import run_command

# A signal that comes to a new process as soon as there is one.
SIGNALLED = """
import os, signal
from reshard_mpi.runs.worker_pipes import Fork
from reshard_mpi.processes.signals import exit_when_terminated

exit_when_terminated()
real = os.fork

def fork():
    pid = real()
    if pid == 0:
        os.kill(os.getpid(), signal.{signal})
    return pid

os.fork = fork
try:
    print("ended with", Fork(lambda: None).wait())
finally:
    print("went on", flush=True)
"""


@pytest.mark.parametrize(("signal", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_right_after_the_fork(signal: str, code: int) -> None:
    finished = run_command([sys.executable, "-c", SIGNALLED.format(signal=signal)])
    assert (finished.out, finished.err) == (f"ended with {code}\nwent on\n", ""), finished


@pytest.mark.parametrize(("do", "code"), [("None", 0), ("sys.exit(5)", 5), ("os.kill(os.getpid(), 9)", -9)])
@pytest.mark.parametrize("wait", ["fork.wait()", "fork.ends_within(600) and fork.wait()"])
def test_exit_codes_where_the_parent_ignores_the_end_of_children(do: str, code: int, wait: str) -> None:
    program = (
        "import os, signal, sys; from reshard_mpi.runs.worker_pipes import Fork;"
        f"signal.signal(signal.SIGCHLD, signal.SIG_IGN); fork = Fork(lambda: {do}); print({wait})"
    )
    assert run_command([sys.executable, "-c", program], check=True).out == f"{code}\n"
