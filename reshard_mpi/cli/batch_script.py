"""Write a SLURM array script for a plan (`batch_script`)."""

from __future__ import annotations

import os
import shlex
import string
from pathlib import Path

from reshard_mpi.options import OPTIONS, PATH
from reshard_mpi.runs.plan_command import Plan
from reshard_mpi.runs.request import Request
from reshard_mpi.text import MIB, counted, format_bytes

# Task numbers stay below SLURM's MaxArraySize, by default 1001.
_MAX_TASKS = 1000
# Memory besides the process itself: the batch shell, SLURM's own, and pages on their way to the file system.
_BESIDES_BYTES = 64 * MIB
# Memory of a process for which nothing is left to be made, so that there is no plan to take it from.
_IDLE_BYTES = 64 * MIB
# The rate of a task where hundreds share a file system; alone it is a hundred times as fast.
_RATE_BYTES_PER_SECOND = 20 * MIB
# Interpreter, libraries, strategies and headers of shards, all from a file system that is busy.
_START_MINUTES = 10
# Characters that stand for themselves between $' and '.
_PLAIN = {ord(char): char for char in string.ascii_letters + string.digits + "-+._/ ~=,:@%"}


def batch_script(request: Request, plan: Plan, target_ranks: int) -> str:
    """Return the script. plan: of the targets that are still to be made. target_ranks: how many there are in all."""
    tasks = min(target_ranks, _MAX_TASKS)
    peak_bytes = plan.peak_bytes if plan.targets else _IDLE_BYTES
    mem_mib = -(-(peak_bytes + _BESIDES_BYTES) // MIB)
    task_bytes = _task_bytes(plan, target_ranks, tasks)
    minutes = _START_MINUTES + -(-task_bytes // (_RATE_BYTES_PER_SECOND * 60))
    commit = _word(f"reshard-mpi commit {_path(request.target)}")
    lines = [
        f"Made by reshard-mpi plan --sbatch. {counted(target_ranks, 'target')}, of which {len(plan.targets)} with"
        f" {format_bytes(plan.written_bytes)} were still to be made.",
        _sharing(target_ranks, tasks),
        "",
        "Submit this file where reshard-mpi can be run, since jobs inherit the environment; then the last task, which",
        "checks that all targets are there and commits them:",
        "",
        "  job=$(sbatch --parsable THIS_FILE)",
        f'  sbatch --dependency="afterok:$job" --kill-on-invalid-dep=yes --wrap {commit}',
        "",
        "If a task fails, mend the cause and submit the file again, or only that task (sbatch --array=3 THIS_FILE)."
        + (" What is complete is skipped." if not request.overwrite else ""),
    ]
    settings = [
        "#SBATCH --job-name=reshard",
        f"#SBATCH --array=0-{tasks - 1}",
        "#SBATCH --cpus-per-task=1",
        f"# A process needs {format_bytes(peak_bytes)} at most; {format_bytes(_BESIDES_BYTES)} are for the batch shell"
        " and what is not yet on the disk.",
        f"#SBATCH --mem={mem_mib}M",
        f"# For {format_bytes(task_bytes)} a task at {format_bytes(_RATE_BYTES_PER_SECOND)}/s, far below what is usual,"
        f" and {_START_MINUTES} minutes to start.",
        f"#SBATCH --time={minutes // 60:02}:{minutes % 60:02}:00",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --output=reshard_%A_%a.log",
    ]
    comment = "\n".join(lines).splitlines()  # a path may hold a line break, which must not end the comment
    return "\n".join(
        ["#!/bin/bash", *(f"# {line}".rstrip() for line in comment), "#", *settings, "", _command(request, tasks), ""]
    )


def _task_bytes(plan: Plan, target_ranks: int, tasks: int) -> int:
    """Return an upper bound of what any task writes."""
    largest_bytes = max((target.written_bytes for target in plan.targets), default=0)
    if tasks == target_ranks:
        return largest_bytes
    return plan.written_bytes // tasks + largest_bytes  # targets are dealt out so that none gets more


def _sharing(target_ranks: int, tasks: int) -> str:
    if tasks == target_ranks:
        return "Task R makes target rank R."
    return f"There are {tasks} tasks, since SLURM by default takes no more than 1001, so each makes several of them."


def _command(request: Request, tasks: int) -> str:
    """Return the one command of the script. exec: signals reach the program itself."""
    request = request._replace(map=request.map_words)
    lines = [f"exec reshard-mpi transform {_path(request.source)} {_path(request.target)}"]
    for option in OPTIONS.values():
        given = () if option.is_of_task else getattr(request, option.name)
        for value in given if isinstance(given, tuple) else (given,):
            if value is True:
                lines.append(option.flag)
            elif value is not None and value is not False:
                lines.append(f"{option.flag}={_path(value) if option.kind is PATH else _word(str(value))}")
    again = [] if request.overwrite else ["--resume"]
    lines.append(" ".join([f'--part "$SLURM_ARRAY_TASK_ID/{tasks}"', *again, "--jobs 1"]))
    return " \\\n    ".join(lines)


def _path(path: str) -> str:
    """Return a path as a word of the shell; absolute, since a job may run in another folder."""
    return _word(str(Path(path).absolute()))


def _word(text: str) -> str:
    """Return `text` as a word of bash, in which unprintable characters are written as `\\x..`."""
    if text.isprintable():
        return shlex.quote(text)
    shown = (_PLAIN.get(byte) or f"\\x{byte:02x}" for byte in os.fsencode(text))
    return f"$'{''.join(shown)}'"
