"""The governor at work: runs whose processes queue for memory, refusals, and what a person sees of it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

import pytest
from support.checkpoints import read_shard
from support.command_line import COMMAND, done, run_apart, run_here
from support.conversions import Conversion, assert_right, listing, make, side, transform_apart
from support.holders import TIMEOUT_SECONDS, Holder, ended, leased, until
from support.launch import MPI, by_one_mpi
from support.ledgers import Changing, ledger
from support.oracle import RawLayout
from support.stand_ins import doing

import reshard_mpi
from reshard_mpi.errors import BudgetError, ReshardError, UsageError
from reshard_mpi.processes import governor as governing
from reshard_mpi.processes.governor import Allowance, Governor, open_governor
from reshard_mpi.processes.ledger import Ledger, _LedgerFile
from reshard_mpi.processes.ledger_folder import LedgerFolder
from reshard_mpi.processes.memory_scopes import anonymous_bytes
from reshard_mpi.text import MIB, parse_bytes

# Every process takes this of memory once it has filled its target, and keeps its lease until it is told to go on.
HOLD = """
        import time, pathlib
        ballast = b"\\1" * {ballast_bytes}
        folder = pathlib.Path({folder!r})
        (folder / f"in_{{plan.target_rank}}").write_text(str(os.getpid()))
        while not (folder / f"go_{{plan.target_rank}}").exists():
            time.sleep(0.005)
"""
# What is projected is changed when that module is loaded: a process that waits at its start has not loaded it.
PROJECTED = """
import importlib.util, sys
def change(module):
    module.Projection.peak_bytes = lambda *_: {peak_bytes}
class Projecting:
    def find_spec(self, name, path=None, target=None):
        if name != "reshard_mpi.runs.process_memory":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def load_and_change(module):
            load(module)
            change(module)
        spec.loader.exec_module = load_and_change
        return spec
if "reshard_mpi.runs.process_memory" in sys.modules:
    change(sys.modules["reshard_mpi.runs.process_memory"])
else:
    sys.meta_path.insert(0, Projecting())
