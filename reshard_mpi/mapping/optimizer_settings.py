"""Carry an optimizer's settings along with its parameters: groups, and numbers in their state (`carried_into`).

Tensors follow equations. What lies beside them in the nest does so here: under the new names of parameters
(`renamed`), and into the nest of another checkpoint (`carried_into`).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.formats.nest.nodes import decoded, parsed, written
from reshard_mpi.mapping.numbered_state import Training, entries_of, parts_of
from reshard_mpi.mapping.optimizer_forms import (
    GROUPS,
    NOTHING,
    STATE,
    Form,
    Key,
    Optimizer,
    optimizers_of,
    put,
    settings_in,
)
from reshard_mpi.mapping.optimizer_names import MadeParameter, by_both_names, made_in

# Lists in the state of torch's schedulers with a value for each group (torch.optim.lr_scheduler, 2.13).
_BY_GROUP = frozenset(("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums"))


class NewNest(NamedTuple):
    """The text of a nest, and the paths of optimizers in it."""

    text: str
    unknown: Sequence[str]  # nothing tells which parameters their groups have
    by_names: Sequence[str] = ()  # they go by names of parameters


def renamed(
    nest: str,
    training: Training,
    inventory: Container[str],
    parameters: Sequence[MadeParameter],
    tensors: Sequence[str],
    where: str,
) -> NewNest:
    """Return a nest in which optimizers have the new names of their parameters: names instead of numbers, too.

    Args:
        inventory: the names of the source's tensors; parameters that are called otherwise keep their names.
        parameters: all that is made.
        tensors: the names of all that is made, in order.

    Raises MapError if parameters are put together that an optimizer treats differently.
    """
    root, order = parsed(nest)
    sources = frozenset(source for parameter in parameters for source in parameter.sources)
    unknown, by_names = [], []
    for node, optimizer in optimizers_of(root, training):
        path = optimizer.path
        if optimizer.form is Form.UNKNOWN:
            unknown += [path] * (len(optimizer.groups) > 1)  # a lone group has all parameters in any case
            continue
        if optimizer.form is Form.NUMBERS:
            of_it = (parameter for parameter in parameters if not parameter.sources.isdisjoint(optimizer.parameters))
            made = [MadeParameter(name.removeprefix(training.prefix), own) for name, own in of_it]
        else:
            made = made_in(path, path, optimizer.parameters, sources, parameters, where)
        put(node, _renamed(optimizer, made, inventory, where))
        by_names += [path] * (optimizer.form is not Form.FLAT)
    return NewNest(written(root, None if order is None else tensors), unknown, by_names)


def _renamed(optimizer: Optimizer, made: Sequence[MadeParameter], inventory: Container[str], where: str) -> Optimizer:
    new_names: dict[Key, list[str]] = {}
    for parameter in made:
        treated = [
            (optimizer.parameters[name], optimizer.states.get(name, NOTHING))
            for name in parameter.sources
            if name in optimizer.parameters
        ]
        if any(other != treated[0] for other in treated):
            raise _treated_differently(parameter.sources, where)
        for name in parameter.sources:
            new_names.setdefault(name, []).append(parameter.name)
    for name in optimizer.parameters:
        new_names.setdefault(name, [] if name in inventory else [name])
    parameters = {new: place for name, place in optimizer.parameters.items() for new in new_names[name]}
    states: dict[Key, Any] = {}
    for key, state in optimizer.states.items():
        for new in new_names[key] if key in optimizer.parameters else [key]:
            states.setdefault(new, state)
    if optimizer.form is Form.NUMBERS:  # in the order of the model
        parameters = {parameter.name: parameters[parameter.name] for parameter in made if parameter.name in parameters}
        states = dict[Key, Any](dict.fromkeys(parameters, NOTHING)) | states
        optimizer = optimizer._replace(form=Form.NAMES, keys={})
    return optimizer._replace(parameters=parameters, states=states)


def carried_into(
    nest: str, source: str, training: Training, theirs: Training, parameters: Sequence[MadeParameter], where: str
) -> NewNest:
    """Return a nest with those values of the source's that both have, numbers and names of parameters apart.

    Args:
        training: of the source.
        theirs: of the nest.
        parameters: of the nest, by their names there. What an optimizer says of a parameter goes where the parameter
            goes: numbers and groups may be others in the nest. Several groups whose parameters are not known in both
            stay as they are in the nest.

    Raises MapError if parameters of different numbers in their state are put together, or if a setting that is a tensor
    belongs to other parameters in the nest.
    """
    root, order = parsed(nest)
    source_root = parsed(source).root
    counts, unknown = [], []
    done: set[int] = set()
    for (node, own), (source_node, of_source) in _pairs(
        optimizers_of(root, theirs), optimizers_of(source_root, training)
    ):
        if own.form is Form.FLAT:
            own = own.each_for_itself()
        are_known = Form.UNKNOWN not in (own.form, of_source.form)
        sources = _sources_of(own, of_source, parameters, where) if are_known else {}
        node["dict"] = _carried_entries(node, source_node, done)
        states = {
            key: _carried_state(state, of_source, sources.get(str(key), ()), where) for key, state in own.states.items()
        }
        put(node, own._replace(states=states, groups=_carried_groups(own, of_source, sources, where)))
        done.add(id(node))
        if are_known and own.form is not Form.FLAT and not _are_same_groups(own, of_source, sources):
            counts.append((len(own.groups), len(of_source.groups)))
        elif not are_known and (len(own.groups) > 1 or len(of_source.groups) > 1):
            unknown.append(own.path)
    _require_no_lists_by_group(root, source_root, done, counts, where)
    text = written(_carried(root, source_root, done), None if order is None else decoded(order))
    return NewNest(text, unknown)


def _pairs(
    optimizers: Sequence[tuple[Any, Optimizer]], of_source: Sequence[tuple[Any, Optimizer]]
) -> Iterable[tuple[tuple[Any, Optimizer], tuple[Any, Optimizer]]]:
    """Pair the optimizers of both nests: those with equal paths, and the only ones whose parameters are known."""
    by_path = {other[1].path: other for other in of_source}
    pairs = {own[1].path: (own, by_path[own[1].path]) for own in optimizers if own[1].path in by_path}
    known, known_of_source = (
        [each for each in side if each[1].form is not Form.UNKNOWN] for side in (optimizers, of_source)
    )
    if len(known) == len(known_of_source) == 1:
        pairs[known[0][1].path] = known[0], known_of_source[0]
    return pairs.values()


def _sources_of(
    own: Optimizer, of_source: Optimizer, parameters: Sequence[MadeParameter], where: str
) -> dict[str, list[str]]:
    """Return, for each parameter of a nest, the parameters of the source's optimizer that are in it, in order."""
    place = {name: number for number, name in enumerate(of_source.parameters)}
    sources = by_both_names(own.path, own.parameters, of_source.path, of_source.parameters, parameters, where)
    sources_of: dict[str, list[str]] = {}
    for name in own.parameters:
        key = str(own.keys.get(name, name))  # state may go by numbers in the file
        themselves = () if own.form is Form.NUMBERS else (name,)  # no tensor may have the name
        of_it = sources.get(name, sources.get(key, themselves))
        sources_of[name] = sorted((source for source in of_it if source in place), key=place.__getitem__)
    return sources_of


