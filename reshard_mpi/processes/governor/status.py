"""Describe who holds memory on this host and who waits (`host_state`)."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from reshard_mpi.processes.governor.admission import Allowance
from reshard_mpi.processes.governor.ledger_files import Occupant, leased_bytes
from reshard_mpi.processes.governor.ledger_folder import LedgerFolder, find_place
from reshard_mpi.processes.governor.queue import Ledger
from reshard_mpi.processes.governor.scopes import find_scopes
from reshard_mpi.processes.host import is_stopped, state_of
from reshard_mpi.text import format_bytes, one_line


class ScopeState(NamedTuple):
    """One scope and its line."""

    name: str
    ceiling_bytes: int
    allowed_bytes: int | None  # what its leases may hold together now; None for a scope that this process is not in
    occupants: tuple[Occupant, ...]
    locked_by: tuple[int, ...] = ()  # the processes that are changing its line now, or have been stopped while they did

    @property
    def leases(self) -> tuple[Occupant, ...]:
        return tuple(occupant for occupant in self.occupants if occupant.holds)

    @property
    def waiting(self) -> tuple[Occupant, ...]:
        """In the order of the line."""
        return tuple(occupant for occupant in self.occupants if not occupant.holds)

    @property
    def held_bytes(self) -> int:
        return sum(occupant.claim.size_bytes for occupant in self.leases)


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
                    "locked_by": [{"pid": pid, "state": state_of(pid)} for pid in scope.locked_by],
                    "leases": [_as_json(occupant) for occupant in scope.leases],
                    "waiting": [_as_json(occupant) for occupant in scope.waiting],
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
        ledger = Ledger(place.folder / scope.key)
        occupants = tuple(ledger.occupants())
        leased = leased_bytes(occupant.claim for occupant in occupants if occupant.holds)
        allowed_bytes = max(0, scope.allowed_bytes(leased))
        scopes[scope.key] = ScopeState(scope.name, scope.ceiling_bytes, allowed_bytes, occupants, ledger.lock_holders())
    for folder in sorted(place.folder.iterdir()) if place.folder.is_dir() else ():
        ledger = Ledger(folder)
        occupants = tuple(ledger.occupants()) if folder.name not in scopes else ()
        if occupants:
            claim = occupants[0].claim
            scopes[folder.name] = ScopeState(claim.scope, claim.ceiling_bytes, None, occupants, ledger.lock_holders())
    return HostState(place, tuple(scopes.values()))


def _lines(scope: ScopeState, now: float) -> list[str]:
    allowed_bytes = scope.ceiling_bytes if scope.allowed_bytes is None else scope.allowed_bytes
    held = f"{len(scope.leases)} {'lease holds' if len(scope.leases) == 1 else 'leases hold'}"
    head = f"{scope.name}: {held} {format_bytes(scope.held_bytes)} of {format_bytes(allowed_bytes)}"
    head += f", {len(scope.waiting)} waiting" if scope.waiting else ""
    rows = [("", *_cells(occupant, scope, now)) for occupant in scope.leases]
    rows += [(f"{place}.", *_cells(occupant, scope, now)) for place, occupant in enumerate(scope.waiting, 1)]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    locked = [
        f"  pid {pid} ({state_of(pid)}) keeps its line locked: nobody comes or goes until it is continued or ended"
        for pid in scope.locked_by
        if is_stopped(pid)
    ]
    return [
        head,
        *locked,
        *("  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths)) + f"  {row[4]}" for row in rows),
    ]


def _cells(occupant: Occupant, scope: ScopeState, now: float) -> tuple[str, str, str, str]:
    claim = occupant.claim
    what = f"{'holds' if occupant.holds else 'waits for'} {format_bytes(claim.size_bytes)}"
    if claim.ceiling_bytes < scope.ceiling_bytes:  # its user allows it less
        what += f" within {format_bytes(claim.ceiling_bytes)}"
    seconds = f"{max(0.0, now - occupant.since):.0f} s"
    stopped = "stopped: " if claim.is_stopped else ""
    return f"pid {claim.pid}", what, seconds, f"{stopped}{claim.purpose}"


def _as_json(occupant: Occupant) -> dict[str, Any]:
    claim = occupant.claim
    return {
        "pid": claim.pid,
        "size_bytes": claim.size_bytes,
        "ceiling_bytes": _number(claim.ceiling_bytes),
        "purpose": claim.purpose,
        "state": claim.state or None,
        "is_floor": claim.is_floor,
        "since": occupant.since,
    }


def _number(size_bytes: int) -> int | None:
    return None if size_bytes == sys.maxsize else size_bytes
