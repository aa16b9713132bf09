"""Tell where this process runs (`host_name`, `task_number`), and states of others (`pid_state`, `holders_of_lock`).

Processes of one host share its memory, and may fill a file together. The kernel says of them who holds a lock
(`holders_of_lock`), and who does nothing (`pid_state`). Which variables say the number of a task: sbatch(1);
Kubernetes, "Indexed Job for Parallel Processing"; the lists of environment variables of Volcano, AWS Batch, Google
Batch, Cloud Run jobs, PBS Professional, Torque, IBM LSF, Grid Engine, Flux and OAR.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from reshard_mpi.errors import UsageError

# Names this host, if its own name will not do.
HOST_VARIABLE = "RESHARD_MPI_HOST"
# Drawn anew whenever a kernel starts: two machines never share one, the containers of one machine do.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_DIGITS = 8


class HostIdentity(NamedTuple):
    """Identifies the host of a process."""

    name: str
    kernel: str  # the random number that its kernel has drawn at its start; empty if it has none

    @classmethod
    def local(cls, environment: Mapping[str, str]) -> HostIdentity:
        """Return the identity of the host of this process."""
        try:
            kernel = _BOOT_ID.read_text().strip().replace("-", "")
        except OSError:
            kernel = ""
        return cls(host_name(environment), kernel)


def host_name(environment: Mapping[str, str]) -> str:
    """Return the name of this host: that in `RESHARD_MPI_HOST`, else its own."""
    return environment.get(HOST_VARIABLE) or os.uname().nodename


def distinct_names(identities: Sequence[HostIdentity]) -> list[str]:
    """Return a name for the host of each identity: the same for one host, and different for different hosts.

    If hosts share a name, the number that their kernels have drawn is added: `node#1a2b3c4d`.
    """
    kernels: dict[str, set[str]] = {}
    for identity in identities:
        kernels.setdefault(identity.name, set()).add(identity.kernel)
    return [
        name if len(kernels[name]) == 1 else f"{name}#{kernel[:_DIGITS] or 'unknown'}" for name, kernel in identities
    ]


# Keeps libraries from starting threads: processes share the cores already.
ONE_THREAD: Mapping[str, str] = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class ArrayVariables(NamedTuple):
    """The variables by which a runner tells a task of an array its number.

    Example: `ArrayVariables("LSF", "LSB_JOBINDEX", first=1, none="0", last="LSB_JOBINDEX_END")`.
    """

    runner: str
    number: str
    first: int = 0  # what the first task of an array is called
    none: str = ""  # the number in a job that is no array
    last: str = ""  # the variable with the number of the last task; empty if the runner has none
    size: str = ""  # the variable with how many tasks there are; empty if the runner has none


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
    where nothing says the number, runners contradict each other, or the array does not fit `count`: it has tasks beyond
    that, or the runner says another size.
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
    last, size = environ.get(runner.last, ""), environ.get(runner.size, "")
    number = int(value) - runner.first if value.isascii() and value.isdecimal() and len(value) < 10 else -1
    beyond = last.isdecimal() and int(last) - runner.first >= count
    if not 0 <= number < count or beyond or (size.isdecimal() and int(size) != count):
        told = {runner.number: value, runner.last: last, runner.size: size}
        raise UsageError(
            f"--part auto/{count}: the array of {runner.runner} has not {count} tasks",
            expected=f"{runner.number} from {runner.first} to {runner.first + count - 1}",
            got=", ".join(f"{name}={each}" for name, each in told.items() if each),
            remedy=f"submit tasks {runner.first} to {runner.first + count - 1}, or say another N: auto/N",
        )
    return number


_MAX_READ_BYTES = 1 << 20
_STOPPED = ("T", "t")
_STATES = {"R": "running", "S": "sleeping", "D": "waiting for a device", "T": "stopped", "t": "stopped by a debugger"}
_ENDED = "ended"


def read_text(path: str) -> str:
    """Return the contents of a small file in /proc. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = b""
        while part := os.read(fd, _MAX_READ_BYTES):
            data += part
    finally:
        os.close(fd)
    return data.decode(errors="replace")


def children_of(pid: int) -> list[int]:
    """Return the children of a process; none if it has ended, or the kernel does not tell."""
    try:
        return [int(child) for child in read_text(f"/proc/{pid}/task/{pid}/children").split()]
    except OSError:
        return []


def pid_state(pid: int) -> str:
    """Return the state of a process in a word or a few."""
    return _STATES.get(_state(pid), _ENDED)


def is_stopped(pid: int) -> bool:
    """Tell whether a process has been stopped (SIGSTOP, Ctrl-Z, a debugger), and does nothing until it is continued."""
    return _state(pid) in _STOPPED


def _state(pid: int) -> str:
    try:
        # The name before it may hold anything, brackets included.
        return read_text(f"/proc/{pid}/stat").rpartition(") ")[2][:1]
    except OSError:
        return ""


def pid_namespace() -> int:
    """Return the number of the PID namespace of this process; 0 if the kernel does not tell."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116 - pathlib is slow
    except OSError:
        return 0


def holders_of_lock(fd: int) -> list[int]:
    """Return the processes that hold a lock (flock) on an open file, as far as this one can see them."""
    status = os.fstat(fd)
    own_file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        lines = [line.split() for line in read_text("/proc/locks").splitlines()]
    except OSError:
        return []
    # 1: FLOCK  ADVISORY  WRITE 708 00:13:16 0 EOF; "1: -> FLOCK ..." is one that waits
    pids_by_file: dict[str, list[int]] = {words[5]: [] for words in lines if words[1] == "FLOCK"}
    for words in lines:
        if words[1] == "FLOCK" and int(words[4]) > 0:
            pids_by_file[words[5]].append(int(words[4]))
    if own_file in pids_by_file:
        return pids_by_file[own_file]
    # For some file systems the kernel names another device there than in the status of their files.
    inode = f":{status.st_ino}"
    return [pid for file, pids in pids_by_file.items() if file.endswith(inode) for pid in pids]
