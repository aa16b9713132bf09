"""Define the options that commands share, and parse any, correcting a wrong command line (`add`, `CommandParser`)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NoReturn

from reshard_mpi import formats
from reshard_mpi.cli.output import show
from reshard_mpi.errors import UsageError
from reshard_mpi.options import ENDPOINT, LOCAL_PATH, OPTIONS, PATH, Kind
from reshard_mpi.text import did_you_mean, shortened


@cache
def reader_of(kind: Kind) -> Callable[[str], Any]:
    """Return the function that reads a word of the command line as a value of a kind, as argparse calls it (`type`)."""

    def read(word: str) -> Any:
        try:
            return kind.check(word, "a word") if kind.read is None else kind.read(word)
        except UsageError as error:
            remedy = f"; {error.remedy}" if error.remedy else ""
            raise argparse.ArgumentTypeError(f"expected {error.expected}, got {error.got}{remedy}") from None

    return read


path, local_path = reader_of(PATH), reader_of(LOCAL_PATH)


def add(parser: argparse._ActionsContainer, name: str, text: str, *, choices: Sequence[str] = ()) -> None:
    """Add the option `name` of runs, with its help. choices: its values, if a command does not take all of them."""
    option = OPTIONS[name]
    kind = option.kind
    if kind.action == "store_true":
        parser.add_argument(option.flag, action="store_true", help=text)
        return
    parser.add_argument(
        option.flag,
        dest=name,
        action=kind.action,
        type=str if kind.choices else reader_of(kind),
        choices=choices or (kind.choices and kind.choices()),
        default=list(option.default) if option.is_repeatable and option.default is not None else option.default,
        metavar=option.metavar,
        help=text,
    )


def strategies_of(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    return parser.add_argument_group("how both sides are cut")


def work_of(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    return parser.add_argument_group("memory and processes")


def add_strategies(
    command: argparse.ArgumentParser,
    target: str = "to be (default: one full checkpoint)",
    unsaid: str = "as its shards say",
) -> None:
    parser = strategies_of(command)
    add(parser, "src_strategy", f"how SRC is sharded (default: {unsaid})")
    add(parser, "dst_strategy", f"how DST is {target}")
    add(
        parser,
        "unlisted",
        "parameters DST's strategy does not list: follow the one they are named after (moments.w: w), hold them"
        " whole on every rank, or leave them out (default: %(default)s)",
    )


def add_files(command: argparse.ArgumentParser, source: str, *, rank: str = "") -> None:
    """Add the options that select files. rank: help text for naming ranks, if these can be named."""
    parser = command.add_argument_group("which files are read")
    add(parser, "select", f"take only files of {source} whose names match")
    add(
        parser,
        "source_format",
        f"take only files of this format in {source}: {', '.join(formats.names())} (default: what lies there, if it"
        " is of one)",
    )
    add(
        parser,
        "src_files",
        f"how many files {source} was saved in: asked for where nothing in it tells (dcp-safetensors)",
    )
    if rank:
        add(parser, "rank", rank)


def add_map(command: argparse.ArgumentParser, source: str = "SRC", target: str = "the target") -> None:
    parser = command.add_argument_group("what becomes of tensors")
    add_equations(parser, source)
    add(parser, "config", "the model's configuration, for [axes] of maps and for how weights are quantized")
    add(
        parser,
        "like",
        "a checkpoint of the target's network, trained or not: its names and shapes decide where those of"
        " the source do not tell what an equation of the map makes, and the target must have them",
    )
    add(
        parser,
        "dtype",
        "convert floating-point tensors, all or those whose names match, to fp64, fp32, fp16, bf16, fp8_e4m3 or"
        " fp8_e5m2, rounding to nearest even; quantized weights are dequantized (repeatable; the last that matches"
        " counts)",
    )
    add(parser, "include", f"take only tensors whose names match, as they are named in {target} (repeatable)")
    add(parser, "exclude", f"leave out tensors whose names match, as they are named in {target} (repeatable)")
    add_accumulated(parser)


def add_equations(parser: argparse._ArgumentGroup, source: str) -> None:
    """Add the options for maps alone."""
    add(
        parser,
        "map",
        f"take the tensors of {source} through the equations of a map, a file or one that comes with the program,"
        " or through an equation ('LEFT <=> RIGHT'): other names, shapes and types (repeatable: each is applied to what"
        " the one before it has made; reshard-mpi help maps)",
    )
    direction = parser.add_mutually_exclusive_group()
    add(direction, "forward", "read every map from left to right (default: as the names tell, for each map)")
    add(direction, "reverse", "read every map from right to left")
    add(
        parser,
        "axis",
        "the length of an axis of the map, such as what a vocabulary is padded to a multiple of, before what [axes]"
        " says of it (repeatable)",
    )


def add_accumulated(parser: argparse._ActionsContainer) -> None:
    add(
        parser,
        "accumulated",
        "gradients that are being accumulated (accu_grads.*, grad_sum.*), of which ranks that hold the same piece"
        " have different sums. mean: every target rank gets the mean of all. sum: the lowest of the target ranks that"
        " hold the same piece gets the sum of all, the others zeros. refuse: they must be the same (default:"
        " %(default)s)",
    )


def add_comparison(parser: argparse.ArgumentParser, sampled: str) -> None:
    checks = parser.add_argument_group("what is checked")
    text = f"sample: {sampled}, as transform does. any: trust (default: %(default)s)"
    add(checks, "replicas", text, choices=("any", "sample"))
    work = work_of(parser)
    add_memory(work)
    add_jobs(work)


def add_memory(parser: argparse._ActionsContainer) -> None:
    add(
        parser,
        "memory",
        "what all processes of this user on a host may take together, as 64G (default: RESHARD_MPI_MEMORY, else"
        " what is free); processes that find no room wait. unlimited: none waits",
    )
    add(parser, "max_active", "how many may work at once on a host")


def add_jobs(parser: argparse._ActionsContainer) -> None:
    add(
        parser,
        "jobs",
        "local processes, no more than there is work for (default: one a core, up to 8 or the number of targets,"
        " the more; 1 under a launcher)",
    )


def add_output(parser: argparse.ArgumentParser, details: str) -> argparse._ArgumentGroup:
    output = parser.add_argument_group("what is printed")
    add_progress(output)
    amount = output.add_mutually_exclusive_group()
    amount.add_argument("-q", "--quiet", action="store_true", help="print nothing but warnings and errors")
    amount.add_argument("-v", "--verbose", action="store_true", help=f"print {details} as well")
    return output


def add_progress(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--progress",
        choices=("auto", "plain", "none"),
        default="auto",
        help="auto: a bar on a terminal, else a line every few seconds, as plain (default: %(default)s)",
    )


def add_endpoint(parser: argparse.ArgumentParser) -> None:
    """Add the option of commands that take addresses in object stores."""
    parser.add_argument(
        "--s3-endpoint",
        type=reader_of(ENDPOINT),
        metavar="URL",
        help="the store that s3:// addresses lie in, as https://minio.example:9000 (default: AWS_ENDPOINT_URL_S3,"
        " AWS_ENDPOINT_URL, or what the profile says; else Amazon's)",
    )


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


class CommandLineError(UsageError):
    """A command line that cannot be parsed. command: the one it is about, such as `reshard-mpi plan`."""

    def __init__(self, problem: str, command: str) -> None:
        super().__init__(problem, remedy=f"{command} --help")
        self.command = command


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

    def _match_arguments_partial(self, actions: Sequence[argparse.Action], arg_strings_pattern: str) -> list[int]:
        """Leave an argument that may be missing for later if more come behind options, as in PATH --json GLOB."""
        counts = super()._match_arguments_partial(actions, arg_strings_pattern)
        while counts and not counts[-1] and "A" in arg_strings_pattern[sum(counts) :]:
            counts.pop()
        return counts

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
        """Raise the error for a wrong command line."""
        raise CommandLineError(message, self.prog)

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is sys.stdout:  # help and version; argparse itself is silent where they cannot be written
            show(message.removesuffix("\n"))
        else:
            super()._print_message(message, file)


def _alternatives(words: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
