"""How much of a host's memory a user allows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Self

from reshard_mpi.errors import UsageError
from reshard_mpi.units import parse_bytes

MEMORY_VARIABLE = "RESHARD_MPI_MEMORY"
UNLIMITED = "unlimited"


class Allowance(NamedTuple):
    """How much memory of a host all processes of the user may have together; None: all that is free.

    max_active: how many may work at once, None for any number. unlimited: memory is not looked at.
    """

    memory_bytes: int | None = None
    max_active: int | None = None
    unlimited: bool = False

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
