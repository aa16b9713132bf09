"""Add the options of runs to the parsers of commands, each with its help (`add`, and a function for each group)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from reshard_mpi import formats
from reshard_mpi.errors import UsageError
from reshard_mpi.options import OPTIONS, PATH, Kind


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


path = reader_of(PATH)


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
    add(parser, "config", "the model's configuration, for [axes] of maps")
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
        " fp8_e5m2, rounding to nearest even (repeatable; the last that matches counts)",
    )
    add(parser, "include", f"take only tensors whose names match, as they are named in {target} (repeatable)")
    add(parser, "exclude", f"leave out tensors whose names match, as they are named in {target} (repeatable)")
    add_accumulated(parser)


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