"""


def leased_bytes(state: Path) -> dict[int, int]:
    """Return how many bytes every process holds, all at one moment: nobody is admitted while the lock is held."""
    line = ledger(state)
    try:
        file = _LedgerFile(line.path, os.O_RDWR)
    except FileNotFoundError:
        return {}
    with contextlib.closing(file), contextlib.suppress(FileNotFoundError), file.changing(None):
        return {entry.pid: entry.size_bytes for entry in line.entries() if entry.holds}
    return {}


class Crowd:
    """16 processes, of which each makes one target; each projects 64 MiB, and uses what it takes and 16 MiB more."""

    def __init__(self, folder: Path, memory: str) -> None:
        self.folder = folder
        self.c = make(folder).to(side(16, {"w": RawLayout((4, 4), (1, 0)), "b": RawLayout((4, 4), (-1,))}))
        (folder / "gate").mkdir()
        env = {
            **os.environ,
            **doing(folder, HOLD.format(ballast_bytes=16 * MIB, folder=str(folder / "gate")), "True"),
            "RESHARD_MPI_STATE_DIR": str(folder / "state"),
        }
        with (folder / "stand_in" / "sitecustomize.py").open("a") as stream:
            stream.write(PROJECTED.format(peak_bytes=64 * MIB))
        self.processes = [
            subprocess.Popen(
                [*COMMAND, *self.c.arguments("transform", "--rank", str(rank), "--memory", memory)],
                env=env,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            for rank in range(16)
        ]

    def inside(self) -> dict[int, int]:
        """Return the targets that are being made, with the processes that have come as far as they are to use."""
        here = (path for path in (self.folder / "gate").glob("in_*") if path.read_text())
        ranks = {int(path.name.removeprefix("in_")): int(path.read_text()) for path in here}
        return {rank: pid for rank, pid in ranks.items() if not (self.folder / "gate" / f"go_{rank}").exists()}

    def at_work(self, count: int, state: Path) -> dict[int, int]:
        """Wait until so many are inside, and hold what they project; at no moment more is held than there is.

        Those that are not inside hold less, as long as they have not planned.
        """
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while True:
            inside, holding = self.inside(), leased_bytes(state)
            assert sum(holding.values()) <= 256 * MIB
            assert len([size_bytes for size_bytes in holding.values() if size_bytes >= 64 * MIB]) <= 4
            if len(inside) == count and all(holding.get(pid) == 64 * MIB for pid in inside.values()):
                return inside
            assert all(process.poll() in (None, 0) for process in self.processes), self.processes
            assert time.monotonic() < deadline, f"{len(inside)} are inside, {len(holding)} hold a lease"
            time.sleep(0.005)

    def let_go(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            (self.folder / "gate" / f"go_{rank}").touch()

    def ended_well(self) -> bool:
        errors = [process.communicate(timeout=300)[1] for process in self.processes]
        assert [process.returncode for process in self.processes] == [0] * 16, errors
        return all(read_shard(self.c.written(rank)) == self.c.expected(rank) for rank in range(16))

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_16_processes_of_64_mib_in_256_mib(tmp_path: Path) -> None:
    crowd = Crowd(tmp_path, "256M")
    try:
        for left in range(16, 0, -1):
            inside = crowd.at_work(min(4, left), tmp_path / "state")
            used = [anonymous_bytes(pid) for pid in inside.values()]
            assert 16 * MIB < max(used) <= 64 * MIB
            assert sum(used) <= 256 * MIB
            crowd.let_go(list(inside)[:1])
        assert crowd.ended_well()
    finally:
        crowd.kill()


@pytest.mark.slow
def test_the_same_without_the_governor_takes_more(tmp_path: Path) -> None:
    crowd = Crowd(tmp_path, "unlimited")
    try:
        until(lambda: len(crowd.inside()) == 16, "all at work")
        used_bytes = sum(anonymous_bytes(pid) for pid in crowd.inside().values())
        print(f"16 processes use {used_bytes / MIB:.0f} MiB")
        assert used_bytes > 256 * MIB
        assert not (tmp_path / "state").exists()
        crowd.let_go(range(16))
        assert crowd.ended_well()
    finally:
        crowd.kill()


# What can never fit


@pytest.mark.parametrize("options", [("--jobs", "1"), ("--jobs", "2"), ("--rank", "1")])
def test_what_can_never_fit_is_refused(c: Conversion, options: tuple[str, ...]) -> None:
    finished = c.run("transform", "--memory", "25M", *options)
    assert finished.code == 5 and finished.out == ""
    assert "can never fit" in finished.err and "25.00 MiB or less" in finished.err
    assert "projected 28." in finished.err and "28.00 MiB are reserved" in finished.err and "--memory" in finished.err
    assert not c.dst.exists()


def test_plan_says_so_too(c: Conversion) -> None:
    assert c.run("plan", "--memory", "25M").code == 5
    c.done("plan", "--memory", "1G")


@pytest.mark.slow
def test_a_plan_leaves_no_lease_and_a_batch_script_is_for_other_hosts(
    c: Conversion, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c.done("plan")
    assert list(state.glob("*/*")) == []
    monkeypatch.setenv("RESHARD_MPI_MEMORY", "25M")
    c.done("plan", "--sbatch")
    assert run_apart(*c.arguments("plan", "--sbatch")).code == 0
    assert run_apart(*c.arguments("plan")).code == 5


@by_one_mpi
def test_what_can_never_fit_is_refused_on_all_ranks(mpi: MPI, c: Conversion) -> None:
    arguments = c.arguments("transform", "--memory", "25M")
    finished = run_apart(*arguments, mpi=mpi)
    assert finished.code == 5, finished
    assert finished.err.count("can never fit") == 1
    assert not c.dst.exists()


def test_the_functions_refuse_it_too(c: Conversion) -> None:
    assert c.src_strategy is not None and c.dst_strategy is not None
    with pytest.raises(BudgetError):
        reshard_mpi.transform_checkpoints(c.src, c.dst, "p", c.src_strategy, c.dst_strategy, memory="25M")
    files = {rank: c.shard(rank) for rank in range(4)}
    with pytest.raises(BudgetError):
        reshard_mpi.transform_checkpoint_by_rank(
            0, files, c.dst / "x.ckpt", c.src_strategy, c.dst_strategy, memory=25 * MIB
        )
    assert not c.dst.exists()


def test_wrong_amounts(c: Conversion, monkeypatch: pytest.MonkeyPatch) -> None:
    for amount in ("much", "-1", "0", "1.5.5G", ""):
        said = c.refused("transform", f"--memory={amount}", code=2)
        assert "no amount of memory" in said and "--memory" in said
    assert c.run("transform", "--max-active", "0").code == 2
    with pytest.raises(UsageError):
        reshard_mpi.transform_checkpoints(c.src, c.dst, "p", c.src_strategy, c.dst_strategy, max_active=0)
    monkeypatch.setenv("RESHARD_MPI_MEMORY", "lots")
    assert "RESHARD_MPI_MEMORY" in c.refused(code=2)
    assert not c.dst.exists()
    monkeypatch.setenv("RESHARD_MPI_MEMORY", "10M")
    assert c.run().code == 5
    c.done("transform", "--memory", "1G")


def test_sizes() -> None:
    assert parse_bytes("400M") == parse_bytes("400 MiB") == parse_bytes("400m") == 400 << 20
    assert parse_bytes("1.5G") == 3 << 29 and parse_bytes("2T") == 2 << 40
    assert parse_bytes("64KB") == 64_000 and parse_bytes("1048576") == parse_bytes("1048576B") == 1 << 20
    for text in ("", "M", "1 X", "1e9", "0x10", "1MM", "\u0661M", "1,5G", "9" * 400 + ".5", "9" * 5000):
        with pytest.raises(ValueError, match="such as"):
            parse_bytes(text)


# Waiting


def test_who_waits_says_so_and_the_report_too(c: Conversion, tmp_path: Path, state: Path) -> None:
    with ended(first := Holder(state, 120 * MIB, memory="150M").expect("holds")):
        command = [*COMMAND, *c.arguments("transform", "--memory", "150M", "-v", "--report", str(tmp_path / "r.json"))]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "reshard-mpi transform" in line and "waiting for memory" in line
        assert f"on pid {first.pid} (sleeping, for " in line
        assert "1 lease holds 120.00 MiB of the 150.00 MiB that this host" in line
        assert listing(c.dst / "rank_0") == {}
        first.let_go()
        _, message = process.communicate(timeout=300)
    assert process.returncode == 0 and "s of it waiting" in message
    targets = json.loads((tmp_path / "r.json").read_text())["targets"]
    assert targets[0]["waited_seconds"] > targets[1]["waited_seconds"]
    assert targets[0]["leased_bytes"] > 25 * MIB


@pytest.mark.parametrize("jobs", [2, 3])
def test_processes_that_fill_a_target_together_hold_nothing_while_they_wait(
    tmp_path: Path, state: Path, jobs: int
) -> None:
    """With one lease for all of them nobody would ever come to the end of it otherwise."""
    c = make(tmp_path).to(side(1, {"w": RawLayout((1,), (-1, -1)), "b": RawLayout((1,), (-1,))}))
    options = ["--jobs", str(jobs), "--max-active", "1", "--report", str(tmp_path / "r.json")]
    finished = transform_apart(c, *options, env=doing(tmp_path, "pass"))
    assert finished.code == 0, finished
    (target,) = json.loads((tmp_path / "r.json").read_text())["targets"]
    assert target["processes"] == jobs
    assert read_shard(c.written(0)) == c.expected(0)


# Only one process of a run at a time has room for what this makes it project.
LARGE = PROJECTED.format(peak_bytes=150 * MIB)
TOGETHER = {"w": RawLayout((1,), (-1, -1)), "b": RawLayout((1,), (-1,))}
EACH = {"w": RawLayout((4,), (0, -1)), "b": RawLayout((4,), (0,))}


def with_large_targets(folder: Path) -> dict[str, str]:
    (folder / "stand_in").mkdir(exist_ok=True)
    (folder / "stand_in" / "sitecustomize.py").write_text(LARGE)
    return {"PYTHONPATH": os.pathsep.join([str(folder / "stand_in"), os.environ.get("PYTHONPATH", "")]).rstrip(":")}


@pytest.mark.parametrize(("ranks", "layouts"), [(1, TOGETHER), (4, EACH)])
@pytest.mark.parametrize("options", [(), ("--verify",), ("--max-active", "1")])
def test_workers_of_a_run_that_have_room_only_one_after_the_other(
    tmp_path: Path, state: Path, ranks: int, layouts: dict[str, RawLayout], options: tuple[str, ...]
) -> None:
    """Who waits for the others with a plan in its hands lets go of it, or those would wait for ever."""
    c = make(tmp_path).to(side(ranks, layouts))
    arguments = c.arguments("transform", "--jobs", "8", "--memory", "200M", *options)
    finished = run_apart(*arguments, env=with_large_targets(tmp_path))
    assert finished.code == 0, finished
    assert_right(c)
    assert list(state.glob("*/*")) == []


@by_one_mpi
@pytest.mark.parametrize(("ranks", "layouts"), [pytest.param(1, TOGETHER, marks=pytest.mark.slow), (4, EACH)])
def test_ranks_of_a_run_that_have_room_only_one_after_the_other(
    mpi: MPI, tmp_path: Path, state: Path, ranks: int, layouts: dict[str, RawLayout]
) -> None:
    """What the ranks take for being there is more than is allowed, and they cannot wait for each other's end."""
    c = make(tmp_path).to(side(ranks, layouts))
    arguments = c.arguments("transform", "--memory", "200M", "--verify")[:-2]  # without --jobs 1
    finished = run_apart(*arguments, mpi=mpi, ranks=4, env=with_large_targets(tmp_path))
    assert finished.code == 0, finished
    assert_right(c)


