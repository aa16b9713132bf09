"""What limits the memory of a process: the host, the control groups it is in, its SLURM job.

A lease must fit every scope its holder lies in. Of each scope it is known how much is in use; what the holders of
leases use is added to what is free, since their leases stand for it. What they use beyond them is in use like any other
memory.

Sources: proc(5) for the host; Linux kernel documentation, admin-guide/cgroup-v2 and cgroup-v1/memory; sbatch(1) and
srun(1), output environment variables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from reshard_mpi.processes.governor import usage
from reshard_mpi.processes.governor.usage import anonymous_bytes, resident_bytes
from reshard_mpi.processes.kernel import children_of
from reshard_mpi.units import MIB


class Scope(Protocol):
    """A set of processes with a limit on the memory of all of them.

    key: names the scope's ledger, the same in all its processes. name: for people. ceiling_bytes: what a lease can
    never exceed. most_held: how many leases there may be, None for any number.
    """

    @property
    def key(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def ceiling_bytes(self) -> int: ...

    @property
    def most_held(self) -> int | None: ...

    def allowed_bytes(self, leased_bytes: Mapping[int, int]) -> int:
        """Return how much the leases may hold now, all together.

        leased_bytes: what they hold, or will hold, by the process that does.
        """
        ...


class HostScope(NamedTuple):
    """All of the machine, or as much of it as the user gives (`memory_bytes`)."""

    total_bytes: int
    memory_bytes: int | None = None
    most_held: int | None = None
    key: str = "host"

    @classmethod
    def of(cls, memory_bytes: int | None, most_held: int | None) -> HostScope:
        """Return this machine. memory_bytes, most_held: what the user allows, None for all there is."""
        return cls(usage.total_bytes(), memory_bytes, most_held)

    @property
    def name(self) -> str:
        return "this host" if self.memory_bytes is None else "this host (--memory)"

    @property
    def ceiling_bytes(self) -> int:
        return self.total_bytes if self.memory_bytes is None else min(self.total_bytes, self.memory_bytes)

    def allowed_bytes(self, leased_bytes: Mapping[int, int]) -> int:
        there_bytes = usage.available_bytes() + _used_bytes(leased_bytes, anonymous_bytes)
        return there_bytes if self.memory_bytes is None else min(there_bytes, self.memory_bytes)


class ControlGroup(NamedTuple):
    """A control group with a memory limit. What the kernel can drop of its file cache is free."""

    folder: Path
    ceiling_bytes: int
    usage_file: str
    cache_names: tuple[str, ...]
    key: str
    name: str
    most_held: None = None

    def allowed_bytes(self, leased_bytes: Mapping[int, int]) -> int:
        try:
            used_bytes = int((self.folder / self.usage_file).read_text())
            lines = [line.split() for line in (self.folder / "memory.stat").read_text().splitlines()]
        except OSError:
            return self.ceiling_bytes  # not told, as by kernels that are emulated
        cache_bytes = sum(int(count) for name, count in lines if name in self.cache_names)
        return self.ceiling_bytes - max(0, used_bytes - cache_bytes) + _used_bytes(leased_bytes, anonymous_bytes)


class SlurmJob(NamedTuple):
    """The processes of a SLURM job on this node. SLURM adds up what is resident in each, shared or not."""

    job: str
    node: str | None
    ceiling_bytes: int
    most_held: None = None

    @property
    def key(self) -> str:
        return f"slurm-{self.job}"

    @property
    def name(self) -> str:
        return f"SLURM job {self.job}"

    def allowed_bytes(self, leased_bytes: Mapping[int, int]) -> int:
        used_bytes = usage.resident_bytes_where(self._has)
        return self.ceiling_bytes - used_bytes + _used_bytes(leased_bytes, resident_bytes)

    def _has(self, environment: Mapping[str, str]) -> bool:
        """Tell whether a process of such an environment is one of the job's on this node."""
        return environment.get("SLURM_JOB_ID") == self.job and environment.get("SLURMD_NODENAME") == self.node


class _Hierarchy(NamedTuple):
    """How a version of control groups names what matters here.

    filesystem: as mountinfo calls it. controller: what marks the line of /proc/self/cgroup.
    """

    filesystem: str
    controller: str
    limit_file: str
    usage_file: str
    cache_names: tuple[str, ...]


