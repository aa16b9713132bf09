"""Run the commands that only print: `plan` (pictures, `batch_script`), `inspect`, `governor`.

Commands whose purpose is what they print; they write no checkpoint. Each imports what it needs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import string
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from reshard_mpi.cli.arguments import request
from reshard_mpi.cli.dispatch import run, shown, tell, world
from reshard_mpi.cli.usage import show, tell_done
from reshard_mpi.errors import DamageError, DifferenceError, UsageError
from reshard_mpi.filesystem.paths import described, is_replaceable
from reshard_mpi.options import OPTIONS, PATH
from reshard_mpi.planning.summary import Plan
from reshard_mpi.runs.conversion import map_words
from reshard_mpi.runs.request import Request
from reshard_mpi.text import MIB, counted, format_bytes, lines, one_line

if TYPE_CHECKING:
    from reshard_mpi.pictures.figures import Figures
    from reshard_mpi.runs.outcome import Outcome
    from reshard_mpi.runs.plot_data import Asked


def _plan(options: argparse.Namespace) -> int:
    from reshard_mpi.errors import UsageError
    from reshard_mpi.planning.summary import told_rules
    from reshard_mpi.processes.governor.admission import UNLIMITED
    from reshard_mpi.runs.transform import plan_targets

    asked = request(options)
    if options.plot is not None or options.tensor:
        return _plot(options, asked)
    if options.explain is not None:
        return _explain(options, asked)
    if options.sbatch:
        if asked.rank is not None or asked.part is not None:
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
                script = batch_script(asked, planned, len(planned.targets) + len(outcome.targets))
                show(os.fsencode(script))  # paths in it may be of any bytes
                tell(outcome, options)
            else:
                show(planned.as_table())
                tell(outcome, options)
    return 0


def _plot(options: argparse.Namespace, asked: Request) -> int:
    from reshard_mpi.runs.plot_data import planned_figures

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
    from reshard_mpi.runs.explain import explained

    with world(options) as group:
        said = explained(asked, group, options.explain)
        if said is not None:
            text, outcome = said
            show(lines(text))
            tell(outcome, options)
    return 0


def _ranks(options: argparse.Namespace) -> int:
    from reshard_mpi.api import rank_list_for_transform

    strategies, joins = (options.src_strategy, options.dst_strategy), options.accumulated
    ranks = rank_list_for_transform(options.rank, *strategies, unlisted=options.unlisted, accumulated=joins)
    if ranks:
        show("\n".join(map(str, ranks)))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from reshard_mpi.cli.display import verified

    work = "VERIFY_ALONE" if options.target is None else "VERIFY_PAIR"
    return DamageError.exit_code if _finds(work, "damage", options, verified) else 0


def _diff(options: argparse.Namespace) -> int:
    from reshard_mpi.cli.display import same

    return DifferenceError.exit_code if _finds("DIFF", "difference", options, same) else 0


def _finds(work: str, what: str, options: argparse.Namespace, sound: Callable[[Outcome, float], str]) -> bool:
    """Do the work of `runs.workers.Task`, and print its findings; tell whether there are any.

    Args:
        what: each of its findings is.
        sound: returns the closing line where there is none.
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
    from reshard_mpi.processes.governor.admission import Allowance
    from reshard_mpi.processes.governor.status import host_state

    state = host_state(Allowance.of(None, None, os.environ), os.environ)
    show(json.dumps(state.as_json(), indent=1) if options.json else state.as_text())
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from reshard_mpi.checkpoints import inspection_text
    from reshard_mpi.checkpoints.inspection import inspect
    from reshard_mpi.errors import UsageError

    as_text = inspection_text.as_text
    if options.toml:
        from reshard_mpi.checkpoints.inspection import strategy_as_toml

        if options.other is not None or options.rank:
            raise UsageError("--toml prints a strategy", expected="PATH alone", got="GLOB, another path or --rank")
        show(strategy_as_toml(options.path))
        return 0
    if options.other is not None and os.path.lexists(options.other):
        if options.rank:
            raise UsageError(
                "--rank goes with one checkpoint", expected="PATH, or PATH and GLOB", got="two checkpoints"
            )
        facts, as_text = inspection_text.compare(options.path, options.other), inspection_text.comparison_text
    else:
        facts = inspect(options.path, options.other, rank=options.rank)
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


