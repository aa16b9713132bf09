"""A stack that is too small for Python: more is taken, or it is said; no segmentation fault where we have any say."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from support.command_line import COMMAND
from support.processes import run_command

KIB = 1 << 10
DEEP = '{"parallel_layout_item": ' + "[" * 100_000


def limited(soft_bytes: int, hard_bytes: int) -> list[str]:
    """Return the command line under limits on the stack."""
    return ["prlimit", f"--stack={soft_bytes}:{hard_bytes}", *COMMAND]


@pytest.mark.parametrize("soft_bytes", [112 * KIB, 128 * KIB, 512 * KIB])
def test_a_limit_that_may_be_raised(tmp_path: Path, soft_bytes: int) -> None:
    """128 KiB and lists in lists were a segmentation fault."""
    path = tmp_path / "strategy.json"
    path.write_text(DEEP)
    finished = run_command([*limited(soft_bytes, resource.RLIM_INFINITY), "inspect", path])
    assert finished.code == 3 and "nested too deep" in finished.err, finished


@pytest.mark.parametrize("most_bytes", [112 * KIB, 1000 * KIB])
def test_a_limit_that_may_not(tmp_path: Path, most_bytes: int) -> None:
    finished = run_command([*limited(most_bytes, most_bytes), "inspect", tmp_path])
    assert finished.code == 2 and finished.out == "", finished
    assert "error: the limit on the size of the stack is too low for Python" in finished.err
    assert "expected: 1.00 MiB or more" in finished.err and "ulimit -s 8192" in finished.err
