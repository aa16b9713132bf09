"""Report a wrong command line, with the probable correction (`CommandParser`).

What the command line says to wrong usage: the error, what was probably meant, and where to look. It exits with 2.

For some commands the output is the purpose (`plan`, `verify`, `ranks`, `governor`, `inspect`, help): if it cannot be
written, as on a full disk, that is an error. Others only report what they have done (`transform`, `commit`, `demo`):
then it is a warning, and the command has succeeded. If the reader has gone (`| head`), or standard output was closed
from the beginning, nothing is said.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn, TextIO

from reshard_mpi import formats
from reshard_mpi.errors import ReshardError
from reshard_mpi.processes import comm
from reshard_mpi.text import did_you_mean, one_line, shortened


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


_HELP_COLUMNS = 78


class HelpFormatter(argparse.HelpFormatter):
    """Lays out help for the smallest terminal, however wide this one is, and breaks no name at its hyphens."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=_HELP_COLUMNS)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Break a description into lines; a text that has lines already, as the exit codes, stays as it is."""
        return text if "\n" in text else super()._fill_text(text, width, indent)

    def _split_lines(self, text: str, width: int) -> list[str]:
        import textwrap  # which every command would load, for the few that show help

        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


# Options of other programs, and what does the same here.
_INSTEAD = {
    **dict.fromkeys(("--strip-prefix", "--remove-prefix"), "--map 'PREFIX{p*} <=> {p*}'"),
    **dict.fromkeys(("--add-prefix", "--prepend-prefix"), "--map '{p*} <=> PREFIX{p*}'"),
    **dict.fromkeys(("--rename", "--rename-keys", "--key-map", "--key-mapping"), "--map 'OLD <=> NEW'"),
    **dict.fromkeys(("--output-format", "--target-format", "--format"), "--to FORMAT"),
    **dict.fromkeys(("--input-format", "--source-format"), "--from FORMAT"),
    **dict.fromkeys(("--transpose", "--permute"), "--map 'NAME [a b] <=> NAME [b a]'"),
}
# Words of users for formats.
_FORMATS = {
    **dict.fromkeys(("pt", "pth", "bin", "pytorch"), "torch"),
    **dict.fromkeys(("huggingface", "hugging-face", "hugging_face", "transformers"), "hf"),
    **dict.fromkeys(("distcp", "torch-dcp", "torch_dcp", "fsdp", "fsdp2"), "dcp"),
    **dict.fromkeys(("h5", "hdf"), "hdf5"),
    **dict.fromkeys(("mindspore", "ms"), "ckpt"),
    "st": "safetensors",
}
# The last one counts of these options, since they only change how it goes; scripts put theirs before the user's.
_LAST_COUNTS = frozenset(("jobs", "memory", "max_active", "progress", "report"))


# Which of them have been given, while arguments are parsed.
_GIVEN = "_given"


class _Given(argparse.Action):
    """Keep the value of an option. A second, different value is an error for options that decide the output."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        given: set[str] = vars(namespace).setdefault(_GIVEN, set())
        if option_string is not None and self.dest not in _LAST_COUNTS:
            if self.dest in given and getattr(namespace, self.dest) != values:
                before = getattr(namespace, self.dest)
                raise argparse.ArgumentError(self, f"given twice, with {str(before)!r} and with {str(values)!r}")
            given.add(self.dest)
        setattr(namespace, self.dest, values)


class CommandParser(argparse.ArgumentParser):
    """Parses the arguments of one command, or of the whole command line up to the name of a command."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)  # a shortened option would change its meaning with the next one
        self.register("action", None, _Given)
        self.register("action", "store", _Given)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse all arguments; unknown ones are an error, worded by the parser of the command."""
        arguments = list(sys.argv[1:] if args is None else args)
        unknown = next(self._unknown_options(arguments), None)
        if unknown is not None:
            instead = _INSTEAD.get(unknown)
            is_option = instead is not None and instead.partition(" ")[0] in self._option_string_actions
            meant = f"; did you mean {instead}?" if is_option else did_you_mean(unknown, self._option_string_actions)
            self.error(f"no such option: {unknown}{meant}")
        options, superfluous = super().parse_known_args(arguments, namespace)
        vars(options).pop(_GIVEN, None)
        if superfluous and superfluous[0].startswith("-") and "--" not in arguments:
            self.error(f"no such option: {superfluous[0]}")
        if superfluous:
            self.error(f"too many arguments: {shortened(list(map(repr, superfluous)))}")
        return options, []

    def _unknown_options(self, arguments: Iterable[str]) -> Iterator[str]:
        """Yield the long options that this parser does not have. Those behind the name of a command are not its own."""
        for argument in arguments:
            if argument == "--" or (self._subparsers is not None and not argument.startswith("-")):
                return
            name = argument.partition("=")[0]
            if name.startswith("--") and " " not in name and name not in self._option_string_actions:
                yield name

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = list(map(str, action.choices))
        if formats.DEFAULT in choices and value in formats.left_out():
            raise formats.left_out()[value]
        format_name = _FORMATS.get(str(value).casefold().lstrip("."))
        meant = f"; did you mean {format_name!r}?" if format_name in choices else did_you_mean(str(value), choices)
        if action.dest == argparse.SUPPRESS:
            raise argparse.ArgumentError(None, f"no such command: {value!r}{meant}")
        raise argparse.ArgumentError(action, f"expected {_alternatives(choices)}, got {value!r}{meant}")

    def error(self, message: str) -> NoReturn:
        """Print the error in one line, and where to look in another; exit with 2."""
        if comm.speaks(os.environ):
            text = f"{self.prog}: error: {one_line(message)}\n  what to do: {self.prog} --help"
            with contextlib.suppress(OSError):  # the exit code says it too
                print(text, file=sys.stderr)
        sys.exit(2)

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is sys.stdout:  # help and version; argparse itself is silent where they cannot be written
            show(message.removesuffix("\n"))
        else:
            super()._print_message(message, file)


def _alternatives(words: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
