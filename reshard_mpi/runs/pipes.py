"""How a worker and its parent talk over a pipe: values, progress, and the end of the worker."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from reshard_mpi.processes.comm import MEANWHILE_SECONDS
from reshard_mpi.processes.forks import Channel
from reshard_mpi.processes.hosts import host_name
from reshard_mpi.processes.signals import INTERRUPTED
from reshard_mpi.runs.outcome import TargetReport
from reshard_mpi.runs.progress import Progress

T = TypeVar("T")

_PROGRESS_SECONDS = 0.1


class PipeComm:
    """The `Comm` of a worker, whose values go through its parent."""

    def __init__(self, channel: Channel, rank: int, size: int) -> None:
        self._channel = channel
        self._do: Callable[[], None] | None = None
        self.rank = rank
        self.size = size
        self.hosts = (host_name(os.environ),) * size

    def meanwhile(self, do: Callable[[], None]) -> None:
        self._do = do

    def allgather(self, value: T) -> list[T]:
        self._channel.send(("gather", value))
        while self._do is not None and not self._channel.is_ready(MEANWHILE_SECONDS):
            self._do()
        values: list[T] = self._channel.receive()
        return values


class PipeProgress:
    """The `Progress` of a worker, which sends it to its parent; bytes moved are added up and sent now and then."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._moved_bytes = 0
        self._next = 0.0

    def reading(self, source: str) -> None:
        self._channel.send(("reading", (source,)))

    def assigned(self, ranks: tuple[int, ...]) -> None:
        self._channel.send(("assigned", (ranks,)))

    def started(self, rank: int, written_bytes: int) -> None:
        self._channel.send(("started", (rank, written_bytes)))

    def waiting(self, text: str) -> None:
        self._channel.send(("waiting", (text,)))

    def moved(self, count_bytes: int) -> None:
        self._moved_bytes += count_bytes
        if time.monotonic() >= self._next:
            self._flush()

    def finished(self, report: TargetReport) -> None:
        self._flush()
        self._channel.send(("finished", (report,)))

    def close(self) -> None:
        pass

    def _flush(self) -> None:
        self._next = time.monotonic() + _PROGRESS_SECONDS
        self._channel.send(("moved", (self._moved_bytes,)))
        self._moved_bytes = 0


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
