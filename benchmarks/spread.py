"""The statistics of repeated runs: medians, with the least and the most."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure that was taken several times."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        taken = list(values)
        return cls(statistics.median(taken), min(taken), max(taken))

    def as_json(self) -> dict[str, float]:
        return {"median": self.median, "min": self.least, "max": self.most}

    def as_text(self, divisor: float = 1.0) -> str:
        """Return `median (least-most)`, each with three significant digits."""
        return f"{short(self.median / divisor)} ({short(self.least / divisor)}-{short(self.most / divisor)})"


def ratios(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Return the spread of the quotients of runs that were neighbours."""
    return Spread.of(one / other for one, other in zip(above, below, strict=True))


def short(value: float) -> str:
    """Return three significant digits."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:#.3g}" if value >= 0.001 or value == 0 else f"{value:.1e}"
