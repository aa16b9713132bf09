"""Turn termination into an exception, so that locks and partial files are removed (`Terminated`)."""

from __future__ import annotations

import atexit
import resource
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

from reshard_mpi.errors import UsageError
from reshard_mpi.text import KIB, MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from sys import UnraisableHookArgs

INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM

_AGAIN_SECONDS = 0.001


class Terminated(SystemExit):
    """Raised by SIGTERM."""


def ignore_stops() -> None:
    """Ignore signals to stop from now on, as this process is about to end."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def stopped_by(error: BaseException) -> int | None:
    """Return the exit code if a signal to stop has raised `error`; None for other errors."""
    if isinstance(error, Terminated):
        return TERMINATED
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else None


def exit_when_terminated() -> None:
    """Have SIGTERM raise Terminated in the main thread from now on; neither it nor an interrupt gets lost."""
    signal.signal(signal.SIGTERM, _terminate)
    # It is ignored in the background of a shell, and a process that was forked has its parent's.
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_DFL):
        signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = _raise_again
    atexit.register(_stop_handling)


def _stop_handling() -> None:
    """Leave signals to the system, since Python removes handlers while it ends, and a late signal would kill it."""
    for number in (signal.SIGTERM, signal.SIGINT):
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if callable(signal.getsignal(signal.SIGALRM)):  # else the alarm is for an abort that does not come to its end
        signal.setitimer(signal.ITIMER_REAL, 0)


def _terminate(signum: int, frame: FrameType | None) -> None:
    if _is_importing(frame):
        _handle_again(_terminate)
    else:
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise Terminated(TERMINATED)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    if _is_importing(frame):
        _handle_again(_interrupt)
    else:
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    """Tell whether a module is being loaded: some libraries turn exceptions raised then into their own errors."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _handle_again(handler: Callable[[int, FrameType | None], None]) -> None:
    signal.signal(signal.SIGALRM, handler)
    # Repeated, since a signal just before a long system call would be handled only after that.
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS, _AGAIN_SECONDS)


def _raise_again(unraisable: UnraisableHookArgs) -> None:
    """Handle a signal again that came while an object was deleted, since Python drops exceptions raised then."""
    if not issubclass(unraisable.exc_type, SystemExit | KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
        return
    _handle_again(_interrupt if issubclass(unraisable.exc_type, KeyboardInterrupt) else _terminate)


# With 128 KiB Python 3.11 crashes on deeply nested lists in a file before it notices how deep they are; with less than
# 96 KiB it does not even start this program.
MIN_STACK_BYTES = MIB


def require_stack() -> None:
    """Raise the limit on the stack to what Python needs. Raises UsageError if the user may not."""
    allowed_bytes, most_bytes = resource.getrlimit(resource.RLIMIT_STACK)
    if allowed_bytes == resource.RLIM_INFINITY or allowed_bytes >= MIN_STACK_BYTES:
        return
    if most_bytes != resource.RLIM_INFINITY and most_bytes < MIN_STACK_BYTES:
        raise UsageError(
            "the limit on the size of the stack is too low for Python",
            expected=f"{format_bytes(MIN_STACK_BYTES)} or more",
            got=format_bytes(most_bytes),
            remedy=f"ulimit -s {8 * MIB // KIB}, as is usual, in a shell in which it has not been lowered for good",
        )
    resource.setrlimit(resource.RLIMIT_STACK, (MIN_STACK_BYTES, most_bytes))
