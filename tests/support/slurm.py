"""A private SLURM cluster of two nodes on this machine: its own folder, key and ports, on loopback only.

The nodes are slurmd processes in UTS and mount namespaces of their own, so they differ in host name and shared memory,
and in little else: they share /tmp and the processors. What a killed MPI leaves in shared memory goes with its node.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.processes import Finished, clean_environment, processes_with
from support.slurm_setup import CONTROLLER, NODES, missing, on_host, search_path, write_configuration

_POLL_SECONDS = 0.05
_START_SECONDS = 120.0
_ATTEMPTS = 3
_COMMAND_SECONDS = 120.0
_STOP_SECONDS = 120.0
_SHOWN_CHARACTERS = 6000
# The states of a job that is going to have another one.
_NOT_ENDED = (
    *("PENDING", "CONFIGURING", "RUNNING", "SIGNALING", "COMPLETING", "SUSPENDED", "REQUEUED", "RESIZING", "STOPPED"),
    "STAGE_OUT",
)


@dataclass(frozen=True, slots=True)
class Task:
    """A job that has ended, or one task of an array. `code` is its exit code, `signal` what killed it (0: nothing)."""

    state: str
    code: int
    signal: int


class Cluster:
    """The running cluster. Every wait ends: in time, or by failing the test with what the job and the daemons said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._environment = {**clean_environment(), "SLURM_CONF": str(folder / "slurm.conf"), "PATH": search_path()}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._outputs: dict[str, Path] = {}

    def start(self) -> None:
        """Start the daemons and wait until both nodes take jobs."""
        write_configuration(self.folder)
        files = {
            name: f"munge.{name.removesuffix('-file')}" for name in ("socket", "pid-file", "log-file", "seed-file")
        }
        options = [f"--{name}={self.folder / file}" for name, file in {**files, "key-file": "munge.key"}.items()]
        self._spawn(CONTROLLER, "munged", "--foreground", *options)
        self._wait((self.folder / "munge.socket").exists, "munged")
        self._spawn(CONTROLLER, "slurmctld", "-D", "-i")
        for node in NODES:
            self._spawn(node, "slurmd", "-D", "-N", node)
        self._wait(self._all_idle, "the nodes")

    def stop(self) -> list[str]:
        """End all jobs and daemons; return what would not go and had to be killed."""
        with contextlib.suppress(subprocess.SubprocessError):
            self.command("scancel", "--full", "--user=root")
            deadline = time.monotonic() + _STOP_SECONDS
            while time.monotonic() < deadline and self._is_busy():
                time.sleep(_POLL_SECONDS)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(_STOP_SECONDS)
        left = self._processes()
        while pids := self._processes():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_SECONDS)
        for daemon in self._daemons:
            daemon.wait()
        return [f"{pid} ({command})" for pid, command in left.items()]

    def command(
        self, *argv: str | os.PathLike[str], env: Mapping[str, str] | None = None, check: bool = True
    ) -> Finished:
        """Run a command on the controller's host; what it submits goes on, so it is not for `run_command`."""
        finished = subprocess.run(
            on_host(CONTROLLER, self.folder, argv),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env={**self._environment, **(env or {})},
            cwd=self.folder,
            timeout=_COMMAND_SECONDS,
            check=check,
        )
        return Finished(tuple(map(str, argv)), finished.returncode, finished.stdout, finished.stderr)

    def submit(
        self, *command: str | os.PathLike[str], options: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> str:
        """Submit a batch script with its arguments, or `--wrap` with a command; return the job's number."""
        output = Path(tempfile.mkdtemp(dir=self.folder, prefix="output"))
        file = "%a.out" if any(option.startswith("--array") for option in options) else "job.out"
        submitted = self.command("sbatch", "--parsable", f"--output={output}/{file}", *options, *command, env=env)
        job = submitted.out.strip()
        self._outputs[job] = output
        return job

    def record_output(self, job: str, folder: Path) -> None:
        """Say where a job that a script has submitted leaves what it says: among the `.out` and `.log` files there."""
        self._outputs[job] = folder

    def wait(self, job: str, *, timeout_seconds: float = 300) -> dict[int, Task]:
        """Wait until a job has ended; return what became of it, by array task (0 where it is not an array)."""
        records: list[dict[str, str]] = []

        def has_ended() -> bool:
            records[:] = self._records(job)
            return bool(records) and all(_has_ended(record) for record in records)

        self.wait_until(job, has_ended, timeout_seconds=timeout_seconds)
        return {_task_number(record): _as_task(record) for record in records}

    def wait_until(self, job: str, condition: Callable[[], bool], *, timeout_seconds: float = 300) -> None:
        """Wait for what a job is to bring about."""
        deadline = time.monotonic() + timeout_seconds
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(
                    f"job {job} took longer than {timeout_seconds:g} seconds\n{self.account(job)}", pytrace=False
                )
            time.sleep(_POLL_SECONDS)

    def states(self, job: str) -> set[str]:
        """The states in which the tasks of a job are."""
        return {record["JobState"] for record in self._records(job)}

    def requeue(self, job: str) -> None:
        """Have a running or ended job run again."""
        self.command("scontrol", "requeue", job)
        self.start_again(job)

    def start_again(self, job: str, *, timeout_seconds: float = 300) -> None:
        """Have a job that was put back into the queue start in a second; SLURM would wait for two minutes.

        Not at once: nodes know what they must not start any more by the second in which it was. And not while a step
        of its last run still lingers, whose place the next one needs.
        """
        self.wait_until(
            job, lambda: self.states(job) == {"PENDING"} and not self._lingers(job), timeout_seconds=timeout_seconds
        )
        self.command("scontrol", "update", f"jobid={job}", "StartTime=now+1")

    def output(self, job: str, task: int | None = None) -> str:
        """What a job, or one task of an array, has written so far."""
        file = self._outputs[job.partition("_")[0]] / ("job.out" if task is None else f"{task}.out")
        return file.read_text(errors="replace") if file.exists() else ""

    def account(self, job: str) -> str:
        """Everything there is to say of a job: for a test that fails."""
        parts = {"scontrol show job": self.command("scontrol", "show", "job", job, check=False).out}
        parts |= {file.name: file.read_text(errors="replace") for file in _logs_in(self._outputs[job])}
        return _titled({**parts, **self._logs()})

    def _records(self, job: str) -> list[dict[str, str]]:
        shown = self.command("scontrol", "--oneliner", "show", "job", job).out
        return [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in shown.splitlines() if line.startswith("JobId=")]

    def _lingers(self, job: str) -> bool:
        """Tell whether a node still has a step of the job; that of an MPI may stay for seconds after the job's end."""
        titles = tuple(f"slurmstepd: [{record['JobId']}." for record in self._records(job))
        return any(command.startswith(titles) for command in self._processes().values())

    def _is_busy(self) -> bool:
        shown = self.command("scontrol", "--oneliner", "show", "job").out
        steps = [command for command in self._processes().values() if command.startswith("slurmstepd")]
        return bool(steps or re.search(rf"JobState=({'|'.join(_NOT_ENDED)})", shown))

    def _all_idle(self) -> bool:
        shown = self.command("scontrol", "--oneliner", "show", "node", check=False).out
        return re.findall(r"State=(\S+)", shown) == ["IDLE"] * len(NODES)

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not condition():
            ended = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            if ended or time.monotonic() > deadline:
                raise RuntimeError(
                    f"{what} of the SLURM cluster did not start; ended: {ended}\n{_titled(self._logs())}"
                )
            time.sleep(_POLL_SECONDS)

    def _spawn(self, host: str, program: str, *options: str) -> None:
        with (self.folder / f"{host}.{program}.log").open("wb") as log:
            command = on_host(host, self.folder, [program, *options])
            daemon = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment, cwd=self.folder
            )
        self._daemons.append(daemon)

    def _logs(self) -> dict[str, str]:
        return {file.name: file.read_text(errors="replace") for file in _logs_in(self.folder)}

    def _processes(self) -> dict[int, str]:
        """Return id and command line of every living process of the cluster: daemons, and what jobs started."""
        return processes_with(f"SLURM_CONF={self.folder / 'slurm.conf'}")


