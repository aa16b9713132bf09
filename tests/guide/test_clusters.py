"""The commands of the guide's page on clusters, word for word, on a real SLURM cluster."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from support.conversions import Conversion, make, shards, side, transform_apart
from support.launch import MPI
from support.pages import GUIDE, ROOT, block_run_by
from support.slurm import Cluster
from support.slurm_jobs import COMPLETED, TARGETS, rank_environment

pytestmark = pytest.mark.slow

PAGE = (GUIDE / "clusters.md").read_text()


@pytest.fixture
def reference(tmp_path: Path) -> Conversion:
    """A conversion of 4 ranks to 8, with the names that the page uses, and what one process makes of it."""
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


def run(slurm: Cluster, folder: Path, test: str, env: Mapping[str, str] | None = None) -> None:
    """Run the block of a test and wait for the last job that it has submitted."""
    commands = block_run_by(PAGE, test)
    finished = slurm.command("bash", "-e", "-c", f"cd {folder}/work\n{commands}", env=env)
    job = finished.out.splitlines()[-1].removeprefix("Submitted batch job ")
    assert job.isdigit(), finished
    slurm.record_output(job, folder / "work")
    tasks = slurm.wait(job)
    logs = {path.name: path.read_text() for path in (folder / "work").glob("*.*") if path.suffix in (".out", ".log")}
    assert set(tasks.values()) == {COMPLETED}, logs


def assert_converted(folder: Path, reference: Conversion) -> None:
    assert shards(folder / "work" / "out") == shards(reference.dst)
    assert (folder / "work" / "out" / "reshard.json").exists()


def test_array(slurm: Cluster, reference: Conversion, tmp_path: Path) -> None:
    run(slurm, tmp_path, "test_array")
    assert_converted(tmp_path, reference)


def test_script_of_the_plan(slurm: Cluster, reference: Conversion, tmp_path: Path) -> None:
    run(slurm, tmp_path, "test_script_of_the_plan")
    assert_converted(tmp_path, reference)


def test_mpi(slurm: Cluster, reference: Conversion, tmp_path: Path, mpi: MPI) -> None:
    run(slurm, tmp_path, "test_mpi", rank_environment(mpi))
    assert_converted(tmp_path, reference)
