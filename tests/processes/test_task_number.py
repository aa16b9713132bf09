"""`--part auto/N`: the number of a task is what its runner says, or the run is refused."""

from __future__ import annotations

import pytest
from support.command_line import refused

import reshard_mpi
from reshard_mpi.errors import UsageError
from reshard_mpi.options import TargetShare, read_part
from reshard_mpi.processes.host import RUNNERS, ArrayVariables, task_number


@pytest.mark.parametrize("runner", RUNNERS, ids=lambda runner: runner.runner)
def test_every_runner(runner: ArrayVariables) -> None:
    for number in range(8):
        told = {runner.number: str(number + runner.first)}
        told |= {runner.last: str(7 + runner.first)} if runner.last else {}
        told |= {runner.size: "8"} if runner.size else {}
        assert task_number(8, told) == (number, runner.number)
    for wrong in (str(runner.first - 1), str(runner.first + 8), "x", "-1", "1" * 40, "\u0661"):
        if wrong != runner.none:
            with pytest.raises(UsageError, match=runner.number):
                task_number(8, {runner.number: wrong})


def test_runners_outside_an_array_say_nothing() -> None:
    with pytest.raises(UsageError, match="nothing says which task"):
        task_number(8, {"LSB_JOBINDEX": "0", "SGE_TASK_ID": "undefined", "SLURM_ARRAY_TASK_ID": "", "PATH": "/bin"})
    assert task_number(8, {"LSB_JOBINDEX": "0", "SGE_TASK_ID": "3"}) == (2, "SGE_TASK_ID")


@pytest.mark.parametrize(
    "told",
    [
        {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MAX": "8"},  # from 1, or of 9
        {"LSB_JOBINDEX": "3", "LSB_JOBINDEX_END": "9"},
        {"SGE_TASK_ID": "3", "SGE_TASK_LAST": "9"},
        {"AWS_BATCH_JOB_ARRAY_INDEX": "3", "AWS_BATCH_JOB_ARRAY_SIZE": "4"},
        {"BATCH_TASK_INDEX": "3", "BATCH_TASK_COUNT": "9"},
        {"CLOUD_RUN_TASK_INDEX": "3", "CLOUD_RUN_TASK_COUNT": "7"},
    ],
)
def test_an_array_of_another_length_is_refused(told: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="has not 8 tasks"):
        task_number(8, told)


def test_some_tasks_of_an_array_may_be_submitted_again() -> None:
    assert task_number(8, {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_MAX": "5"}) == (5, "SLURM_ARRAY_TASK_ID")


def test_two_runners_may_agree_but_not_disagree() -> None:
    told = {"SLURM_ARRAY_TASK_ID": "2", "SGE_TASK_ID": "3"}
    assert task_number(8, told) == (2, "SLURM_ARRAY_TASK_ID")
    with pytest.raises(UsageError, match=r"SGE_TASK_ID=4.*") as refusal:
        task_number(8, told | {"SGE_TASK_ID": "4"})
    assert "SLURM_ARRAY_TASK_ID=2" in str(refusal.value)


def test_it_is_a_share_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "2")
    assert read_part("auto/3") == TargetShare(2, 3, "JOB_COMPLETION_INDEX")
    for wrong in ("auto", "auto/", "auto/0", "auto/x", "auto/-1", "Auto/3"):
        with pytest.raises(UsageError):
            read_part(wrong)
    with pytest.raises(UsageError, match="has not 2 tasks"):
        reshard_mpi.transform("nowhere", "out", part="auto/2")


def test_the_command_line_names_what_may_say_it() -> None:
    assert "SLURM_ARRAY_TASK_ID" in refused("transform", "src", "dst", "--part", "auto/4", code=2)
