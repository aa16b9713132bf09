"""Write the script by which a cluster makes the targets of a plan, for SLURM or Kubernetes (`cluster_script`).

Sources: sbatch(1); Kubernetes, reference of `batch/v1` Job, and its pages on Indexed Jobs and pod failure policies.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import string
from collections.abc import Iterator
from pathlib import Path

from reshard_mpi.errors import BudgetError, ReshardError, UsageError
from reshard_mpi.filesystem.paths import is_object_path
from reshard_mpi.mapping.map_file import map_path
from reshard_mpi.options import OPTIONS, PATH
from reshard_mpi.runs.plan_command import Plan
from reshard_mpi.runs.request import Request
from reshard_mpi.text import MIB, counted, format_bytes, with_addresses

# Task numbers stay below SLURM's MaxArraySize, by default 1001.
_MAX_TASKS = 1000
# Above as many indexes Kubernetes asks for more settings.
_MAX_INDEXES = 100_000
_MOST_AT_ONCE = 100
# How often an index is tried again, unless it ends with one of these exit codes, which it always would.
_RETRIES = 3
_FOR_EVER = (UsageError.exit_code, ReshardError.exit_code, BudgetError.exit_code)
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


def cluster_script(runner: str, request: Request, plan: Plan, target_ranks: int, *, endpoint: str | None = None) -> str:
    """Return a script for `sbatch`, or a manifest for `kubectl create`.

    Args:
        runner: "slurm" or "kubernetes".
        plan: of the targets that are still to be made.
        target_ranks: how many there are in all.
        endpoint: the object store that addresses lie in, if it was named.

    Raises UsageError for paths that a manifest cannot have.
    """
    return (_array_script if runner == "slurm" else _job_manifest)(request, plan, target_ranks, endpoint)


def _array_script(request: Request, plan: Plan, target_ranks: int, endpoint: str | None) -> str:
    tasks = min(target_ranks, _MAX_TASKS)
    peak_bytes = _peak_bytes(plan)
    task_bytes = _task_bytes(plan, target_ranks, tasks)
    minutes = _START_MINUTES + -(-task_bytes // (_RATE_BYTES_PER_SECOND * 60))
    commit = _word(" ".join(["reshard-mpi commit", _path(request.target), *_of_store(endpoint)]))
    lines = [
        *_made_by("slurm", plan, target_ranks),
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
        f"#SBATCH --mem={_memory_mib(plan)}M",
        f"# For {format_bytes(task_bytes)} a task at {format_bytes(_RATE_BYTES_PER_SECOND)}/s, far below what is usual,"
        f" and {_START_MINUTES} minutes to start.",
        f"#SBATCH --time={minutes // 60:02}:{minutes % 60:02}:00",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --output=reshard_%A_%a.log",
    ]
    command = _command(request._replace(map=request.map_words), f"$SLURM_ARRAY_TASK_ID/{tasks}", endpoint)
    return "\n".join(["#!/bin/bash", *_comment(lines), "#", *settings, "", command, ""])


def _job_manifest(request: Request, plan: Plan, target_ranks: int, endpoint: str | None) -> str:
    """Return an Indexed Job, one index for each target, as YAML, in which texts are written as in JSON."""
    tasks = min(target_ranks, _MAX_INDEXES)
    # A map that comes with the program lies elsewhere in the image, and is known by its name there.
    shipped = {path: name for name in request.map if (path := map_path(name)) is not None and path != Path(name)}
    maps = tuple(shipped.get(Path(word), word) for word in request.map_words)
    request = request._replace(map=maps)
    command, folders = _command(request, f"auto/{tasks}", endpoint), list(_folders(request))
    for folder, _ in folders:
        if ":" in folder or not folder.isprintable():
            raise UsageError(
                "Kubernetes cannot mount a volume at this path",
                expected="folders with printable names without colons",
                got=ascii(folder),
                remedy="give the folder another name, or a link to it",
            )
    lines = [
        *_made_by("kubernetes", plan, target_ranks),
        "",
        "Put in the image that has reshard-mpi and the claims of the volumes, each mounted where the folder is here;",
        "then: kubectl create -f THIS_FILE",
        "",
        "The index that makes the last target commits them all: nothing has to run after the job. Indexes that were",
        "evicted, killed or cut off are tried again; wrong usage and bad input end the job at once.",
    ]
    memory = json.dumps(f"{_memory_mib(plan)}Mi")
    volumes = [(f"folder-{number}", folder, is_written) for number, (folder, is_written) in enumerate(folders)]
    mounts = ["        volumeMounts:"] * bool(volumes) + [
        f"        - {{name: {name}, mountPath: {json.dumps(folder)}{', readOnly: true' * (not is_written)}}}"
        for name, folder, is_written in volumes
    ]
    claims = ["      volumes:"] * bool(volumes) + [
        f"      - {{name: {name}, persistentVolumeClaim: {{claimName: CLAIM-{number}}}}}  # of {json.dumps(folder)}"
        for number, (name, folder, _) in enumerate(volumes)
    ]
    return f"""\
{chr(10).join(_comment(lines))}
apiVersion: batch/v1
kind: Job
metadata:
  generateName: reshard-
