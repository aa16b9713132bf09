"""Read optimizers of a nest in any of torch's forms, and write them (`optimizers_of`, `put`).

torch saves an optimizer in three forms: by numbers, by names of parameters, and flat, with a key for each setting of
each parameter. All become one record. Their tensors are not in it: these go by their names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from reshard_mpi.formats.nest import entries_below, entries_of, pairs_of, value_of
from reshard_mpi.formats.nest.nodes import parsed
from reshard_mpi.groups import grouped
from reshard_mpi.mapping.numbered_state import NO_TRAINING, Training
from reshard_mpi.mapping.rules import Unlike

STATE_KEY, GROUPS = "state", "param_groups"
# What groups call their parameters by: numbers or names, and names beside numbers.
_PARAMETERS, _PARAMETER_NAMES = "params", "param_names"
# What state is kept under: a number, or the name of a parameter.
Key = int | str
NOTHING: Any = {"dict": []}
# Names of modules in a list of torch, and how many modules a model has within one another at the most.
_NUMBER, _MOST_MODULES = re.compile(r"[0-9]{1,9}"), 64


class Form(Enum):
    """What an optimizer of a nest calls its parameters by."""

    NUMBERS = "numbers"
    NAMED_NUMBERS = "numbers beside names, of parameters without state"
    NAMES = "names"
    FLAT = "flat"
    UNKNOWN = "numbers that may be any parameters'"


class Optimizer(NamedTuple):
    """An optimizer of a nest."""

    path: str  # what names of its tensors begin with
    form: Form
    groups: Sequence[Any]  # the dictionaries of groups: settings, and in a form that is not flat the parameters
    parameters: Mapping[str, int]  # the names of its parameters, in order, with the places of their groups
    states: Mapping[Key, Any]  # the values kept of each parameter; what is kept besides has its own key
    keys: Mapping[Key, Key]  # numbers of parameters, by name

    def each_for_itself(self) -> Optimizer:
        """Return the optimizer with a group for each parameter, as a flat one has."""
        places = {name: number for number, name in enumerate(self.parameters)}
        return self._replace(groups=[self.groups[place] for place in self.parameters.values()], parameters=places)


def _nodes(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dictionaries of optimizers in a part of a nest, behind what names in them begin with."""
    if _is_grouped(node):
        yield path, node
        return
    if any(flat is not None and flat.kind == GROUPS for flat in map(_flat_key, entries_of(node) or ())):
        yield path, node
        return
    for key, value in pairs_of(node):
        yield from _nodes(value, f"{path}{key}.")


def _is_grouped(node: Any) -> bool:
    """Tell whether a dictionary is an optimizer with groups of parameters, which have numbers or names."""
    groups = value_of(node, GROUPS)
    if entries_below(node, STATE_KEY) is None or not isinstance(groups, list) or not groups:
        return False
    members = [value_of(group, _PARAMETERS) for group in groups]
    return all(isinstance(keys, list) and all(type(key) in (int, str) for key in keys) for keys in members)


def optimizers_of(root: Any, training: Training) -> list[tuple[Any, Optimizer]]:
    """Return the optimizers of a nest, each behind its dictionary."""
    read: dict[str, tuple[Any, Optimizer]] = {}
    for path, node in _nodes(root):  # a forged nest may have two of one path
        read.setdefault(path, (node, _grouped(path, node, training) if _is_grouped(node) else _flat(path, node)))
    return list(read.values())


def optimizers_in_nest(nest: str | None, training: Training = NO_TRAINING) -> list[Optimizer]:
    """Return the optimizers of a nest's text; none if there is no nest. Raises as `nodes.parsed` does."""
    return [] if nest is None else [optimizer for _, optimizer in optimizers_of(parsed(nest).root, training)]


def unread_in(node: Any, path: str = "") -> Iterator[str]:
    """Yield what names begin with in optimizers of no form of torch: their groups name keys of their state otherwise.

    Args:
        path: what names in this part of a nest begin with.
    """
    keys = {entry[0] for entry in entries_of(value_of(node, STATE_KEY)) or () if isinstance(entry[0], str)}
    if keys and not _is_grouped(node) and not keys.isdisjoint(_texts(value_of(node, GROUPS))):
        yield path
    for key, value in pairs_of(node):
        yield from unread_in(value, f"{path}{key}.")


def _texts(node: Any) -> Iterator[Any]:
    """Yield the keys and values in a part of a nest that are no dictionary, list or tuple."""
    for key, value in pairs_of(node):
        yield key
        if isinstance(value, dict | list):
            yield from _texts(value)
        else:
            yield value


