"""Describe who holds memory on this host and who waits (`host_state`)."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from reshard_mpi.processes.governor import Allowance, leased_bytes
from reshard_mpi.processes.host import is_stopped, pid_state
from reshard_mpi.processes.ledger import Ledger, LedgerEntry
from reshard_mpi.processes.ledger_folder import LEDGER_SUFFIX, LedgerFolder, find_place
from reshard_mpi.processes.memory_scopes import find_scopes
from reshard_mpi.text import format_bytes, one_line


class ScopeState(NamedTuple):
    """One scope and its line."""

    name: str
    ceiling_bytes: int
    allowed_bytes: int | None  # what its leases may hold together now; None for a scope that this process is not in
    entries: tuple[LedgerEntry, ...]
    locked_by: tuple[int, ...] = ()  # the processes that are changing its line now, or have been stopped while they did

    @property
    def leases(self) -> tuple[LedgerEntry, ...]:
        return tuple(entry for entry in self.entries if entry.holds)

    @property
    def waiting(self) -> tuple[LedgerEntry, ...]:
        """In the order of the line."""
        return tuple(entry for entry in self.entries if not entry.holds)

    @property
    def held_bytes(self) -> int:
        return sum(lease.size_bytes for lease in self.leases)


class HostState(NamedTuple):
    """The scopes of this process, the host first, and all others that this user's processes use on this host."""

    place: LedgerFolder
    scopes: tuple[ScopeState, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the state as plain values; sizes in bytes, times in seconds since the epoch."""
        return {
            "version": 1,
            "folder": str(self.place.folder),
            "private": self.place.private or None,
            "scopes": [
                {
                    "name": scope.name,
                    "ceiling_bytes": _number(scope.ceiling_bytes),
                    "allowed_bytes": scope.allowed_bytes,
                    "held_bytes": scope.held_bytes,
                    "locked_by": [{"pid": pid, "state": pid_state(pid)} for pid in scope.locked_by],
                    "leases": [_as_json(entry) for entry in scope.leases],
                    "waiting": [_as_json(entry) for entry in scope.waiting],
                }
                for scope in self.scopes
            ],
        }

    def as_text(self) -> str:
        """Return the state as lines for people."""
        lines = [line for scope in self.scopes for line in _lines(scope, time.time())]
        if self.place.private:
            lines.append(f"Only processes that see {self.place.folder} are listed: {self.place.private}.")
        return "\n".join(map(one_line, lines))


def host_state(allowance: Allowance, environment: Mapping[str, str]) -> HostState:
    """Return who holds leases on this host now and who waits, and how much `allowance` allows them."""
    place = find_place(environment)
    scopes = {}
    for scope in reversed(find_scopes(environment, allowance.memory_bytes, allowance.max_active)):
        ledger = Ledger(place.path_of(scope.key))
        entries = tuple(ledger.entries())
        allowed_bytes = max(0, scope.allowed_bytes(leased_bytes(entry for entry in entries if entry.holds)))
        state = ScopeState(scope.name, scope.ceiling_bytes, allowed_bytes, entries, ledger.lock_holders())
        scopes[ledger.path] = state
    for path in sorted(place.folder.glob(f"*{LEDGER_SUFFIX}")):
        ledger = Ledger(path)
        entries = tuple(ledger.entries()) if path not in scopes else ()
        if entries:
            scopes[path] = ScopeState(entries[0].scope, entries[0].ceiling_bytes, None, entries, ledger.lock_holders())
    return HostState(place, tuple(scopes.values()))


def _lines(scope: ScopeState, now: float) -> list[str]:
    allowed_bytes = scope.ceiling_bytes if scope.allowed_bytes is None else scope.allowed_bytes
    held = f"{len(scope.leases)} {'lease holds' if len(scope.leases) == 1 else 'leases hold'}"
    head = f"{scope.name}: {held} {format_bytes(scope.held_bytes)} of {format_bytes(allowed_bytes)}"
    head += f", {len(scope.waiting)} waiting" if scope.waiting else ""
    rows = [("", *_cells(lease, scope, now)) for lease in scope.leases]
    rows += [(f"{place}.", *_cells(entry, scope, now)) for place, entry in enumerate(scope.waiting, 1)]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    locked = [
        f"  pid {pid} ({pid_state(pid)}) keeps its line locked: nobody comes or goes until it is continued or ended"
        for pid in scope.locked_by
        if is_stopped(pid)
    ]
    return [
        head,
        *locked,
        *("  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths)) + f"  {row[4]}" for row in rows),
    ]


def _cells(entry: LedgerEntry, scope: ScopeState, now: float) -> tuple[str, str, str, str]:
    what = f"{'holds' if entry.holds else 'waits for'} {format_bytes(entry.size_bytes)}"
    if entry.ceiling_bytes < scope.ceiling_bytes:  # its user allows it less
        what += f" within {format_bytes(entry.ceiling_bytes)}"
    seconds = f"{max(0.0, now - entry.since):.0f} s"
    stopped = "stopped: " if entry.is_stopped else ""
    return f"pid {entry.pid}", what, seconds, f"{stopped}{entry.purpose}"


def _as_json(entry: LedgerEntry) -> dict[str, Any]:
    return {
        "pid": entry.pid,
        "size_bytes": entry.size_bytes,
        "ceiling_bytes": _number(entry.ceiling_bytes),
        "purpose": entry.purpose,
        "state": entry.state or None,
        "is_floor": entry.is_floor,
        "since": entry.since,
    }


def _number(size_bytes: int) -> int | None:
    return None if size_bytes == sys.maxsize else size_bytes
