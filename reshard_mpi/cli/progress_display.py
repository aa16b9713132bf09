"""Show the progress of a run on the terminal, as a bar or as lines (`display_for`)."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, TextIO

from reshard_mpi.runs.progress import Display, say
from reshard_mpi.text import MIB, one_line

if TYPE_CHECKING:
    from tqdm import tqdm

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
