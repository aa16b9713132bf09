"""Report the progress of one process of a run (`Progress`), and print messages (`say`, `complain`, `log`).

Whoever works only adds to a number. A thread, or the parent of the process, reads it now and then (`monitor`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from typing import TYPE_CHECKING, NamedTuple, TextIO

from reshard_mpi.text import counted, format_bytes, format_rate, one_line

if TYPE_CHECKING:
    from reshard_mpi.runs.outcome import TargetReport

# What is done with each byte of a stage, one after another: it is moved (or only read, where nothing is written); what
# was written is synced to the disk, and read back; and the file it is in is closed, so sealed, synced, and given its
# name.
MOVED, SYNCED, READ_BACK, CLOSED = PHASES = (0, 1, 2, 3)
# The work that each phase is for a byte, in tenths of moving it: about what it takes on a local disk.
_WORK = (10, 1, 5, 1)
_MINUTE, _HOUR = 60, 3600


class ProgressStage(NamedTuple):
    """A part of a run, such as writing, through which its processes go together. All begin it with the same figures."""

    name: str  # what is done, such as "writing"
    size_bytes: int | None = None  # how much all processes have to do together; None if that is not known yet
    # how many targets, shards or tensors these bytes make up, or ranks are planned; unit: what they are called
    units: int = 0
    unit: str = "target"
    ready: int = 0  # how many more were complete before
    phases: tuple[int, ...] = (MOVED,)  # what is done with each byte; it is done after the last

    def work(self, moved_bytes: int, closed_bytes: int) -> int:
        """Return how much work it is to take bytes through all phases of this stage.

        Args:
            moved_bytes: through all phases but the last.
            closed_bytes: in files that are closed, which other processes may have filled as well.
        """
        return sum(_WORK[phase] * (closed_bytes if phase == CLOSED else moved_bytes) for phase in self.phases)


class Counts(NamedTuple):
    """What one process has counted in its stage: the numbers in its cells, in this order."""

    stage: int = 0  # the number of the stage, from 1 on
    done: int = 0  # work done
    own: int = 0  # work that this process has to do in all
    units: int = 0  # completed by this process
    waits: int = 0  # 1 while it waits for memory


_STAGE, _DONE, _OWN, _UNITS, _WAITS = range(len(Counts._fields))


class RunStatus(NamedTuple):
    """How far a run is, over all its processes."""

    stage: str  # what they are doing, such as "planning", "comparing copies", "writing" or "verifying"
    bytes_done: int  # of this stage; bytes_total: None as long as that is not known
    bytes_total: int | None
    # targets_done, targets_total: targets of a transform, shards of a verification or tensors of a comparison, as
    # `unit` says; targets_before: how many more were complete before, which are in no other figure
    targets_done: int
    targets_total: int
    targets_before: int
    unit: str
    seconds: float  # since the run began
    bytes_per_second: float | None
    # until the end of the stage; bytes_per_second: the speed at which it ends then; both None if not known
    seconds_left: float | None
    waiting: int  # how many processes wait for memory

    @classmethod
    def of(
        cls, stage: ProgressStage, counts: Sequence[Counts], seconds: float, bytes_done: int, seconds_left: float | None
    ) -> RunStatus:
        """Return the status of a run. counts: of all its processes in this stage."""
        rest = None if stage.size_bytes is None else stage.size_bytes - bytes_done
        return cls(
            stage=stage.name,
            bytes_done=bytes_done,
            bytes_total=stage.size_bytes,
            targets_done=sum(own.units for own in counts),
            targets_total=stage.units,
            targets_before=stage.ready,
            unit=stage.unit,
            seconds=seconds,
            bytes_per_second=rest / seconds_left if rest and seconds_left else None,
            seconds_left=seconds_left,
            waiting=sum(own.waits for own in counts),
        )

    @property
    def percent(self) -> int | None:
        """How many hundredths of the bytes are done, 100 only if all are; None if their number is not known."""
        if self.bytes_total is None:
            return None
        return self.bytes_done * 100 // self.bytes_total if self.bytes_total else 100

    @property
    def is_complete(self) -> bool:
        return self.bytes_done == self.bytes_total and self.targets_done == self.targets_total

    def as_text(self) -> str:
        """Return the status as one line for people."""
        if self.bytes_total is None:
            of_all = f": {self.unit} {self.targets_done} of {self.targets_total}" if self.targets_total else ""
            parts = [f"{self.stage}{of_all}, {format_seconds(self.seconds)} so far"]
        else:
            parts = [self._moved(), f"{self.percent} %", *self._rate(), *self._time(), *self._targets()]
        return ", ".join((*parts, *self._waiting()))

    def beside_a_bar(self) -> tuple[str, tuple[str, ...]]:
        """Return what people want to know first, how much is done and how long the rest takes, and what else there is.

        The second part begins with what matters most of it; the number of bytes must be known.
        """
        return ", ".join((f"{self.percent:3} %", *self._time())), (
            self._moved(),
            *self._waiting(),
            *self._targets(),
            *self._rate(),
        )

    def _moved(self) -> str:
        return f"{self.stage} {format_bytes(self.bytes_done)} of {format_bytes(self.bytes_total or 0)}"

    def _rate(self) -> tuple[str, ...]:
        is_known = not self.is_complete and self.bytes_per_second is not None and self.seconds_left
        return (format_rate(int(self.bytes_per_second or 0), 1.0),) if is_known else ()

    def _time(self) -> tuple[str, ...]:
        if self.is_complete:
            return (f"in {format_seconds(self.seconds)}",)
        is_known = self.bytes_per_second is not None and self.seconds_left
        return (f"{format_seconds(self.seconds_left or 0)} left",) if is_known else ()

    def _targets(self) -> tuple[str, ...]:
        before = f" ({self.targets_before} complete before)" if self.targets_before else ""
        if not self.targets_total and not before:
            return ()
        return (f"{self.targets_done} of {counted(self.targets_total, self.unit)}{before}",)

    def _waiting(self) -> tuple[str, ...]:
        if not self.waiting:
            return ()
        return ("waiting for memory" if self.waiting == 1 else f"{self.waiting} processes wait for memory",)


def format_seconds(seconds: float) -> str:
    """Return a length of time such as `7 s`, `2 min 05 s` or `3 h 20 min`."""
    whole = round(seconds)
    if whole < 1:
        return f"{seconds:.2f} s"
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE:02} s"
    return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE:02} min"


# Shorter waiting for memory is not worth mentioning.
_WORTH_SECONDS = 1.0


def say(text: str, stream: TextIO) -> None:
    """Print a text at once. Nothing is raised if the stream is closed, since a run can do without its output."""
    with contextlib.suppress(OSError, ValueError):
        stream.write(f"{text}\n")  # at once, or lines of several processes would run into each other
        stream.flush()


def complain(text: str) -> None:
    """Print a line on standard error."""
    say(one_line(text), sys.stderr)


def log(notes: Iterable[str], warnings: Iterable[str]) -> None:
    """Log notes at level INFO and warnings at level WARNING, to the logger "reshard_mpi"."""
    import logging  # only here, since the command line does without

    logger = logging.getLogger("reshard_mpi")
    for note in notes:
        logger.info("%s", one_line(note))
    for warning in warnings:
        logger.warning("%s", one_line(warning))


def log_warning(text: str) -> None:
    """Log a warning to the logger "reshard_mpi"."""
    log(notes=(), warnings=(text,))


class Display:
    """Shows the reports of the processes of a run. One thread at a time calls them; here they do nothing.

    `begin`: a stage. `update`: how far the run is, several times a second. `say`, `detail`, `reading`: a line for the
    user, one for who wants to know more, and the source in one line. `assigned`, `started`, `finished`: the targets of
    a process, one that it is writing, and one that is complete. `close`: the end of the run, with its last status.
    `abandon`: the run was refused or stopped; `ends_line`: whether a line that is not ended has to be.

    Args:
        verbose: show details.
    """

    memory_bytes = 0  # that showing takes in this process, besides what every process has

    def __init__(self, *, verbose: bool = False) -> None:
        self._verbose = verbose

    def begin(self, stage: ProgressStage) -> None:
        pass

    def update(self, status: RunStatus) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def detail(self, text: str) -> None:
        if self._verbose:
            self.say(text)

    def reading(self, source: str) -> None:
        pass

    def assigned(self, ranks: tuple[int, ...]) -> None:
        pass

    def started(self, rank: int) -> None:
        pass

    def finished(self, report: TargetReport) -> None:
        self.detail(told_target(report))

    def close(self, status: RunStatus) -> None:
        pass

    def abandon(self, *, ends_line: bool) -> None:
        pass


class Words(Display):
    """Shows only the lines for the user. print_line: takes each of them."""

    def __init__(self, print_line: Callable[[str], None] = log_warning, *, verbose: bool = False) -> None:
        super().__init__(verbose=verbose)
        self._print_line = print_line

    def say(self, text: str) -> None:
        self._print_line(text)


class Progress:
    """Takes the reports of a process of a run: counts its work, and passes everything else on to a display.

    Attributes:
        display: shows what this process reports. Without one its lines for the user are logged as warnings.
        cells: where it counts: a list of its own, or memory that others read too.
        counts_of_others: returns the counts of further processes that are shown with it.
        counted: called after every count; with True if others should learn of it soon.
    """

    def __init__(self, display: Display | None = None, cells: MutableSequence[int] | memoryview | None = None) -> None:
        self.display = Words() if display is None else display
        self.cells = list(Counts()) if cells is None else cells
        self.counts_of_others: Callable[[], Iterable[Counts]] = tuple
        self.counted: Callable[[bool], None] | None = None

    def counts(self) -> list[Counts]:
        """Return the counts of this process, and of the others that are shown with it."""
        return [Counts(*self.cells), *self.counts_of_others()]

    def begin(self, stage: ProgressStage, own_bytes: int = 0, closed_bytes: int = 0) -> None:
        """Begin a stage, as all processes do alike.

        Args:
            own_bytes: how many of its bytes this process has to do.
            closed_bytes: in files that this process closes.
        """
        self.display.begin(stage)
        self.cells[_DONE] = self.cells[_UNITS] = 0
        self.cells[_OWN] = stage.work(own_bytes, closed_bytes)
        self.cells[_STAGE] += 1  # last: whoever shows the stage takes no notice of other counts
        self._tell(True)

    def moved(self, count_bytes: int) -> None:
        self._add(MOVED, count_bytes)

    def synced(self, count_bytes: int) -> None:
        self._add(SYNCED, count_bytes)

    def read_back(self, count_bytes: int) -> None:
        self._add(READ_BACK, count_bytes)

    def closed(self, count_bytes: int) -> None:
        self._add(CLOSED, count_bytes)

    def completed(self) -> None:
        """Count one of the stage's units."""
        self.cells[_UNITS] += 1

    def finished(self, report: TargetReport) -> None:
        """Count a target as complete, and show it."""
        self.completed()
        self.display.finished(report)

    def waiting(self, text: str) -> None:
        """Say that this process waits for memory."""
        self.cells[_WAITS] = 1
        self._tell(True)
        self.display.say(text)

    def admitted(self) -> None:
        """Note that this process has the memory that it may have waited for."""
        if self.cells[_WAITS]:
            self.cells[_WAITS] = 0
            self._tell(True)

    def _add(self, phase: int, count_bytes: int) -> None:
        """Count bytes that have gone through a phase."""
        self.cells[_DONE] += _WORK[phase] * count_bytes
        self._tell(False)

    def _tell(self, soon: bool) -> None:
        if self.counted is not None:
            self.counted(soon)


