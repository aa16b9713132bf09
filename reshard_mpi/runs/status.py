"""How far a run is: which stage it is in, how much of that is done, and how long the rest takes at its recent speed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from reshard_mpi.text import counted
from reshard_mpi.units import format_bytes, format_rate

# The recent speed is that of the last half of a stage, but of no less and no more than so many seconds.
_LEAST_SECONDS = 3.0
_MOST_SECONDS = 60.0
# How far apart the moments are that a speed is computed from.
_SAMPLE_SECONDS = 0.5
_MINUTE, _HOUR = 60, 3600


class Stage(NamedTuple):
    """A part of a run through which all its processes go together. All begin it with the same figures.

    name: what is done, such as "writing". size_bytes: how much all processes have to do together; None if that is not
    known yet. units: how many targets, shards or tensors these bytes make up; unit: what they are called. ready: how
    many more were complete before. passes: how many times each byte is gone through; it counts as done after the last.
    """

    name: str
    size_bytes: int | None = None
    units: int = 0
    unit: str = "target"
    ready: int = 0
    passes: int = 1


class Counts(NamedTuple):
    """What one process has done of a stage.

    stage: the number of the stage, from 1 on. passed_bytes: gone through, so each byte counts once for every pass.
    units: completed by this process. waits: whether it waits for memory.
    """

    stage: int = 0
    passed_bytes: int = 0
    units: int = 0
    waits: bool = False


class RunStatus(NamedTuple):
    """How far a run is, over all its processes.

    stage: what they are doing, such as "planning", "comparing copies", "writing" or "verifying". bytes_done: of this
    stage; bytes_total: None as long as that is not known. targets_done, targets_total: targets of a transform, shards
    of a verification or tensors of a comparison, as `unit` says; targets_before: how many more were complete before,
    which are in no other figure. seconds: since the run began. bytes_per_second: of late; None if not known yet.
    seconds_left: until the end of the stage at this speed; None if not known. waiting: how many processes wait for
    memory.
    """

    stage: str
    bytes_done: int
    bytes_total: int | None
    targets_done: int
    targets_total: int
    targets_before: int
    unit: str
    seconds: float
    bytes_per_second: float | None
    seconds_left: float | None
    waiting: int

    @classmethod
    def of(cls, stage: Stage, counts: Iterable[Counts], seconds: float, bytes_per_second: float | None) -> RunStatus:
        """Return the status of a run. counts: of all its processes in this stage."""
        all_counts = list(counts)
        done = sum(own.passed_bytes for own in all_counts) // stage.passes
        total = stage.size_bytes
        if total is not None:
            done = min(done, total)
        left = (total - done) / bytes_per_second if total is not None and bytes_per_second else None
        return cls(
            stage=stage.name,
            bytes_done=done,
            bytes_total=total,
            targets_done=sum(own.units for own in all_counts),
            targets_total=stage.units,
            targets_before=stage.ready,
            unit=stage.unit,
            seconds=seconds,
            bytes_per_second=bytes_per_second,
            seconds_left=left,
            waiting=sum(own.waits for own in all_counts),
        )

    @property
    def percent(self) -> int | None:
        """How many hundredths of the bytes are done, 100 only if all are; None if their number is not known."""
        if self.bytes_total is None:
            return None
        return self.bytes_done * 100 // self.bytes_total if self.bytes_total else 100

    @property
    def is_complete(self) -> bool:
        return self.bytes_done == self.bytes_total and self.targets_done == self.targets_total

    def as_text(self, *, with_percent: bool = True) -> str:
        """Return the status as one line for people."""
        if self.bytes_total is None:
            parts = [f"{self.stage}, {format_seconds(self.seconds)} so far"]
        else:
            parts = [f"{self.stage} {format_bytes(self.bytes_done)} of {format_bytes(self.bytes_total)}"]
            parts += [f"{self.percent} %"] if with_percent else []
            if self.is_complete:
                parts.append(f"in {format_seconds(self.seconds)}")
            elif self.bytes_per_second is not None and self.seconds_left:
                parts += [format_rate(int(self.bytes_per_second), 1.0), f"{format_seconds(self.seconds_left)} left"]
            before = f" ({self.targets_before} complete before)" if self.targets_before else ""
            if self.targets_total or before:
                parts.append(f"{self.targets_done} of {counted(self.targets_total, self.unit)}{before}")
        if self.waiting:
            parts.append("waiting for memory" if self.waiting == 1 else f"{self.waiting} processes wait for memory")
        return ", ".join(parts)


class Pace:
    """The recent speed of a stage, from what was done at some moments."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()
        self._begin = 0.0

    def add(self, seconds: float, done_bytes: int) -> None:
        """Record that so much had been done at a moment, `seconds` on any clock. Moments are told in their order."""
        if not self._samples:
            self._begin = seconds
        elif seconds - self._samples[-1][0] < _SAMPLE_SECONDS:
            return
        self._samples.append((seconds, done_bytes))
        span = min(max((seconds - self._begin) / 2, _LEAST_SECONDS), _MOST_SECONDS)
        while len(self._samples) > 2 and self._samples[1][0] <= seconds - span:
            self._samples.popleft()

    @property
    def bytes_per_second(self) -> float | None:
        """None if nothing is known yet, or nothing was done of late."""
        if len(self._samples) < 2:
            return None
        (first, before), (last, done) = self._samples[0], self._samples[-1]
        return (done - before) / (last - first) or None


def format_seconds(seconds: float) -> str:
    """Return a length of time such as `7 s`, `2 min 05 s` or `3 h 20 min`."""
    whole = round(seconds)
    if whole < 1:
        return f"{seconds:.2f} s"
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE:02} s"
    return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE:02} min"