def _carried_state(own: Any, of_source: Optimizer, sources: Sequence[str], where: str) -> Any:
    """Return what an optimizer keeps of a parameter with the numbers and other values of its sources in it."""
    states = [of_source.states.get(name, NOTHING) for name in sources]
    if any(state != states[0] for state in states):
        raise _treated_differently(sources, where)
    return _carried(own, states[0]) if states else own


def _origins(own: Optimizer, of_source: Optimizer, sources: Mapping[str, Sequence[str]]) -> list[set[int]]:
    """Return, for each group, the places of the groups that its parameters have in the source."""
    origins: list[set[int]] = [set() for _ in own.groups]
    for name, place in own.parameters.items():
        origins[place].update(of_source.parameters[source] for source in sources[name])
    return origins


def _are_same_groups(own: Optimizer, of_source: Optimizer, sources: Mapping[str, Sequence[str]]) -> bool:
    """Tell whether each group has parameters of the group at its place in the source alone."""
    origins = _origins(own, of_source, sources)
    return len(origins) == len(of_source.groups) and all(own <= {place} for place, own in enumerate(origins))


def _carried_groups(
    own: Optimizer, of_source: Optimizer, sources: Mapping[str, Sequence[str]], where: str
) -> Sequence[Any]:
    """Return groups of parameters with those settings that all groups of their parameters in the source say alike.

    Raises MapError for a setting that is a tensor, which stays at its place, if the parameters there are others; and if
    a flat optimizer has one parameter of several groups.
    """
    if Form.UNKNOWN not in (own.form, of_source.form):
        all_origins = _origins(own, of_source, sources)
    elif len(own.groups) == len(of_source.groups) == 1:
        all_origins = [{0}]  # a lone group has all parameters
    else:
        return own.groups
    carried = []
    for place, (group, origins) in enumerate(zip(own.groups, all_origins)):
        if own.form is Form.FLAT and len(origins) > 1:
            raise _treated_differently([*sources.values()][place], where)
        first, *others = [settings_in(of_source.groups[origin]) for origin in sorted(origins)] or [[]]
        if any(len(entry) == 1 for entry in (*first, *settings_in(group))) and origins != {place}:
            raise MapError(
                "a setting of the optimizer is a tensor, and its group has other parameters in the other checkpoint",
                expected="groups of the same parameters in the same order, or settings that are plain numbers",
                got=f"group {place} of {own.path}{GROUPS}",
                where=where,
                remedy="give --like a checkpoint with the groups in this order, or leave the optimizer out (--exclude)",
            )
        alike = [entry for entry in first if all(entry in other for other in others)]
        carried.append(_carried(group, {"dict": alike}))
    return carried


