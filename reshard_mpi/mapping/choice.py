"""What is taken of the tensors that a map makes, and in which types."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from math import prod
from typing import NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.formats.dtypes import FLOATS, DType, numbers
from reshard_mpi.mapping.candidates import MAX_NAMED
from reshard_mpi.mapping.directions import Direction
from reshard_mpi.mapping.following import owned_by, owners
from reshard_mpi.mapping.made import Constant, Made
from reshard_mpi.mapping.rules import TYPES, Rules, bytes_of
from reshard_mpi.sharding.patterns import Pattern


class Choice(NamedTuple):
    """What is taken of the tensors that a map makes, by their new names.

    include: globs of which one must match; None: all. exclude: globs of which none may. types: globs with the types
    that floating-point tensors become. named: what tensors are called in the target's file, where it is not their name.
    may_match_none: whether globs may match nothing. last: what is taken once all maps are applied, if this is not the
    last of several: nothing is left out here, and state that is left out then may stay without its parameter.
    """

    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    types: tuple[tuple[str, DType], ...] = ()
    named: Callable[[str], str] = str
    may_match_none: bool = False
    last: Choice | None = None


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
    number = _deciding(choice, name, shape) if dtype in FLOATS else None
    return dtype if number is None else choice.types[number][1]


def _deciding(choice: Choice, name: str, shape: tuple[int, ...]) -> int | None:
    """Return which of `types` gives a tensor of floating-point numbers its type; None: it stays."""
    in_file = choice.named(name)
    is_counter = prod(shape) == 1 and in_file.rpartition(".")[2] in _COUNTERS
    for number in reversed(range(len(choice.types))):
        glob = choice.types[number][0]
        if Pattern(glob).matches(in_file) and not (glob == ANY and is_counter):
            return number
    return None


def is_chosen(choice: Choice, name: str) -> bool:
    """Tell whether a tensor of the target is taken."""
    name = choice.named(name)
    if choice.include is not None and not any(Pattern(glob).matches(name) for glob in choice.include):
        return False
    return not any(Pattern(glob).matches(name) for glob in choice.exclude)


def require_any(choice: Choice, names: Collection[str]) -> list[str]:
    """Return those of the target's tensors that are taken.

    Raises MapError if a pattern matches none of them, or nothing is left.
    """
    if choice.include is None and not choice.exclude:
        return list(names)
    if choice.may_match_none:
        return [name for name in names if is_chosen(choice, name)]
    for option, globs in (("--include", choice.include or ()), ("--exclude", choice.exclude)):
        for glob in globs:
            pattern = Pattern(glob)
            if not any(pattern.matches(choice.named(name)) for name in names):
                raise MapError(
                    f"{option} {glob} matches no tensor",
                    got=", ".join(islice(names, MAX_NAMED)) + " ..." * (len(names) > MAX_NAMED),
                    remedy="give a pattern of the names that the target has",
                )
    chosen = [name for name in names if is_chosen(choice, name)]
    if not chosen:
        raise MapError(
            "--include and --exclude leave no tensor",
            expected="one tensor or more",
            got=f"none of {len(names)}",
            remedy="exclude less, or include more",
        )
    return chosen


def states_left_out(
    choice: Choice, shapes: Mapping[str, tuple[int, ...]], rules: Rules | None, direction: Direction | None
) -> frozenset[str]:
    """Return the tensors of the target that are state of parameters which `--exclude` leaves out, and go with them.

    shapes: of all tensors of the target.
    """
    patterns = [Pattern(glob) for glob in choice.exclude]
    excluded = {name for name in shapes if any(pattern.matches(choice.named(name)) for pattern in patterns)}
    if not excluded:
        return frozenset()
    others = [name for name in shapes if name not in excluded]
    owner_of = owners(others, shapes, rules, direction, in_target=True)
    return frozenset(name for name in others if not excluded.isdisjoint(owned_by(name, owner_of)))


def all_typed(choice: Choice, tensors: Sequence[Made]) -> Iterator[Made]:
    """Yield tensors in the types that `--dtype` gives them. Raises MapError for a pattern that decides of none."""
    floats = [tensor for tensor in tensors if tensor.dtype in FLOATS]
    deciding = {_deciding(choice, tensor.name, tensor.shape.shape) for tensor in floats} if choice.types else set()
    for number, (glob, dtype) in enumerate(choice.types):
        if glob != ANY and number not in deciding:
            raise _without_effect(choice, glob, dtype, [choice.named(tensor.name) for tensor in floats])
    for tensor in tensors:
        yield tensor._replace(dtype=type_of(choice, tensor.name, tensor.dtype, tensor.shape.shape))


def _without_effect(choice: Choice, glob: str, dtype: DType, floats: Sequence[str]) -> MapError:
    if any(map(Pattern(glob).matches, floats)):
        return MapError(
            f"--dtype {_shown(glob, dtype)} has no effect, since the last pattern that matches counts",
            expected="a type for all before those for some",
            got=", ".join(_shown(*each) for each in choice.types),
            remedy="change the order, or leave it out",
        )
    return MapError(
        f"--dtype {_shown(glob, dtype)} matches no floating-point tensor",
        got=", ".join(floats[:MAX_NAMED]) + (" ..." if len(floats) > MAX_NAMED else "") or "none",
        remedy="give a pattern of the names that the target has",
    )


def _shown(glob: str, dtype: DType) -> str:
    """Return what is behind `--dtype`."""
    name = next((name for name, known in TYPES.items() if known == dtype), str(dtype))
    return name if glob == ANY else f"{glob}={name}"


def constant_typed(choice: Choice, constant: Constant) -> Constant:
    """Return what is made up in the type that `--dtype` gives it. Raises MapError if that cannot hold it."""
    dtype = type_of(choice, constant.name, *constant.kind)
    if dtype == constant.kind.dtype:
        return constant
    value = numbers(constant.element, constant.kind.dtype)[0]
    element = bytes_of(value, dtype, constant.name, constant.where)
    return constant._replace(kind=constant.kind._replace(dtype=dtype), element=element)
