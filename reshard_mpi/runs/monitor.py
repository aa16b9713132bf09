"""Show the progress of all processes together, from a thread (`ProgressMonitor`).

The unit of all work is a second of one process. What a byte takes is learned for each phase by itself: reading back may
be much cheaper than writing, or much dearer; syncing a file takes its time while no byte moves; and a target is read
back right after it has been written, or when all have been. The stage ends with the process that has most work left.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from reshard_mpi.processes.comm import MPIComm
from reshard_mpi.runs.progress import (
    CLOSED,
    MOVED,
    NO_BYTES,
    PHASES,
    READ_BACK,
    SYNCED,
    Counts,
    RunProgress,
    RunStatus,
    Stage,
    own_by_phase,
    told_target,
)

if TYPE_CHECKING:
    import threading

    from reshard_mpi.runs.outcome import TargetReport

# The recent speed of a phase is measured over the last half of its time, within these bounds in seconds.
_LEAST_SECONDS = 3.0
_MOST_SECONDS = 60.0
# Nothing is said before.
_FIRST_SECONDS = 0.5
# After so long without a byte nothing is said, unless files are being synced that take as long.
_STALL_SECONDS = 5.0
# Reading back is taken to be cheaper than writing by this factor until its own speed is known.
_READ_BACK_SHARE = 0.5
# While a process does this it moves no byte.
_PAUSES = SYNCED, CLOSED


class _Cost:
    """The seconds for a byte of one phase."""

    def __init__(self) -> None:
        self._bytes = self._seconds = self._all_seconds = 0.0

    def add(self, count_bytes: int, seconds: float, processes: int) -> None:
        """Record the bytes and seconds of a process. processes: how many there are."""
        self._all_seconds += seconds
        span = min(max(self._all_seconds / 2, _LEAST_SECONDS * processes), _MOST_SECONDS * processes)
        kept = min(1.0, max(0.0, span - seconds) / self._seconds) if self._seconds else 1.0
        self._bytes, self._seconds = self._bytes * kept + count_bytes, self._seconds * kept + seconds

    @property
    def seconds_per_byte(self) -> float | None:
        return self._seconds / self._bytes if self._bytes else None


class EtaEstimator:
    """The pace of one stage, from what its processes had done at some moments.

    Attributes:
        seconds: the moment at which the stage begins, on any clock.
    """

    def __init__(self, stage: Stage, seconds: float) -> None:
        self.bytes_done = 0
        self.seconds_left: float | None = None
        self._stage = stage
        self._begin_seconds = self._moved_seconds = seconds
        self._costs = tuple(_Cost() for _ in PHASES)
        self._counts: list[Counts] = []
        # Of each process, when it last told of anything that was done.
        self._told_seconds: list[float] = []

    def add(self, seconds: float, counts: Sequence[Counts]) -> None:
        """Record the counts of all processes at a moment. Moments are told in their order, and processes in one order.

        A process that is not known yet has the counts of one that has done nothing.
        """
        new = len(counts) - len(self._counts)
        self._counts += [Counts()] * new
        self._told_seconds += [self._begin_seconds] * new
        workers = max(1, sum(own.own_bytes[MOVED] > 0 for own in counts))
        for number, own in enumerate(counts):
            self._learn(number, own, seconds, workers)
        self._counts = list(counts)
        if self._stage.size_bytes:
            self.bytes_done = max(self.bytes_done, self._done(self._stage.size_bytes))
            self.seconds_left = self._left(seconds)

    def _learn(self, number: int, own: Counts, seconds: float, workers: int) -> None:
        """Learn from a process's progress since its last report."""
        done = [max(0, new - old) for new, old in zip(own.done_bytes, self._counts[number].done_bytes)]
        if any(done):
            shares = self._shares(done, seconds - self._told_seconds[number])
            for cost, count, share_seconds in zip(self._costs, done, shares):
                if count:
                    cost.add(count, share_seconds, workers)
            self._moved_seconds = seconds
        if any(done) or own.waits:
            self._told_seconds[number] = seconds

    def _shares(self, done: Sequence[int], seconds: float) -> list[float]:
        """Return how much of a time each phase has taken. done: how many bytes went through each in this time."""
        shares = [count * cost for count, cost in zip(done, self._seconds_per_byte)]
        pauses = [phase for phase in _PAUSES if done[phase]]
        if pauses:  # they have taken what the others, whose speed is known better, have left
            rest = max(0.0, seconds - shares[MOVED] - shares[READ_BACK])
            for phase in pauses:
                shares[phase] = rest / len(pauses)
        if not any(shares):
            shares = [float(count) for count in done]
        return [seconds * share / sum(shares) for share in shares]

    @property
    def _seconds_per_byte(self) -> tuple[float, ...]:
        """The seconds for a byte in each phase, as far as known."""
        moved, synced, read_back, closed = (cost.seconds_per_byte or 0.0 for cost in self._costs)
        costs = moved, synced, read_back or moved * _READ_BACK_SHARE, closed
        return tuple(cost if phase in self._stage.phases else 0.0 for phase, cost in enumerate(costs))

    def _done(self, size_bytes: int) -> int:
        """Return how many bytes the work that is done is worth: all only if all is done."""
        done = [min(size_bytes, sum(own.done_bytes[phase] for own in self._counts)) for phase in PHASES]
        if all(done[phase] == size_bytes for phase in self._stage.phases):
            return size_bytes
        costs = self._seconds_per_byte
        work = sum(costs) * size_bytes
        share = sum(cost * count for cost, count in zip(costs, done)) / work if work else 0.0
        return min(int(share * size_bytes), size_bytes - 1)

    def _left(self, seconds: float) -> float | None:
        """Return how long the process with the most work left still takes; None if that is not known."""
        costs = self._seconds_per_byte
        if not costs[MOVED] or seconds - self._begin_seconds < _FIRST_SECONDS:
            return None
        most = longest_pause = 0.0
        for own, told_seconds in zip(self._counts, self._told_seconds):
            left = sum(cost * max(0, to_do - done) for cost, to_do, done in zip(costs, own.own_bytes, own.done_bytes))
            # A file that is synced comes nearer to its end though nothing is told of it.
            moved, synced, read_back, closed = own.done_bytes
            to_close = (read_back if READ_BACK in self._stage.phases else moved) - closed
            pause = costs[SYNCED] * max(0, moved - synced) + costs[CLOSED] * max(0, to_close)
            most = max(most, left - min(left, pause, seconds - told_seconds))
            longest_pause = max(longest_pause, pause)
        return most if seconds - self._moved_seconds <= _STALL_SECONDS + longest_pause else None


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


