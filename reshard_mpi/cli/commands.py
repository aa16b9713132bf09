"""The command line `reshard-mpi`: the same under mpirun, in an array task, or alone.

Each command imports what it needs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from reshard_mpi.cli.arguments import parser, request
from reshard_mpi.cli.start import begin_command, stopped_text
from reshard_mpi.cli.streams import flush_standard_streams, open_standard_streams, show, tell_done
from reshard_mpi.errors import DamageError, DifferenceError, ReshardError
from reshard_mpi.processes import comm
from reshard_mpi.processes.governor.allotment import finish
from reshard_mpi.processes.jobs import ONE_THREAD
from reshard_mpi.processes.signals import INTERRUPTED, Terminated, exit_when_terminated, ignore_stops, stopped_by
from reshard_mpi.processes.stack import require_stack
from reshard_mpi.text import counted, lines, one_line

if TYPE_CHECKING:
    from reshard_mpi.runs.outcome import Outcome
    from reshard_mpi.runs.progress import RunProgress
    from reshard_mpi.runs.request import Request
    from reshard_mpi.runs.watched import Display


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code."""
    exit_when_terminated()
    for name, value in ONE_THREAD.items():
        os.environ.setdefault(name, value)
    options = argparse.Namespace()
    try:
        require_stack()
        options = parser(sys.argv[1:] if arguments is None else arguments).parse_args(arguments)
        code = _COMMANDS[options.command](options)
    except (KeyboardInterrupt, Terminated) as stop:
        code = stopped_by(stop) or INTERRUPTED
        ignore_stops()
        if comm.speaks(os.environ):
            _last_words(options)(code)
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
        flush_standard_streams()
        if "mpi4py.MPI" in sys.modules:
            raise
        finish()
        os._exit(end.code if isinstance(end.code, int) else 1)


def _complain(error: ReshardError | str) -> None:
    if comm.speaks(os.environ):
        from reshard_mpi.runs.progress import say

        say(f"reshard-mpi: error: {error}", sys.stderr)


def _last_words(options: argparse.Namespace) -> Callable[[int], None]:
    """Return a function that says, given the exit code, that a signal has stopped the command, and how to go on."""

    def say_stopped(code: int) -> None:
        from reshard_mpi.runs.progress import say

        resumes = getattr(options, "command", "") == "transform" and not options.overwrite
        # On a terminal the line may hold progress already, or the ^C that it shows; a launcher may write to one.
        line_break = "\n" if sys.stderr.isatty() or comm.is_launched(os.environ) else ""
        say(line_break + stopped_text(code, resumes=resumes), sys.stderr)

    return say_stopped


def _world(options: argparse.Namespace) -> AbstractContextManager[comm.Comm]:
    """Return the processes that run this command together."""
    explicit_share = bool(getattr(options, "rank", None) or getattr(options, "part", None))
    return comm.world(os.environ, explicit_share=explicit_share, stopped=_last_words(options))


def _transform(options: argparse.Namespace) -> int:
    from reshard_mpi.errors import UsageError

    begin = time.monotonic()
    with _world(options) as world:
        unwritable = world.rank == 0 and options.report and not _can_be_written(options.report, options.target)
        if any(world.allgather(unwritable)):
            raise UsageError(
                "the report cannot be written",
                expected="a new file in a folder, or an earlier report; no name of a shard or of a file of the run",
                got=_in_the_way_of(Path(options.report)),
                where=options.report,
                remedy="choose another name, in a folder that is there",
            )
        outcome = _run("CONVERT", options, world)
        seconds = time.monotonic() - begin
        from reshard_mpi.cli.report import summary

        unreported = None
        if world.rank == 0:
            _tell(outcome, options)
            unreported = _report(options, outcome, seconds) if options.report else None
            if unreported is not None and outcome.failures:
                _complain(unreported)
        outcome.raise_failures()
        if world.rank == 0 and not options.quiet:
            tell_done(summary(outcome, seconds, is_verified=options.verify))
        if unreported is not None:
            raise unreported
    return 0


def _report(options: argparse.Namespace, outcome: Outcome, seconds: float) -> ReshardError | None:
    """Write the report that was asked for; return the error to raise if the file system refuses it."""
    from reshard_mpi.cli.report import write_report
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


def _run(work: str, options: argparse.Namespace, world: comm.Comm) -> Outcome:
    """Do the work that `runs.workers.Task` calls `work`, in MPI ranks, in local processes, or in this one alone."""
    with _shown(options, world) as progress:
        return _run_shown(work, options, world, progress)


@contextmanager
def _shown(options: argparse.Namespace, world: comm.Comm) -> Iterator[RunProgress]:
    """Show the progress of what is done in this context. All processes of `world` must enter and leave it."""
    progress = _progress(options, world)
    try:
        yield progress
    except BaseException as error:
        progress.abandon(ends_line=stopped_by(error) is None)  # last words begin a line of their own
        raise
    progress.close()


