"""Names of a checkpoint and the nested dictionaries and lists that they come from, in both directions.

torch joins the keys on the way to a tensor or object by dots, and keeps them as a path: texts are keys of dictionaries,
numbers are places in lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

from reshard_mpi.errors import ShardError
from reshard_mpi.formats.nest.trees import Call, Dict, Global, Value, parts

Keys = tuple[str | int, ...]

# Dictionaries of other classes; what is in them is flattened like that of a plain one.
_DICTIONARIES = frozenset(Global("collections", name) for name in ("OrderedDict", "defaultdict"))
# Lists may lack items, which torch fills with None: those that were empty dictionaries.
_MOST_LACKING = 1 << 16


class Leaf(NamedTuple):
    """A tensor of the checkpoint in a tree."""

    name: str


def tree_of(values: Iterable[tuple[Keys, Value]], where: str) -> Value:
    """Return the nested dictionaries and lists in which each value lies at its path.

    Raises ShardError if two paths contradict each other.
    """
    root: dict[str | int, Value] = {}
    lists: list[_List] = []
    for path, value in values:
        inner = root
        for key, further in pairwise(path):
            if key not in inner:
                inner[key] = _List() if type(further) is int else _Dictionary()
                if type(further) is int:
                    lists.append(inner[key])
            made = inner[key]
            if type(made) is not (_List if type(further) is int else _Dictionary):
                raise _contradiction(path, where)
            inner = made
        if path[-1] in inner:
            raise _contradiction(path, where)
        inner[path[-1]] = value
    places = [[key for key in made if type(key) is int] for made in lists]
    if sum(max(keys) + 1 - len(keys) for keys in places) > _MOST_LACKING or any(min(keys) < 0 for keys in places):
        raise ShardError("lists of a checkpoint lack most of their items", where=where)
    return _finished(root)


class _Dictionary(dict[str | int, Value]):
    """A dictionary of the tree while it is made."""


class _List(dict[str | int, Value]):
    """A list of the tree while it is made, by place."""


def _finished(made: Mapping[str | int, Value]) -> Value:
    values = {key: _finished(value) if type(value) in (_Dictionary, _List) else value for key, value in made.items()}
    if type(made) is not _List:
        return Dict([part for pair in values.items() for part in pair])
    length = max(key for key in values if type(key) is int) + 1
    return [values.get(at) for at in range(length)]


def _contradiction(path: Keys, where: str) -> ShardError:
    return ShardError(
        "two entries of a checkpoint are to lie at one place", got=f"keys {list(path)}"[:300], where=where
    )


def flattened(root: Value) -> Iterator[tuple[Keys, Value]]:
    """Yield the path of every tensor and object of a tree, in order.

    As torch does: dictionaries are taken apart, lists if there are tensors or dictionaries in them, and all else, too,
    that has tensors in it. Empty dictionaries vanish.
    """
    if type(root) is Dict:
        yield from _dictionary(root.pairs(), ())
    else:
        yield from ((tuple(map(str, path[:1])) + path[1:], value) for path, value in _opened(root, ()))


def _dictionary(pairs: Iterable[tuple[Value, Value]], path: Keys) -> Iterator[tuple[Keys, Value]]:
    for key, value in pairs:
        yield from _value(value, (*path, str(key)))


def _value(value: Value, path: Keys) -> Iterator[tuple[Keys, Value]]:
    if type(value) is Leaf:
        yield path, value
    elif _is_dictionary(value) or (type(value) is list and _has_more(value)) or _has_tensors(value):
        yield from _opened(value, path)
    else:
        yield path, value


def _opened(value: Value, path: Keys) -> Iterator[tuple[Keys, Value]]:
    """Yield what is in a value that is not kept as one."""
    if type(value) is Dict:
        yield from _dictionary(value.pairs(), path)
    elif type(value) is list or type(value) is tuple:
        for at, item in enumerate(value):
            yield from _value(item, (*path, at))
    elif type(value) is Call:
        for at, item in enumerate((*value.args, *(value.items or ()))):
            yield from _value(item, (*path, str(at)))
        if value.flat:
            yield from _dictionary(value.pairs(), path)
        if type(value.state) is Dict and (not _is_dictionary(value) or _has_tensors(value.state)):
            yield from _dictionary(value.state.pairs(), path)


def _is_dictionary(value: Value) -> bool:
    return type(value) is Dict or (type(value) is Call and value.function in _DICTIONARIES)


def _has_more(values: list[Value]) -> bool:
    """Tell whether there are tensors or dictionaries in a list, or in lists in it."""
    return any(
        type(value) is Leaf or _is_dictionary(value) or (type(value) is list and _has_more(value)) for value in values
    )


def _has_tensors(value: Value) -> bool:
    return type(value) is Leaf or any(map(_has_tensors, parts(value)))
