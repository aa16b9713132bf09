"""Control groups with a memory limit, as this machine has them: version 1 or 2, where the tests may make some."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from reshard_mpi.processes.governor import scopes
from support.processes import HANG_SECONDS

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
    hierarchy = scopes._HIERARCHIES[2 - version]
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
