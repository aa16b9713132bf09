"""Keep nested dictionaries as names and one text, look into it (`entries_of`, `pairs_of`), and join two (`joined`).

From names joined by dots and the text the nest can be made again.

Tensors of `{"model": {"w": tensor}, "epoch": 3}` get the name `model.w`. All else is kept as JSON in one string of the
shard, called `NEST`, so that it passes through formats that have names only:

    value  null, true, false, numbers, texts and arrays are themselves (an array is a list), and
           {"dict": [entry ...]}           a dictionary, in the order of its keys
           {"tuple": [value ...]}
           {"tensor": null}                in an array or tuple: the tensor of this place
           {"bytes": BASE64}               {"float": HEX}: infinite or no number, the bytes of the double, big-endian
           {"global": [MODULE, NAME]}      a constant, such as an element type of torch
           {"call": [MODULE, NAME, [value ...]], "new": true, "state": value, "items": [value ...], "dict": [entry ...]}
                                           an object of another class; all but "call" may be left out
    entry  [key, value], or [key]          which is a tensor; keys are values that are no array, mostly texts

Only objects of `nodes.PLAIN` are kept. A tensor that no entry lists belongs to the dictionary with the longest path
that its name begins with, of those that are no state and all of whose listed keys are texts; the rest of its name is
its key, and it comes after what is listed. So names of tensors are listed only where that would be wrong.

The order of tensors that are not listed stands beside the value, for formats and stages of a pipeline have orders of
their own, and torch numbers the state of parameters by their order in the model:

    {"nest": value, "order": [COUNT, TEXT ...]}     names of all tensors; each is the first COUNT characters of the one
                                                    before it, and TEXT

A text without it, as earlier versions wrote all, is the value alone; tensors have the order of the shard then. A shard
of names alone, a plain dictionary of tensors followed by texts, has no such string.

The functions here look into a nest as parsed from its text. It may be anything that is JSON: values of other kinds, and
dictionaries without a key, are passed over. Only optimizers that name their parameters can be joined: numbers of two
stages mean different parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

# Lists in the state of torch's schedulers with a value for each group (torch.optim.lr_scheduler, 2.13).
BY_GROUP = frozenset(("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums"))

# Tensors of a model that no optimizer changes, as torch's modules call them.
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def entries_of(node: Any) -> list[Any] | None:
    """Return the entries of a dictionary of a nest; None if it is none."""
    entries = node.get("dict") if isinstance(node, dict) else None
    is_dict = isinstance(entries, list) and all(isinstance(entry, list) and entry for entry in entries)
    return entries if is_dict else None


def value_of(node: Any, key: str) -> Any:
    """Return the value of a key in a dictionary of a nest; None if it has none."""
    for entry in entries_of(node) or ():
        if len(entry) == 2 and entry[0] == key:
            return entry[1]
    return None


def entries_below(node: Any, key: str) -> list[Any] | None:
    """Return the entries of a dictionary in a dictionary: none if it is not there, None if something else is.

    DCP of torch leaves out dictionaries that hold nothing, such as the state of an optimizer that keeps none.
    """
    own = entries_of(node)
    if own is None or all(entry[0] != key for entry in own):
        return None if own is None else []
    return entries_of(value_of(node, key))


def pairs_of(node: Any) -> list[tuple[Any, Any]]:
    """Return the keys that are texts or numbers and values of a dictionary, or places and items of a list or tuple."""
    if isinstance(node, dict) and isinstance(node.get("tuple"), list):
        node = node["tuple"]
    if isinstance(node, dict):
        entries = node.get("dict")
        pairs = [entry for entry in entries if isinstance(entry, list)] if isinstance(entries, list) else []
        return [(entry[0], entry[1]) for entry in pairs if len(entry) == 2 and type(entry[0]) in (str, int)]
    return [*enumerate(node)] if isinstance(node, list) else []


def dictionaries_in(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dictionaries in a part of a nest, each behind the beginning of the names in it."""
    if entries_of(node) is not None:
        yield path, node
    for key, value in pairs_of(node):
        yield from dictionaries_in(value, f"{path}{key}.")


