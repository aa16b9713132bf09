"""Run a command: alone, under mpirun or in an array task (`main`)."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import reshard_mpi.formats  # not from the package, which would look for a function of that name first
from reshard_mpi.cli.arguments import parser, request
from reshard_mpi.cli.first_lease import end_if_stopped, stopped_text
from reshard_mpi.cli.option_parser import CommandLineError
from reshard_mpi.cli.output import (
    compared,
    display_for,
    flush_standard_streams,
    in_the_way_of,
    is_verbose,
    may_be_report,
    open_standard_streams,
    same,
    show,
    summary,
    tell,
    tell_done,
    verified,
    write_report,
)
from reshard_mpi.errors import DamageError, DifferenceError, ReshardError, UsageError, told
from reshard_mpi.processes import comm
from reshard_mpi.processes.host import ONE_THREAD
from reshard_mpi.processes.leases import give_back_start, host_state
from reshard_mpi.processes.signals import (
    INTERRUPTED,
    Terminated,
    exit_when_terminated,
    ignore_stops,
    require_stack,
    stopped_by,
)
from reshard_mpi.runs.progress import Progress, Words, complain, say
from reshard_mpi.text import counted, format_bytes, lines, one_line

if TYPE_CHECKING:
    from reshard_mpi.runs.outcome import Outcome
    from reshard_mpi.runs.request import Request, Task


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code."""
    if not comm.awaits_world(os.environ):
        exit_when_terminated()
    for name, value in ONE_THREAD.items():
        os.environ.setdefault(name, value)
    options, complaint = argparse.Namespace(), None
    try:
        require_stack()
        options = parser(sys.argv[1:] if arguments is None else arguments).parse_args(arguments)
        if endpoint := getattr(options, "s3_endpoint", None):
            os.environ["AWS_ENDPOINT_URL_S3"] = endpoint  # which botocore looks at, in workers as well
        code = _COMMANDS[options.command](options) or 0
    except (KeyboardInterrupt, Terminated) as stop:
        code = stopped_by(stop) or INTERRUPTED
        ignore_stops()
        if comm.speaks(os.environ):
            _last_words(options)(code)
    except CommandLineError as error:
        _complain(error, error.command)
        sys.exit(error.exit_code)
    except ReshardError as error:
        code, complaint = error.exit_code, error
        _complain(error)
    except OSError as error:
        code = ReshardError.exit_code
        _complain(one_line(f"{error.strerror or error}: {error.filename}" if error.filename else str(error)))
    for why in reshard_mpi.formats.left_out().values() if comm.speaks(os.environ) else ():
        if why is not complaint:
            say(f"warning: {one_line(told(why))}", sys.stderr)
    sys.exit(code)


def command() -> NoReturn:
    """Run `main` in a process of its own, which ends without taking the interpreter apart.

    That would take longer than a small conversion. With MPI it ends as usual, since MPI has work to do then.
    """
    open_standard_streams()
    try:
        main()
    except SystemExit as end:
        end_if_stopped(end)
        code = end.code if isinstance(end.code, int) else 1
        flush_standard_streams()
        comm.end_job(os.environ, code)
        if "mpi4py.MPI" in sys.modules:
            raise
        give_back_start()
        os._exit(code)


def _last_words(options: argparse.Namespace) -> Callable[[int], None]:
    """Return a function that says, given the exit code, that a signal has stopped the command, and how to go on."""

    def say_stopped(code: int) -> None:
        resumes = getattr(options, "command", "") == "transform" and not options.overwrite
        # On a terminal the line may hold progress already, or the ^C that it shows; a launcher may write to one.
        line_break = "\n" if sys.stderr.isatty() or comm.is_launched(os.environ) else ""
        say(line_break + stopped_text(code, resumes=resumes), sys.stderr)

    return say_stopped


@contextmanager
def _world(options: argparse.Namespace) -> Iterator[comm.Comm]:
    """Yield the processes that run this command together. Raises UsageError in all if they have different options."""
    explicit_share = bool(getattr(options, "rank", None) or getattr(options, "part", None))
    with comm.world(os.environ, explicit_share=explicit_share, stopped=_last_words(options)) as group:
        comm.require_same_options(group, vars(options))
        yield group


def _run(task: Task, options: argparse.Namespace, group: comm.Comm) -> Outcome:
    """Do a task in MPI ranks, in local processes, or in this one alone, and show its progress."""
    jobs: int | None = options.jobs
    if group.size > 1 and (jobs or 1) > 1:
        raise UsageError(
            "--jobs does not go with an MPI run",
            expected="mpirun -n N alone",
            got=f"--jobs {jobs}",
            remedy="start more MPI ranks instead",
        )
    may_fork = group.size == 1 and (jobs is not None or not comm.is_launched(os.environ))
    with _shown(options, group) as progress:
        if may_fork and (jobs or len(os.sched_getaffinity(0))) > 1:
            from reshard_mpi.runs.workers import run_with_workers

            return run_with_workers(request(options), jobs, progress, task)
        return task.run(request(options), group, progress)


