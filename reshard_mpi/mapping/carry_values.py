"""Carry values into the nest of `--like`: an optimizer's with its parameters, others by key (`carried_into`).

Tensors follow equations. What lies beside them in the nest does so here, into the nest of another checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.formats.nest import BY_GROUP, entries_of, lists_by_group, pairs_of
from reshard_mpi.formats.nest.nodes import decoded, parsed, written
from reshard_mpi.mapping.dictionaries import has_below, moved, new_names_of
from reshard_mpi.mapping.follow_parameters import MadeParameter, by_both_names
from reshard_mpi.mapping.numbered_state import Training
from reshard_mpi.mapping.optimizers import (
    GROUPS,
    NOTHING,
    STATE_KEY,
    Form,
    Key,
    Optimizer,
    optimizers_of,
    put,
    settings_in,
)
from reshard_mpi.mapping.rename_values import (
    NewNest,
    treated_differently,
    values_of_modules,
    values_renamed,
)


def carried_into(
    nest: str,
    source: str,
    training: Training,
    theirs: Training,
    inventory: Collection[str],
    parameters: Sequence[MadeParameter],
    where: str,
) -> NewNest:
    """Return a nest with those values of the source's that both have, numbers and names of parameters apart.

    Args:
        training: of the source.
        theirs: of the nest.
        inventory: the names of the source's tensors.
        parameters: of the nest, by their names there. What an optimizer says of a parameter goes where the parameter
            goes: numbers and groups may be others in the nest. Several groups whose parameters are not known in both
            stay as they are in the nest.

    Raises MapError if parameters of different numbers in their state are put together, or if a setting that is a tensor
    belongs to other parameters in the nest.
    """
    (root, order), (source_root, source_order) = parsed(nest), parsed(source)
    names = [name for each in (order, source_order) for name in decoded(each or ())]
    optimizers, of_source_nest = optimizers_of(root, theirs), optimizers_of(source_root, training)
    nodes = (node for node, _ in (*optimizers, *of_source_nest))
    values = NestValues([*names, *(parameter.name for parameter in parameters)], nodes)
    new_names = moved(source_root, new_names_of(parameters), (each for _, each in of_source_nest), ())
    regrouped, unknown, known = [], [], []
    for (node, own), (source_node, of_source) in _pairs(optimizers, of_source_nest):
        if own.form is Form.FLAT:
            own = own.each_for_itself()
        are_known = Form.UNKNOWN not in (own.form, of_source.form)
        sources = _sources_of(own, of_source, inventory, parameters, where) if are_known else {}
        carrying = _Carrying(values, own, of_source, sources, where)
        node["dict"] = values.entries(node, source_node, own.path)
        put(node, own._replace(states=carrying.states(), groups=carrying.groups()))
        known.append((own, of_source))
        if are_known and not carrying.are_groups_alike():
            count = len(of_source.groups)
            regrouped.append((count if own.form is Form.FLAT else len(own.groups), count))
        elif not are_known and (len(own.groups) > 1 or len(of_source.groups) > 1):
            unknown.append(own.path)
    values.require_none_by_group(root, source_root, regrouped, where)
    of_source_modules = [*values_of_modules(source_root, new_names, [each for _, each in of_source_nest])]
    new_name_of, left_behind = values_renamed(of_source_modules, new_names)
    carried = {new_name_of[name]: entry[1] for name, _, entry in of_source_modules if name in new_name_of}
    made_names = sorted((parameter.name, parameter.name) for parameter in parameters)
    own_optimizers = [each for _, each in optimizers]
    own_values = {name: entry[1] for name, _, entry in values_of_modules(root, made_names, own_optimizers)}
    made = values.of(root, source_root, "")
    in_target = NestValues([*decoded(order or ()), *(parameter.name for parameter in parameters)])
    for name, _, entry in values_of_modules(made, made_names, own_optimizers):  # another module's may have the name
        of_like = own_values[name]
        entry[1] = in_target.of(of_like, carried[name], f"{name}.") if name in carried else of_like
    return NewNest(written(made, None if order is None else decoded(order)), unknown, known, left_behind)


def _pairs(
    optimizers: Sequence[tuple[Any, Optimizer]], of_source: Sequence[tuple[Any, Optimizer]]
) -> Iterable[tuple[tuple[Any, Optimizer], tuple[Any, Optimizer]]]:
    """Pair the optimizers of both nests: those with equal paths, the only ones, and the only known ones.

    Known are those of which it is known which parameters they have.
    """
    by_path = {other[1].path: other for other in of_source}
    pairs = {own[1].path: (own, by_path[own[1].path]) for own in optimizers if own[1].path in by_path}
    known, known_of_source = (
        [each for each in side if each[1].form is not Form.UNKNOWN] or list(side) for side in (optimizers, of_source)
    )
    if len(known) == len(known_of_source) == 1:
        pairs[known[0][1].path] = known[0], known_of_source[0]
    return pairs.values()


def _sources_of(
    own: Optimizer,
    of_source: Optimizer,
    inventory: Collection[str],
    parameters: Sequence[MadeParameter],
    where: str,
) -> dict[str, list[str]]:
    """Return, for each parameter of a nest, the parameters of the source's optimizer that are in it, in order."""
    place = {name: number for number, name in enumerate(of_source.parameters)}
    names = own.parameters, of_source.parameters
    sources = by_both_names(
        own.path, names[0], of_source.path, names[1], inventory, parameters, where, are_whole=own.form is Form.NUMBERS
    )
    used = frozenset[str]().union(*sources.values())
    sources_of: dict[str, list[str]] = {}
    for name in own.parameters:
        key = str(own.keys.get(name, name))  # state may go by numbers in the file
        # No tensor may have the name. If another parameter is made of the one of this name, or nothing is, it is not
        # this one.
        themselves = () if own.form is Form.NUMBERS or name in used or name in inventory else (name,)
        of_it = sources.get(name, sources.get(key, themselves))
        sources_of[name] = sorted((source for source in of_it if source in place), key=place.__getitem__)
    return sources_of


