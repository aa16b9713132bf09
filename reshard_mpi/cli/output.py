"""Print results of commands and the progress of a run (`show`, `tell`, `display_for`), and write its report.

For some commands the output is the purpose (`plan`, `verify`, `ranks`, `governor`, `inspect`, help): if it cannot be
written, as on a full disk, that is an error. Others only report what they have done (`transform`, `commit`, `demo`):
then it is a warning, and the command has succeeded. If the reader has gone (`| head`), or standard output was closed
from the beginning, nothing is said. Progress goes to the standard error, as a bar on a terminal, else as lines.
"""

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
from reshard_mpi.errors import ReshardError, TransformError
from reshard_mpi.runs.progress import Display, say
from reshard_mpi.text import MIB, counted, format_bytes, format_rate, one_line, with_addresses

if TYPE_CHECKING:
    from tqdm import tqdm

    from reshard_mpi.runs.outcome import Outcome
    from reshard_mpi.runs.progress import RunStatus

# Every report file begins so.
_BEGINNING = b'{\n "version": 1,\n "source": '


def may_be_report(path: str, target: str) -> bool:
    """Tell whether a report may take the name `path`: an existing file may be replaced only if it is a report."""
    from reshard_mpi.filesystem.paths import is_file_or_nothing
    from reshard_mpi.journal.record_files import COMMIT_RECORD, STATE

    real, commit_record = Path(os.path.realpath(path)), Path(os.path.realpath(target), COMMIT_RECORD)
    if formats.name_of(path) or real == commit_record or STATE in real.parts or not is_file_or_nothing(real):
        return False
    if real.parent == commit_record.parent and formats.is_mark(real.name):
        return False
    if not os.access(real, os.F_OK):
        return os.access(real.parent, os.W_OK | os.X_OK) and real.parent.is_dir()
    if not os.access(real, os.R_OK | os.W_OK):
        return False
    with real.open("rb") as stream:
        return stream.read(len(_BEGINNING)) in (_BEGINNING, b"")


def in_the_way_of(report: Path) -> str:
    """Say why a report cannot be written: what lies there, or what its folder is."""
    from reshard_mpi.filesystem.paths import described

    lies_there, folder = described(report), report.parent
    if lies_there != "nothing":
        return lies_there
    if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
        return "the name of a file that a checkpoint has"
    return "a folder that takes no file of yours" if folder.is_dir() else f"no folder {folder}"


def write_report(path: str, facts: Mapping[str, Any], outcome: Outcome, seconds: float) -> TransformError | None:
    """Write the report of a run as JSON. Return the error if the file system refuses it; then no file is left."""
    report = {"version": 1, **facts, "seconds": seconds, **outcome.as_json()}
    try:
        Path(path).write_text(with_addresses(json.dumps(report, indent=1)) + "\n")
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
    copied_bytes = sum(target.store_copied_bytes for target in written)
    text += f", {format_bytes(copied_bytes)} copied inside the store" if copied_bytes else ""
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
    return f"{_compared(outcome, seconds)}: the same"


def compared(outcome: Outcome, seconds: float) -> str:
    """Return the closing line of a comparison in numbers."""
    tensors = () if outcome.comparison is None else outcome.comparison.tensors
    differing, failing = sum(tensor.differs for tensor in tensors), sum(not tensor.passes for tensor in tensors)
    not_all = ", but not all can be compared" if outcome.comparison and outcome.comparison.left_out else ""
    tolerated = f", {differing - failing} of them as far as is tolerated" if differing > failing else ""
    found = f"{differing} differ{tolerated}" if differing else "the same numbers"
    return f"{_compared(outcome, seconds)}: {found}{not_all}"


def _compared(outcome: Outcome, seconds: float) -> str:
    tensors = sum(checked.tensors for checked in outcome.checked)
    return f"compared {counted(tensors, 'tensor')}, {_speed(sum(each.read_bytes for each in outcome.checked), seconds)}"


def _speed(size_bytes: int, seconds: float) -> str:
    return f"{format_bytes(size_bytes)} in {seconds:.2f} s ({format_rate(size_bytes, seconds)})"


def open_standard_streams() -> None:
    """Open closed streams on /dev/null: otherwise a target, opened next, would take their descriptors."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # where it is less than Unicode


def flush_standard_streams() -> None:
    """Write out all that was printed, and drop what cannot be written, which has been reported already.

    Left in a buffer, it would be tried again when the interpreter ends, and change the exit code if it failed again.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _give_up(stream)


def show(text: str | bytes) -> None:
    """Print the output of a command whose purpose it is. Raises ReshardError if it cannot be written."""
    error = _print(text)
    if error is not None:
        raise ReshardError(
            "the output cannot be written",
            expected="a file or a program that takes it",
            got=error.strerror or str(error),
            where="standard output",
            remedy="make room, or have it go elsewhere",
        )


def tell(outcome: Outcome, options: argparse.Namespace) -> None:
    """Print notes, unless the user wants none, and warnings."""
    for note in () if getattr(options, "quiet", False) else outcome.notes:
        say(f"note: {one_line(note)}", sys.stderr)
    for warning in outcome.warnings:
        say(f"warning: {one_line(warning)}", sys.stderr)


def tell_done(text: str) -> None:
    """Print the result of a command; if that fails, log the failure, and the text, as a warning."""
    error = _print(text)
    if error is not None:
        with contextlib.suppress(OSError):
            warning = f"warning: standard output cannot be written ({error.strerror or error}); what is done stands"
            sys.stderr.write(f"{warning}: {text}\n")


def _print(text: str | bytes) -> OSError | None:
    """Print bytes, or a text and a line break, at once. Return the error if the system refuses that."""
    try:
        if isinstance(text, bytes):
            sys.stdout.buffer.write(text)
        else:
            sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has enough
        _give_up(sys.stdout)
    except OSError as error:
        _give_up(sys.stdout)
        return error
    return None


def _give_up(stream: TextIO) -> None:
    """Send all further output of a stream to /dev/null."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


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
