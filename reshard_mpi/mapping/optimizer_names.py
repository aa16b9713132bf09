"""Find optimizers in a nest, and what their parameters become, by the names that they have for them (`made_in`).

torch saves an optimizer in three forms: by numbers, by names of parameters, and flat, with a key for each setting of
each parameter. Its names may lack the beginning that the names of the model's tensors have.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.formats.nest.nodes import parsed
from reshard_mpi.mapping.numbered_state import Training, entries_of, parts_of, value_of

GROUPS = "param_groups"
# What groups call their parameters by: numbers or names, and names beside numbers.
NAMES_IN_GROUPS = ("params", "param_names")
# What state is kept under: a number, or the name of a parameter.
Key = int | str


class MadeParameter(NamedTuple):
    """A parameter that a map has made: its name, and the names of the parameters of the source that are in it."""

    name: str
    sources: frozenset[str]


def named_optimizers(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dictionaries of optimizers whose groups name their parameters and whose state goes by these names.

    Args:
        path: what names in this part of a nest begin with; those of each are yielded as well.
    """
    state, groups = entries_of(value_of(node, "state")), value_of(node, GROUPS)
    if state is not None and isinstance(groups, list) and groups:
        names = [value_of(group, "params") for group in groups]
        if all(isinstance(of_group, list) and all(isinstance(name, str) for name in of_group) for of_group in names):
            if all(isinstance(entry[0], str) for entry in state):
                yield path, node
            return
    for key, value in parts_of(node):
        yield from named_optimizers(value, f"{path}{key}.")


def paths_of_optimizers(training: Training, nest: str) -> list[str]:
    """Return what names in the optimizer of a training begin with; without numbers, in optimizers that go by names."""
    if training.optimizer is not None:
        return [training.optimizer.path]
    return [path for path, _ in named_optimizers(parsed(nest)[0])]


class FlatKey(NamedTuple):
    """A key of a flat optimizer: `param_groups.fc.weight.lr` has the parameter `fc.weight`."""

    kind: str
    parameter: str
    setting: str

    def called(self, parameter: str) -> str:
        return f"{self.kind}.{parameter}.{self.setting}"


def flat_key(entry: list[Any]) -> FlatKey | None:
    """Return the key of an entry that says something of a parameter; None if it does not, or is a tensor."""
    if len(entry) != 2 or not isinstance(entry[0], str):
        return None
    kind, dot, rest = entry[0].partition(".")
    parameter, second_dot, setting = rest.rpartition(".")
    return FlatKey(kind, parameter, setting) if kind in ("state", GROUPS) and dot and second_dot else None


