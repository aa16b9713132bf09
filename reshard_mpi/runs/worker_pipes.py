"""Connect a worker and its parent: a pipe, and counts in shared memory (`PipeComm`)."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from reshard_mpi.processes.comm import MEANWHILE_SECONDS
from reshard_mpi.processes.forks import Channel
from reshard_mpi.processes.host import host_name
from reshard_mpi.processes.signals import INTERRUPTED
from reshard_mpi.runs.monitor import Display
from reshard_mpi.runs.outcome import TargetReport
from reshard_mpi.runs.progress import PHASES, Counts, Progress, RunStatus, Stage, own_by_phase

T = TypeVar("T")

# The part of `SharedCounts` for a worker: the fields of `Counts`, as whole numbers of this size in bytes.
_STAGE, _UNITS, _WAITS, _DONE, _OWN = 0, 1, 2, 3, 7
_CELLS, _CELL_BYTES = 11, 8


class PipeComm:
    """The `Comm` of a worker, whose values go through its parent."""

    def __init__(self, channel: Channel, rank: int, size: int) -> None:
        self._channel = channel
        self._meanwhile: list[Callable[[], None]] = []
        self.rank = rank
        self.size = size
        self.hosts = (host_name(os.environ),) * size

    def meanwhile(self, do: Callable[[], None]) -> Callable[[], None]:
        self._meanwhile.append(do)
        return partial(self._meanwhile.remove, do)

    def allgather(self, value: T) -> list[T]:
        self._channel.send(("gather", value))
        while self._meanwhile and not self._channel.is_ready(MEANWHILE_SECONDS):
            for do in self._meanwhile:
                do()
        values: list[T] = self._channel.receive()
        return values


class SharedCounts:
    """What each worker has done, in memory that workers and parent share; nothing has to be sent or received."""

    def __init__(self, workers: int) -> None:
        self._cells = memoryview(mmap.mmap(-1, workers * _CELLS * _CELL_BYTES)).cast("q")

    def of(self, rank: int) -> memoryview:
        """Return the cells in which worker `rank` counts."""
        return self._cells[rank * _CELLS : (rank + 1) * _CELLS]

    def read(self) -> list[Counts]:
        """Return the counts of all workers."""
        cells = self._cells.tolist()
        starts = range(0, len(cells), _CELLS)
        rows = (cells[start : start + _CELLS] for start in starts)
        return [_counts(*row) for row in rows]


def _counts(stage: int, units: int, waits: int, *by_phase: int) -> Counts:
    moved, synced, read_back, closed = by_phase[: len(PHASES)]
    own_moved, own_synced, own_read_back, own_closed = by_phase[len(PHASES) :]
    own = own_moved, own_synced, own_read_back, own_closed
    return Counts(stage, (moved, synced, read_back, closed), own, units, bool(waits))


class PipeProgress(Progress):
    """The `Progress` of worker `rank`: it counts in `cells`, and sends all else to its parent."""

    def __init__(self, channel: Channel, rank: int, cells: memoryview) -> None:
        self._channel = channel
        self._rank = rank
        self._cells = cells

    def begin(self, stage: Stage, own_bytes: int = 0, closed_bytes: int = 0) -> None:
        self._cells[_UNITS] = 0
        for phase, own in enumerate(own_by_phase(stage, own_bytes, closed_bytes)):
            self._cells[_DONE + phase], self._cells[_OWN + phase] = 0, own
        self._cells[_STAGE] += 1
        if self._rank == 0:  # one is enough, since all begin the same
            self._channel.send(("begin", (stage,)))

    def completed(self) -> None:
        self._cells[_UNITS] += 1

    def assigned(self, ranks: tuple[int, ...]) -> None:
        self._channel.send(("assigned", (ranks,)))

    def started(self, rank: int) -> None:
        self._channel.send(("started", (rank,)))

    def finished(self, report: TargetReport) -> None:
        self.completed()
        self._channel.send(("finished", (report,)))

    def waiting(self, text: str) -> None:
        self._cells[_WAITS] = 1
        self.say(text)

    def admitted(self) -> None:
        self._cells[_WAITS] = 0

    def say(self, text: str) -> None:
        self._channel.send(("say", (text,)))

    def detail(self, text: str) -> None:
        self._channel.send(("detail", (text,)))

    def reading(self, source: str) -> None:
        self._channel.send(("reading", (source,)))

    def _add(self, phase: int, count_bytes: int) -> None:
        self._cells[_DONE + phase] += count_bytes


class PipeDisplay(Display):
    """The display of a parent of workers that has been started for another process, to which it sends all."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def update(self, status: RunStatus) -> None:
        try:
            self._channel.send(("update", (status,)))
        except BrokenPipeError:  # nobody wants the result any more
            os.kill(os.getpid(), signal.SIGTERM)

    def say(self, text: str) -> None:
        self._channel.send(("say", (text,)))

    def reading(self, source: str) -> None:
        self._channel.send(("reading", (source,)))

    def close(self, status: RunStatus) -> None:
        self.update(status)


def tell(progress: Progress, kind: str, arguments: tuple[Any, ...]) -> None:
    """Call the method of `progress` that a worker has named, with the arguments it has sent."""
    getattr(progress, kind)(*arguments)


@contextlib.contextmanager
def ends_quietly() -> Iterator[None]:
    """End this process silently when it is interrupted, or when its parent is gone."""
    os.setpgid(0, 0)  # an interrupt from the terminal is for the parent, which ends the others itself
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except (BrokenPipeError, EOFError, ConnectionResetError):
        sys.exit(1)  # the parent is gone, so nobody reads what is sent
