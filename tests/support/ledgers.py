"""Ledgers of the governor, who is in their lines, and crowds that want to be admitted."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reshard_mpi.processes import ledger as ledgers
from reshard_mpi.processes.host import pid_namespace
from reshard_mpi.processes.ledger import Judge, Ledger, LedgerEntry, WaitReporter
from reshard_mpi.runs.worker_pipes import Channel, Fork
from reshard_mpi.text import MIB
from support.holders import Holder, until

LEASE = 64 * MIB


def ledger(state: Path) -> Ledger:
    """Return the ledger of this host in a folder of leases."""
    return Ledger(state / os.uname().nodename / "host.ledger")


def entries(state: Path) -> list[LedgerEntry]:
    """Return who holds a lease of this host or waits for one."""
    return ledger(state).entries()


def pids(state: Path, *, holding: bool) -> list[int]:
    """Return who holds a lease, or who waits, in the order of the line."""
    return [entry.pid for entry in entries(state) if entry.holds == holding]


def in_line(state: Path, *waiting: Holder) -> None:
    """Wait until these, and no others, are in line."""
    until(lambda: pids(state, holding=False) == [holder.pid for holder in waiting], "in line")


class Changing:
    """A scope that a test makes larger and smaller."""

    key = name = "changing"
    max_active = None

    def __init__(self, allowed: int, ceiling: int = 100) -> None:
        self.allowed = allowed
        self.ceiling_bytes = ceiling

    def certain_bytes(self) -> int:
        return 0

    def allowed_bytes(self, leased_bytes: Mapping[int, int]) -> int:
        return self.allowed


# So long a lease is held, so that several are held at once.
_HELD_SECONDS = 0.002


class WatchedFile(ledgers._LedgerFile):
    """Notes how many functions are called at most while the file is locked, for each of its records, and for ten."""

    most_calls_a_record = 0.0

    @contextlib.contextmanager
    def changing(self, reporter: WaitReporter | None) -> Iterator[None]:
        with super().changing(reporter):
            records, calls = self._path.stat().st_size // ledgers._RECORD.size, 0

            def count(_: object, event: str, __: object) -> None:
                nonlocal calls
                calls += event in ("call", "c_call")

            sys.setprofile(count)
            try:
                yield
            finally:
                sys.setprofile(None)
                WatchedFile.most_calls_a_record = max(self.most_calls_a_record, calls / (10 + records))


class NoNotices:
    """Has nothing to say for a very long time."""

    def left_seconds(self) -> float:
        return 3600.0

    def tell(self, ahead: int, lacking: str | None, whom: Sequence[LedgerEntry]) -> None:
        raise AssertionError("too early")

    def tell_locked(self, pids: Sequence[int]) -> None:
        raise AssertionError(f"{pids} keep the lock")


def wanted(size_bytes: int) -> LedgerEntry:
    """Return the entry of this process for a lease of that size."""
    return LedgerEntry(size_bytes, os.getpid(), pid_namespace(), "a test", "nothing", size_bytes, time.time())


@contextlib.contextmanager
def entered(ledger: Ledger, entry: LedgerEntry, judge: Judge, reporter: WaitReporter) -> Iterator[None]:
    """Hold a lease as long as the block lasts."""
    ticket = ledger.enter(entry, judge, reporter)
    try:
        yield
    finally:
        ticket.leave()


def visit(path: Path, number: int, size_bytes: int, allowed_bytes: int, admitted: int, channel: Channel) -> None:
    """Take a lease; write its number to the file `admitted`, and send what was seen."""
    held_bytes = 0

    def judge(leases: Sequence[LedgerEntry]) -> str | None:
        nonlocal held_bytes
        held_bytes = sum(other.size_bytes for other in leases) + size_bytes
        if leases and held_bytes > allowed_bytes:
            return "no room"
        os.write(admitted, b"%d\n" % number)
        return None

    ledgers._LedgerFile = WatchedFile  # type: ignore[misc]
    with entered(Ledger(path), wanted(size_bytes), judge, NoNotices()):
        time.sleep(_HELD_SECONDS)
    channel.send({"held_bytes": held_bytes, "calls_a_record": WatchedFile.most_calls_a_record})


def main(path: Path, allowed_bytes: int, sizes_bytes: Sequence[int]) -> dict[str, Any]:
    """Have the crowd take its leases; return in which order, and what each saw."""
    admitted = os.open(path.parent / "admitted", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    crowd: list[tuple[Fork, Channel]] = []
    with entered(Ledger(path), wanted(allowed_bytes), lambda leases: None, NoNotices()):
        for number, size_bytes in enumerate(sizes_bytes):
            ours, theirs = Channel.pair()
            process = Fork(lambda: visit(path, number, size_bytes, allowed_bytes, admitted, theirs))  # noqa: B023
            theirs.close()
            crowd.append((process, ours))
            while sum(not entry.holds for entry in Ledger(path).entries()) <= number:
                time.sleep(0.0005)
    visits = [channel.receive() for _, channel in crowd]
    codes = [process.wait() for process, _ in crowd]
    order = [int(number) for number in (path.parent / "admitted").read_text().split()]
    return {"order": order, "visits": visits, "codes": codes, "remains": path.exists()}


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    print(json.dumps(main(Path(asked["path"]), asked["allowed_bytes"], asked["sizes_bytes"])))
