"""What limits memory: the host, control groups (in made-up trees), a SLURM job."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.processes import run_command

from reshard_mpi.processes import memory_scopes
from reshard_mpi.processes.host import children_of
from reshard_mpi.processes.memory_scopes import (
    HostScope,
    SlurmJob,
    anonymous_bytes,
    control_groups,
    find_scopes,
    resident_bytes,
    slurm_job,
)
from reshard_mpi.text import MIB

# As the kernel says it of a process in a SLURM step, with version 2 and with version 1.
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "36 32 0:31 / /sys/fs/cgroup/memory rw,nosuid shared:14 - cgroup cgroup rw,memory"
CPU_MOUNT = "37 32 0:32 / /sys/fs/cgroup/cpu rw,nosuid shared:15 - cgroup cgroup rw,cpu,cpuacct"


def used_by_us() -> int:
    """Return what this process uses, with those that it has started, as to read HDF5 files of others."""
    return sum(map(anonymous_bytes, (os.getpid(), *children_of(os.getpid()))))


def tree(root: Path, membership: str, mounts: list[str], files: dict[str, str]) -> Path:
    """Make a tree in which this process is in `membership`; return it."""
    for name, text in {
        "proc/self/cgroup": membership,
        "proc/self/mountinfo": "".join(f"{line}\n" for line in mounts),
        **files,
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(folder: str, limit: str, current: int, inactive: int = 0, active: int = 0) -> dict[str, str]:
    stat = (
        f"anon 7\nfile {inactive + active}\nshmem 5\ninactive_anon 3\ninactive_file {inactive}\nactive_file {active}\n"
    )
    base = f"sys/fs/cgroup/{folder}/"
    return {base + "memory.max": f"{limit}\n", base + "memory.current": f"{current}\n", base + "memory.stat": stat}


def v1(folder: str, limit: int, usage: int, inactive: int = 0, active: int = 0) -> dict[str, str]:
    base = f"sys/fs/cgroup/memory/{folder}/"
    stat = f"cache 9\ninactive_file 1\nactive_file 1\ntotal_inactive_file {inactive}\ntotal_active_file {active}\n"
    return {
        base + "memory.limit_in_bytes": f"{limit}\n",
        base + "memory.usage_in_bytes": f"{usage}\n",
        base + "memory.stat": stat,
    }


def test_version_2_up_the_tree(tmp_path: Path) -> None:
    files = {
        **v2("slurm/job_7/step_0", "max", 50),
        **v2("slurm/job_7", "1000", 700, inactive=300, active=100),
        **v2("slurm", "5000", 900),
    }
    root = tree(tmp_path, "0::/slurm/job_7/step_0\n", [CPU_MOUNT, V2_MOUNT], files)
    job, slurm = control_groups(root)
    assert (job.name, job.ceiling_bytes) == ("control group /slurm/job_7", 1000)
    assert (slurm.name, slurm.ceiling_bytes) == ("control group /slurm", 5000)
    assert job.allowed_bytes({}) == 1000 - (700 - 400)
    assert slurm.allowed_bytes({}) == 4100
    assert job.key != slurm.key


def test_version_1_up_the_tree(tmp_path: Path) -> None:
    files = {**v1("a/b", 1000, 700, 300, 100), **v1("a", (1 << 63) - 4096, 800), **v1("", (1 << 63) - 4096, 900)}
    root = tree(tmp_path, "9:cpu,cpuacct:/x\n4:memory:/a/b\n0::/\n", [CPU_MOUNT, V1_MOUNT], files)
    groups = list(control_groups(root))
    assert [group.ceiling_bytes for group in groups] == [1000, (1 << 63) - 4096, (1 << 63) - 4096]
    assert groups[0].allowed_bytes({}) == 700
    # What is no limit takes no part.
    assert [scope.name for scope in find_scopes({}, None, None, root)] == ["control group /a/b", "this host"]


def test_both_versions_at_once(tmp_path: Path) -> None:
    files = {**v1("a", 1000, 0), **v2("unified/b", "2000", 0)}
    unified = V2_MOUNT.replace("/sys/fs/cgroup rw", "/sys/fs/cgroup/unified rw")
    root = tree(tmp_path, "4:memory:/a\n0::/b\n", [V1_MOUNT, unified], files)
    assert [group.ceiling_bytes for group in control_groups(root)] == [2000, 1000]


def test_what_holders_use_is_allowed_again(tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/a\n", [V2_MOUNT], v2("a", str(1 << 40), 500))
    (group,) = control_groups(root)
    own = os.getpid()
    used_bytes = group.allowed_bytes({own: 1 << 40}) - ((1 << 40) - 500)
    assert used_bytes == pytest.approx(used_by_us(), abs=8 * MIB)


@pytest.mark.parametrize(
    ("membership", "mount_root"),
    [("/docker/abc/inner", "/docker/abc"), ("/inner", "/"), ("/kubepods/x", "/docker/abc"), ("/../../x", "/")],
)
def test_in_a_container(tmp_path: Path, membership: str, mount_root: str) -> None:
    """Its own group is the top of what it sees, whatever that is called outside."""
    mount = V2_MOUNT.replace(" / /sys", f" {mount_root} /sys")
    files = {**v2("inner", "100", 0), **v2(".", "200", 0)}
    limits = [group.ceiling_bytes for group in control_groups(tree(tmp_path, f"0::{membership}\n", [mount], files))]
    assert limits == ([100, 200] if "inner" in membership else [200])


def test_a_group_of_which_is_not_known_what_is_in_use(tmp_path: Path) -> None:
    """As where the kernel is a stand-in that has no memory.stat: leases alone are counted then."""
    root = tree(tmp_path, "0::/a\n", [V2_MOUNT], v2("a", "1000", 700))
    (group,) = control_groups(root)
    (group.folder / "memory.stat").unlink()
    assert group.allowed_bytes({}) == group.allowed_bytes({os.getpid(): 1 << 40}) == group.certain_bytes() == 1000


def test_without_control_groups(tmp_path: Path) -> None:
    assert list(control_groups(tmp_path)) == []
    assert list(control_groups(tree(tmp_path, "0::/gone\n", [V2_MOUNT], {}))) == []


def test_of_this_machine() -> None:
    """Whatever there is, it can be read, and the host comes last."""
    *groups, host = find_scopes({}, None, None)
    assert host.name == "this host" and host.ceiling_bytes == psutil.virtual_memory().total
    assert all(group.ceiling_bytes < host.ceiling_bytes for group in groups)
    assert 0 < host.allowed_bytes({os.getpid(): 64 * MIB}) <= host.ceiling_bytes


def test_host_is_what_is_free_and_what_holders_use_or_what_the_user_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.getpid()
    monkeypatch.setattr(memory_scopes, "available_bytes", lambda: 1000)
    monkeypatch.setattr(memory_scopes, "total_bytes", lambda: 1 << 40)
    assert HostScope.of(None, None).allowed_bytes({}) == 1000
    used_bytes = HostScope.of(None, None).allowed_bytes({own: 1 << 40}) - 1000
    assert used_bytes == pytest.approx(used_by_us(), abs=8 * MIB) and used_bytes > MIB
    assert HostScope.of(600, None).allowed_bytes({own: 1 << 40}) == 600
    assert HostScope.of(600, None).ceiling_bytes == 600
    assert HostScope.of(1 << 50, None).ceiling_bytes == 1 << 40


def test_what_is_certain_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told without a look at any process, and never more than what is allowed after such a look."""
    own = {os.getpid(): 64 * MIB}
    groups = control_groups(tree(tmp_path, "0::/a\n", [V2_MOUNT], v2("a", "1000", 700, inactive=300)))
    for scope in (*groups, HostScope.of(None, None), HostScope.of(64 * MIB, None), SlurmJob("none", None, 1000)):
        assert 0 <= scope.certain_bytes() <= scope.allowed_bytes(own)
    assert HostScope.of(600, None).certain_bytes() == 600
    monkeypatch.setattr(memory_scopes, "unused_bytes", lambda: 1000)
    assert HostScope.of(None, None).certain_bytes() == 500


