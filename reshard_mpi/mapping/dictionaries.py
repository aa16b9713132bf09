"""Move dictionaries of a nest where a map puts their tensors (`moved`), and check that optimizers find them there.

Tensors belong to dictionaries by their names: those of `{"params": {"fc": {"weight": T}}}` that get names like
`params.proj.weight` leave `fc`, and what else is in it. So it becomes `proj` as well. Names in an optimizer go by the
dictionary of its model, so that has to be one dictionary afterwards too (`require_homes`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any, NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.formats.nest import dictionaries_in, entries_of, pairs_of, parts_in
from reshard_mpi.groups import grouped
from reshard_mpi.mapping.follow_parameters import MadeParameter
from reshard_mpi.mapping.optimizers import GROUPS, STATE_KEY, Form, Optimizer
from reshard_mpi.text import shortened


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
        becoming = grouped((begin, move) for move in moves for begin in move.begins)
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


# An optimizer of a target, and the source's that it has come of.
_Pair = tuple[Optimizer, Optimizer]


class NestedTensors(NamedTuple):
    """The tensors of a file by name, and what their names begin with in its dictionaries."""

    names: frozenset[str]
    paths: Collection[str]

    @classmethod
    def of(cls, names: Iterable[str], root: Any) -> NestedTensors:
        return cls(frozenset(names), [path for path, _ in dictionaries_in(root)])

    def homes_of(self, parameters: Collection[str]) -> list[str]:
        """Return what names begin with in the dictionaries that have all parameters of an optimizer, by its names.

        At the root these are whole names, and the tensors do not lie together in an inner dictionary.
        """
        one = next(iter(parameters), "")
        begins = (path for path in self.paths if f"{path}{one}" in self.names)
        homes = [begin for begin in begins if all(f"{begin}{name}" in self.names for name in parameters)]
        return [home for home in homes if home or home_of(parameters, self.paths) == ""]

    def has_whole(self, parameters: Collection[str]) -> bool:
        """Tell whether names in an optimizer are whole names of tensors, wherever these lie."""
        return self.names.issuperset(parameters)


def home_of(names: Collection[str], paths: Iterable[str]) -> str:
    """Return what names begin with in the innermost dictionary that has all of some tensors."""
    return max((path for path in paths if all(name.startswith(path) for name in names)), key=len, default="")


def require_homes(
    pairs: Iterable[_Pair],
    source: NestedTensors,
    target: NestedTensors,
    sources_of: Mapping[str, Collection[str]],
    where: str,
) -> None:
    """Raise MapError if names in a target's optimizers fit no dictionary, though they fit one in the source.

    Models of optimizers that share names become the same. An optimizer without its tensors keeps its names.

    Args:
        pairs: optimizers of the target, each with the source's that it has come of.
        sources_of: as of `check_optimizers.MadeTensors`.
    """
    used = frozenset[str]().union(*sources_of.values())
    groups: list[list[_Pair]] = []
    for own, of_source in pairs:
        tensors = [name for name in source.names if name.startswith(of_source.path)]
        if not own.parameters or (tensors and used.isdisjoint(tensors)):
            continue
        if of_source.form is Form.NUMBERS and target.has_whole(own.parameters):
            continue  # its names may be whole
        shared = [group for group in groups if any(own.parameters.keys() & each.parameters for each, _ in group)]
        groups = [group for group in groups if group not in shared]
        groups.append([*chain.from_iterable(shared), (own, of_source)])
    for group in groups:
        if any(_has_lost_its_model(pair, source, target, sources_of, is_shared=len(group) > 1) for pair in group):
            raise MapError(
                "names in an optimizer go by the dictionary of its model, and would be those of no dictionary",
                expected="a key for each model that nothing else in the file has, or the same equations for all models",
                got=shortened(sorted({name for own, _ in group for name in own.parameters})),
                where=where,
                remedy="give the model another key, or leave the optimizer out (--exclude)",
            )


def _has_lost_its_model(
    pair: _Pair,
    source: NestedTensors,
    target: NestedTensors,
    sources_of: Mapping[str, Collection[str]],
    *,
    is_shared: bool,
) -> bool:
    """Tell whether no dictionary of a target has the names in its optimizer, or only one that is made of others.

    Args:
        is_shared: whether other optimizers have such names. Any dictionary with them in the source may be the model
            then, so what becomes of all of them has to fit.
    """
    own, of_source = pair
    homes, before = target.homes_of(own.parameters), source.homes_of(of_source.parameters)
    # Behind a wrapper (`module.w` in a dictionary, `w` in the optimizer) names go by no dictionary, and are not whole.
    become_whole = target.has_whole(own.parameters) and not source.has_whole(of_source.parameters)
    if not homes and (before or become_whole or of_source.form is Form.NUMBERS):
        return True
    pairs = [*zip(own.parameters, of_source.parameters)]
    return is_shared and any(
        len(own.parameters) != len(of_source.parameters)
        or not any(all(f"{old}{of}" in sources_of.get(f"{new}{name}", ()) for name, of in pairs) for new in homes)
        for old in before
    )
