"""What is taken of the tensors that a map makes, and in which types."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple

from reshard_mpi.formats.dtypes import FLOATS, DType
from reshard_mpi.sharding.patterns import Pattern


class Choice(NamedTuple):
    """What is taken of the tensors that a map makes, by their new names.

    include: globs of which one must match; None: all. exclude: globs of which none may. types: globs with the types
    that floating-point tensors become. named: what tensors are called in the target's file, where it is not their name.
    """

    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    types: tuple[tuple[str, DType], ...] = ()
    named: Callable[[str], str] = str


# The glob of a type that is given without one.
ANY = "*"
# What training counts and sets, in single numbers: their types stay unless they are named.
_COUNTERS = frozenset(
    (
        *("step", "global_step", "state_step", "step_num", "epoch_num", "beta1_power", "beta2_power", "learning_rate"),
        *("lr", "momentum", "scale", "scale_sense", "loss_scale", "_growth_tracker", "current_iterator_step"),
        *("last_overflow_iterator_step",),
    )
)


def type_of(choice: Choice, name: str, dtype: DType, shape: tuple[int, ...]) -> DType:
    """Return the type that a tensor of the target gets: by the last pattern that matches, else its own."""
    in_file = choice.named(name)
    is_counter = prod(shape) == 1 and in_file.rpartition(".")[2] in _COUNTERS
    for glob, wanted in reversed(choice.types) if dtype in FLOATS else ():
        if Pattern(glob).matches(in_file) and not (glob == ANY and is_counter):
            return wanted
    return dtype


def is_chosen(choice: Choice, name: str) -> bool:
    """Tell whether a tensor of the target is taken."""
    name = choice.named(name)
    if choice.include is not None and not any(Pattern(glob).matches(name) for glob in choice.include):
        return False
    return not any(Pattern(glob).matches(name) for glob in choice.exclude)
