"""The progress of a run, shown on a terminal, in a batch job's output, or by the logger of a caller."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol, TextIO

from reshard_mpi.text import one_line
from reshard_mpi.units import format_bytes, format_rate

if TYPE_CHECKING:
    from reshard_mpi.runs.outcome import TargetReport

# Seconds between two lines (on a terminal, elsewhere): short enough to show progress, long enough to cost nothing.
_REFRESH_SECONDS = 0.2
_PLAIN_SECONDS = 10.0
# Shorter waiting for memory is not worth mentioning.
_WORTH_SECONDS = 1.0


def say(text: str, stream: TextIO, end: str = "\n") -> None:
    """Print a text at once. Nothing is raised if the stream is closed, since a run can do without its output."""
    with contextlib.suppress(OSError):
        print(text, end=end, file=stream, flush=True)


def log(notes: Iterable[str], warnings: Iterable[str]) -> None:
    """Log notes at level INFO and warnings at level WARNING, to the logger "reshard_mpi"."""
    import logging  # only here, since the command line does without

    logger = logging.getLogger("reshard_mpi")
    for note in notes:
        logger.info("%s", one_line(note))
    for warning in warnings:
        logger.warning("%s", one_line(warning))


class Progress(Protocol):
    """Shows the progress of a run.

    `reading`: the source in one line. `assigned`: the targets of a process. `started`, `moved`, `finished`: a target is
    begun, so many bytes are written, a target is complete. `waiting`: for what the process waits. `close`: the end.
    """

    def reading(self, source: str) -> None: ...

    def assigned(self, ranks: tuple[int, ...]) -> None: ...

    def started(self, rank: int, written_bytes: int) -> None: ...

    def waiting(self, text: str) -> None: ...

    def moved(self, count_bytes: int) -> None: ...

    def finished(self, report: TargetReport) -> None: ...

    def close(self) -> None: ...


class Silent:
    """Shows nothing; what is waited for goes to the log."""

    def reading(self, source: str) -> None:
        pass

    def assigned(self, ranks: tuple[int, ...]) -> None:
        pass

    def started(self, rank: int, written_bytes: int) -> None:
        pass

    def waiting(self, text: str) -> None:
        log(notes=(), warnings=(text,))

    def moved(self, count_bytes: int) -> None:
        pass

    def finished(self, report: TargetReport) -> None:
        pass

    def close(self) -> None:
        pass


class Plain:
    """Prints a line for each finished target, and one every few seconds for the bytes written so far."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._moved_bytes = 0
        self._next = time.monotonic() + _PLAIN_SECONDS

    def reading(self, source: str) -> None:
        say(one_line(f"source: {source}"), self._stream)

    def assigned(self, ranks: tuple[int, ...]) -> None:
        pass

    def started(self, rank: int, written_bytes: int) -> None:
        pass

    def waiting(self, text: str) -> None:
        say(one_line(text), self._stream)

    def moved(self, count_bytes: int) -> None:
        self._moved_bytes += count_bytes
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _PLAIN_SECONDS
            say(f"{format_bytes(self._moved_bytes)} written so far", self._stream)

    def finished(self, report: TargetReport) -> None:
        sources = len(report.read_ranks)
        waited = f", {report.waited_seconds:.2f} s of it waiting" if report.waited_seconds >= _WORTH_SECONDS else ""
        say(
            f"target {report.rank}: {format_bytes(report.written_bytes)} from {sources} source"
            f" {'rank' if sources == 1 else 'ranks'} in {report.seconds:.2f} s{waited}",
            self._stream,
        )

    def close(self) -> None:
        pass


class Bar:
    """Prints one line on a terminal, again and again as bytes are written."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._begin = time.monotonic()
        self._next = 0.0
        self._moved_bytes = 0
        self._assigned = self._done = 0

    def reading(self, source: str) -> None:
        say(one_line(f"source: {source}"), self._stream)

    def assigned(self, ranks: tuple[int, ...]) -> None:
        self._assigned += len(ranks)

    def started(self, rank: int, written_bytes: int) -> None:
        pass

    def waiting(self, text: str) -> None:
        say(f"\r{one_line(text):<78}", self._stream)

    def moved(self, count_bytes: int) -> None:
        self._moved_bytes += count_bytes
        if time.monotonic() >= self._next:
            self._draw()

    def finished(self, report: TargetReport) -> None:
        self._done += 1
        self._draw()

    def _draw(self) -> None:
        now = time.monotonic()
        self._next = now + _REFRESH_SECONDS
        rate = format_rate(self._moved_bytes, now - self._begin)
        text = f"{self._done} of {self._assigned} targets, {format_bytes(self._moved_bytes)}, {rate}"
        say(f"\r{text:<78}", self._stream, end="")

    def close(self) -> None:
        """End the line."""
        if self._assigned:
            say("", self._stream)
