"""A crowd that contends for the leases of one ledger; run as a program, since it forks.

Reads from standard input, as JSON, the ledger's folder, how many bytes its leases may hold, and the sizes of the claims
in the order in which they join the line. All join while a first lease holds everything. Prints what came of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from reshard_mpi.processes.forks import Channel, Fork
from reshard_mpi.processes.governor.ledger_files import Claim, Judge, Occupant, WaitReporter, own_pid_namespace
from reshard_mpi.processes.governor.queue import Ledger

# So long a lease is held, so that several are held at once.
_HELD_SECONDS = 0.002


class WatchedLedger(Ledger):
    """Notes how many functions are called at most while its lock is held, for each file in its folder, and for ten."""

    most_calls_a_file = 0.0

    @contextlib.contextmanager
    def _locked(self, notices: WaitReporter | None = None) -> Iterator[None]:
        with super()._locked(notices):
            files, calls = sum(1 for _ in self._folder.iterdir()), 0

            def count(_: object, event: str, __: object) -> None:
                nonlocal calls
                calls += event in ("call", "c_call")

            sys.setprofile(count)
            try:
                yield
            finally:
                sys.setprofile(None)
                self.most_calls_a_file = max(self.most_calls_a_file, calls / (10 + files))


class NoNotices:
    """Has nothing to say for a very long time."""

    def left_seconds(self) -> float:
        return 3600.0

    def tell(self, ahead: int, lacking: str | None, whom: Sequence[Occupant]) -> None:
        raise AssertionError("too early")

    def tell_locked(self, pids: Sequence[int]) -> None:
        raise AssertionError(f"{pids} keep the lock")


def claim(size_bytes: int) -> Claim:
    """Return what this process would enter in the ledger for a lease of that size."""
    return Claim(size_bytes, os.getpid(), own_pid_namespace(), "a test", "nothing", size_bytes, time.time())


@contextlib.contextmanager
def entered(ledger: Ledger, wanted: Claim, judge: Judge, notices: WaitReporter) -> Iterator[None]:
    """Hold what is claimed as long as the block lasts."""
    position = ledger.enter(wanted, judge, notices)
    try:
        yield
    finally:
        ledger.leave(position)


def visit(folder: Path, number: int, size_bytes: int, allowed_bytes: int, admitted: int, channel: Channel) -> None:
    """Take a lease; write its number to the file `admitted`, and send what was seen."""
    held_bytes = 0

    def judge(leases: Sequence[Claim]) -> str | None:
        nonlocal held_bytes
        held_bytes = sum(other.size_bytes for other in leases) + size_bytes
        if leases and held_bytes > allowed_bytes:
            return "no room"
        os.write(admitted, b"%d\n" % number)
        return None

    ledger = WatchedLedger(folder)
    with entered(ledger, claim(size_bytes), judge, NoNotices()):
        time.sleep(_HELD_SECONDS)
    switches = int(
        next(
            line.split()[1]
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("voluntary_ctxt_switches")
        )
    )
    channel.send({"held_bytes": held_bytes, "calls_a_file": ledger.most_calls_a_file, "switches": switches})


def main(folder: Path, allowed_bytes: int, sizes_bytes: Sequence[int]) -> dict[str, Any]:
    """Have the crowd take its leases; return in which order, and what each saw."""
    folder.mkdir()
    admitted = os.open(folder.parent / "admitted", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    crowd: list[tuple[Fork, Channel]] = []
    with entered(Ledger(folder), claim(allowed_bytes), lambda leases: None, NoNotices()):
        for number, size_bytes in enumerate(sizes_bytes):
            ours, theirs = Channel.pair()
            process = Fork(lambda: visit(folder, number, size_bytes, allowed_bytes, admitted, theirs))  # noqa: B023
            theirs.close()
            crowd.append((process, ours))
            while len(list(folder.glob("*.waiting"))) <= number:
                time.sleep(0.0005)
    visits = [channel.receive() for _, channel in crowd]
    codes = [process.wait() for process, _ in crowd]
    order = [int(number) for number in (folder.parent / "admitted").read_text().split()]
    return {"order": order, "visits": visits, "codes": codes, "remains": folder.exists()}


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    print(json.dumps(main(Path(asked["folder"]), asked["allowed_bytes"], asked["sizes_bytes"])))
