"""How the command line shows the progress of a run: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn, TextIO

from reshard_mpi.runs.progress import say
from reshard_mpi.text import one_line

if TYPE_CHECKING:
    from tqdm import tqdm

    from reshard_mpi.runs.status import RunStatus

# The bar appears, or the first line is printed, after so many seconds. What is over by then needs no bar, for which a
# library would have to be loaded.
_FIRST_SECONDS = 0.5
# Seconds between two lines.
_LINE_SECONDS = 5.0


class Lines:
    """Prints a line every few seconds, and a last one if the run has come to its end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._next_seconds = _FIRST_SECONDS

    def update(self, status: RunStatus) -> None:
        if status.seconds >= self._next_seconds:
            self._next_seconds = status.seconds + _LINE_SECONDS
            say(status.as_text(), self._stream)

    def say(self, text: str) -> None:
        say(one_line(text), self._stream)

    def reading(self, source: str) -> None:
        self.say(f"source: {source}")

    def close(self, status: RunStatus | None) -> None:
        if status is not None and status.bytes_total:
            say(status.as_text(), self._stream)


class Bar:
    """Draws a bar on a terminal."""

    def __init__(self, stream: TextIO, *, with_colour: bool) -> None:
        self._stream = stream
        self._with_colour = with_colour
        self._bar: tqdm[NoReturn] | None = None

    def update(self, status: RunStatus) -> None:
        if self._bar is None:
            if status.seconds < _FIRST_SECONDS:
                return
            self._bar = _new_bar(self._stream, with_colour=self._with_colour)
        if status.bytes_total is None:
            self._bar.bar_format = status.as_text()
        else:
            self._bar.total, self._bar.n = max(1, status.bytes_total), status.bytes_done or not status.bytes_total
            self._bar.bar_format = f"{status.percent:3} %|{{bar}}| {status.as_text(with_percent=False)}"
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

    def close(self, status: RunStatus | None) -> None:
        if self._bar is None:
            if status is not None and status.bytes_total:
                say(status.as_text(), self._stream)
            return
        if status is not None:
            self.update(status)
        with contextlib.suppress(OSError, ValueError):
            self._bar.close()


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
    return tqdm(total=1, file=stream, dynamic_ncols=True, leave=True, mininterval=0, bar_format=" ", colour=colour)