class _Carrying(NamedTuple):
    """What an optimizer says of its parameters, which goes from the source's nest into another."""

    values: NestValues
    own: Optimizer  # of the other nest
    of_source: Optimizer
    sources: Mapping[str, Sequence[str]]  # for each parameter of the other nest, the parameters of the source in it
    where: str

    @property
    def origins(self) -> list[set[int]]:
        """For each group, the places of the groups that its parameters have in the source."""
        if Form.UNKNOWN in (self.own.form, self.of_source.form):
            return [{0}]  # a lone group has all parameters
        origins: list[set[int]] = [set() for _ in self.own.groups]
        for name, place in self.own.parameters.items():
            origins[place].update(self.of_source.parameters[source] for source in self.sources[name])
        return origins

    def are_groups_alike(self) -> bool:
        """Tell whether each group has parameters of the group at its place in the source alone."""
        if Form.FLAT in (self.own.form, self.of_source.form):  # groups come one after another
            in_order = [place for name in self.own.parameters for place in self._places(name)]
            return _runs(in_order) == _runs(self.of_source.parameters.values())
        origins = self.origins
        return len(origins) == len(self.of_source.groups) and all(own <= {place} for place, own in enumerate(origins))

    def _places(self, name: str) -> list[int]:
        return [self.of_source.parameters[source] for source in self.sources[name]]

    def states(self) -> dict[Key, Any]:
        """Return the state of parameters, and of nothing that is one, with the source's values in it.

        Raises MapError if parameters with different values are put together.
        """
        carried = {}
        for key, state in self.own.states.items():
            sources = self.sources[str(key)] if key in self.own.parameters else [key]
            states = [self.of_source.states.get(source, NOTHING) for source in sources]
            if any(other != states[0] for other in states):
                raise treated_differently(sources, self.where)
            path = f"{self.own.path}{STATE_KEY}.{self.own.keys.get(key, key)}."
            carried[key] = self.values.of(state, states[0], path) if states else state
        return carried

    def groups(self) -> Sequence[Any]:
        """Return groups of parameters with those settings that all groups of their parameters in the source say alike.

        Raises MapError for a setting that is a tensor, which stays at its place, if the parameters there are others;
        and if one parameter is made of several with other settings.
        """
        own, of_source = self.own, self.of_source
        if Form.UNKNOWN in (own.form, of_source.form) and not len(own.groups) == len(of_source.groups) == 1:
            return own.groups
        for sources in self.sources.values():
            settings = [settings_in(of_source.groups[of_source.parameters[source]]) for source in sources]
            if any(other != settings[0] for other in settings):
                raise treated_differently(sources, self.where)
        carried = []
        for place, (group, origins) in enumerate(zip(own.groups, self.origins)):
            first, *others = [settings_in(of_source.groups[origin]) for origin in sorted(origins)] or [[]]
            if any(len(entry) == 1 for entry in (*first, *settings_in(group))) and origins != {place}:
                raise MapError(
                    "a setting of the optimizer is a tensor, and its group has other parameters in the other"
                    " checkpoint",
                    expected="groups of the same parameters in the same order, or settings that are plain numbers",
                    got=f"group {place} of {own.path}{GROUPS}",
                    where=self.where,
                    remedy="give --like a checkpoint with the groups in this order, or leave the optimizer out"
                    " (--exclude)",
                )
            alike = [entry for entry in first if all(entry in other for other in others)]
            carried.append(self.values.of(group, {"dict": alike}, f"{own.path}{GROUPS}.{place}."))
        return carried


def _runs(places: Iterable[int]) -> list[int]:
    """Return places, each once for its run of equal ones."""
    return [place for place, _ in groupby(places)]


