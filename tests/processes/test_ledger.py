"""The line for leases: first come first served, nobody starves, and what the dead have held comes back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.examples import few
from support.holders import TIMEOUT_SECONDS, Holder, ended, leased, until
from support.ledgers import LEASE, Changing, NoNotices, entered, entries, in_line, ledger, pids, wanted
from support.processes import run_command

from reshard_mpi.processes.governor import Allowance, Governor, open_governor
from reshard_mpi.processes.ledger import Ledger, _LedgerFile
from reshard_mpi.processes.ledger_folder import LedgerFolder
from reshard_mpi.text import MIB


def crowd(folder: Path, sizes_bytes: list[int], allowed_bytes: int) -> dict[str, Any]:
    asked = json.dumps(
        {"path": str(folder / "crowd.ledger"), "allowed_bytes": allowed_bytes, "sizes_bytes": sizes_bytes}
    )
    (folder / "asked").write_text(asked)
    tests = Path(__file__).parents[1]
    program = ["sh", "-c", 'cd "$1" && exec "$0" -m support.ledgers < "$2"', sys.executable, tests]
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
    assert not ledger(state).path.exists()


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
    # Little is done while the ledger is locked: its records are read, and one is written.
    most_calls = max(visit["calls_a_record"] for visit in report["visits"])
    print(f"at most {most_calls:.1f} calls a record are made while the ledger is locked")
    assert most_calls <= 30


def test_only_the_first_in_line_asks_again_and_again(tmp_path: Path) -> None:
    """What others do while they wait does not depend on what asking takes, and asking may take long."""
    line = Ledger(tmp_path / "line.ledger")
    room = threading.Event()
    asked = [0, 0, 0]

    def wait(place: int) -> None:
        def judge(leases: Sequence[object]) -> str | None:
            asked[place] += 1
            return None if room.is_set() else "no room"

        with entered(line, wanted(1), judge, NoNotices()):
            pass

    waiting = [threading.Thread(target=wait, args=(place,)) for place in range(3)]
    for count, thread in enumerate(waiting, 1):
        thread.start()
        until(lambda: len(line.entries()) == count, "in line")  # noqa: B023
    until(lambda: asked[0] >= 20, "the first in line asks")
    assert asked[1:] == [0, 0]
    room.set()
    for thread in waiting:
        thread.join(TIMEOUT_SECONDS)
    assert all(asked)


def test_a_killed_holder_frees_its_bytes(state: Path) -> None:
    a = Holder(state, LEASE, memory="64M").expect("holds")
    b = Holder(state, LEASE, memory="64M")
    with ended(a, b):
        assert b.read().startswith("waits: ")
        a.kill()
        b.expect("holds")
        assert pids(state, holding=True) == [b.pid]
        b.let_go()


@pytest.mark.skipif(shutil.which("unshare") is None or os.geteuid() != 0, reason="unshare, as root")
def test_a_holder_in_a_container_counts_until_it_ends(state: Path) -> None:
    """In a PID namespace of its own: its number there is nobody's here."""
    container = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    with ended(a := Holder(state, LEASE, memory="64M", prefix=container).expect("holds")):
        (inside,) = entries(state)
        assert not inside.is_here and inside.pid < 10 and inside.state == "" and not inside.is_stopped
        with ended(b := Holder(state, LEASE, memory="64M")):
            assert f"on pid {inside.pid} (for " in b.read()
            a.kill()
            b.expect("holds").let_go()


@pytest.mark.slow
@pytest.mark.parametrize("number", few(1, [signal.SIGKILL, signal.SIGINT]))
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
    assert not ledger(state).path.exists()


def test_a_fork_of_a_holder_does_not_keep_its_lease(state: Path) -> None:
    governor = open_governor(Allowance(64 * MIB), {"RESHARD_MPI_STATE_DIR": str(state)})
    reading, writing = os.pipe()
    with leased(governor, LEASE, "parent", print):
        pid = os.fork()
        if pid == 0:
            os.read(reading, 1)
            os._exit(0)
    try:
        assert entries(state) == []
        with leased(governor, LEASE, "parent again", print):
            pass
    finally:
        os.write(writing, b".")
        os.waitpid(pid, 0)
        os.close(reading), os.close(writing)


def test_a_fork_of_who_changes_the_line_does_not_block_it(tmp_path: Path) -> None:
    line = Ledger(tmp_path / "line.ledger")
    reading, writing = os.pipe()
    file = _LedgerFile(line.path)
    with file.changing(None):
        pid = os.fork()
        if pid == 0:
            os.read(reading, 1)
            os._exit(0)
    try:
        with entered(line, wanted(1), lambda held: None, NoNotices()):
            pass
    finally:
        os.write(writing, b".")
        os.waitpid(pid, 0)
        os.close(reading), os.close(writing), file.close()


def test_a_process_that_is_killed_leaves_no_lock_to_its_forks(tmp_path: Path) -> None:
    """Such as workers: one of them would wait for a lock that nobody else has, and all others of the host for it."""
    line = Ledger(tmp_path / "line.ledger")
    reading, writing = os.pipe()
    fork_is_there, telling = os.pipe()
    pid = os.fork()
    if pid == 0:
        file = _LedgerFile(line.path)
        file.take_record()
        with file.changing(None):
            if os.fork() == 0:
                os.write(telling, b".")
                os.close(writing)
                os.read(reading, 1)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    os.read(fork_is_there, 1)
    file = _LedgerFile(line.path)
    try:
        assert file._lock(0, 0)
    finally:
        file.close()
        for end in (reading, writing, fork_is_there, telling):
            os.close(end)


