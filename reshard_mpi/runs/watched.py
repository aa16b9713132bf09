"""The progress of all processes of a run together, which a thread has shown."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from reshard_mpi.runs.pace import Pace
from reshard_mpi.runs.progress import RunProgress, told_target
from reshard_mpi.runs.status import NO_BYTES, Counts, RunStatus, Stage, own_by_phase

if TYPE_CHECKING:
    import threading

    from reshard_mpi.runs.outcome import TargetReport

# How often counts are read.
_TICK_SECONDS = 0.25
# A display may hang, as when nobody reads what is printed; at its end a run waits so long for it.
_END_SECONDS = 1.0


class Display:
    """Shows the progress of a run. Its methods are called by one thread at a time; here they do nothing.

    `update`: how far the run is, several times a second. `say`: a line for the user. `reading`: the source in one line.
    `close`: the end of the run, with the last status. `abandon`: the run was refused or stopped; `ends_line`: whether a
    line that is not ended has to be. `memory_bytes`: how much memory it takes.
    """

    memory_bytes = 0

    def update(self, status: RunStatus) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def reading(self, source: str) -> None:
        pass

    def close(self, status: RunStatus) -> None:
        pass

    def abandon(self, *, ends_line: bool) -> None:
        pass


class Counting(RunProgress):
    """Counts what this process has done of each stage. verbose: details are said."""

    def __init__(self, *, verbose: bool) -> None:
        self.verbose = verbose
        self._begun = Counts()  # but for the bytes that are done
        self._done_bytes = list(NO_BYTES)

    def begin(self, stage: Stage, own_bytes: int = 0, closed_bytes: int = 0) -> None:
        self._done_bytes = list(NO_BYTES)
        self._begun = Counts(self._begun.stage + 1, own_bytes=own_by_phase(stage, own_bytes, closed_bytes))

    def completed(self) -> None:
        self._begun = self._begun._replace(units=self._begun.units + 1)

    def finished(self, report: TargetReport) -> None:
        self.completed()
        self.detail(told_target(report))

    def waiting(self, text: str) -> None:
        self._begun = self._begun._replace(waits=True)
        self.say(text)

    def admitted(self) -> None:
        if self._begun.waits:
            self._begun = self._begun._replace(waits=False)

    def detail(self, text: str) -> None:
        if self.verbose:
            self.say(text)

    @property
    def _counts(self) -> Counts:
        moved, synced, read_back, closed = self._done_bytes
        return self._begun._replace(done_bytes=(moved, synced, read_back, closed))

    def _add(self, phase: int, count_bytes: int) -> None:
        self._done_bytes[phase] += count_bytes


class Watched(Counting):
    """The `Progress` of a process that works alone or is the parent of workers, shown by a display.

    others: returns the counts of further processes of the run. verbose: show details.
    """

    def __init__(
        self, display: Display, *, verbose: bool = False, others: Callable[[], Iterable[Counts]] = tuple
    ) -> None:
        super().__init__(verbose=verbose)
        self.shown_bytes = display.memory_bytes
        self._display = display
        self._others = others
        self._begin_seconds = time.monotonic()
        self._stage = Stage("starting")
        self._pace = Pace(self._stage, self._begin_seconds)
        self._thread: threading.Thread | None = None
        self._ended: threading.Event | None = None
        self._lock: threading.Lock | None = None
        self._told: RunStatus | None = None

    def count(self, others: Callable[[], Iterable[Counts]]) -> None:
        """Set what returns the counts of further processes of the run."""
        self._others = others

    def update(self, status: RunStatus) -> None:
        """Show how far a run is whose processes this one does not know."""
        self._told = status
        with self._locked():
            self._display.update(status)

    def begin(self, stage: Stage, own_bytes: int = 0, closed_bytes: int = 0) -> None:
        self._start()
        with self._locked():
            super().begin(stage, own_bytes, closed_bytes)
            self._stage, self._pace = stage, Pace(stage, time.monotonic())

    def say(self, text: str) -> None:
        with self._locked():
            self._display.say(text)

    def reading(self, source: str) -> None:
        with self._locked():
            self._display.reading(source)

    def close(self) -> None:
        """End the display: the run has come to its end."""
        self._stop()
        self._display.close(self._status())

    def abandon(self, *, ends_line: bool = True) -> None:
        """End the display of a run that was refused or stopped."""
        self._stop()
        self._display.abandon(ends_line=ends_line)

    def _locked(self) -> AbstractContextManager[object]:
        return nullcontext() if self._lock is None else self._lock

    def _start(self) -> None:
        """Start the thread that shows the progress. Not before: a process that is to be forked must not have any."""
        if self._thread is not None:
            return
        import threading

        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._show, args=(self._ended, self._lock), daemon=True)
        self._thread.start()

    def _show(self, ended: threading.Event, lock: threading.Lock) -> None:
        # The main thread handles signals, and must be woken by them.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while not ended.wait(_TICK_SECONDS):
            with lock:
                self._display.update(self._status())

    def _stop(self) -> None:
        if self._thread is not None and self._ended is not None:
            self._ended.set()
            self._thread.join(_END_SECONDS)

    def _status(self) -> RunStatus:
        if self._told is not None:
            return self._told
        now = time.monotonic()
        mine = self._counts
        nothing = Counts(mine.stage)  # of a process that has not begun this stage yet
        counts = [own if own.stage == mine.stage else nothing for own in (mine, *self._others())]
        self._pace.add(now, counts)
        bytes_done, seconds_left = self._pace.bytes_done, self._pace.seconds_left
        return RunStatus.of(self._stage, counts, now - self._begin_seconds, bytes_done, seconds_left)
