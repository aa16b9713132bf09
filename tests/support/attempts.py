"""Runs to which a fault happens, started in every way there is, and the rule that each of them must keep.

The rule: a command says that all is well only if every target is there and to the last byte what an undisturbed run
makes, and committed where that is recorded. Else it says once what is wrong, and what has the name of a target is a
whole one; nothing half-done is left. Either way the same command, resumed, ends with all that an undisturbed run makes.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from support.cases import Side
from support.checkpoints import read_shard
from support.command_line import COMMAND, run_here
from support.conversions import Conversion, timeless, write_conversion
from support.injector import NO_FAULT, Call, Fault, Injector, compiled
from support.launch import MPI, mpirun_command
from support.oracle import RawLayout
from support.processes import Finished, run_command
from support.zygote import HDF5, PLAIN, Zygote

# Columns cut in two become rows cut in three. By the lengths of what lies together: copied by the kernel, read straight
# to their places, gathered from a window, or read one by one, as there are few; and what every rank has. Three targets
# on two processes: one is filled by both, as it is longer than what they divide files by.
TENSORS = {
    "long": np.arange(6 << 16, dtype=np.float32).reshape(6, -1),
    "longer": -np.arange(3 << 19, dtype=np.float32).reshape(3, -1),
    "middle": np.arange(3 << 13, dtype=np.float32).reshape(48, -1),
    "short": np.arange(3 << 9, dtype=np.int16).reshape(192, -1),
    "few": np.arange(96, dtype=np.int16).reshape(12, -1),
    "bias": np.arange(96, dtype=np.float64),
    "global_step": np.array(7, np.int32),
}
_CUT = ("long", "longer", "middle", "short", "few")
Listing = dict[str, bytes | None]

_FUNCTION = """
import sys
import reshard_mpi
from reshard_mpi.errors import ReshardError

src, dst, src_strategy, dst_strategy, kind, how = sys.argv[1:]
try:
    if how == "by_rank":
        files = {rank: f"{src}/rank_{rank}/checkpoint_{rank}.ckpt" for rank in range(2)}
        for rank in range(3):
            target = f"{dst}/rank_{rank}/checkpoint_{rank}.{'h5' if kind == 'hdf5' else kind}"
            reshard_mpi.transform_checkpoint_by_rank(rank, files, target, src_strategy, dst_strategy)
    else:
        options = {"process_num": 2 if "2" in how else 1, "verify": "verify" in how}
        files = (src, dst, "checkpoint_", src_strategy, dst_strategy)
        reshard_mpi.transform_checkpoints(*files, **options, output_format=kind)
except ReshardError as error:
    print("reshard-mpi: error:", error, file=sys.stderr)
    sys.exit(error.exit_code)
