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
    """What a lease is for: so many bytes, wanted by a process for a purpose, in the scope that allows no more than so.

    pid_namespace: in which `pid` is the process's number. since: when it joined the line (seconds since the epoch).
    is_floor: it stands for what the process has in use for being there at all, and keeps while it waits for more; the
    others do not wait for its end. used_before_bytes: what the process used already, for which no lease stands.
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
        """Return the claim that a file says; None if it says none, as one of another version of this program."""
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
        """Whether `pid` is the process's number for this process too."""
        return self.pid_namespace == own_pid_namespace()

    @property
    def is_stopped(self) -> bool:
        """Whether the process is known to be stopped."""
        return self.is_here and kernel.is_stopped(self.pid)

    @property
    def state(self) -> str:
        """What the process does, in a word or a few; empty where that cannot be seen."""
        return kernel.state_of(self.pid) if self.is_here else ""


class Occupant(NamedTuple):
    """Somebody in a ledger. since: when it was admitted, or joined the line. inode: of the file that says so."""

    number: int
    claim: Claim
    holds: bool
    since: float
    inode: int = 0

    def told(self, now: float) -> str:
        """Say who this is, for people."""
        state = self.claim.state
        return f"pid {self.claim.pid} ({f'{state}, ' if state else ''}for {max(0.0, now - self.since):.0f} s)"


# Says, in words, what a claim lacks to fit beside those that are held (the argument); None if it fits.
Judge = Callable[[Sequence[Claim]], "str | None"]


class Notices(Protocol):
    """What a process that waits says of it, and when: as soon as no seconds are left."""

    def left_seconds(self) -> float: ...

    def tell(self, ahead: int, lacking: str | None, whom: Sequence[Occupant]) -> None:
        """Say that so many are ahead in line or, at its head, what is lacking. whom: who is waited for."""
        ...

    def tell_locked(self, pids: Sequence[int]) -> None:
        """Say that these processes keep everybody from changing the line."""
        ...


_pid_namespace: dict[int, str] = {}


def own_pid_namespace() -> str:
    """Return what names the PID namespace of this process."""
    pid = os.getpid()
    if pid not in _pid_namespace:
        try:
            _pid_namespace[pid] = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - pathlib is not light
        except OSError:
            _pid_namespace[pid] = ""
    return _pid_namespace[pid]


def leased_bytes(claims: Iterable[Claim]) -> Counter[int]:
    """Return what the processes that can be seen from this one claim, by process.

    Of one that used memory before it claimed any, no more counts than it uses now beyond that.
    """
    leased: Counter[int] = Counter()
    before: Counter[int] = Counter()
    for claim in claims:
        if claim.is_here:
            leased[claim.pid] += claim.size_bytes
            before[claim.pid] = max(before[claim.pid], claim.used_before_bytes)
    for pid, before_bytes in before.items():
        if before_bytes:
            leased[pid] = min(leased[pid], max(0, usage.resident_bytes(pid) - before_bytes))
    return leased
