"""Define the commands and the options of each (`parser`), and make a `Request` (`request`). `--help` loads no more."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from reshard_mpi import formats
from reshard_mpi.cli.option_parser import (
    CommandParser,
    HelpFormatter,
    add,
    add_accumulated,
    add_comparison,
    add_endpoint,
    add_equations,
    add_files,
    add_jobs,
    add_map,
    add_memory,
    add_output,
    add_progress,
    add_strategies,
    local_path,
    path,
    reader_of,
    strategies_of,
    work_of,
)
from reshard_mpi.options import COUNT, OPTIONS, RANK

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
       complete), verify has found damage, diff a difference, audit an error, or
       only the report or the commit record could not be written
  5    it can never fit the memory that is allowed, refused before anything was
       written
  130  interrupted
  143  terminated"""

_PROGRAM = "reshard-mpi"


def parser(arguments: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of the command line. The parsed command's name is in `command`.

    Args:
        arguments: those that it will parse, if it needs to know only their command: each command takes its time to add.
    """
    top = CommandParser(
        prog=_PROGRAM,
        description="Rewrite a checkpoint of M ranks as one of N ranks, bit-exactly and in bounded memory.",
        epilog=_EXIT_CODES,
        formatter_class=HelpFormatter,
    )
    from reshard_mpi import __version__

    top.add_argument("--version", action="version", version=f"{_PROGRAM} {__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True, parser_class=CommandParser, prog=_PROGRAM)
    own = arguments[0] if arguments and arguments[0] in _COMMANDS else None
    for name in _COMMANDS if own is None else (own,):
        text, add_arguments = _COMMANDS[name]
        command = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=_EXIT_CODES,
            formatter_class=HelpFormatter,
        )
        command.set_defaults(command=name)
        add_arguments(command)
        if name not in _OF_NO_FILES:
            add_endpoint(command)
        command.usage = f"{_PROGRAM} {name} {_usage(command)}"
    return top


def commands_of(top: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of commands, by name, of the parser of the command line."""
    (commands,) = (action for action in top._actions if isinstance(action, argparse._SubParsersAction))
    return dict(commands.choices)


def _add_transform(parser: argparse.ArgumentParser) -> None:
    work = _add_conversion(parser)
    add_jobs(work)
    output = add_output(parser, "each target that is complete")
    output.add_argument("--report", type=local_path, metavar="FILE.json", help="write what was done, target by target")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    _add_conversion(parser)
    printed = parser.add_argument_group("what is printed")
    printed.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="list every tensor of the target: what it is made of, and which equation of the map says so",
    )
    printed.add_argument("-q", "--quiet", action="store_true", help="print no notes and no progress")
    add_progress(printed)
    shown = printed.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print it as JSON")
    shown.add_argument(
        "--script",
        choices=("slurm", "kubernetes"),
        help="print what a cluster does it by, a SLURM array or an Indexed Job, with memory and time from the plan",
    )
    shown.add_argument(
        "--sbatch", dest="script", action="store_const", const="slurm", help="the same as --script slurm"
    )
    shown.add_argument(
        "--plot",
        type=local_path,
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
    printed.add_argument(
        "--tensor",
        action="append",
        default=[],
        metavar="NAME",
        help="with --plot: draw how both sides cut this tensor (repeatable for a page)",
    )


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=path, metavar="SRC", help="a checkpoint")
    parser.add_argument("target", type=path, metavar="DST", nargs="?", help="what transform has made of it")
    add_strategies(parser, "sharded (default: as its shards say, else one full checkpoint)")
    add_files(
        parser,
        "SRC",
        rank="check the shards of these ranks only, of DST if it is given, such as 3 or 0-3,8 (repeatable)",
    )
    add_map(parser)
    add_comparison(parser, "hold the source strategy against SRC")
    add_output(parser, "each shard that is sound")


def _add_diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=path, metavar="A", help="a checkpoint")
    parser.add_argument("target", type=path, metavar="B", help="another one")
    sharded, strategies = "is sharded (default: as its shards say, else one full checkpoint)", strategies_of(parser)
    add(strategies, "src_strategy", f"how A {sharded}")
    add(strategies, "dst_strategy", f"how B {sharded}")
    add_files(parser, "A")
    add_map(parser, "A", "B, from both sides")
    add_comparison(parser, "hold the strategies against the checkpoints")
    output = add_output(parser, "each tensor that is the same")
    numbers = parser.add_argument_group("comparing in numbers")
    numbers.add_argument(
        "--values",
        action="store_true",
        help="say of each tensor how far apart both are, in float64: the share of elements that differ, the largest"
        " difference, absolute and relative to the larger of both, norms and cosine. Types may differ, NaN equals NaN,"
        " 0 equals -0. Then the same by kind (model, optimizer's moments, steps), and the values beside the tensors"
        " that differ",
    )
    within = "with --values: elements a and b pass if |a - b| <= atol + rtol * |b| (default: %(default)s)"
    add(numbers, "atol", within)
    add(numbers, "rtol", within)
    numbers.add_argument(
        "--top",
        type=reader_of(COUNT),
        metavar="N",
        help="with --values: list the N tensors that differ most (default: 20, and all with --json)",
    )
    output.add_argument("--json", action="store_true", help="with --values: print it as JSON")


