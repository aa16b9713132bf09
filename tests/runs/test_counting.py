"""What a run counts: every stage comes to exactly what its plans say, whoever does which part of it and how."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cases import Side
from support.checkpoints import expected_rank
from support.conversions import TENSORS, Conversion, four_targets, make, write_conversion
from support.examples import few, few_cases, one_at_a_time
from support.launch import MPI, by_one_mpi, run_ranks
from support.oracle import RawLayout
from support.rank_calls import told_while_transforming

import reshard_mpi
from reshard_mpi.planning.rank_choice import Replicas
from reshard_mpi.processes.comm import SerialComm
from reshard_mpi.runs import target_writer
from reshard_mpi.runs.outcome import TargetReport
from reshard_mpi.runs.progress import CLOSED, MOVED, PHASES, Progress, ProgressStage, RunStatus
from reshard_mpi.runs.request import Request, Task
from reshard_mpi.runs.worker_pipes import Channel, PipeDisplay, SharedCounts

WHOLE_BYTES = sum(array.nbytes for array in TENSORS.values())


def target_bytes(c: Conversion) -> int:
    """What all targets hold together, by the oracle."""
    targets = (expected_rank(c.target, c.tensors, rank) for rank in range(c.target.world_size))
    return sum(array.nbytes for arrays in targets for array in arrays.values())


class Counting(Progress):
    """Keeps the stages of a run, each with the bytes and units of it, and the bytes that it said it has to do."""

    def __init__(self) -> None:
        super().__init__()
        self.stages: list[ProgressStage] = []
        self.own: list[list[int]] = []
        self.bytes: list[list[int]] = []
        self.units: list[int] = []

    def begin(self, stage: ProgressStage, own_bytes: int = 0, closed_bytes: int = 0) -> None:
        self.stages.append(stage)
        self.own.append(
            [(closed_bytes if phase == CLOSED else own_bytes) * (phase in stage.phases) for phase in PHASES]
        )
        self.bytes.append([0, 0, 0, 0])
        self.units.append(0)

    def _add(self, phase: int, count_bytes: int) -> None:
        assert count_bytes >= 0
        self.bytes[-1][phase] += count_bytes

    def completed(self) -> None:
        self.units[-1] += 1

    def assert_exact(self) -> None:
        for stage, own, by_phase, units in zip(self.stages, self.own, self.bytes, self.units):
            size_bytes = stage.size_bytes or 0
            assert by_phase == own == [size_bytes * (phase in stage.phases) for phase in PHASES], stage
            assert units == stage.units, stage

    def named(self, name: str) -> ProgressStage:
        (stage,) = (stage for stage in self.stages if stage.name == name)
        return stage


def request(c: Conversion, **options: Any) -> Request:
    strategies = (str(path) if path is not None else None for path in (c.src_strategy, c.dst_strategy))
    return Request(str(c.src), str(c.dst), *strategies, prefix="checkpoint_", **options)


def counted(c: Conversion, task: Task = Task.CONVERT, **options: Any) -> Counting:
    counting = Counting()
    assert not task.run(request(c, **options), SerialComm(), counting).failures
    counting.assert_exact()
    return counting


@few_cases(1, ("to", "verify"), one_at_a_time(["ckpt", "hdf5", "safetensors", "torch", "hf", "dcp"], [False, True]))
def test_a_transform(c: Conversion, to: str, verify: bool) -> None:
    whole = to == "hf"
    options: dict[str, Any] = {"to": to, "verify": verify}
    counting = counted(c.but(dst_strategy=None) if whole else c, **options)
    stage = counting.stages[-1]
    # What both targets hold is written by one of them where files make up one checkpoint.
    assert stage.size_bytes == (WHOLE_BYTES if to in ("hf", "dcp") else target_bytes(c))
    assert stage.name == ("writing and verifying" if verify else "writing")
    assert stage.phases == (PHASES if verify else (MOVED, CLOSED))
    assert verify == any(stage.name == "checking sources" for stage in counting.stages)


def test_tensors_that_are_converted(c: Conversion) -> None:
    halved = (TENSORS["w"].nbytes + TENSORS["moments.w"].nbytes) // 2  # those of floating point
    assert counted(c, dtype=("fp16",)).named("writing").size_bytes == target_bytes(c) - halved


@pytest.mark.slow
def test_very_many_small_tensors(tmp_path: Path) -> None:
    tensors = {f"t{number}": np.full((8, 2), number, np.float32) for number in range(700)}
    source, target = (Side(ranks, 1, dict.fromkeys(tensors, RawLayout((ranks,), (0, -1)))) for ranks in (4, 2))
    c = write_conversion(tmp_path, "ckpt", source, target, tensors)
    assert counted(c, verify=True).stages[-1].size_bytes == 700 * 64


def test_copies_that_are_compared(tmp_path: Path) -> None:
    stage = counted(make(tmp_path), replicas=Replicas.CHECK).named("comparing copies")
    # Each half of what is cut is on two ranks, what is not cut on all four. What no strategy lists is not compared.
    copies = {"w": 2, "moments.w": 2, "b": 4}
    assert stage.size_bytes == sum(count * TENSORS[name].nbytes for name, count in copies.items())


def test_what_was_complete_before(tmp_path: Path) -> None:
    c = four_targets(tmp_path)
    c.done("transform", "--rank", "1")
    stage = counted(c, resume=True).named("writing")
    assert (stage.units, stage.ready) == (3, 1)
    again = counted(c, resume=True).named("writing")
    assert (again.size_bytes, again.units, again.ready) == (0, 0, 4)


@few_cases(
    1,
    ("kind", "crc"),
    [("ckpt", False), ("ckpt", True), ("hdf5", False), ("safetensors", False), ("safetensors", True)],
)
def test_a_verification(tmp_path: Path, kind: str, crc: bool) -> None:
    c = make(tmp_path, kind)
    c.done("transform", "--verify", *(["--crc"] if crc else []))
    files_bytes = sum(c.written(rank).stat().st_size for rank in range(2))
    assert counted(c, Task.VERIFY_PAIR, keeps_journal=False).named("verifying").size_bytes == files_bytes
    alone = Request(str(c.dst), str(c.dst), keeps_journal=False)
    counting = Counting()
    Task.VERIFY_ALONE.run(alone, SerialComm(), counting)
    counting.assert_exact()
    assert counting.named("verifying") == ProgressStage("verifying", files_bytes, 2, "shard")


def test_a_comparison(c: Conversion) -> None:
    c.done("transform")
    stage = counted(c, Task.DIFF, keeps_journal=False).named("comparing")
    assert stage == ProgressStage("comparing", WHOLE_BYTES, 4, "tensor")


def test_a_target_that_fails_is_not_counted_as_complete(c: Conversion, monkeypatch: pytest.MonkeyPatch) -> None:

    def fail(target: Any, **by_name: Any) -> Any:
        raise OSError(5, "a disk", str(target.plan.target_rank))

    monkeypatch.setattr(target_writer, "write_shard", fail)
    counting = Counting()
    outcome = Task.CONVERT.run(request(c), SerialComm(), counting)
    assert len(outcome.failures) == 2 and (counting.bytes[-1], counting.units[-1]) == ([0, 0, 0, 0], 0)


def test_a_worker_counts_its_targets_in_the_stage_that_it_is_in() -> None:
    """The parent may hear of a target before it hears, from another worker, that the stage has begun."""
    counts = SharedCounts(2)
    ours, theirs = Channel.pair()
    with closing(ours), closing(theirs):
        progress = Progress(PipeDisplay(theirs), counts.of(1))
        progress.begin(ProgressStage("writing", 8, 2, "target"), 4)
        progress.finished(TargetReport(1, "rank_1", (0,), 4))
    assert [(own.stage, own.units) for own in counts.read()] == [(0, 0), (1, 1)]


# What the caller of a function is told


def transformed(c: Conversion, **options: Any) -> list[RunStatus]:
    told: list[RunStatus] = []
    paths = (c.src, c.dst, c.src_strategy, c.dst_strategy)
    report = reshard_mpi.transform(*paths, progress=told.append, **options)
    assert told[-1].targets_total == sum(not target.skipped for target in report.targets)
    return told


@pytest.mark.parametrize("options", few(2, [{}, {"verify": True}, {"jobs": 2}, {"jobs": 8, "verify": True}]))
def test_the_last_that_is_told_is_that_all_is_done(c: Conversion, options: Mapping[str, Any]) -> None:
    last = transformed(c, **options)[-1]
    assert last.bytes_total == target_bytes(c)
    assert last.is_complete and last.percent == 100
    assert (last.targets_done, last.targets_total, last.unit, last.waiting) == (2, 2, "target", 0)


@pytest.mark.slow
def test_of_verifications_and_comparisons_too(c: Conversion, tmp_path: Path) -> None:
    pair = (c.src, c.dst, c.src_strategy, c.dst_strategy)
    told: list[RunStatus] = []
    report = reshard_mpi.transform(*pair, verify=True)
    assert report.written_bytes == target_bytes(c)
    report = reshard_mpi.verify(*pair, progress=told.append)
    assert [shard.rank for shard in report.checked] == [0, 1] and report.tensors == 8
    assert report.read_bytes == target_bytes(c) and report.checked[0].by == ("the source",)
    alone = reshard_mpi.verify(c.dst, progress=told.append)
    assert [shard.by for shard in alone.checked] == [("the record of its run",)] * 2
    for jobs in (1, 2):
        same = reshard_mpi.diff(*pair, progress=told.append, jobs=jobs)
        assert (same.tensors, same.read_bytes, len(same.checked)) == (4, WHOLE_BYTES, 1)
    last = {status.stage: status for status in told}
    assert last["verifying"].is_complete and last["comparing"].is_complete
    assert reshard_mpi.transform_checkpoints(c.src, tmp_path / "other", "n", *pair[2:]).processes == 1


@pytest.mark.parametrize("jobs", few(1, [1, 2]))
def test_a_function_that_fails_is_logged_and_left_alone(
    c: Conversion, jobs: int, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[RunStatus] = []

    def fail(status: RunStatus) -> None:
        calls.append(status)
        raise ZeroDivisionError("a bug of the caller")

    report = reshard_mpi.transform(c.src, c.dst, c.src_strategy, c.dst_strategy, progress=fail, jobs=jobs)
    assert len(report.targets) == 2 and len(calls) == 1
    assert sum(record.exc_info is not None for record in caplog.records if record.name == "reshard_mpi") == 1


def test_nothing_more_is_told_of_a_call_that_is_refused(c: Conversion) -> None:
    c.dst.write_text("mine")
    told: list[RunStatus] = []
    with pytest.raises(reshard_mpi.TargetError):
        reshard_mpi.transform(c.src, c.dst, c.src_strategy, c.dst_strategy, progress=told.append)
    assert all(status.bytes_total is None for status in told)


@by_one_mpi
@pytest.mark.parametrize("asking", [(0,), (0, 1, 2)], ids=["the first", "all ranks"])
def test_rank_0_is_told_of_all_ranks(tmp_path: Path, mpi: MPI, asking: tuple[int, ...]) -> None:
    c = four_targets(tmp_path)
    results = run_ranks(mpi, 3, told_while_transforming, c.paths, asking).results
    last = results[0][0][-1]
    assert last.is_complete and last.targets_done == 4 and last.bytes_total == target_bytes(c)
    assert all(results[rank] == ([], 0) for rank in (1, 2)) and results[0][1] == 0
