"""Calls of libc that fail in the middle of a run, in every way to start one: right, or refused in one message.

`attempts.py` has the rule. Here is a sample of calls; `faults/every_call.py` goes over all. Where processes work at the
same time the order of their calls differs from run to run, and the rule holds for whichever call it is.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from support.attempts import ALONE, ARRAY, BY_RANK, FUNCTION, FUNCTION_2, JOBS, Bench, Launch, conversion, ranks_of
from support.command_line import COMMAND
from support.conversions import of_every_kind
from support.injector import NO_FAULT, READING, Call, Fault, Injector, needs_compiler
from support.launch import MPI, of_every_kind_and_mpi
from support.processes import run_command

pytestmark = [needs_compiler, pytest.mark.slow]

# What is done to one call after the other, over and over: an error or less than was asked for, once or from then on.
HARM = (
    ("EIO", False),
    ("ENOSPC", True),
    ("EDQUOT", False),
    ("EIO", True),
    ("ENOSPC", False),
    ("short", True),
    ("EDQUOT", True),
)


def sample(calls: list[Call], count: int) -> list[int]:
    """Return numbers of calls, spread evenly, with the first and the last.

    Of the calls of one name for one file in a row, as where a tensor is copied, only the first and the last are taken.
    """
    ends = [
        number
        for number, call in enumerate(calls, 1)
        if not _alike(calls, number - 2, number - 1) or not _alike(calls, number - 1, number)
    ]
    if count >= len(ends):
        return ends
    return [ends[round(index * (len(ends) - 1) / (count - 1))] for index in range(count)]


def _alike(calls: list[Call], left: int, right: int) -> bool:
    if left < 0 or right >= len(calls):
        return False
    return (calls[left].name, calls[left].path) == (calls[right].name, calls[right].path)


def assert_the_rule_holds(bench: Bench, count: int, *, skip: int = 0) -> None:
    """Harm `count` calls of the run, in turn as `HARM` has it, from its entry `skip` on."""
    attempts = []
    for turn, number in enumerate(sample(bench.calls, count)):
        do, is_lasting = HARM[(turn + skip) % len(HARM)]
        attempts.append(bench.attempt(Fault(number, do, is_lasting)))
    assert any(attempt.harmed for attempt in attempts)
    broken = [str(attempt) for attempt in attempts if attempt.violations]
    assert not broken, f"{len(broken)} of {len(attempts)}:\n" + "\n".join(broken)


@pytest.mark.parametrize(("kind", "skip"), [("ckpt", 0), ("hdf5", 3)])
def test_alone(tmp_path: Path, kind: str, skip: int) -> None:
    assert_the_rule_holds(Bench(tmp_path, kind, ALONE, verify=skip > 0), 6, skip=skip)


# What a kind of file is written with does not depend on who starts the run: each launch once, both kinds in turn.
@pytest.mark.parametrize(
    ("launch", "skip", "kind"),
    [
        (JOBS, 0, "ckpt"),
        (JOBS, 0, "hdf5"),
        (ARRAY, 1, "ckpt"),
        (FUNCTION, 2, "hdf5"),
        (FUNCTION_2, 3, "ckpt"),
        (BY_RANK, 4, "hdf5"),
    ],
    ids=str,
)
def test_other_launches(tmp_path: Path, kind: str, launch: Launch, skip: int) -> None:
    assert_the_rule_holds(Bench(tmp_path, kind, launch, verify=launch is JOBS), 3, skip=skip)


@of_every_kind_and_mpi
def test_ranks(tmp_path: Path, kind: str, mpi: MPI) -> None:
    assert_the_rule_holds(Bench(tmp_path, kind, ranks_of(mpi), verify=kind == "hdf5"), 2)


SHARED = [
    Fault(1, "EIO", is_lasting=True, names=("copy_file_range", "pwrite", "unlink"), path="rank_2/."),
    Fault(1, "EIO", names=("close",), path="/rank_2.lock"),
    Fault(1, "EIO", names=("close",), path="/commit.lock"),
]


@pytest.mark.parametrize("fault", SHARED, ids=["what is left of it", "its lock", "the commit lock"])
def test_only_the_target_that_is_filled_together_fails(tmp_path: Path, fault: Fault) -> None:
    """Also where what is left of it cannot be removed, or its lock not be closed."""
    attempt = Bench(tmp_path, "ckpt", JOBS).attempt(fault)
    assert attempt.harmed and not attempt.violations, str(attempt)
    if attempt.codes != (0,):
        assert "1 of 3 targets failed" in attempt.finished[0].err, str(attempt)


# What makes the structure of a file, and what is said when that is closed: where errors were once swallowed.
STRUCTURE = ("pwrite", "ftruncate", "fsync", "close")


@pytest.mark.parametrize(
    ("kind", "do", "is_lasting"), [("ckpt", "EIO", False), ("hdf5", "EIO", False), ("hdf5", "ENOSPC", True)]
)
def test_every_call_for_a_shards_structure(tmp_path: Path, kind: str, do: str, is_lasting: bool) -> None:
    """Those for the shard of rank 0."""
    bench = Bench(tmp_path, kind, ALONE, verify=True, names=("short", "global_step"))
    numbers = [n for n, call in enumerate(bench.calls, 1) if "/rank_0/." in call.path and call.name in STRUCTURE]
    if is_lasting:  # what comes after a call fails with it
        numbers = numbers[::3]
    attempts = [bench.attempt(Fault(number, do, is_lasting)) for number in numbers]
    assert len(attempts) >= 3 and all(attempt.harmed for attempt in attempts)
    broken = [str(attempt) for attempt in attempts if attempt.violations]
    assert not broken, f"{len(broken)} of {len(attempts)}:\n" + "\n".join(broken)


# One of the processes that fill a target together is lost while they verify it


@pytest.mark.parametrize(
    ("kind", "who", "names"),
    [
        ("ckpt", "others", ("longer",)),  # of which both have a part
        ("hdf5", "others", ("longer",)),
        ("ckpt", "others", ("bias", "longer", "middle")),  # some are in one part alone
        ("hdf5", "maker", ("longer",)),
    ],
    ids=["ckpt, parts of one tensor", "hdf5, parts of one tensor", "several tensors", "who leads"],
)
def test_killed_while_verifying_together(tmp_path: Path, kind: str, who: str, names: tuple[str, ...]) -> None:
    """Before each call that reads the target: it is not published, and made anew when the run is resumed."""
    bench = Bench(tmp_path, kind, JOBS, verify=True, names=names)
    reading = Fault(0, "kill", names=(*READING, "fsync"), path="rank_2/.", who=who)
    points = while_verifying(bench, reading)
    if who == "maker":  # nobody else publishes what it leads
        points = points[:: len(points) - 1]
    attempts = [bench.attempt(reading.at_call(number)) for number in points]
    assert all(attempt.harmed and attempt.codes == (4,) for attempt in attempts), "\n".join(map(str, attempts))
    broken = [str(attempt) for attempt in attempts if attempt.violations]
    assert not broken, f"{len(broken)} of {len(attempts)}:\n" + "\n".join(broken)


@pytest.mark.parametrize(("kind", "who"), [("ckpt", "maker"), ("hdf5", "others")])
def test_cannot_read_what_was_filled_together(tmp_path: Path, kind: str, who: str) -> None:
    bench = Bench(tmp_path, kind, JOBS, verify=True, names=("longer",))
    attempt = bench.attempt(Fault(1, "EIO", names=("preadv",), path="rank_2/.", who=who))
    assert attempt.harmed and attempt.codes == (4,), str(attempt)
    assert not attempt.violations, str(attempt)


def while_verifying(bench: Bench, reading: Fault) -> range:
    """Return the numbers of the calls that verify: the target is synced, opened to read, read, and closed."""
    calls = bench.attempt(reading).calls
    synced = next(number for number, call in enumerate(calls, 1) if call.name == "fsync")
    closed = (number for number, call in enumerate(calls, 1) if call.name == "close_reader" and number > synced)
    return range(synced, next(closed) + 1)


# The injector itself


WRITES_HDF5 = """
import sys, h5py
with h5py.File(sys.argv[1], "w") as file:
    file["x"] = range(1000)