"""

# Exit codes that say: refused, targets failed.
_FAILURES = (3, 4)
_HARD_ENDS = ("Traceback", "Segmentation fault", "Fatal Python error", "core dumped", "Exception ignored", "Bus error")


@dataclass(frozen=True, slots=True)
class Launch:
    """A way to start a conversion. commands: one after another, of a conversion and further options.

    is_recorded: it keeps a record of what is complete, and commits.
    """

    name: str
    commands: Callable[[Conversion, tuple[str, ...]], list[Sequence[str]]]
    is_recorded: bool = True
    verifies: bool = True

    def __str__(self) -> str:
        return self.name


def _transform(*given: str) -> Callable[[Conversion, tuple[str, ...]], list[Sequence[str]]]:
    return lambda c, options: [[*COMMAND, *c.arguments("transform", "--progress", "none", *given, *options)]]


def jobs_of(number: int) -> Launch:
    """Return the launch of so many local processes."""
    return Launch(f"jobs-{number}", _transform("--jobs", str(number)))


def array_of(parts: int) -> Launch:
    """Return the launch of so many array tasks, one after the other, as `launch/slurm_array.sbatch` starts them."""

    def commands(c: Conversion, options: tuple[str, ...]) -> list[Sequence[str]]:
        further = tuple(option for option in options if option != "--resume")
        shares = [("--part", f"{task}/{parts}", "--resume") for task in range(parts)]
        return [[*COMMAND, *c.arguments("transform", "--progress", "none", *share, *further)] for share in shares]

    return Launch(f"array-{parts}", commands)


def _function(how: str) -> Callable[[Conversion, tuple[str, ...]], list[Sequence[str]]]:
    def commands(c: Conversion, options: tuple[str, ...]) -> list[Sequence[str]]:
        paths = [str(path) for path in (c.src, c.dst, c.src_strategy, c.dst_strategy)]
        verified = f"{how}, verify" if "--verify" in options else how
        return [[sys.executable, "-c", _FUNCTION, *paths, c.kind, verified]]

    return commands


ALONE = Launch("alone", _transform("--jobs", "1"))
JOBS = jobs_of(2)
ARRAY = array_of(2)
FUNCTION = Launch("function", _function("1"), is_recorded=False)
FUNCTION_2 = Launch("function-2", _function("2"), is_recorded=False)
BY_RANK = Launch("by-rank", _function("by_rank"), is_recorded=False, verifies=False)
LAUNCHES = (ALONE, JOBS, ARRAY, FUNCTION, FUNCTION_2, BY_RANK)


def ranks_of(mpi: MPI, ranks: int = 2) -> Launch:
    """Return the launch of so many ranks."""

    def commands(c: Conversion, options: tuple[str, ...]) -> list[Sequence[str]]:
        arguments = c.arguments("transform", "--progress", "none", *options)
        return [mpirun_command(mpi, ranks, [*COMMAND, *arguments])]

    return Launch(mpi.name if ranks == 2 else f"{mpi.name}-{ranks}", commands)


def conversion(folder: Path, kind: str, names: Collection[str] = tuple(TENSORS)) -> Conversion:
    """Write the source, .ckpt shards of the tensors `names`, and return its conversion to shards of `kind`."""
    source, target = _side(2, (-1, 0), (0,), names), _side(3, (0, -1), (-1,), names)
    return write_conversion(folder, "ckpt", source, target, {name: TENSORS[name] for name in names}, to=kind)


def _side(ranks: int, cut: tuple[int, ...], bias: tuple[int, ...], names: Collection[str]) -> Side:
    maps = {**dict.fromkeys(_CUT, cut), "bias": bias, "global_step": ()}
    layouts = {name: RawLayout((ranks,), maps[name]) for name in names}
    return Side(ranks, 1, layouts, frozenset({"global_step"} & layouts.keys()))


@dataclass(frozen=True, slots=True)
class Attempt:
    """What became of a run to which a fault happened, of its commands and of the calls they made.

    wrong: what is not what it was said to be, then or when it was resumed. unclean: what was said or left behind
    otherwise than the rule has it.
    """

    fault: Fault
    finished: tuple[Finished, ...]
    calls: tuple[Call, ...]
    compared_files: int = 0
    wrong: tuple[str, ...] = ()
    unclean: tuple[str, ...] = ()

    @property
    def violations(self) -> tuple[str, ...]:
        return self.wrong + self.unclean

    @property
    def codes(self) -> tuple[int, ...]:
        return tuple(each.code for each in self.finished)

    @property
    def harmed(self) -> tuple[Call, ...]:
        return tuple(call for call in self.calls if call.is_harmed)

    def __str__(self) -> str:
        harmed = ", ".join(map(str, self.harmed[:3])) + (" ..." if len(self.harmed) > 3 else "")
        return (
            f"{self.fault} [{harmed or 'nothing'}], exit {self.codes}: {'; '.join(self.violations) or 'as it must be'}"
        )


@functools.cache
def _stage(*, has_hdf5: bool) -> tuple[Injector, Zygote]:
    """Return what harms commands, and what starts them with that loaded; workers are not forked where HDF5 is."""
    injector = Injector(compiled().with_name(f"calls_{has_hdf5}"))
    return injector, Zygote(injector.environment(NO_FAULT, []), (*PLAIN, *(HDF5 if has_hdf5 else ())))


class Bench:
    """One conversion, made again and again in one way, each time with another fault."""

    def __init__(
        self, folder: Path, kind: str, launch: Launch, *, verify: bool = False, names: Collection[str] = tuple(TENSORS)
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.launch = launch
        self.options: tuple[str, ...] = ("--verify",) if verify else ()
        self.conversion = conversion(folder, kind, names).but(dst=folder / "whole")
        self._injector, self._zygote = _stage(has_hdf5=kind == "hdf5" and "2" not in launch.name)
        self._verify = verify
        self._folder = folder
        finished, self.calls = self._run(self.conversion, NO_FAULT)
        if any(each.code for each in finished):
            raise AssertionError("\n".join(map(str, finished)))
        self._whole = timeless(self.conversion.dst)
        for rank in range(self.conversion.target.world_size):
            assert read_shard(self.conversion.written(rank)) == self.conversion.expected(rank)

    def attempt(self, fault: Fault) -> Attempt:
        """Run into `fault`, look at what is there, resume, look again."""
        c = self.conversion.but(dst=self._folder / "dst")
        shutil.rmtree(c.dst, ignore_errors=True)
        try:
            finished, calls = self._run(c, fault)
        except pytest.fail.Exception as failure:  # it hangs, or leaves processes behind
            return Attempt(fault, (), tuple(self._injector.calls()), unclean=(str(failure),))
        killed = fault.do.startswith("kill") and any(call.is_harmed for call in calls)
        left_undone = killed or any(call.is_harmed and call.name == "unlink" for call in calls)
        succeeded = not any(each.code for each in finished)
        wrong = wrong_in(c, self._whole, succeeded=succeeded)
        unclean = [text for each in finished for text in badly_reported(each, killed=killed)]
        if not succeeded and not left_undone:
            unclean += [f"left behind: {path.relative_to(c.dst)}" for path in c.dst.rglob("*.partial")]
        wrong += self._when_resumed(c)
        compared = len(list(c.dst.glob("rank_*/*")))
        return Attempt(fault, tuple(finished), tuple(calls), compared, tuple(wrong), tuple(unclean))

    def _run(self, c: Conversion, fault: Fault, *options: str) -> tuple[list[Finished], list[Call]]:
        env = self._injector.environment(fault, [c.dst])
        commands = self.launch.commands(c, (*self.options, *options))
        finished = [
            self._zygote.run(command) if command[0] == sys.executable else run_command(command, env=env)
            for command in commands
        ]
        return finished, self._injector.calls()

    def _when_resumed(self, c: Conversion) -> list[str]:
        """Go on without a fault, and say what is wrong then."""
        if self.launch.is_recorded:
            finished = c.run("transform", "--resume", *self.options)
        else:
            (finished,), _ = self._run(c, NO_FAULT)
        if finished.ended != (0, ""):
            return [f"resumed, exit {finished.code}: {_end_of(finished.err)}"]
        files = timeless(c.dst)
        if not self.launch.is_recorded:  # nobody knows whose a partial file is
            files = {name: content for name, content in files.items() if not name.endswith(".partial")}
        problems = [f"resumed, but {text}" for text in _differences(files, self._whole)]
        if self._verify and self.launch.is_recorded:
            verified = run_here("verify", c.dst, "--jobs", "1")
            if verified.code:
                problems.append(f"verify of what was resumed: exit {verified.code}: {_end_of(verified.err)}")
        return problems


def wrong_in(c: Conversion, whole: Listing, *, succeeded: bool) -> list[str]:
    """Return what in the target folder of `c` is not what an undisturbed run makes, though it is said to be complete.

    succeeded: all commands of the run said so of all of it.
    """
    files = timeless(c.dst)
    shards = [name for name in files if _is_final(name)]
    problems = [f"{name} is not whole" for name in shards if whole.get(name) != files[name]]
    problems += [f"exit 0, but {text}" for text in _differences(files, whole)] if succeeded else []
    if "reshard.json" in files and _differences(files, whole, "rank_"):
        problems.append("committed, though targets are missing or wrong")
    wrong = [name for name in shards if _sums(files, name) not in ([], _sums(whole, name))]
    return problems + [f"the record of {name} has wrong sums" for name in wrong]


def badly_reported(finished: Finished, *, killed: bool) -> list[str]:
    """Return what is wrong with how a command has ended. killed: one of its processes was."""
    err, code = finished.err, finished.code
    problems = [f"{word}: {_end_of(err)}" for word in _HARD_ENDS if word in err]
    if code and not killed:
        messages = len(re.findall("^reshard-mpi: error: ", err, re.MULTILINE))
        if code not in _FAILURES:
            problems.append(f"exit code {code}: {_end_of(err)}")
        elif messages != 1:
            problems.append(f"{messages} error messages: {_end_of(err)}")
    return problems


def _sums(files: Listing, shard: str) -> list[object]:
    """Return the sums that the record of a shard has; nothing if there is no record."""
    content = files.get(f".reshard_mpi/{Path(shard).parent.name}.json")
    sums = [] if content is None else json.loads(content)["sums"]
    assert isinstance(sums, list)
    return sums


def _is_final(name: str) -> bool:
    return name.startswith("rank_") and "/" in name and "/." not in name


def _differences(files: Listing, expected: Listing, beginning: str = "") -> list[str]:
    names = [name for name in sorted({*files, *expected}) if name.startswith(beginning)]
    return [
        f"{name} {'is missing' if name not in files else 'is too much' if name not in expected else 'differs'}"
        for name in names
        if name not in files or name not in expected or files[name] != expected[name]
    ]


def _end_of(text: str) -> str:
    """Return the last words of a text in one line, without what a library says at length."""
    return " | ".join(line.strip()[:200] for line in text.strip().splitlines()[-6:])[-600:]
