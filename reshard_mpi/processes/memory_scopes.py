"""Measure what limits memory: host, control groups, SLURM job (`Scope`).

A lease must fit every scope of its holder. What a scope allows its leases is the memory that is free, and what the
holders of leases use already, up to their leases. What they use beyond them is in use like any other memory.

Sources: proc(5) for the host; Linux kernel documentation, admin-guide/cgroup-v2 and cgroup-v1/memory; sbatch(1) and
srun(1), output environment variables.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from reshard_mpi.processes.host import children_of
from reshard_mpi.text import MIB

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def prepare() -> None:
    """Load modules now that the first question would load."""
    import psutil  # noqa: F401


def total_bytes() -> int:
    """Return the memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES


def unused_bytes() -> int:
    """Return the memory of this machine that nothing uses, not even for files that could be read again."""
    return os.sysconf("SC_AVPHYS_PAGES") * _PAGE_BYTES


def available_bytes() -> int:
    """Return the memory of this machine that is available without swapping."""
    import psutil

    return int(psutil.virtual_memory().available)


def anonymous_bytes(pid: int) -> int:
    """Return the resident memory of a process that is no file cache; 0 if it has ended."""
    import psutil

    with contextlib.suppress(psutil.Error):
        memory = psutil.Process(pid).memory_info()
        return max(0, memory.rss - memory.shared)
    return 0


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process, mapped files included; 0 if it has ended."""
    import psutil

    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return 0


def resident_bytes_where(is_of: Callable[[Mapping[str, str]], bool]) -> int:
    """Return the resident memory of all processes whose environment, as it was at their start, `is_of` accepts."""
    import psutil

    used_bytes = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if is_of(process.environ()):
                used_bytes += process.memory_info().rss
    return used_bytes


class Scope(Protocol):
    """A set of processes with a limit on their memory together.

    Attributes:
        key: the name of the scope's ledger, the same in all its processes.
        name: for people.
        ceiling_bytes: the largest lease that is possible.
        max_active: how many leases there may be, None for any number.
    """

    @property
    def key(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def ceiling_bytes(self) -> int: ...

    @property
    def max_active(self) -> int | None: ...

    def certain_bytes(self) -> int:
        """Return how much all leases may hold together in any case, as far as that is known at once."""
        ...

    def allowed_bytes(self, leased_bytes: Mapping[int, int]) -> int:
        """Return how much all leases may hold together now.

        Args:
            leased_bytes: by process, what its leases hold or will hold.
        """
        ...


class HostScope(NamedTuple):
    """The whole machine, or as much of it as the user allows (`memory_bytes`)."""

    total_bytes: int
    memory_bytes: int | None = None
    max_active: int | None = None
    key: str = "host"

    @classmethod
    def of(cls, memory_bytes: int | None, max_active: int | None) -> HostScope:
        """Return this machine. memory_bytes, max_active: the user's limits, None for none."""
        return cls(total_bytes(), memory_bytes, max_active)

    @property
    def name(self) -> str:
        return "this host" if self.memory_bytes is None else "this host (--memory)"

    @property
    def ceiling_bytes(self) -> int:
        return self.total_bytes if self.memory_bytes is None else min(self.total_bytes, self.memory_bytes)

    def certain_bytes(self) -> int:
        return min(unused_bytes() // 2, self.ceiling_bytes)  # the kernel keeps a part of it for itself

    def allowed_bytes(self, leased_bytes: Mapping[int, int]) -> int:
        free_bytes = available_bytes() + _used_bytes(leased_bytes, anonymous_bytes)
        return free_bytes if self.memory_bytes is None else min(free_bytes, self.memory_bytes)


class ControlGroup(NamedTuple):
    """A control group with a memory limit. File cache that the kernel can drop counts as free."""

    folder: Path
    ceiling_bytes: int
    usage_file: str
    cache_names: tuple[str, ...]
    key: str
    name: str
    max_active: None = None

    def certain_bytes(self) -> int:
        free_bytes = self._free_bytes()
        return self.ceiling_bytes if free_bytes is None else free_bytes

    def allowed_bytes(self, leased_bytes: Mapping[int, int]) -> int:
        free_bytes = self._free_bytes()
        return self.ceiling_bytes if free_bytes is None else free_bytes + _used_bytes(leased_bytes, anonymous_bytes)

    def _free_bytes(self) -> int | None:
        """Return how much nothing uses; None if that is unknown, as with kernels that are emulated."""
        try:
            used_bytes = int((self.folder / self.usage_file).read_text())
            lines = [line.split() for line in (self.folder / "memory.stat").read_text().splitlines()]
        except OSError:
            return None
        cache_bytes = sum(int(count) for name, count in lines if name in self.cache_names)
        return self.ceiling_bytes - max(0, used_bytes - cache_bytes)


class SlurmJob(NamedTuple):
    """The processes of a SLURM job on this node. SLURM adds up the resident memory of each, shared or not."""

    job: str
    node: str | None
    ceiling_bytes: int
    max_active: None = None

    @property
    def key(self) -> str:
        return f"slurm-{self.job}"

    @property
    def name(self) -> str:
        return f"SLURM job {self.job}"

    def certain_bytes(self) -> int:
        return 0

    def allowed_bytes(self, leased_bytes: Mapping[int, int]) -> int:
        used_bytes = resident_bytes_where(self._has)
        return self.ceiling_bytes - used_bytes + _used_bytes(leased_bytes, resident_bytes)

    def _has(self, environment: Mapping[str, str]) -> bool:
        """Tell whether a process with this environment belongs to the job and runs on this node."""
        return environment.get("SLURM_JOB_ID") == self.job and environment.get("SLURMD_NODENAME") == self.node


class _Hierarchy(NamedTuple):
    """The names that a version of control groups has for its files and values."""

    filesystem: str  # its name in mountinfo
    controller: str  # its name in /proc/self/cgroup
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
    """Return the scopes of this process, from the innermost to the host.

    Args:
        memory_bytes, max_active: what the user allows on this host, None for no limit.
        root: the folder that holds /proc.
    """
    host = HostScope.of(memory_bytes, max_active)
    groups = [group for group in control_groups(root) if group.ceiling_bytes < host.total_bytes]
    job = slurm_job(environment)
    return [*groups, *([job] if job is not None else []), host]


def control_groups(root: Path) -> Iterator[ControlGroup]:
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
            mount_point, inner = _mounted(hierarchy, path, mounts)
            if mount_point is None:
                continue
            top = root / mount_point.relative_to("/")
            for folder in (top / inner, *(top / parent for parent in inner.parents)):
                group = _group(hierarchy, folder, top)
                if group is not None:
                    yield group


def _mounted(hierarchy: _Hierarchy, path: str, mounts: Iterable[str]) -> tuple[Path | None, Path]:
    """Return where the hierarchy is mounted, None if it is not, and the relative path of the control group `path`."""
    for line in mounts:
        # 36 35 98:0 ROOT MOUNTPOINT options [optional fields] - FILESYSTEM source SUPEROPTIONS
        fields, _, more = line.partition(" - ")
        mounted_root, mount_point = fields.split()[3:5]
        filesystem, _, options = more.split(maxsplit=2)
        if filesystem != hierarchy.filesystem:
            continue
        if hierarchy.controller and hierarchy.controller not in options.split(","):
            continue
        # In a container the root of the mount is often the container's own group, by its name outside.
        inner = Path(path)
        below = inner.relative_to(mounted_root) if inner.is_relative_to(mounted_root) else Path()
        return Path(mount_point), Path() if ".." in below.parts else below
    return None, Path()


def _group(hierarchy: _Hierarchy, folder: Path, top: Path) -> ControlGroup | None:
    try:
        limit = (folder / hierarchy.limit_file).read_text().strip()
        status = folder.stat()
    except OSError:
        return None  # the root group has no limit
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
    # What the job was submitted with, in MiB; 0 is no limit.
    for size_name, count_name in (
        ("SLURM_MEM_PER_NODE", None),
        ("SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE"),
        ("SLURM_MEM_PER_GPU", "SLURM_GPUS_ON_NODE"),
    ):
        size_mib = environment.get(size_name, "")
        count = "1" if count_name is None else environment.get(count_name, "")
        if size_mib.isdecimal() and count.isdecimal() and int(size_mib):
            return SlurmJob(job, environment.get("SLURMD_NODENAME"), int(size_mib) * int(count) * MIB)
    return None


def _used_bytes(leased_bytes: Mapping[int, int], used_by: Callable[[int], int]) -> int:
    """Return how much memory of their leases the processes use already, all together.

    The memory of children without leases of their own is counted as that of their parent.
    """
    used_bytes = 0
    for pid, size_bytes in leased_bytes.items():
        children = (child for child in children_of(pid) if child not in leased_bytes)
        used_bytes += min(used_by(pid) + sum(map(used_by, children)), size_bytes)
    return used_bytes
