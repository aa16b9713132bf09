"""What a command takes: seconds, the peak memory of its largest process, bytes read and written."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PROGRAMS = Path(__file__).parent / "programs"

# `-S -E -s`: without site packages the launcher stays small.
_LAUNCHER = (sys.executable, "-S", "-E", "-s", str(PROGRAMS / "launcher.py"))
_STOP_SECONDS = 10.0
_SHOWN_CHARACTERS = 3000


class CommandFailedError(Exception):
    """A measured command ended with an error: in a line, and (details) the command with the end of what it said."""

    def __init__(self, problem: str, details: str) -> None:
        super().__init__(problem)
        self.details = details


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one side.

    seconds: from the start to the end of the command. cpu_seconds: of all its processes. inner_seconds: what it
    measured of itself, where it does: the time in the engine, or of one call between barriers. read_bytes,
    written_bytes: as system calls count them, in all processes, unless the side knows better.
    """

    seconds: float
    peak_bytes: int
    read_bytes: int
    written_bytes: int
    inner_seconds: float | None = None
    cpu_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """A run, and what the command printed."""

    run: Run
    stdout: str


def measure(commands: Sequence[Sequence[str]], environment: Mapping[str, str] | None = None) -> Measured:
    """Run the commands side by side, from the checkout's folder, and return what they took together.

    Raises CommandFailedError if one of them fails. Whatever ends the wait ends the commands too.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        result = Path(folder, "result.json")
        launcher = subprocess.Popen(
            [*_LAUNCHER, str(result), json.dumps([list(command) for command in commands])],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=_environment(environment or {}),
            cwd=ROOT,
            process_group=0,  # so that all of it can be ended, and an interrupt is ours to pass on
        )
        try:
            launcher.wait()
        except BaseException:
            _end(launcher)
            raise
        out.seek(0)
        err.seek(0)
        stdout, stderr = out.read().decode(errors="replace"), err.read().decode(errors="replace")
        facts: dict[str, Any] = {"codes": [launcher.returncode]}
        if launcher.returncode == 0:
            facts = json.loads(result.read_text())
    if any(facts["codes"]):
        said = (stdout + stderr).strip()
        raise CommandFailedError(
            f"exit code {next(filter(None, facts['codes']))}: {(said.splitlines() or ['it said nothing'])[-1]}",
            f"{' '.join(commands[0])}\n{said[-_SHOWN_CHARACTERS:]}",
        )
    run = Run(
        facts["seconds"],
        facts["peak_bytes"],
        facts["read_bytes"],
        facts["written_bytes"],
        cpu_seconds=facts["cpu_seconds"],
    )
    return Measured(run, stdout)


def _environment(added: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a measured command: that of a user, whose Python keeps the bytecode it has made."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**inherited, **added}


def last_json(stdout: str) -> dict[str, Any]:
    """Return the JSON object that a program printed as its last line, after whatever its libraries had to say."""
    found: dict[str, Any] = json.loads(stdout.strip().splitlines()[-1])
    return found


def settle(folder: Path) -> None:
    """Have what was written to the file system of `folder` reach it, so that no run pays for the one before."""
    subprocess.run(["sync", "--file-system", str(folder)], check=True)


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """End the launcher and all it started: gently first, since launchers of ranks have others to end themselves."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(_STOP_SECONDS)
    launcher.wait()
