"""Know accumulated gradients by their names, and tell how they are joined (`is_partial_sum`).

Sums of gradients of a step that is not finished: each rank has added up those of its own samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum, StrEnum
from typing import NamedTuple

# `accu_grads.<parameter>` is MindSpore's name, `grad_sum.<parameter>` its guide's; either may have more before it.
_ACCUMULATORS = ("accu_grads", "grad_sum")


class Accumulated(StrEnum):
    """The handling of accumulated gradients whose sums differ between ranks that hold the same piece.

    MEAN: every target rank gets the mean of all. SUM: the lowest of the target ranks that hold the same piece gets the
    sum of all, and the others zeros. REFUSE: the run is refused.
    """

    MEAN = "mean"
    SUM = "sum"
    REFUSE = "refuse"


class GradientShare(Enum):
    """The part of a tensor for a target rank: one rank's, the sum of all replicas, or zeros."""

    TAKEN = "taken"
    JOINED = "joined"
    ZEROS = "zeros"


class Sums(NamedTuple):
    """Accumulated gradients, and how many source ranks hold the same piece of each."""

    names: str  # a glob of their names
    replicas: int
    added_in: str  # the type in which they are added


def is_partial_sum(name: str) -> bool:
    """Tell whether copies of a parameter may differ because each is a part of a sum."""
    return any(part in _ACCUMULATORS for part in name.split(".")[:-1])


def sums_like(name: str) -> str:
    """Return a glob of the accumulated gradients that this one belongs to, such as `opt.grad_sum.*`."""
    parts = name.split(".")
    place = next(place for place, part in enumerate(parts) if part in _ACCUMULATORS)
    return ".".join([*parts[: place + 1], "*"])


def gradient_texts(accumulated: Accumulated, all_sums: Iterable[Sums]) -> Iterator[str]:
    """Yield words on the accumulated gradients taken from a checkpoint; there are none to tell of with REFUSE."""
    for names, count, added_in in all_sums:
        joined = f"the {accumulated} of {count} replicas, added in {added_in} in the order of their ranks"
        yield f"accumulated gradients {names}: {joined if count > 1 else 'each piece is on one rank, nothing to join'}"


def notes_on(accumulated: Accumulated, all_sums: Iterable[Sums]) -> Iterator[str]:
    """Yield notes for the user on the accumulated gradients in a target."""
    whose = {
        Accumulated.MEAN: "every rank of the target that holds a piece gets it",
        Accumulated.SUM: "of the ranks of the target that hold a piece the lowest gets it, the others zeros",
    }
    return (f"{text}; {whose[accumulated]}" for text in gradient_texts(accumulated, all_sums))


def note_on_none(accumulated: Accumulated) -> str:
    """Return the note for the user if no target holds any accumulated gradient."""
    names = " or ".join(f"{name}.*" for name in _ACCUMULATORS)
    return f"no target has a tensor called {names}, as accumulated gradients are: --accumulated {accumulated} is no use"
