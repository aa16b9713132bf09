"""Show the progress of all processes together, from a thread (`monitored`)."""

from __future__ import annotations

import contextlib
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from reshard_mpi.processes.comm import Comm, MPIComm
from reshard_mpi.processes.signals import stopped_by
from reshard_mpi.runs.progress import Counts, Display, Progress, ProgressStage, RunStatus

if TYPE_CHECKING:
    import threading

# The speed is measured over the last half of a stage, within these bounds in seconds.
_LEAST_SECONDS = 3.0
_MOST_SECONDS = 60.0
# No time is told before so long, and when no work was done for so long.
_FIRST_SECONDS = 0.5
_STALL_SECONDS = 5.0
# How often counts are read.
_TICK_SECONDS = 0.25
# A display may hang, as when nobody reads what is printed; at its end a run waits so long for it.
_END_SECONDS = 1.0
# How often a rank posts what it has done: not so often that rank 0 has more than some 500 messages a second to read.
_POST_SECONDS = 0.5
_POST_SECONDS_A_RANK = 0.002
# How often rank 0 looks for messages.
_LOOK_SECONDS = 0.2


class EtaEstimator:
    """How far a stage is and when it ends, from what its processes had done at some moments.

    All processes have one speed, in work a second of a process that has work left and does not wait for memory. The
    stage ends with the process that has most work left.

    Attributes:
        seconds: the moment at which the stage begins, on any clock.
    """

    def __init__(self, stage: ProgressStage, seconds: float) -> None:
        self.bytes_done = 0
        self.seconds_left: float | None = None
        self._stage = stage
        self._begin_seconds = self._worked_seconds = seconds
        self._at_work = 0  # how many processes were, at the last moment
        # What was known at moments: the moment, the time that processes have been at work, and the work that they did.
        self._moments = deque([(seconds, 0.0, 0)])

    def add(self, seconds: float, counts: Sequence[Counts]) -> None:
        """Record the counts of all processes at a moment. Moments are told in their order."""
        last_seconds, busy_seconds, done_before = self._moments[-1]
        done = max(done_before, sum(own.done for own in counts))
        if done > done_before:
            self._worked_seconds = seconds
        left = [max(0, own.own - own.done) for own in counts]
        at_work = sum(work > 0 and not own.waits for work, own in zip(left, counts))
        busy_seconds += max(self._at_work, at_work) * (seconds - last_seconds)  # until now, or from now on
        self._at_work = at_work
        self._moments.append((seconds, busy_seconds, done))
        span_seconds = min(max((seconds - self._begin_seconds) / 2, _LEAST_SECONDS), _MOST_SECONDS)
        while self._moments[1][0] <= seconds - span_seconds:
            self._moments.popleft()
        if self._stage.size_bytes:
            whole = self._stage.work(self._stage.size_bytes, self._stage.size_bytes)
            self.bytes_done = min(done, whole) * self._stage.size_bytes // whole
            self.seconds_left = self._left(seconds, max(left, default=0))

    def _left(self, seconds: float, most_left: int) -> float | None:
        """Return how long the process with the most work left still takes; None if that is not known."""
        (_, busy_before, done_before), (_, busy_seconds, done) = self._moments[0], self._moments[-1]
        is_early = seconds - self._begin_seconds < _FIRST_SECONDS
        is_stalled = seconds - self._worked_seconds > _STALL_SECONDS
        if is_early or is_stalled or done == done_before:
            return None
        return most_left * (busy_seconds - busy_before) / (done - done_before)


