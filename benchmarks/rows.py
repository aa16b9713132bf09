"""The rows of a result: what two sides took, their ratio, and whether it is what is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from benchmarks.interleave import Comparison, interleave
from benchmarks.measure import Run
from benchmarks.spread import Spread, ratios
from benchmarks.targets import TARGETS, Figure, Target


class Clock(Enum):
    """Which of a run's times is meant; the value says it in words."""

    COMMAND = "whole command"
    INNER = "inner"
    CPU = "CPU time of all processes"


@dataclass(frozen=True, slots=True)
class Side:
    """What the runs of one side took."""

    name: str
    seconds: Spread
    peak_bytes: Spread
    read_bytes: Spread
    written_bytes: Spread
    every_seconds: tuple[float, ...]

    @classmethod
    def of(cls, name: str, runs: Sequence[Run], clock: Clock) -> Side:
        seconds = tuple(seconds_of(run, clock) for run in runs)
        return cls(
            name,
            Spread.of(seconds),
            Spread.of(run.peak_bytes for run in runs),
            Spread.of(run.read_bytes for run in runs),
            Spread.of(run.written_bytes for run in runs),
            seconds,
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "seconds": self.seconds.as_json(),
            "peak_bytes": self.peak_bytes.as_json(),
            "read_bytes": self.read_bytes.as_json(),
            "written_bytes": self.written_bytes.as_json(),
            "every_seconds": list(self.every_seconds),
        }


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table. key: its name in `TARGETS`. skipped: why it has no figure."""

    key: str
    what: str
    megabytes: int | None = None
    ours: Side | None = None
    peer: Side | None = None
    ratio: Spread | None = None
    figure: Spread | None = None
    skipped: str | None = None

    @property
    def target(self) -> Target:
        return TARGETS[self.key]

    @property
    def reached(self) -> bool | None:
        return None if self.figure is None else self.target.is_reached(self.figure, self.megabytes)

    def as_json(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "what": self.what,
            "megabytes": self.megabytes,
            "ours": self.ours and self.ours.as_json(),
            "peer": self.peer and self.peer.as_json(),
            "ratio": self.ratio and self.ratio.as_json(),
            "figure": self.figure and {"kind": self.target.figure.name.lower(), **self.figure.as_json()},
            "target": self.target.bound,
            "target_text": self.target.as_text(),
            "reached": self.reached,
            "skipped": self.skipped,
        }


@dataclass(frozen=True, slots=True)
class Question:
    """A row to be: what a comparison is to tell. megabytes: the size, for targets that are meant for one."""

    comparison: Comparison
    key: str
    what: str
    megabytes: int | None = None
    our_clock: Clock = Clock.COMMAND
    peer_clock: Clock = Clock.COMMAND


def answer(questions: Sequence[Question], pairs: int) -> list[Row]:
    """Run the comparisons that the questions need, interleaved, and return a row for each."""
    interleave(list(dict.fromkeys(question.comparison for question in questions)), pairs)
    return [_row(question) for question in questions]


def _row(question: Question) -> Row:
    """Return the row of a comparison: the figure that its target asks for, pair by pair."""
    comparison, key, what, megabytes = question.comparison, question.key, question.what, question.megabytes
    if comparison.missing is not None:
        return Row(key, what, megabytes, skipped=comparison.missing)
    try:
        ours = Side.of(comparison.ours.name, comparison.our_runs, question.our_clock)
        peer = Side.of(comparison.peer.name, comparison.peer_runs, question.peer_clock)
    except NoInnerTimeError as error:
        return Row(key, what, megabytes, skipped=str(error))
    figure = TARGETS[key].figure
    if figure is Figure.SMALLER:
        ratio = _by_pairs(comparison.peer_runs, comparison.our_runs, lambda run: run.peak_bytes)
    elif figure is Figure.FASTER:
        ratio = ratios(peer.every_seconds, ours.every_seconds)
    else:
        ratio = ratios(ours.every_seconds, peer.every_seconds)
    return Row(key, what, megabytes, ours, peer, ratio, ours.seconds if figure is Figure.SECONDS else ratio)


def alone(
    key: str, what: str, name: str, runs: Sequence[Run], clock: Clock = Clock.COMMAND, megabytes: int | None = None
) -> Row:
    """Return the row of one side without a peer: seconds or peak memory, as its target asks."""
    ours = Side.of(name, runs, clock)
    return Row(
        key, what, megabytes, ours, figure=ours.peak_bytes if TARGETS[key].figure is Figure.PEAK else ours.seconds
    )


def largest_process(key: str, runs: Sequence[Run]) -> Row:
    """Return the row for the largest of all processes of ours; every one is judged, not the median."""
    what = "largest process of ours in any row"
    if not runs:
        return Row(key, what, skipped="nothing was run")
    return Row(key, what, figure=Spread.of([max(run.peak_bytes for run in runs)]))


class NoInnerTimeError(Exception):
    """A run did not measure of itself what is asked for."""


def seconds_of(run: Run, clock: Clock) -> float:
    """Return one of a run's times. Raises NoInnerTimeError."""
    if clock is Clock.COMMAND:
        return run.seconds
    if clock is Clock.CPU:
        return run.cpu_seconds
    if run.inner_seconds is None:
        raise NoInnerTimeError("the runs did not report the time in the engine")
    return run.inner_seconds


def _by_pairs(above: Sequence[Run], below: Sequence[Run], figure: Callable[[Run], float]) -> Spread:
    return ratios([figure(run) for run in above], [figure(run) for run in below])
