"""What a run says while it works: on a terminal, in a batch job's output, or to the logger of a caller."""

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

# Often enough to see that it lives, seldom enough to cost nothing.
_REFRESH_SECONDS = 0.2
_PLAIN_SECONDS = 10.0
# Waiting for memory that is worth mentioning.
_WORTH_SECONDS = 1.0


def say(text: str, stream: TextIO, end: str = "\n") -> None:
    """Print at once what a run can do without: nothing is to fail because nobody listens any more."""
    with contextlib.suppress(OSError):
        print(text, end=end, file=stream, flush=True)


def log(notes: Iterable[str], warnings: Iterable[str]) -> None:
    """Tell the logger "reshard_mpi" what the command line prints: notes at level INFO, warnings at WARNING."""
    import logging  # when there is a caller: the command line does without

    logger = logging.getLogger("reshard_mpi")
    for note in notes:
        logger.info("%s", one_line(note))
    for warning in warnings:
        logger.warning("%s", one_line(warning))


class Progress(Protocol):
    """Is told what is read, once by every process which targets it is to write, and then what happens to them."""

    def reading(self, source: str) -> None: ...

    def assigned(self, ranks: tuple[int, ...]) -> None: ...

    def started(self, rank: int, written_bytes: int) -> None: ...

    def waiting(self, text: str) -> None: ...

    def moved(self, count_bytes: int) -> None: ...

    def finished(self, report: TargetReport) -> None: ...

    def close(self) -> None: ...


class Silent:
    """Says nothing, but to the log that a caller of the functions may listen to."""

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
    """A line for every finished target, and now and then one for the bytes moved so far."""

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
    """One line on a terminal that is written anew as bytes move."""

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
