"""Show the progress of a run as a bar or as lines, and its result (`display_for`, `summary`)."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from reshard_mpi import formats
from reshard_mpi.errors import TransformError
from reshard_mpi.runs.progress import Display, say
from reshard_mpi.text import MIB, counted, format_bytes, format_rate, one_line

if TYPE_CHECKING:
    from tqdm import tqdm

    from reshard_mpi.runs.outcome import Outcome
    from reshard_mpi.runs.progress import RunStatus


def display_for(options: argparse.Namespace) -> Display:
    """Return what shows progress on the standard error: a bar on a terminal, else lines."""
    if options.progress == "auto" and may_draw(sys.stderr, os.environ):
        return Bar(sys.stderr, with_colour=has_colour(sys.stderr, os.environ), verbose=is_verbose(options))
    return Lines(sys.stderr, verbose=is_verbose(options))


def is_verbose(options: argparse.Namespace) -> bool:
    """Tell whether details are shown; not all commands have any."""
    return getattr(options, "verbose", False)


# The bar appears, or the first line is printed, after this time in seconds. Shorter runs need neither: their closing
# line says all, and the library that draws the bar takes a while to load.
_FIRST_SECONDS = 0.5
_USUAL_COLUMNS, _USUAL_ROWS = 80, 24
# Columns that a bar takes at least, with what is around it.
_LEAST_BAR = 14
# Seconds between two lines.
_LINE_SECONDS = 5.0


class Lines(Display):
    """Prints a line for each stage and then every few seconds, and a last one when the run has come to its end."""

    def __init__(self, stream: TextIO, *, verbose: bool = False) -> None:
        super().__init__(verbose=verbose)
        self._stream = stream
        self._next_seconds = _FIRST_SECONDS
        self._stage = ""

    def update(self, status: RunStatus) -> None:
        is_next_stage = self._stage not in ("", status.stage)
        if status.seconds >= self._next_seconds or is_next_stage:
            self._next_seconds, self._stage = status.seconds + _LINE_SECONDS, status.stage
            say(status.as_text(), self._stream)

    def say(self, text: str) -> None:
        say(one_line(text), self._stream)

    def reading(self, source: str) -> None:
        self.say(f"source: {source}")

    def close(self, status: RunStatus) -> None:
        if self._stage and status.bytes_total is not None:
            say(status.as_text(), self._stream)


class Bar(Display):
    """Draws a bar on a terminal."""

    memory_bytes = 5 * MIB  # of the library, as measured

    def __init__(self, stream: TextIO, *, with_colour: bool, verbose: bool = False) -> None:
        super().__init__(verbose=verbose)
        self._stream = stream
        self._with_colour = with_colour
        self._bar: tqdm[NoReturn] | None = None
        self._widths = 0, 0  # of the widest texts before and behind the bar

    def update(self, status: RunStatus) -> None:
        if self._bar is None:
            if status.seconds < _FIRST_SECONDS:
                return
            self._bar = _new_bar(self._stream, with_colour=self._with_colour)
        columns = self._bar.ncols = _columns(self._stream)
        if status.bytes_total is None:
            self._bar.bar_format = status.as_text()[:columns]
        else:
            self._bar.total, self._bar.n = max(1, status.bytes_total), status.bytes_done or not status.bytes_total
            first, others = status.beside_a_bar()
            before = max(self._widths[0], len(first))  # or the ends of the bar would jump about
            room = max(0, columns - before - _LEAST_BAR)
            rest = _fitting(others, room)
            behind = min(max(self._widths[1], len(rest)), room)
            self._widths = before, behind
            self._bar.bar_format = f"{first:<{before}} |{{bar}}| {rest:<{behind}}"
        with contextlib.suppress(OSError, ValueError):  # nobody looks any more
            self._bar.refresh()

    def say(self, text: str) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError, ValueError):
                self._bar.clear()
        say(one_line(text), self._stream)
        if self._bar is not None:
            with contextlib.suppress(OSError, ValueError):
                self._bar.refresh()

    def reading(self, source: str) -> None:
        self.say(f"source: {source}")

    def close(self, status: RunStatus) -> None:
        if self._bar is not None:
            self.update(status)
            self._bar.leave = status.bytes_total is not None  # what was planned is printed next
            with contextlib.suppress(OSError, ValueError):
                self._bar.close()

    def abandon(self, *, ends_line: bool) -> None:
        if self._bar is not None:
            self._bar.disable = True  # it is left as it is
            if ends_line:
                say("", self._stream)


def may_draw(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Tell whether a stream is a terminal on which a bar can be drawn."""
    return stream.isatty() and environment.get("TERM") != "dumb"


