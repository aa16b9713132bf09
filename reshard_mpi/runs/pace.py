"""How fast a stage of a run goes, and so how much of it is done and how long the rest takes.

The unit of all work is a second of one process. What a byte takes is learned for each phase by itself: reading back may
be much cheaper than writing, or much dearer; syncing a file takes its time while no byte moves; and a target is read
back right after it has been written, or when all have been. The stage ends with the process that has most work left.
"""

from __future__ import annotations

from collections.abc import Sequence

from reshard_mpi.runs.status import CLOSED, MOVED, PHASES, READ_BACK, SYNCED, Counts, Stage

# The recent speed of a phase is that of the last half of its time, but of no less and no more than so many seconds.
_LEAST_SECONDS = 3.0
_MOST_SECONDS = 60.0
# Nothing is said before.
_FIRST_SECONDS = 0.5
# After so long without a byte nothing is said, unless files are being synced that take as long.
_STALL_SECONDS = 5.0
# Reading back is taken to be so much cheaper than writing until its own speed is known.
_READ_BACK_SHARE = 0.5
# While a process does this it moves no byte.
_PAUSES = SYNCED, CLOSED


class _Cost:
    """What a byte of one phase takes."""

    def __init__(self) -> None:
        self._bytes = self._seconds = self._all_seconds = 0.0

    def add(self, count_bytes: int, seconds: float, processes: int) -> None:
        """Record that so many bytes took so many seconds of a process. processes: how many there are."""
        self._all_seconds += seconds
        span = min(max(self._all_seconds / 2, _LEAST_SECONDS * processes), _MOST_SECONDS * processes)
        kept = min(1.0, max(0.0, span - seconds) / self._seconds) if self._seconds else 1.0
        self._bytes, self._seconds = self._bytes * kept + count_bytes, self._seconds * kept + seconds

    @property
    def seconds_per_byte(self) -> float | None:
        return self._seconds / self._bytes if self._bytes else None


class Pace:
    """The pace of one stage, from what its processes had done at some moments.

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
        """Learn from what a process has done since it last told of anything."""
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
        """What a byte takes in each phase, as far as that is known."""
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
