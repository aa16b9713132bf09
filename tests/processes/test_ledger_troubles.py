"""A line with stopped processes in it, and with other things in its folder and in the place of its file."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.command_line import done, run_here
from support.conversions import Conversion
from support.examples import few_cases
from support.holders import TIMEOUT_SECONDS, Holder, ended, until
from support.ledgers import LEASE, Changing, NoNotices, entered, entries, in_line, ledger, pids, wanted

from reshard_mpi.errors import ReshardError
from reshard_mpi.processes.governor import Governor
from reshard_mpi.processes.host import pid_state
from reshard_mpi.processes.ledger import Ledger
from reshard_mpi.processes.ledger_folder import LedgerFolder
from reshard_mpi.text import MIB


def stop(holder: Holder) -> None:
    holder.process.send_signal(signal.SIGSTOP)
    until(lambda: pid_state(holder.pid) == "stopped", "stopped")


@contextlib.contextmanager
def continued(*holders: Holder) -> Iterator[None]:
    try:
        yield
    finally:
        for holder in holders:
            holder.process.send_signal(signal.SIGCONT)


# Stopped processes


def test_a_stopped_head_is_passed_and_has_its_place_again_when_it_goes_on(state: Path) -> None:
    with ended(first := Holder(state, LEASE, memory="64M").expect("holds")):
        head = Holder(state, LEASE, memory="64M")
        in_line(state, head)
        second = Holder(state, LEASE, memory="64M")
        in_line(state, head, second)
        third = Holder(state, LEASE, memory="64M")
        in_line(state, head, second, third)
        with ended(head, second, third), continued(head):
            stop(head)
            first.let_go()
            second.expect("holds")
            assert pids(state, holding=False) == [head.pid, third.pid]
            head.process.send_signal(signal.SIGCONT)
            until(lambda: pid_state(head.pid) == "sleeping", "going on")
            second.let_go()
            head.expect("holds")
            head.let_go()
            third.expect("holds")
            third.let_go()


@pytest.mark.slow
def test_a_stopped_one_in_the_middle_is_passed(state: Path) -> None:
    with ended(first := Holder(state, LEASE, memory="64M").expect("holds")):
        waiting: list[Holder] = []
        for _ in range(3):
            waiting.append(Holder(state, LEASE, memory="64M"))
            in_line(state, *waiting)
        with ended(*waiting), continued(waiting[1]):
            stop(waiting[1])
            first.let_go()
            waiting[0].expect("holds").let_go()
            waiting[2].expect("holds").let_go()
            waiting[1].process.send_signal(signal.SIGCONT)
            waiting[1].expect("holds").let_go()
    assert not ledger(state).path.exists()


def test_two_that_take_themselves_for_the_head_are_not_both_admitted(tmp_path: Path) -> None:
    """The first has been stopped between finding that it fits and being admitted, and passed meanwhile."""
    line = Ledger(tmp_path / "line.ledger")
    found, go_on = threading.Event(), threading.Event()
    judged: list[int] = []

    def judge(held: Sequence[object]) -> str | None:
        judged.append(len(held))
        if len(judged) == 1:
            found.set()
            go_on.wait(TIMEOUT_SECONDS)
        return "no room" if held else None

    admitted = threading.Event()

    def first() -> None:
        with entered(line, wanted(1), judge, Patient()):
            admitted.set()

    thread = threading.Thread(target=first)
    thread.start()
    assert found.wait(TIMEOUT_SECONDS)
    passing = line.enter(wanted(1), None, NoNotices())
    go_on.set()
    until(lambda: len(judged) >= 2, "it looks again")
    assert judged[:2] == [0, 1] and not admitted.is_set()
    passing.leave()
    thread.join(TIMEOUT_SECONDS)
    assert admitted.is_set()


class Patient(NoNotices):
    def tell_locked(self, pids: Sequence[int]) -> None:
        raise AssertionError


@pytest.mark.slow
def test_who_waits_says_for_whom(state: Path) -> None:
    with ended(first := Holder(state, LEASE, memory="64M").expect("holds")), continued(first):
        stop(first)
        with ended(second := Holder(state, LEASE, memory="64M")):
            notice = second.read()
            assert f"on pid {first.pid} (stopped, for " in notice and "1 lease holds 64.00 MiB" in notice
            in_line(state, second)
            with ended(third := Holder(state, LEASE, memory="64M")):
                notice = third.read()
                assert f"on pid {first.pid} (stopped, for " in notice and f", pid {second.pid} (" in notice, notice
                assert "1 ahead in line" in notice


@contextlib.contextmanager
def stopped_with_the_lock(path: Path) -> Iterator[int]:
    """A process that has been stopped while it changed the line; gives its id."""
    code = "import os, signal, sys; from pathlib import Path\n"
    code += "from reshard_mpi.processes.ledger import _LedgerFile\n"
    code += "with _LedgerFile(Path(sys.argv[1])).changing(None): os.kill(os.getpid(), signal.SIGSTOP)"
    with subprocess.Popen([sys.executable, "-c", code, path]) as process:
        try:
            until(lambda: pid_state(process.pid) == "stopped", "stopped with the lock")
            yield process.pid
        finally:
            process.kill()


@pytest.mark.slow
def test_a_lock_that_a_stopped_process_holds_is_named(state: Path) -> None:
    first = Holder(state, MIB, memory="64M").expect("holds")
    with ended(first), stopped_with_the_lock(ledger(state).path) as pid:
        second = Holder(state, MIB, memory="64M")
        with ended(second):
            notice = second.read()
            assert f"pid {pid} (stopped) keeps the line of this host (--memory) locked" in notice
            assert "kill -CONT" in notice
            os.kill(pid, signal.SIGCONT)
            second.expect("holds").let_go()


@pytest.mark.slow
def test_who_leaves_does_not_wait_for_a_stopped_one(state: Path) -> None:
    first = Holder(state, MIB, memory="64M").expect("holds")
    with ended(first), stopped_with_the_lock(ledger(state).path) as pid:
        first.let_go()
        assert entries(state) == []
        assert f"pid {pid} (stopped) keeps its line locked" in done("governor").out
        facts = json.loads(run_here("governor", "--json").out)
        (host,) = [scope for scope in facts["scopes"] if scope["name"] == "this host"]
        assert host["locked_by"] == [{"pid": pid, "state": "stopped"}]
        os.kill(pid, signal.SIGCONT)
        Holder(state, MIB, memory="64M").expect("holds").let_go()
        assert not ledger(state).path.exists()


def test_governor_says_who_is_stopped(state: Path) -> None:
    with ended(first := Holder(state, LEASE, memory="100M").expect("holds")), continued(first):
        stop(first)
        text = run_here("governor").out
        assert f"pid {first.pid}" in text and "stopped" in text
        facts = json.loads(run_here("governor", "--json").out)
        (host,) = [scope for scope in facts["scopes"] if scope["name"] == "this host"]
        assert [lease["state"] for lease in host["leases"]] == ["stopped"]


# What lies in the folder, or in the place of the file


KINDS = ["folder", "link", "dangling link", "pipe", *(["of another user"] if os.geteuid() == 0 else [])]


def put(path: Path, kind: str) -> None:
    """Put something else into the place of a ledger."""
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("/etc/passwd")
    elif kind == "dangling link":
        path.symlink_to(path.parent / "nowhere")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.touch()
        os.chown(path, 12345, 12345)


@pytest.mark.parametrize("kind", KINDS)
def test_something_in_the_place_of_a_ledger_is_named(tmp_path: Path, kind: str) -> None:
    """Without its file there is no line."""
    line = Ledger(tmp_path / "line.ledger")
    put(line.path, kind)
    with pytest.raises(ReshardError, match="something else is in the place") as error:
        line.enter(wanted(1), lambda held: None, NoNotices())
    assert error.value.where == str(line.path)
    assert line.entries() == [] and line.lock_holders() == ()
    assert not (tmp_path / "nowhere").exists() and Path("/etc/passwd").read_text()


@few_cases(1, "content", [b"{}", b"[" * 100_000, b"\xff" * 10_000, b"waiting1" * 5_000, b"lease..1" * 5_000])
def test_what_a_file_says_counts_only_where_a_process_lives(state: Path, content: bytes) -> None:
    path = ledger(state).path
    for folder in (path.parent.parent, path.parent):
        folder.mkdir(mode=0o700)
    path.write_bytes(content)
    first = Holder(state, LEASE, memory="64M").expect("holds")
    with ended(first, second := Holder(state, LEASE, memory="64M")):
        assert second.read().startswith("waits: ")
        text = run_here("governor").out
        assert f"pid {first.pid}" in text and "1 lease holds" in text and "1 waiting" in text
        first.let_go()
        second.expect("holds").let_go()


def test_a_file_of_any_size_is_read_as_far_as_a_ledger_can_be_long(tmp_path: Path) -> None:
    line = Ledger(tmp_path / "line.ledger")
    line.path.touch(mode=0o600)
    os.truncate(line.path, 1 << 40)
    with entered(line, wanted(1), lambda held: None, NoNotices()):
        assert [entry.size_bytes for entry in line.entries()] == [1]
    assert not line.path.exists()


def test_a_run_beside_strays(c: Conversion, state: Path) -> None:
    folder = ledger(state).path.parent
    for part in (folder.parent, folder):
        part.mkdir(mode=0o700)
    (folder / "a file").touch()
    (folder / "a link").symlink_to("/proc/1")
    for kind in KINDS:
        put(folder / f"{kind}.ledger", kind)
    c.done("transform", "--memory", "1G")
    done("governor")


# A lease that grows


def test_a_lease_grows_in_its_place_or_not_at_all(tmp_path: Path) -> None:
    governor = Governor(LedgerFolder(tmp_path, ""), [Changing(100), inner := Changing(60)])
    inner.key = "inner"
    one = governor.take(20, "one", print)
    assert one.grow(60) and one.size_bytes == 60  # alone it would be given anything
    assert one.grow(40)
    two = governor.take(20, "two", print)
    assert not one.grow(41)  # the inner scope has no room, so nothing has grown in the outer one
    lines = [Ledger(tmp_path / f"{key}.ledger") for key in ("changing", "inner")]
    sizes = [[entry.size_bytes for entry in line.entries()] for line in lines]
    assert sizes == [[40, 20], [40, 20]]
    one.give_back()
    assert two.grow(60)
    two.give_back()


def test_floors_are_counted_and_not_waited_for(tmp_path: Path) -> None:
    governor = Governor(LedgerFolder(tmp_path, ""), [Changing(100)])
    floors = [governor.register(40, f"rank {rank}") for rank in range(4)]
    first = governor.take(20, "first", print)  # nobody works, so it goes on though the floors alone are too much
    assert not first.grow(21) or first.size_bytes == 21
    admitted = threading.Event()

    def wait() -> None:
        lease = governor.take(20, "second", print)
        admitted.set()
        lease.give_back()

    thread = threading.Thread(target=wait)
    thread.start()
    until(governor.is_waited_for, "in line")
    assert not admitted.wait(0.3)
    first.give_back()
    assert admitted.wait(TIMEOUT_SECONDS)
    thread.join()
    for floor in floors:
        floor.give_back()
    assert list(tmp_path.iterdir()) == []