def has_colour(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Tell whether to print in colour: on a terminal, unless the user does not want it (https://no-color.org)."""
    return may_draw(stream, environment) and not environment.get("NO_COLOR")


def _new_bar(stream: TextIO, *, with_colour: bool) -> tqdm[NoReturn]:
    import threading

    from tqdm import tqdm

    # Neither a thread that watches the bar, nor a lock that processes share: it is one of many processes that draws.
    tqdm.monitor_interval = 0
    tqdm.set_lock(threading.RLock())
    colour = "green" if with_colour else None
    # It draws nothing on a terminal that does not say how many rows it has, unless it is told.
    columns, rows = _columns(stream), _USUAL_ROWS
    return tqdm(total=1, file=stream, ncols=columns, nrows=rows, mininterval=0, bar_format=" ", colour=colour)


def _fitting(parts: Sequence[str], columns: int) -> str:
    """Return the first of some parts, joined, as many as fit a number of columns."""
    text = ""
    for part in parts:
        longer = f"{text}, {part}" if text else part
        if len(longer) > columns:
            break
        text = longer
    return text


def _columns(stream: TextIO) -> int:
    """Return how many characters fit a line of a terminal, which may have changed; a guess if it does not say."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    return (columns or _USUAL_COLUMNS) - 1  # some terminals begin a new line after the last


# Every report file begins so.
_BEGINNING = b'{\n "version": 1,\n "source": '


def _is_report(path: Path) -> bool:
    """Tell whether the file at `path` is a report, or empty."""
    with path.open("rb") as stream:
        head = stream.read(len(_BEGINNING))
    return head in (_BEGINNING, b"")


def may_be_report(path: str, target: str) -> bool:
    """Tell whether a report may take the name `path`: an existing file may be replaced only if it is a report."""
    from reshard_mpi.filesystem.paths import is_replaceable
    from reshard_mpi.journal.records import COMMIT_RECORD, STATE

    real, commit_record = Path(os.path.realpath(path)), Path(os.path.realpath(target), COMMIT_RECORD)
    if formats.name_of(path) or real == commit_record or STATE in real.parts or not is_replaceable(real):
        return False
    if not os.access(real, os.F_OK):
        return os.access(real.parent, os.W_OK | os.X_OK) and real.parent.is_dir()
    return os.access(real, os.R_OK | os.W_OK) and _is_report(real)


def in_the_way_of(report: Path) -> str:
    """Say why a report cannot be written: what lies there, or what its folder is."""
    from reshard_mpi.filesystem.paths import described

    lies_there, folder = described(report), report.parent
    if lies_there != "nothing":
        return lies_there
    return "a folder that takes no file of yours" if folder.is_dir() else f"no folder {folder}"


def write_report(path: str, facts: Mapping[str, Any], outcome: Outcome, seconds: float) -> TransformError | None:
    """Write the report of a run as JSON. Return the error if the file system refuses it; then no file is left."""
    report = {"version": 1, **facts, "seconds": seconds, **outcome.as_json()}
    try:
        Path(path).write_text(json.dumps(report, indent=1) + "\n")
    except OSError as error:
        with contextlib.suppress(OSError):
            Path(path).unlink()
        complete = "" if outcome.failures else "; all targets of this run are complete"
        return TransformError(
            f"the report could not be written{complete}",
            expected="a folder that takes it",
            got=error.strerror or str(error),
            where=path,
            remedy="make room, or choose another place; --resume --report writes it without making targets again",
        )
    return None


def summary(outcome: Outcome, seconds: float, *, is_verified: bool) -> str:
    """Return the closing line of a run; of one file by itself, it says where that is.

    Args:
        is_verified: whether targets were compared with their sources.
    """
    written = [target for target in outcome.targets if not target.skipped]
    skipped = len(outcome.targets) - len(written)
    done = "wrote and verified" if is_verified else "wrote"
    speed = f", {_speed(sum(target.written_bytes for target in written), seconds)}" if written else ""
    text = f"{done} {counted(len(written), 'shard')}{speed}"
    text += f"; {skipped} {'was' if skipped == 1 else 'were'} complete already" if skipped else ""
    paths = [target.path for target in outcome.targets]
    kind = formats.name_of(paths[0]) if len(paths) == 1 else None
    # A file of a folder that is one checkpoint is nothing by itself.
    return f"{text}: {one_line(paths[0])}" if kind is not None and formats.folder_by_name(kind) is None else text


def verified(outcome: Outcome, seconds: float) -> str:
    """Return the closing line of a verification that found no damage."""
    shards = [checked for checked in outcome.checked if checked.by]
    tensors = sum(checked.tensors for checked in shards)
    by = ", ".join(dict.fromkeys(way for checked in shards for way in checked.by))
    speed = _speed(sum(checked.read_bytes for checked in shards), seconds)
    return f"verified {counted(len(shards), 'shard')}, {counted(tensors, 'tensor')}, {speed} by {by}: sound"


def same(outcome: Outcome, seconds: float) -> str:
    """Return the closing line of a comparison that found two checkpoints to hold the same."""
    tensors = sum(checked.tensors for checked in outcome.checked)
    speed = _speed(sum(checked.read_bytes for checked in outcome.checked), seconds)
    return f"compared {counted(tensors, 'tensor')}, {speed}: the same"


def _speed(size_bytes: int, seconds: float) -> str:
    return f"{format_bytes(size_bytes)} in {seconds:.2f} s ({format_rate(size_bytes, seconds)})"