def numbered_in(node: Any) -> Iterator[tuple[str, int]]:
    """Yield what names in the optimizers of a nest begin with that number parameters, each with how many it numbers."""
    for path, optimizer in dictionaries_in(node):
        groups = value_of(optimizer, "param_groups")
        lists = [value_of(group, "params") for group in groups] if isinstance(groups, list) else []
        numbers = [number for own in lists if isinstance(own, list) for number in own]
        if numbers and all(type(number) is int for number in numbers):
            yield path, len(numbers)


def parts_in(node: Any, path: str, without: Collection[int]) -> Iterator[tuple[str, Any]]:
    """Yield the dictionaries and lists of a nest, each behind what names in it begin with. Some entries are left out.

    Args:
        without: the entries, as `id` tells them.
    """
    if pairs_of(node) or entries_of(node) is not None:
        yield path, node
    left_out = {entry[0] for entry in entries_of(node) or () if id(entry) in without}
    for key, value in pairs_of(node):
        if key not in left_out:
            yield from parts_in(value, f"{path}{key}.", without)


def lists_by_group(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the paths and values of lists that schedulers have by groups of parameters."""
    for key, value in pairs_of(node):
        if isinstance(key, str) and key in BY_GROUP:
            yield f"{path}{key}", value
        else:
            yield from lists_by_group(value, f"{path}{key}.")


_STATE, _GROUPS, _PARAMETER_NAMES = "state", "param_groups", "param_names"
# What keys of a flat optimizer begin with, as `param_groups.fc.weight.lr`.
_OF_FLAT = (f"{_STATE}.", f"{_GROUPS}.")
# What nests have of a dictionary that stages have of their own. Of a model's, torch has `_metadata` among the
# attributes: what it says of each module, by the module's name.
_ATTRIBUTES = "state"
_JOINED = ("dict", _ATTRIBUTES)


class Joined(NamedTuple):
    """The nest of all stages. Where they differ in other things than theirs alone, it has the first one's value."""

    root: Any
    is_whole: bool  # they differ in nothing else
    # For each stage, what names of the state of its optimizers begin with that are not in the nest, and why.
    apart: Sequence[Mapping[str, str]]


def joined(roots: Sequence[Any]) -> Joined:
    """Join the nests of stages.

    Args:
        roots: the nest of each, as parsed from its text. They may not be changed afterwards.
    """
    first, *others = roots
    joinings = [_Joining() for _ in others]
    for joining, other in zip(joinings, others):
        first = joining.joined(first, other, "")
    return Joined(first, all(each.is_whole for each in joinings), [{}, *(each.apart for each in joinings)])


def settings_of(node: Any) -> Any:
    """Return a nest without what each stage has of its own: tensors, empty values, optimizers that are joined.

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
        is_flat = isinstance(key, str) and key.startswith(_OF_FLAT)
        if value and not is_flat and not (is_joined and key in (_STATE, _GROUPS)):
            kept.append([key, *map(settings_of, value)])
    return {**others, "dict": [entry for entry in kept if not _is_empty(entry[1])]}


def _is_empty(node: Any) -> bool:
    """Tell whether a value is None, or a list or dictionary of nothing else: an optimizer without groups is."""
    if isinstance(node, dict):
        return node.keys() == {"dict"} and all(len(entry) == 2 and _is_empty(entry[1]) for entry in node["dict"])
    return node is None or (isinstance(node, list) and all(map(_is_empty, node)))


def _optimizers(node: Any, path: str) -> Iterator[str]:
    """Yield what names of tensors in the optimizers of a part of a nest begin with. path: in this part."""
    pairs = pairs_of(node)
    if any(key == _GROUPS or (isinstance(key, str) and key.startswith(f"{_GROUPS}.")) for key, _ in pairs):
        yield path
    for key, value in pairs:
        yield from _optimizers(value, f"{path}{key}.")


def _is_always_joined(node: Any) -> bool:
    """Tell whether a dictionary is an optimizer that names its parameters, and no setting of a group is a tensor."""
    try:
        entries = _entries(node)
        is_named = _is_named(entries)
        return is_named and all(value for group in entries[_GROUPS][0] for value in _entries(group).values())
    except ValueError:
        return False


class _Joining:
    """Joins two nests.

    Attributes:
        is_whole: all of both is in what has been joined.
        apart: what names of the state of the second's optimizers begin with that are not, and why.
    """

    def __init__(self) -> None:
        self.is_whole = True
        self.apart: dict[str, str] = {}

    def joined(self, first: Any, second: Any, path: str) -> Any:
        """Join two values of nests; if that cannot be done, return the first. path: what names in both begin with."""
        if first == second and type(first) is type(second):
            return first
        try:
            return self._whole(first, second, path)
        except ValueError as error:
            optimizers = {f"{each}{_STATE}.": str(error) for each in _optimizers(second, path)}
        if optimizers and _is_empty(first):
            return second
        if not (_is_empty(second) and any(_optimizers(first, path))):
            self.is_whole = False
            self.apart |= optimizers
        return first

    def _whole(self, first: Any, second: Any, path: str) -> Any:
        """Join two values that differ. Raises ValueError if that cannot be done, which says why."""
        if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
            return [self.joined(*both, f"{path}{place}.") for place, both in enumerate(zip(first, second))]
        are_alike = isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys()
        if are_alike and "dict" not in first:
            return {key: self.joined(first[key], second[key], path) for key in first}
        if not are_alike or any(first[key] != second[key] for key in first if key not in _JOINED):  # of two classes
            raise ValueError("they are kept in different ways, or are not as many in each stage")
        one, other = _entries(first), _entries(second)
        if _is_named(one) and _is_named(other):
            entries = self._optimizer(one, other, path)
        elif _is_flat(one) and _is_flat(other):
            entries = _joined_values(_unnamed(one), _unnamed(other))
        elif {_STATE, _GROUPS} <= one.keys() | other.keys():
            entries = self._numbered(one, other, path)
        elif one.keys() == other.keys() or all(isinstance(key, str) for key in (*one, *other)):
            entries = self._entries(one, other, path)
        else:
            raise ValueError("they are kept by numbers, and not as many in each stage")
        attributes = {key: self.joined(first[key], second[key], f"{path}{key}.") for key in first if key == _ATTRIBUTES}
        return {**first, **attributes, "dict": entries}

    def _entries(self, one: dict[Any, list[Any]], other: dict[Any, list[Any]], path: str) -> list[Any]:
        """Join dictionaries: what both have is joined, and what only one has is kept."""
        both = {}
        for key, own in one.items():
            if key in other and (not own or not other[key]):  # a tensor
                both[key], self.is_whole = own, self.is_whole and own == other[key]
            elif key in other:
                both[key] = [self.joined(own[0], other[key][0], f"{path}{key}.")]
        return [[key, *value] for key, value in {**one, **other, **both}.items()]

    def _numbered(self, one: dict[Any, list[Any]], other: dict[Any, list[Any]], path: str) -> list[Any]:
        """Join optimizers by numbers with equal groups: ranks of one stage may share out whose state each keeps."""
        why = "a number in the state of stages' optimizers means another parameter in each stage"
        if {_STATE, _GROUPS} - (one.keys() & other.keys()) or one[_GROUPS] != other[_GROUPS]:
            raise ValueError(why)
        of_both = {_STATE: [_joined_states(one, other)]}
        self.apart[f"{path}{_STATE}."] = why  # for ranks of other stages
        return self._entries(one | of_both, other | of_both, path)

    def _optimizer(self, one: dict[Any, list[Any]], other: dict[Any, list[Any]], path: str) -> list[Any]:
        """Join optimizers: the state of both, and groups that differ in their parameters alone as one.

        A parameter stays in the group that it has. Raises ValueError if its group in the other one is treated
        differently; and for a setting that is a tensor, which is called by the place of its group, if another group
        would get it.
        """
        groups = [_entries(group) for group in one[_GROUPS][0]]
        for place, group in enumerate(map(_entries, other[_GROUPS][0])):
            own = frozenset(group["params"][0])
            known = frozenset(name for each in groups for name in each["params"][0])
            with_own = [number for number, each in enumerate(groups) if not own.isdisjoint(each["params"][0])]
            alike = [number for number, each in enumerate(groups) if _settings(each) == _settings(group)]
            if not {*with_own} <= {*alike}:
                raise ValueError(f"{min(own & known)} has other settings in its group in another stage")
            # Of groups treated alike first one that has a parameter already, and then the one in the same place.
            number = next((each for each in (*with_own, place, *alike) if each in alike), len(groups))
            if number != place and not all(group.values()):
                raise ValueError(
                    "stages have settings that are tensors, and groups in other places: save plain numbers in them,"
                    " group['lr'] = float(group['lr'])"
                )
            if number == len(groups):
                groups.append(group)
                continue
            added = [name for name in group["params"][0] if name not in known]
            groups[number] = {**groups[number], "params": [[*groups[number]["params"][0], *added]]}
        states = _joined_states(one, other)
        # No names beside these: they would be in the order of the stages, and torch takes over any that are there.
        all_groups = [
            {"dict": [[key, *value] for key, value in group.items() if key != _PARAMETER_NAMES]} for group in groups
        ]
        of_both: dict[Any, list[Any]] = {_STATE: [states], _GROUPS: [all_groups]}
        return self._entries(one | of_both, other | of_both, path)


def _entries(node: Any) -> dict[Any, list[Any]]:
    """Return the values of a dictionary by its plain keys: a list of one, or of none for a tensor."""
    entries: dict[Any, list[Any]] = {}
    for entry in node["dict"] if isinstance(node, dict) and isinstance(node.get("dict"), list) else [None]:
        if not isinstance(entry, list) or not entry or not isinstance(entry[0], str | int) or entry[0] in entries:
            raise ValueError("a key in them is neither text nor an integer, or is there twice")
        entries[entry[0]] = entry[1:]
    return entries


def _is_named(entries: dict[Any, list[Any]]) -> bool:
    """Tell whether a dictionary is an optimizer whose groups name their parameters; it may have none yet."""
    state, groups = entries.get(_STATE), entries.get(_GROUPS)
    if not state or not isinstance(state[0], dict) or not groups or not isinstance(groups[0], list):
        return False
    names = [name for group in groups[0] for name in (_entries(group).get("params") or [[None]])[0]]
    return all(isinstance(name, str) for name in names)


def _is_flat(entries: dict[Any, list[Any]]) -> bool:
    """Tell whether a dictionary is a flat optimizer, with keys like `param_groups.fc.weight.lr`."""
    return bool(entries) and all(isinstance(key, str) and key.startswith(_OF_FLAT) for key in entries)


def _unnamed(entries: dict[Any, list[Any]]) -> dict[Any, list[Any]]:
    """Return a flat optimizer that does not name all parameters of a group: stages know their own ones only."""
    return {key: [[]] if key.endswith(f".{_PARAMETER_NAMES}") else value for key, value in entries.items()}


def _settings(group: dict[Any, list[Any]]) -> dict[Any, list[Any]]:
    return {key: value for key, value in group.items() if key not in ("params", _PARAMETER_NAMES)}


def _joined_states(one: dict[Any, list[Any]], other: dict[Any, list[Any]]) -> Any:
    """Join the state of two optimizers. Raises ValueError as `_joined_values` does."""
    first, second = (_entries(*(entries[_STATE] or [None])) for entries in (one, other))
    return {**one[_STATE][0], "dict": _joined_values(first, second)}


def _joined_values(one: dict[Any, list[Any]], other: dict[Any, list[Any]]) -> list[Any]:
    """Join what two optimizers have of their parameters. Raises ValueError if they contradict each other."""
    for key, value in one.items():
        if value != other.get(key, value):
            raise ValueError(f"stages have other values for {key}")
    return [[key, *value] for key, value in {**one, **other}.items()]


def names_by_path(names: Iterable[str], paths: Collection[str]) -> dict[str, list[str]]:
    """Return the names that begin with each of the paths, which are empty or end with a dot."""
    below: dict[str, list[str]] = {}
    for name in names:
        end = 0
        while True:
            if name[:end] in paths:
                below.setdefault(name[:end], []).append(name)
            end = name.find(".", end) + 1
            if not end:
                break
    return below
