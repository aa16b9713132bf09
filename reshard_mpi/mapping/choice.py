"""What is taken of the tensors that a map makes, and in which types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.formats.dtypes import FLOATS, DType, numbers
from reshard_mpi.mapping.made import Constant, Made
from reshard_mpi.mapping.rules import bytes_of
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


_MAX_NAMED = 5
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


def chosen_of(choice: Choice, tensors: Sequence[Made], besides: Sequence[str]) -> tuple[list[Made], list[str]]:
    """Return the tensors that are taken, and the names of the others. besides: names of what is made up or computed."""
    if choice.include is None and not choice.exclude:
        return list(tensors), []
    for option, globs in (("--include", choice.include or ()), ("--exclude", choice.exclude)):
        for glob in globs:
            pattern = Pattern(glob)
            if not any(pattern.matches(choice.named(name)) for name in (*(each.name for each in tensors), *besides)):
                raise MapError(
                    f"{option} {glob} matches no tensor",
                    got=", ".join(tensor.name for tensor in tensors[:_MAX_NAMED]) + " ...",
                    remedy="give a pattern of the names that the target has",
                )
    chosen = [tensor for tensor in tensors if is_chosen(choice, tensor.name)]
    if not chosen:
        raise MapError("--include and --exclude leave no tensor")
    taken = {tensor.name for tensor in chosen}
    return chosen, [tensor.name for tensor in tensors if tensor.name not in taken]


def all_typed(choice: Choice, tensors: Sequence[Made]) -> Iterator[Made]:
    """Yield tensors in the types that `--dtype` gives them. Raises MapError for a pattern that matches none."""
    floats = [choice.named(tensor.name) for tensor in tensors if tensor.dtype in FLOATS]
    for glob, dtype in choice.types:
        if glob != ANY and not any(map(Pattern(glob).matches, floats)):
            raise MapError(
                f"--dtype {glob}={dtype} matches no floating-point tensor",
                got=", ".join(floats[:_MAX_NAMED]) + (" ..." if len(floats) > _MAX_NAMED else "") or "none",
                remedy="give a pattern of the names that the target has",
            )
    for tensor in tensors:
        yield tensor._replace(dtype=type_of(choice, tensor.name, tensor.dtype, tensor.shape.shape))


def constant_typed(choice: Choice, constant: Constant) -> Constant:
    """Return what is made up in the type that `--dtype` gives it. Raises MapError if that cannot hold it."""
    dtype = type_of(choice, constant.name, *constant.kind)
    if dtype == constant.kind.dtype:
        return constant
    value = numbers(constant.element, constant.kind.dtype)[0]
    element = bytes_of(value, dtype, constant.name, constant.where)
    return constant._replace(kind=constant.kind._replace(dtype=dtype), element=element)
