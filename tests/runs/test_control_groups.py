"""Many tasks in a control group: none is killed for want of memory, and all targets are made."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.command_line import COMMAND
from support.examples import one_at_a_time
from support.large_checkpoints import SMALL, TARGETS, LargeCheckpoint, write_many
from support.processes import HANG_SECONDS

from reshard_mpi.processes import memory_scopes
from reshard_mpi.text import MIB

pytestmark = pytest.mark.slow

TIMEOUT_SECONDS = 900


def tasks(group: Group, folder: Path, made: LargeCheckpoint, count: int, *options: str) -> list[tuple[int, str]]:
    """Start so many tasks at once, each for one target in one of several folders; return how they have ended."""
    started: list[subprocess.Popen[bytes]] = []
    for number in range(count):
        target = folder / f"out_{number // TARGETS}"
        command = [
            *COMMAND,
            "transform",
            made.src,
            target,
            *made.options(),
            "--rank",
            str(number % TARGETS),
            "--jobs",
            "1",
            *options,
        ]
        started.append(start(group, folder, command, folder / f"output_{number}"))
    return [
        (process.wait(TIMEOUT_SECONDS), (folder / f"output_{index}").read_text())
        for index, process in enumerate(started)
    ]


def start(group: Group, folder: Path, command: Sequence[str | Path], output: Path) -> subprocess.Popen[bytes]:
    with output.open("wb") as stream:
        environment = {**os.environ, "RESHARD_MPI_STATE_DIR": str(folder / "state")}
        environment.pop("RESHARD_MPI_MEMORY", None)
        inside = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', group.folder / "cgroup.procs", *command]
        return subprocess.Popen(inside, stdout=stream, stderr=stream, env=environment)


def written(folder: Path) -> int:
    return len(list(folder.glob("out_*/rank_*/checkpoint_*")))


# What takes minutes is done at full size only where that is asked for.
LARGE = [("ckpt", 3_000, 6, 160), ("hdf5", 1_500, 4, 192)]
if os.environ.get("RESHARD_MPI_TEST_FULL_SIZE"):
    LARGE = [("ckpt", 20_001, 8, 512), ("hdf5", 20_001, 8, 512)]


@pytest.mark.parametrize(("tried", "version"), one_at_a_time([("ckpt", 17, 16, 320), *LARGE], [1, 2]), ids=str)
def test_no_task_is_killed(tmp_path: Path, tried: tuple[str, int, int, int], version: int) -> None:
    kind, tensors, count, limit_mib = tried
    with group_of(version, limit_mib * MIB) as group:
        made = write_many(tmp_path / "made", kind, tensors, SMALL)
        ended = tasks(group, tmp_path, made, count)
        assert {code for code, _ in ended} == {0}, [output for code, output in ended if code]
        assert group.kills == 0
        assert written(tmp_path) == count
        print(f"{count} tasks of {tensors} tensors: peak {group.peak_bytes / MIB:.0f} of {limit_mib} MiB")


@pytest.mark.parametrize("version", [1, 2])
def test_the_same_without_the_governor_is_killed(tmp_path: Path, version: int) -> None:
    with group_of(version, 128 * MIB) as group:
        made = write_many(tmp_path / "made", "ckpt", 4_000, SMALL)
        ended = tasks(group, tmp_path, made, 8, "--memory", "unlimited")
        assert -9 in {code for code, _ in ended} and group.kills > 0


@pytest.mark.parametrize(("version", "jobs"), [(1, 8), (2, 2)])
def test_workers_of_one_run(tmp_path: Path, version: int, jobs: int) -> None:
    """They wait for each other, so none may keep memory that another one waits for."""
    with group_of(version, 224 * MIB) as group:
        made = write_many(tmp_path / "made", "ckpt", 1_000, SMALL)
        command = [
            *COMMAND,
            "transform",
            made.src,
            tmp_path / "out_0",
            *made.options(),
            "--jobs",
            str(jobs),
            "--verify",
        ]
        code = start(group, tmp_path, command, tmp_path / "output").wait(TIMEOUT_SECONDS)
        assert (code, group.kills) == (0, 0), (tmp_path / "output").read_text()
        assert written(tmp_path) == TARGETS
        print(f"{jobs} workers: peak {group.peak_bytes / MIB:.0f} of 224 MiB")


_TOPS = {1: Path("/sys/fs/cgroup/memory"), 2: Path("/sys/fs/cgroup")}


@dataclass(frozen=True, slots=True)
class Group:
    """A control group of this test's own."""

    folder: Path
    version: int

    @property
    def kills(self) -> int:
        """How many processes the kernel has killed for want of memory."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        lines = [line.split() for line in (self.folder / name).read_text().splitlines()]
        return next(int(count) for key, count in lines if key == "oom_kill")

    @property
    def peak_bytes(self) -> int:
        """The most that was in use; 0 where the kernel does not say."""
        path = self.folder / ("memory.max_usage_in_bytes" if self.version == 1 else "memory.peak")
        return int(path.read_text()) if path.exists() else 0

    def empty(self) -> None:
        """Kill what is left in the group, and remove it."""
        deadline = time.monotonic() + HANG_SECONDS
        while True:
            for pid in (self.folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            try:
                self.folder.rmdir()
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


@contextlib.contextmanager
def group_of(version: int, limit_bytes: int) -> Iterator[Group]:
    """Make a control group that allows so much memory and no swap; skip the test where that cannot be."""
    top = _TOPS[version]
    hierarchy = memory_scopes._HIERARCHIES[2 - version]
    folder = top / f"reshard_mpi_test_{uuid.uuid4().hex[:12]}"
    controllers = top / "cgroup.controllers"
    if version == 2 and "memory" not in (controllers.read_text().split() if controllers.exists() else ()):
        pytest.skip("no control groups of version 2 with memory limits here")
    if version == 1 and not (top / hierarchy.limit_file).exists():
        pytest.skip("no control groups of version 1 with memory limits here")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"control groups cannot be made here: {error}")
    group = Group(folder, version)
    try:
        if not (folder / hierarchy.limit_file).exists():
            pytest.skip("groups at the top have no memory limits here")
        (folder / hierarchy.limit_file).write_text(str(limit_bytes))
        for name in ("memory.memsw.limit_in_bytes", "memory.swap.max"):
            with contextlib.suppress(OSError):  # a kernel that counts no swap, or a machine that has none
                (folder / name).write_text(str(limit_bytes if version == 1 else 0))
        yield group
    finally:
        group.empty()
