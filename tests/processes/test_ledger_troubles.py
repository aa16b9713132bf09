"""A line with stopped processes in it, and with entries in its folder that are none of its own."""

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
from support.command_line import Capture, run_here
from support.conversions import make
from support.crowd import NoNotices, claim, entered
from support.holders import TIMEOUT_SECONDS, Holder, ended, until
from support.ledgers import LEASE, in_line, ledger, occupants, pids

from reshard_mpi.errors import ReshardError
from reshard_mpi.processes.governor.admission import Governor
from reshard_mpi.processes.governor.ledger_folder import LedgerFolder
from reshard_mpi.processes.governor.queue import Ledger
from reshard_mpi.processes.host import state_of
from reshard_mpi.text import MIB


def stop(holder: Holder) -> None:
    holder.process.send_signal(signal.SIGSTOP)
    until(lambda: state_of(holder.pid) == "stopped", "stopped")


@contextlib.contextmanager
def continued(*holders: Holder) -> Iterator[None]:
    try:
        yield
    finally:
        for holder in holders:
            holder.process.send_signal(signal.SIGCONT)


def watchful(state: Path, size_bytes: int = LEASE) -> Holder:
    """A process that looks every now and then whether the one before it in line has been stopped."""
    return Holder(state, size_bytes, memory="64M", env={"HOLDER_WATCHES": "0.05"})


# Stopped processes


def test_a_stopped_head_is_passed_and_has_its_place_again_when_it_goes_on(state: Path) -> None:
    with ended(first := Holder(state, LEASE, memory="64M").expect("holds")):
        head = watchful(state)
        in_line(state, head)
        second = watchful(state)
        in_line(state, head, second)
        third = watchful(state)
        in_line(state, head, second, third)
        with ended(head, second, third), continued(head):
            stop(head)
            first.let_go()
            second.expect("holds")
            assert pids(state, holding=False) == [head.pid, third.pid]
            head.process.send_signal(signal.SIGCONT)
            until(lambda: state_of(head.pid) == "sleeping", "going on")
            second.let_go()
            head.expect("holds")
            head.let_go()
            third.expect("holds")
            third.let_go()


def test_a_stopped_one_in_the_middle_is_passed(state: Path) -> None:
    with ended(first := Holder(state, LEASE, memory="64M").expect("holds")):
        waiting: list[Holder] = []
        for _ in range(3):
            waiting.append(watchful(state))
            in_line(state, *waiting)
        with ended(*waiting), continued(waiting[1]):
            stop(waiting[1])
            first.let_go()
            waiting[0].expect("holds").let_go()
            waiting[2].expect("holds").let_go()
            waiting[1].process.send_signal(signal.SIGCONT)
            waiting[1].expect("holds").let_go()
    assert not ledger(state)._folder.exists()


def test_two_that_take_themselves_for_the_head_are_not_both_admitted(tmp_path: Path) -> None:
    """The first has been stopped between finding that it fits and being admitted, and passed meanwhile."""
    line = Ledger(tmp_path / "line")
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
        with entered(line, claim(1), judge, Patient()):
            admitted.set()

    thread = threading.Thread(target=first)
    thread.start()
    assert found.wait(TIMEOUT_SECONDS)
    passing = line.register(claim(1))
    go_on.set()
    until(lambda: len(judged) >= 2, "it looks again")
    assert judged[:2] == [0, 1] and not admitted.is_set()
    line.leave(passing)
    thread.join(TIMEOUT_SECONDS)
    assert admitted.is_set()


class Patient(NoNotices):
    def tell_locked(self, pids: Sequence[int]) -> None:
        raise AssertionError


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
def stopped_with_the_lock(folder: Path) -> Iterator[int]:
    """A process that has been stopped while it changed the line; gives its id."""
    code = "import os, signal, sys; from pathlib import Path\n"
    code += "from reshard_mpi.processes.governor import ledger_files as ledger_lock"
    code += "\nwith ledger_lock.locked(Path(sys.argv[1]), None): os.kill(os.getpid(), signal.SIGSTOP)"
    with subprocess.Popen([sys.executable, "-c", code, folder]) as process:
        try:
            until(lambda: state_of(process.pid) == "stopped", "stopped with the lock")
            yield process.pid
        finally:
            process.kill()


def test_a_lock_that_a_stopped_process_holds_is_named(state: Path) -> None:
    first = Holder(state, MIB, memory="64M").expect("holds")
    with ended(first), stopped_with_the_lock(ledger(state)._folder) as pid:
        second = Holder(state, MIB, memory="64M")
        with ended(second):
            notice = second.read()
            assert f"pid {pid} (stopped) keeps the line of this host (--memory) locked" in notice
            assert "kill -CONT" in notice
            os.kill(pid, signal.SIGCONT)
            second.expect("holds").let_go()


def test_who_leaves_does_not_wait_for_a_stopped_one(state: Path, capsys: Capture) -> None:
    first = Holder(state, MIB, memory="64M").expect("holds")
    with ended(first), stopped_with_the_lock(ledger(state)._folder) as pid:
        first.let_go()
        assert occupants(state) == []  # what it could not remove counts no more
        finished = run_here(capsys, "governor")
        assert finished.code == 0 and f"pid {pid} (stopped) keeps its line locked" in finished.out
        facts = json.loads(run_here(capsys, "governor", "--json").out)
        (host,) = [scope for scope in facts["scopes"] if scope["name"] == "this host"]
        assert host["locked_by"] == [{"pid": pid, "state": "stopped"}]
        os.kill(pid, signal.SIGCONT)
        Holder(state, MIB, memory="64M").expect("holds").let_go()
        until(lambda: not ledger(state)._folder.exists(), "buried")