@contextlib.contextmanager
def running_cluster() -> Iterator[Cluster]:
    """Start a cluster, stop it in the end and see that nothing is left; skip where there can be none."""
    if lacking := missing():
        pytest.skip(lacking)
    for attempt in range(_ATTEMPTS):
        # The folder's name is short: a socket's path may have 107 characters.
        with tempfile.TemporaryDirectory(prefix="slurm-") as name:
            cluster = Cluster(Path(name))
            try:
                try:
                    cluster.start()
                except RuntimeError:
                    # Another program may have taken one of its ports since it was found free: others are chosen.
                    if attempt + 1 < _ATTEMPTS:
                        continue
                    raise
                yield cluster
            finally:
                left = cluster.stop()
        if left:
            pytest.fail(f"the SLURM cluster left processes behind: {', '.join(left)}", pytrace=False)
        return


def _logs_in(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.out"), *folder.glob("*.log")])


def _has_ended(record: Mapping[str, str]) -> bool:
    return record["JobState"] not in _NOT_ENDED


def _task_number(record: Mapping[str, str]) -> int:
    return int(record.get("ArrayTaskId", "0"))


def _as_task(record: Mapping[str, str]) -> Task:
    code, _, killed_by = record["ExitCode"].partition(":")
    return Task(record["JobState"], int(code), int(killed_by))


def _titled(parts: Mapping[str, str]) -> str:
    return "\n".join(f"--- {title}\n{text[-_SHOWN_CHARACTERS:]}" for title, text in parts.items())
