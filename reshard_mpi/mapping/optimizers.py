"""Read optimizers of a nest in any of torch's forms, and tell what parameters become (`optimizers_of`, `made_in`).

torch saves an optimizer in three forms: by numbers, by names of parameters, and flat, with a key for each setting of
each parameter. All become one record. Their tensors are not in it: these go by their names.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.formats.nest.entries import entries_below, entries_of, pairs_of, value_of
from reshard_mpi.formats.nest.nodes import parsed
from reshard_mpi.mapping.numbered_state import Training
from reshard_mpi.mapping.rules import Unlike

STATE_KEY, GROUPS = "state", "param_groups"
# What groups call their parameters by: numbers or names, and names beside numbers.
_PARAMETERS, _PARAMETER_NAMES = "params", "param_names"
# What state is kept under: a number, or the name of a parameter.
Key = int | str
NOTHING: Any = {"dict": []}


class Form(Enum):
    """What an optimizer of a nest calls its parameters by."""

    NUMBERS = "numbers"
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
    for _, optimizer in [] if nest is None else optimizers_of(parsed(nest).root, training):
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


class MadeParameter(NamedTuple):
    """A parameter that a map has made: its name, and the names of the parameters of the source that are in it."""

    name: str
    sources: frozenset[str]
    whole: str = ""  # its name with what the model's begin with, where `name` lacks it


def made_in(
    path: str,
    source_path: str,
    names: Collection[str],
    tensors: Collection[str],
    parameters: Sequence[MadeParameter],
    where: str,
) -> tuple[list[MadeParameter], frozenset[str]]:
    """Return the parameters made of an optimizer's, all by the names that optimizers have for them, and those left out.

    These are names of tensors; or names as their state has them (`optim.state.fc.weight.exp_avg`); or else the names of
    tensors without what all of the model's begin with (`model.fc.weight`).

    Args:
        path, source_path: what names of tensors in the optimizer begin with, in the target and in the source.
        names: of the optimizer's parameters in the source.
        tensors: names of the source's tensors, be anything made of them or not.
        parameters: all that is made.

    Raises MapError if names fit several models that become different ones.
    """
    known = frozenset(names)
    if beginning_of(known, source_path, tensors) is not None:
        below, gone = made_below(known, known, source_path, tensors, parameters, where)  # whatever else has such a name
        return _called_as_state(below, _followed_by_state(path, source_path, known, parameters)), gone
    made = [parameter for parameter in parameters if not known.isdisjoint(parameter.sources)]
    left = known.difference(*(parameter.sources for parameter in made))
    by_state = _followed_by_state(path, source_path, left, parameters)
    left = left.difference(*(parameter.sources for parameter in by_state))
    whole = frozenset(name for name in left if name in tensors)  # these are left out
    below, gone = made_below(left - whole, known, source_path, tensors, parameters, where)
    return [*made, *by_state, *below], gone | whole


def made_below(
    left: Collection[str],
    names: Collection[str],
    source_path: str,
    tensors: Collection[str],
    parameters: Sequence[MadeParameter],
    where: str,
) -> tuple[list[MadeParameter], frozenset[str]]:
    """Return the parameters made of others whose names lack the beginning that the model's tensors have, and the rest.

    Args:
        left: the parameters; names: these and others of the optimizer. The others as in `made_in`.
    """
    if not left:
        return [], frozenset()
    fitting = _begins(names, source_path, tensors) or _begins(left, source_path, tensors)
    made_of = (tuple(_below(begin, left, parameters)) for begin in fitting)
    made_by_model = {frozenset(made): made for made in made_of if made}  # each in the order of the parameters
    if len(made_by_model) > 1:
        raise MapError(
            "which model an optimizer belongs to cannot be told, and its parameters become different ones",
            expected="one model with these parameters",
            got=", ".join(sorted(fitting)),
            where=where,
            remedy="leave all but one of the models out (--exclude), or the optimizer's state",
        )
    made = [parameter for of_model in made_by_model.values() for parameter in of_model]
    return made, frozenset(left if fitting else ()).difference(*(parameter.sources for parameter in made))


def beginning_of(names: Collection[str], source_path: str, tensors: Collection[str]) -> str | None:
    """Return what names of tensors have before all names of an optimizer; None if several fit, or these are whole."""
    begins = [] if all(name in tensors for name in names) else _begins(names, source_path, tensors)
    return begins[0] if len(begins) == 1 else None


def _begins(names: Collection[str], source_path: str, tensors: Collection[str]) -> list[str]:
    """Return what names of tensors outside of an optimizer have before all of its names."""
    one = next(iter(names))
    others = (name for name in tensors if not (source_path and name.startswith(source_path)))
    begins = {name.removesuffix(one) for name in others if name.endswith(f".{one}")}
    fitting = [begin for begin in begins if all(f"{begin}{name}" in tensors for name in names)]
    # `moment.model.` is state of `model.`.
    return [begin for begin in fitting if not any(begin != other and begin.endswith(other) for other in fitting)]


def _below(begin: str, names: Collection[str], parameters: Sequence[MadeParameter]) -> Iterator[MadeParameter]:
    """Yield the parameters made of a model's, without what its names begin with in the target."""
    of_model = [each for each in parameters if any(name.startswith(begin) for name in each.sources)]
    new_begin = begin_in_target(begin, ((each.name, each.sources) for each in of_model))
    for parameter in of_model:
        of_it = frozenset(name.removeprefix(begin) for name in parameter.sources if name.startswith(begin))
        if not of_it.isdisjoint(names):
            yield MadeParameter(parameter.name.removeprefix(new_begin), of_it, parameter.name)


