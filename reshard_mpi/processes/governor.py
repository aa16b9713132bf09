"""Work out what `--memory` allows (`Allowance`), and grant leases on memory when they fit every limit (`Governor`)."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

from reshard_mpi.errors import BudgetError, UsageError
from reshard_mpi.processes.host import pid_namespace, pid_state
from reshard_mpi.processes.ledger import Judge, Ledger, LedgerEntry, Ticket, WaitReporter
from reshard_mpi.processes.ledger_folder import LedgerFolder, find_place, make_place, no_place
from reshard_mpi.processes.memory_scopes import Scope, find_scopes, resident_bytes
from reshard_mpi.text import Say, format_bytes, parse_bytes

MEMORY_VARIABLE = "RESHARD_MPI_MEMORY"
UNLIMITED = "unlimited"


class Allowance(NamedTuple):
    """How much memory of a host all processes of the user may have together; None: all that is free."""

    memory_bytes: int | None = None
    max_active: int | None = None  # how many may work at once, None for any number
    unlimited: bool = False  # memory is not looked at

    @classmethod
    def of(cls, memory: str | int | None, max_active: int | None, environment: Mapping[str, str]) -> Self:
        """Return the allowance of `memory` (a size, "unlimited", or None: as the environment says) and `max_active`.

        Raises UsageError if they are not a size and a count.
        """
        where = "--memory"
        if memory is None:
            memory, where = environment.get(MEMORY_VARIABLE) or None, MEMORY_VARIABLE
        if max_active is not None and max_active < 1:
            raise UsageError("no process may work", expected="1 or more", got=str(max_active), where="--max-active")
        if memory == UNLIMITED:
            return cls(max_active=max_active, unlimited=True)
        if isinstance(memory, str):
            try:
                memory = parse_bytes(memory)
            except ValueError as error:
                raise UsageError("no amount of memory", expected=str(error), got=repr(memory), where=where) from None
        if memory is not None and memory < 1:
            raise UsageError("no amount of memory", expected="more than nothing", got=str(memory), where=where)
        return cls(memory, max_active)


# Leases change hands within milliseconds where targets are small: nobody wants to read of that.
_FIRST_NOTICE_SECONDS = 1.0
_NOTICE_SECONDS = 30.0
_NO_PLACE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENAMETOOLONG),
    *(errno.ENOLCK, errno.EINVAL, errno.EOPNOTSUPP),
)
# Processes named of all that are waited for.
_MAX_NAMED = 3


class _ScopeLease(NamedTuple):
    """The part of a lease in one scope."""

    scope: Scope
    ticket: Ticket


class Lease:
    """Memory that is held, in every scope of the process, until it is given back."""

    def __init__(self, size_bytes: int) -> None:
        self.parts: list[_ScopeLease] = []
        self.waited_seconds = 0.0
        self._wanted_bytes = size_bytes

    @property
    def size_bytes(self) -> int:
        """The size held; where nothing limits it, the size last asked for."""
        return min((part.ticket.entry.size_bytes for part in self.parts), default=self._wanted_bytes)

    @property
    def numbers(self) -> dict[str, int]:
        """The number of its place in the line of each scope, by the scope's key."""
        return {part.scope.key: part.ticket.entry.number for part in self.parts}

    def grow(self, size_bytes: int) -> bool:
        """Hold `size_bytes` from now on, if that fits now; tell whether it does. Nothing is waited for."""
        before_bytes = self.size_bytes
        for grown, (scope, ticket) in enumerate(self.parts):
            judge = partial(_judge, scope, ticket.entry._replace(size_bytes=size_bytes))
            if not ticket.resize(size_bytes, judge):
                for part in self.parts[:grown]:
                    part.ticket.resize(before_bytes, None)
                return False
        self._wanted_bytes = size_bytes
        return True

    def restate(self, size_bytes: int, *, is_floor: bool) -> None:
        """Hold `size_bytes` from now on, whether that fits or not.

        Args:
            is_floor: the lease stands for what the process uses in any case, and nobody waits for its end.
        """
        self._wanted_bytes = size_bytes
        for part in self.parts:
            part.ticket.resize(size_bytes, None, is_floor=is_floor)

    def give_back(self) -> None:
        while self.parts:
            self.parts.pop().ticket.leave()


