"""What a lease is for, and who holds it or waits for it."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from reshard_mpi.processes import kernel
from reshard_mpi.processes.governor import usage


class Claim(NamedTuple):
    """What a lease is for: `size_bytes` that process `pid` wants for a purpose in a scope.

    pid_namespace: the one in which `pid` is valid. ceiling_bytes: of the scope, as its user allows. since: when the
    process joined the line (seconds since the epoch). is_floor: it stands for memory that the process uses in any case
    and keeps while it waits for more, so nobody waits for its end. used_before_bytes: what the process used before, for
    which it has no lease.
    """

    size_bytes: int
    pid: int
    pid_namespace: str
    purpose: str
    scope: str
    ceiling_bytes: int
    since: float
    is_floor: bool = False
    used_before_bytes: int = 0

    @classmethod
    def loads(cls, text: bytes) -> Claim | None:
        """Return the claim in the text of a file; None if there is none, as in a file of another version."""
        try:
            claim = cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            return None
        kinds: tuple[type | tuple[type, ...], ...] = (int, int, str, str, str, int, (int, float), bool, int)
        if not all(isinstance(value, kind) for value, kind in zip(claim, kinds)) or claim.size_bytes < 0:
            return None
        return claim

    def dumps(self) -> bytes:
        return json.dumps(self._asdict()).encode()

    @property
    def is_here(self) -> bool:
        """Whether this process is in the same PID namespace, so `pid` is valid here."""
        return self.pid_namespace == own_pid_namespace()

    @property
    def is_stopped(self) -> bool:
        """Whether the process is known to be stopped."""
        return self.is_here and kernel.is_stopped(self.pid)

    @property
    def state(self) -> str:
        """What the process does, in a word or a few; empty if it is in another PID namespace."""
        return kernel.state_of(self.pid) if self.is_here else ""


class Occupant(NamedTuple):
    """A process in a ledger. since: when it was admitted, or joined the line. inode: of its file."""

    number: int
    claim: Claim
    holds: bool
    since: float
    inode: int = 0

    def told(self, now: float) -> str:
        """Return who this is and what it does, for people."""
        state = self.claim.state
        return f"pid {self.claim.pid} ({f'{state}, ' if state else ''}for {max(0.0, now - self.since):.0f} s)"


# Says in words what a claim lacks to fit beside the claims of leases (the argument); None if it fits.
Judge = Callable[[Sequence[Claim]], "str | None"]


class Notices(Protocol):
    """Says what a process waits for. The next thing is said as soon as no seconds are left."""

    def left_seconds(self) -> float: ...

    def tell(self, ahead: int, lacking: str | None, whom: Sequence[Occupant]) -> None:
        """Say how many are ahead in line or, at its head, what is lacking. whom: who is waited for."""
        ...

    def tell_locked(self, pids: Sequence[int]) -> None:
        """Say that these processes have the line locked."""
        ...


_pid_namespace: dict[int, str] = {}


def own_pid_namespace() -> str:
    """Return the name of the PID namespace of this process."""
    pid = os.getpid()
    if pid not in _pid_namespace:
        try:
            _pid_namespace[pid] = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - pathlib is not light
        except OSError:
            _pid_namespace[pid] = ""
    return _pid_namespace[pid]


def leased_bytes(claims: Iterable[Claim]) -> Counter[int]:
    """Return by process the sum of its claims, for processes of this PID namespace.

    Claims of a process that used memory before its first one count only as far as it has used more since.
    """
    leased: Counter[int] = Counter()
    used_before: Counter[int] = Counter()
    for claim in claims:
        if claim.is_here:
            leased[claim.pid] += claim.size_bytes
            used_before[claim.pid] = max(used_before[claim.pid], claim.used_before_bytes)
    for pid, before_bytes in used_before.items():
        if before_bytes:
            leased[pid] = min(leased[pid], max(0, usage.resident_bytes(pid) - before_bytes))
    return leased
