"""The batch scripts on a real SLURM cluster: the same bytes as one process, whatever becomes of tasks meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.command_line import run_apart
from support.conversions import Conversion, make, shards, side, transform_apart
from support.launch import MPI, find_mpi
from support.slurm import Cluster, Task
from support.slurm_jobs import COMPLETED, LAUNCH, TARGETS, operands, rank_environment
from support.stand_ins import doing, refusing

pytestmark = pytest.mark.slow

ARRAY = LAUNCH / "slurm_array.sbatch"
RANKS = LAUNCH / "slurm_mpi.sbatch"
ALL_TASKS = "--array=0-7"

TWO_NODES = ("--nodes=2", "--ntasks=4")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    """A conversion to 8 targets and, as its target, what one process alone makes of it."""
    c = make(tmp_path_factory.mktemp("reference"))
    target = side(8, TARGETS)
    c = c.to(target)
    transform_apart(c, check=True)
    assert len(list(c.dst.glob("rank_*/*"))) == 8
    return c


@pytest.fixture
def c(reference: Conversion, tmp_path: Path) -> Conversion:
    """The same conversion to a folder of its own."""
    return reference.but(dst=tmp_path / "dst")


def assert_all_completed(slurm: Cluster, job: str, tasks: int) -> None:
    ended_tasks = slurm.wait(job)
    assert ended_tasks == dict.fromkeys(range(tasks), COMPLETED), slurm.account(job)


# The same bytes


@pytest.mark.parametrize(("parts", "array"), [("8", "--array=0-7%3"), ("3", "--array=0-2")])
def test_array(slurm: Cluster, reference: Conversion, c: Conversion, parts: str, array: str) -> None:
    job = slurm.submit(ARRAY, parts, *operands(c), options=[array])
    assert_all_completed(slurm, job, int(parts))
    assert shards(c.dst) == shards(reference.dst), slurm.account(job)
    assert "wrote " in slurm.output(job, 1)
    again = slurm.submit(ARRAY, parts, *operands(c), options=["--array=1"])
    assert slurm.wait(again) == {1: COMPLETED}, slurm.account(again)
    assert "wrote 0 shards" in slurm.output(again, 1)


def test_ranks_on_two_nodes(slurm: Cluster, reference: Conversion, c: Conversion, mpi: MPI) -> None:
    job = slurm.submit(RANKS, *operands(c), options=TWO_NODES, env=rank_environment(mpi))
    assert_all_completed(slurm, job, 1)
    assert shards(c.dst) == shards(reference.dst), slurm.account(job)
    assert slurm.output(job).count("wrote 8 shards") == 1


def test_srun_that_does_not_match(slurm: Cluster, c: Conversion, mpi: MPI) -> None:
    env = {**rank_environment(mpi), "SLURM_MPI_TYPE": "none"}
    job = slurm.submit(RANKS, *operands(c), options=["--ntasks=2"], env=env)
    ended = slurm.wait(job)[0]
    assert ended.state == "FAILED" and ended.code in (2, 143), slurm.account(job)  # srun ends the others with the first
    output = slurm.output(job)
    assert "the launcher does not match the MPI library" in output and "try --mpi=pmix or --mpi=pmi2" in output
    assert not c.dst.exists()


# The last task


def commit_after(slurm: Cluster, job: str, c: Conversion) -> str:
    """Submit the task that commits the target when every task of `job` has succeeded."""
    options = [f"--dependency=afterok:{job}", "--kill-on-invalid-dep=yes"]
    return slurm.submit("--wrap", f"reshard-mpi commit {c.dst}", options=options)


def test_the_script_that_a_plan_prints(slurm: Cluster, reference: Conversion, c: Conversion, tmp_path: Path) -> None:
    printed = run_apart(*c.arguments("plan", "--sbatch"), check=True)
    (tmp_path / "printed.sbatch").write_text(printed.out)
    job = slurm.submit(tmp_path / "printed.sbatch", options=[ALL_TASKS])  # said again, so that outputs are found
    last = commit_after(slurm, job, c)
    assert_all_completed(slurm, job, 8)
    assert_all_completed(slurm, last, 1)
    assert shards(c.dst) == shards(reference.dst)
    assert (c.dst / "reshard.json").read_bytes() == (reference.dst / "reshard.json").read_bytes()


def test_a_target_that_nobody_makes(slurm: Cluster, c: Conversion) -> None:
    job = slurm.submit(ARRAY, "8", *operands(c), options=["--array=0-6"])
    last = commit_after(slurm, job, c)
    assert slurm.wait(last) == {0: Task("FAILED", 4, 0)}, slurm.account(last)
    assert "1 of 8 targets are not complete: 7" in slurm.output(last)
    assert not (c.dst / "reshard.json").exists()


def test_a_task_that_fails_is_not_followed_by_the_last(slurm: Cluster, c: Conversion, tmp_path: Path) -> None:
    job = slurm.submit(ARRAY, "8", *operands(c), options=["--array=0-1"], env=refusing(tmp_path))
    last = commit_after(slurm, job, c)
    assert slurm.wait(last)[0].state == "CANCELLED", slurm.account(last)
    assert slurm.output(last) == "" and slurm.wait(job)[1] == Task("FAILED", 4, 0), slurm.account(job)


# Processes that die

FIRST_TIME = "plan.target_rank == 1 and 'SLURM_RESTART_COUNT' not in os.environ"


def dying(folder: Path) -> dict[str, str]:
    """Return the environment in which what writes target 1 dies of SIGKILL, unless its job was put back meanwhile."""
    return doing(folder, "os.kill(os.getpid(), signal.SIGKILL)", FIRST_TIME)


def test_a_task_that_is_killed(slurm: Cluster, reference: Conversion, c: Conversion, tmp_path: Path) -> None:
    job = slurm.submit(ARRAY, "8", *operands(c), options=[ALL_TASKS], env=dying(tmp_path))
    tasks = slurm.wait(job)
    assert tasks.pop(1) == Task("FAILED", 0, 9), slurm.account(job)
    assert set(tasks.values()) == {COMPLETED}, slurm.account(job)
    assert not c.written(1).exists() and len(list(c.dst.rglob("*.partial"))) == 1
    slurm.requeue(f"{job}_1")
    assert_all_completed(slurm, job, 8)
    assert shards(c.dst) == shards(reference.dst)  # nor is the dead one's partial file left


def test_a_rank_that_is_killed(slurm: Cluster, reference: Conversion, c: Conversion, tmp_path: Path, mpi: MPI) -> None:
    env = {**rank_environment(mpi), **dying(tmp_path)}
    job = slurm.submit(RANKS, *operands(c), options=TWO_NODES, env=env)
    assert slurm.wait(job)[0].state == "FAILED", slurm.account(job)
    assert not c.written(1).exists()
    slurm.requeue(job)
    assert_all_completed(slurm, job, 1)
    assert shards(c.dst) == shards(reference.dst), slurm.account(job)


# Tasks that are stopped while target 1 is written but not yet published


@dataclass(frozen=True, slots=True)
class Waiting:
    """A job that waits at that point, until it is stopped; let go, and started again, it goes on to its end."""

    job: str
    alone: bool
    hold: Path
    again: Callable[[], str]


def start_waiting(slurm: Cluster, c: Conversion, folder: Path, script: str, *options: str) -> Waiting:
    """Start an array task that makes target 1 (`task`), or two ranks that make all (`ranks`), and that wait."""
    here, hold = folder / "here", folder / "hold"
    hold.touch()
    wait = f"while os.path.exists({str(hold)!r}): time.sleep(0.02)"
    env = doing(folder, f"open({str(here)!r}, 'w').close()\n        {wait}")

    def submit() -> str:
        if script == "task":
            return slurm.submit(ARRAY, "8", *operands(c), options=["--array=1", *options], env=env)
        mpi = find_mpi("mpich") or find_mpi("openmpi")
        if mpi is None:
            pytest.skip("no MPI is installed")
        return slurm.submit(RANKS, *operands(c), options=["--ntasks=2", *options], env={**env, **rank_environment(mpi)})

    job = submit()
    slurm.wait_until(job, here.exists)
    return Waiting(job, script == "task", hold, submit)


@pytest.fixture(params=["task", "ranks"])
def waiting(request: pytest.FixtureRequest, slurm: Cluster, c: Conversion, tmp_path: Path) -> Waiting:
    return start_waiting(slurm, c, tmp_path, request.param)


def assert_nothing_half_done(c: Conversion, slurm: Cluster, waiting: Waiting) -> None:
    assert not c.written(1).exists()
    # srun, when it is signalled too, may kill ranks before they have cleaned up; the next run then does.
    if waiting.alone:
        assert not list(c.dst.rglob("*.partial")), slurm.account(waiting.job)


def assert_right(c: Conversion, reference: Conversion) -> None:
    """Check that target 1, and whatever others there are, are right, and that nothing else is there."""
    made, expected = shards(c.dst), shards(reference.dst)
    assert c.written(1).exists() and made == {name: expected[name] for name in made}


@pytest.mark.parametrize("how", ["requeued", "preempted"])
def test_a_job_that_is_put_back(
    slurm: Cluster, reference: Conversion, c: Conversion, waiting: Waiting, how: str
) -> None:
    if how == "requeued":
        slurm.command("scontrol", "requeue", waiting.job)
    else:
        urgent = slurm.submit("--wrap", "true", options=["--partition=urgent", "--nodes=2", "--exclusive"])
        assert_all_completed(slurm, urgent, 1)
    slurm.wait_until(waiting.job, lambda: slurm.states(waiting.job) == {"PENDING"})
    assert_nothing_half_done(c, slurm, waiting)
    waiting.hold.unlink()
    slurm.start_again(waiting.job)
    assert set(slurm.wait(waiting.job).values()) == {COMPLETED}, slurm.account(waiting.job)
    assert_right(c, reference)


@pytest.mark.parametrize("how", ["cancelled", "signalled"])
def test_a_job_that_is_stopped(
    slurm: Cluster, reference: Conversion, c: Conversion, waiting: Waiting, how: str
) -> None:
    # --batch is what `sbatch --signal=B:TERM@60` comes to when the time is near.
    slurm.command("scancel", *(["--batch", "--signal=TERM"] if how == "signalled" else []), waiting.job)
    (task,) = slurm.wait(waiting.job).values()
    assert task.state == {"cancelled": "CANCELLED", "signalled": "FAILED"}[how], slurm.account(waiting.job)
    assert_nothing_half_done(c, slurm, waiting)
    waiting.hold.unlink()
    again = waiting.again()
    assert set(slurm.wait(again).values()) == {COMPLETED}, slurm.account(again)
    assert_right(c, reference)


def test_a_job_whose_time_is_near(slurm: Cluster, reference: Conversion, c: Conversion, tmp_path: Path) -> None:
    # SLURM looks every 30 seconds whose time is near.
    waiting = start_waiting(slurm, c, tmp_path, "task", "--time=1", "--signal=B:TERM@60")
    assert slurm.wait(waiting.job, timeout_seconds=300) == {1: Task("FAILED", 143, 0)}, slurm.account(waiting.job)
    assert_nothing_half_done(c, slurm, waiting)
    waiting.hold.unlink()
    again = waiting.again()
    assert slurm.wait(again) == {1: COMPLETED}, slurm.account(again)
    assert_right(c, reference)
