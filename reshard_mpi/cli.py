"""The command line `reshard-mpi`: the same under mpirun, in an array task, or alone.

Only what parses arguments is imported here; each command imports what it needs.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from reshard_mpi import comm
from reshard_mpi.errors import ReshardError
from reshard_mpi.signals import INTERRUPTED, exit_when_terminated
from reshard_mpi.threads import ONE_THREAD

if TYPE_CHECKING:
    from reshard_mpi.report import Bar, Outcome, Plain, Progress, Silent
    from reshard_mpi.request import Request

_EXIT_CODES = """\
exit codes: 0 done; 1 a bug; 2 wrong usage; 3 bad input, refused before anything was written; 4 some targets failed or
are missing, and are named (the others are complete); 5 it can never fit the memory that is allowed, refused before
anything was written; 130 interrupted; 143 terminated"""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code."""
    exit_when_terminated()
    for name, value in ONE_THREAD.items():
        os.environ.setdefault(name, value)
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except ReshardError as error:
        code = error.exit_code
        _complain(error)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever read our output has enough
        code = 0
    except OSError as error:
        code = ReshardError.exit_code
        _complain(f"{error.strerror or error}: {error.filename}" if error.filename else str(error))
    sys.exit(code)


def command() -> NoReturn:
    """Be the process of the command line: as `main`, but the interpreter is not taken apart at the end.

    That would take longer than a small conversion, as would looking for garbage: hardly anything made here is cyclic.
    MPI has things to do when a process ends, and so is left to.
    """
    gc.disable()
    _open_standard_streams()
    try:
        main()
    except SystemExit as end:
        if "mpi4py.MPI" in sys.modules:
            raise
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # whoever cares has been told
                stream.flush()
        os._exit(end.code if isinstance(end.code, int) else 1)


