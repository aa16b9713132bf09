"""Termination as an exception, so that locks are left and partial files removed on the way out."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM

_AGAIN_SECONDS = 0.001


def exit_when_terminated() -> None:
    """From now on SIGTERM raises SystemExit in the main thread; neither it nor an interrupt gets lost."""
    signal.signal(signal.SIGTERM, _terminate)
    sys.unraisablehook = _raise_again


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    sys.exit(TERMINATED)


def _raise_again(unraisable: UnraisableHookArgs) -> None:
    """Python drops what is raised while an object is deleted: have a signal that came just then handled once more."""
    if not issubclass(unraisable.exc_type, SystemExit | KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
        return
    lost = signal.SIGINT if issubclass(unraisable.exc_type, KeyboardInterrupt) else signal.SIGTERM
    signal.signal(signal.SIGALRM, signal.getsignal(lost))
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
