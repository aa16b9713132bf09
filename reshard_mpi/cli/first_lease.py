"""Wait for memory before the command line is loaded (`take_first_lease`), and say last words after a signal."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from reshard_mpi.errors import ReshardError
from reshard_mpi.processes import comm, leases
from reshard_mpi.processes.governor import Allowance, Lease, open_governor
from reshard_mpi.processes.leases import BASE_BYTES, MPI_BYTES, Start
from reshard_mpi.processes.signals import INTERRUPTED, Terminated, exit_when_terminated, ignore_stops, stopped_by
from reshard_mpi.text import one_line

_COMMANDS = ("transform", "plan", "verify", "diff", "audit")
# The variable in which a process that starts over passes on what it knows.
_AGAIN = "RESHARD_MPI_START_OVER"
_MAX_QUOTED = 120
# No number that a process passes on to the one that takes its place is larger: places in line are nanoseconds since the
# host has started.
_MOST = 1 << 62


def take_first_lease() -> None:
    """Wait until there is memory to load the command line, if the command of this process needs any."""
    if comm.awaits_world(os.environ):
        sys.excepthook = _end_job_with_traceback
    else:
        exit_when_terminated()
    try:
        take_lease_for(sys.argv[1:])
    except (KeyboardInterrupt, Terminated) as stop:
        end_if_stopped(stop)


def end_if_stopped(error: BaseException) -> None:
    """End this process, after its last words, if a signal to stop has raised `error`."""
    code = stopped_by(error)
    if code is None:
        return
    ignore_stops()
    resumes = sys.argv[1:2] == ["transform"] and "--overwrite" not in sys.argv
    _say(stopped_text(code, resumes=resumes))
    os._exit(code)


def stopped_text(code: int, *, resumes: bool) -> str:
    """Return the last words of a process that a signal has stopped. resumes: the same command can go on."""
    word = "interrupted" if code == INTERRUPTED else "terminated"
    return f"reshard-mpi: {word}{'; the same command with --resume goes on' if resumes else ''}"


def take_lease_for(arguments: Sequence[str]) -> None:
    """Take the first lease of this process, if the command with these arguments needs memory.

    Wrong arguments are passed over; the command line reports them.
    """
    again = os.environ.pop(_AGAIN, "")
    if not arguments or arguments[0] not in _COMMANDS or {"-h", "--help"} & set(arguments):
        return
    memory, max_active = _option(arguments, "--memory"), _option(arguments, "--max-active")
    try:
        allowance = Allowance.of(memory, int(max_active) if max_active else None, os.environ)
        governor = open_governor(allowance, os.environ)
    except (ReshardError, ValueError):
        return
    say = (lambda _: None) if {"-q", "--quiet"} & set(arguments) else _say
    words = " ".join(("reshard-mpi", *arguments))[:_MAX_QUOTED]
    purpose = "".join(letter if letter.isprintable() else "?" for letter in words)
    earlier = _Earlier.loads(again)
    size_bytes = min(max(BASE_BYTES, earlier.need_bytes), governor.ceiling_bytes)
    try:
        if comm.launched_size(os.environ) > 1:
            # All ranks of a job are there already, and MPI goes on only with all of them: none can wait.
            leases.set_start(Start(os.getpid(), governor, governor.register(BASE_BYTES + MPI_BYTES, purpose), None))
            return
        lease = governor.take(size_bytes, purpose, say, numbers=earlier.numbers)
    except ReshardError:
        return  # it will be raised again
    waited_seconds = earlier.waited_seconds + lease.waited_seconds

    def over(size_bytes: int) -> None:
        if size_bytes > earlier.need_bytes:
            numbers = {key: number + 1 for key, number in lease.numbers.items()}  # the next to that place
            _start_over(lease, _Earlier(size_bytes, waited_seconds, numbers))

    leases.set_start(Start(os.getpid(), governor, lease, over, waited_seconds, earlier.need_bytes))


def _end_job_with_traceback(*error: Any) -> None:
    sys.__excepthook__(*error)
    comm.end_job(os.environ, 1)


class _Earlier(NamedTuple):
    """The state of a process before it started over: its needs, its waiting time, its places in line."""

    need_bytes: int = 0
    waited_seconds: float = 0.0
    numbers: dict[str, int] = {}  # noqa: RUF012 - never changed

    @classmethod
    def loads(cls, text: str) -> _Earlier:
        """Return the state that a process has passed on; nothing if somebody else has set the variable."""
        try:
            need_bytes, waited_seconds, numbers = json.loads(text)
            earlier = cls(int(need_bytes), float(waited_seconds), {key: int(second) for key, second in numbers.items()})
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            return cls()
        counts = (earlier.need_bytes, earlier.waited_seconds, *earlier.numbers.values())
        return earlier if all(0 <= count < _MOST for count in counts) else cls()


def _start_over(lease: Lease, earlier: _Earlier) -> None:
    """Replace this process by one that has loaded nothing yet; return if that fails."""
    lease.give_back()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    with contextlib.suppress(OSError):
        command = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, command, {**os.environ, _AGAIN: json.dumps(earlier)})


def _option(arguments: Sequence[str], name: str) -> str | None:
    """Return the last value that is given for an option; None if there is none."""
    value = None
    for argument, following in zip(arguments, [*arguments[1:], ""]):
        if argument == name:
            value = following
        elif argument.startswith(f"{name}="):
            value = argument.partition("=")[2]
    return value


def _say(text: str) -> None:
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{one_line(text)}\n")
            sys.stderr.flush()
