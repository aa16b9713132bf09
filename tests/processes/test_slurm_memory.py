"""SLURM polls what a job's processes hold, and counts what several of them map as often: ranks stay far below."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.large_checkpoints import write_large
from support.launch import find_mpi
from support.slurm import Cluster, Task
from support.slurm_jobs import LAUNCH, rank_environment

from reshard_mpi.processes.host import ONE_THREAD
from reshard_mpi.sharding.placement import Placement
from reshard_mpi.sharding.strategy import Strategy
from reshard_mpi.text import GIB, MIB

pytestmark = pytest.mark.slow

RANKS = 4
SHAPE = (260112, 1032)  # 1 GiB of float32
# Rows become columns so narrow that every page of a source is used, and no cut falls on one: windows are at their most.
SOURCE = Strategy(8, 1, {"w": (Placement((8,), ((0,), ())),)})
TARGET = Strategy(8, 1, {"w": (Placement((8,), ((), (0,))),)})
ALLOWED_MIB = {"ckpt": 400, "hdf5": 500}
LITTLE_MIB = 300  # not enough for what four ranks need, but for two

# A conversion takes a second, and SLURM looks once a second. So every rank, with a window of its source mapped and
# used, waits for the others to come as far, and then for SLURM to look at them twice, or to
# end them.
_HOLD = """
import contextlib, os, time
from pathlib import Path
from reshard_mpi.runs import target_writer
from reshard_mpi.engine import open_files
from reshard_mpi.planning.rank_plan import Limits

map_window, fill, turns = open_files.Files.window, target_writer.write_shard, []

@contextlib.contextmanager
def window(self, part, requested_bytes):
    with map_window(self, part, requested_bytes) as view:
        yield view
        turns.append(part.length_bytes)
        if len(turns) == {window}:
            hold()

def hold():
    folder = Path({folder!r})
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    (folder / f"held_{{os.getpid()}}").write_text(status["VmRSS"].split()[0])
    deadline = time.monotonic() + 120
    while len(list(folder.glob("held_*"))) < {ranks} and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep({held_seconds})

open_files.Files.window = window
"""

# The same, with nothing to bound what is mapped at once.
_UNBOUNDED = """
def unbounded(target, **more):
    limits = Limits(buffer_bytes=1 << 31, window_bytes=1 << 31)
    return fill(target, **{**more, "limits": limits})

target_writer.write_shard = unbounded
"""


@pytest.mark.parametrize("kind", ALLOWED_MIB)
def test_ranks_survive_the_polling(slurm: Cluster, tmp_path: Path, kind: str) -> None:
    job, task = run(slurm, tmp_path, kind, ALLOWED_MIB[kind])
    assert task == Task("COMPLETED", 0, 0), slurm.account(job)
    held = resident_mib(tmp_path)
    print(f"{kind}: {len(held)} ranks held {sum(held):.0f} MiB")
    assert len(held) == RANKS and "waiting for memory" not in slurm.output(job), slurm.account(job)
    assert_written(tmp_path)


def test_ranks_that_do_not_fit_wait(slurm: Cluster, tmp_path: Path) -> None:
    job, task = run(slurm, tmp_path, "ckpt", LITTLE_MIB, together=2)
    assert task == Task("COMPLETED", 0, 0), slurm.account(job)
    assert "that SLURM job" in slurm.output(job), slurm.account(job)
    assert_written(tmp_path)


def test_what_is_unbounded_does_not_survive(slurm: Cluster, tmp_path: Path) -> None:
    job, task = run(slurm, tmp_path, "ckpt", ALLOWED_MIB["ckpt"], bounded=False)
    assert task.state in ("FAILED", "OUT_OF_MEMORY"), slurm.account(job)
    assert "exceeded memory limit" in slurm.output(job), slurm.account(job)
    assert not list((tmp_path / "dst").glob("rank_*/checkpoint_*"))


def run(
    slurm: Cluster, folder: Path, kind: str, allowed_mib: int, *, together: int = RANKS, bounded: bool = True
) -> tuple[str, Task]:
    """Convert on one node; return the job and its end. together: how many ranks wait for each other."""
    mpi = find_mpi("mpich")
    if mpi is None:
        pytest.skip("mpich is not installed")
    made = write_large(folder, kind, SOURCE, TARGET, SHAPE, lambda *_: b"")  # how much is moved matters, not what
    (folder / "stand_in").mkdir()
    window, held_seconds = (5, 2.5) if bounded else (1, 120)
    text = _HOLD.format(window=window, ranks=together, folder=str(folder), held_seconds=held_seconds)
    text += "" if bounded else _UNBOUNDED
    (folder / "stand_in" / "sitecustomize.py").write_text(text)
    path = os.pathsep.join([str(folder / "stand_in"), os.environ.get("PYTHONPATH", "")]).rstrip(":")
    job = slurm.submit(
        LAUNCH / "slurm_mpi.sbatch",
        made.src,
        folder / "dst",
        *made.options(),
        options=["--nodes=1", f"--ntasks={RANKS}", f"--mem={allowed_mib}M"],
        env={**rank_environment(mpi), **ONE_THREAD, "PYTHONPATH": path},
    )
    return job, slurm.wait(job)[0]


def assert_written(folder: Path) -> None:
    sizes = [path.stat().st_size for path in (folder / "dst").glob("rank_*/checkpoint_*")]
    assert len(sizes) == TARGET.world_size and sum(sizes) >= GIB


def resident_mib(folder: Path) -> list[float]:
    """Return what every rank held while it waited."""
    return [int(file.read_text()) * 1024 / MIB for file in folder.glob("held_*")]
