"""Signals to stop: none gets lost, and none becomes an error of what it meets."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from support.command_line import COMMAND
from support.conversions import Conversion, four_targets
from support.examples import few, few_cases
from support.harm import assert_resumed, fault
from support.processes import run_command
from support.terminals import run_on_terminal

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
from reshard_mpi.processes.signals import exit_when_terminated
exit_when_terminated()
try:
    import module_of_c
    time.sleep(600)
except KeyboardInterrupt:
    sys.exit(130)
"""
# A signal just before one long sleep would be seen at its end only; between short ones only where Python runs code.
WAITING = "any(time.sleep(0.01) for _ in range(60_000))"


@pytest.mark.parametrize(("kind", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_while_a_module_is_loaded(tmp_path: Path, kind: signal.Signals, code: int) -> None:
    (tmp_path / "module_of_c.py").write_text(MODULE)
    finished = run_command(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{PROGRAM}", str(int(kind))]
    )
    assert (finished.code, finished.err) == (code, ""), finished


def test_an_interrupt_that_is_ignored_stays_so() -> None:
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN);"
        "from reshard_mpi.processes.signals import exit_when_terminated; exit_when_terminated();"
        "assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN"
    )
    run_command([sys.executable, "-c", program], check=True)


# What the user reads


def press(
    key: bytes, command: list[str], env: dict[str, str], ready: Path, after: bytes = b""
) -> tuple[int, list[str]]:
    """Run a command on a terminal and press a key once `ready` is there, and `after` is shown.

    Return the exit code and the lines shown.
    """
    code, shown = run_on_terminal(command, env, key=key, ready=ready, after=after)
    return code, shown.replace("\r", "\n").split("\n")


def paused(c: Conversion) -> tuple[dict[str, str], Path]:
    """Return the environment in which the second target is begun and not ended, and the file that tells of it."""
    ready = c.folder / "ready"
    wait = f"open({str(ready)!r}, 'w').close(); import time; {WAITING}"
    return fault(c, c.folder / "counter", wait, on="pwrite", path="dst/rank_1/."), ready


@pytest.mark.parametrize("jobs", few(1, ["2", "1"]))
@few_cases(
    1,
    ("again", "says"),
    [("--resume", "interrupted; the same command with --resume goes on"), ("--overwrite", "interrupted")],
)
def test_an_interrupt_is_told_on_a_line_of_its_own(tmp_path: Path, jobs: str, again: str, says: str) -> None:
    c = four_targets(tmp_path)
    env, ready = paused(c)
    # Pressed at once, before there is a bar, and while there is one.
    after = b"" if again == "--overwrite" else b" of 4 targets"
    code, lines = press(b"\x03", [*COMMAND, *c.arguments("transform", again, "--jobs", jobs)], env, ready, after)
    assert code == 130 and any("^C" in line for line in lines), lines
    assert lines[-2:] == [f"reshard-mpi: {says}", ""], lines
    assert not any("Traceback" in line for line in lines), lines
    if again == "--resume":
        whole = c.but(dst=tmp_path / "whole")
        whole.done()
        assert_resumed(c, whole)


@pytest.mark.parametrize("command", few(1, ["verify", "plan"]))
def test_what_cannot_be_resumed_does_not_promise_it(tmp_path: Path, command: str) -> None:
    c = four_targets(tmp_path)
    c.done("transform", "--verify")
    ready = tmp_path / "ready"
    (tmp_path / "stand_in").mkdir()
    (tmp_path / "stand_in" / "sitecustomize.py").write_text(
        "import time\nfrom reshard_mpi.checkpoints import discovery\n\n"
        f"def find(*_, **__):\n    open({str(ready)!r}, 'w').close()\n    {WAITING}\n\n"
        "discovery.find_shards = find\n"
    )
    arguments = c.arguments(command) if command == "plan" else ["verify", str(c.dst), "--jobs", "1"]
    code, lines = press(b"\x03", [*COMMAND, *arguments], {"PYTHONPATH": str(tmp_path / "stand_in")}, ready)
    assert (code, lines[-2:]) == (130, ["reshard-mpi: interrupted", ""]), lines