def test_what_a_process_uses_beyond_its_lease_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """As what a program held already that calls the functions of this package: no lease stands for it."""
    own = os.getpid()
    monkeypatch.setattr(memory_scopes, "available_bytes", lambda: 1000)
    monkeypatch.setattr(memory_scopes, "total_bytes", lambda: 1 << 40)
    assert HostScope.of(None, None).allowed_bytes({own: MIB}) == 1000 + MIB
    job = SlurmJob(f"test-{own}", None, 100 * MIB)
    assert job.allowed_bytes({own: MIB}) == 101 * MIB


def test_processes_that_have_ended_use_nothing() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert anonymous_bytes(child.pid) == resident_bytes(child.pid) == 0


@pytest.mark.parametrize(
    ("environment", "limit_mib"),
    [
        ({"SLURM_MEM_PER_NODE": "400"}, 400),
        ({"SLURM_MEM_PER_CPU": "100", "SLURM_CPUS_ON_NODE": "3"}, 300),
        ({"SLURM_MEM_PER_GPU": "100", "SLURM_GPUS_ON_NODE": "2"}, 200),
        ({"SLURM_MEM_PER_NODE": "0"}, None),  # all there is
        ({"SLURM_MEM_PER_CPU": "100"}, None),
        ({"SLURM_MEM_PER_NODE": "\u00b2"}, None),
        ({"SLURM_MEM_PER_NODE": "400", "SLURM_JOB_ID": "../17"}, None),
        ({}, None),
    ],
)
def test_limit_of_a_slurm_job(environment: dict[str, str], limit_mib: int | None) -> None:
    job = slurm_job({"SLURM_JOB_ID": "17", **environment})
    assert (job and job.ceiling_bytes) == (limit_mib and limit_mib * MIB)
    assert slurm_job({**environment, "SLURM_JOB_ID": ""}) is None


@pytest.mark.slow
def test_use_of_a_slurm_job() -> None:
    """All processes of the job count on this node; those of others, and of its other nodes, do not."""
    environment = {"SLURM_JOB_ID": str((1 << 40) + os.getpid()), "SLURMD_NODENAME": "a", "SLURM_MEM_PER_NODE": "100000"}
    job = slurm_job(environment)
    assert job is not None
    code = f"x = b'1' * {64 * MIB}; print(flush=True); input()"
    others = ({"SLURM_JOB_ID": "other"}, {"SLURMD_NODENAME": "b"})
    started = []
    for changes in ({}, *others):
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", code],
                env={**os.environ, **environment, **changes},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        )
    try:
        for process in started:
            assert process.stdout is not None and process.stdout.readline()
        used_bytes = job.ceiling_bytes - job.allowed_bytes({})
        assert 64 * MIB < used_bytes < 2 * 64 * MIB
        assert job.allowed_bytes({started[0].pid: 1 << 40}) == job.ceiling_bytes
    finally:
        for process in started:
            process.communicate(b"\n")


@pytest.mark.skipif(shutil.which("unshare") is None or os.geteuid() != 0, reason="unshare, as root")
def test_pid_namespaces_have_names_of_their_own() -> None:
    code = "from reshard_mpi.processes.host import pid_namespace as n; print(n())"
    names = {
        run_command([*prefix, sys.executable, "-c", code], check=True).out
        for prefix in ([], ["unshare", "--pid", "--fork", "--mount-proc"])
    }
    assert len(names) == 2