def _run_shown(work: str, options: argparse.Namespace, world: comm.Comm, progress: RunProgress) -> Outcome:
    from reshard_mpi.errors import UsageError
    from reshard_mpi.runs.workers import Task, run_with_workers

    jobs: int | None = options.jobs
    if world.size > 1 and (jobs or 1) > 1:
        raise UsageError(
            "--jobs does not go with an MPI run",
            expected="mpirun -n N alone",
            got=f"--jobs {jobs}",
            remedy="start more MPI ranks instead",
        )
    if world.size == 1 and (jobs is not None or not comm.is_launched(os.environ)):
        cores = len(os.sched_getaffinity(0))
        if (jobs or cores) > 1:
            return run_with_workers(request(options), jobs, progress, Task[work])
    return Task[work].run(request(options), world, progress)


def _can_be_written(path: str, target: str) -> bool:
    """Tell whether a report may take the name `path`: an existing file may be replaced only if it is a report."""
    from reshard_mpi import formats
    from reshard_mpi.cli import report
    from reshard_mpi.filesystem.paths import is_replaceable
    from reshard_mpi.journal.records import COMMIT_RECORD, STATE

    real, commit_record = Path(os.path.realpath(path)), Path(os.path.realpath(target), COMMIT_RECORD)
    if formats.name_of(path) or real == commit_record or STATE in real.parts or not is_replaceable(real):
        return False
    if not os.access(real, os.F_OK):
        return os.access(real.parent, os.W_OK | os.X_OK) and real.parent.is_dir()
    return os.access(real, os.R_OK | os.W_OK) and report.is_report(real)


def _in_the_way_of(report: Path) -> str:
    """Say why a report cannot be written: what lies there, or what its folder is."""
    from reshard_mpi.filesystem.paths import described

    lies_there, folder = described(report), report.parent
    if lies_there != "nothing":
        return lies_there
    return "a folder that takes no file of yours" if folder.is_dir() else f"no folder {folder}"


def _progress(options: argparse.Namespace, world: comm.Comm) -> RunProgress:
    """Return what shows the progress of a run as the user wants it. All processes of `world` must call this."""
    from reshard_mpi.runs.progress import Silent, complain

    if options.quiet:
        return Silent(lambda _: None)
    if options.progress == "none":
        return Silent(complain)
    verbose = getattr(options, "verbose", False)
    if isinstance(world, comm.MPIComm):
        from reshard_mpi.runs.ranks import RankProgress, RootProgress

        if world.rank > 0:
            return RankProgress(world, complain, verbose=verbose)
        return RootProgress(world, _display(options), verbose=verbose)
    from reshard_mpi.runs.watched import Watched

    return Watched(_display(options), verbose=verbose)


def _display(options: argparse.Namespace) -> Display:
    from reshard_mpi.cli.displays import Bar, Lines, has_colour, may_draw

    if options.progress == "auto" and may_draw(sys.stderr, os.environ):
        return Bar(sys.stderr, with_colour=has_colour(sys.stderr, os.environ))
    return Lines(sys.stderr)


def _tell(outcome: Outcome, options: argparse.Namespace) -> None:
    """Print notes, unless the user wants none, and warnings."""
    from reshard_mpi.runs.progress import say

    for note in () if getattr(options, "quiet", False) else outcome.notes:
        say(f"note: {one_line(note)}", sys.stderr)
    for warning in outcome.warnings:
        say(f"warning: {one_line(warning)}", sys.stderr)


def _plan(options: argparse.Namespace) -> int:
    from reshard_mpi.errors import UsageError
    from reshard_mpi.planning.shown_rules import told_rules
    from reshard_mpi.processes.governor.allowance import UNLIMITED
    from reshard_mpi.runs.transform import plan_targets

    asked = request(options)
    if options.plot is not None or options.tensor:
        return _plot(options, asked)
    if options.explain is not None:
        return _explain(options, asked)
    if options.sbatch:
        if asked.ranks is not None or asked.part is not None:
            raise UsageError(
                "--sbatch goes with all targets",
                expected="neither --rank nor --part: the script gives every task its part",
                got="--rank" if asked.part is None else "--part",
            )
        asked = asked._replace(resume=not asked.overwrite)  # as the tasks will do it
    with _world(options) as world:
        # A batch script is for other hosts than this one.
        allowed = asked._replace(memory=UNLIMITED) if options.sbatch else asked
        with _shown(options, world) as progress:
            planned, outcome = plan_targets(allowed, world, progress, lists_tensors=options.verbose)
        outcome = outcome._replace(notes=(*outcome.notes, *told_rules(planned.rules, are_all=options.verbose)))
        if world.rank == 0:
            if options.json:
                show(json.dumps(planned.as_json(), indent=1))
            elif options.sbatch:
                from reshard_mpi.cli.sbatch import batch_script

                script = batch_script(asked, planned, len(planned.targets) + len(outcome.targets))
                show(os.fsencode(script))  # paths in it may be of any bytes
                _tell(outcome, options)
            else:
                show(planned.as_table())
                _tell(outcome, options)
    return 0