class SliceCounter:
    """Reports progress scaled to a known total: `end` reports all that is missing to the total.

    Attributes:
        moved: told how many bytes are done.
        size_bytes: of the work.
        steps: as how many bytes `add` will be told of it; None: as many.
    """

    def __init__(self, moved: Callable[[int], None], size_bytes: int, steps: int | None = None) -> None:
        self._moved = moved
        self._size_bytes = size_bytes
        self._steps = max(1, size_bytes if steps is None else steps)
        self._added = self._told_bytes = 0

    def add(self, count: int) -> None:
        """Tell that a part of the work is done."""
        self._added += count
        self._tell(min(self._added, self._steps) * self._size_bytes // self._steps)

    def end(self) -> None:
        """Tell that all of the work is done."""
        self._tell(self._size_bytes)

    def _tell(self, done_bytes: int) -> None:
        self._moved(done_bytes - self._told_bytes)
        self._told_bytes = done_bytes


def told_target(report: TargetReport) -> str:
    """Return a complete target in one line."""
    waited = f", {report.waited_seconds:.2f} s of it waiting" if report.waited_seconds >= _WORTH_SECONDS else ""
    sources = counted(len(report.read_ranks), "source rank")
    written = format_bytes(report.written_bytes)
    return f"target {report.rank}: {written} from {sources} in {report.seconds:.2f} s{waited}"
