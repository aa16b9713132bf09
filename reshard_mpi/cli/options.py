"""Define the options that several commands have, and read their values (`work_of`)."""

from __future__ import annotations

import argparse

from reshard_mpi import formats
from reshard_mpi.filesystem.paths import is_url
from reshard_mpi.text import parse_bytes

# What is between the sides of an equation; `mapping.equations` has it too, and takes long to load.
ARROW = "<=>"

# As many as a run makes at once.
_MOST_RANKS = 1 << 16
_MOST_DIGITS = 18


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS


def path(text: str) -> str:
    """Return a path as it was given."""
    if not text:  # such as a variable of the shell that is not set; to a system call it is no path either
        raise argparse.ArgumentTypeError("expected a path, got ''")
    if is_url(text):
        raise argparse.ArgumentTypeError(f"expected a path, got the URL {text!r}; copy what is there to a file system")
    return text


def map_name(text: str) -> str:
    """Return a map as it was given: a path, a name or an equation."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, a name or an equation, got ''")
    return text if ARROW in text else path(text)


def positive(text: str) -> int:
    """Return a number of 1 or more."""
    if not _is_number(text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text!r}")
    return int(text)


def size(text: str) -> int:
    """Return a size in bytes."""
    try:
        size_bytes = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected {error}, got {text!r}") from None
    if size_bytes < 1:
        raise argparse.ArgumentTypeError(f"expected 1 byte or more, got {text!r}")
    return size_bytes


def rank(text: str) -> int:
    """Return one rank."""
    if not _is_number(text):
        raise argparse.ArgumentTypeError(f"expected a rank, 0 or more, got {text!r}")
    return int(text)


def ranks(text: str) -> tuple[int, ...]:
    """Return the ranks that a text such as `0-3,8` lists."""
    ranges = []
    for word in text.split(","):
        first, dash, last = word.partition("-")
        if not _is_number(first) or (dash and not _is_number(last)):
            raise argparse.ArgumentTypeError(f"expected ranks, such as 3 or 0-3,8, got {text!r}")
        ranges.append(range(int(first), int(last if dash else first) + 1))
        if not ranges[-1]:
            raise argparse.ArgumentTypeError(f"expected the lower rank first, {last}-{first}, got {word!r}")
    if sum(numbers.stop - numbers.start for numbers in ranges) > _MOST_RANKS:
        raise argparse.ArgumentTypeError(f"expected at most {_MOST_RANKS} ranks, got {text!r}")
    return tuple(number for numbers in ranges for number in numbers)


def part(text: str) -> tuple[int, int]:
    """Return a share and the number of shares, of a text such as `0/4`."""
    share, slash, shares = text.partition("/")
    if len(shares) > _MOST_DIGITS and shares.isdecimal():
        raise argparse.ArgumentTypeError(f"expected I/N with N of {_MOST_DIGITS} digits at most, got {text!r}")
    if not (slash and _is_number(share) and _is_number(shares) and int(share) < int(shares)):
        raise argparse.ArgumentTypeError(f"expected I/N with I from 0 to N-1, got {text!r}")
    return int(share), int(shares)


def strategies_of(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    return parser.add_argument_group("how both sides are cut")


def work_of(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    return parser.add_argument_group("memory and processes")


def add_accumulated(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--accumulated",
        choices=("mean", "sum", "refuse"),
        default="refuse",
        help="gradients that are being accumulated (accu_grads.*, grad_sum.*), of which ranks that hold the same piece"
        " have different sums. mean: every target rank gets the mean of all. sum: the lowest of the target ranks that"
        " hold the same piece gets the sum of all, the others zeros. refuse: they must be the same (default:"
        " %(default)s)",
    )


def add_map(command: argparse.ArgumentParser, source: str = "SRC", target: str = "the target") -> None:
    parser = command.add_argument_group("what becomes of tensors")
    parser.add_argument(
        "--map",
        type=map_name,
        action="append",
        default=[],
        metavar="FILE|NAME|EQ",
        help=f"take the tensors of {source} through the equations of a map, a file or one that comes with the program,"
        " or through an equation ('LEFT <=> RIGHT'): other names, shapes and types (repeatable: each is applied to what"
        " the one before it has made; reshard-mpi help maps)",
    )
    direction = parser.add_mutually_exclusive_group()
    direction.add_argument(
        "--forward",
        action="store_true",
        help="read every map from left to right (default: as the names tell, for each map)",
    )
    direction.add_argument("--reverse", action="store_true", help="read every map from right to left")
    parser.add_argument(
        "--config", type=path, metavar="FILE.json", help="the model's configuration, for [axes] of maps"
    )
    parser.add_argument(
        "--like",
        type=path,
        metavar="CHECKPOINT",
        help="a checkpoint of the target's network, trained or not: its names and shapes decide where those of"
        " the source do not tell what an equation of the map makes, and the target must have them",
    )
    parser.add_argument(
        "--dtype",
        action="append",
        default=[],
        metavar="[GLOB=]TYPE",
        help="convert floating-point tensors, all or those whose names match, to fp64, fp32, fp16, bf16, fp8_e4m3 or"
        " fp8_e5m2, rounding to nearest even (repeatable; the last that matches counts)",
    )
    for option, text in (
        ("--include", "take only tensors whose names match"),
        ("--exclude", "leave out tensors whose names match"),
    ):
        parser.add_argument(
            option,
            action="append",
            default=[],
            metavar="GLOB",
            help=f"{text}, as they are named in {target} (repeatable)",
        )
    add_accumulated(parser)


def add_rank(parser: argparse._ActionsContainer, text: str) -> None:
    parser.add_argument("--rank", type=ranks, action="extend", metavar="RANKS", help=text)


def add_jobs(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--jobs",
        type=positive,
        metavar="N",
        help="local processes, no more than there is work for (default: one a core, up to 8 or the number of targets,"
        " the more; 1 under a launcher)",
    )


def add_files(command: argparse.ArgumentParser, source: str, *, ranks: str | None = None) -> None:
    """Add the options that select files. ranks: help text for naming ranks, if these can be named."""
    parser = command.add_argument_group("which files are read")
    parser.add_argument("--select", metavar="GLOB", help=f"take only files of {source} whose names match")
    parser.add_argument(
        "--from",
        dest="source_format",
        choices=formats.NAMES,
        metavar="FORMAT",
        help=f"take only files of this format in {source}: {', '.join(formats.NAMES)} (default: what lies there, if it"
        " is of one)",
    )
    parser.add_argument(
        "--src-files",
        dest="source_files",
        type=positive,
        metavar="N",
        help=f"how many files {source} was saved in: asked for where nothing in it tells (dcp-safetensors)",
    )
    if ranks is not None:
        add_rank(parser, ranks)


def add_comparison(parser: argparse.ArgumentParser, sampled: str) -> None:
    checks = parser.add_argument_group("what is checked")
    checks.add_argument(
        "--replicas",
        choices=("any", "sample"),
        default="sample",
        help=f"sample: {sampled}, as transform does. any: trust (default: %(default)s)",
    )
    work = work_of(parser)
    add_memory(work)
    add_jobs(work)


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


def add_memory(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--memory",
        metavar="SIZE|unlimited",
        help="what all processes of this user on a host may take together, as 64G (default: RESHARD_MPI_MEMORY, else"
        " what is free); processes that find no room wait. unlimited: none waits",
    )
    parser.add_argument("--max-active", type=positive, metavar="N", help="how many may work at once on a host")


def add_strategies(
    command: argparse.ArgumentParser,
    target: str = "to be (default: one full checkpoint)",
    unsaid: str = "as its shards say",
) -> None:
    parser = strategies_of(command)
    parser.add_argument("--src-strategy", type=path, metavar="F|DIR", help=f"how SRC is sharded (default: {unsaid})")
    parser.add_argument("--dst-strategy", type=path, metavar="F|DIR", help=f"how DST is {target}")
    parser.add_argument(
        "--unlisted",
        choices=("follow", "replicate", "drop"),
        default="follow",
        help="parameters DST's strategy does not list: follow the one they are named after (moments.w: w), hold them"
        " whole on every rank, or leave them out (default: %(default)s)",
    )