def _grouped(path: str, node: Any, training: Training) -> Optimizer:
    groups = value_of(node, GROUPS)
    members = [value_of(group, _PARAMETERS) for group in groups]
    name_of: Mapping[Key, str] = {key: key for keys in members for key in keys if isinstance(key, str)}
    form = Form.NAMES
    if training.optimizer is not None and training.optimizer.path == path:
        # torch's distributed checkpoints have numbers as text.
        name_of = {key: name for number, name in training.parameters.items() for key in (number, str(number))}
        form = Form.NUMBERS
    elif any(members) and not name_of and not entries_of(value_of(node, STATE_KEY)):
        name_of = _named_beside(groups)
        form = Form.NAMED_NUMBERS
    if any(key not in name_of for keys in members for key in keys):
        form, name_of, members = Form.UNKNOWN, {}, []
    parameters = {name_of[key]: place for place, keys in enumerate(members) for key in keys}
    keys: dict[Key, Key] = {name_of[key]: key for of_group in members for key in of_group}
    states = {}
    for entry in entries_of(value_of(node, STATE_KEY)) or ():
        if _is_read(entry):
            name = name_of.get(entry[0], entry[0])
            states[name], keys[name] = entry[1], entry[0]
    return Optimizer(path, form, groups, parameters, states, {} if form is Form.NAMES else keys)


def _named_beside(groups: Sequence[Any]) -> dict[Key, str]:
    """Return the names that groups say beside the numbers of their parameters, by number; nothing if one is twice."""
    told = [(value_of(group, _PARAMETERS), value_of(group, _PARAMETER_NAMES)) for group in groups]
    lists = [(keys, names) for keys, names in told if isinstance(names, list) and len(names) == len(keys)]
    pairs = [(key, name) for keys, names in lists for key, name in zip(keys, names) if isinstance(name, str)]
    name_of: dict[Key, str] = dict(pairs)
    return name_of if len({*name_of.values()}) == len(pairs) else {}


def _is_read(entry: list[Any]) -> bool:
    """Tell whether an entry of an optimizer's state is no tensor, and has a key that a parameter may have."""
    return len(entry) == 2 and type(entry[0]) in (int, str)


def _flat(path: str, node: Any) -> Optimizer:
    """Return a flat optimizer: parameters of equal settings are a group."""
    settings: dict[str, list[list[Any]]] = {}
    states: dict[Key, Any] = {}
    keys = ((_flat_key(entry), entry[-1]) for entry in entries_of(node) or ())
    flats = [(flat, value) for flat, value in keys if flat is not None]
    for flat, value in sorted(flats, key=lambda each: each[0].kind != GROUPS):  # these are group by group
        of_group = settings.setdefault(flat.parameter, [])
        entries = of_group if flat.kind == GROUPS else states.setdefault(flat.parameter, {"dict": []})["dict"]
        entries.append([flat.setting, value])
    texts = {name: json.dumps(of_group) for name, of_group in settings.items()}
    groups = {text: settings[name] for name, text in texts.items()}
    place = {text: number for number, text in enumerate(groups)}
    parameters = {name: place[text] for name, text in texts.items()}
    return Optimizer(path, Form.FLAT, [{"dict": group} for group in groups.values()], parameters, states, {})


class _FlatKey(NamedTuple):
    """A key of a flat optimizer: `param_groups.fc.weight.lr` has the parameter `fc.weight`."""

    kind: str
    parameter: str
    setting: str


def _flat_key(entry: list[Any]) -> _FlatKey | None:
    """Return the key of an entry that says something of a parameter; None if it does not, or is a tensor."""
    if len(entry) != 2 or not isinstance(entry[0], str):
        return None
    kind, dot, rest = entry[0].partition(".")
    parameter, second_dot, setting = rest.rpartition(".")
    return _FlatKey(kind, parameter, setting) if kind in (STATE_KEY, GROUPS) and dot and second_dot else None


def put(node: Any, optimizer: Optimizer) -> None:
    """Write an optimizer into its dictionary of a nest, in its form."""
    if optimizer.form is Form.FLAT:
        values: dict[str, Any] = {}
        for name, state in optimizer.states.items():
            values |= {f"{STATE_KEY}.{name}.{key}": value for key, value in state["dict"]}
        for name, place in optimizer.parameters.items():
            values |= {f"{GROUPS}.{name}.{key}": value for key, value in optimizer.groups[place]["dict"]}
        if values.keys() == {entry[0] for entry in node["dict"] if _flat_key(entry) is not None}:
            node["dict"] = [[entry[0], values.get(entry[0], entry[-1])][: len(entry)] for entry in node["dict"]]
        else:
            kept = [entry for entry in node["dict"] if _flat_key(entry) is None]
            node["dict"] = [*kept, *map(list, values.items())]
        return
    members: list[list[str]] = [[] for _ in optimizer.groups]
    for name, place in optimizer.parameters.items():
        members[place].append(name)
    groups = optimizer.groups
    if optimizer.form is Form.NAMES:
        groups = [_named(group, names) for group, names in zip(optimizer.groups, members)]
    if all(entry[0] != STATE_KEY for entry in node["dict"]):
        node["dict"].insert(0, [STATE_KEY, {"dict": []}])  # torch takes an optimizer without it for a flat one
    for entry in node["dict"]:
        if entry[0] == STATE_KEY:
            unread = [each for each in entry[1]["dict"] if not _is_read(each)]
            states = [[optimizer.keys.get(key, key), state] for key, state in optimizer.states.items()]
            entry[1:] = [{**entry[1], "dict": [*unread, *states]}]
        elif entry[0] == GROUPS:
            entry[1:] = [groups]


