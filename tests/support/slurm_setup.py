"""What a private SLURM cluster needs before it starts: its configuration, and hosts that are namespaces."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

CONTROLLER = "controller"
NODES = ("node1", "node2")
_NODE_CPUS = 8  # more than there are: jobs here sleep and wait
_NODE_MEMORY_MIB = 4096
_SRUN_PORTS = 200
# Below the ports that Linux gives to connections, of which the other tests make thousands.
_PORTS = range(20_000, 32_000)
_SYSTEM_FOLDERS = ("/usr/sbin", "/sbin")
_PROGRAMS = (
    *("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "srun"),
    *("unshare", "mount", "hostname"),
)

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


def missing() -> str:
    """Say what this machine lacks for a cluster; nothing if it lacks nothing."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a SLURM cluster can be started by root on Linux only"
    absent = [program for program in _PROGRAMS if shutil.which(program, path=search_path()) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (Debian: slurmctld slurmd slurm-client munge)"
    if subprocess.run(["unshare", "--uts", "--mount", "true"], check=False, capture_output=True).returncode != 0:
        return "no namespaces can be made here (unshare --uts --mount)"
    return ""


def search_path() -> str:
    """Return where programs are looked for: the commands a script names are those of the tests' environment."""
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"], *_SYSTEM_FOLDERS])


def on_host(host: str, folder: Path, argv: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return the command that runs `argv` on a host of the cluster in `folder`."""
    command = [os.fspath(part) for part in argv]
    return ["unshare", "--uts", "--mount", "sh", "-e", "-c", _ON_HOST, "-", host, str(folder), *command]


def write_configuration(folder: Path) -> None:
    """Fill the folder of a cluster with all that its daemons read."""
    folder.chmod(0o755)  # munge wants it so
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    for name in ("state", *NODES):
        (folder / name).mkdir()
    for name, text in (("plugstack.conf", ""), ("cgroup.conf", "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")):
        (folder / name).write_text(text)
    hosts = " ".join((CONTROLLER, *NODES))
    (folder / "hosts").write_text(f"127.0.0.1 localhost {hosts}\n")
    controller_port, *node_ports, first_srun_port = _free_range(1 + len(NODES) + _SRUN_PORTS)[: 2 + len(NODES)]
    (folder / "slurm.conf").write_text(
        _CONFIGURATION.format(
            controller=CONTROLLER,
            # MPICH names what it shares after the job's number alone.
            first_job=random.randrange(1, 1_000_000) * 10,
            controller_port=controller_port,
            first_srun_port=first_srun_port,
            last_srun_port=first_srun_port + _SRUN_PORTS - 1,
            folder=folder,
            cpus=_NODE_CPUS,
            memory_mib=_NODE_MEMORY_MIB,
            default_memory_mib=_NODE_MEMORY_MIB // _NODE_CPUS,
            nodes="\n".join(f"NodeName={node} NodeAddr=127.0.0.1 Port={port}" for node, port in zip(NODES, node_ports)),
        )
    )
    _prepare_pmix(folder)


def _prepare_pmix(folder: Path) -> None:
    """Give the PMIx plugin the name it loads its library by: Debian has it only in the package for developers."""
    library = Path(f"/usr/lib/{sysconfig.get_config_var('MULTIARCH')}/libpmix.so.2").resolve()
    if library.exists():
        shutil.copytree(library.parent, folder / "pmix", symlinks=True)
        name = folder / "pmix" / "libpmix.so"
        if not name.exists():
            name.symlink_to(library.name)
        (folder / "pmix_at").write_text(str(library.parent))


def _free_range(count: int) -> range:
    """Return `count` ports that follow each other and are free."""
    for first in random.sample(_PORTS[:-count], 100):
        ports = range(first, first + count)
        with contextlib.ExitStack() as bound, contextlib.suppress(OSError):
            for port in ports:
                bound.enter_context(socket.create_server(("127.0.0.1", port)))
            return ports
    raise RuntimeError(f"no {count} free ports in a row")