@pytest.mark.slow
def test_no_more_workers_than_there_can_be_memory_for(tmp_path: Path, state: Path) -> None:
    c = make(tmp_path).to(side(4, EACH))
    finished = transform_apart(c, "--jobs", "4", "--memory", "140M")
    assert finished.code == 0 and "note: 2 of 4 processes were started" in finished.err, finished


@pytest.mark.slow
def test_a_process_that_cannot_grow_starts_over_and_keeps_its_place(tmp_path: Path, state: Path) -> None:
    """It waits bare for all that it needs, and others that came after it do not come before it."""
    c = make(tmp_path).to(side(4, EACH))
    with ended(first := Holder(state, 100 * MIB, memory="200M").expect("holds")):
        command = [*COMMAND, *c.arguments("transform", "--rank", "0", "--memory", "200M", "--progress", "none")]
        environment = {**os.environ, **with_large_targets(tmp_path)}
        process = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, text=True)
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "150.00 MiB wanted" in line and "reshard-mpi transform" in line
        assert anonymous_bytes(process.pid) < 12 * MIB  # it has loaded nothing but what waits
        with ended(later := Holder(state, 100 * MIB, memory="200M")):
            assert later.read().startswith("waits: ")
            first.let_go()
            _, message = process.communicate(timeout=300)
            later.expect("holds").let_go()
    assert process.returncode == 0, message
    assert read_shard(c.written(0)) == c.expected(0)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["plan", "verify", "diff", "audit"])
