"""What the command line says to wrong usage: the error, what was probably meant, and where to look. It exits with 2."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

from reshard_mpi.cli.streams import show
from reshard_mpi.processes import comm
from reshard_mpi.text import did_you_mean, one_line, shortened

_HELP_COLUMNS = 78


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Lays out help for the smallest terminal, however wide this one is, and breaks no name at its hyphens."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=_HELP_COLUMNS)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class CommandParser(argparse.ArgumentParser):
    """Parses the arguments of one command, or of the whole command line up to the name of a command."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)  # a shortened option would change its meaning with the next one

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse all arguments: what is left over is an error, for which the parser of the command knows the words."""
        arguments = list(sys.argv[1:] if args is None else args)
        unknown = next(self._unknown_options(arguments), None)
        if unknown is not None:
            self.error(f"no such option: {unknown}{did_you_mean(unknown, self._option_string_actions)}")
        options, superfluous = super().parse_known_args(arguments, namespace)
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
        meant = did_you_mean(str(value), choices)
        if action.dest == argparse.SUPPRESS:
            raise argparse.ArgumentError(None, f"no such command: {value!r}{meant}")
        raise argparse.ArgumentError(action, f"expected {_alternatives(choices)}, got {value!r}{meant}")

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line, and where to look in another; exit with 2."""
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