_ENDINGS = (".html", ".png", ".svg")
# A page has the cuts of this number of kinds of tensors at most.
_MOST_CUTS = 200
# What drawing takes: matplotlib with its fonts and the picture's dots, and the largest page as text.
_PNG_BYTES, _SVG_BYTES = 96 * MIB, 40 * MIB


def asked_pictures(path: str | None, tensors: Sequence[str]) -> Asked:
    """Return the request for a picture in the file `path`. Raises UsageError for pictures or files that are
    impossible.
    """
    from reshard_mpi.runs.plot_data import Asked

    if path is None:
        raise UsageError(
            "--tensor says what is drawn", expected="--plot FILE.html, .png or .svg as well", got="no --plot"
        )
    ending = _ending(path)
    if ending not in _ENDINGS:
        raise UsageError("a picture's ending says its form", expected=", ".join(_ENDINGS), got=path)
    if ending != ".html" and len(tensors) > 1:
        raise UsageError(
            "one picture shows one tensor",
            expected="--tensor once, or a page (.html)",
            got=f"{len(tensors)} tensors for {path}",
        )
    if ending == ".png":
        from reshard_mpi.pictures.picture_files import require_matplotlib

        require_matplotlib()
    file = Path(path)
    if not is_replaceable(file) or not file.parent.is_dir() or not os.access(file.parent, os.W_OK | os.X_OK):
        raise UsageError(
            "the picture cannot be written",
            expected="a new file in a folder that is there, or an earlier picture",
            got=described(file) if not is_replaceable(file) else described(file.parent),
            where=path,
            remedy="choose another name",
        )
    most_cuts = _MOST_CUTS if ending == ".html" else 0
    return Asked(tuple(dict.fromkeys(tensors)), most_cuts, _PNG_BYTES if ending == ".png" else _SVG_BYTES)


def write_picture(path: str, figures: Figures) -> str:
    """Write the picture of figures; return its subject in a line. Raises OSError, and then leaves no file."""
    content = _drawn(path, figures)
    try:
        Path(path).write_bytes(content)
    except OSError:
        with contextlib.suppress(OSError):
            Path(path).unlink()
        raise
    flow = figures.flow
    planned = (
        f"{len(flow.planned)} of {flow.targets.total} targets"
        if flow.is_sample
        else counted(len(flow.planned), "target")
    )
    cuts = f", {counted(len(figures.cuts), 'kind')} of tensors" if _ending(path) == ".html" else ""
    return f"drew {planned}{cuts}: {one_line(path)}"


def _drawn(path: str, figures: Figures) -> bytes:
    if _ending(path) == ".html":
        from reshard_mpi.pictures.picture_files import page_of

        return page_of(figures).encode()
    from reshard_mpi.pictures.matrix import matrix_scene
    from reshard_mpi.pictures.tensor import cut_scene

    scene = cut_scene(figures.cuts[0], figures) if figures.cuts else matrix_scene(figures)
    if _ending(path) == ".svg":
        from reshard_mpi.pictures.scene import svg_of

        return svg_of(scene).encode()
    from reshard_mpi.pictures.picture_files import png_of

    return png_of(scene)


def _ending(path: str) -> str:
    return Path(path).suffix.lower()


# Task numbers stay below SLURM's MaxArraySize, by default 1001.
_MAX_TASKS = 1000
# Memory besides the process itself: the batch shell, SLURM's own, and pages on their way to the file system.
_BESIDES_BYTES = 64 * MIB
# Memory of a process for which nothing is left to be made, so that there is no plan to take it from.
_IDLE_BYTES = 64 * MIB
# The rate of a task where hundreds share a file system; alone it is a hundred times as fast.
_RATE_BYTES_PER_SECOND = 20 * MIB
# Interpreter, libraries, strategies and headers of shards, all from a file system that is busy.
_START_MINUTES = 10
# Characters that stand for themselves between $' and '.
_PLAIN = {ord(char): char for char in string.ascii_letters + string.digits + "-+._/ ~=,:@%"}


