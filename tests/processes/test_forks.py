"""Forked processes: one never goes on as the process that it was forked from."""

from __future__ import annotations

import sys

import pytest
from support.processes import run_command

# A signal that comes to a new process as soon as there is one.
SIGNALLED = """
import os, signal
from reshard_mpi.processes.forks import Fork
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
