"""Fork workers and connect them with their parent: channels, and counts in shared memory (`Fork`, `PipeComm`).

`multiprocessing` takes longer to import than a fork takes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Self, TypeVar

from reshard_mpi.processes.comm import MEANWHILE_SECONDS
from reshard_mpi.processes.host import host_name
from reshard_mpi.processes.signals import INTERRUPTED
from reshard_mpi.runs.outcome import TargetReport
from reshard_mpi.runs.progress import Counts, Display, ProgressStage, RunStatus

_LENGTH_BYTES = 8
_NAP_SECONDS = 0.002
_HANDLED = (signal.SIGINT, signal.SIGTERM)


class Channel:
    """One end of a connection between two processes of a host: what one sends the other receives, in order."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading = reading
        self._writing = writing

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """Return the two ends of a new connection."""
        (reading, other_writing), (other_reading, writing) = os.pipe(), os.pipe()
        return cls(reading, writing), cls(other_reading, other_writing)

    @property
    def descriptors(self) -> tuple[int, int]:
        """What another process must inherit to make this end its own: `Channel(*descriptors)`."""
        return self._reading, self._writing

    def send(self, value: object) -> None:
        """Send `value`. Raises BrokenPipeError if the other end is closed."""
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        rest = memoryview(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
        while rest:
            rest = rest[os.write(self._writing, rest) :]

    def receive(self) -> Any:
        """Wait for a value and return it. Raises EOFError if the other end is closed before all of it has come."""
        return pickle.loads(self._read(int.from_bytes(self._read(_LENGTH_BYTES), "little")))

    def is_ready(self, seconds: float) -> bool:
        """Wait at most so long; tell whether there is something to receive, or the other end is closed."""
        poll = select.poll()
        poll.register(self._reading, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def close(self) -> None:
        """Close this end, which the other one notices."""
        os.close(self._reading)
        os.close(self._writing)

    def _read(self, length_bytes: int) -> bytearray:
        data = bytearray()
        while len(data) < length_bytes:
            part = os.read(self._reading, length_bytes - len(data))
            if not part:
                raise EOFError
            data += part
        return data


def wait_for_any(channels: Iterable[Channel]) -> list[Channel]:
    """Wait until a channel has something to receive, or is closed; return all such channels."""
    by_descriptor = {channel.descriptors[0]: channel for channel in channels}
    poll = select.poll()
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    return [by_descriptor[descriptor] for descriptor, _ in poll.poll()]


class Fork:
    """A process forked from this one that does `work` and ends. The caller must not have threads."""

    def __init__(self, work: Callable[[], None]) -> None:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):  # a fork need not fail because nobody reads
                    stream.flush()
        self._exit_code: int | None = None
        # Where the end of children is ignored, as a parent may have left it, the kernel keeps no exit codes.
        self._told: int | None
        telling: int | None
        self._told, telling = (None, None) if signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL else os.pipe()
        # A signal just after the fork would make the new process go on as if it were this one.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        try:
            self._pid = os.fork()
            if self._pid == 0:
                _be_a_process(work, mask, telling)
        finally:
            if telling is not None:
                os.close(telling)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def wait(self) -> int:
        """Wait for the end and return the exit code, negative for a signal."""
        if self._exit_code is None:
            self._ended(0)
        return self._exit_code or 0

    def ends_within(self, seconds: float) -> bool:
        """Wait at most so long for the end of the process; tell whether it has ended."""
        deadline = time.monotonic() + seconds
        while self._exit_code is None:
            if self._ended(os.WNOHANG):
                break
            if time.monotonic() >= deadline:
                return False
            time.sleep(_NAP_SECONDS)
        return True

    def _ended(self, options: int) -> bool:
        """Tell whether the process has ended, and keep its exit code. options: of `os.waitpid`."""
        try:
            pid, status = os.waitpid(self._pid, options)
        except ChildProcessError:  # somebody else has waited for it, or the kernel keeps no exit codes
            exit_byte = b"" if self._told is None else os.read(self._told, 1)
            self._exit_code = exit_byte[0] if exit_byte else -signal.SIGKILL
        else:
            if not pid:
                return False
            self._exit_code = os.waitstatus_to_exitcode(status)
        if self._told is not None:
            os.close(self._told)
            self._told = None
        return True

    def terminate(self) -> None:
        """Ask the process to end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process, whatever it is doing."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._exit_code is None:
            os.kill(self._pid, number)


def _be_a_process(work: Callable[[], None], mask: Iterable[int], telling: int | None) -> None:
    """Do `work` in a fork and end the process, so it does nothing that the parent is about to do.

    Args:
        mask: the signals that were blocked before the fork.
        telling: where the exit code is written, if anywhere.
    """
    code = 1
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BaseException:
        import traceback  # which loads parsers of source code, for nothing in all other forks

        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            if telling is not None:
                with contextlib.suppress(OSError):
                    os.write(telling, bytes([code & 0xFF]))
            os._exit(code)


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

    def begin(self, stage: ProgressStage) -> None:
        if self._begins:
            self._channel.send(("begin", (stage,)))

    def update(self, status: RunStatus) -> None:
        with contextlib.suppress(BrokenPipeError):  # it is for the main thread to notice
            self._channel.send(("update", (status,)))

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