def test_governor_says_who_is_stopped(state: Path, capsys: Capture) -> None:
    with ended(first := Holder(state, LEASE, memory="100M").expect("holds")), continued(first):
        stop(first)
        text = run_here(capsys, "governor").out
        assert f"pid {first.pid}" in text and "stopped" in text
        facts = json.loads(run_here(capsys, "governor", "--json").out)
        (host,) = [scope for scope in facts["scopes"] if scope["name"] == "this host"]
        assert [lease["state"] for lease in host["leases"]] == ["stopped"]


# What lies in the folder and is none of the line's


def stray(folder: Path, kind: str) -> None:
    """Put something into a ledger that is none of its files, in the place of what it may look for."""
    folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    for name in (
        "x.waiting",
        "1.waiting",
        "2.lease",
        "3.line",
        "-4.waiting",
        "\u0665.lease",
        "9999999999999999999.waiting",
    ):
        path = folder / name
        if kind == "file":
            path.write_text("{}")
        elif kind == "odd JSON":
            path.write_text("[" * 100_000)
        elif kind == "folder":
            path.mkdir()
            (path / "within").touch()
        elif kind == "link":
            path.symlink_to("/etc/passwd")
        elif kind == "dangling link":
            path.symlink_to(folder / "nowhere")
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "of another user":
            path.write_text("{}")
            os.chown(path, 12345, 12345)


KINDS = ["file", "odd JSON", "folder", "link", "dangling link", "pipe"]
KINDS += ["of another user"] if os.geteuid() == 0 else []


@pytest.mark.parametrize("kind", KINDS)
def test_stray_entries_harm_nobody(state: Path, kind: str, capsys: Capture) -> None:
    folder = ledger(state)._folder
    for part in (folder.parent.parent, folder.parent):
        part.mkdir(mode=0o700)
    stray(folder, kind)
    first = Holder(state, LEASE, memory="64M").expect("holds")
    with ended(first, second := Holder(state, LEASE, memory="64M")):
        assert second.read().startswith("waits: ")
        text = run_here(capsys, "governor").out
        assert f"pid {first.pid}" in text and "1 waiting" in text
        first.let_go()
        second.expect("holds").let_go()
    assert Path("/etc/passwd").exists()


@pytest.mark.parametrize("kind", ["folder", "link", "pipe", "of another user"])
@pytest.mark.parametrize("name", ["lock", "bell"])
def test_something_in_the_place_of_a_file_of_the_line(tmp_path: Path, name: str, kind: str) -> None:
    """Without its lock there is no line, and that is said; without the bell the head only looks less often."""
    if kind == "of another user" and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    line = Ledger(tmp_path / "line")
    (tmp_path / "line").mkdir()
    path = tmp_path / "line" / name
    make_it = {
        "folder": path.mkdir,
        "link": lambda: path.symlink_to(tmp_path / "other"),
        "pipe": lambda: os.mkfifo(path),
        "of another user": path.touch,
    }[kind]
    make_it()
    if kind == "of another user":
        os.chown(path, 12345, 12345)
    if name == "lock":
        with pytest.raises(ReshardError, match="something else is in the place") as error:
            line.enter(claim(1), lambda held: None, NoNotices())
        assert error.value.where == str(path)
    else:
        line.leave(line.enter(claim(1), lambda held: None, NoNotices()))
    assert not (tmp_path / "other").exists()


def test_a_run_beside_strays(tmp_path: Path, state: Path, capsys: Capture) -> None:
    c = make(tmp_path)
    folder = ledger(state)._folder
    for part in (folder.parent.parent, folder.parent):
        part.mkdir(mode=0o700)
    stray(folder, "file")
    (folder.parent / "a file").touch()
    (folder.parent / "a link").symlink_to("/proc/1")
    assert run_here(capsys, *c.arguments("transform", "--memory", "1G")).code == 0
    assert run_here(capsys, "governor").code == 0


# A lease that grows


def test_a_lease_grows_in_its_place_or_not_at_all(tmp_path: Path) -> None:
    from support.ledgers import Changing

    governor = Governor(LedgerFolder(tmp_path, ""), [Changing(100), inner := Changing(60)])
    inner.key = "inner"
    one = governor.take(20, "one", print)
    assert one.grow(60) and one.size_bytes == 60  # alone it would be given anything
    assert one.grow(40)
    two = governor.take(20, "two", print)
    assert not one.grow(41)  # the inner scope has no room, so nothing has grown in the outer one
    sizes = [[o.claim.size_bytes for o in Ledger(tmp_path / key).occupants()] for key in ("changing", "inner")]
    assert sizes == [[40, 20], [40, 20]]
    one.give_back()
    assert two.grow(60)
    two.give_back()


def test_floors_are_counted_and_not_waited_for(tmp_path: Path) -> None:
    from support.ledgers import Changing

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
    assert not (tmp_path / "changing").exists()