def flat_optimizers(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dictionaries of optimizers with a key for each setting of each parameter, and their paths.

    torch makes such of `StateDictOptions(flatten_optimizer_state_dict=True)`.
    """
    if any(flat is not None and flat.kind == GROUPS for flat in map(flat_key, entries_of(node) or ())):
        yield path, node
    for key, value in parts_of(node):
        yield from flat_optimizers(value, f"{path}{key}.")


def flat_settings(node: Any) -> dict[str, dict[tuple[str, str], Any]]:
    """Return the settings of each parameter in a flat optimizer."""
    settings: dict[str, dict[tuple[str, str], Any]] = {}
    for entry in entries_of(node) or ():
        flat = flat_key(entry)
        if flat is not None:
            settings.setdefault(flat.parameter, {})[flat.kind, flat.setting] = entry[1]
    return settings


def settings_of_all(training: Training, nest: str | None) -> dict[str, Any]:
    """Return those settings, by name, that the optimizers of a file have alike for all their parameters.

    Args:
        training: of the file, whose numbered optimizer is asked first.
    """
    if training.optimizer is not None:
        said = [group.settings for group in training.optimizer.groups]
    else:
        root = {} if nest is None else parsed(nest).root
        groups = [group for _, node in named_optimizers(root) for group in value_of(node, GROUPS)]
        flat = [settings for _, node in flat_optimizers(root) for settings in flat_settings(node).values()]
        said = [{key: value for key, value in parts_of(group) if key not in NAMES_IN_GROUPS} for group in groups]
        said += [{key: value for (kind, key), value in settings.items() if kind == GROUPS} for settings in flat]
    first, *others = said or [{}]
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}


def group_flat(root: Any) -> None:
    """Give flat optimizers of a nest the form that goes by names: groups of equal settings, and states."""
    for _, node in list(flat_optimizers(root)):
        states, groups = [], dict[str, tuple[list[Any], list[str]]]()
        for name, settings in flat_settings(node).items():
            of_group = [[key, value] for (kind, key), value in settings.items() if kind == GROUPS]
            groups.setdefault(json.dumps(of_group), (of_group, []))[1].append(name)
            of_state = [[key, value] for (kind, key), value in settings.items() if kind == "state"]
            states.append([name, {"dict": of_state}])
        nodes = [{"dict": [*settings, ["params", names]]} for settings, names in groups.values()]
        node["dict"] = [["state", {"dict": states}], [GROUPS, nodes]]


def states_of(node: Any) -> dict[Key, Any]:
    """Return what an optimizer has of each parameter, by number or name."""
    states = ((key_of_state(entry[0]), entry[1]) for entry in entries_of(node) or () if len(entry) == 2)
    return {key: state for key, state in states if key is not None}


def key_of_state(key: Any) -> Key | None:
    """Return the number or name that a key is: torch's distributed checkpoints have numbers as text."""
    if isinstance(key, str) and key.isdecimal() and len(key) < 10:
        return int(key)
    return key if type(key) is int or isinstance(key, str) else None


def optimizer_at(node: Any, path: str) -> Any:
    """Return the optimizer whose names begin with a path. A forged nest may have other values under the same key."""
    if not path:
        is_one = entries_of(value_of(node, "state")) is not None and isinstance(value_of(node, "param_groups"), list)
        return node if is_one else None
    for key, value in parts_of(node):
        if path.startswith(f"{key}."):
            inner = optimizer_at(value, path[len(f"{key}.") :])
            if inner is not None:
                return inner
    return None


def set_value(node: Any, key: str, value: Any) -> None:
    """Replace the value of a key of a dictionary."""
    for entry in entries_of(node) or ():
        if entry[0] == key:
            entry[1:] = [value]


def made_in(
    path: str,
    source_path: str,
    names: Collection[str],
    tensors: Collection[str],
    parameters: Sequence[MadeParameter],
    where: str,
) -> list[MadeParameter]:
    """Return the parameters made of an optimizer's, all by the names that optimizers have for them.

    These are names of tensors; or names as their state has them (`optim.state.fc.weight.exp_avg`); or else the names of
    tensors without what all of the model's begin with (`model.fc.weight`).

    Args:
        path, source_path: what names of tensors in the optimizer begin with, in the target and in the source.
        names: of the optimizer's parameters in the source.
        tensors: names of the source's tensors.
        parameters: all that is made.

    Raises MapError if names fit several models that become different ones.
    """
    known = frozenset(names)
    made = [parameter for parameter in parameters if not known.isdisjoint(parameter.sources)]
    left = known.difference(*(parameter.sources for parameter in made))
    by_state = _followed_by_state(path, source_path, left, parameters)
    left = left.difference(*(parameter.sources for parameter in by_state))
    return [*made, *by_state, *_made_below(left, known, source_path, tensors, parameters, where)]


def _made_below(
    left: Collection[str],
    names: Collection[str],
    source_path: str,
    tensors: Collection[str],
    parameters: Sequence[MadeParameter],
    where: str,
) -> list[MadeParameter]:
    """Return the parameters made of others whose names lack the beginning that the model's tensors have.

    Args:
        left: the parameters; names: these and others of the optimizer. The others as in `made_in`.
    """
    if not left:
        return []
    one = next(iter(left))
    others = (name for name in tensors if not (source_path and name.startswith(source_path)))
    begins = {name.removesuffix(one) for name in others if name.endswith(f".{one}")}
    models = [begin for begin in begins if all(f"{begin}{name}" in tensors for name in left)]
    fitting = [begin for begin in models if all(f"{begin}{name}" in tensors for name in names)] or models
    # `moment.model.` is state of `model.`.
    fitting = [begin for begin in fitting if not any(begin != other and begin.endswith(other) for other in fitting)]
    made_of = (tuple(_below(begin, left, parameters)) for begin in fitting)
    made_by_model = {frozenset(made): made for made in made_of}  # each in the order of the parameters
    if len(made_by_model) > 1:
        raise MapError(
            "which model an optimizer belongs to cannot be told, and its parameters become different ones",
            expected="one model with these parameters",
            got=", ".join(sorted(fitting)),
            where=where,
            remedy="leave all but one of the models out (--exclude), or the optimizer's state",
        )
    return [parameter for made in made_by_model.values() for parameter in made]


def _below(begin: str, names: Collection[str], parameters: Sequence[MadeParameter]) -> Iterator[MadeParameter]:
    """Yield the parameters made of a model's, all without the beginning of the model's names."""
    for parameter in parameters:
        of_it = frozenset(name.removeprefix(begin) for name in parameter.sources if name.startswith(begin))
        if not of_it.isdisjoint(names):
            yield MadeParameter(parameter.name.removeprefix(begin), of_it)


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
    parameters: Sequence[MadeParameter],
    where: str,
) -> dict[str, frozenset[str]]:
    """Return, for parameters as an optimizer of a nest calls them, their sources as the source's optimizer does.

    Args:
        path, source_path: what names of tensors in these optimizers begin with.
    """
    tensors = frozenset(source for parameter in parameters for source in parameter.sources)
    made = made_in(path, source_path, source_names, tensors, parameters, where)
    sources = {parameter.name: parameter.sources for parameter in made}
    whole_names = [parameter.name for parameter in made]
    for name in own_names:
        if name not in sources:
            fitting = {sources[whole] for whole in whole_names if whole.endswith(f".{name}")}
            if len(fitting) == 1:
                (sources[name],) = fitting
    return sources