"""


def test_it_sees_what_the_hdf5_library_writes(tmp_path: Path) -> None:
    injector = Injector(tmp_path / "calls")
    folder = tmp_path / "here"
    folder.mkdir()
    command = [sys.executable, "-c", WRITES_HDF5, str(folder / "a.h5")]
    run_command(command, env=injector.environment(NO_FAULT, [folder]), check=True)
    names = [call.name for call in injector.calls()]
    assert names[0] == "create" and names[-1] == "close" and names.count("pwrite") > 2, names
    fault = Fault(1, "ENOSPC", names=("pwrite",))
    finished = run_command(command, env=injector.environment(fault, [folder]))
    assert finished.code and "No space left on device" in finished.err
    assert [call.name for call in injector.calls() if call.is_harmed] == ["pwrite"] and injector.harmed == 1
    run_command(command, env=injector.environment(fault, [tmp_path / "elsewhere"]), check=True)
    assert injector.calls() == []


@pytest.mark.skipif(shutil.which("strace") is None, reason="there is no strace")
@of_every_kind
def test_it_sees_what_the_kernel_sees(tmp_path: Path, kind: str) -> None:
    c, injector = conversion(tmp_path, kind), Injector(tmp_path / "calls")
    command = [*COMMAND, *c.arguments("transform", "--jobs", "2", "--verify", "--progress", "none")]
    traced = {"pwrite64": "pwrite", "copy_file_range": "copy_file_range", "fsync": "fsync"}
    traced |= {"renameat": "rename", "ftruncate": "ftruncate", "unlinkat": "unlink", "write": "write"}
    trace = tmp_path / "trace"
    every = [*traced, "renameat2"]
    tracing = ["strace", "-f", "-y", "-qq", "-o", str(trace), "-e", f"trace={','.join(every)}"]
    finished = run_command([*tracing, *command], env=injector.environment(NO_FAULT, [c.dst]))
    if finished.code == 1 and not c.dst.exists():
        pytest.skip("nothing can be traced here")
    lines = [line for line in trace.read_text().splitlines() if str(c.dst) in line and "resumed>" not in line]
    for name, counts_as in traced.items():
        seen = sum(bool(re.search(rf" {name}2?\(", line)) for line in lines)
        assert seen == sum(call.name == counts_as for call in injector.calls()) > 0, name


# The long forms


@pytest.mark.parametrize(
    ("script", "options", "says"),
    [
        ("every_call.py", "--launch alone --kind ckpt --verify no --harm EIO ENOSPC --how once --call 1", "wrong: 0;"),
        ("random_kills.py", "--runs 1 --seed 3", "wrong: 0;"),
    ],
)
def test_the_long_forms_run(tmp_path: Path, script: str, options: str, says: str) -> None:
    path = Path(__file__).with_name(script)
    command = [sys.executable, path, *options.split(), "--folder", tmp_path]
    finished = run_command(command, timeout_seconds=120, check=True)
    assert says in finished.out.splitlines()[-1], finished
