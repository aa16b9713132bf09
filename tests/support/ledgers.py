"""Ledgers of the governor, and who is in their lines."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from reshard_mpi.processes.governor.ledger import Ledger, LedgerEntry
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
    most_held = None

    def __init__(self, allowed: int, ceiling: int = 100) -> None:
        self.allowed = allowed
        self.ceiling_bytes = ceiling

    def certain_bytes(self) -> int:
        return 0

    def allowed_bytes(self, leased_bytes: Mapping[int, int]) -> int:
        return self.allowed
