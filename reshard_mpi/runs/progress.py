"""What a process tells of its progress, and processes that tell it to nobody.

Whoever works only adds to a number. A thread, or the parent of the process, reads it now and then (`watched`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TextIO

from reshard_mpi.processes.signals import stopped_by
from reshard_mpi.runs.status import CLOSED, MOVED, READ_BACK, SYNCED
from reshard_mpi.text import one_line
from reshard_mpi.units import format_bytes

if TYPE_CHECKING:
    from reshard_mpi.runs.outcome import TargetReport
    from reshard_mpi.runs.status import Counts, RunStatus, Stage

# Shorter waiting for memory is not worth mentioning.
_WORTH_SECONDS = 1.0


def say(text: str, stream: TextIO, end: str = "\n") -> None:
    """Print a text at once. Nothing is raised if the stream is closed, since a run can do without its output."""
    with contextlib.suppress(OSError, ValueError):
        stream.write(text + end)  # at once, or lines of several processes would run into each other
        stream.flush()


def complain(text: str) -> None:
    """Print a line on standard error."""
    say(one_line(text), sys.stderr)


def log(notes: Iterable[str], warnings: Iterable[str]) -> None:
    """Log notes at level INFO and warnings at level WARNING, to the logger "reshard_mpi"."""
    import logging  # only here, since the command line does without

    logger = logging.getLogger("reshard_mpi")
    for note in notes:
        logger.info("%s", one_line(note))
    for warning in warnings:
        logger.warning("%s", one_line(warning))


def log_warning(text: str) -> None:
    """Log a warning to the logger "reshard_mpi"."""
    log(notes=(), warnings=(text,))


class Progress:
    """Is told the progress of a process of a run. This one does nothing with it; others replace what they show.

    `begin`: a stage, which all processes begin alike; of its bytes this process has `own_bytes` to do, and files of
    `closed_bytes` to close. `moved`, `synced`, `read_back`, `closed`: so many bytes have gone through this phase.
    `completed`: one of the stage's units is. `assigned`, `started`, `finished`: the targets of this process, one that
    it is writing, and one that is complete. `waiting`, `admitted`: it waits for memory, as a text says, and has it.
    `say`, `detail`, `reading`: a line for the user, one for who wants to know more, and the source in one line.
    `shown_bytes`: how much memory it takes in this process to show it, besides what every process has.
    """

    shown_bytes = 0

    def begin(self, stage: Stage, own_bytes: int = 0, closed_bytes: int = 0) -> None:
        pass

    def moved(self, count_bytes: int) -> None:
        self._add(MOVED, count_bytes)

    def synced(self, count_bytes: int) -> None:
        self._add(SYNCED, count_bytes)

    def read_back(self, count_bytes: int) -> None:
        self._add(READ_BACK, count_bytes)

    def closed(self, count_bytes: int) -> None:
        self._add(CLOSED, count_bytes)

    def completed(self) -> None:
        pass

    def assigned(self, ranks: tuple[int, ...]) -> None:
        pass

    def started(self, rank: int) -> None:
        pass

    def finished(self, report: TargetReport) -> None:
        pass

    def waiting(self, text: str) -> None:
        self.say(text)

    def admitted(self) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def detail(self, text: str) -> None:
        pass

    def reading(self, source: str) -> None:
        pass

    def _add(self, phase: int, count_bytes: int) -> None:
        """Count bytes that have gone through a phase."""


class RunProgress(Progress):
    """Is told the progress of a run by the process that the user has started.

    `verbose`: whether details are shown. `count`: what returns the counts of its workers. `update`: how far the run is,
    which has its workers elsewhere. `close`: the run has come to its end; all ranks of an MPI run must call this.
    `abandon`: the run was refused or stopped; `ends_line`: whether a line that is not ended has to be.
    """

    verbose = False

    def count(self, others: Callable[[], Iterable[Counts]]) -> None:
        pass

    def update(self, status: RunStatus) -> None:
        pass

    def close(self) -> None:
        pass

    def abandon(self, *, ends_line: bool = True) -> None:
        pass


@contextlib.contextmanager
def ended(progress: RunProgress) -> Iterator[RunProgress]:
    """Give the progress of a run, and end it with the block: closed, or abandoned if that raises anything."""
    try:
        yield progress
    except BaseException as error:
        progress.abandon(ends_line=stopped_by(error) is None)  # last words begin a line of their own
        raise
    progress.close()


class Silent(RunProgress):
    """Shows no progress. say: is given the lines for the user, which are logged as warnings unless it is set."""

    def __init__(self, say: Callable[[str], None] = log_warning) -> None:
        self._say = say

    def say(self, text: str) -> None:
        self._say(text)


class Counted:
    """Tells of work whose size is known, and of exactly so much when it has ended, whatever was met on the way.

    moved: told how many bytes are done. size_bytes: of the work. steps: as how many bytes `add` will be told of it;
    None: as many.
    """

    def __init__(self, moved: Callable[[int], None], size_bytes: int, steps: int | None = None) -> None:
        self._moved = moved
        self._size_bytes = size_bytes
        self._steps = max(1, size_bytes if steps is None else steps)
        self._added = self._told_bytes = 0

    def add(self, count: int) -> None:
        """Tell that a part of the work is done."""
        self._added += count
        self._tell(min(self._added, self._steps) * self._size_bytes // self._steps)

    def end(self) -> None:
        """Tell that all of the work is done."""
        self._tell(self._size_bytes)

    def _tell(self, done_bytes: int) -> None:
        self._moved(done_bytes - self._told_bytes)
        self._told_bytes = done_bytes


def told_target(report: TargetReport) -> str:
    """Return a complete target in one line."""
    sources = len(report.read_ranks)
    waited = f", {report.waited_seconds:.2f} s of it waiting" if report.waited_seconds >= _WORTH_SECONDS else ""
    return (
        f"target {report.rank}: {format_bytes(report.written_bytes)} from {sources} source"
        f" {'rank' if sources == 1 else 'ranks'} in {report.seconds:.2f} s{waited}"
    )
