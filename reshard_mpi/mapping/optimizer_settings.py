"""Carry an optimizer's settings along with its parameters: groups, and numbers in their state (`carried_into`).

Tensors follow equations. What lies beside them in the nest does so here: with numbers (`with_names`), with names of
parameters (`with_other_names`), and into the nest of another checkpoint (`carried_into`).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.formats.nest.nodes import decoded, parsed, written
from reshard_mpi.mapping.numbered_state import Training, entries_of, optimizers_in, parts_of, value_of
from reshard_mpi.mapping.optimizer_names import (
    GROUPS,
    NAMES_IN_GROUPS,
    Key,
    MadeParameter,
    by_both_names,
    flat_key,
    flat_optimizers,
    flat_settings,
    group_flat,
    key_of_state,
    made_in,
    named_optimizers,
    optimizer_at,
    set_value,
    states_of,
)

# What numbers and names parameters, which belongs to a file and is not carried to another.
_OF_PARAMETERS = (*NAMES_IN_GROUPS, "state")
# Lists in the state of torch's schedulers with a value for each group (torch.optim.lr_scheduler, 2.13).
_BY_GROUP = frozenset(("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums"))
_VALUES = {"tuple", "bytes", "float", "global", "call"}


def with_names(
    nest: str, training: Training, parameters: Sequence[MadeParameter], tensors: Sequence[str], where: str
) -> str:
    """Return a nest in which the optimizer's state goes by the names of the parameters that are made, not by numbers.

    Args:
        tensors: the names of all that is made, in order.

    Raises MapError if parameters of several groups are put together.
    """
    root, order = parsed(nest)
    names_in_order = None if order is None else tensors
    optimizer = training.optimizer
    if optimizer is None:
        return written(root, names_in_order)
    number_of = {name: number for number, name in training.parameters.items()}
    group_of = {number: index for index, group in enumerate(optimizer.groups) for number in group.numbers}
    members: list[list[str]] = [[] for _ in optimizer.groups]
    states = []
    node = optimizer_at(root, optimizer.path)
    values = states_of(value_of(node, "state"))
    for parameter in parameters:
        numbers = sorted(number_of[name] for name in parameter.sources if name in number_of)
        groups = {group_of[number] for number in numbers}
        if not numbers:
            continue
        state = values.get(numbers[0], {"dict": []})
        if len(groups) > 1 or any(values.get(number, {"dict": []}) != state for number in numbers):
            raise _treated_differently(", ".join(sorted(parameter.sources)), where)
        members[groups.pop()].append(parameter.name)
        states.append([parameter.name, state])
    set_value(node, "state", {"dict": states})
    for group, names in zip(value_of(node, "param_groups"), members):
        set_value(group, "params", names)
        if value_of(group, "param_names") is not None:
            set_value(group, "param_names", names)
    return written(root, names_in_order)


def with_other_names(
    nest: str, inventory: Container[str], parameters: Sequence[MadeParameter], tensors: Sequence[str], where: str
) -> str:
    """Return a nest in which optimizers whose state goes by names have their parameters' new names.

    Args:
        inventory: the names of the source's tensors; parameters that are called otherwise keep their names.
        parameters: all that is made.
        tensors: as in `with_names`, which see for the errors.
    """
    root, order = parsed(nest)
    sources = frozenset(source for parameter in parameters for source in parameter.sources)
    for path, node in named_optimizers(root):
        groups = value_of(node, GROUPS)
        group_of = {name: index for index, group in enumerate(groups) for name in value_of(group, "params")}
        states = {entry[0]: entry for entry in entries_of(value_of(node, "state")) or () if isinstance(entry[0], str)}
        treated = {name: (index, states.get(name, [name, {"dict": []}])[1:]) for name, index in group_of.items()}
        becomes = _Becoming(inventory, made_in(path, path, group_of, sources, parameters, where))
        becomes.require_treated_alike(treated, where)
        entries: dict[Any, list[Any]] = {}
        for name, entry in states.items():
            for new in becomes.names(name) if name in group_of else [name]:
                entries.setdefault(new, [new, *entry[1:]])
        set_value(node, "state", {"dict": list(entries.values())})
        for group in groups:
            for key in NAMES_IN_GROUPS:
                names = value_of(group, key)
                if isinstance(names, list):
                    set_value(group, key, list(dict.fromkeys(new for name in names for new in becomes.names(name))))
    for path, node in flat_optimizers(root):
        settings = flat_settings(node)
        becomes = _Becoming(inventory, made_in(path, path, settings, sources, parameters, where))
        becomes.require_treated_alike(settings, where)
        entries = {}
        for entry in node["dict"]:
            flat = flat_key(entry)
            names = [entry[0]] if flat is None else [flat.called(name) for name in becomes.names(flat.parameter)]
            for new in names:
                entries.setdefault(new, [new, *entry[1:]])
        node["dict"] = list(entries.values())
    return written(root, None if order is None else tensors)


class _Becoming(NamedTuple):
    """The new names of an optimizer's parameters."""

    inventory: Container[str]  # the names of the source's tensors
    made: Sequence[MadeParameter]

    def names(self, name: Any) -> list[Any]:
        """Return the new names of a parameter; its own if no tensor is called by it, and none is made of it."""
        of_it = [parameter.name for parameter in self.made if name in parameter.sources]
        return of_it if of_it or (isinstance(name, str) and name in self.inventory) else [name]

    def require_treated_alike(self, treated: Mapping[str, Any], where: str) -> None:
        """Raise MapError if parameters are put together that an optimizer treats differently, as `treated` says."""
        for parameter in self.made:
            treatments = [treated[name] for name in parameter.sources if name in treated]
            if any(other != treatments[0] for other in treatments):
                raise _treated_differently(", ".join(sorted(parameter.sources)), where)