def _shown(options: argparse.Namespace, group: comm.Comm) -> AbstractContextManager[Progress]:
    """Show progress, as the user wants it, within this context. All processes of `group` must enter and leave it."""
    if options.quiet:
        return nullcontext(Progress(Words(lambda _: None)))
    if options.progress == "none":
        return nullcontext(Progress(Words(complain)))
    from reshard_mpi.runs.monitor import monitored

    return monitored(Words(complain, verbose=is_verbose(options)) if group.rank else display_for(options), group)


def _complain(error: ReshardError | str, command: str = "reshard-mpi") -> None:
    if comm.speaks(os.environ):
        say(f"{command}: error: {error}", sys.stderr)


def _transform(options: argparse.Namespace) -> None:
    begin = time.monotonic()
    from reshard_mpi.runs.request import Task

    with _world(options) as group:
        refused = group.rank == 0 and options.report and not may_be_report(options.report, options.target)
        if any(group.allgather(refused)):
            raise UsageError(
                "the report cannot be written",
                expected="a new file in a folder, or an earlier report; no name of a shard or of a file of the run",
                got=in_the_way_of(Path(options.report)),
                where=options.report,
                remedy="choose another name, in a folder that is there",
            )
        outcome = _run(Task.CONVERT, options, group)
        seconds = time.monotonic() - begin
        unreported = None
        if group.rank == 0:
            tell(outcome, options)
            if options.report:
                facts = {"source": options.source, "target": options.target, "processes": outcome.processes}
                unreported = write_report(options.report, facts, outcome, seconds)
            if unreported is not None and outcome.failures:
                _complain(unreported)
        outcome.raise_failures()
        if group.rank == 0 and not options.quiet:
            tell_done(summary(outcome, seconds, is_verified=options.verify))
        if unreported is not None:
            raise unreported


def _plan(options: argparse.Namespace) -> None:
    from reshard_mpi.processes.governor import UNLIMITED
    from reshard_mpi.runs.plan_command import plan_targets, told_rules

    asked = request(options)
    if options.plot is not None or options.tensor:
        _draw(options, asked)
        return
    if options.explain is not None:
        _explain(options, asked)
        return
    if options.script:
        if asked.rank is not None or asked.part is not None:
            raise UsageError(
                "a script goes with all targets",
                expected="neither --rank nor --part: the script gives every task its part",
                got="--rank" if asked.part is None else "--part",
            )
        asked = asked._replace(resume=not asked.overwrite)  # as the tasks will do it
    with _world(options) as group:
        # A batch script is for other hosts than this one.
        allowed = asked._replace(memory=UNLIMITED) if options.script else asked
        with _shown(options, group) as progress:
            planned, outcome = plan_targets(allowed, group, progress, lists_tensors=options.verbose)
        outcome = outcome._replace(notes=(*outcome.notes, *told_rules(planned.rules, are_all=options.verbose)))
        if group.rank == 0:
            if options.json:
                show(json.dumps(planned.as_json(), indent=1))
            elif options.script:
                from reshard_mpi.cli.cluster_scripts import cluster_script

                target_ranks = len(planned.targets) + len(outcome.targets)
                script = cluster_script(options.script, asked, planned, target_ranks, endpoint=options.s3_endpoint)
                show(os.fsencode(script))  # paths in it may be of any bytes
                tell(outcome, options)
            else:
                show(planned.as_table())
                tell(outcome, options)


def _draw(options: argparse.Namespace, asked: Request) -> None:
    from reshard_mpi.runs.run_pictures import asked_pictures, planned_figures, write_picture

    wanted = asked_pictures(options.plot, options.tensor)
    with _world(options) as group:
        with _shown(options, group) as progress:
            drawn = planned_figures(asked, group, wanted, progress)
        if drawn is not None:
            figures, outcome = drawn
            tell_done(write_picture(options.plot, figures))
            tell(outcome, options)


def _explain(options: argparse.Namespace, asked: Request) -> None:
    from reshard_mpi.runs.explain import explained

    with _world(options) as group:
        said = explained(asked, group, options.explain)
        if said is not None:
            text, outcome = said
            show(lines(text))
            tell(outcome, options)


def _ranks(options: argparse.Namespace) -> None:
    from reshard_mpi.api import rank_list_for_transform

    strategies, joins = (options.src_strategy, options.dst_strategy), options.accumulated
    ranks = rank_list_for_transform(options.rank, *strategies, unlisted=options.unlisted, accumulated=joins)
    if ranks:
        show("\n".join(map(str, ranks)))


def _verify(options: argparse.Namespace) -> int:
    from reshard_mpi.runs.request import Task

    task = Task.VERIFY_ALONE if options.target is None else Task.VERIFY_PAIR
    return DamageError.exit_code if _finds(task, "damage", options, verified) else 0