def _treated_differently(parameters: Iterable[str], where: str) -> MapError:
    return MapError(
        "parameters that the optimizer treats differently are put together",
        expected="one group of parameters, and the same numbers in their state",
        got=", ".join(sorted(parameters)),
        where=where,
        remedy="leave the optimizer's state out (--exclude)",
    )


def _carried(node: Any, source: Any, done: Container[int] = ()) -> Any:
    """Return a part of a nest with those values of the source's that both have.

    Args:
        done: the identities of dictionaries that have them already.
    """
    if id(node) in done:
        return node
    if entries_of(node) is not None and entries_of(source) is not None:
        return {**node, "dict": _carried_entries(node, source, done)}
    items, of_source = _items(node), _items(source)
    if _is_value(node) and _is_value(source):
        return source if items is None or of_source is None else _like(node, of_source)
    if items is not None and of_source is not None and len(items) == len(of_source):
        return _like(node, [_carried(own, other, done) for own, other in zip(items, of_source)])
    return node


def _items(node: Any) -> list[Any] | None:
    """Return the items of a list or tuple; None if a part of a nest is none."""
    items = node.get("tuple") if isinstance(node, dict) else node
    return items if isinstance(items, list) else None


def _like(node: Any, items: list[Any]) -> Any:
    """Return items as a tuple or list, whichever a part of a nest is."""
    return items if isinstance(node, list) else {"tuple": items}


def _is_value(node: Any, *, has_attributes: bool = False) -> bool:
    """Tell whether a part of a nest is a value: no tensor is in it, nor is a dictionary that has keys of text.

    Tensors with such keys need no entry.

    Args:
        has_attributes: it has those of an object, all of whose tensors have entries.
    """
    if isinstance(node, list):
        return all(map(_is_value, node))
    if not isinstance(node, dict):
        return True
    entries = entries_of(node)
    if entries is not None:
        has_text = any(isinstance(entry[0], str) for entry in entries) and not has_attributes
        return bool(entries) and not has_text and all(len(entry) == 2 and _is_value(entry[1]) for entry in entries)
    return "tensor" not in node and all(_is_value(value, has_attributes=key == "state") for key, value in node.items())


def _carried_entries(node: Any, source: Any, done: Container[int]) -> list[list[Any]]:
    """Return the entries of a dictionary with the source's values. Otherwise as `_carried`."""
    values = {(type(entry[0]), entry[0]): entry[1] for entry in entries_of(source) or () if _has_plain_key(entry)}
    entries = []
    for entry in node["dict"]:
        if _has_plain_key(entry) and (type(entry[0]), entry[0]) in values:
            key, value, other = entry[0], entry[1], values[type(entry[0]), entry[0]]
            if key in _BY_GROUP and isinstance(value, list) and isinstance(other, list):
                entry = [key, _for_groups(value, other)]
            else:
                entry = [key, _carried(value, other, done)]
        entries.append(entry)
    return entries


def _has_plain_key(entry: list[Any]) -> bool:
    return len(entry) == 2 and type(entry[0]) in (str, int)


def _for_groups(own: list[Any], source: list[Any]) -> list[Any]:
    """Return a scheduler's values by group as the source has them; its own if more or fewer groups have unlike ones."""
    if len(own) == len(source):
        return _carried(own, source)  # type: ignore[no-any-return]
    return [source[0]] * len(own) if source and all(value == source[0] for value in source) else own


def _require_no_lists_by_group(
    root: Any, source: Any, optimizers: Container[int], counts: Sequence[tuple[int, int]], where: str
) -> None:
    """Raise MapError for values that a scheduler may have for each group, where the groups of a nest are others.

    Args:
        optimizers: the identities of their dictionaries in the nest.
        counts: for the optimizers whose groups are others, how many there are in the nest, and in the source.
    """
    for path, own, items in _lists_in_both(root, source, "", optimizers) if counts else ():
        are_known = path.rpartition(".")[2] in _BY_GROUP
        are_unlike = any(item != items[0] for item in items)
        are_as_many = any((len(own), len(items)) == each and (are_unlike or len(own) != len(items)) for each in counts)
        if are_unlike if are_known else (are_as_many and own != items and all(map(_is_value, (*own, *items)))):
            raise MapError(
                f"a scheduler {'has' if are_known else 'may have'} values for groups of parameters, which the other"
                " checkpoint has in another order",
                expected="the same groups in the same order",
                got=path,
                where=where,
                remedy="give --like a checkpoint with the groups in this order, or convert without --like",
            )


def _lists_in_both(
    node: Any, source: Any, path: str, optimizers: Container[int]
) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Yield the paths and items of lists that both nests have beside state and groups of optimizers."""
    of_source = dict(parts_of(source))
    for key, value in parts_of(node):
        if key in of_source and not (id(node) in optimizers and key in (STATE, GROUPS)):
            own, items = _items(value), _items(of_source[key])
            if own is not None and items is not None:
                yield f"{path}{key}", own, items
            yield from _lists_in_both(value, of_source[key], f"{path}{key}.", optimizers)
