"""What is taken of the tensors that a map makes, and in which types."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from reshard_mpi.formats.dtypes import DType
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


def is_chosen(choice: Choice, name: str) -> bool:
    """Tell whether a tensor of the target is taken."""
    name = choice.named(name)
    if choice.include is not None and not any(Pattern(glob).matches(name) for glob in choice.include):
        return False
    return not any(Pattern(glob).matches(name) for glob in choice.exclude)