def carried_into(
    nest: str, source: str | None, training: Training, theirs: Training, parameters: Sequence[MadeParameter], where: str
) -> str:
    """Return a nest with those values of the source's that both have, numbers and names of parameters apart.

    Args:
        training: of the source.
        theirs: of the nest.
        parameters: of the nest, by their names there. What an optimizer says of a parameter goes where the parameter
            goes: numbers and groups may be others in the nest. Groups that nothing tells apart stay as they are in the
            nest (`groups_left_alone`).

    Raises MapError if parameters of different numbers in their state are put together, or if a setting that is a tensor
    belongs to other parameters in the nest.
    """
    if source is None:
        return nest
    root, order = parsed(nest)
    source_root = parsed(source).root
    carried = _carried(root, source_root)
    flat, flat_of_source = dict(flat_optimizers(root)), dict(flat_optimizers(source_root))
    settings = {path: flat_settings(node) for path, node in flat_of_source.items()}
    if flat_of_source and not flat:
        group_flat(source_root)
    elif flat and not flat_of_source:
        settings = {held.path: _settings_of(held, source_root) for held in _held(source_root, training)}
    for held, of_source in _pairs_of(list(_held(root, theirs)), list(_held(source_root, training))):
        sources = _sources_of(held, of_source, parameters, where)
        _require_no_lists_by_group(source_root, held, of_source, sources, where)
        into, own, node = (
            optimizer_at(carried, held.path),
            optimizer_at(root, held.path),
            optimizer_at(source_root, of_source.path),
        )
        set_value(into, "state", _carried_states(value_of(own, "state"), value_of(node, "state"), sources, where))
        set_value(
            into, "param_groups", _carried_groups(held, of_source, value_of(own, "param_groups"), node, sources, where)
        )
    for path, node in flat_optimizers(carried):
        other = next(iter(settings)) if len(flat) == len(settings) == 1 else path
        if other in settings:
            _carry_flat(node, flat[path], path, settings[other], other, parameters, where)
    for path in groups_left_alone(nest, source, training, theirs):
        set_value(optimizer_at(carried, path), "param_groups", value_of(optimizer_at(root, path), "param_groups"))
    return written(carried, None if order is None else decoded(order))


def groups_left_alone(nest: str, source: str, training: Training, theirs: Training) -> list[str]:
    """Return the paths of optimizers of a nest whose groups have parameters that are not known: they have no state.

    A lone group has all parameters in any case.
    """
    roots = parsed(nest).root, parsed(source).root
    pairs = _pairs_of(list(_held(roots[0], theirs)), list(_held(roots[1], training)))
    known = {held.path for held, _ in pairs}
    own, others = (
        {path: len(value_of(optimizer_at(root, path), GROUPS)) for path in _paths_of_grouped(root)} for root in roots
    )
    return [path for path in own if path in others and path not in known and max(own[path], others[path]) > 1]


def _paths_of_grouped(root: Any) -> list[str]:
    """Return the paths of all optimizers of a nest that have groups."""
    named = (path for path, _ in named_optimizers(root))
    return list(dict.fromkeys((*(optimizer.path for optimizer in optimizers_in(root, "")), *named)))


class _Held(NamedTuple):
    """An optimizer of a nest that has state."""

    path: str  # what names of its tensors begin with
    groups: tuple[Mapping[Key, str], ...]  # the names of parameters by their keys, which are numbers or names


