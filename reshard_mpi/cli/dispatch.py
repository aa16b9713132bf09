"""Run the work of a command in MPI ranks, in local processes, or in this one alone (`run`)."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from reshard_mpi.cli.arguments import request
from reshard_mpi.cli.display import display_for, is_verbose
from reshard_mpi.cli.start import stopped_text
from reshard_mpi.errors import UsageError
from reshard_mpi.processes import comm
from reshard_mpi.text import one_line

if TYPE_CHECKING:
    from reshard_mpi.runs.outcome import Outcome
    from reshard_mpi.runs.progress import Progress
    from reshard_mpi.runs.workers import Task


def last_words(options: argparse.Namespace) -> Callable[[int], None]:
    """Return a function that says, given the exit code, that a signal has stopped the command, and how to go on."""

    def say_stopped(code: int) -> None:
        from reshard_mpi.runs.progress import say

        resumes = getattr(options, "command", "") == "transform" and not options.overwrite
        # On a terminal the line may hold progress already, or the ^C that it shows; a launcher may write to one.
        line_break = "\n" if sys.stderr.isatty() or comm.is_launched(os.environ) else ""
        say(line_break + stopped_text(code, resumes=resumes), sys.stderr)

    return say_stopped


def world(options: argparse.Namespace) -> AbstractContextManager[comm.Comm]:
    """Return the processes that run this command together."""
    explicit_share = bool(getattr(options, "rank", None) or getattr(options, "part", None))
    return comm.world(os.environ, explicit_share=explicit_share, stopped=last_words(options))


def run(work: Task, options: argparse.Namespace, group: comm.Comm) -> Outcome:
    """Do work in MPI ranks, in local processes, or in this one alone, and show its progress."""
    from reshard_mpi.runs.workers import run_with_workers

    jobs: int | None = options.jobs
    if group.size > 1 and (jobs or 1) > 1:
        raise UsageError(
            "--jobs does not go with an MPI run",
            expected="mpirun -n N alone",
            got=f"--jobs {jobs}",
            remedy="start more MPI ranks instead",
        )
    may_fork = group.size == 1 and (jobs is not None or not comm.is_launched(os.environ))
    with shown(options, group) as progress:
        if may_fork and (jobs or len(os.sched_getaffinity(0))) > 1:
            return run_with_workers(request(options), jobs, progress, work)
        return work.run(request(options), group, progress)


def shown(options: argparse.Namespace, group: comm.Comm) -> AbstractContextManager[Progress]:
    """Show progress, as the user wants it, within this context. All processes of `group` must enter and leave it."""
    from reshard_mpi.runs.progress import Progress, Words, complain

    if options.quiet:
        return nullcontext(Progress(Words(lambda _: None)))
    if options.progress == "none":
        return nullcontext(Progress(Words(complain)))
    from reshard_mpi.runs.monitor import monitored

    return monitored(Words(complain, verbose=is_verbose(options)) if group.rank else display_for(options), group)


def tell(outcome: Outcome, options: argparse.Namespace) -> None:
    """Print notes, unless the user wants none, and warnings."""
    from reshard_mpi.runs.progress import say

    for note in () if getattr(options, "quiet", False) else outcome.notes:
        say(f"note: {one_line(note)}", sys.stderr)
    for warning in outcome.warnings:
        say(f"warning: {one_line(warning)}", sys.stderr)