def test_one_comes_as_the_last_one_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has opened the file that is then removed, and does not take a record in that."""
    governor = Governor(LedgerFolder(tmp_path, ""), [Changing(10)])
    last = governor.take(1, "last", print)
    opened = os.open

    def leave_after_it_was_opened(path: Path, *arguments: int) -> int:
        fd = opened(path, *arguments)
        monkeypatch.setattr(os, "open", opened)
        last.give_back()
        return fd

    monkeypatch.setattr(os, "open", leave_after_it_was_opened)
    line = Ledger(tmp_path / "changing.ledger")
    with leased(governor, 2, "another", print):
        assert [entry.size_bytes for entry in line.entries()] == [2]
    assert not line.path.exists()


@pytest.mark.slow
def test_the_place_may_be_removed_while_it_is_in_use(state: Path, tmp_path: Path) -> None:
    """As where the end of a login session clears what the user has in shared memory. Nobody fails for that."""
    waiting: list[Holder] = []
    with ended(first := Holder(state, LEASE, memory="64M").expect("holds")):
        for _ in range(3):
            waiting.append(Holder(state, LEASE, memory="64M"))
            in_line(state, *waiting)
        with ended(*waiting):
            state.rename(tmp_path / "away")
            until(lambda: len(pids(state, holding=True)) == 1 and len(entries(state)) == 3, "all have come again")
            first.let_go()
            for _ in range(3):
                until(lambda: len(pids(state, holding=True)) == 1, "one holds")
                (pid,) = pids(state, holding=True)
                next(holder for holder in waiting if holder.pid == pid).expect("holds").let_go()
    assert state.stat().st_mode & 0o777 == 0o700
    assert not ledger(state).path.exists()


@pytest.mark.parametrize("text", few(1, [b"", b"another", b"\xff" * 700, b"\0" * 5000]))
def test_a_damaged_record_is_passed_over(state: Path, text: bytes) -> None:
    """As of another version: its lease is not known, but it is left to its process, and others have theirs."""
    with ended(a := Holder(state, LEASE, memory="1G").expect("holds")):
        path = ledger(state).path
        path.write_bytes(text)
        assert entries(state) == []
        with ended(b := Holder(state, LEASE, memory="1G").expect("holds")):
            assert pids(state, holding=True) == [b.pid]
            a.let_go()
            assert pids(state, holding=True) == [b.pid]
            b.let_go()
        assert not path.exists()


@pytest.mark.slow
def test_what_the_dead_have_left_is_taken_over(state: Path) -> None:
    holders = [Holder(state, LEASE, memory="1G").expect("holds") for _ in range(3)]
    with ended(*holders):
        size_bytes = ledger(state).path.stat().st_size
        for holder in holders[:2]:
            holder.kill()
        others = [Holder(state, LEASE, memory="1G").expect("holds") for _ in range(2)]
        with ended(*others):
            assert pids(state, holding=True) == [holder.pid for holder in (holders[2], *others)]
            assert ledger(state).path.stat().st_size == size_bytes


def test_numbers_that_are_too_large_are_cut(tmp_path: Path) -> None:
    """As the limit of a job whose environment has been made up."""
    line = Ledger(tmp_path / "line.ledger")
    with entered(line, wanted(1 << 70), lambda held: None, NoNotices()):
        assert [entry.size_bytes for entry in line.entries()] == [(1 << 64) - 1]


def test_long_texts_are_cut_and_odd_ones_survive(tmp_path: Path) -> None:
    line = Ledger(tmp_path / "line.ledger")
    entry = wanted(1)._replace(purpose="p\udcff" * 400, scope="\u00e9" * 400)
    with entered(line, entry, lambda held: None, NoNotices()):
        (written,) = line.entries()
    assert entry.scope.startswith(written.scope) and len(written.scope) == 64
    assert written.purpose.startswith("p\\udcffp")
    texts = {"purpose": "", "scope": ""}
    assert written._replace(**texts) == entry._replace(**texts, number=written.number, holds=True, since=written.since)


def test_who_is_just_admitted_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = Ledger(tmp_path / "line.ledger")
    read = _LedgerFile._read

    def read_before_admission(file: _LedgerFile) -> bytes:
        data = read(file)
        monkeypatch.setattr(_LedgerFile, "_read", read)
        ticket._write(ticket.entry._replace(holds=True))
        return data

    ticket = line.enter(wanted(1), None, NoNotices())
    ticket._write(ticket.entry._replace(holds=False))
    monkeypatch.setattr(_LedgerFile, "_read", read_before_admission)
    assert len(line.entries()) == 1 and ticket.entry.holds
    ticket.leave()


def test_nothing_is_made_by_looking(tmp_path: Path) -> None:
    assert Ledger(tmp_path / "none").entries() == []
    assert not (tmp_path / "none").exists()
