"""Join the nests that stages of a pipeline have saved (`joined`), or leave out the parts of each (`settings_of`).

Only optimizers that name their parameters can be joined: numbers of two stages mean different parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from reshard_mpi.errors import DisagreementError

_STATE, _GROUPS, _PARAMETER_NAMES = "state", "param_groups", "param_names"
# What nests have of a dictionary that stages have of their own. Of a model's, torch has `_metadata` among the
# attributes: what it says of each module, by the module's name.
_ATTRIBUTES = "state"
_JOINED = ("dict", _ATTRIBUTES)
# Lists in the state of torch's schedulers with a value for each group (torch.optim.lr_scheduler, 2.13).
BY_GROUP = frozenset(("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums"))


def joined(roots: Sequence[Any], *, keeps_first: bool = False) -> Any | None:
    """Return the nest of all stages; None if they differ in more than the parameters of their optimizers.

    Args:
        roots: the nest of each, as parsed from its text. They may not be changed afterwards.
        keeps_first: where they differ otherwise, keep the first one's value.
    """
    first, *others = roots
    try:
        for other in others:
            first = _joined(first, other, keeps_first)
    except ValueError:
        return None
    return first


def settings_of(node: Any) -> Any:
    """Return a nest without what each stage has of its own: tensors, empty dictionaries, optimizers that are joined.

    What torch says of the modules of a model is left out as well.
    """
    if isinstance(node, list):
        return [settings_of(each) for each in node]
    if not isinstance(node, dict):
        return node
    if "dict" not in node:
        return {key: settings_of(value) for key, value in node.items()}
    others = {key: settings_of(value) for key, value in node.items() if key not in _JOINED}
    is_joined = _is_always_joined(node)
    kept = []
    for key, *value in node["dict"]:
        is_flat = isinstance(key, str) and key.startswith((f"{_STATE}.", f"{_GROUPS}."))
        if value and not is_flat and not (is_joined and key in (_STATE, _GROUPS)):
            kept.append([key, *map(settings_of, value)])
    return {**others, "dict": [entry for entry in kept if entry[1:] != [{"dict": []}]]}


def numbered_optimizers(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the paths, each with a dot behind it, and values of optimizers whose groups have numbers for parameters."""
    pairs = _pairs(node)
    groups = next((value for key, value in pairs if key == _GROUPS and isinstance(value, list)), [])
    if any(type(number) is int for group in groups for number in (_entries(group).get("params") or [[]])[0]):
        yield path, node
    for key, value in pairs:
        yield from numbered_optimizers(value, f"{path}{key}.")