def _add_audit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=path, metavar="CKPT", help="a checkpoint")
    add(strategies_of(parser), "src_strategy", "how CKPT is sharded (default: as its shards say)")
    add_files(parser, "CKPT")
    model = parser.add_argument_group("what it should have")
    add(
        model,
        "config",
        "the model's folder or its config.json: names and shapes must be the ones with which transformers saves it"
        " (default: the config.json beside the files of CKPT)",
    )
    add(model, "like", "a checkpoint whose names and shapes CKPT must have")
    add(model, "before", "the checkpoint that the training has saved before: its norms must be near")
    add_equations(model, "CKPT")
    add_comparison(parser, "hold the strategy against CKPT")
    judged = parser.add_argument_group("what counts")
    add(judged, "allow", "find nothing wrong with tensors whose names match (repeatable)")
    add(judged, "strict", "end with exit code 4 for notes and warnings too")
    output = add_output(parser, "every finding, however many there are,")
    output.add_argument("--json", action="store_true", help="print it as JSON")
    output.add_argument(
        "--plot",
        type=local_path,
        metavar="FILE.html",
        help="draw the norms of all tensors by layer and kind too, as a page, with what was found",
    )


def _add_commit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", type=path, metavar="DST", help="the folder that transform has written to")


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rank", type=reader_of(RANK), metavar="R", help="the target rank")
    add_strategies(parser, unsaid="one full checkpoint")
    add_accumulated(parser)


def _add_merging(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=path, metavar="DIR", help="folder with the strategy files of every stage")
    parser.add_argument("out", type=local_path, metavar="OUT", help="the merged file (.json: as JSON)")


def _add_governor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=path, metavar="PATH", help="what to look at")
    parser.add_argument(
        "others",
        type=path,
        metavar="GLOB|OTHER|TENSOR[SLICE]",
        nargs="*",
        help="tensors and values beside them whose names match, such as 'layers.0.*' (repeatable), with the ranks that"
        " hold them; or the path of another checkpoint, to list the tensors that are not alike in both: names, types"
        " and shapes; or elements of the whole tensor of this name, as numpy prints them, such as 'layers.0.w[:4, -1]'",
    )
    add_files(parser, "PATH", rank="list the shards of these ranks only, such as 3 or 0-3,8 (repeatable)")
    strategies = strategies_of(parser)
    add(strategies, "src_strategy", "how PATH is sharded, to read elements (default: as its shards say)")
    sampled = "sample: hold the strategy against PATH, as transform does. any: trust (default: %(default)s)"
    add(strategies, "replicas", sampled, choices=("any", "sample"))
    add_map(parser, "PATH", "what is read")
    printed = parser.add_argument_group("what is printed")
    printed.add_argument(
        "--stats",
        action="store_true",
        help="of TENSOR[SLICE], of the tensors whose names match, or of all: least and largest element, mean, norm, and"
        " how many are NaN, infinite and zero; NaN and infinities are in the counts only",
    )
    printed.add_argument(
        "--parallel-sizes",
        action="store_true",
        help="say to how many tensor-, pipeline- and expert-parallel ranks PATH can be cut, what stands in the way of"
        " other numbers (heads, KV groups, vocabulary, experts, layers, blocks of quantized weights), and the bytes of"
        " a rank; by config.json beside its files, or --config, or the arguments in a checkpoint of Megatron, and by"
        " the shapes of tensors",
    )
    form = printed.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print it as JSON")
    form.add_argument(
        "--toml",
        action="store_true",
        help="print the strategy (PATH, or that of the shards there) as a TOML spec that says the same of every name",
    )


def _add_guide(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "topic",
        metavar="TOPIC",
        nargs="?",
        help="a page, or a map that comes with the program (default: the list of pages)",
    )


def _add_completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "shell",
        choices=("bash", "zsh"),
        metavar="bash|zsh",
        help='for example, in ~/.bashrc: eval "$(reshard-mpi completion bash)"',
    )


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=local_path, metavar="DIR", nargs="?", help="where to leave its files (default: removed again)"
    )


def _usage(parser: argparse.ArgumentParser) -> str:
    """Return what must be given to a command; its many options are described by themselves."""
    positionals = [action for action in parser._actions if not action.option_strings]
    has_options = any(action.option_strings and action.dest != "help" for action in parser._actions)
    written = {"?": "[{}]", "*": "[{}]..."}
    words = [written.get(str(action.nargs), "{}").format(action.metavar) for action in positionals]
    return " ".join([*(["[OPTION]..."] if has_options else []), *words])