def _plot(options: argparse.Namespace, asked: Request) -> int:
    from reshard_mpi.cli.plot import asked_pictures, write_picture
    from reshard_mpi.runs.pictured import planned_figures

    wanted = asked_pictures(options.plot, options.tensor)
    with _world(options) as world:
        with _shown(options, world) as progress:
            drawn = planned_figures(asked, world, wanted, progress)
        if drawn is not None:
            figures, outcome = drawn
            tell_done(write_picture(options.plot, figures))
            _tell(outcome, options)
    return 0


def _explain(options: argparse.Namespace, asked: Request) -> int:
    from reshard_mpi.runs.explained import explained

    with _world(options) as world:
        said = explained(asked, world, options.explain)
        if said is not None:
            text, outcome = said
            show(lines(text))
            _tell(outcome, options)
    return 0


def _commit(options: argparse.Namespace) -> int:
    from reshard_mpi.journal.commit import commit
    from reshard_mpi.runs.progress import say
    from reshard_mpi.units import format_bytes

    done = commit(Path(options.target))
    for kind, texts in (("warning", done.told.warnings), ("note", done.told.notes)):
        for text in texts:
            say(f"{kind}: {one_line(text)}", sys.stderr)
    targets, path = counted(done.targets, "target"), one_line(str(done.path))
    tell_done(f"committed {targets}, {format_bytes(done.size_bytes)}: {path}")
    return 0


def _ranks(options: argparse.Namespace) -> int:
    from reshard_mpi.api.mindspore import ranks_needed

    strategies = options.src_strategy, options.dst_strategy
    ranks = ranks_needed(options.rank, *strategies, options.unlisted, options.accumulated)
    if ranks:
        show("\n".join(map(str, ranks)))
    return 0


def _merge(options: argparse.Namespace) -> int:
    from reshard_mpi.sharding.strategy.merge import merge

    merge(options.folder, options.out)
    return 0


def _verify(options: argparse.Namespace) -> int:
    from reshard_mpi.cli.report import verified
    from reshard_mpi.runs.progress import say

    begin = time.monotonic()
    with _world(options) as world:
        work = "VERIFY_ALONE" if options.target is None else "VERIFY_PAIR"
        outcome = _run(work, options, world)
        if world.rank == 0:
            _tell(outcome, options)
            for failure in outcome.failures:
                say(f"damage: {failure.named(alone=True)}", sys.stderr)
            if not outcome.failures and not options.quiet:
                show(verified(outcome, time.monotonic() - begin))
    return DamageError.exit_code if outcome.failures else 0


def _diff(options: argparse.Namespace) -> int:
    from reshard_mpi.cli.report import same
    from reshard_mpi.runs.progress import say

    begin = time.monotonic()
    with _world(options) as world:
        outcome = _run("DIFF", options, world)
        if world.rank == 0:
            _tell(outcome, options)
            for failure in outcome.failures:
                say(f"difference: {failure.error}", sys.stderr)
            if not outcome.failures and not options.quiet:
                show(same(outcome, time.monotonic() - begin))
    return DifferenceError.exit_code if outcome.failures else 0


def _governor(options: argparse.Namespace) -> int:
    from reshard_mpi.processes.governor.allowance import Allowance
    from reshard_mpi.processes.governor.state import host_state

    state = host_state(Allowance.of(None, None, os.environ), os.environ)
    show(json.dumps(state.as_json(), indent=1) if options.json else state.as_text())
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from reshard_mpi.checkpoints import inspection_text, side_by_side
    from reshard_mpi.checkpoints.inspection import inspect
    from reshard_mpi.errors import UsageError

    as_text = inspection_text.as_text
    if options.toml:
        from reshard_mpi.checkpoints.exporting import strategy_as_toml

        if options.other is not None or options.rank:
            raise UsageError("--toml prints a strategy", expected="PATH alone", got="GLOB, another path or --rank")
        show(strategy_as_toml(options.path))
        return 0
    if options.other is not None and os.path.lexists(options.other):
        if options.rank:
            raise UsageError(
                "--rank goes with one checkpoint", expected="PATH, or PATH and GLOB", got="two checkpoints"
            )
        facts, as_text = side_by_side.compare(options.path, options.other), side_by_side.as_text
    else:
        facts = inspect(options.path, options.other, ranks=options.rank)
    show(json.dumps(facts, indent=1) if options.json else as_text(facts))
    return 0


def _help(options: argparse.Namespace) -> int:
    from reshard_mpi.cli.guide import page

    show(page(options.topic))
    return 0


def _completion(options: argparse.Namespace) -> int:
    from reshard_mpi.cli.completion import script

    show(script(options.shell))
    return 0


def _demo(options: argparse.Namespace) -> int:
    from reshard_mpi.cli.demo import run_demo

    with _world(options) as world:
        account = run_demo(options.folder, world)
        if world.rank == 0:
            tell_done(lines(account))
    return 0


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "transform": _transform,
    "plan": _plan,
    "commit": _commit,
    "ranks": _ranks,
    "merge-strategies": _merge,
    "governor": _governor,
    "verify": _verify,
    "diff": _diff,
    "inspect": _inspect,
    "help": _help,
    "completion": _completion,
    "demo": _demo,
}