def _held(root: Any, training: Training) -> Iterator[_Held]:
    """Yield the optimizer of a training, or else optimizers whose state goes by names."""
    if training.optimizer is not None:
        name_of = training.parameters
        groups = training.optimizer.groups
        yield _Held(training.optimizer.path, tuple({key: name_of[key] for key in group.numbers} for group in groups))
        return
    for path, node in named_optimizers(root):
        names = [value_of(group, "params") for group in value_of(node, GROUPS)]
        yield _Held(path, tuple({_named(name): name for name in of_group} for of_group in names))


def _settings_of(held: _Held, root: Any) -> dict[str, dict[tuple[str, str], Any]]:
    """Return what an optimizer says of each parameter, as a flat one says it."""
    node = optimizer_at(root, held.path)
    states = states_of(value_of(node, "state"))
    settings: dict[str, dict[tuple[str, str], Any]] = {}
    for group, of_group in zip(held.groups, value_of(node, GROUPS)):
        in_group = {(GROUPS, key): value for key, value in parts_of(of_group) if key not in NAMES_IN_GROUPS}
        for key, name in group.items():
            in_state = {("state", setting): value for setting, value in parts_of(states.get(key))}
            settings[name] = {**in_group, **in_state}
    return settings


def _pairs_of(held: Sequence[_Held], of_source: Sequence[_Held]) -> list[tuple[_Held, _Held]]:
    """Pair the optimizers of both sides: the only ones, or the ones with equal paths."""
    if len(held) == len(of_source) == 1:
        return [(held[0], of_source[0])]
    return [(own, other) for own in held for other in of_source if own.path == other.path]


def _sources_of(held: _Held, of_source: _Held, parameters: Sequence[MadeParameter], where: str) -> dict[Key, list[Key]]:
    """Return, for the key of each parameter of a nest, the keys of the source parameters in it."""
    key_of = {name: key for group in of_source.groups for key, name in group.items()}
    place = {key: number for number, key in enumerate(key_of.values())}
    sources = by_both_names(
        held.path, [name for group in held.groups for name in group.values()], of_source.path, key_of, parameters, where
    )
    keys_of: dict[Key, list[Key]] = {}
    for key, name in ((key, name) for group in held.groups for key, name in group.items()):
        themselves = frozenset((name,)) if key == name else frozenset()  # no tensor may have the name
        of_it = sources.get(name, sources.get(str(key), themselves))  # state may go by numbers in the file
        keys_of[key] = sorted((key_of[source] for source in of_it if source in key_of), key=place.__getitem__)
    return keys_of


def _require_no_lists_by_group(
    source: Any, held: _Held, of_source: _Held, sources: Mapping[Key, Sequence[Key]], where: str
) -> None:
    """Raise MapError if a scheduler has a value for each group, and the groups of a nest are in another order.

    Args:
        source: the source's nest.
        sources: for the key of each parameter of the nest, the keys of the source's.
    """
    group_of = {key: number for number, group in enumerate(of_source.groups) for key in group}
    origins = [{group_of[key] for own in group for key in sources.get(own, ())} for group in held.groups]
    if all(origin <= {number} for number, origin in enumerate(origins)) and len(origins) == len(of_source.groups):
        return
    for path, values in _lists_by_group(source):
        if any(value != values[0] for value in values[1:]):
            raise MapError(
                "a scheduler has values for groups of parameters, which the other checkpoint has in another order",
                expected="the same groups in the same order",
                got=path,
                where=where,
                remedy="give --like a checkpoint with the groups in this order, or convert without --like",
            )