def _add_conversion(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options common to transform and plan; return the group for memory and processes."""
    source = "rank_* folders, one checkpoint file, loose files, or a folder with an index (hf, dcp, mindformers)"
    parser.add_argument("source", type=path, metavar="SRC", help=source)
    target = "folder for rank_<r>/<prefix><r>.<ending>; hf and dcp have their files in it"
    parser.add_argument("target", type=path, metavar="DST", help=target)
    add_strategies(parser)
    add_files(parser, "SRC")
    add_map(parser)
    files = parser.add_argument_group("which files are written")
    add(files, "to", "target format (default: the source's)")
    add(files, "prefix", "of target file names (default: %(default)s)")
    add(
        files,
        "max_shard_size",
        "how large a file may become with --to hf or megatron (default: 5GB, which is 5 * 10^9 bytes)",
    )
    able = ", ".join(form.name for form in formats.all_formats() if form.is_target and form.has_crc)
    add(files, "crc", f"add a checksum of the file, for MindSpore to check ({able})")
    share = files.add_mutually_exclusive_group()
    add(share, "rank", "make these targets only, such as 3 or 0-3,8 (repeatable)")
    add(
        share,
        "part",
        "make the I-th (from 0) of N shares of the targets, which are dealt out in turn: 0/2 is 0, 2, 4 and so on;"
        " with as many shares as targets or more, target I; auto/N: the cluster's runner says which task of an array"
        " this is",
    )
    again = files.add_mutually_exclusive_group()
    add(again, "resume", "skip targets this same run has completed")
    add(again, "overwrite", "replace targets that are there, one by one")
    add(files, "single_writer", "nobody else writes there: for an object store that does not keep conditions")
    frameworks = parser.add_argument_group("for what DeepSpeed and Megatron are to load")
    add(frameworks, "dp", "how many data-parallel ranks the files are for, with --to deepspeed")
    add(frameworks, "zero_stage", "which stage of ZeRO they are of, with --to deepspeed: 1, 2 or 3")
    add(frameworks, "ep", "how many ranks share out experts, with --to deepspeed and megatron (default: as before)")
    add(frameworks, "core_version", "which release of Megatron-Core is to load it, with --to megatron (default: 0.19)")
    checks = parser.add_argument_group("what is checked")
    add(
        checks,
        "verify",
        "compare targets, as they were written, with their sources, and keep sums of all tensors; the"
        " checksums of sources are checked as well",
    )
    add(
        checks,
        "strict",
        "refuse if a listed parameter was never saved, copies or unlisted values differ, or something is left out",
    )
    add(
        checks,
        "replicas",
        "what several ranks hold is taken from one of them. sample: before that, hold the source strategy against"
        " the checkpoint, comparing a few ranks in a few places of a few tensors. check: compare all copies of what is"
        " needed as well, byte by byte, once a run (each array task is one). any: trust (default: %(default)s)",
    )
    work = work_of(parser)
    add_memory(work)
    return work


def reading_options(options: argparse.Namespace) -> list[str]:
    """Return the options that were given to `inspect` for reading elements, as they are written."""
    known = [(OPTIONS[name], value) for name, value in vars(options).items() if name in OPTIONS and name != "rank"]
    return [option.flag for option, value in known if (value or None) != (option.default or None)]


def request(options: argparse.Namespace) -> Request:
    """Build the request of a command that opens a checkpoint from its parsed arguments."""
    from reshard_mpi.runs.request import Request

    given = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(options).items()
        if name in Request._fields
    }
    given["target"] = getattr(options, "target", None) or options.source
    return Request.of(given)._replace(keeps_journal=options.command not in ("verify", "diff", "audit"))


# The commands that take no addresses in object stores.
_OF_NO_FILES = frozenset(("governor", "help", "completion", "demo"))
_COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "transform": ("reshard the checkpoint SRC into the folder DST", _add_transform),
    "plan": ("show what transform would do, writing nothing", _add_plan),
    "verify": (
        "check that DST holds what SRC does, whatever their layouts; without DST, that SRC fits its own sums",
        _add_verify,
    ),
    "audit": ("check that a checkpoint is whole, and that its values can be from a training", _add_audit),
    "diff": ("check that two checkpoints hold the same tensors, whatever their formats and layouts", _add_diff),
    "commit": ("check that all targets in DST are complete, and write DST/reshard.json", _add_commit),
    "ranks": ("list the source ranks that target rank R needs, one per line", _add_ranks),
    "merge-strategies": ("merge the strategy files of all pipeline stages into one", _add_merging),
    "governor": ("show who holds memory on this host now, and who waits for it", _add_governor),
    "inspect": ("show what a shard, a checkpoint folder or a strategy holds", _add_inspect),
    "help": ("show a page of the guide; without a topic, which pages there are", _add_guide),
    "completion": ("print a script with which a shell completes commands, options and names", _add_completion),
    "demo": ("make a small checkpoint of 8 ranks, reshard it to 4, and check every element", _add_demo),
}
