"""Decide in which direction a map is read, by the tensors that are there (`told_direction`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.formats.tensor_table import TensorType
from reshard_mpi.mapping.axis_sizes import extent
from reshard_mpi.mapping.equations import Term, axes_of
from reshard_mpi.mapping.rules import EquationRule, Rules
from reshard_mpi.text import counted, did_you_mean, first_few, shortened

# How many names are given in an error.
MAX_NAMED = 5


# The tensors of a checkpoint by name, in its order, as a whole: without boxes.
Inventory = Mapping[str, TensorType]
# The shapes of the tensors of a checkpoint that the target is to be like, by name.
TemplateShapes = Mapping[str, tuple[int, ...]]
# What the captures that all names share stand for.
Key = tuple[str, ...]


class Candidates(NamedTuple):
    """The tensors that fit the terms of a side: for each term, by key, the names by the values of other captures."""

    by_term: tuple[Mapping[Key, Mapping[tuple[int, ...], str]], ...]
    # by key, the name of one that is named as what a term puts together, and does not fit
    misfits: Mapping[Key, str]

    @property
    def all_keys(self) -> list[Key]:
        return list(dict.fromkeys(key for names in self.by_term for key in names))

    def lacking(self, key: Key) -> list[int]:
        """Return the numbers of the terms that no tensor fits with this key."""
        return [number for number, names in enumerate(self.by_term) if key not in names]


def wanted_shapes(
    rule: EquationRule, target: Sequence[Term], key: Key, like: TemplateShapes
) -> tuple[tuple[int, ...], ...] | None:
    """Return the shapes of what an equation makes as they are in `like`; None if one of the tensors is not there.

    Of tensors that a term stands for together, the first one is looked at.
    """
    shared = dict(zip(rule.shared, key))
    shapes = []
    for term in target:
        others = len(term.name.captures) - len(shared)
        shape = like.get(filled(term, shared, (0,) * others))
        if shape is None or (term.dims is not None and len(term.dims) != len(shape)):
            return None
        shapes.append(shape)
    return tuple(shapes)


def candidates_of(side: Sequence[Term], rule: EquationRule, inventory: Inventory) -> Candidates:
    """Return the tensors that fit the terms of a side, each by itself."""
    by_term = []
    misfits: dict[Key, str] = {}
    for term in side:
        names: dict[Key, dict[tuple[int, ...], str]] = {}
        captures = [capture.name for capture in term.name.captures]
        shared = [captures.index(name) for name in rule.shared]
        others = [number for number in range(len(captures)) if number not in shared]
        plain = term.name.text if not captures else None
        ndim, lengths = None if term.dims is None else len(term.dims), _lengths_told(term)
        for name in (plain,) if plain is not None and plain in inventory else () if plain is not None else inventory:
            values, shape = term.name.match(name), inventory[name].shape
            fits = ndim is None or (len(shape) == ndim and all(shape[dim] == length for dim, length in lengths))
            if values is None or not fits:
                loose = term.name.match_loosely(name) if others else None
                if loose is not None:
                    misfits.setdefault(tuple(loose[number] for number in shared), name)
                continue
            key = tuple(values[number] for number in shared)
            names.setdefault(key, {})[tuple(int(values[number]) for number in others)] = name
        by_term.append(names)
    return Candidates(tuple(by_term), misfits)


def _lengths_told(term: Term) -> list[tuple[int, int]]:
    """Return the dimensions of a term whose lengths are numbers, with these."""
    dims = enumerate(term.dims or ())
    return [(number, extent(dim, {})) for number, dim in dims if all(name.isdecimal() for name in axes_of(dim))]


def filled(term: Term, shared: Mapping[str, str], values: tuple[int, ...]) -> str:
    """Return the name of a tensor. values: of the captures that not all names of the equation share."""
    others = [capture.name for capture in term.name.captures if capture.name not in shared]
    return term.name.filled({**shared, **dict(zip(others, values))})


def shown_term(term: Term) -> str:
    """Return the name and the number of dimensions of a term, as words."""
    return term.name.text if term.dims is None else f"{term.name.text} of {counted(len(term.dims), 'dimension')}"


def shown(inventory: Inventory) -> str:
    """Return the first tensors with their shapes, as words."""
    return first_few([f"{name} {list(kind.shape)}" for name, kind in inventory.items()], MAX_NAMED) or "no tensors"


def filled_in_part(term: Term, shared: Mapping[str, str]) -> str:
    others = {capture.name: f"{{{capture.name}}}" for capture in term.name.captures}
    return term.name.filled(others | dict(shared))


def what_is_missing(side: Sequence[Term], rule: EquationRule, inventory: Inventory) -> str:
    """Say which tensors of a side are missing and which are there; else say what exists."""
    candidates = candidates_of(side, rule, inventory)
    key = min(candidates.all_keys, key=lambda key: len(candidates.lacking(key)), default=None)
    shared = {} if key is None else dict(zip(rule.shared, key))
    lacking = range(len(side)) if key is None else candidates.lacking(key)
    if not lacking:
        return f"these tensors are there: {shown(inventory)}"
    missing = [filled_in_part(side[number], shared) for number in lacking]
    there = [] if key is None else [next(iter(names[key].values())) for names in candidates.by_term if key in names]
    first = side[lacking[0]].name
    likely = first.filled({capture.name: "0" for capture in first.captures} | shared)
    if likely in inventory:
        nearest = f" ({likely} has the shape {list(inventory[likely].shape)})"
    else:
        nearest = did_you_mean(likely, (name for name in inventory if name not in there))
    are = "is" if len(missing) == 1 else "are"
    others = f" and {shortened(there)} {'is' if len(there) == 1 else 'are'}" if there else ""
    return f"{shortened(missing)} {are} not there{others}{nearest}"


class UnfitMapError(MapError):
    """A map's equations are about other names than the checkpoint has."""


