"""Run a command: alone, under mpirun or in an array task (`main`)."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from reshard_mpi.cli.arguments import parser
from reshard_mpi.cli.dispatch import last_words, run, tell, world
from reshard_mpi.cli.start import begin_command, end_if_stopped
from reshard_mpi.cli.usage import flush_standard_streams, open_standard_streams, tell_done
from reshard_mpi.errors import ReshardError
from reshard_mpi.processes import comm
from reshard_mpi.processes.governor.process_memory import finish
from reshard_mpi.processes.host import ONE_THREAD
from reshard_mpi.processes.signals import (
    INTERRUPTED,
    Terminated,
    exit_when_terminated,
    ignore_stops,
    require_stack,
    stopped_by,
)
from reshard_mpi.text import counted, lines, one_line

if TYPE_CHECKING:
    from reshard_mpi.runs.outcome import Outcome


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code."""
    if not comm.awaits_world(os.environ):
        exit_when_terminated()
    for name, value in ONE_THREAD.items():
        os.environ.setdefault(name, value)
    options = argparse.Namespace()
    try:
        require_stack()
        options = parser(sys.argv[1:] if arguments is None else arguments).parse_args(arguments)
        code = _function_of(options.command)(options)
    except (KeyboardInterrupt, Terminated) as stop:
        code = stopped_by(stop) or INTERRUPTED
        ignore_stops()
        if comm.speaks(os.environ):
            last_words(options)(code)
    except ReshardError as error:
        code = error.exit_code
        _complain(error)
    except OSError as error:
        code = ReshardError.exit_code
        _complain(one_line(f"{error.strerror or error}: {error.filename}" if error.filename else str(error)))
    sys.exit(code)


def command() -> NoReturn:
    """Run `main` in a process of its own, which ends without taking the interpreter apart.

    That would take longer than a small conversion. With MPI it ends as usual, since MPI has work to do then.
    """
    open_standard_streams()
    begin_command()
    try:
        main()
    except SystemExit as end:
        end_if_stopped(end)
        code = end.code if isinstance(end.code, int) else 1
        flush_standard_streams()
        comm.end_job(os.environ, code)
        if "mpi4py.MPI" in sys.modules:
            raise
        finish()
        os._exit(code)


def _function_of(name: str) -> Callable[[argparse.Namespace], int]:
    if name in _COMMANDS:
        return _COMMANDS[name]
    from reshard_mpi.cli.print_commands import COMMANDS

    return COMMANDS[name]


def _complain(error: ReshardError | str) -> None:
    if comm.speaks(os.environ):
        from reshard_mpi.runs.progress import say

        say(f"reshard-mpi: error: {error}", sys.stderr)


def _transform(options: argparse.Namespace) -> int:
    from reshard_mpi.errors import UsageError

    begin = time.monotonic()
    with world(options) as group:
        unwritable = group.rank == 0 and options.report and not _can_be_written(options.report, options.target)
        if any(group.allgather(unwritable)):
            raise UsageError(
                "the report cannot be written",
                expected="a new file in a folder, or an earlier report; no name of a shard or of a file of the run",
                got=_in_the_way_of(Path(options.report)),
                where=options.report,
                remedy="choose another name, in a folder that is there",
            )
        outcome = run("CONVERT", options, group)
        seconds = time.monotonic() - begin
        from reshard_mpi.cli.display import summary

        unreported = None
        if group.rank == 0:
            tell(outcome, options)
            unreported = _report(options, outcome, seconds) if options.report else None
            if unreported is not None and outcome.failures:
                _complain(unreported)
        outcome.raise_failures()
        if group.rank == 0 and not options.quiet:
            tell_done(summary(outcome, seconds, is_verified=options.verify))
        if unreported is not None:
            raise unreported
    return 0


def _report(options: argparse.Namespace, outcome: Outcome, seconds: float) -> ReshardError | None:
    """Write the report that was asked for; return the error to raise if the file system refuses it."""
    from reshard_mpi.cli.display import write_report
    from reshard_mpi.errors import TransformError

    facts = {"source": options.source, "target": options.target, "processes": outcome.processes}
    try:
        write_report(options.report, facts, outcome, seconds)
    except OSError as error:
        complete = "" if outcome.failures else "; all targets of this run are complete"
        return TransformError(
            f"the report could not be written{complete}",
            expected="a folder that takes it",
            got=error.strerror or str(error),
            where=options.report,
            remedy="make room, or choose another place; --resume --report writes it without making targets again",
        )
    return None


def _can_be_written(path: str, target: str) -> bool:
    """Tell whether a report may take the name `path`: an existing file may be replaced only if it is a report."""
    from reshard_mpi import formats
    from reshard_mpi.cli import display
    from reshard_mpi.filesystem.paths import is_replaceable
    from reshard_mpi.journal.records import COMMIT_RECORD, STATE

    real, commit_record = Path(os.path.realpath(path)), Path(os.path.realpath(target), COMMIT_RECORD)
    if formats.name_of(path) or real == commit_record or STATE in real.parts or not is_replaceable(real):
        return False
    if not os.access(real, os.F_OK):
        return os.access(real.parent, os.W_OK | os.X_OK) and real.parent.is_dir()
    return os.access(real, os.R_OK | os.W_OK) and display.is_report(real)


def _in_the_way_of(report: Path) -> str:
    """Say why a report cannot be written: what lies there, or what its folder is."""
    from reshard_mpi.filesystem.paths import described

    lies_there, folder = described(report), report.parent
    if lies_there != "nothing":
        return lies_there
    return "a folder that takes no file of yours" if folder.is_dir() else f"no folder {folder}"


def _commit(options: argparse.Namespace) -> int:
    from reshard_mpi.journal.run_status import commit
    from reshard_mpi.runs.progress import say
    from reshard_mpi.text import format_bytes

    done = commit(Path(options.target))
    for kind, texts in (("warning", done.told.warnings), ("note", done.told.notes)):
        for text in texts:
            say(f"{kind}: {one_line(text)}", sys.stderr)
    targets, path = counted(done.targets, "target"), one_line(str(done.path))
    tell_done(f"committed {targets}, {format_bytes(done.size_bytes)}: {path}")
    return 0


def _merge(options: argparse.Namespace) -> int:
    from reshard_mpi.sharding.strategy.merge import merge

    merge(options.folder, options.out)
    return 0


def _demo(options: argparse.Namespace) -> int:
    from reshard_mpi.cli.demo import run_demo

    with world(options) as group:
        account = run_demo(options.folder, group)
        if group.rank == 0:
            tell_done(lines(account))
    return 0


_COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "transform": _transform,
    "commit": _commit,
    "merge-strategies": _merge,
    "demo": _demo,
}