def _diff(options: argparse.Namespace) -> int:
    from reshard_mpi.runs.request import Task

    if options.values:
        return _diff_values(options)
    given = {"--atol": options.atol, "--rtol": options.rtol, "--top": options.top, "--json": options.json}
    if lone := next((flag for flag, value in given.items() if value), None):
        raise UsageError(f"{lone} goes with --values", expected=f"--values {lone}", got=f"{lone} alone")
    return DifferenceError.exit_code if _finds(Task.DIFF, "difference", options, same) else 0


def _diff_values(options: argparse.Namespace) -> int:
    begin = time.monotonic()
    from reshard_mpi.runs.request import Task

    with _world(options) as group:
        outcome = _run(Task.DIFF_VALUES, options, group)
        outcome.raise_failures()
        found = outcome.comparison
        assert found is not None
        if group.rank == 0:
            tell(outcome, options)
            if options.json:
                show(json.dumps(found.as_json(options.top), indent=1))
            elif not options.quiet:
                show("\n".join((found.as_text(options.top), compared(outcome, time.monotonic() - begin))))
    return 0 if found.passes else DifferenceError.exit_code


def _audit(options: argparse.Namespace) -> int:
    begin = time.monotonic()
    from reshard_mpi.runs.request import Task
    from reshard_mpi.soundness.findings import AuditReport

    options.norms = options.plot is not None
    if options.plot is not None:
        from reshard_mpi.runs.run_pictures import require_picture

        require_picture(options.plot, (".html",))
    with _world(options) as group:
        outcome = _run(Task.AUDIT, options, group)
        for failure in outcome.failures:
            raise failure.named(alone=outcome.processes <= 1)
        report = AuditReport.of(options.source, outcome, time.monotonic() - begin)
        if group.rank == 0:
            tell(outcome, options)
            if options.json:
                show(json.dumps(report.as_json(), indent=1))
            else:
                summary = [] if options.quiet else [report.summary()]
                for line in (*report.as_lines(is_all=options.verbose), *summary):
                    show(line)
            if options.plot is not None:
                from reshard_mpi.pictures.pages import Mark, norms_page
                from reshard_mpi.runs.run_pictures import write_page

                marks = [Mark(each.severity, str(each.kind), each.tensor, each.detail) for each in report.findings]
                write_page(options.plot, norms_page(report.path, report.summary(), outcome.norms, marks).encode())
    return 0 if report.is_sound(strict=options.strict) else DamageError.exit_code


def _finds(task: Task, what: str, options: argparse.Namespace, sound: Callable[[Outcome, float], str]) -> bool:
    """Do a task that compares, and print its findings; tell whether there are any.

    Args:
        what: each of its findings is.
        sound: returns the closing line where there is none.
    """
    begin = time.monotonic()
    with _world(options) as group:
        outcome = _run(task, options, group)
        if group.rank == 0:
            tell(outcome, options)
            for failure in outcome.failures:
                say(f"{what}: {failure.named(alone=True)}", sys.stderr)
            if not outcome.failures and not options.quiet:
                show(sound(outcome, time.monotonic() - begin))
    return bool(outcome.failures)


def _governor(options: argparse.Namespace) -> None:
    from reshard_mpi.processes.governor import Allowance

    state = host_state(Allowance.of(None, None, os.environ), os.environ)
    show(json.dumps(state.as_json(), indent=1) if options.json else state.as_text())


def _inspect(options: argparse.Namespace) -> None:
    from reshard_mpi.cli.inspect_command import inspect_command

    inspect_command(options)


def _help(options: argparse.Namespace) -> None:
    from reshard_mpi.cli.help import page

    show(page(options.topic))


def _completion(options: argparse.Namespace) -> None:
    from reshard_mpi.cli.help import script

    show(script(options.shell))


def _commit(options: argparse.Namespace) -> None:
    from reshard_mpi.journal.commit import commit

    done = commit(Path(options.target))
    for kind, texts in (("warning", done.told.warnings), ("note", done.told.notes)):
        for text in texts:
            say(f"{kind}: {one_line(text)}", sys.stderr)
    targets, path = counted(done.targets, "target"), one_line(str(done.path))
    tell_done(f"committed {targets}, {format_bytes(done.size_bytes)}: {path}")


def _merge(options: argparse.Namespace) -> None:
    from reshard_mpi.sharding.merge_strategies import merge

    merge(options.folder, options.out)


def _demo(options: argparse.Namespace) -> None:
    from reshard_mpi.cli.demo import run_demo

    with _world(options) as group:
        account = run_demo(options.folder, group)
        if group.rank == 0:
            tell_done(lines(account))


# Each returns its exit code; none: 0.
_COMMANDS: Mapping[str, Callable[[argparse.Namespace], int | None]] = {
    "transform": _transform,
    "plan": _plan,
    "verify": _verify,
    "audit": _audit,
    "diff": _diff,
    "commit": _commit,
    "ranks": _ranks,
    "merge-strategies": _merge,
    "governor": _governor,
    "inspect": _inspect,
    "help": _help,
    "completion": _completion,
    "demo": _demo,
}
