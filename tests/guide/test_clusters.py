"""The commands of the README's section "On a cluster", word for word, on a real SLURM cluster."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.conversions import Conversion, make, shards, side, transform_apart
from support.launch import MPI
from support.slurm import Cluster
from support.slurm_jobs import COMPLETED, TARGETS, rank_environment

ROOT = Path(__file__).parents[2]


def commands(mark: str) -> str:
    """Return the block of commands that the README marks so."""
    match = re.search(rf"<!-- cluster:{mark} -->\n```sh\n(.*?)```\n", (ROOT / "README.md").read_text(), re.DOTALL)
    assert match is not None
    return match[1]


@pytest.fixture
def reference(tmp_path: Path) -> Conversion:
    """A conversion of 4 ranks to 8, with the names that the README uses, and what one process makes of it."""
    c = make(tmp_path / "made")
    target = side(8, TARGETS)
    c = c.to(target)
    transform_apart(c, check=True)
    work = tmp_path / "work"
    work.mkdir()
    assert c.src_strategy is not None and c.dst_strategy is not None
    for name, path in {
        "ckpt": c.src,
        "src_strategy.ckpt": c.src_strategy,
        "dst_strategy.ckpt": c.dst_strategy,
        "launch": ROOT / "launch",
    }.items():
        (work / name).symlink_to(path)
    return c


def run(slurm: Cluster, folder: Path, mark: str, env: Mapping[str, str] | None = None) -> list[str]:
    """Run a block and wait for the last job it has submitted; return what the block printed."""
    finished = slurm.command("bash", "-e", "-c", f"cd {folder}/work\n{commands(mark)}", env=env)
    printed = finished.out.splitlines()
    job = printed[-1].removeprefix("Submitted batch job ")
    assert job.isdigit(), finished
    slurm.record_output(job, folder / "work")
    tasks = slurm.wait(job)
    logs = {path.name: path.read_text() for path in (folder / "work").glob("*.*") if path.suffix in (".out", ".log")}
    assert set(tasks.values()) == {COMPLETED}, logs
    return printed


def assert_converted(folder: Path, reference: Conversion) -> None:
    assert shards(folder / "work" / "out") == shards(reference.dst)
    assert (folder / "work" / "out" / "reshard.json").exists()


@pytest.mark.parametrize("mark", ["array", "plan"])
def test_array(slurm: Cluster, reference: Conversion, tmp_path: Path, mark: str) -> None:
    run(slurm, tmp_path, mark)
    assert_converted(tmp_path, reference)


def test_mpi(slurm: Cluster, reference: Conversion, tmp_path: Path, mpi: MPI) -> None:
    run(slurm, tmp_path, "mpi", rank_environment(mpi))
    assert_converted(tmp_path, reference)


def test_governor(slurm: Cluster, tmp_path: Path) -> None:
    finished = slurm.command("bash", "-e", "-c", commands("governor"))
    assert finished.out.startswith("this host: 0 leases hold 0 B of ")