def _lists_by_group(node: Any, path: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield the paths and values of lists that torch's schedulers have by group."""
    for key, value in parts_of(node):
        if key in _BY_GROUP and isinstance(value, list) and value:
            yield f"{path}{key}", value
        yield from _lists_by_group(value, f"{path}{key}.")


def _carry_flat(
    carried: Any,
    own: Any,
    path: str,
    settings: Mapping[str, Mapping[tuple[str, str], Any]],
    source_path: str,
    parameters: Sequence[MadeParameter],
    where: str,
) -> None:
    """Give each parameter of a flat optimizer the settings of its sources.

    Args:
        own: the optimizer as it is in the nest, for what the source does not say.
        settings: of the source.
    """
    sources = by_both_names(path, flat_settings(own), source_path, settings, parameters, where)
    own_values = {entry[0]: entry[1:] for entry in entries_of(own) or ()}
    for entry in entries_of(carried) or ():
        flat = flat_key(entry)
        if flat is None:
            continue
        of_it = [settings[name] for name in sources.get(flat.parameter, {flat.parameter}) if name in settings]
        if any(other != of_it[0] for other in of_it):
            raise _treated_differently(", ".join(sorted(sources[flat.parameter])), where)
        is_said = of_it and (flat.kind, flat.setting) in of_it[0]
        entry[1:] = [of_it[0][flat.kind, flat.setting]] if is_said else own_values[entry[0]]


def _carried_states(own: Any, source: Any, sources: Mapping[Key, Sequence[Key]], where: str) -> Any:
    """Return the states of parameters with the numbers and other values of the source's parameters in them."""
    states = states_of(source)
    entries = []
    for entry in entries_of(own) or ():
        key = key_of_state(entry[0])
        of_source = () if key is None else sources.get(key, ())
        if len(entry) == 2 and of_source:
            of_sources = [states.get(other, {"dict": []}) for other in of_source]
            if any(state != of_sources[0] for state in of_sources):
                got = ", ".join(map(str, of_source))
                raise _treated_differently(f"the parameters {got}", where)
            entry = [entry[0], _carried(entry[1], of_sources[0])]
        entries.append(entry)
    return {"dict": entries}


def _named(name: str) -> Key:
    key = key_of_state(name)
    return name if key is None else key


def _carried_groups(
    held: _Held, of_source: _Held, own: Any, source: Any, sources: Mapping[Key, Sequence[Key]], where: str
) -> list[Any]:
    """Return groups of parameters with those settings that all groups of their parameters in the source say alike.

    Raises MapError for a setting that is a tensor, which stays at its place, if the parameters there are others.
    """
    nodes = value_of(source, GROUPS)
    node_of = {key: node for group, node in zip(of_source.groups, nodes) for key in group}
    carried: list[Any] = []
    for node, group in zip(own, held.groups):
        theirs = [node_of[key] for ours in group for key in sources.get(ours, ())]
        first, *others = list({id(other): other for other in theirs}.values()) or [{"dict": []}]
        alike = [
            entry for entry in entries_of(first) or () if all(entry in (entries_of(other) or ()) for other in others)
        ]
        if any(len(entry) == 1 for entry in (*(entries_of(first) or ()), *(entries_of(node) or ()))) and not (
            len(carried) < len(nodes) and first is nodes[len(carried)] and not others
        ):
            raise MapError(
                "a setting of the optimizer is a tensor, and its group has other parameters in the other checkpoint",
                expected="groups of the same parameters in the same order, or settings that are plain numbers",
                got=f"group {len(carried)} of {held.path}param_groups",
                where=where,
                remedy="give --like a checkpoint with the groups in this order, or leave the optimizer out (--exclude)",
            )
        carried.append(_carried(node, {"dict": alike}))
    return carried


def _treated_differently(got: str, where: str) -> MapError:
    return MapError(
        "parameters that the optimizer treats differently are put together",
        expected="one group of parameters, and the same numbers in their state",
        got=got,
        where=where,
        remedy="leave the optimizer's state out (--exclude)",
    )


def _carried(node: Any, source: Any) -> Any:
    if entries_of(node) is not None and entries_of(source) is not None:
        return {**node, "dict": [_carried_entry(entry, source) for entry in node["dict"]]}
    if isinstance(node, list) and isinstance(source, list):
        if len(node) == len(source):
            return [_carried(own, other) for own, other in zip(node, source)]
        return source if all(map(_is_value, (*node, *source))) else node
    return source if _is_value(node) and _is_value(source) else node


def _is_value(node: Any) -> bool:
    """Tell whether a part of a nest is a value in which there is no tensor."""
    if not isinstance(node, dict):
        return not isinstance(node, list)
    return node.keys() & _VALUES != set() and not _has_tensor(node)


def _has_tensor(node: Any) -> bool:
    """Tell whether a part of a nest has a tensor in it: an item of an array, or an entry without a value."""
    if isinstance(node, list):
        return any(map(_has_tensor, node))
    if not isinstance(node, dict):
        return False
    is_entry = any(len(entry) == 1 for entry in entries_of(node) or ())
    return "tensor" in node or is_entry or any(map(_has_tensor, node.values()))


def _carried_entry(entry: list[Any], source: Any) -> list[Any]:
    key = entry[0]
    if len(entry) == 2 and type(key) in (str, int) and key not in _OF_PARAMETERS:
        for other in entries_of(source) or ():
            if len(other) == 2 and other[0] == key and type(other[0]) is type(key):
                if key in _BY_GROUP and isinstance(entry[1], list) and isinstance(other[1], list):
                    return [entry[0], _for_groups(entry[1], other[1])]
                return [entry[0], _carried(entry[1], other[1])]
    return entry


def _for_groups(own: list[Any], source: list[Any]) -> list[Any]:
    """Return a scheduler's values by group as the source has them; its own if more or fewer groups have unlike ones."""
    if len(own) == len(source):
        return _carried(own, source)  # type: ignore[no-any-return]
    return [source[0]] * len(own) if source and all(value == source[0] for value in source) else own
