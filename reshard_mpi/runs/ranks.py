"""The progress of the ranks of an MPI run: each tells rank 0 now and then how much it has done, and rank 0 shows it."""

from __future__ import annotations

import time
from collections.abc import Callable

from reshard_mpi.processes.comm import MPIComm
from reshard_mpi.runs.status import MOVED, READ_BACK, Counts, Stage
from reshard_mpi.runs.watched import Counting, Display, Watched

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


class RankProgress(Counting):
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
