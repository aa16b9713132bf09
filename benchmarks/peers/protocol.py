"""What every side of a comparison can do."""

from __future__ import annotations

from typing import Protocol

from benchmarks.measure import Run


class Peer(Protocol):
    """One way of doing the work."""

    @property
    def name(self) -> str:
        """What a table calls it."""
        ...

    def missing(self) -> str | None:
        """Return why it cannot run here; None where it can."""
        ...

    def run(self) -> Run:
        """Do the work once, anew. Raises CommandFailedError."""
        ...