class Governor:
    """Shares the memory of a host between all processes of a user, through ledgers in `place`.

    Attributes:
        scopes: those that limit the process, the innermost first; without any it is admitted at once. A lease is taken
            in each of them in this order, which is the same for all processes, so no two wait for each other.
    """

    def __init__(self, place: LedgerFolder, scopes: Sequence[Scope]) -> None:
        self._place = place
        self._scopes = scopes

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on how memory is shared."""
        if not self._place.private:
            return ()
        return (
            f"memory is shared only with processes that see {self._place.folder}: {self._place.private}; what others on"
            " this host are going to need is not known",
        )

    @property
    def ceiling_bytes(self) -> int:
        """What all processes together can never exceed."""
        return min((scope.ceiling_bytes for scope in self._scopes), default=sys.maxsize)

    def require_possible(self, peak_bytes: int, reserved_bytes: int) -> None:
        """Raise BudgetError if a process that needs `peak_bytes` can never be admitted.

        Args:
            reserved_bytes: the part of it that the process takes whatever it does.
        """
        if peak_bytes <= self.ceiling_bytes:
            return
        tightest = min(self._scopes, key=lambda scope: scope.ceiling_bytes)
        raise BudgetError(
            "a process can never fit the memory that is allowed",
            expected=f"{format_bytes(tightest.ceiling_bytes)} or less: that is what {tightest.name} allows",
            got=f"projected {format_bytes(peak_bytes)}, of which {format_bytes(reserved_bytes)} are reserved for the"
            " process itself",
            remedy=f"allow more (--memory, {MEMORY_VARIABLE}, the job's --mem), or do without with --memory unlimited",
        )

    def take(
        self,
        size_bytes: int,
        purpose: str,
        say: Say,
        *,
        numbers: Mapping[str, int] | None = None,
        used_before_bytes: int = 0,
    ) -> Lease:
        """Wait until `size_bytes` fit every scope, and return a lease of them.

        Args:
            purpose: what they are for, in words.
            say: is told now and then what is waited for.
            numbers: by the key of a scope the place in its line that the process had before.
            used_before_bytes: what the process uses already without a lease.
        """
        begin = time.monotonic()
        lease = Lease(size_bytes)
        try:
            for scope in self._scopes:
                entry = _entry(scope, size_bytes, purpose)._replace(used_before_bytes=used_before_bytes)
                reporter = _PeriodicReporter(scope, purpose, begin, say)
                number = (numbers or {}).get(scope.key, 0)
                lease.parts.append(self._enter(scope, entry, partial(_judge, scope, entry), reporter, number))
        except BaseException:
            lease.give_back()
            raise
        lease.waited_seconds = time.monotonic() - begin if self._scopes else 0.0
        return lease

    def register(self, size_bytes: int, purpose: str) -> Lease:
        """Return a lease of `size_bytes` that are in use in any case; nothing is waited for."""
        lease = Lease(size_bytes)
        for scope in self._scopes:
            entry = _entry(scope, size_bytes, purpose)._replace(is_floor=True)
            reporter = _PeriodicReporter(scope, purpose, time.monotonic(), lambda _: None)
            lease.parts.append(self._enter(scope, entry, None, reporter))
        return lease

    def is_waited_for(self) -> bool:
        """Tell whether anybody waits who could be admitted."""
        return any(Ledger(self._place.path_of(scope.key)).is_waited_for() for scope in self._scopes)

    def _enter(
        self, scope: Scope, entry: LedgerEntry, judge: Judge | None, reporter: WaitReporter, number: int = 0
    ) -> _ScopeLease:
        """Return the part of a lease in `scope`. Raises ReshardError if there is no room, or no lock, for that."""
        ledger = Ledger(self._place.path_of(scope.key))
        while True:
            try:
                return _ScopeLease(scope, ledger.enter(entry, judge, reporter, number))
            except FileNotFoundError:
                make_place(self._place)
            except OSError as error:
                if error.errno not in _NO_PLACE:
                    raise
                raise no_place(self._place.folder, error) from None


def open_governor(allowance: Allowance, environment: Mapping[str, str]) -> Governor:
    """Return what admits processes of this host; no file is made before the first lease."""
    if allowance.unlimited and allowance.max_active is None:
        return Governor(LedgerFolder(Path(), ""), [])
    place = find_place(environment)
    if allowance.unlimited:
        return Governor(place, [_Uncounted(allowance.max_active)])
    return Governor(place, find_scopes(environment, allowance.memory_bytes, allowance.max_active))


class _Uncounted(NamedTuple):
    """The host, where only the number of leases is limited."""

    max_active: int | None
    key: str = "host"
    name: str = "this host"
    ceiling_bytes: int = sys.maxsize

    def certain_bytes(self) -> int:
        return sys.maxsize

    def allowed_bytes(self, leased_bytes: Mapping[int, int]) -> int:
        return sys.maxsize


def leased_bytes(leases: Iterable[LedgerEntry]) -> Counter[int]:
    """Return by process the sum of its leases, for processes of this PID namespace.

    Leases of a process that used memory before its first one count only as far as it has used more since.
    """
    leased: Counter[int] = Counter()
    used_before: Counter[int] = Counter()
    for lease in leases:
        if lease.is_here:
            leased[lease.pid] += lease.size_bytes
            used_before[lease.pid] = max(used_before[lease.pid], lease.used_before_bytes)
    for pid, before_bytes in used_before.items():
        if before_bytes:
            leased[pid] = min(leased[pid], max(0, resident_bytes(pid) - before_bytes))
    return leased


def _entry(scope: Scope, size_bytes: int, purpose: str) -> LedgerEntry:
    """Return the entry of this process in the ledger of `scope`."""
    return LedgerEntry(size_bytes, os.getpid(), pid_namespace(), purpose, scope.name, scope.ceiling_bytes, time.time())


def _judge(scope: Scope, wanted: LedgerEntry, held: Sequence[LedgerEntry]) -> str | None:
    """Say what `wanted` lacks beside the leases in `held`; None if nothing."""
    working = [other for other in held if not other.is_floor]
    if not working:
        return None  # one at a time goes on, whatever others do to the memory; floors are not waited for
    if scope.max_active is not None and len(working) >= scope.max_active:
        return f"{len(working)} at work on {scope.name}, {scope.max_active} allowed at once"
    held_bytes = sum(other.size_bytes for other in held)
    if held_bytes + wanted.size_bytes <= scope.certain_bytes():
        return None
    allowed_bytes = scope.allowed_bytes(leased_bytes([*held, wanted]))
    if held_bytes + wanted.size_bytes <= allowed_bytes:
        return None
    count = f"{len(held)} {'lease holds' if len(held) == 1 else 'leases hold'}"
    allowed = format_bytes(max(0, allowed_bytes))
    return (
        f"{format_bytes(wanted.size_bytes)} wanted, {count} {format_bytes(held_bytes)} of the {allowed} that"
        f" {scope.name} has for them"
    )


class _PeriodicReporter:
    """Reports the reason for waiting: once after a moment, then every half a minute."""

    def __init__(self, scope: Scope, purpose: str, begin: float, say: Say) -> None:
        self._scope = scope
        self._purpose = purpose
        self._say = say
        self._begin = begin
        self._due = begin + _FIRST_NOTICE_SECONDS

    def left_seconds(self) -> float:
        return self._due - time.monotonic()

    def tell(self, ahead: int, lacking: str | None, whom: Sequence[LedgerEntry]) -> None:
        why = f"{ahead} ahead in line on {self._scope.name}" if lacking is None else lacking
        now = time.time()
        # The stopped first: somebody has to do something about them.
        named = sorted(whom, key=lambda who: (not who.is_stopped, who.is_floor, who.since))[:_MAX_NAMED]
        more = f" and {len(whom) - len(named)} more" if len(whom) > len(named) else ""
        self._tell(f", on {', '.join(who.told(now) for who in named)}{more}" if named else "", why)

    def tell_locked(self, pids: Sequence[int]) -> None:
        who = ", ".join(f"pid {pid} ({pid_state(pid)})" for pid in pids) or "a process that cannot be seen from here"
        remedy = "if it is stopped, continue it (kill -CONT) or end it"
        why = f"{who} keeps the line of {self._scope.name} locked; {remedy}"
        self._tell("", why)

    def _tell(self, whom: str, why: str) -> None:
        now = time.monotonic()
        self._due = now + _NOTICE_SECONDS
        self._say(f"{self._purpose} has been waiting for memory for {now - self._begin:.0f} s{whom}: {why}")