class LocalCounter(RunProgress):
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


class ProgressMonitor(LocalCounter):
    """The `Progress` of a process that works alone or is the parent of workers, shown by a display.

    Attributes:
        others: returns the counts of further processes of the run.
        verbose: show details.
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
        self._pace = EtaEstimator(self._stage, self._begin_seconds)
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
            self._stage, self._pace = stage, EtaEstimator(stage, time.monotonic())

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


# How often a rank tells what it has done: not so often that rank 0 has more than some 500 messages a second to read.
_TELL_SECONDS = 0.5
_TELL_SECONDS_A_RANK = 0.002
# How often rank 0 looks for messages.
_LOOK_SECONDS = 0.2


class RootProgress(ProgressMonitor):
    """The `Progress` of rank 0, which shows all ranks. Every rank must make its own at the same time."""

    def __init__(self, comm: MPIComm, display: Display, *, verbose: bool = False) -> None:
        super().__init__(display, verbose=verbose, others=self._of_others)
        self._comm = comm
        self._posts = comm.posts()
        self._by_rank: dict[int, Counts] = {}
        self._next_seconds = 0.0
        self._no_longer_meanwhile = comm.meanwhile(self._look)

    def begin(self, stage: Stage, own_bytes: int = 0, closed_bytes: int = 0) -> None:
        super().begin(stage, own_bytes, closed_bytes)
        self._look()

    def waiting(self, text: str) -> None:
        self._look()
        super().waiting(text)

    def close(self) -> None:
        """End the display; every rank must close its progress, whether the run has done all or not."""
        self._no_longer_meanwhile()
        self._by_rank = dict(enumerate(self._comm.allgather(Counts())[1:], 1))
        self._posts.close()
        super().close()

    def _of_others(self) -> list[Counts]:
        by_rank = self._by_rank
        return [by_rank.get(rank, Counts()) for rank in range(1, self._comm.size)]

    def _add(self, phase: int, count_bytes: int) -> None:
        super()._add(phase, count_bytes)
        if phase in (MOVED, READ_BACK) and time.monotonic() >= self._next_seconds:
            self._look()

    def _look(self) -> None:
        self._next_seconds = time.monotonic() + _LOOK_SECONDS
        arrived = dict(self._posts.arrived())
        if arrived:
            self._by_rank = self._by_rank | arrived  # another one, since the thread that shows it reads this one


class RankProgress(LocalCounter):
    """The `Progress` of any other rank. say: is given lines for the user. verbose: details are among them."""

    def __init__(self, comm: MPIComm, say: Callable[[str], None], *, verbose: bool = False) -> None:
        super().__init__(verbose=verbose)
        self._comm = comm
        self._say = say
        self._posts = comm.posts()
        self._interval_seconds = max(_TELL_SECONDS, comm.size * _TELL_SECONDS_A_RANK)
        self._next_seconds = 0.0
        self._no_longer_meanwhile = comm.meanwhile(self._tell_if_due)

    def begin(self, stage: Stage, own_bytes: int = 0, closed_bytes: int = 0) -> None:
        super().begin(stage, own_bytes, closed_bytes)
        self._tell()

    def waiting(self, text: str) -> None:
        super().waiting(text)
        self._tell()

    def admitted(self) -> None:
        waited = self._counts.waits
        super().admitted()
        if waited:
            self._tell()

    def say(self, text: str) -> None:
        self._say(text)

    def close(self) -> None:
        """Tell the last counts; every rank must close its progress."""
        self._no_longer_meanwhile()
        self._comm.allgather(self._counts)
        self._posts.close()

    def _add(self, phase: int, count_bytes: int) -> None:
        super()._add(phase, count_bytes)
        self._tell_if_due()

    def _tell_if_due(self) -> None:
        if time.monotonic() >= self._next_seconds:
            self._tell()

    def _tell(self) -> None:
        self._next_seconds = time.monotonic() + self._interval_seconds
        self._posts.send(self._counts)
