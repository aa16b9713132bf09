"""Commands whose purpose is what they print; they write no checkpoint. Each imports what it needs."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from reshard_mpi.cli.arguments import request
from reshard_mpi.cli.running import run, shown, tell, world
from reshard_mpi.cli.streams import show, tell_done
from reshard_mpi.errors import DamageError, DifferenceError
from reshard_mpi.text import lines

if TYPE_CHECKING:
    from reshard_mpi.runs.outcome import Outcome
    from reshard_mpi.runs.request import Request


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
    with world(options) as group:
        # A batch script is for other hosts than this one.
        allowed = asked._replace(memory=UNLIMITED) if options.sbatch else asked
        with shown(options, group) as progress:
            planned, outcome = plan_targets(allowed, group, progress, lists_tensors=options.verbose)
        outcome = outcome._replace(notes=(*outcome.notes, *told_rules(planned.rules, are_all=options.verbose)))
        if group.rank == 0:
            if options.json:
                show(json.dumps(planned.as_json(), indent=1))
            elif options.sbatch:
                from reshard_mpi.cli.sbatch import batch_script

                script = batch_script(asked, planned, len(planned.targets) + len(outcome.targets))
                show(os.fsencode(script))  # paths in it may be of any bytes
                tell(outcome, options)
            else:
                show(planned.as_table())
                tell(outcome, options)
    return 0


def _plot(options: argparse.Namespace, asked: Request) -> int:
    from reshard_mpi.cli.plot import asked_pictures, write_picture
    from reshard_mpi.runs.pictured import planned_figures

    wanted = asked_pictures(options.plot, options.tensor)
    with world(options) as group:
        with shown(options, group) as progress:
            drawn = planned_figures(asked, group, wanted, progress)
        if drawn is not None:
            figures, outcome = drawn
            tell_done(write_picture(options.plot, figures))
            tell(outcome, options)
    return 0


def _explain(options: argparse.Namespace, asked: Request) -> int:
    from reshard_mpi.runs.explained import explained

    with world(options) as group:
        said = explained(asked, group, options.explain)
        if said is not None:
            text, outcome = said
            show(lines(text))
            tell(outcome, options)
    return 0


def _ranks(options: argparse.Namespace) -> int:
    from reshard_mpi.api.mindspore import ranks_needed

    strategies = options.src_strategy, options.dst_strategy
    ranks = ranks_needed(options.rank, *strategies, options.unlisted, options.accumulated)
    if ranks:
        show("\n".join(map(str, ranks)))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from reshard_mpi.cli.report import verified

    work = "VERIFY_ALONE" if options.target is None else "VERIFY_PAIR"
    return DamageError.exit_code if _finds(work, "damage", options, verified) else 0


def _diff(options: argparse.Namespace) -> int:
    from reshard_mpi.cli.report import same

    return DifferenceError.exit_code if _finds("DIFF", "difference", options, same) else 0


def _finds(work: str, what: str, options: argparse.Namespace, sound: Callable[[Outcome, float], str]) -> bool:
    """Do the work of `runs.workers.Task`, and print what it finds; tell whether that is anything.

    what: each of its findings is. sound: returns the closing line where there is none.
    """
    from reshard_mpi.runs.progress import say

    begin = time.monotonic()
    with world(options) as comm:
        outcome = run(work, options, comm)
        if comm.rank == 0:
            tell(outcome, options)
            for failure in outcome.failures:
                say(f"{what}: {failure.named(alone=True)}", sys.stderr)
            if not outcome.failures and not options.quiet:
                show(sound(outcome, time.monotonic() - begin))
    return bool(outcome.failures)


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


COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "plan": _plan,
    "ranks": _ranks,
    "verify": _verify,
    "diff": _diff,
    "governor": _governor,
    "inspect": _inspect,
    "help": _help,
    "completion": _completion,
}