_HIERARCHIES = (
    _Hierarchy("cgroup2", "", "memory.max", "memory.current", ("inactive_file", "active_file")),
    _Hierarchy(
        "cgroup",
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
)


def find_scopes(
    environment: Mapping[str, str], memory_bytes: int | None, max_active: int | None, root: Path = Path("/")
) -> list[Scope]:
    """Return the scopes this process lies in, from the innermost to the host.

    memory_bytes, max_active: what the user allows on this host, None for all there is. root: where /proc is.
    """
    host = HostScope.of(memory_bytes, max_active)
    groups = [group for group in control_groups(root) if group.ceiling_bytes < host.total_bytes]
    job = slurm_job(environment)
    return [*groups, *([job] if job is not None else []), host]


def control_groups(root: Path = Path("/")) -> Iterator[ControlGroup]:
    """Yield the control groups with a memory limit that this process is in, from the innermost up."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return  # a system without them
    for hierarchy in _HIERARCHIES:
        for line in memberships:
            _, controllers, path = line.split(":", 2)
            if hierarchy.controller not in controllers.split(","):
                continue
            top, inner = _place(hierarchy, path, mounts)
            if top is None:
                continue
            top = root / top.relative_to("/")
            folder = top / inner
            for place in (folder, *folder.parents):
                group = _group(hierarchy, place, top)
                if group is not None:
                    yield group
                if place == top:
                    break


def _place(hierarchy: _Hierarchy, path: str, mounts: Iterable[str]) -> tuple[Path | None, Path]:
    """Return where the hierarchy is mounted, and where below that the control group `path` is."""
    for line in mounts:
        # 36 35 98:0 ROOT MOUNTPOINT options [optional fields] - FILESYSTEM source SUPEROPTIONS
        fields, _, more = line.partition(" - ")
        mounted_root, mount_point = fields.split()[3:5]
        filesystem, _, options = more.split(maxsplit=2)
        if filesystem != hierarchy.filesystem:
            continue
        if hierarchy.controller and hierarchy.controller not in options.split(","):
            continue
        # In a container the top of what is mounted is often the container's own group, named from outside.
        inner = Path(path)
        below = inner.relative_to(mounted_root) if inner.is_relative_to(mounted_root) else Path()
        return Path(mount_point), Path() if ".." in below.parts else below
    return None, Path()


def _group(hierarchy: _Hierarchy, folder: Path, top: Path) -> ControlGroup | None:
    try:
        limit = (folder / hierarchy.limit_file).read_text().strip()
        status = folder.stat()
    except OSError:
        return None  # the top of all has no limit
    if not limit.isdigit():
        return None  # "max"
    key = f"cgroup-{status.st_dev}-{status.st_ino}"
    name = f"control group /{folder.relative_to(top)}".rstrip(".")
    return ControlGroup(folder, int(limit), hierarchy.usage_file, hierarchy.cache_names, key, name)


def slurm_job(environment: Mapping[str, str]) -> SlurmJob | None:
    """Return the SLURM job that this process belongs to, if that has a memory limit."""
    job = environment.get("SLURM_JOB_ID", "")
    if not job.isdecimal():
        return None
    # The one that was asked for, in MiB. 0 asks for all there is.
    for per, count in (
        ("SLURM_MEM_PER_NODE", None),
        ("SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE"),
        ("SLURM_MEM_PER_GPU", "SLURM_GPUS_ON_NODE"),
    ):
        each, times = environment.get(per, ""), "1" if count is None else environment.get(count, "")
        if each.isdecimal() and times.isdecimal() and int(each):
            return SlurmJob(job, environment.get("SLURMD_NODENAME"), int(each) * int(times) * MIB)
    return None


def _used_bytes(leased_bytes: Mapping[int, int], used_by: Callable[[int], int]) -> int:
    """Return how much of its leases every process uses already, all together.

    What its children use is counted with it, as far as they have no leases of their own.
    """
    used_bytes = 0
    for pid, size_bytes in leased_bytes.items():
        children = (child for child in children_of(pid) if child not in leased_bytes)
        used_bytes += min(used_by(pid) + sum(map(used_by, children)), size_bytes)
    return used_bytes