class Monitor(Display):
    """Shows the counts of all processes by a thread, and passes on all other reports.

    Attributes:
        display: shows all of it. Only one thread at a time calls it.
        counts: returns the counts of all processes.
    """

    def __init__(self, display: Display, counts: Callable[[], Sequence[Counts]]) -> None:
        super().__init__()
        self.memory_bytes = display.memory_bytes
        self._display = display
        self._counts = counts
        self._begin_seconds = time.monotonic()
        self._stage = ProgressStage("starting")
        self._stage_number = 0
        self._pace = EtaEstimator(self._stage, self._begin_seconds)
        self._thread: threading.Thread | None = None
        self._ended: threading.Event | None = None
        self._lock: threading.Lock | None = None
        self._told: RunStatus | None = None

    def begin(self, stage: ProgressStage) -> None:
        self._start()
        with self._locked():
            self._stage, self._pace = stage, EtaEstimator(stage, time.monotonic())
            self._stage_number += 1

    def update(self, status: RunStatus) -> None:
        """Show how far a run is whose processes this one does not know."""
        self._told = status
        with self._locked():
            self._display.update(status)

    def say(self, text: str) -> None:
        with self._locked():
            self._display.say(text)

    def detail(self, text: str) -> None:
        with self._locked():
            self._display.detail(text)

    def reading(self, source: str) -> None:
        with self._locked():
            self._display.reading(source)

    def end(self) -> None:
        """End the display: the run has come to its end."""
        self._stop()
        self._display.close(self._status())

    def abandon(self, *, ends_line: bool) -> None:
        self._stop()
        self._display.abandon(ends_line=ends_line)

    def _locked(self) -> AbstractContextManager[object]:
        return nullcontext() if self._lock is None else self._lock

    def _start(self) -> None:
        """Start the thread that shows the progress. Not before: a process that is to be forked must not have any.

        Where the host has no room for another thread, the run goes on and shows none.
        """
        if self._thread is not None:
            return
        import threading

        lock, ended = threading.Lock(), threading.Event()
        thread = threading.Thread(target=self._show, args=(ended, lock), daemon=True)
        self._lock, self._ended, self._thread = lock, ended, thread
        try:
            thread.start()
        except RuntimeError:
            self._lock = None

    def _show(self, ended: threading.Event, lock: threading.Lock) -> None:
        # The main thread handles signals, and must be woken by them.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while not ended.wait(_TICK_SECONDS):
            with lock:
                self._display.update(self._status())

    def _stop(self) -> None:
        if self._thread is not None and self._ended is not None:
            self._ended.set()
            if self._thread.is_alive():  # a signal may have come while it was started
                self._thread.join(_END_SECONDS)

    def _status(self) -> RunStatus:
        if self._told is not None:
            return self._told
        now = time.monotonic()
        # A process that has not begun this stage yet is not counted.
        counts = [own for own in self._counts() if own.stage == self._stage_number]
        self._pace.add(now, counts)
        seconds = now - self._begin_seconds
        return RunStatus.of(self._stage, counts, seconds, self._pace.bytes_done, self._pace.seconds_left)


class PostedCounts:
    """The counts that MPI ranks post to rank 0. Only main threads call MPI. All ranks must make and close theirs."""

    def __init__(self, comm: MPIComm, progress: Progress) -> None:
        self._comm = comm
        self._progress = progress
        self._posts = comm.posts()
        self._by_rank: dict[int, Counts] = {}
        self._interval_seconds = max(_POST_SECONDS, comm.size * _POST_SECONDS_A_RANK) if comm.rank else _LOOK_SECONDS
        self._next_seconds = 0.0
        self._no_longer_meanwhile = comm.meanwhile(self.exchange)
        progress.counted, progress.counts_of_others = self.exchange, self.of_others

    def of_others(self) -> list[Counts]:
        """Return the counts that other ranks have posted to this one."""
        return list(self._by_rank.values())

    def exchange(self, soon: bool = False) -> None:
        """Post the counts to rank 0, and there take them, if that is due or others should know them `soon`."""
        now = time.monotonic()
        if not soon and now < self._next_seconds:
            return
        self._next_seconds = now + self._interval_seconds
        if self._comm.rank:
            self._posts.send(Counts(*self._progress.cells))
        elif arrived := dict(self._posts.arrived()):
            self._by_rank = self._by_rank | arrived  # another one, since the thread that shows it reads this one

    def close(self) -> None:
        """Exchange the last counts, whether the run has done all or not."""
        self._no_longer_meanwhile()
        self._by_rank = dict(enumerate(self._comm.allgather(Counts(*self._progress.cells))[1:], 1))
        self._posts.close()


@contextlib.contextmanager
def monitored(display: Display, comm: Comm) -> Iterator[Progress]:
    """Give the progress of a run, shown on rank 0 until this block ends. All processes must enter and leave it.

    Args:
        display: on rank 0 shows all processes; elsewhere this process alone.
    """
    progress = Progress(display)
    monitor = None if comm.rank else Monitor(display, progress.counts)
    if monitor is not None:
        progress.display = monitor
    posted = PostedCounts(comm, progress) if isinstance(comm, MPIComm) else None
    try:
        yield progress
    except BaseException as error:
        if monitor is not None:
            monitor.abandon(ends_line=stopped_by(error) is None)  # last words begin a line of their own
        raise
    if posted is not None:
        posted.close()
    if monitor is not None:
        monitor.end()
