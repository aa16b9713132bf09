"""Rename what lies beside tensors in a nest as they are renamed (`renamed`)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Container, Iterable, Sequence
from typing import Any, NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.formats.nest.nodes import decoded, parsed, written
from reshard_mpi.mapping.numbered_state import Training, entries_of, value_of
from reshard_mpi.mapping.optimizers import (
    NOTHING,
    STATE_KEY,
    Form,
    Key,
    MadeParameter,
    Optimizer,
    made_in,
    optimizers_of,
    put,
    without_names,
)


class NewNest(NamedTuple):
    """The text of a nest, and the paths of optimizers in it."""

    text: str
    unknown: Sequence[str]  # nothing tells which parameters their groups have
    known: Sequence[tuple[Optimizer, Optimizer]] = ()  # the others, each with the source's


def renamed(
    nest: str,
    training: Training,
    inventory: Collection[str],
    parameters: Sequence[MadeParameter],
    tensors: Sequence[str],
    where: str,
) -> NewNest:
    """Return a nest in which optimizers have the new names of their parameters: names instead of numbers, too.

    It lacks dictionaries that the maps have emptied, unless all that is made of what they held has names below them:
    names of one model would lie in several.

    Args:
        inventory: the names of the source's tensors; parameters that are called otherwise keep their names.
        parameters: all that is made.
        tensors: the names of all that is made, in order.

    Raises MapError if parameters are put together that an optimizer treats differently.
    """
    root, order = parsed(nest)
    unknown, known = [], []
    for node, optimizer in optimizers_of(root, training):
        path = optimizer.path
        if optimizer.form is Form.UNKNOWN:
            unknown += [path] * (len(optimizer.groups) > 1)  # a lone group has all parameters in any case
            continue
        if optimizer.form is Form.NUMBERS:
            of_it = (parameter for parameter in parameters if not parameter.sources.isdisjoint(optimizer.parameters))
            made = [MadeParameter(name.removeprefix(training.prefix), own) for name, own, _ in of_it]
            gone = frozenset(optimizer.parameters)
        else:
            made, gone = made_in(path, path, optimizer.parameters, inventory, parameters, where)
        new = _renamed(optimizer, made, gone, where)
        known.append((new, optimizer))
        put(node, new)
    _remove_emptied(root, "", sorted((source, name) for name, sources, _ in parameters for source in sources))
    return NewNest(written(root, None if order is None else tensors), unknown, known)


def without_emptied(nest: str, training: Training, tensors: Iterable[str], left: Iterable[str]) -> str:
    """Return a nest whose optimizers have no entry for state that is left out: torch has none that is empty.

    By names such entries stay if no parameter has state: torch would take the groups by their places.

    Args:
        tensors: the names of the tensors that it was made for; left: of those that are left.
    """
    root, order = parsed(nest)
    before, after = sorted(tensors), sorted(left)
    is_changed = False
    for node, optimizer in optimizers_of(root, training):
        states = value_of(node, STATE_KEY)
        entries = entries_of(states) or []
        begins = [f"{optimizer.path}{STATE_KEY}.{entry[0]}." for entry in entries]
        kept = [
            entry
            for entry, begin in zip(entries, begins)
            if entries_of(entry[-1]) != [] or _has_below(after, begin) or not _has_below(before, begin)
        ]
        if len(kept) < len(entries) and (kept or all(type(entry[0]) is int for entry in entries)):
            states["dict"], is_changed = kept, True
    return written(root, None if order is None else decoded(order)) if is_changed else nest


def _has_below(names: Sequence[str], begin: str) -> bool:
    place = bisect_left(names, begin)
    return place < len(names) and names[place].startswith(begin)


def _remove_emptied(node: Any, path: str, names: Sequence[tuple[str, str]]) -> None:
    """Remove such dictionaries from a part of a nest.

    Args:
        path: what names of tensors in it begin with.
        names: of tensors of the source, in order, each with the name of what is made of it.
    """
    entries = entries_of(node) or []
    for entry in [entry for entry in entries if len(entry) == 2]:
        begin = f"{path}{entry[0]}."
        if entries_of(entry[1]) != []:
            _remove_emptied(entry[1], begin, names)
            continue
        first, end = (bisect_left(names, (text, "")) for text in (begin, f"{begin[:-1]}/"))  # "/" comes after "."
        own = names[first:end]
        are_below = [name.startswith(begin) for _, name in own]
        if any(are_below) and not all(are_below) and all(name != source for source, name in own):
            entries.remove(entry)


def _renamed(optimizer: Optimizer, made: Sequence[MadeParameter], gone: Container[str], where: str) -> Optimizer:
    """Return an optimizer with the new names of its parameters.

    Args:
        gone: parameters that are left out, unless anything is made of them; others keep their names.
    """
    new_names: dict[Key, list[str]] = {}
    for parameter in made:
        treated = [
            (optimizer.parameters[name], optimizer.states.get(name, NOTHING))
            for name in parameter.sources
            if name in optimizer.parameters
        ]
        if any(other != treated[0] for other in treated):
            raise treated_differently(parameter.sources, where)
        for name in parameter.sources:
            new_names.setdefault(name, []).append(parameter.name)
    for name in optimizer.parameters:
        new_names.setdefault(name, [] if name in gone else [name])
    parameters = {new: place for name, place in optimizer.parameters.items() for new in new_names[name]}
    states: dict[Key, Any] = {}
    for key, state in optimizer.states.items():
        for new in new_names[key] if key in optimizer.parameters else [key]:
            states.setdefault(new, state)
    if optimizer.form is Form.NUMBERS:  # in the order of the model
        parameters = {parameter.name: parameters[parameter.name] for parameter in made if parameter.name in parameters}
        states = states or dict[Key, Any](dict.fromkeys(parameters, NOTHING))  # torch takes groups by places without
        optimizer = optimizer._replace(form=Form.NAMES, keys={})
    elif optimizer.form is Form.FLAT and [*parameters] != [*optimizer.parameters]:
        optimizer = optimizer._replace(groups=[without_names(group) for group in optimizer.groups])
    return optimizer._replace(parameters=parameters, states=states)


def treated_differently(parameters: Iterable[Key], where: str) -> MapError:
    return MapError(
        "parameters that the optimizer treats differently are put together",
        expected="one group of parameters, and the same numbers in their state",
        got=", ".join(sorted(map(str, parameters))),
        where=where,
        remedy="leave the optimizer's state out (--exclude)",
    )
