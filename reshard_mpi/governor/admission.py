"""The governor: a lease on memory for whoever transforms a target, granted when it fits everything that limits it."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager as ContextManager
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from reshard_mpi.errors import BudgetError
from reshard_mpi.governor.allowance import MEMORY_VARIABLE, Allowance
from reshard_mpi.governor.ledger import Claim, Ledger, Notices, own_pid_namespace
from reshard_mpi.governor.place import Place, find_place, make_place, no_place
from reshard_mpi.governor.scopes import Scope, find_scopes
from reshard_mpi.units import format_bytes

# Leases change hands within milliseconds where targets are small: nobody wants to read of that.
_FIRST_NOTICE_SECONDS = 1.0
_NOTICE_SECONDS = 30.0
_FULL = (errno.ENOSPC, errno.EDQUOT)

Say = Callable[[str], None]


class Governor(Protocol):
    """Admits what needs memory. notes: what the user should know of how it does that."""

    @property
    def notes(self) -> tuple[str, ...]: ...

    def require_possible(self, peak_bytes: int, reserved_bytes: int) -> None:
        """Raise BudgetError if a process that needs `peak_bytes` can never be admitted.

        reserved_bytes: what of it is for the process itself, whatever it does.
        """
        ...

    def lease(self, peak_bytes: int, purpose: str, say: Say) -> ContextManager[float]:
        """Wait until there are `peak_bytes`, and hold them as long as the block lasts; yields the seconds waited.

        purpose: what for, in words. say: is told, now and then, what is waited for.
        """
        ...


class Unlimited:
    """Admits everybody at once."""

    notes = ()

    def require_possible(self, peak_bytes: int, reserved_bytes: int) -> None:
        pass

    @contextmanager
    def lease(self, peak_bytes: int, purpose: str, say: Say) -> Iterator[float]:
        yield 0.0


class HostGovernor:
    """Shares the memory of a host between all processes of a user, through ledgers in `place`.

    scopes: what the process lies in, from the innermost: a lease is taken from each in this order, which is the same
    for all processes, so none waits for one that waits for it.
    """

    def __init__(self, place: Place, scopes: Sequence[Scope]) -> None:
        self._place = place
        self._scopes = scopes

    @property
    def notes(self) -> tuple[str, ...]:
        if not self._place.private:
            return ()
        return (
            f"memory is shared only with processes that see {self._place.folder}: {self._place.private}; what others on"
            " this host are going to need is not known",
        )

    def require_possible(self, peak_bytes: int, reserved_bytes: int) -> None:
        tightest = min(self._scopes, key=lambda scope: scope.ceiling_bytes)
        if peak_bytes <= tightest.ceiling_bytes:
            return
        raise BudgetError(
            "a process can never fit the memory that is allowed",
            expected=f"{format_bytes(tightest.ceiling_bytes)} or less: that is what {tightest.name} allows",
            got=f"projected {format_bytes(peak_bytes)}, of which {format_bytes(reserved_bytes)} are reserved for the"
            " process itself",
            remedy=f"allow more (--memory, {MEMORY_VARIABLE}, the job's --mem), or do without with --memory unlimited",
        )

    @contextmanager
    def lease(self, peak_bytes: int, purpose: str, say: Say) -> Iterator[float]:
        begin = time.monotonic()
        with ExitStack() as leases:
            for scope in self._scopes:
                claim = Claim(
                    peak_bytes,
                    os.getpid(),
                    own_pid_namespace(),
                    purpose,
                    scope.name,
                    scope.ceiling_bytes,
                    time.time(),
                )
                self._enter(leases, scope, claim, _Notices(scope, claim, begin, say))
            yield time.monotonic() - begin

    def _enter(self, leases: ExitStack, scope: Scope, claim: Claim, notices: Notices) -> None:
        """Wait for a lease of `scope`, which `leases` is to give back."""
        ledger = Ledger(self._place.folder / scope.key)
        while True:
            try:
                leases.enter_context(ledger.lease(claim, partial(_judge, scope, claim), notices))
                return
            except FileNotFoundError:
                make_place(self._place)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                raise no_place(self._place.folder, error) from None


def open_governor(allowance: Allowance, environment: Mapping[str, str], root: Path = Path("/")) -> Governor:
    """Return what admits processes of this host; nothing is made before the first lease. root: where /proc is."""
    if allowance.unlimited and allowance.max_active is None:
        return Unlimited()
    place = find_place(environment)
    if allowance.unlimited:
        return HostGovernor(place, [_Uncounted(allowance.max_active)])
    return HostGovernor(place, find_scopes(environment, allowance.memory_bytes, allowance.max_active, root))


class _Uncounted(NamedTuple):
    """The host, where only the number of leases is limited."""

    most_held: int | None
    key: str = "host"
    name: str = "this host"
    ceiling_bytes: int = sys.maxsize

    def allowed_bytes(self, leased_bytes: Mapping[int, int]) -> int:
        return sys.maxsize


def leased_bytes(claims: Iterable[Claim]) -> Counter[int]:
    """Return what the processes that can be seen from this one claim, by process."""
    leased: Counter[int] = Counter()
    for claim in claims:
        if claim.pid_namespace == own_pid_namespace():
            leased[claim.pid] += claim.size_bytes
    return leased


def _judge(scope: Scope, claim: Claim, held: Sequence[Claim]) -> str | None:
    """Say what is lacking for `claim` beside those that are `held`; None if nothing is."""
    if not held:
        return None  # one at a time goes on, whatever others do to the memory
    if scope.most_held is not None and len(held) >= scope.most_held:
        return f"{len(held)} at work on {scope.name}, {scope.most_held} allowed at once"
    held_bytes = sum(other.size_bytes for other in held)
    allowed_bytes = scope.allowed_bytes(leased_bytes([*held, claim]))
    if held_bytes + claim.size_bytes <= allowed_bytes:
        return None
    count = f"{len(held)} {'lease holds' if len(held) == 1 else 'leases hold'}"
    allowed = format_bytes(max(0, allowed_bytes))
    return (
        f"{format_bytes(claim.size_bytes)} wanted, {count} {format_bytes(held_bytes)} of the {allowed} that"
        f" {scope.name} has for them"
    )


class _Notices:
    """Says what is waited for: once after a moment, then every half a minute."""

    def __init__(self, scope: Scope, claim: Claim, begin: float, say: Say) -> None:
        self._scope = scope
        self._claim = claim
        self._say = say
        self._begin = begin
        self._due = begin + _FIRST_NOTICE_SECONDS

    def left_seconds(self) -> float:
        return self._due - time.monotonic()

    def tell(self, ahead: int, lacking: str | None) -> None:
        now = time.monotonic()
        self._due = now + _NOTICE_SECONDS
        why = f"{ahead} ahead in line on {self._scope.name}" if lacking is None else lacking
        self._say(f"{self._claim.purpose} has been waiting for memory for {now - self._begin:.0f} s: {why}")
