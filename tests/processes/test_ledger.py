"""The line for leases: first come first served, nobody starves, and what the dead have held comes back."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from support.crowd import NoNotices, claim, entered
from support.holders import TIMEOUT_SECONDS, Holder, ended, leased, until
from support.ledgers import LEASE, in_line, ledger, occupants, pids
from support.processes import run_command

from reshard_mpi.processes.governor.admission import Allowance, open_governor
from reshard_mpi.processes.governor.queue import Ledger
from reshard_mpi.text import MIB


def crowd(folder: Path, sizes_bytes: list[int], allowed_bytes: int) -> dict[str, Any]:
    asked = json.dumps({"folder": str(folder / "ledger"), "allowed_bytes": allowed_bytes, "sizes_bytes": sizes_bytes})
    (folder / "asked").write_text(asked)
    program = ["sh", "-c", 'exec "$0" "$1" < "$2"', sys.executable, Path(__file__).parents[1] / "support" / "crowd.py"]
    facts: dict[str, Any] = json.loads(run_command([*program, folder / "asked"], check=True).out)
    assert set(facts["codes"]) == {0}
    return facts


def test_what_fits_is_admitted_at_once_and_the_rest_when_there_is_room(state: Path) -> None:
    a, b = (Holder(state, LEASE, memory="128M") for _ in range(2))
    with ended(a, b):
        a.expect("holds")
        b.expect("holds")  # equality fits
        c = Holder(state, LEASE, memory="128M")
        with ended(c):
            assert c.read().startswith("waits: ")
            a.let_go()
            c.expect("holds")
            b.let_go()
            c.let_go()
    assert not ledger(state)._folder.exists()


@pytest.mark.slow
def test_a_large_lease_among_small_ones_is_granted_in_its_turn(tmp_path: Path) -> None:
    sizes_bytes = [16] * 50 + [256] + [16] * 50
    report = crowd(tmp_path, sizes_bytes, 256)
    assert report["order"] == list(range(101))
    assert max(visit["held_bytes"] for visit in report["visits"]) <= 256
    assert report["visits"][50]["held_bytes"] == 256
    assert not report["remains"]


@pytest.mark.slow
def test_200_processes_contend(tmp_path: Path) -> None:
    report = crowd(tmp_path, [64] * 200, 256)
    assert report["order"] == list(range(200))
    assert max(visit["held_bytes"] for visit in report["visits"]) <= 256
    # Little is done while the lock is held: the line is listed, and one of its files renamed.
    most_calls = max(visit["calls_a_file"] for visit in report["visits"])
    print(f"at most {most_calls:.1f} calls a file are made while the lock is held")
    assert most_calls <= 30


@pytest.mark.slow
def test_only_the_head_of_the_line_looks_again_and_again(state: Path) -> None:
    holders = []
    with ended(first := Holder(state, LEASE, memory="64M").expect("holds")):
        for _ in range(3):
            holders.append(Holder(state, LEASE, memory="64M"))
            in_line(state, *holders)
        with ended(*holders):
            head, *others = holders
            for holder in holders:
                assert holder.read().startswith("waits: ")
            before = [_switches(holder.pid) for holder in others]
            start = _switches(head.pid)
            until(lambda: _switches(head.pid) >= start + 20, "the head of the line looks")
            # They may still have been on their way to sleep when they said that they wait.
            assert all(_switches(holder.pid) - count <= 3 for holder, count in zip(others, before))
            for holder in (first, *holders):
                holder.let_go()


def test_a_killed_holder_frees_its_bytes(state: Path) -> None:
    a = Holder(state, LEASE, memory="64M").expect("holds")
    b = Holder(state, LEASE, memory="64M")
    with ended(a, b):
        assert b.read().startswith("waits: ")
        a.kill()
        b.expect("holds")
        assert pids(state, holding=True) == [b.pid]
        b.let_go()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_who_leaves_the_line_is_passed_over(state: Path, number: signal.Signals) -> None:
    first = Holder(state, LEASE, memory="64M").expect("holds")
    waiting: list[Holder] = []
    for _ in range(4):
        waiting.append(Holder(state, LEASE, memory="64M"))
        in_line(state, *waiting)
    with ended(first, *waiting):
        for holder in waiting[:3:2]:  # the head, and one in the middle
            holder.process.send_signal(number)
            holder.process.wait(TIMEOUT_SECONDS)
        first.let_go()
        waiting[1].expect("holds")
        in_line(state, waiting[3])
        waiting[1].let_go()
        waiting[3].expect("holds")
        waiting[3].let_go()
    assert not ledger(state)._folder.exists()


def test_a_fork_of_a_holder_does_not_keep_its_lease(state: Path) -> None:
    governor = open_governor(Allowance(64 * MIB), {"RESHARD_MPI_STATE_DIR": str(state)})
    reading, writing = os.pipe()
    with leased(governor, LEASE, "parent", print):
        pid = os.fork()
        if pid == 0:
            os.read(reading, 1)
            os._exit(0)
    try:
        assert occupants(state) == []
        with leased(governor, LEASE, "parent again", print):
            pass
    finally:
        os.write(writing, b".")
        os.waitpid(pid, 0)
        os.close(reading), os.close(writing)


def test_a_fork_of_who_changes_the_line_does_not_block_it(tmp_path: Path) -> None:
    line = Ledger(tmp_path / "line")
    reading, writing = os.pipe()
    with line._locked():
        pid = os.fork()
        if pid == 0:
            os.read(reading, 1)
            os._exit(0)
    try:
        with (tmp_path / "line" / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.write(writing, b".")
        os.waitpid(pid, 0)
        os.close(reading), os.close(writing)


def test_one_comes_as_the_last_one_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = Ledger(tmp_path / "line")
    rmdir = Path.rmdir

    def rmdir_after_another_came(folder: Path) -> None:
        monkeypatch.setattr(Path, "rmdir", rmdir)
        another.enter_context(entered(line, claim(2), lambda held: None, NoNotices()))
        folder.rmdir()

    monkeypatch.setattr(Path, "rmdir", rmdir_after_another_came)
    with contextlib.ExitStack() as another:
        with entered(line, claim(1), lambda held: None, NoNotices()):
            pass
        assert [occupant.claim.size_bytes for occupant in line.occupants()] == [2]
    assert not (tmp_path / "line").exists()


def test_the_place_may_be_removed_while_it_is_in_use(state: Path, tmp_path: Path) -> None:
    """As where the end of a login session clears what the user has in shared memory. Nobody fails for that."""
    waiting: list[Holder] = []
    with ended(first := Holder(state, LEASE, memory="64M").expect("holds")):
        for _ in range(3):
            waiting.append(Holder(state, LEASE, memory="64M"))
            in_line(state, *waiting)
        with ended(*waiting):
            state.rename(tmp_path / "away")
            until(lambda: len(pids(state, holding=True)) == 1 and len(occupants(state)) == 3, "all have come again")
            first.let_go()
            for _ in range(3):
                until(lambda: len(pids(state, holding=True)) == 1, "one holds")
                (pid,) = pids(state, holding=True)
                next(holder for holder in waiting if holder.pid == pid).expect("holds").let_go()
    assert state.stat().st_mode & 0o777 == 0o700
    assert not ledger(state)._folder.exists()


def test_what_another_version_has_written_is_left_alone(state: Path) -> None:
    with ended(a := Holder(state, LEASE, memory="1G").expect("holds")):
        folder = ledger(state)._folder
        (lease,) = folder.glob("*.lease")
        lease.write_text('{"other": "things"}')
        assert occupants(state) == []
        Holder(state, LEASE, memory="1G").expect("holds").let_go()
        assert lease.exists()
        a.let_go()


def test_who_is_just_admitted_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = Ledger(tmp_path)
    with entered(line, claim(1), lambda held: None, NoNotices()):
        (lease,) = tmp_path.glob("*.lease")
        waiting = lease.rename(lease.with_suffix(".waiting"))
        numbers = line._files.numbers

        def numbers_before_admission(kind: str) -> list[int]:
            listed = numbers(kind)
            if waiting.exists():
                waiting.rename(lease)
            return listed

        monkeypatch.setattr(line._files, "numbers", numbers_before_admission)
        assert [occupant.holds for occupant in line.occupants()] == [True]


def test_nothing_is_made_by_looking(tmp_path: Path) -> None:
    assert Ledger(tmp_path / "none").occupants() == []
    assert not (tmp_path / "none").exists()


def _switches(pid: int) -> int:
    """Return how often a process has gone to sleep."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("voluntary_ctxt_switches")))
