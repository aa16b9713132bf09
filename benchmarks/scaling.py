"""One full checkpoint out of many shards, by one process and by several that fill the one file together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.checkpoint import Checkpoint, generate, source_bytes
from benchmarks.interleave import Comparison
from benchmarks.machine import describe
from benchmarks.network import consolidation, shapes
from benchmarks.peers.ours import Transform
from benchmarks.results import GB, Curve, Results
from benchmarks.rows import Clock, NoInnerTimeError, Question, Side, answer, largest_process
from benchmarks.workplace import workplace

# What is asked for is asked of so many processes.
_JUDGED_PROCESSES = 2


@dataclass(frozen=True, slots=True)
class Settings:
    """What is asked for. processes: the counts to be compared, with the least of them."""

    megabytes: int
    kind: str
    processes: tuple[int, ...]
    pairs: int
    folder: Path | None


def measure(settings: Settings) -> Results:
    """Measure every count of processes beside the least."""
    network = shapes(settings.megabytes)
    resharding = consolidation(network)
    needed_bytes = source_bytes(network, resharding.source) + settings.megabytes * 1_000_000
    least, *others = sorted(set(settings.processes))
    with workplace(settings.folder, needed_bytes) as folder:
        machine = describe(folder)
        made = generate(folder, network, resharding, settings.kind)
        # Both sides write to the same place, each after removing what the other wrote.
        base = Transform(made, folder / "dst", least)
        comparisons = [Comparison(Transform(made, base.output, processes), base) for processes in others]
        questions = [q for comparison in comparisons for q in _questions(settings, made, comparison)]
        rows = answer(questions, settings.pairs)
    runs = [run for comparison in comparisons for run in (*comparison.our_runs, *comparison.peer_runs)]
    rows.append(largest_process("scaling.memory", runs))
    return Results("scaling", machine, settings.pairs, rows, "processes", _curves(made, comparisons))


def _questions(settings: Settings, made: Checkpoint, comparison: Comparison) -> list[Question]:
    what = f"{made.size_bytes / 1e6:.0f} MB .{made.format}, {made.resharding.name}"
    assert isinstance(comparison.ours, Transform)
    megabytes = settings.megabytes if comparison.ours.processes == _JUDGED_PROCESSES else None
    return [
        Question(comparison, "scaling.engine", f"{what}: engine", megabytes, Clock.INNER, Clock.INNER),
        Question(comparison, "scaling.command", f"{what}: whole command", megabytes),
    ]


def _curves(made: Checkpoint, comparisons: list[Comparison]) -> list[Curve]:
    """Return throughput over the number of processes, that of the whole command and that of the engine."""
    curves = []
    for clock, label in ((Clock.COMMAND, "whole command"), (Clock.INNER, "engine")):
        points = {}
        for comparison in comparisons:
            for side, runs in ((comparison.peer, comparison.peer_runs), (comparison.ours, comparison.our_runs)):
                assert isinstance(side, Transform)
                try:
                    seconds = Side.of(side.name, runs, clock).seconds if runs else None
                except NoInnerTimeError:
                    seconds = None
                if seconds is not None:
                    points[side.processes] = made.size_bytes / GB / seconds.median
        if points:
            curves.append(Curve(label, tuple(sorted(points.items()))))
    return curves
