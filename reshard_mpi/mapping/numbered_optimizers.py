"""Read a torch optimizer's numbered groups from a nest (`optimizers_in`), and name their parameters in a model.

Each group of parameters is a list of numbers in `param_groups`, and in newer versions of torch a list of names, too.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

from reshard_mpi.formats.nest import BUFFERS, entries_below, pairs_of, value_of
from reshard_mpi.mapping.direction import TemplateShapes

# What torch calls what a module keeps besides its tensors, behind the module's name (torch.nn.Module.get_extra_state).
EXTRA_STATE = "_extra_state"
# Tensors of a model that no optimizer changes. Users' own are not known if a parameter could have their type; where
# there are any, the numbers do not come out.
BUFFER_NAMES = (*BUFFERS, EXTRA_STATE)
# What DistributedDataParallel, torch.compile, FSDP and trainers put before the names of all parameters of a model.
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "model")
OF_OPTIMIZER = ("state", "param_groups")


class ParameterGroup(NamedTuple):
    """The numbers of parameters that an optimizer treats alike, and their names if the file says these."""

    numbers: tuple[int, ...]
    names: tuple[str, ...] | None


class Numbered(NamedTuple):
    """A dictionary of an optimizer."""

    path: str  # what names of its tensors begin with
    groups: tuple[ParameterGroup, ...]
    has_values: bool = False  # whether its state has values besides tensors, such as counts of steps


def optimizers_in(node: Any, path: str) -> Iterator[Numbered]:
    """Yield the dictionaries of optimizers in a part of a nest. path: what names in this part begin with."""
    groups = value_of(node, "param_groups")
    if entries_below(node, "state") is not None and isinstance(groups, list) and groups:
        read_groups = [_group(group) for group in groups]
        is_told = value_of(node, "state") is not None or all(group and group.names is not None for group in read_groups)
        if all(read_groups) and is_told:
            states = (pairs_of(state) for _, state in pairs_of(value_of(node, "state")))
            has_values = any(value is not None for pairs in states for _, value in pairs)
            yield Numbered(path, tuple(group for group in read_groups if group is not None), has_values)
            return
    for key, value in pairs_of(node):
        yield from optimizers_in(value, f"{path}{key}.")


def _group(node: Any) -> ParameterGroup | None:
    numbers, names = value_of(node, "params"), value_of(node, "param_names")
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        return None
    is_named = isinstance(names, list) and len(names) == len(numbers) and all(isinstance(name, str) for name in names)
    return ParameterGroup(tuple(numbers), tuple(names) if is_named else None)


def begins_of(path: str) -> tuple[str, ...]:
    """Return what names in an optimizer's dictionary begin with. Beside an optimizer at the root there are models."""
    return (path,) if path else tuple(f"{key}." for key in OF_OPTIMIZER)


def state_of(optimizer: Numbered, name: str) -> tuple[int, str] | None:
    """Return the number and the key of a tensor of an optimizer's state; None if it is none."""
    begin = f"{optimizer.path}state."
    if not name.startswith(begin):
        return None
    number, dot, key = name[len(begin) :].partition(".")
    return (int(number), key) if dot and number.isdecimal() and len(number) < 10 else None


def parameters_of_numbers(
    optimizer: Numbered,
    path: str,
    own: Sequence[str],
    shapes: TemplateShapes,
    no_parameters: Container[str],
    inner: tuple[str, ...] | None,
) -> tuple[tuple[str, ...], str]:
    """Return the names of the parameters in the order of their numbers, or none and an error text.

    Args:
        no_parameters: tensors that are others once more, or have a type that torch does not train.
        inner: paths of dictionaries in the model's, which are looked at by themselves, if the optimizer's names and
            those of the model may begin otherwise, as behind a wrapper; None if they may not.
    """
    numbers = [number for group in optimizer.groups for number in group.numbers]
    named = [group.names for group in optimizer.groups]
    if len(set(numbers)) < len(numbers):
        return (), "a number is in several groups"
    if all(names is not None for names in named):
        told = [name for names in named for name in names or ()]
        begin, ends = (path, told) if inner is None else _behind_wrapper(path, told, own, inner)
        parameters = [f"{begin}{name}" for name in ends]
        absent = [name for name in parameters if name not in shapes]
        if absent:
            return (), f"no {absent[0]}"
    else:
        parameters = [name for name in own if name.rpartition(".")[2] not in BUFFER_NAMES and name not in no_parameters]
        if len(optimizer.groups) > 1:
            return (), f"{len(optimizer.groups)} groups of parameters, and no names in them"
        if len(parameters) != len(numbers) or numbers != sorted(numbers):
            return (), f"{len(parameters)} parameters, and {len(numbers)} numbers"
    name_of = dict(zip(numbers, parameters))
    states = [(name, *state) for name in shapes if (state := state_of(optimizer, name)) is not None]
    unknown = next((name for name, number, _ in states if number not in name_of), None)
    if unknown is not None:
        return (), f"{unknown}, whose number is in no group"
    # A count of steps has one element, whatever the parameter. A key with the shape of one parameter has it of all.
    like_parameters = {key for name, number, key in states if prod(shapes[name]) > 1}
    for name, number, key in states:
        parameter = name_of[number]
        if shapes[name] != shapes[parameter] and (prod(shapes[name]) != 1 or key in like_parameters):
            return (), f"{name} {list(shapes[name])} for {parameter} {list(shapes[parameter])}"
    return tuple(parameters), ""


def _behind_wrapper(
    path: str, names: Sequence[str], own: Sequence[str], inner: tuple[str, ...]
) -> tuple[str, Sequence[str]]:
    """Return what names of a model begin with, and how an optimizer's go on: `module.` is before either, or neither.

    Another first part of the optimizer's names may be that of another model.

    Args:
        path: what is before all of the model's; they are looked for with no more if nothing else fits them.
        own: the names of the model; inner: what names begin with in dictionaries that its own has.
    """
    parted = [name.partition(".") for name in names]
    ends_of_names = [names]
    if any({first for first, _, _ in parted} == {wrapper} for wrapper in WRAPPERS):
        ends_of_names.append([rest for _, _, rest in parted])
    known = frozenset(own)
    for ends in ends_of_names if names else ():
        begins = {name.removesuffix(ends[0]) for name in own if f".{name}".endswith(f".{ends[0]}")}
        fitting = [
            begin
            for begin in begins
            if begin.startswith(path) and not begin.startswith(inner) and all(f"{begin}{end}" in known for end in ends)
        ]
        if len(fitting) == 1:
            return fitting[0], ends
    return path, names
