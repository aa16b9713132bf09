"""Signals to stop: none gets lost, and none becomes an error of what it meets."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from processes import run_command

# As libraries do that load parts of their own in C: whatever is raised meanwhile is reported as a broken installation.
MODULE = """
import os, sys, time
try:
    os.kill(os.getpid(), int(sys.argv[1]))
    time.sleep(0.05)
except BaseException as error:
    raise ImportError("a long text on what may be wrong with this installation") from error
"""
PROGRAM = """
import sys, time
from reshard_mpi.signals import exit_when_terminated
exit_when_terminated()
try:
    import module_of_c
    time.sleep(30)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize(("kind", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_while_a_module_is_loaded(tmp_path: Path, kind: signal.Signals, code: int) -> None:
    (tmp_path / "module_of_c.py").write_text(MODULE)
    finished = run_command(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{PROGRAM}", str(int(kind))]
    )
    assert (finished.returncode, finished.stderr) == (code, ""), finished


def test_an_interrupt_that_is_ignored_stays_so() -> None:
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN);"
        "from reshard_mpi.signals import exit_when_terminated; exit_when_terminated();"
        "assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN"
    )
    run_command([sys.executable, "-c", program], check=True)
