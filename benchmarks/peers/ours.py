"""This project: the command line as a user runs it, and the function inside ranks that are there already."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import Checkpoint
from benchmarks.interpreters import lacks_mpi, mpirun
from benchmarks.measure import Run, last_json, measure, settle

COMMAND = (sys.executable, "-m", "reshard_mpi")


@dataclass(frozen=True, slots=True)
class Transform:
    """`reshard-mpi transform` as a whole command; inner_seconds is the time in the engine, as the report has it.

    processes: local ones, or ranks with `under_mpi`. options: further ones.
    """

    checkpoint: Checkpoint
    output: Path
    processes: int
    under_mpi: bool = False
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        launched = f"mpirun -n {self.processes}" if self.under_mpi else f"--jobs {self.processes}"
        return " ".join([launched, *self.options])

    def missing(self) -> str | None:
        return lacks_mpi() if self.under_mpi else None

    def run(self) -> Run:
        strategies = ["--src-strategy", str(self.checkpoint.src_strategy)]
        if self.checkpoint.dst_strategy is not None:
            strategies += ["--dst-strategy", str(self.checkpoint.dst_strategy)]
        launcher = (mpirun(self.processes) or []) if self.under_mpi else []
        jobs = [] if self.under_mpi else ["--jobs", str(self.processes)]
        return _transform(self.checkpoint.source, self.output, [*strategies, *jobs, *self.options], launcher)


@dataclass(frozen=True, slots=True)
class Between:
    """`reshard-mpi transform` from one form of a checkpoint to another, as a whole command. options: of the command."""

    name: str
    source: Path
    output: Path
    options: tuple[str, ...]

    def missing(self) -> str | None:
        return None if self.source.exists() else f"there is no {self.source.name}: what should make it is missing"

    def run(self) -> Run:
        return _transform(self.source, self.output, self.options)


@dataclass(frozen=True, slots=True)
class Call:
    """`transform(..., comm=...)` in ranks that have imported it, to the format `to`; inner_seconds: of the call."""

    source: Path
    output: Path
    dst_strategy: Path
    to: str
    processes: int

    @property
    def name(self) -> str:
        return f"transform in {self.processes} MPI ranks"

    def missing(self) -> str | None:
        return lacks_mpi()

    def run(self) -> Run:
        shutil.rmtree(self.output, ignore_errors=True)
        settle(self.output.parent)
        arguments = [self.source, self.output, self.dst_strategy, self.to]
        program = [sys.executable, "-m", "mpi4py", "-m", "benchmarks.programs.ours_between_forms"]
        measured = measure([[*(mpirun(self.processes) or []), *program, *map(str, arguments)]])
        return replace(measured.run, inner_seconds=last_json(measured.stdout)["seconds"])


def _transform(source: Path, output: Path, options: Iterable[str], launcher: Iterable[str] = ()) -> Run:
    report = output.with_suffix(".json")
    shutil.rmtree(output, ignore_errors=True)
    settle(output.parent)
    said = ["--progress", "none", "--report", str(report)]
    measured = measure([[*launcher, *COMMAND, "transform", str(source), str(output), *options, *said]])
    return with_report(measured.run, json.loads(report.read_text())["targets"])


@dataclass(frozen=True, slots=True)
class Function:
    """`transform_checkpoints(..., comm=...)` in ranks that have imported it; inner_seconds is that of the call."""

    checkpoint: Checkpoint
    output: Path
    processes: int

    @property
    def name(self) -> str:
        return f"transform_checkpoints in {self.processes} MPI ranks"

    def missing(self) -> str | None:
        return lacks_mpi()

    def run(self) -> Run:
        shutil.rmtree(self.output, ignore_errors=True)
        settle(self.checkpoint.folder)
        made = self.checkpoint
        arguments = [made.source, self.output, made.src_strategy, made.dst_strategy, made.format]
        program = [sys.executable, "-m", "mpi4py", "-m", "benchmarks.programs.ours_in_ranks"]
        measured = measure([[*(mpirun(self.processes) or []), *program, *map(str, arguments)]])
        return replace(measured.run, inner_seconds=last_json(measured.stdout)["seconds"])


def with_report(run: Run, targets: Iterable[Mapping[str, Any]]) -> Run:
    """Return `run` with what the targets of a report say: mapped files escape the counters of system calls."""
    targets = list(targets)
    return replace(
        run,
        read_bytes=sum(target["requested_bytes"] for target in targets),
        written_bytes=sum(target["written_bytes"] for target in targets),
        inner_seconds=engine_seconds(targets),
    )


def engine_seconds(targets: Iterable[Mapping[str, Any]]) -> float | None:
    """Return how long the engine took: of the processes, which make their targets one by one, the longest.

    None if the report does not say.
    """
    by_process: dict[int, float] = {}
    for target in targets:
        if "engine_seconds" not in target or "process" not in target:
            return None
        process = target["process"]
        by_process[process] = by_process.get(process, 0.0) + target["engine_seconds"]
    return max(by_process.values(), default=None)
