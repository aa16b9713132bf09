"""Find which task of a cluster's array this process is (`task_number`), for `--part auto/N`.

Sources: sbatch(1); Kubernetes, "Indexed Job for Parallel Processing"; the lists of environment variables of Volcano,
AWS Batch, Google Batch, Cloud Run jobs, PBS Professional, Torque, IBM LSF, Grid Engine, Flux and OAR.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from reshard_mpi.errors import UsageError


class ArrayVariables(NamedTuple):
    """The variables by which a runner tells a task of an array its number.

    Example: `ArrayVariables("LSF", "LSB_JOBINDEX", first=1, none="0", last="LSB_JOBINDEX_END")`.
    """

    runner: str
    number: str
    first: int = 0  # what the first task of an array is called
    none: str = ""  # the number in a job that is no array
    last: str = ""  # the variable with the number of the last task; runners without one have none
    size: str = ""  # the variable with how many tasks there are


RUNNERS = (
    ArrayVariables("SLURM", "SLURM_ARRAY_TASK_ID", last="SLURM_ARRAY_TASK_MAX"),
    ArrayVariables("Kubernetes", "JOB_COMPLETION_INDEX"),
    ArrayVariables("Volcano", "VC_TASK_INDEX"),
    ArrayVariables("AWS Batch", "AWS_BATCH_JOB_ARRAY_INDEX", size="AWS_BATCH_JOB_ARRAY_SIZE"),
    ArrayVariables("Google Batch", "BATCH_TASK_INDEX", size="BATCH_TASK_COUNT"),
    ArrayVariables("Cloud Run", "CLOUD_RUN_TASK_INDEX", size="CLOUD_RUN_TASK_COUNT"),
    ArrayVariables("PBS", "PBS_ARRAY_INDEX"),
    ArrayVariables("Torque", "PBS_ARRAYID"),
    ArrayVariables("LSF", "LSB_JOBINDEX", first=1, none="0", last="LSB_JOBINDEX_END"),
    ArrayVariables("Grid Engine", "SGE_TASK_ID", first=1, none="undefined", last="SGE_TASK_LAST"),
    ArrayVariables("Flux", "FLUX_JOB_CC"),
    ArrayVariables("OAR", "OAR_ARRAY_INDEX", first=1),
)


def task_number(count: int, environ: Mapping[str, str]) -> tuple[int, str]:
    """Return the number of this task, from 0, of `count`, and the variable that says so.

    How many there are is never taken from the runner: it may have submitted three of eight again. Raises UsageError
    where nothing says the number, runners contradict each other, or the array does not fit `count`.
    """
    told = {
        runner: value
        for runner in RUNNERS
        if (value := environ.get(runner.number, "").strip()) and value != runner.none
    }
    if not told:
        raise UsageError(
            f"--part auto/{count}: nothing says which task this is",
            expected="a variable that says which task of an array this is: "
            + ", ".join(f"{runner.number} ({runner.runner})" for runner in RUNNERS),
            got="none of them",
            remedy=f"submit an array of {count} tasks; or say the number: --part I/{count}",
        )
    numbers = {runner: _number(runner, value, count, environ) for runner, value in told.items()}
    (runner, number), *others = numbers.items()
    for other, differing in others:
        if differing != number:
            raise UsageError(
                f"--part auto/{count}: two runners disagree on which task this is",
                expected="one number, counted from 0",
                got=f"{number} ({runner.number}={told[runner]}) and {differing} ({other.number}={told[other]})",
                remedy=f"unset the one that does not count; or say the number: --part I/{count}",
            )
    return number, runner.number


def _number(runner: ArrayVariables, value: str, count: int, environ: Mapping[str, str]) -> int:
    """Return a task's number from 0. Raises UsageError for an array that is not one of `count` tasks."""
    last = environ.get(runner.last, "") if runner.last else ""
    whole = environ.get(runner.size, "") if runner.size else ""
    number = int(value) - runner.first if value.isascii() and value.isdecimal() and len(value) < 10 else -1
    beyond = last.isdecimal() and int(last) - runner.first >= count
    if not 0 <= number < count or beyond or (whole.isdecimal() and int(whole) != count):
        told = {runner.number: value, runner.last: last, runner.size: whole}
        raise UsageError(
            f"--part auto/{count}: the array of {runner.runner} has not {count} tasks",
            expected=f"{runner.number} from {runner.first} to {runner.first + count - 1}",
            got=", ".join(f"{name}={each}" for name, each in told.items() if each),
            remedy=f"submit tasks {runner.first} to {runner.first + count - 1}, or say another N: auto/N",
        )
    return number
