"""Interpreters that are started for callers of the Python functions, and callers that are killed."""

from __future__ import annotations

import subprocess

import pytest
from support.conversions import Conversion
from support.processes import HANG_SECONDS

from reshard_mpi.processes.imports import fresh_interpreter
from reshard_mpi.runs.request import Request, Task
from reshard_mpi.runs.worker_pipes import Channel
from reshard_mpi.runs.workers import _START


@pytest.mark.slow
def test_one_whose_caller_was_killed_meanwhile_begins_no_run(c: Conversion) -> None:
    ours, theirs = Channel.pair()
    ours.send((Request(*map(str, c.paths)), 1, Task.CONVERT))
    ours.close()
    program = fresh_interpreter(_START.format(descriptors=theirs.descriptors))
    process = subprocess.Popen(program, pass_fds=theirs.descriptors, stderr=subprocess.PIPE)
    theirs.close()
    _, said = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 1 and not said
    assert not c.dst.exists()
