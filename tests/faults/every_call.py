"""Fails every call of a run that writes, renames, removes or makes durable: `python tests/faults/every_call.py`.

A small conversion is started in each way there is, to each format. The calls of an undisturbed run are counted; then
there is a run for each of them and each kind of harm, which must keep the rule of `support/attempts.py`, and is
resumed. Runs for hours in full; --every and --sample take some of the calls, spread evenly or drawn. At the end: calls
tried, exits, files compared, runs that left something wrong, and those that broke the rule otherwise, each with what
repeats it. Exit code 1 if any did.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_TESTS))

from support.attempts import LAUNCHES, Attempt, Bench, Launch, ranks_of  # noqa: E402
from support.checkpoints import KINDS  # noqa: E402
from support.injector import Fault, compiler, counts  # noqa: E402
from support.launch import MPI_NAMES, find_mpi  # noqa: E402

# What a call can be made to do, and whether it makes sense for that to last.
HARM = {
    "EIO": (False, True),
    "ENOSPC": (False, True),
    "EDQUOT": (False, True),
    "short": (False, True),
    "kill": (False,),
}


@dataclass(slots=True)
class Figures:
    """What came of all runs. exits: how many commands ended with each code (negative: killed by that signal)."""

    calls: int = 0
    runs: int = 0
    harmed_runs: int = 0
    compared_files: int = 0
    exits: Counter[int] = field(default_factory=Counter)
    wrong: int = 0
    broken: list[str] = field(default_factory=list)

    def add(self, attempt: Attempt, repeat: str) -> None:
        self.runs += 1
        self.harmed_runs += bool(attempt.harmed)
        self.compared_files += attempt.compared_files
        self.exits.update(attempt.codes)
        self.wrong += bool(attempt.wrong)
        if attempt.violations:
            self.broken.append(f"{attempt}\n    {repeat}")
            print(f"BROKEN {self.broken[-1]}", flush=True)

    def __str__(self) -> str:
        exits = ", ".join(f"{number} x {code}" for code, number in sorted(self.exits.items()))
        return (
            f"calls of undisturbed runs: {self.calls}; runs with a fault: {self.runs}, {self.harmed_runs} of them met"
            f" it; exits: {exits}; files compared: {self.compared_files}; wrong: {self.wrong}; otherwise"
            f" not as the rule has it: {len(self.broken) - self.wrong}"
        )


def main() -> None:
    """Go over the calls that the arguments ask for."""
    options = _options()
    if compiler() is None:
        sys.exit("there is no C compiler")
    figures, begin = Figures(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="reshard_mpi_every_call_", dir=options.folder) as name:
        os.environ["RESHARD_MPI_STATE_DIR"] = str(Path(name) / "state")
        for launch, kind, verify in itertools.product(_launches(options.launch), options.kind, options.verify):
            if verify == "no" or launch.verifies:
                folder = Path(name) / "bench"
                _go_over(Bench(folder, kind, launch, verify=verify == "yes"), kind, options, figures)
                shutil.rmtree(folder)
    print(f"{figures}; {time.monotonic() - begin:.0f} s")
    for broken in figures.broken:
        print(f"BROKEN {broken}")
    sys.exit(bool(figures.broken))


def _go_over(bench: Bench, kind: str, options: argparse.Namespace, figures: Figures) -> None:
    verify = "yes" if "--verify" in bench.options else "no"
    print(f"{bench.launch}, {kind}, verify {verify}: {len(bench.calls)} calls: {counts(bench.calls)}", flush=True)
    figures.calls += len(bench.calls)
    begin, before = time.monotonic(), figures.runs
    for fault in _faults(len(bench.calls), options):
        which = ["--launch", bench.launch.name, "--kind", kind, "--verify", verify, "--harm", fault.do]
        repeat = shlex.join(
            ["python", "tests/faults/every_call.py", *which, "--how", _how(fault), "--call", str(fault.call)]
        )
        figures.add(bench.attempt(fault), repeat)
    print(f"  {figures.runs - before} runs in {time.monotonic() - begin:.0f} s", flush=True)


def _faults(calls: int, options: argparse.Namespace) -> Iterator[Fault]:
    kinds = [
        (do, is_lasting)
        for do in options.harm
        for is_lasting in HARM[do]
        if ("lasting" if is_lasting else "once") in options.how
    ]
    if options.call:
        yield from (Fault(number, *kind) for number in options.call for kind in kinds)
        return
    every = [Fault(number, *kind) for number in range(1, calls + 1) for kind in kinds]
    if options.sample:
        every = random.Random(options.seed).sample(every, min(options.sample, len(every)))
    # Whole kinds of harm would be left out if their number and this one had a divisor in common.
    yield from (fault for turn, fault in enumerate(every) if (fault.call + turn % len(kinds)) % options.every == 0)


def _how(fault: Fault) -> str:
    return "lasting" if fault.is_lasting else "once"


def _launches(names: list[str]) -> Iterator[Launch]:
    for launch in LAUNCHES:
        if launch.name in names:
            yield launch
    for name in MPI_NAMES:
        if name in names:
            mpi = find_mpi(name)
            if mpi is None:
                print(f"{name} is not installed (RESHARD_MPI_TEST_MPI names folders to look in)", flush=True)
            else:
                yield ranks_of(mpi)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    launches = [*(launch.name for launch in LAUNCHES), *MPI_NAMES]
    for option, choices, text in (
        ("--launch", launches, "how runs are started"),
        ("--kind", KINDS, "formats of the targets"),
        ("--verify", ("no", "yes"), "without or with --verify"),
        ("--harm", tuple(HARM), "what is done to a call"),
        ("--how", ("once", "lasting"), "to one call, or to all from it on"),
    ):
        parser.add_argument(option, nargs="+", choices=choices, default=list(choices), help=text, metavar="NAME")
    parser.add_argument("--call", type=int, nargs="+", default=[], help="only calls of these numbers, from 1 on")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="of the calls only every N-th")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="only N runs of each launch, drawn")
    parser.add_argument("--seed", type=int, default=0, help="what --sample draws from")
    parser.add_argument("--folder", help="where files are made; else the folder for temporary ones")
    return parser.parse_args()


if __name__ == "__main__":
    main()