class NestValues:
    """Takes those values from a source's nest that another nest has as well.

    A dictionary has its own keys. All else without tensors is the source's as it is there. Where both have a tensor in
    a list, items are taken by their places.
    """

    def __init__(self, tensors: Iterable[str], left_alone: Iterable[Any] = ()) -> None:
        """Take the names of the tensors of both nests, and dictionaries of optimizers, whose values go with parameters.

        These are left alone.
        """
        self._tensors = sorted(set(tensors))
        self._left_alone = {id(node): node for node in left_alone}

    def of(self, node: Any, source: Any, path: str) -> Any:
        """Return a part of a nest with the source's values. path: what names in it begin with."""
        if id(node) in self._left_alone:
            return node
        if entries_of(node) is not None and entries_of(source) is not None:
            return {**node, "dict": self.entries(node, source, path)}
        items, of_source = _items(node), _items(source)
        are_items = items is not None and of_source is not None and len(items) == len(of_source)
        is_by_group = are_items and any(lists_by_group(node))  # schedulers in a scheduler
        if self._is_plain(node) and self._is_plain(source) and not has_below(self._tensors, path) and not is_by_group:
            return source
        if items is not None and of_source is not None and are_items:
            pairs = enumerate(zip(items, of_source))
            carried = [self.of(own, other, f"{path}{place}.") for place, (own, other) in pairs]
            return carried if isinstance(node, list) else {"tuple": carried}
        return node

    def entries(self, node: Any, source: Any, path: str) -> list[list[Any]]:
        """Return the entries of a dictionary with the source's values."""
        values = {json.dumps(entry[0]): entry[1] for entry in entries_of(source) or () if len(entry) == 2}
        entries = []
        for entry in node["dict"]:
            text = json.dumps(entry[0])
            if len(entry) == 2 and text in values:
                key, own, other = entry[0], entry[1], values[text]
                is_by_group = isinstance(key, str) and key in BY_GROUP
                if is_by_group and isinstance(own, list) and isinstance(other, list):
                    entry = [key, self._for_groups(own, other, f"{path}{key}.")]
                else:
                    entry = [key, self.of(own, other, f"{path}{key}.")]
            entries.append(entry)
        return entries

    def _is_plain(self, node: Any) -> bool:
        """Tell whether a part of a nest is no optimizer, and lists no tensor. A tensor with a key of text may have no
        entry.
        """
        if isinstance(node, list):
            return all(map(self._is_plain, node))
        if not isinstance(node, dict):
            return True
        if id(node) in self._left_alone or "tensor" in node or any(len(entry) == 1 for entry in entries_of(node) or ()):
            return False
        return all(map(self._is_plain, node.values()))

    def _for_groups(self, own: list[Any], source: list[Any], path: str) -> list[Any]:
        """Return a scheduler's values as the source has them; its own if more or fewer groups have unlike ones."""
        if len(own) == len(source):
            return self.of(own, source, path)  # type: ignore[no-any-return]
        return [source[0]] * len(own) if source and all(value == source[0] for value in source) else own

    def require_none_by_group(self, root: Any, source: Any, regrouped: Sequence[tuple[int, int]], where: str) -> None:
        """Raise MapError for values that a scheduler may have for each group, where the groups of a nest are others.

        Args:
            regrouped: for the optimizers whose groups are others, how many there are in the nest, and in the source.
        """
        for path, own, items in self._lists_in_both(root, source, "") if regrouped else ():
            are_unlike = any(item != items[0] for item in items)
            are_known = path.rpartition(".")[2] in BY_GROUP
            if not are_known:
                are_unlike = (
                    (len(own), len(items)) in regrouped and own != items and (are_unlike or len(own) != len(items))
                )
            if are_unlike:
                raise MapError(
                    f"a scheduler {'has' if are_known else 'may have'} values for groups of parameters, which the other"
                    " checkpoint has in another order",
                    expected="the same groups in the same order",
                    got=path,
                    where=where,
                    remedy="give --like a checkpoint with the groups in this order, or convert without --like",
                )

    def _lists_in_both(self, node: Any, source: Any, path: str) -> Iterator[tuple[str, list[Any], list[Any]]]:
        """Yield the paths and items of lists that both nests have beside optimizers."""
        if id(node) in self._left_alone:
            return
        of_source = dict(pairs_of(source))
        for key, value in pairs_of(node):
            if key in of_source:
                own, items = _items(value), _items(of_source[key])
                if own is not None and items is not None:
                    yield f"{path}{key}", own, items
                yield from self._lists_in_both(value, of_source[key], f"{path}{key}.")


def _items(node: Any) -> list[Any] | None:
    """Return the items of a list or tuple; None if a part of a nest is none."""
    items = node.get("tuple") if isinstance(node, dict) else node
    return items if isinstance(items, list) else None
