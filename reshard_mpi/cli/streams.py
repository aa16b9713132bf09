"""Standard output and standard error of the command line, and what becomes of a command when they take nothing.

What is printed is either what a command is for (`plan`, `verify`, `ranks`, `governor`, `inspect`, help): where standard
output does not take it, as on a full disk, that is an error. Or it only tells of what has been done (`transform`,
`commit`, `demo`): then it is a warning, and the command has succeeded. Nobody is told anything where the reader has
gone (`| head`), or where standard output was closed from the beginning.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO

from reshard_mpi.errors import ReshardError


def open_standard_streams() -> None:
    """Have streams that are closed lead nowhere: the next file to be opened, a target, would come in their places."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # where it is less than Unicode


def flush_standard_streams() -> None:
    """Have all that was printed leave this process. What cannot is dropped: whoever cares has been told.

    Left in a buffer, it would be tried again at the end of the interpreter, and failing become an exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _give_up(stream)


def show(text: str | bytes) -> None:
    """Print what a command is for. Raises ReshardError if it cannot be written."""
    error = _print(text)
    if error is not None:
        raise ReshardError(
            "the output cannot be written",
            expected="a file or a program that takes it",
            got=error.strerror or str(error),
            where="standard output",
            remedy="make room, or have it go elsewhere",
        )


def tell_done(text: str) -> None:
    """Print what a command has done; where that cannot be written, a warning that has it."""
    error = _print(text)
    if error is not None:
        with contextlib.suppress(OSError):
            warning = f"warning: standard output cannot be written ({error.strerror or error}); what is done stands"
            sys.stderr.write(f"{warning}: {text}\n")


def _print(text: str | bytes) -> OSError | None:
    """Print `text` at once, followed by a line break if it is no bytes. Return what the system refused, if it did."""
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
    """Have what is still to be written to a stream lead nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