def _named(group: Any, names: list[str]) -> Any:
    """Return a group with these parameters, and no names beside them.

    The names would stand in the order of the source. torch has its own in place of none, but takes over any that are
    there, whatever the order of its parameters.
    """
    entries = [entry for entry in group["dict"] if entry[0] != _PARAMETER_NAMES]
    return {**group, "dict": [[entry[0], names] if entry[0] == _PARAMETERS else entry for entry in entries]}


def in_order_of_modules(parameters: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """Return new names of parameters with the places of their groups, each group in the order that a model has them.

    A model has a module's own parameters before those of the modules in it. Modules of one module are in the order of
    their numbers, or of the source if it has all of them; else in the order of what they are made of. A group that had
    another order in the source keeps the order of what its parameters are made of.

    Args:
        parameters: in the order of what they are made of, with the places of their groups.
        before: the same of the source.
    """
    new_by_group, old_by_group = (grouped((place, name) for name, place in of.items()) for of in (parameters, before))
    ordered: dict[int, Iterator[str]] = {}
    for place, names in new_by_group.items():
        old = old_by_group.get(place, [])
        is_shallow = all(name.count(".") < _MOST_MODULES for name in (*names, *old))
        is_ordered = names != old and is_shallow and _through_modules(old, ()) == old
        ordered[place] = iter(_through_modules(names, old) if is_ordered else names)
    return {next(ordered[place]): place for place in parameters.values()}


def _through_modules(names: Sequence[str], before: Sequence[str]) -> list[str]:
    """Return names in the order of modules, the ones of one module as they come in `before` or by their numbers."""
    inside, known = _by_module(names), _by_module(before)
    own, modules = ([key for key in inside if bool(key[0]) == is_module] for is_module in (False, True))
    passed: list[str] = []
    for dot, first in (*_sorted(own, known), *_sorted(modules, known)):
        rest = inside[dot, first]
        passed += (
            [f"{first}.{name}" for name in _through_modules(rest, known.get((dot, first), ()))] if dot else [first]
        )
    return passed


def _by_module(names: Sequence[str]) -> dict[tuple[str, str], list[str]]:
    """Return the rests of names by what comes before the first dot, with that dot; `("", name)`: it has none."""
    return grouped(((dot, first), rest) for first, dot, rest in (name.partition(".") for name in names))


def _sorted(keys: Sequence[tuple[str, str]], known: Mapping[tuple[str, str], object]) -> list[tuple[str, str]]:
    """Return keys of `_by_module` as known ones come, if all are known; else the numbered ones by their numbers."""
    if all(key in known for key in keys):
        chosen = {*keys}
        return [key for key in known if key in chosen]
    numbered = iter(sorted((key for key in keys if _NUMBER.fullmatch(key[1])), key=lambda key: int(key[1])))
    return [next(numbered) if _NUMBER.fullmatch(key[1]) else key for key in keys]


def without_names(group: Any) -> Any:
    """Return a group of a flat optimizer that does not name its parameters, in a list that torch needs nevertheless."""
    entries = ([key, [] if key == _PARAMETER_NAMES else value] for key, value in group["dict"])
    return {**group, "dict": [*entries]}


def settings_in(group: Any) -> list[list[Any]]:
    """Return the entries of a group that are not about which parameters it has; a tensor's has no value."""
    return [entry for entry in entries_of(group) or () if entry[0] not in (_PARAMETERS, _PARAMETER_NAMES)]


def settings_of_all(training: Training, nest: str | None) -> dict[str, Any]:
    """Return the settings, by name, that the optimizers of a file have for their parameters, in groups or in state."""
    said: dict[str, list[Any]] = {}
    for optimizer in optimizers_in_nest(nest, training):
        groups = [dict(pairs_of({"dict": settings_in(group)})) for group in optimizer.groups]
        in_groups = dict.fromkeys(key for group in groups for key in group)
        for key in in_groups:
            said.setdefault(key, []).extend(group.get(key) for group in groups)
        for name in optimizer.parameters:
            for key, value in pairs_of(optimizer.states.get(name)):
                if key not in in_groups:
                    said.setdefault(key, []).append(value)
    return {
        key: values[0] if all(value == values[0] for value in values) else Unlike(tuple(values))
        for key, values in said.items()
    }