def batch_script(request: Request, plan: Plan, target_ranks: int) -> str:
    """Return the script. plan: of the targets that are still to be made. target_ranks: how many there are in all."""
    tasks = min(target_ranks, _MAX_TASKS)
    peak_bytes = plan.peak_bytes if plan.targets else _IDLE_BYTES
    mem_mib = -(-(peak_bytes + _BESIDES_BYTES) // MIB)
    task_bytes = _task_bytes(plan, target_ranks, tasks)
    minutes = _START_MINUTES + -(-task_bytes // (_RATE_BYTES_PER_SECOND * 60))
    commit = _word(f"reshard-mpi commit {_path(request.target)}")
    lines = [
        f"Made by reshard-mpi plan --sbatch. {counted(target_ranks, 'target')}, of which {len(plan.targets)} with"
        f" {format_bytes(plan.written_bytes)} were still to be made.",
        _sharing(target_ranks, tasks),
        "",
        "Submit this file where reshard-mpi can be run, since jobs inherit the environment; then the last task, which",
        "checks that all targets are there and commits them:",
        "",
        "  job=$(sbatch --parsable THIS_FILE)",
        f'  sbatch --dependency="afterok:$job" --kill-on-invalid-dep=yes --wrap {commit}',
        "",
        "If a task fails, mend the cause and submit the file again, or only that task (sbatch --array=3 THIS_FILE)."
        + (" What is complete is skipped." if not request.overwrite else ""),
    ]
    settings = [
        "#SBATCH --job-name=reshard",
        f"#SBATCH --array=0-{tasks - 1}",
        "#SBATCH --cpus-per-task=1",
        f"# A process needs {format_bytes(peak_bytes)} at most; {format_bytes(_BESIDES_BYTES)} are for the batch shell"
        " and what is not yet on the disk.",
        f"#SBATCH --mem={mem_mib}M",
        f"# For {format_bytes(task_bytes)} a task at {format_bytes(_RATE_BYTES_PER_SECOND)}/s, far below what is usual,"
        f" and {_START_MINUTES} minutes to start.",
        f"#SBATCH --time={minutes // 60:02}:{minutes % 60:02}:00",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --output=reshard_%A_%a.log",
    ]
    comment = "\n".join(lines).splitlines()  # a path may hold a line break, which must not end the comment
    return "\n".join(
        ["#!/bin/bash", *(f"# {line}".rstrip() for line in comment), "#", *settings, "", _command(request, tasks), ""]
    )


def _task_bytes(plan: Plan, target_ranks: int, tasks: int) -> int:
    """Return an upper bound of what any task writes."""
    largest_bytes = max((target.written_bytes for target in plan.targets), default=0)
    if tasks == target_ranks:
        return largest_bytes
    return plan.written_bytes // tasks + largest_bytes  # targets are dealt out so that none gets more


def _sharing(target_ranks: int, tasks: int) -> str:
    if tasks == target_ranks:
        return "Task R makes target rank R."
    return f"There are {tasks} tasks, since SLURM by default takes no more than 1001, so each makes several of them."


def _command(request: Request, tasks: int) -> str:
    """Return the one command of the script. exec: signals reach the program itself."""
    request = request._replace(map=map_words(request))
    lines = [f"exec reshard-mpi transform {_path(request.source)} {_path(request.target)}"]
    for option in OPTIONS.values():
        given = () if option.is_of_task else getattr(request, option.name)
        for value in given if isinstance(given, tuple) else (given,):
            if value is True:
                lines.append(option.flag)
            elif value is not None and value is not False:
                lines.append(f"{option.flag}={_path(value) if option.kind is PATH else _word(str(value))}")
    again = [] if request.overwrite else ["--resume"]
    lines.append(" ".join([f'--part "$SLURM_ARRAY_TASK_ID/{tasks}"', *again, "--jobs 1"]))
    return " \\\n    ".join(lines)


def _path(path: str) -> str:
    """Return a path as a word of the shell; absolute, since a job may run in another folder."""
    return _word(str(Path(path).absolute()))


def _word(text: str) -> str:
    """Return `text` as a word of bash, in which unprintable characters are written as `\\x..`."""
    if text.isprintable():
        return shlex.quote(text)
    shown = (_PLAIN.get(byte) or f"\\x{byte:02x}" for byte in os.fsencode(text))
    return f"$'{''.join(shown)}'"
