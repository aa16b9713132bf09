"""The arguments of the command line `reshard-mpi`. `--help` loads nothing else."""

from __future__ import annotations

import argparse
import textwrap
from typing import TYPE_CHECKING

from reshard_mpi import formats
from reshard_mpi.cli.usage import CommandParser
from reshard_mpi.units import parse_bytes

if TYPE_CHECKING:
    from reshard_mpi.runs.request import Request

_EXIT_CODES = """\
exit codes:
  0    done
  1    a bug
  2    wrong usage
  3    bad input, refused before anything was written, or no place for what is
       printed
  4    some targets failed or are missing, and are named (the others are
       complete), verify has found damage, diff a difference, or only the report
       could not be written
  5    it can never fit the memory that is allowed, refused before anything was
       written
  130  interrupted
  143  terminated"""

# As many as a run makes at once.
_MOST_RANKS = 1 << 16
_MOST_DIGITS = 18


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line. What it parses has the name of the command as `command`."""
    top = CommandParser(
        prog="reshard-mpi",
        description=_filled("Rewrite a checkpoint of M ranks as one of N ranks, bit-exactly and in bounded memory."),
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    from reshard_mpi import __version__

    top.add_argument("--version", action="version", version=f"reshard-mpi {__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True, parser_class=CommandParser)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name,
            help=text,
            description=_filled(text[0].upper() + text[1:] + "."),
            epilog=_EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.set_defaults(command=name)
        return added

    transform = command("transform", "reshard the checkpoint SRC into the folder DST")
    _add_conversion(transform)
    _add_jobs(transform)
    transform.add_argument("--report", type=_path, metavar="FILE.json", help="write what was done, target by target")
    _add_output(transform, "each target that is complete")
    plan = command("plan", "show what transform would do, writing nothing")
    _add_conversion(plan)
    plan.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="list every tensor of the target: what it is made of, and which equation of the map says so",
    )
    shown = plan.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print it as JSON")
    shown.add_argument(
        "--sbatch", action="store_true", help="print a SLURM array script that does it, memory and time from the plan"
    )
    shown.add_argument(
        "--plot",
        type=_path,
        metavar="FILE",
        help="draw who feeds whom instead, as .svg or .png, or as .html, a page with the cuts of tensors too; of many"
        " targets a sample is planned",
    )
    shown.add_argument(
        "--explain",
        metavar="NAME",
        help="say in words where the tensor NAME of the target comes from: which rule, which box, which bytes of which"
        " file; on the target ranks that --rank names (default: the first that holds it)",
    )
    plan.add_argument(
        "--tensor",
        action="append",
        default=[],
        metavar="NAME",
        help="with --plot: draw how both sides cut this tensor (repeatable for a page)",
    )
    verify = command(
        "verify", "check that DST holds what SRC does, whatever their layouts; without DST, that SRC fits its own sums"
    )
    verify.add_argument("source", type=_path, metavar="SRC", help="a checkpoint")
    verify.add_argument("target", type=_path, metavar="DST", nargs="?", help="what transform has made of it")
    _add_strategies(verify, "sharded (default: as its shards say, else one full checkpoint)")
    _add_rank(verify, "check the shards of these ranks only, of DST if it is given, such as 3 or 0-3,8 (repeatable)")
    _add_map(verify)
    _add_comparison(verify, "SRC", "hold the source strategy against SRC")
    _add_output(verify, "each shard that is sound")
    diff = command("diff", "check that two checkpoints hold the same tensors, whatever their formats and layouts")
    diff.add_argument("source", type=_path, metavar="A", help="a checkpoint")
    diff.add_argument("target", type=_path, metavar="B", help="another one")
    sharded = "is sharded (default: as its shards say, else one full checkpoint)"
    diff.add_argument("--src-strategy", type=_path, metavar="F|DIR", help=f"how A {sharded}")
    diff.add_argument("--dst-strategy", type=_path, metavar="F|DIR", help=f"how B {sharded}")
    _add_map(diff, "A")
    _add_comparison(diff, "A", "hold the strategies against the checkpoints")
    _add_output(diff)
    commit = command("commit", "check that all targets in DST are complete, and write DST/reshard.json")
    commit.add_argument("target", type=_path, metavar="DST", help="the folder that transform has written to")
    ranks = command("ranks", "list the source ranks that target rank R needs, one per line")
    ranks.add_argument("rank", type=_rank, metavar="R", help="the target rank")
    _add_strategies(ranks)
    merge = command("merge-strategies", "merge the strategy files of all pipeline stages into one")
    merge.add_argument("folder", type=_path, metavar="DIR", help="folder with the strategy files of every stage")
    merge.add_argument("out", type=_path, metavar="OUT", help="the merged file (.json: as JSON)")
    governor = command("governor", "show who holds memory on this host now, and who waits for it")
    governor.add_argument("--json", action="store_true", help="print it as JSON")
    inspect = command("inspect", "show what a shard, a checkpoint folder or a strategy holds")
    inspect.add_argument("path", type=_path, metavar="PATH", help="what to look at")
    inspect.add_argument(
        "other",
        type=_path,
        metavar="GLOB|OTHER",
        nargs="?",
        help="tensors whose names match, such as 'layers.0.*', with the ranks that hold them; or the path of another"
        " checkpoint, to list the tensors that are not alike in both: names, types and shapes",
    )
    _add_rank(inspect, "look at the shards of these ranks only, such as 3 or 0-3,8 (repeatable)")
    form = inspect.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print it as JSON")
    form.add_argument(
        "--toml",
        action="store_true",
        help="print the strategy (PATH, or that of the shards there) as a TOML spec that says the same of every name",
    )
    guide = command("help", "show a page of the guide; without a topic, which pages there are")
    guide.add_argument("topic", metavar="TOPIC", nargs="?", help="a page (default: the list of pages)")
    completion = command("completion", "print a script with which a shell completes commands, options and names")
    completion.add_argument(
        "shell",
        choices=("bash", "zsh"),
        metavar="bash|zsh",
        help='for example, in ~/.bashrc: eval "$(reshard-mpi completion bash)"',
    )
    demo = command("demo", "make a small checkpoint of 8 ranks, reshard it to 4, and check every element")
    demo.add_argument(
        "folder", type=_path, metavar="DIR", nargs="?", help="where to leave its files (default: removed again)"
    )
    return top


def _filled(text: str) -> str:
    """Return a text in lines for the smallest terminal; argparse leaves the width of descriptions to us."""
    return textwrap.fill(text, 78)


def _add_conversion(parser: argparse.ArgumentParser) -> None:
    source = "rank_* folders, one checkpoint file, loose files, or a folder with an index (hf, dcp, mindformers)"
    parser.add_argument("source", type=_path, metavar="SRC", help=source)
    target = "folder for rank_<r>/<prefix><r>.<ending>; hf and dcp have their files in it"
    parser.add_argument("target", type=_path, metavar="DST", help=target)
    _add_strategies(parser)
    parser.add_argument("--prefix", default=formats.DEFAULT_PREFIX, help="of target file names (default: %(default)s)")
    parser.add_argument("--select", metavar="GLOB", help="take only source files whose names match")
    _add_from(parser)
    _add_map(parser)
    parser.add_argument("--to", choices=formats.TARGETS, help="target format (default: the source's)")
    parser.add_argument(
        "--max-shard-size",
        type=_size,
        metavar="SIZE",
        help="how large a file may become with --to hf (default: 5GB, which is 5 * 10^9 bytes)",
    )
    share = parser.add_mutually_exclusive_group()
    _add_rank(share, "make these targets only, such as 3 or 0-3,8 (repeatable)")
    share.add_argument(
        "--part",
        type=_part,
        metavar="I/N",
        help="make the I-th (from 0) of N shares of the targets; with as many shares as targets or more, target I",
    )
    _add_memory(parser)
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="skip targets this same run has completed")
    again.add_argument("--overwrite", action="store_true", help="replace targets that are there, one by one")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read sources and targets once more, compare them, and keep sums of all tensors; the"
        " checksums of sources are checked as well",
    )
    parser.add_argument(
        "--crc",
        action="store_true",
        help="add a checksum of the file, for MindSpore to check (ckpt, safetensors, torch)",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="refuse if a listed parameter was never saved, copies or unlisted values differ, or something is left out",
    )
    parser.add_argument(
        "--replicas",
        choices=("any", "sample", "check"),
        default="sample",
        help="what several ranks hold is taken from one of them. sample: before that, hold the source strategy against"
        " the checkpoint, comparing a few ranks in a few places of a few tensors. check: compare all copies of what is"
        " needed as well, byte by byte, once a run (each array task is one). any: trust (default: %(default)s)",
    )
    _add_accumulated(parser)


def _add_accumulated(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--accumulated",
        choices=("mean", "sum", "refuse"),
        default="refuse",
        help="gradients that are being accumulated (accu_grads.*, grad_sum.*), of which ranks that hold the same piece"
        " have different sums. mean: every target rank gets the mean of all. sum: the lowest of the target ranks that"
        " hold the same piece gets the sum of all, the others zeros. refuse: they must be the same (default:"
        " %(default)s)",
    )


def _add_map(parser: argparse.ArgumentParser, source: str = "SRC") -> None:
    parser.add_argument(
        "--map",
        metavar="FILE|NAME",
        help=f"take the tensors of {source} through the equations of a map: other names, shapes and types"
        " (reshard-mpi help maps)",
    )
    direction = parser.add_mutually_exclusive_group()
    direction.add_argument(
        "--forward",
        action="store_true",
        help="read the map from left to right (default: as the names tell)",
    )
    direction.add_argument("--reverse", action="store_true", help="read the map from right to left")
    parser.add_argument(
        "--config", type=_path, metavar="FILE.json", help="the model's configuration, for [axes] of maps"
    )
    parser.add_argument(
        "--like",
        type=_path,
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
            help=f"{text}, as they are named in the target (repeatable)",
        )


def _add_rank(parser: argparse._ActionsContainer, text: str) -> None:
    parser.add_argument("--rank", type=_ranks, action="extend", metavar="RANKS", help=text)


def _add_jobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--jobs",
        type=_positive,
        metavar="N",
        help="local processes, no more than there is work for (default: one a core, up to 8 or the number of targets,"
        " the more; 1 under a launcher)",
    )


def _add_from(parser: argparse.ArgumentParser, source: str = "SRC") -> None:
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
        type=_positive,
        metavar="N",
        help=f"how many files {source} was saved in: asked for where nothing in it tells (dcp-safetensors)",
    )


def _add_comparison(parser: argparse.ArgumentParser, source: str, sampled: str) -> None:
    parser.add_argument("--select", metavar="GLOB", help=f"take only files of {source} whose names match")
    _add_from(parser, source)
    parser.add_argument(
        "--replicas",
        choices=("any", "sample"),
        default="sample",
        help=f"sample: {sampled}, as transform does. any: trust it (default: %(default)s)",
    )
    _add_accumulated(parser)
    _add_memory(parser)
    _add_jobs(parser)


def _add_output(parser: argparse.ArgumentParser, details: str | None = None) -> None:
    parser.add_argument(
        "--progress",
        choices=("auto", "plain", "none"),
        default="auto",
        help="auto: a bar on a terminal, else a line every few seconds, as plain (default: %(default)s)",
    )
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("-q", "--quiet", action="store_true", help="print nothing but errors")
    if details is not None:
        amount.add_argument("-v", "--verbose", action="store_true", help=f"print {details} as well")


def _add_memory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--memory",
        metavar="SIZE|unlimited",
        help="what all processes of this user on a host may take together, as 64G (default: RESHARD_MPI_MEMORY, else"
        " what is free); processes that find no room wait. unlimited: none waits",
    )
    parser.add_argument("--max-active", type=_positive, metavar="N", help="how many may work at once on a host")


def _add_strategies(parser: argparse.ArgumentParser, target: str = "to be (default: one full checkpoint)") -> None:
    parser.add_argument(
        "--src-strategy", type=_path, metavar="F|DIR", help="how SRC is sharded (default: as its shards say)"
    )
    parser.add_argument("--dst-strategy", type=_path, metavar="F|DIR", help=f"how DST is {target}")
    parser.add_argument(
        "--unlisted",
        choices=("follow", "replicate", "drop"),
        default="follow",
        help="parameters DST's strategy does not list: follow the one they are named after (moments.w: w), hold them"
        " whole on every rank, or leave them out (default: %(default)s)",
    )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS


def _path(text: str) -> str:
    if not text:  # such as a variable of the shell that is not set; to a system call it is no path either
        raise argparse.ArgumentTypeError("expected a path, got ''")
    return text


def _positive(text: str) -> int:
    if not _is_number(text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text!r}")
    return int(text)


def _size(text: str) -> int:
    try:
        size_bytes = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected {error}, got {text!r}") from None
    if size_bytes < 1:
        raise argparse.ArgumentTypeError(f"expected 1 byte or more, got {text!r}")
    return size_bytes


def _rank(text: str) -> int:
    if not _is_number(text):
        raise argparse.ArgumentTypeError(f"expected a rank, 0 or more, got {text!r}")
    return int(text)


def _ranks(text: str) -> tuple[int, ...]:
    """Return the ranks that a text such as `0-3,8` lists."""
    ranges = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not _is_number(first) or (dash and not _is_number(last)):
            raise argparse.ArgumentTypeError(f"expected ranks, such as 3 or 0-3,8, got {text!r}")
        ranges.append(range(int(first), int(last if dash else first) + 1))
        if not ranges[-1]:
            raise argparse.ArgumentTypeError(f"expected the lower rank first, {last}-{first}, got {part!r}")
    if sum(ranks.stop - ranks.start for ranks in ranges) > _MOST_RANKS:
        raise argparse.ArgumentTypeError(f"expected at most {_MOST_RANKS} ranks, got {text!r}")
    return tuple(rank for ranks in ranges for rank in ranks)


def _part(text: str) -> tuple[int, int]:
    share, slash, shares = text.partition("/")
    if len(shares) > _MOST_DIGITS and shares.isdecimal():
        raise argparse.ArgumentTypeError(f"expected I/N with N of {_MOST_DIGITS} digits at most, got {text!r}")
    if not (slash and _is_number(share) and _is_number(shares) and int(share) < int(shares)):
        raise argparse.ArgumentTypeError(f"expected I/N with I from 0 to N-1, got {text!r}")
    return int(share), int(shares)


def request(options: argparse.Namespace) -> Request:
    """Return what the arguments of `transform`, `plan` or `verify` ask for."""
    from reshard_mpi.planning.parameters import Unlisted
    from reshard_mpi.planning.partial_sums import Accumulated
    from reshard_mpi.planning.replicas import Replicas
    from reshard_mpi.runs.request import Request

    # Most fields are called like their options.
    named = {field: value for field, value in vars(options).items() if field in Request._fields}
    named["target"] = options.target or options.source
    for repeatable in ("dtype", "include", "exclude"):
        named[repeatable] = tuple(getattr(options, repeatable, ()))
    named["ranks"] = tuple(options.rank) if getattr(options, "rank", None) else None
    named["unlisted"] = Unlisted(getattr(options, "unlisted", Unlisted.FOLLOW))
    named["replicas"] = Replicas(options.replicas)
    named["accumulated"] = Accumulated(options.accumulated)
    return Request(**named, recorded=options.command not in ("verify", "diff"))
