"""Accumulated gradients: which tensors they are, what may become of them, and what users are told of it.

Between two updates each data-parallel rank has a sum of its own in them, so copies of one may differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple

# `accu_grads.<parameter>` is MindSpore's, `grad_sum.<parameter>` that of its guide; either may have more before it.
_ACCUMULATORS = ("accu_grads", "grad_sum")


class Accumulated(StrEnum):
    """What becomes of accumulated gradients of which ranks that hold the same piece have different sums.

    MEAN: every target rank gets the mean of all. SUM: the lowest of the target ranks that hold the same piece gets the
    sum of all, and the others zeros. REFUSE: the run is refused.
    """

    MEAN = "mean"
    SUM = "sum"
    REFUSE = "refuse"


class Sums(NamedTuple):
    """Accumulated gradients, and how many source ranks hold the same piece of each.

    names: a glob of their names. added_in: the type in which they are added.
    """

    names: str
    replicas: int
    added_in: str


def is_partial_sum(name: str) -> bool:
    """Tell whether copies of a parameter may differ because each is a part of a sum."""
    return any(part in _ACCUMULATORS for part in name.split(".")[:-1])


def sums_like(name: str) -> str:
    """Return a glob of the accumulated gradients that this one belongs to, such as `opt.grad_sum.*`."""
    parts = name.split(".")
    place = next(place for place, part in enumerate(parts) if part in _ACCUMULATORS)
    return ".".join([*parts[: place + 1], "*"])


def told_of(accumulated: Accumulated, all_sums: Iterable[Sums]) -> Iterator[str]:
    """Yield what the accumulated gradients are that are taken of a checkpoint."""
    for names, count, added_in in all_sums if accumulated is not Accumulated.REFUSE else ():
        joined = f"the {accumulated} of {count} replicas, added in {added_in} in the order of their ranks"
        yield f"accumulated gradients {names}: {joined if count > 1 else 'each piece is on one rank, nothing to join'}"


def notes_on(accumulated: Accumulated, all_sums: Iterable[Sums]) -> Iterator[str]:
    """Yield what the user is told of the accumulated gradients that a target holds."""
    whose = {
        Accumulated.MEAN: "every rank of the target that holds a piece gets it",
        Accumulated.SUM: "of the ranks of the target that hold a piece the lowest gets it, the others zeros",
    }
    return (f"{text}; {whose[accumulated]}" for text in told_of(accumulated, all_sums))


def note_on_none(accumulated: Accumulated) -> str:
    """Return what the user is told if no target holds any accumulated gradient."""
    known = " or ".join(f"{name}.*" for name in _ACCUMULATORS)
    return f"no target has a tensor called {known}, as accumulated gradients are: --accumulated {accumulated} is no use"
