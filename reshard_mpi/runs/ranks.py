"""The progress of the ranks of an MPI run: each tells rank 0 now and then how much it has done, and rank 0 shows it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from reshard_mpi.processes.comm import MPIComm
from reshard_mpi.runs.progress import told_target
from reshard_mpi.runs.status import CLOSED, MOVED, NO_BYTES, READ_BACK, SYNCED, Counts, RunStatus, Stage, own_by_phase
from reshard_mpi.runs.watched import Display, Watched

if TYPE_CHECKING:
    from reshard_mpi.runs.outcome import TargetReport

# How often a rank tells what it has done: not so often that rank 0 has more than some 500 messages a second to read.
_TELL_SECONDS = 0.5
_TELL_SECONDS_A_RANK = 0.002
# How often rank 0 looks for messages.
_LOOK_SECONDS = 0.2


class RootProgress(Watched):
    """The `Progress` of rank 0, which shows that of all ranks. Every rank must make its own at the same time."""

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

    def moved(self, count_bytes: int) -> None:
        super().moved(count_bytes)
        self._look_if_due()

    def read_back(self, count_bytes: int) -> None:
        super().read_back(count_bytes)
        self._look_if_due()

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

    def _look_if_due(self) -> None:
        if time.monotonic() >= self._next_seconds:
            self._look()

    def _look(self) -> None:
        self._next_seconds = time.monotonic() + _LOOK_SECONDS
        arrived = dict(self._posts.arrived())
        if arrived:
            self._by_rank = self._by_rank | arrived  # another one, since the thread that shows it reads this one


class RankProgress:
    """The `Progress` of any other rank. say: is given lines for the user. verbose: details are among them."""

    shown_bytes = 0

    def __init__(self, comm: MPIComm, say: Callable[[str], None], *, verbose: bool = False) -> None:
        self._comm = comm
        self._say = say
        self.verbose = verbose
        self._posts = comm.posts()
        self._counts = Counts()
        self._done_bytes = list(NO_BYTES)
        self._interval_seconds = max(_TELL_SECONDS, comm.size * _TELL_SECONDS_A_RANK)
        self._next_seconds = 0.0
        self._no_longer_meanwhile = comm.meanwhile(self._tell_if_due)

    def begin(self, stage: Stage, own_bytes: int = 0, closed_bytes: int = 0) -> None:
        self._done_bytes = list(NO_BYTES)
        self._counts = Counts(self._counts.stage + 1, own_bytes=own_by_phase(stage, own_bytes, closed_bytes))
        self._tell()

    def moved(self, count_bytes: int) -> None:
        self._done_bytes[MOVED] += count_bytes
        self._tell_if_due()

    def synced(self, count_bytes: int) -> None:
        self._done_bytes[SYNCED] += count_bytes
        self._tell_if_due()

    def read_back(self, count_bytes: int) -> None:
        self._done_bytes[READ_BACK] += count_bytes
        self._tell_if_due()

    def closed(self, count_bytes: int) -> None:
        self._done_bytes[CLOSED] += count_bytes
        self._tell_if_due()

    def completed(self) -> None:
        self._counts = self._counts._replace(units=self._counts.units + 1)

    def assigned(self, ranks: tuple[int, ...]) -> None:
        pass

    def started(self, rank: int) -> None:
        pass

    def finished(self, report: TargetReport) -> None:
        self.completed()
        self.detail(told_target(report))

    def waiting(self, text: str) -> None:
        self._counts = self._counts._replace(waits=True)
        self._tell()
        self._say(text)

    def admitted(self) -> None:
        if self._counts.waits:
            self._counts = self._counts._replace(waits=False)
            self._tell()

    def say(self, text: str) -> None:
        self._say(text)

    def detail(self, text: str) -> None:
        if self.verbose:
            self._say(text)

    def reading(self, source: str) -> None:
        pass  # rank 0 says it

    def count(self, others: Callable[[], Iterable[Counts]]) -> None:
        pass  # it has no workers

    def update(self, status: RunStatus) -> None:
        pass

    def close(self) -> None:
        """Tell the last counts; every rank must close its progress."""
        self._no_longer_meanwhile()
        self._comm.allgather(self._now)
        self._posts.close()

    def abandon(self, *, ends_line: bool = True) -> None:
        """Leave it as it is, since other ranks may have ended."""

    @property
    def _now(self) -> Counts:
        moved, synced, read_back, closed = self._done_bytes
        return self._counts._replace(done_bytes=(moved, synced, read_back, closed))

    def _tell_if_due(self) -> None:
        if time.monotonic() >= self._next_seconds:
            self._tell()

    def _tell(self) -> None:
        self._next_seconds = time.monotonic() + self._interval_seconds
        self._posts.send(self._now)
