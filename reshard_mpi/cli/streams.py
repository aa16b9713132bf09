"""Standard output and standard error of the command line, and what happens if they cannot be written.

For some commands the output is the purpose (`plan`, `verify`, `ranks`, `governor`, `inspect`, help): if it cannot be
written, as on a full disk, that is an error. Others only report what they have done (`transform`, `commit`, `demo`):
then it is a warning, and the command has succeeded. If the reader has gone (`| head`), or standard output was closed
from the beginning, nothing is said.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO

from reshard_mpi.errors import ReshardError


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


def tell_done(text: str) -> None:
    """Print what a command has done; if it cannot be written, say so, and the text, in a warning."""
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