def is_taken_off(begin: str, made: Iterable[tuple[str, Collection[str]]]) -> bool:
    """Tell whether maps take off what names of a model begin with: what begins so then has a part that is called so.

    If all names still begin so, they lie in the same dictionary of the file as before.

    Args:
        made: the names of what is made of the model's tensors, tied ones too, each with those of its sources.
    """
    sources_of = dict(made)
    if any(name in sources for name, sources in sources_of.items()):
        return False
    return any(not name.startswith(begin) for name in sources_of)


def begin_in_target(begin: str, made: Iterable[tuple[str, Collection[str]]]) -> str:
    """Return what names of a model begin with in the target: its dictionary is moved with all that is in it, or stays.

    Where maps take off what they begin with, and the names go on otherwise, it is nothing: they lie in no dictionary of
    their own.

    Args:
        begin, made: as of `is_taken_off`.
    """
    made = list(made)
    if not is_taken_off(begin, made):
        return begin
    pairs = [(name, source[len(begin) :]) for name, own in made for source in own if source.startswith(begin)]
    begins = {name.removesuffix(end) if f".{name}".endswith(f".{end}") else "" for name, end in pairs}
    return begins.pop() if len(begins) == 1 else ""


def _called_as_state(made: Sequence[MadeParameter], by_state: Sequence[MadeParameter]) -> list[MadeParameter]:
    """Return parameters by the names that equations give to their state, where these are unambiguous."""
    name_of = {parameter.sources: parameter.name for parameter in by_state}
    counts = Counter(parameter.sources for parameter in (*made, *by_state))
    are_paired = {sources for sources, count in counts.items() if sources in name_of and count == 2}
    return [each._replace(name=name_of[each.sources]) if each.sources in are_paired else each for each in made]


def _followed_by_state(
    path: str, source_path: str, names: Collection[str], parameters: Sequence[MadeParameter]
) -> list[MadeParameter]:
    """Return parameters that no tensor is named after, as those are called whose state is made of theirs.

    Args:
        path, source_path: what names of tensors in the optimizer begin with, in the target and in the source.
    """
    begin, source_begin = f"{path}state.", f"{source_path}state."
    names_of: dict[str, set[str]] = {}
    for tensor in parameters if names else ():
        if not tensor.name.startswith(begin):
            continue
        for source in tensor.sources:
            name, dot, key = source.removeprefix(source_begin).rpartition(".")
            while dot and name not in names:
                name, dot, last = name.rpartition(".")
                key = f"{last}.{key}"
            if dot and source.startswith(source_begin) and tensor.name.endswith(f".{key}"):
                names_of.setdefault(tensor.name[len(begin) : -len(key) - 1], set()).add(name)
    return [MadeParameter(name, frozenset(sources)) for name, sources in names_of.items()]


def by_both_names(
    path: str,
    own_names: Collection[str],
    source_path: str,
    source_names: Collection[str],
    tensors: Collection[str],
    parameters: Sequence[MadeParameter],
    where: str,
    *,
    are_whole: bool,
) -> dict[str, frozenset[str]]:
    """Return, for parameters as an optimizer of a nest calls them, their sources as the source's optimizer does.

    Args:
        path, source_path: what names of tensors in these optimizers begin with.
        tensors: names of the source's tensors.
        are_whole: whether `own_names` are names of tensors.
    """
    made, gone = made_in(path, source_path, source_names, tensors, parameters, where)
    if are_whole:
        return {each.whole or each.name: each.sources for each in made}
    sources = {each.name: each.sources for each in made}
    left = [name for name in own_names if name not in sources and name not in gone]
    ends = {whole: name for name in left[:1] for whole in sources if whole.endswith(f".{name}")}
    begins = [whole.removesuffix(name) for whole, name in ends.items()]
    of_all = [begin for begin in begins if all(f"{begin}{name}" in sources for name in own_names)]
    own_sources = dict(sources)
    for name in own_names if len(of_all) == 1 else left:  # one may be the whole name of another
        fitting = {sources[f"{begin}{name}"] for begin in of_all}
        fitting = fitting or {own for whole, own in sources.items() if whole.endswith(f".{name}")}
        if len(fitting) > 1:
            raise MapError(
                "which parameter of the source an optimizer has cannot be told, since several end in its name",
                expected="names that begin as the model's tensors do, or one model with these parameters",
                got=f"{name}: {', '.join(sorted(min(own) for own in fitting))}",
                where=where,
                remedy="give --like a checkpoint whose optimizer has the names of the model's tensors, or leave the"
                " optimizer's state out (--exclude)",
            )
        if fitting:
            own_sources[name] = fitting.pop()
    return own_sources