def _open_standard_streams() -> None:
    """Have streams that are closed lead nowhere: the next file to be opened, a target, would come in their places."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def _complain(error: ReshardError | str) -> None:
    if comm.launched_rank(os.environ) == 0:  # every rank fails alike; once is enough
        from reshard_mpi.report import say

        say(f"reshard-mpi: error: {error}", sys.stderr)


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)  # a shortened option would change its meaning with the next one

    def error(self, message: str) -> NoReturn:
        if comm.launched_rank(os.environ) == 0:
            self.print_usage(sys.stderr)
            print(f"{self.prog}: error: {message}", file=sys.stderr)
        sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="reshard-mpi",
        description="Rewrite a checkpoint of M ranks as one of N ranks, bit-exactly and in bounded memory.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    from reshard_mpi import __version__

    parser.add_argument("--version", action="version", version=f"reshard-mpi {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=_EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.set_defaults(run=run)
        return added

    transform = command("transform", _transform, "reshard the checkpoint SRC into the folder DST")
    _add_conversion(transform)
    transform.add_argument("--jobs", type=_positive, metavar="N", help=_JOBS_HELP)
    transform.add_argument("--report", metavar="FILE.json", help="write what was done, target by target")
    transform.add_argument(
        "--progress", choices=("auto", "plain", "none"), default="auto", help="auto: a live line on a terminal"
    )
    plan = command("plan", _plan, "show what transform would do, writing nothing")
    _add_conversion(plan)
    shown = plan.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print it as JSON")
    shown.add_argument(
        "--sbatch", action="store_true", help="print a SLURM array script that does it, memory and time from the plan"
    )
    commit = command("commit", _commit, "check that all targets in DST are complete, and write DST/reshard.json")
    commit.add_argument("target", metavar="DST", help="the folder that transform has written to")
    ranks = command("ranks", _ranks, "list the source ranks that target rank R needs, one per line")
    ranks.add_argument("rank", type=_rank, metavar="R", help="the target rank")
    _add_strategies(ranks)
    merge = command("merge-strategies", _merge, "merge the strategy files of all pipeline stages into one")
    merge.add_argument("folder", metavar="DIR", help="folder with the strategy files of every stage")
    merge.add_argument("out", metavar="OUT", help="the merged file (.json: as JSON)")
    governor = command("governor", _governor, "show who holds memory on this host now, and who waits for it")
    governor.add_argument("--json", action="store_true", help="print it as JSON")
    inspect = command("inspect", _inspect, "show what a shard, a checkpoint folder or a strategy holds")
    inspect.add_argument("path", metavar="PATH")
    inspect.add_argument("--json", action="store_true", help="print it as JSON")
    demo = command("demo", _demo, "make a small checkpoint of 8 ranks, reshard it to 4, and check every element")
    demo.add_argument("folder", metavar="DIR", nargs="?", help="where to leave its files (default: removed again)")
    return parser


_JOBS_HELP = "local processes (default: one a core, up to 8 or the number of targets, the more; 1 under a launcher)"


def _add_conversion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="rank_* folders, one checkpoint file, or loose files")
    parser.add_argument("target", metavar="DST", help="folder for rank_<r>/<prefix><r>.<ending>")
    _add_strategies(parser)
    parser.add_argument("--prefix", default="checkpoint_", help="of target file names (default: %(default)s)")
    parser.add_argument("--select", metavar="GLOB", help="take only source files whose names match")
    parser.add_argument("--to", choices=("ckpt", "hdf5"), help="target format (default: the source's)")
    share = parser.add_mutually_exclusive_group()
    share.add_argument("--rank", type=_rank, action="append", metavar="R", help="make this target only (repeatable)")
    share.add_argument(
        "--part",
        type=_part,
        metavar="I/N",
        help="make the I-th (from 0) of N shares of the targets; with as many shares as targets or more, target I",
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE|unlimited",
        help="what all processes of this user on a host may take together, as 64G (default: RESHARD_MPI_MEMORY, else"
        " what is free); processes that find no room wait. unlimited: none waits",
    )
    parser.add_argument("--max-active", type=_positive, metavar="N", help="how many may transform at once on a host")
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="skip targets this same run has completed")
    again.add_argument("--overwrite", action="store_true", help="replace targets that are there, one by one")
    parser.add_argument("--strict", action="store_true", help="refuse if a listed parameter was never saved")


def _add_strategies(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--src-strategy", metavar="F|DIR", help="how SRC is sharded (default: as its shards say)")
    parser.add_argument("--dst-strategy", metavar="F|DIR", help="how DST is to be (default: one full checkpoint)")
    parser.add_argument(
        "--unlisted",
        choices=("follow", "replicate", "drop"),
        default="follow",
        help="parameters DST's strategy does not list: follow the one they are named after (moments.w: w), hold them"
        " whole on every rank, or leave them out (default: %(default)s)",
    )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _positive(text: str) -> int:
    if not _is_number(text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text!r}")
    return int(text)


def _rank(text: str) -> int:
    if not _is_number(text):
        raise argparse.ArgumentTypeError(f"expected a rank, 0 or more, got {text!r}")
    return int(text)


def _part(text: str) -> tuple[int, int]:
    share, slash, shares = text.partition("/")
    if not (slash and _is_number(share) and _is_number(shares) and int(share) < int(shares)):
        raise argparse.ArgumentTypeError(f"expected I/N with I from 0 to N-1, got {text!r}")
    return int(share), int(shares)


def _request(options: argparse.Namespace) -> Request:
    from reshard_mpi.planning.parameters import Unlisted
    from reshard_mpi.request import Request

    return Request(
        source=options.source,
        target=options.target,
        src_strategy=options.src_strategy,
        dst_strategy=options.dst_strategy,
        prefix=options.prefix,
        select=options.select,
        to=options.to,
        ranks=tuple(options.rank) if options.rank else None,
        part=options.part,
        resume=options.resume,
        overwrite=options.overwrite,
        unlisted=Unlisted(options.unlisted),
        strict=options.strict,
        memory=options.memory,
        max_active=options.max_active,
    )


def _transform(options: argparse.Namespace) -> int:
    from reshard_mpi.errors import UsageError

    request = _request(options)
    begin = time.monotonic()
    with comm.world(os.environ, explicit_share=bool(options.rank or options.part)) as world:
        unwritable = world.rank == 0 and options.report and not _can_be_written(Path(options.report))
        if any(world.allgather(unwritable, "looked where the report goes")):
            raise UsageError(
                "the report cannot be written",
                expected="a new file in a folder, or an earlier report; no name of a shard",
                where=options.report,
            )
        if world.size > 1 and (options.jobs or 1) > 1:
            raise UsageError(
                "--jobs does not go with an MPI run",
                expected="mpirun -n N alone",
                got=f"--jobs {options.jobs}",
                remedy="start more MPI ranks instead",
            )
        progress = _progress(options.progress, world)
        outcome = _convert(request, options.jobs, world, progress)
        progress.close()
        seconds = time.monotonic() - begin
        from reshard_mpi.report import summary, write_report

        if world.rank == 0:
            _tell(outcome)
            if options.report:
                facts = {"source": options.source, "target": options.target, "processes": outcome.processes}
                write_report(options.report, facts, outcome, seconds)
        outcome.raise_failures()
        if world.rank == 0:
            print(summary(outcome, seconds))
    return 0


def _convert(request: Request, jobs: int | None, world: comm.Comm, progress: Progress) -> Outcome:
    if world.size == 1 and (jobs is not None or not comm.is_launched(os.environ)):
        cores = len(os.sched_getaffinity(0))
        if (jobs or cores) > 1:
            from reshard_mpi.pool import convert_with_workers

            return convert_with_workers(request, jobs, progress)
    from reshard_mpi.runtime import convert

    return convert(request, world, progress)


def _can_be_written(path: Path) -> bool:
    from reshard_mpi import formats, report

    if formats.name_of(path.name) or not path.resolve().parent.is_dir() or path.is_dir():
        return False
    return not path.is_file() or report.is_report(path)  # whatever else is there may be a source or a strategy


def _progress(choice: str, world: comm.Comm) -> Bar | Plain | Silent:
    from reshard_mpi.report import Bar, Plain, Silent

    if choice == "none":
        return Silent()
    if choice == "auto" and world.size == 1 and sys.stderr.isatty():
        return Bar()
    return Plain()


def _tell(outcome: Outcome) -> None:
    from reshard_mpi.report import say

    for note in outcome.notes:
        say(f"note: {note}", sys.stderr)
    if outcome.absent:
        names = ", ".join(outcome.absent[:3]) + (" ..." if len(outcome.absent) > 3 else "")
        say(f"warning: {len(outcome.absent)} listed parameters are in no source shard: {names}", sys.stderr)


def _plan(options: argparse.Namespace) -> int:
    from reshard_mpi.errors import UsageError
    from reshard_mpi.runtime import plan_targets

    request = _request(options)
    if options.sbatch:
        if request.ranks is not None or request.part is not None:
            raise UsageError(
                "--sbatch goes with all targets",
                expected="neither --rank nor --part: the script gives every task its part",
                got="--rank" if request.part is None else "--part",
            )
        request = request._replace(resume=not request.overwrite)  # as the tasks will do it
    with comm.world(os.environ, explicit_share=bool(options.rank or options.part)) as world:
        planned, outcome = plan_targets(request, world)
        if world.rank == 0:
            if options.json:
                print(json.dumps(planned.as_json(), indent=1))
            elif options.sbatch:
                from reshard_mpi.sbatch import batch_script

                script = batch_script(request, planned, len(planned.targets) + len(outcome.targets))
                sys.stdout.buffer.write(os.fsencode(script))  # paths in it may be of any bytes
                _tell(outcome)
            else:
                print(planned.as_table())
                _tell(outcome)
    return 0


def _commit(options: argparse.Namespace) -> int:
    from reshard_mpi.commit import commit
    from reshard_mpi.report import say
    from reshard_mpi.units import format_bytes

    done = commit(Path(options.target))
    for note in done.notes:
        say(f"note: {note}", sys.stderr)
    targets = "target" if done.targets == 1 else "targets"
    print(f"committed {done.targets} {targets}, {format_bytes(done.size_bytes)}: {done.path}")
    return 0


def _ranks(options: argparse.Namespace) -> int:
    from reshard_mpi.api import rank_list_for_transform

    for rank in rank_list_for_transform(
        options.rank, options.src_strategy, options.dst_strategy, unlisted=options.unlisted
    ):
        print(rank)
    return 0


def _merge(options: argparse.Namespace) -> int:
    from reshard_mpi.strategy.merge import merge

    merge(options.folder, options.out)
    return 0


def _governor(options: argparse.Namespace) -> int:
    from reshard_mpi.governor.allowance import Allowance
    from reshard_mpi.governor.state import host_state

    state = host_state(Allowance.of(None, None, os.environ), os.environ)
    print(json.dumps(state.as_json(), indent=1) if options.json else state.as_text())
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from reshard_mpi.inspection import as_text, inspect

    found = inspect(options.path)
    print(json.dumps(found, indent=1) if options.json else as_text(found))
    return 0


def _demo(options: argparse.Namespace) -> int:
    from reshard_mpi.demo import run_demo

    with comm.world(os.environ, explicit_share=False) as world:
        account = run_demo(options.folder, world)
        if world.rank == 0:
            print(account)
    return 0
