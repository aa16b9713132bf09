"""Move dictionaries and lists of a nest where a map puts all of their tensors (`moved`).

Tensors belong to dictionaries by their names: those of `{"params": {"fc": {"weight": T}}}` that get names like
`params.proj.weight` leave `fc`, and what else is in it. So it becomes `proj` as well.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any, NamedTuple

from reshard_mpi.formats.nest.entries import entries_of, pairs_of, parts_in
from reshard_mpi.mapping.made_parameters import MadeParameter
from reshard_mpi.mapping.optimizers import GROUPS, STATE_KEY, Optimizer


class _MovedPart(NamedTuple):
    """A dictionary or list, with its entry in the dictionary around it, and what becomes of it."""

    around: Any
    entry: list[Any]
    path: str  # what names of tensors in it begin with
    sources: frozenset[str]  # the tensors in it
    begins: frozenset[str]  # what their names begin with afterwards, once for each copy of it


def new_names_of(parameters: Iterable[MadeParameter]) -> list[tuple[str, str]]:
    """Return names of tensors of the source, in order, each with the name of a tensor that is made of it."""
    return sorted((source, name) for name, sources, _ in parameters for source in sources)


def names_below(names: Sequence[tuple[str, str]], begin: str) -> Sequence[tuple[str, str]]:
    """Return the part of `new_names_of` that begins with a path, which is empty or ends with a dot."""
    first, end = (bisect_left(names, (text, "")) for text in (begin, f"{begin[:-1]}/"))  # "/" comes after "."
    return names[first:end] if begin else names


def has_below(names: Sequence[str], begin: str) -> bool:
    """Tell whether one of some names, which are in order, begins with a text."""
    place = bisect_left(names, begin)
    return place < len(names) and names[place].startswith(begin)


def moved(
    root: Any, names: Sequence[tuple[str, str]], optimizers: Iterable[Optimizer], models: Collection[str | None]
) -> list[tuple[str, str]]:
    """Move dictionaries and lists of a nest, and return `names` as if tensors in them had been called so before.

    They stay if another dictionary, value or tensor has their place, or if they become one and are not alike.

    Args:
        names: as of `new_names_of`.
        optimizers: of the nest, which stay.
        models: what names of the optimizers' models begin with; these stay, since names of parameters go by that.
    """
    apart = tuple(f"{each.path}{key}." for each in optimizers for key in (STATE_KEY, GROUPS))
    whole = *apart, *filter(None, models)
    moves = [*_moves(root, "", names, apart, whole)]
    made = sorted((name, source) for source, name in names) if moves else []
    while True:
        entries = {id(move.entry) for move in moves}
        nodes, taken = {}, set[str]()
        for path, node in parts_in(root, "", entries):
            nodes[path] = node
            taken.update(f"{path}{entry[0]}" for entry in entries_of(node) or () if id(entry) not in entries)
        paths = sorted(nodes)
        becoming: dict[str, list[_MovedPart]] = {}
        for move in moves:
            for begin in move.begins:
                becoming.setdefault(begin, []).append(move)
        blocked = set[int]()
        for begin, those in becoming.items():
            sources = frozenset[str]().union(*(move.sources for move in those))
            is_taken = has_below(paths, begin) or begin[:-1] in taken or begin.startswith(apart)
            is_shared = any(source not in sources for _, source in names_below(made, begin))
            if is_taken or is_shared or any(move.entry[1] != those[0].entry[1] for move in those):
                blocked.update(id(move.entry) for move in those)
        if not blocked:
            break
        inner = [_moves(move.entry[1], move.path, names, apart, whole) for move in moves if id(move.entry) in blocked]
        moves = [*(move for move in moves if id(move.entry) not in blocked), *chain.from_iterable(inner)]
    _carry_out(moves, becoming, {path: node for path, node in nodes.items() if entries_of(node) is not None})
    of_moves = frozenset[str]().union(*(move.sources for move in moves))
    return sorted((name if source in of_moves else source, name) for source, name in names)


def _moves(
    node: Any, path: str, names: Sequence[tuple[str, str]], apart: tuple[str, ...], whole: Iterable[str]
) -> Iterator[_MovedPart]:
    """Yield the outermost dictionaries and lists in a part of a nest whose tensors all get other beginnings.

    Args:
        apart: what names begin with in parts that stay with all that is in them; whole: in any that stay.
    """
    entries = {entry[0]: entry for entry in entries_of(node) or () if len(entry) == 2 and type(entry[0]) in (str, int)}
    for key, value in pairs_of(node):
        begin = f"{path}{key}."
        own = names_below(names, begin)
        if not own or begin.startswith(apart) or not isinstance(value, dict | list):
            continue
        begins = _new_begins(begin, own) if key in entries else frozenset()
        if begins and not any(each.startswith(begin) for each in whole):
            yield _MovedPart(node, entries[key], begin, frozenset(source for source, _ in own), begins)
        else:
            yield from _moves(value, begin, names, apart, whole)


def _new_begins(begin: str, own: Sequence[tuple[str, str]]) -> frozenset[str]:
    """Return what names of tensors begin with in place of `begin`; nothing if some stay, or go on otherwise."""
    sources_of: dict[str, set[str]] = {}
    for source, name in own:
        rest = source[len(begin) :]
        if name.startswith(begin) or not name.endswith(f".{rest}"):
            return frozenset()
        sources_of.setdefault(name.removesuffix(rest), set()).add(source)
    return frozenset(sources_of) if len({len(sources) for sources in sources_of.values()}) == 1 else frozenset()


def _carry_out(moves: Sequence[_MovedPart], becoming: dict[str, list[_MovedPart]], nodes: dict[str, Any]) -> None:
    """Put dictionaries and lists into those around their new places. nodes: the dictionaries that stay, by path."""
    replaced: dict[int, list[list[Any]]] = {id(move.entry): [] for move in moves}
    for begin, (first, *_) in becoming.items():
        path = begin
        while path not in nodes:
            path = path[: path.rfind(".", 0, -1) + 1]
        key = begin[len(path) : -1]
        is_number = type(first.entry[0]) is int and key.isdecimal() and key == str(int(key))
        value = deepcopy(first.entry[1]) if len(first.begins) > 1 else first.entry[1]
        entry = [int(key) if is_number else key, value]
        if nodes[path] is first.around:
            replaced[id(first.entry)].append(entry)
        else:
            nodes[path]["dict"].append(entry)
    for move in {id(move.around): move for move in moves}.values():
        entries = move.around["dict"]
        move.around["dict"] = [new for entry in entries for new in replaced.get(id(entry), [entry])]