def lists_by_group(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the paths and values of lists that schedulers have by groups of parameters."""
    for key, value in _pairs(node):
        if isinstance(key, str) and key in BY_GROUP:
            yield f"{path}{key}", value
        else:
            yield from lists_by_group(value, f"{path}{key}.")


def _pairs(node: Any) -> list[tuple[Any, Any]]:
    """Return keys and values of a dictionary, or places and items of a list."""
    if isinstance(node, dict):
        entries = node.get("dict")
        pairs = [entry for entry in entries if isinstance(entry, list)] if isinstance(entries, list) else []
        return [(entry[0], entry[1]) for entry in pairs if len(entry) == 2]
    return [*enumerate(node)] if isinstance(node, list) else []


def _is_always_joined(node: Any) -> bool:
    """Tell whether a dictionary is an optimizer that names its parameters, and no setting of a group is a tensor."""
    try:
        entries = _entries(node)
        groups = [_entries(group) for group in entries[_GROUPS][0]] if _is_named(entries) else []
    except ValueError:
        return False
    return bool(groups) and all(value for group in groups for value in group.values())


def _joined(first: Any, second: Any, keeps_first: bool) -> Any:
    """Join two values of nests. Raises ValueError if that cannot be done, unless the first is then kept."""
    if first == second and type(first) is type(second):
        return first
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return [_joined(own, other, keeps_first) for own, other in zip(first, second)]
    are_alike = isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys()
    if are_alike and "dict" not in first:
        return {key: _joined(first[key], second[key], keeps_first) for key in first}
    if are_alike and all(first[key] == second[key] for key in first if key not in _JOINED):  # of one class
        whole = {**first, **{key: _joined(first[key], second[key], keeps_first) for key in first if key == _ATTRIBUTES}}
        one, other = _entries(first), _entries(second)
        if _is_named(one) and _is_named(other):
            return {**whole, "dict": _joined_optimizers(one, other, keeps_first)}
        if _is_flat(one) and _is_flat(other):
            return {**whole, "dict": _joined_states(_unnamed(one), _unnamed(other))}
        if _can_be_joined(one, other):
            return {**whole, "dict": _joined_entries(one, other, keeps_first)}
    if keeps_first:
        return first
    raise ValueError


def _can_be_joined(one: dict[Any, list[Any]], other: dict[Any, list[Any]]) -> bool:
    """Tell whether keys of two dictionaries mean the same: names do, numbers of two stages are other parameters'."""
    are_numbered = {_STATE, _GROUPS} <= one.keys() | other.keys()
    are_names = all(isinstance(key, str) for key in (*one, *other))
    return not are_numbered and (are_names or one.keys() == other.keys())


def _joined_entries(one: dict[Any, list[Any]], other: dict[Any, list[Any]], keeps_first: bool) -> list[Any]:
    """Join dictionaries: what both have is joined, and what only one has is kept."""
    both = {key: _joined(one[key], other[key], keeps_first) for key in one if key in other}
    return [[key, *value] for key, value in {**one, **other, **both}.items()]


def _entries(node: Any) -> dict[Any, list[Any]]:
    """Return the values of a dictionary by its plain keys: a list of one, or of none for a tensor."""
    entries: dict[Any, list[Any]] = {}
    for entry in node["dict"]:
        if not isinstance(entry, list) or not entry or not isinstance(entry[0], str | int) or entry[0] in entries:
            raise ValueError
        entries[entry[0]] = entry[1:]
    return entries


def _is_named(entries: dict[Any, list[Any]]) -> bool:
    """Tell whether a dictionary is an optimizer whose groups name their parameters."""
    state, groups = entries.get(_STATE), entries.get(_GROUPS)
    if not state or not groups or not isinstance(groups[0], list) or not groups[0]:
        return False
    names = [name for group in groups[0] for name in (_entries(group).get("params") or [[None]])[0]]
    return all(isinstance(name, str) for name in names)


def _is_flat(entries: dict[Any, list[Any]]) -> bool:
    """Tell whether a dictionary is a flat optimizer, with keys like `param_groups.fc.weight.lr`."""
    return bool(entries) and all(
        isinstance(key, str) and key.startswith((f"{_STATE}.", f"{_GROUPS}.")) for key in entries
    )


def _unnamed(entries: dict[Any, list[Any]]) -> dict[Any, list[Any]]:
    """Return a flat optimizer that does not name all parameters of a group: stages know their own ones only."""
    return {key: [[]] if key.endswith(f".{_PARAMETER_NAMES}") else value for key, value in entries.items()}


def _joined_optimizers(one: dict[Any, list[Any]], other: dict[Any, list[Any]], keeps_first: bool) -> list[Any]:
    """Join optimizers: the state of both, and groups that differ in their parameters alone as one.

    A parameter stays in the group that it has. Raises DisagreementError for a setting that is a tensor: it is called by
    the place of its group, which another one would get.
    """
    groups = [_entries(group) for group in one[_GROUPS][0]]
    for place, group in enumerate(map(_entries, other[_GROUPS][0])):
        own = frozenset(group["params"][0])
        known = frozenset(name for each in groups for name in each["params"][0])
        with_own = [number for number, each in enumerate(groups) if not own.isdisjoint(each["params"][0])]
        alike = [number for number, each in enumerate(groups) if _settings(each) == _settings(group)]
        if not {*with_own} <= {*alike}:
            raise ValueError
        # Of groups treated alike first one that has a parameter already, and then the one in the same place.
        number = next((each for each in (*with_own, place, *alike) if each in alike), len(groups))
        if number != place and not all(group.values()):
            raise DisagreementError(
                "optimizers of stages have settings that are tensors, and groups in other places",
                expected="groups in the same places in all stages, or settings that are plain numbers",
                got=f"group {place}",
                remedy="save numbers in place of these tensors: group['lr'] = float(group['lr'])",
            )
        if number == len(groups):
            groups.append(group)
            continue
        added = [name for name in group["params"][0] if name not in known]
        groups[number] = {**groups[number], "params": [[*groups[number]["params"][0], *added]]}
    states = {**one[_STATE][0], "dict": _joined_states(_entries(one[_STATE][0]), _entries(other[_STATE][0]))}
    # No names beside these: they would be in the order of the stages, and torch takes over any that are there.
    all_groups = [
        {"dict": [[key, *value] for key, value in group.items() if key != _PARAMETER_NAMES]} for group in groups
    ]
    of_both: dict[Any, list[Any]] = {_STATE: [states], _GROUPS: [all_groups]}
    return _joined_entries(one | of_both, other | of_both, keeps_first)


def _settings(group: dict[Any, list[Any]]) -> dict[Any, list[Any]]:
    return {key: value for key, value in group.items() if key not in ("params", _PARAMETER_NAMES)} | {"keys": [*group]}


def _joined_states(one: dict[Any, list[Any]], other: dict[Any, list[Any]]) -> list[Any]:
    """Join what two optimizers have of their parameters. Raises ValueError if they contradict each other."""
    if any(one[key] != other[key] for key in one.keys() & other.keys()):
        raise ValueError
    return [[key, *value] for key, value in {**one, **other}.items()]
