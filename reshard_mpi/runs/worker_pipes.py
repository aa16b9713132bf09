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
from reshard_mpi.runs.outcome import TargetReport
from reshard_mpi.runs.progress import Counts, Display, RunStatus, Stage

T = TypeVar("T")

# The part of `SharedCounts` for a worker: the fields of `Counts`, as whole numbers of this size in bytes.
_CELLS, _CELL_BYTES = len(Counts._fields), 8


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
        return [Counts(*cells[start : start + _CELLS]) for start in starts]


class PipeDisplay(Display):
    """The display of a worker, or of a parent of workers that was started for another process: all goes to its parent.

    Attributes:
        begins: whether it tells of stages; one of several workers is enough, since all begin the same.
    """

    def __init__(self, channel: Channel, *, begins: bool = False) -> None:
        super().__init__()
        self._channel = channel
        self._begins = begins

    def begin(self, stage: Stage) -> None:
        if self._begins:
            self._channel.send(("begin", (stage,)))

    def update(self, status: RunStatus) -> None:
        try:
            self._channel.send(("update", (status,)))
        except BrokenPipeError:  # nobody wants the result any more
            os.kill(os.getpid(), signal.SIGTERM)

    def say(self, text: str) -> None:
        self._channel.send(("say", (text,)))

    def detail(self, text: str) -> None:
        self._channel.send(("detail", (text,)))

    def reading(self, source: str) -> None:
        self._channel.send(("reading", (source,)))

    def assigned(self, ranks: tuple[int, ...]) -> None:
        self._channel.send(("assigned", (ranks,)))

    def started(self, rank: int) -> None:
        self._channel.send(("started", (rank,)))

    def finished(self, report: TargetReport) -> None:
        self._channel.send(("finished", (report,)))

    def close(self, status: RunStatus) -> None:
        self.update(status)


def tell(display: Display, kind: str, arguments: tuple[Any, ...]) -> None:
    """Call the method of `display` that a `PipeDisplay` has named, with the arguments it has sent."""
    getattr(display, kind)(*arguments)


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