def test_other_commands_that_read_shards_wait_bare_too(c: Conversion, state: Path, command: str) -> None:
    paths = [str(c.src)] * (2 if command == "diff" else 1) + [str(c.dst)] * (command == "plan")
    with ended(Holder(state, 190 * MIB, memory="200M").expect("holds")):
        arguments = [*COMMAND, command, *paths, "--memory", "200M"]
        process = subprocess.Popen(arguments, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        try:
            assert process.stderr is not None and "waiting for memory" in process.stderr.readline()
            assert anonymous_bytes(process.pid) < 12 * MIB
        finally:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_a_process_that_waits_at_its_start_can_be_stopped(c: Conversion, state: Path) -> None:
    with ended(Holder(state, 190 * MIB, memory="200M").expect("holds")):
        command = [*COMMAND, *c.arguments("transform", "--memory", "200M", "--progress", "none")]
        for number, code, word in ((signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")):
            process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
            assert process.stderr is not None and "waiting for memory" in process.stderr.readline()
            process.send_signal(number)
            _, message = process.communicate(timeout=300)
            said = f"reshard-mpi: {word}; the same command with --resume goes on\n"
            assert (process.returncode, message) == (code, said)
    assert not c.dst.exists()


@pytest.mark.slow
def test_no_more_at_once_than_allowed(tmp_path: Path, state: Path) -> None:
    a, b = (Holder(state, MIB, max_active=2) for _ in range(2))
    with ended(a.expect("holds"), b.expect("holds"), c := Holder(state, MIB, max_active=2)):
        assert c.read().endswith("2 at work on this host, 2 allowed at once")
        b.let_go()
        c.expect("holds")


def test_where_the_host_gets_tighter_others_wait_but_one_goes_on(tmp_path: Path) -> None:
    scope = Changing(allowed=0)
    governor = Governor(LedgerFolder(tmp_path, ""), [scope])
    admitted = threading.Event()
    with leased(governor, 10, "first", print):  # nothing is free, but somebody has to begin

        def wait() -> None:
            with leased(governor, 10, "second", print):
                admitted.set()

        waiting = threading.Thread(target=wait)
        waiting.start()
        scope.allowed = 19
        assert not admitted.wait(0.3)
        scope.allowed = 20
        assert admitted.wait(TIMEOUT_SECONDS)
        waiting.join()


def test_a_lease_fits_every_scope_it_lies_in(tmp_path: Path) -> None:
    """The inner one is tighter; a process of another inner scope does not wait for it."""
    job, other, host = Changing(10), Changing(10), Changing(30)
    job.key, other.key, host.key = "job", "other", "host"
    admitted = threading.Event()
    with leased(Governor(LedgerFolder(tmp_path, ""), [job, host]), 10, "first", print):

        def wait() -> None:
            with leased(Governor(LedgerFolder(tmp_path, ""), [job, host]), 10, "second", print):
                admitted.set()

        waiting = threading.Thread(target=wait)
        waiting.start()
        until(lambda: len(Ledger(tmp_path / "job.ledger").entries()) == 2, "in line")
        with leased(Governor(LedgerFolder(tmp_path, ""), [other, host]), 10, "third", print):
            assert [entry.purpose for entry in Ledger(tmp_path / "host.ledger").entries()] == ["first", "third"]
        assert not admitted.is_set()
    assert admitted.wait(TIMEOUT_SECONDS)
    waiting.join()


class Noting(Changing):
    """Notes what it is told of who holds a lease."""

    def allowed_bytes(self, leased_bytes: Mapping[int, int]) -> int:
        self.leased_bytes = dict(leased_bytes)
        return self.allowed


def test_a_process_with_several_leases_is_one_process(tmp_path: Path) -> None:
    scope = Noting(100)
    governor = Governor(LedgerFolder(tmp_path, ""), [scope])
    with leased(governor, 10, "a thread", print), leased(governor, 20, "another", print):
        assert scope.leased_bytes == {os.getpid(): 30}


class Certain(Noting):
    """Knows at once that there is room for as much as it has been given."""

    def certain_bytes(self) -> int:
        return 30


def test_nobody_is_looked_at_where_there_is_certainly_room(tmp_path: Path) -> None:
    scope = Certain(100)
    governor = Governor(LedgerFolder(tmp_path, ""), [scope])
    with leased(governor, 10, "first", print), leased(governor, 20, "second", print):
        assert not hasattr(scope, "leased_bytes")
        with leased(governor, 1, "third", print):
            assert scope.leased_bytes == {os.getpid(): 31}


def test_the_tightest_scope_decides_what_can_never_fit(tmp_path: Path) -> None:
    governor = Governor(LedgerFolder(tmp_path, ""), [Changing(10, ceiling=70), Changing(10, ceiling=100)])
    governor.require_possible(70, 64)
    with pytest.raises(BudgetError):
        governor.require_possible(71, 64)


@pytest.mark.parametrize(
    ("module", "name", "number"),
    [(os, "pwrite", errno.ENOSPC), (os, "pwrite", errno.EFBIG), (fcntl, "fcntl", errno.EINVAL)],
    ids=["full", "files are limited", "no locks"],
)
def test_a_place_where_nothing_can_be_kept_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, number: int
) -> None:
    """And not the target, on whose file system there may be room."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    governor = Governor(LedgerFolder(tmp_path, ""), [Changing(100)])
    with monkeypatch.context() as patch, pytest.raises(ReshardError) as error:
        patch.setattr(module, name, refuse)
        with leased(governor, 1, "a target", print):
            pass
    assert error.value.where == str(tmp_path) and "RESHARD_MPI_STATE_DIR" in error.value.remedy
    assert error.value.got == os.strerror(number)
    with leased(governor, 1, "a target", print):
        pass
    assert list(tmp_path.iterdir()) == []


def test_unlimited_keeps_no_state(state: Path) -> None:
    governor = open_governor(Allowance.of("unlimited", None, {}), os.environ)
    assert governor.ceiling_bytes == sys.maxsize
    governor.require_possible(1 << 60, 0)
    with leased(governor, 1 << 60, "all", print) as waited_seconds:
        assert waited_seconds == 0
    assert not state.exists()


def test_a_private_place_is_said(tmp_path: Path) -> None:
    assert Governor(LedgerFolder(tmp_path, ""), []).notes == ()
    (note,) = Governor(LedgerFolder(tmp_path, "job 5 has its own"), []).notes
    assert str(tmp_path) in note and "job 5 has its own" in note


def test_callers_of_the_functions_hear_of_waiting(
    c: Conversion, state: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(governing, "_FIRST_NOTICE_SECONDS", 0.0)
    with ended(first := Holder(state, 145 * MIB, memory="150M").expect("holds")):

        def work() -> None:
            reshard_mpi.transform_checkpoints(c.src, c.dst, "p", c.src_strategy, c.dst_strategy, memory="150M")

        worker = threading.Thread(target=work)
        worker.start()
        until(lambda: "waiting for memory" in caplog.text, "in the log")
        first.let_go()
        worker.join(TIMEOUT_SECONDS)
    assert (c.dst / "rank_1" / "p1.ckpt").exists()


# What a person sees


@pytest.mark.slow
def test_governor_shows_leases_and_the_line(state: Path) -> None:
    a = Holder(state, 64 * MIB, memory="100M").expect("holds")
    b = Holder(state, 32 * MIB, memory="100M").expect("holds")
    with ended(a, b, c := Holder(state, 70 * MIB, memory="100M")):
        assert c.read().startswith("waits")
        d = Holder(state, MIB, memory="100M")
        with ended(d):
            assert d.read().startswith("waits")
            text = run_here("governor").out
            lines = text.splitlines()
            assert lines[0].startswith("this host: 2 leases hold 96.00 MiB of ") and lines[0].endswith(", 2 waiting")
            assert f"pid {a.pid}" in lines[1] and "holds 64.00 MiB" in lines[1] and f"process {a.pid}" in lines[1]
            assert "1." in lines[3] and f"pid {c.pid}" in lines[3] and "waits for 70.00 MiB" in lines[3]
            assert "2." in lines[4] and f"pid {d.pid}" in lines[4]
            assert "waits for 1.00 MiB within 100.00 MiB" in lines[4]
            facts = json.loads(run_here("governor", "--json").out)
            (host,) = [scope for scope in facts["scopes"] if scope["name"] == "this host"]
            assert [lease["pid"] for lease in host["leases"]] == [a.pid, b.pid]
            assert [waiting["size_bytes"] for waiting in host["waiting"]] == [70 * MIB, MIB]
            assert [waiting["ceiling_bytes"] for waiting in host["waiting"]] == [100 * MIB] * 2
            assert host["held_bytes"] == 96 * MIB < host["allowed_bytes"] <= host["ceiling_bytes"]


def test_governor_where_nobody_is(state: Path) -> None:
    assert "this host: 0 leases hold 0 B of " in done("governor").out


def test_governor_shows_jobs_it_is_not_in(state: Path) -> None:
    job = {"SLURM_JOB_ID": "17", "SLURM_MEM_PER_NODE": "300"}
    with ended(Holder(state, 64 * MIB, memory="100M", env=job).expect("holds")):
        text = run_here("governor").out
        assert "SLURM job 17: 1 lease holds 64.00 MiB of 300.00 MiB" in text