spec:
  completionMode: Indexed
  completions: {tasks}
  parallelism: {min(tasks, _MOST_AT_ONCE)}  # how many run at once; may be changed while they do
  backoffLimitPerIndex: {_RETRIES}
  podFailurePolicy:
    rules:
    - action: Ignore
      onPodConditions: [{{type: DisruptionTarget, status: "True"}}]
    - action: FailJob
      onExitCodes: {{containerName: main, operator: In, values: [{", ".join(map(str, _FOR_EVER))}]}}
  template:
    spec:
      restartPolicy: Never
      terminationGracePeriodSeconds: 60
      containers:
      - name: main
        image: IMAGE
        command: [{"bash" if "$'" in command else "sh"}, -c, {json.dumps(_unexpanded(command))}]
        resources:
          # A process needs {format_bytes(_peak_bytes(plan))} at most; the rest is what is not yet on the disk.
          requests: {{cpu: "1", memory: {memory}, ephemeral-storage: 100Mi}}
          limits: {{memory: {memory}, ephemeral-storage: 100Mi}}
""" + "".join(f"{line}\n" for line in (*mounts, *claims))


def _unexpanded(command: str) -> str:
    """Return a command as Kubernetes has to be given it, which makes `$` of `$$`, and values of `$(NAME)`."""
    return re.sub(r"\$(?=[$(])", "$$", command)


def _folders(request: Request) -> Iterator[tuple[str, bool]]:
    """Yield the folders that a run needs, each with whether it is written to; none lies in another.

    What lies in an object store needs none.
    """
    given = [
        getattr(request, option.name) for option in OPTIONS.values() if option.kind is PATH and option.is_of_transform
    ]
    maps = [word for word in request.map if Path(word).is_absolute()]
    named = (path for path in (request.source, *given, *maps) if path is not None and not is_object_path(path))
    folders = {path if path.is_dir() else path.parent for path in (Path(path).absolute() for path in named)}
    target = Path(request.target).absolute()
    if not is_object_path(request.target):
        folders.add(target if target.parent == target.parents[-1] else target.parent)  # nothing can be mounted at /
    for folder in sorted(folders):
        if not any(other in folder.parents for other in folders):
            yield str(folder), target.is_relative_to(folder)


def _made_by(runner: str, plan: Plan, target_ranks: int) -> list[str]:
    return [
        f"Made by reshard-mpi plan --script {runner}. {counted(target_ranks, 'target')}, of which {len(plan.targets)}"
        f" with {format_bytes(plan.written_bytes)} were still to be made."
    ]


def _comment(lines: list[str]) -> list[str]:
    """Return lines of a comment; a path in them may hold a line break, which must not end it."""
    return [f"# {line}".rstrip() for line in "\n".join(lines).splitlines()]


def _peak_bytes(plan: Plan) -> int:
    return plan.peak_bytes if plan.targets else _IDLE_BYTES


def _memory_mib(plan: Plan) -> int:
    return -(-(_peak_bytes(plan) + _BESIDES_BYTES) // MIB)


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


def _of_store(endpoint: str | None) -> list[str]:
    return [] if endpoint is None else [f"--s3-endpoint={_word(endpoint)}"]


def _command(request: Request, part: str, endpoint: str | None) -> str:
    """Return the one command of a task. exec: signals reach the program itself."""
    lines = [f"exec reshard-mpi transform {_path(request.source)} {_path(request.target)}"]
    for option in OPTIONS.values():
        given = getattr(request, option.name) if option.is_of_transform and not option.is_of_task else ()
        for value in given if isinstance(given, tuple) else (given,):
            if value is True:
                lines.append(option.flag)
            elif value is not None and value is not False:
                lines.append(
                    f"{option.flag}={_path(value) if option.kind is PATH else _word(with_addresses(str(value)))}"
                )
    lines += _of_store(endpoint)
    again = [] if request.overwrite else ["--resume"]
    lines.append(" ".join([f'--part "{part}"', *again, "--jobs 1"]))
    return " \\\n    ".join(lines)


def _path(path: str) -> str:
    """Return a path as a word of the shell; absolute, since a job may run in another folder."""
    return _word(with_addresses(path) if is_object_path(path) else str(Path(path).absolute()))


def _word(text: str) -> str:
    """Return `text` as a word of bash, in which unprintable characters are written as `\\x..`."""
    if text.isprintable():
        return shlex.quote(text)
    shown = (_PLAIN.get(byte) or f"\\x{byte:02x}" for byte in os.fsencode(text))
    return f"$'{''.join(shown)}'"