class Direction(NamedTuple):
    """Which side of equations the source's tensors are on."""

    is_forward: bool

    def sides(self, rule: EquationRule) -> tuple[Sequence[Term], Sequence[Term]]:
        """Return the terms of the source side and of the target side."""
        sides = rule.equation.left, rule.equation.right
        return sides if self.is_forward else sides[::-1]

    def needs_like(self, rule: EquationRule) -> bool:
        """Tell whether it takes a checkpoint that the target is to be like to tell where an equation applies."""
        return rule.like in (("only", "needed", "forward") if self.is_forward else ("only", "needed"))

    @property
    def source_side(self) -> str:
        return "left" if self.is_forward else "right"

    def __str__(self) -> str:
        return "forward" if self.is_forward else "backward"


def told_direction(
    rules: Rules, inventory: Inventory, forward: bool | None, like: TemplateShapes | None = None
) -> Direction:
    """Return the direction in which a map is read.

    Args:
        forward: as the user says; None: as the names tell. Where these fit both directions, an equation that the user
            has typed is read as it is written.

    Raises MapError if names fit neither direction, or both those of a file.
    """
    if forward is not None:
        return Direction(forward)
    unmet = {direction: _unmet(rules, inventory, direction, like) for direction in (Direction(True), Direction(False))}
    fitting = [direction for direction, lack in unmet.items() if lack is None]
    if not fitting and all(lack is not None and lack.rule is None for lack in unmet.values()):
        fitting = [direction for direction in unmet if _has_state(rules, inventory, direction)]
        fitting = fitting or [direction for direction in unmet if _keeps_any(rules, inventory, direction)]
    if rules.is_typed and fitting and not fitting[0].is_forward and _takes_any_name(rules):
        raise MapError(
            "no tensor has a name of the equation's left side, and its right side takes any name",
            expected="names of the left side, or --reverse if it is to be read from right to left",
            got=shown(inventory),
            where=rules.where,
            remedy="mend the equation, or say --reverse",
        )
    if len(fitting) == 1 or (fitting and rules.is_typed):
        return fitting[0]
    if fitting:
        raise MapError(
            "the map can be read in both directions",
            expected="--forward, from left to right, or --reverse",
            got="tensors that fit the left and the right sides of its equations",
            where=rules.where,
            remedy="say which",
        )
    forwards, backwards = (lack.why(direction, inventory) for direction, lack in unmet.items() if lack is not None)
    has_like = like is not None
    raise UnfitMapError(
        "the map does not fit the checkpoint in either direction",
        expected="tensors for all of its equations, read from left to right or from right to left",
        got=f"forward, {forwards}; backward, {backwards}",
        where=rules.where,
        remedy="mend the names, or say optional = true where an equation need not apply;"
        + " give the --like that belongs to the map, since equations apply only where they make what is in it;"
        * has_like
        + " --forward and --reverse tell what is wrong with one direction",
    )


def _takes_any_name(rules: Rules) -> bool:
    """Tell whether the right sides of equations take tensors of any name, as `{p*}` does, so that they tell nothing."""
    return any(term.name.is_any for rule in rules.equations for term in rule.equation.right)


def _has_state(rules: Rules, inventory: Inventory, direction: Direction) -> bool:
    """Tell whether there is state of a tensor by its name in this direction, where equations tell nothing."""
    sides = ((direction.sides(rule)[0], rule) for rule in rules.states)
    keys = (key for side, rule in sides for key in candidates_of(side, rule, inventory).all_keys)
    return any(parameter in inventory for (parameter,) in keys)


def _keeps_any(rules: Rules, inventory: Inventory, direction: Direction) -> bool:
    """Tell whether an equation that keeps names, so that it fits both directions, applies."""
    kept = ((direction.sides(rule)[0], rule) for rule in rules.equations if rule.keeps_names)
    found = (candidates_of(side, rule, inventory) for side, rule in kept)
    return any(not each.lacking(key) for each in found for key in each.all_keys)


class _Unmet(NamedTuple):
    """Why a direction does not fit. rule: an equation that applies nowhere, though it must; None: none applies."""

    rule: EquationRule | None

    def why(self, direction: Direction, inventory: Inventory) -> str:
        """Return it in words: these take long to find among many names."""
        if self.rule is None:
            return "no equation applies"
        source, _ = direction.sides(self.rule)
        return f"{self.rule.where}: {what_is_missing(source, self.rule, inventory)}"


def _unmet(rules: Rules, inventory: Inventory, direction: Direction, like: TemplateShapes | None) -> _Unmet | None:
    """Return why a map cannot be read in this direction; None if it can.

    An equation whose names are the same on both sides, or that only `like` can tell about, says nothing.
    """
    telling = [rule for rule in rules.equations if not rule.keeps_names and (like or not direction.needs_like(rule))]
    any_applies = all(rule.keeps_names for rule in rules.equations)
    for rule in telling:
        source, target = direction.sides(rule)
        candidates = candidates_of(source, rule, inventory)
        applies = any(
            not candidates.lacking(key) and (like is None or wanted_shapes(rule, target, key, like) is not None)
            for key in candidates.all_keys
        )
        any_applies = any_applies or applies
        if not applies and not rule.is_optional:
            return _Unmet(rule)
    return None if any_applies else _Unmet(None)
