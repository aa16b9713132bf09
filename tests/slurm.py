"""A private SLURM cluster of two nodes on this machine: its own folder, key and ports, on loopback only.

The nodes are slurmd processes in UTS and mount namespaces of their own, so they differ in host name and shared memory,
and in little else: they share /tmp and the processors. What a killed MPI leaves in shared memory goes with its node.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import clean_environment

_CONTROLLER = "controller"
_NODES = ("node1", "node2")
_NODE_CPUS = 8  # more than there are: jobs here sleep and wait
_NODE_MEMORY_MIB = 4096
_SRUN_PORTS = 200
_CLIENTS = ("sbatch", "scancel", "scontrol", "srun")
_PROGRAMS = ("munged", "slurmctld", "slurmd", *_CLIENTS, "unshare", "mount", "hostname")

_POLL_SECONDS = 0.05
_START_SECONDS = 30.0
_COMMAND_SECONDS = 30.0
_STOP_SECONDS = 20.0
_SHOWN_CHARACTERS = 6000

_CONFIGURATION = """\
ClusterName=tests
FirstJobId={first_job}
SlurmctldHost={controller}(127.0.0.1)
SlurmctldPort={controller_port}
SrunPortRange={first_srun_port}-{last_srun_port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
TmpFS={folder}/%n
PlugStackConfig={folder}/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
# Memory is polled every second, and a job that holds more than it asked for is killed.
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
AccountingStorageType=accounting_storage/none
# There is no accounting, so ended jobs must stay where they can be asked for.
MinJobAge=86400
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
# Look at once whether a job can start, as nobody here has anything else to wait for.
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=5
NodeName=DEFAULT CPUs={cpus} RealMemory={memory_mib} State=UNKNOWN
{nodes}
PartitionName=DEFAULT Nodes=ALL MaxTime=60 OverSubscribe=NO State=UP DefMemPerCPU={default_memory_mib}
PartitionName=normal Default=YES PriorityTier=1
PartitionName=urgent PriorityTier=2
"""

# $1: host name, $2: the cluster's folder, the rest: what to run on that host.
_ON_HOST = """\
host=$1 folder=$2
shift 2
hostname "$host"
mount --bind "$folder/hosts" /etc/hosts
mount -t tmpfs -o mode=1777 shared-memory /dev/shm
if [ -d "$folder/pmix" ]; then mount --bind "$folder/pmix" "$(cat "$folder/pmix_at")"; fi
exec "$@"
"""


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
        self._environment = {
            **clean_environment(),
            "SLURM_CONF": str(folder / "slurm.conf"),
            # The commands a script names are those of the environment the tests run in.
            "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"], "/usr/sbin", "/sbin"]),
        }
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._outputs: dict[str, Path] = {}

    def start(self) -> None:
        """Start the daemons and wait until both nodes take jobs."""
        self._write_configuration()
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        files = {
            name: f"munge.{name.removesuffix('-file')}" for name in ("socket", "pid-file", "log-file", "seed-file")
        }
        options = [f"--{name}={self.folder / file}" for name, file in {**files, "key-file": key.name}.items()]
        self._spawn(_CONTROLLER, "munged", "--foreground", *options)
        self._wait((self.folder / "munge.socket").exists, "munged")
        self._spawn(_CONTROLLER, "slurmctld", "-D", "-i")
        for node in _NODES:
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
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the controller's host."""
        return subprocess.run(
            self._on_host(_CONTROLLER, *argv),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env={**self._environment, **(env or {})},
            cwd=self.folder,
            timeout=_COMMAND_SECONDS,
            check=check,
        )

    def submit(
        self,
        *command: str | os.PathLike[str],
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> str:
        """Submit a batch script with its arguments, or `--wrap` with a command; return the job's number."""
        output = Path(tempfile.mkdtemp(dir=self.folder, prefix="output"))
        file = "%a.out" if any(option.startswith("--array") for option in options) else "job.out"
        submitted = self.command("sbatch", "--parsable", f"--output={output}/{file}", *options, *command, env=env)
        job = submitted.stdout.strip()
        self._outputs[job] = output
        return job

    def record_output(self, job: str, folder: Path) -> None:
        """Say where a job that a script has submitted leaves what it says: among the `.out` and `.log` files there."""
        self._outputs[job] = folder

    def wait(self, job: str, *, timeout_seconds: float = 60) -> dict[int, Task]:
        """Wait until a job has ended; return what became of it, by array task (0 where it is not an array)."""
        self.wait_until(
            job, lambda: all(_has_ended(record) for record in self._records(job)), timeout_seconds=timeout_seconds
        )
        return {_task_number(record): _as_task(record) for record in self._records(job)}

    def wait_until(self, job: str, condition: Callable[[], bool], *, timeout_seconds: float = 60) -> None:
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

    def start_again(self, job: str, *, timeout_seconds: float = 30) -> None:
        """Have a job that was put back into the queue start in a second; SLURM would wait for two minutes.

        Not at once: nodes know what they must not start any more by the second in which it was. And not while a step
        of its last run still lingers, whose place the next one needs.
        """
        self.wait_until(
            job,
            lambda: self.states(job) == {"PENDING"} and not self._lingers(job),
            timeout_seconds=timeout_seconds,
        )
        self.command("scontrol", "update", f"jobid={job}", "StartTime=now+1")

    def output(self, job: str, task: int | None = None) -> str:
        """What a job, or one task of an array, has written so far."""
        file = self._outputs[job.partition("_")[0]] / ("job.out" if task is None else f"{task}.out")
        return file.read_text(errors="replace") if file.exists() else ""

    def account(self, job: str) -> str:
        """Everything there is to say of a job: for a test that fails."""
        parts = {"scontrol show job": self.command("scontrol", "show", "job", job, check=False).stdout}
        parts |= {file.name: file.read_text(errors="replace") for file in _logs_in(self._outputs[job])}
        return _titled({**parts, **self._logs()})

    def _records(self, job: str) -> list[dict[str, str]]:
        shown = self.command("scontrol", "--oneliner", "show", "job", job).stdout
        return [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in shown.splitlines() if line.startswith("JobId=")]

    def _lingers(self, job: str) -> bool:
        """Tell whether a node still has a step of the job; that of an MPI may stay for seconds after the job's end."""
        titles = tuple(f"slurmstepd: [{record['JobId']}." for record in self._records(job))
        return any(command.startswith(titles) for command in self._processes().values())

    def _is_busy(self) -> bool:
        shown = self.command("scontrol", "--oneliner", "show", "job").stdout
        return re.search(r"JobState=(RUNNING|COMPLETING|PENDING|SUSPENDED)", shown) is not None

    def _all_idle(self) -> bool:
        shown = self.command("scontrol", "--oneliner", "show", "node", check=False).stdout
        return re.findall(r"State=(\S+)", shown) == ["IDLE"] * len(_NODES)

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
            command = self._on_host(host, program, *options)
            daemon = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment, cwd=self.folder
            )
        self._daemons.append(daemon)

    def _on_host(self, host: str, *argv: str | os.PathLike[str]) -> list[str]:
        return [
            "unshare",
            "--uts",
            "--mount",
            "sh",
            "-e",
            "-c",
            _ON_HOST,
            "-",
            host,
            str(self.folder),
            *(os.fspath(part) for part in argv),
        ]

    def _write_configuration(self) -> None:
        self.folder.chmod(0o755)  # munge wants it so
        for name in ("state", *_NODES):
            (self.folder / name).mkdir()
        for name, text in (("plugstack.conf", ""), ("cgroup.conf", "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")):
            (self.folder / name).write_text(text)
        hosts = " ".join((_CONTROLLER, *_NODES))
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost {hosts}\n")
        controller_port, *node_ports = _free_ports(1 + len(_NODES))
        first_srun_port = _free_range(_SRUN_PORTS)
        (self.folder / "slurm.conf").write_text(
            _CONFIGURATION.format(
                controller=_CONTROLLER,
                # MPICH names what it shares after the job's number alone.
                first_job=random.randrange(1, 1_000_000) * 10,
                controller_port=controller_port,
                first_srun_port=first_srun_port,
                last_srun_port=first_srun_port + _SRUN_PORTS - 1,
                folder=self.folder,
                cpus=_NODE_CPUS,
                memory_mib=_NODE_MEMORY_MIB,
                default_memory_mib=_NODE_MEMORY_MIB // _NODE_CPUS,
                nodes="\n".join(
                    f"NodeName={node} NodeAddr=127.0.0.1 Port={port}" for node, port in zip(_NODES, node_ports)
                ),
            )
        )
        self._prepare_pmix()

    def _prepare_pmix(self) -> None:
        """Give the PMIx plugin the name it loads its library by: Debian has it only in the package for developers."""
        library = Path(f"/usr/lib/{sysconfig.get_config_var('MULTIARCH')}/libpmix.so.2").resolve()
        if library.exists():
            shutil.copytree(library.parent, self.folder / "pmix", symlinks=True)
            name = self.folder / "pmix" / "libpmix.so"
            if not name.exists():
                name.symlink_to(library.name)
            (self.folder / "pmix_at").write_text(str(library.parent))

    def _logs(self) -> dict[str, str]:
        return {file.name: file.read_text(errors="replace") for file in _logs_in(self.folder)}

    def _processes(self) -> dict[int, str]:
        """Return id and command line of every living process of the cluster: daemons, and what jobs started."""
        wanted = f"SLURM_CONF={self.folder / 'slurm.conf'}".encode()
        found = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):  # ended meanwhile
                    if wanted in (folder / "environ").read_bytes().split(b"\0"):
                        found[int(folder.name)] = (
                            (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                        )
        return found


def _missing() -> str:
    """Say what this machine lacks for a cluster; nothing if it lacks nothing."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a SLURM cluster can be started by root on Linux only"
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
    absent = [program for program in _PROGRAMS if shutil.which(program, path=path) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (Debian: slurmctld slurmd slurm-client munge)"
    if subprocess.run(["unshare", "--uts", "--mount", "true"], check=False, capture_output=True).returncode != 0:
        return "no namespaces can be made here (unshare --uts --mount)"
    return ""


@contextlib.contextmanager
def running_cluster() -> Iterator[Cluster]:
    """Start a cluster, stop it in the end and see that nothing is left; skip where there can be none."""
    if lacking := _missing():
        pytest.skip(lacking)
    # The folder's name is short: a socket's path may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="slurm-") as name:
        cluster = Cluster(Path(name))
        try:
            cluster.start()
            yield cluster
        finally:
            left = cluster.stop()
        if left:
            pytest.fail(f"the SLURM cluster left processes behind: {', '.join(left)}", pytrace=False)


def _logs_in(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.out"), *folder.glob("*.log")])


def _has_ended(record: Mapping[str, str]) -> bool:
    return record["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED")


def _task_number(record: Mapping[str, str]) -> int:
    return int(record.get("ArrayTaskId", "0"))


def _as_task(record: Mapping[str, str]) -> Task:
    code, _, killed_by = record["ExitCode"].partition(":")
    return Task(record["JobState"], int(code), int(killed_by))


def _titled(parts: Mapping[str, str]) -> str:
    return "\n".join(f"--- {title}\n{text[-_SHOWN_CHARACTERS:]}" for title, text in parts.items())


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def _free_range(count: int) -> int:
    """Return the first of `count` ports that follow each other and are free."""
    for first in range(21000, 32000, count):
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise RuntimeError(f"no {count} free ports in a row")
