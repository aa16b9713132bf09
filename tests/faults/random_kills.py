"""Kills random runs at random calls and resumes them: `python tests/faults/random_kills.py --runs 300 --seed 1`.

Each run has a random pair of strategies with random tensors, random formats, with --verify or without, and is started
in a random way: alone, by local processes, by MPI ranks, as tasks of an array. One process of it, or all, are killed
before a call that writes, renames, removes or makes durable, or that reads; it is resumed in a random way, which may be
killed too. What has the name of a target is whole at any time; in the end all is to the last byte what an undisturbed
run makes, its tensors are what the oracle says, and `verify` finds them sound. Prints figures; exit code 1 if anything
was wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

_TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_TESTS))

from support.attempts import ALONE, Launch, array_of, badly_reported, jobs_of, ranks_of, wrong_in  # noqa: E402
from support.cases import Case, cases  # noqa: E402
from support.checkpoints import KINDS, read_shard  # noqa: E402
from support.command_line import run_in_fork  # noqa: E402
from support.conversions import Conversion, timeless, write_conversion  # noqa: E402
from support.injector import NO_FAULT, READING, Call, Fault, Injector, compiler  # noqa: E402
from support.launch import MPI_NAMES, find_mpi  # noqa: E402
from support.processes import Finished, run_command  # noqa: E402

_MAX_KILLS = 3
# The sources are small: so they are filled by several processes all the same.
_CUT = {"FAULT_CUT": "16", "PYTHONPATH": os.pathsep.join([str(_TESTS / "faults"), str(_TESTS.parent)])}
# Together with all that write.
_ALL_CALLS = (
    "write pwrite writev pwritev copy_file_range sendfile splice ftruncate truncate fallocate posix_fallocate fsync"
    " fdatasync rename link unlink mkdir rmdir create close chmod fchmod flock"
)
_NAMES = (*_ALL_CALLS.split(), *READING)


@dataclass(slots=True)
class Figures:
    """What came of all runs. exits: how killed commands ended; launches: how often a run was started so and killed."""

    runs: int = 0
    refused: int = 0
    kills: int = 0
    compared_files: int = 0
    exits: Counter[int] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        exits = ", ".join(f"{number} x {code}" for code, number in sorted(self.exits.items()))
        launches = ", ".join(f"{number} x {name}" for name, number in sorted(self.launches.items()))
        return (
            f"runs: {self.runs} ({self.refused} more were refused undisturbed); kills: {self.kills} ({launches});"
            f" exits of what was killed: {exits}; files compared: {self.compared_files}; wrong: {len(self.wrong)}"
        )


def main() -> None:
    """Do as many runs as are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=300, help="how many (300)")
    parser.add_argument("--seed", type=int, default=0, help="what they are drawn from (0)")
    parser.add_argument("--folder", help="where files are made; else the folder for temporary ones")
    options = parser.parse_args()
    if compiler() is None:
        sys.exit("there is no C compiler")
    launches = _launches()
    figures, begin = Figures(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="reshard_mpi_random_kills_", dir=options.folder) as name:
        os.environ["RESHARD_MPI_STATE_DIR"] = str(Path(name) / "state")
        for number in range(options.runs):
            folder = Path(name) / "run"
            for problem in _Run(folder, figures, launches, f"{options.seed}/{number}").problems():
                figures.wrong.append(f"run {number} of --seed {options.seed}: {problem}")
                print(f"WRONG {figures.wrong[-1]}", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            if number % 10 == 9:
                print(f"{time.monotonic() - begin:.0f} s: {figures}", flush=True)
    print(f"{figures}; {time.monotonic() - begin:.0f} s")
    for wrong in figures.wrong:
        print(f"WRONG {wrong}")
    sys.exit(bool(figures.wrong))


class _Run:
    """One conversion, killed and resumed."""

    def __init__(self, folder: Path, figures: Figures, launches: list[Launch], drawn_from: str) -> None:
        folder.mkdir()
        self._folder = folder
        self._figures = figures
        self._launches = launches
        self._random = random.Random(drawn_from)
        self._case = _drawn(drawn_from)
        self._verify = self._random.random() < 0.5
        self._conversion = self._write()
        self._injector = Injector(folder / "calls")

    def problems(self) -> list[str]:
        """Run, be killed, resume, and return what is wrong."""
        c = self._conversion.but(dst=self._folder / "whole")
        if run_in_fork(*c.arguments("transform", "--progress", "none", *self._options())).code:
            self._figures.refused += 1
            return []
        self._figures.runs += 1
        whole = timeless(c.dst)
        wrong = [f"undisturbed: {text}" for text in self._unlike_the_oracle(c)]
        c = self._conversion.but(dst=self._folder / "dst")
        told = []
        for _ in range(self._random.randint(1, _MAX_KILLS)):
            launch = self._random.choice(self._launches)
            fault = self._fault(launch)
            finished, calls = self._start(launch, c, fault)
            harmed = any(call.is_harmed for call in calls)
            told.append(f"{launch}: {fault}, exit {[each.code for each in finished]}")
            if harmed:
                self._figures.kills += 1
                self._figures.launches[launch.name] += 1
                self._figures.exits.update(each.code for each in finished)
            succeeded = not harmed and not any(each.code for each in finished)
            wrong += wrong_in(c, whole, succeeded=succeeded)
            wrong += [text for each in finished for text in badly_reported(each, killed=harmed)]
        wrong += self._when_resumed(c, whole)
        return [f"{text} [{'; '.join(told)}]" for text in wrong]

    def _fault(self, launch: Launch) -> Fault:
        """Draw a call from those of a run that is left in peace. One that goes on makes fewer, so it may never come."""
        c = self._conversion.but(dst=self._folder / "counted")
        shutil.rmtree(c.dst, ignore_errors=True)
        _, calls = self._start(launch, c, Fault(0, "kill", names=_NAMES))
        do = self._random.choice(("kill", "kill all"))
        return Fault(self._random.randint(1, len(calls)), do, names=_NAMES)

    def _start(self, launch: Launch, c: Conversion, fault: Fault) -> tuple[list[Finished], list[Call]]:
        env = {**_CUT, **self._injector.environment(fault, [c.dst])}
        commands = launch.commands(c, (*self._options(), "--resume"))
        finished = [run_command(command, env=env, timeout_seconds=120) for command in commands]
        return finished, self._injector.calls()

    def _when_resumed(self, c: Conversion, whole: dict[str, bytes | None]) -> list[str]:
        launch = self._random.choice(self._launches)
        finished, _ = self._start(launch, c, NO_FAULT)
        failed = [str(each) for each in finished if each.code]
        if failed:
            return [f"resumed by {launch}: {text}" for text in failed]
        problems = [f"resumed by {launch}: {text}" for text in wrong_in(c, whole, succeeded=True)]
        problems += self._unlike_the_oracle(c)
        if self._verify:
            verified = run_in_fork("verify", str(c.dst), "--jobs", "1")
            problems += [f"verify: exit {verified.code}: {verified.err}"] if verified.code else []
        return problems

    def _options(self) -> tuple[str, ...]:
        return ("--verify",) if self._verify else ()

    def _write(self) -> Conversion:
        case, kinds = self._case, [self._random.choice(KINDS) for _ in range(2)]
        return write_conversion(self._folder, kinds[0], case.src, case.dst, case.tensors, to=kinds[1])

    def _unlike_the_oracle(self, c: Conversion) -> list[str]:
        ranks = range(self._case.dst.world_size)
        self._figures.compared_files += len(ranks)
        return [
            f"rank {rank} is not what the oracle says"
            for rank in ranks
            if read_shard(c.written(rank)) != c.expected(rank)
        ]


def _launches() -> list[Launch]:
    mpis = [mpi for name in MPI_NAMES if (mpi := find_mpi(name)) is not None]
    of_ranks = [ranks_of(mpi, ranks) for mpi in mpis for ranks in (2, 3)]
    return [ALONE, *map(jobs_of, (2, 3, 5)), *of_ranks, *map(array_of, (2, 3))]


def _drawn(drawn_from: str) -> Case:
    """Return the random case that a text stands for."""
    drawn: list[Case] = []

    @seed(drawn_from)
    @settings(max_examples=2, database=None, phases=[Phase.generate], deadline=None, suppress_health_check=HealthCheck)
    @given(case=cases(), _=st.none())
    def draw(case: Case, _: None) -> None:
        drawn.append(case)

    draw()
    return drawn[-1]  # the first is the simplest one there is


if __name__ == "__main__":
    main()
