"""How long it takes to know what a target rank needs, for jobs of up to 16,384 ranks, in fresh processes."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import many_ranks
from benchmarks.interleave import Turns, take_turns
from benchmarks.machine import describe
from benchmarks.measure import Run, last_json
from benchmarks.measure import measure as measure_commands
from benchmarks.results import Results
from benchmarks.rows import Clock, Row, Side, alone
from benchmarks.spread import ratios
from benchmarks.workplace import workplace
from reshard_mpi import rank_list_for_transform
from reshard_mpi.sharding.mindspore_layouts import to_stage_files
from reshard_mpi.sharding.mindspore_protobuf import encode_protobuf


@dataclass(frozen=True, slots=True)
class Job:
    """A conversion of so many ranks. key: in the names of rows."""

    key: str
    source_ranks: int
    target_ranks: int
    parameters: int

    @property
    def what(self) -> str:
        return f"{self.source_ranks:,} -> {self.target_ranks:,} ranks, {self.parameters:,} parameters"

    @property
    def target_rank(self) -> int:
        return self.target_ranks // 2


JOBS = (
    Job("64", 64, 48, 600),
    Job("1024", 1024, 768, 600),
    Job("4096", 4096, 3072, 600),
    Job("16384", 16384, 12288, 600),
    Job("large", 16384, 12288, 10_000),
)
_PLANNED = ("4096", "large")
_GROWTH = ("16384", "64")


@dataclass(frozen=True, slots=True)
class Program:
    """A program of ours in a fresh process, which prints the seconds it measured of itself."""

    name: str
    arguments: tuple[str, ...]

    def missing(self) -> str | None:
        return None

    def run(self) -> Run:
        measured = measure_commands([[sys.executable, "-m", f"benchmarks.programs.{self.name}", *self.arguments]])
        return replace(measured.run, inner_seconds=last_json(measured.stdout)["seconds"])


def measure(pairs: int, folder: Path | None) -> Results:
    """Measure the rank lists of all jobs and the plans of two of them, in turns."""
    with workplace(folder, 100_000_000) as place:
        machine = describe(place)
        programs = {}
        for job in JOBS:
            strategies = _write_strategies(job, place)
            rank = str(job.target_rank)
            programs[f"ranks.{job.key}"] = Program("rank_list", (*strategies, rank))
            if job.key in _PLANNED:
                needed = map(str, rank_list_for_transform(job.target_rank, *strategies))
                programs[f"plan.{job.key}"] = Program("rank_plan", (*strategies, rank, *needed))
        turns = dict(zip(programs, take_turns(list(programs.values()), pairs)))
    rows = []
    for job in JOBS:
        rows.append(_row(f"ranks.{job.key}", f"rank list, {job.what}", turns[f"ranks.{job.key}"]))
    rows.append(_growth(turns))
    rows.append(_row("ranks.large.memory", f"rank list, {JOBS[-1].what}: peak memory", turns["ranks.large"]))
    for job in JOBS:
        if job.key in _PLANNED:
            rows.append(_row(f"plan.{job.key}", f"plan of one target, {job.what}", turns[f"plan.{job.key}"]))
    return Results("planning", machine, pairs, rows)


def _write_strategies(job: Job, folder: Path) -> tuple[str, str]:
    """Write a job's strategy files, the target's with optimizer sharding; return their paths."""
    paths = []
    for side, ranks in (("src", job.source_ranks), ("dst", job.target_ranks)):
        strategy = many_ranks.strategy(ranks, job.parameters, optimizer=side == "dst")
        path = folder / f"{side}_{job.key}.ckpt"
        path.write_bytes(encode_protobuf(to_stage_files(strategy)[0]))
        paths.append(str(path))
    return paths[0], paths[1]


def _row(key: str, what: str, turns: Turns) -> Row:
    if turns.failed is not None:
        return Row(key, what, skipped=turns.failed)
    return alone(key, what, "in a fresh process", turns.runs, Clock.INNER)


def _growth(turns: dict[str, Turns]) -> Row:
    """Return the row that shows whether more ranks take more time."""
    many, few = (turns[f"ranks.{key}"] for key in _GROWTH)
    what = f"rank list, {_GROWTH[0]} source ranks beside {_GROWTH[1]}"
    failed = many.failed or few.failed
    if failed is not None:
        return Row("ranks.growth", what, skipped=failed)
    sides = [Side.of(f"{key} ranks", turn.runs, Clock.INNER) for key, turn in zip(_GROWTH, (many, few))]
    ratio = ratios(sides[0].every_seconds, sides[1].every_seconds)
    return Row("ranks.growth", what, ours=sides[0], peer=sides[1], ratio=ratio, figure=ratio)
