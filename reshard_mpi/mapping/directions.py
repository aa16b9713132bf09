"""In which direction a map is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.mapping.candidates import Inventory, Likeness, candidates_of, shown, wanted_shapes, what_is_missing
from reshard_mpi.mapping.rules import EquationRule, Rules
from reshard_mpi.mapping.syntax import Term


class Direction(NamedTuple):
    """Which side of equations the source's tensors are on."""

    is_forward: bool

    def sides(self, rule: EquationRule) -> tuple[Sequence[Term], Sequence[Term]]:
        """Return the terms of the source and those of the target."""
        sides = rule.equation.left, rule.equation.right
        return sides if self.is_forward else sides[::-1]

    def needs_like(self, rule: EquationRule) -> bool:
        """Tell whether it takes a checkpoint that the target is to be like to tell where an equation applies."""
        return rule.like in (("only", "needed", "forward") if self.is_forward else ("only", "needed"))

    @property
    def source_side(self) -> str:
        return "left" if self.is_forward else "right"

    @property
    def target_side(self) -> str:
        return "right" if self.is_forward else "left"

    def __str__(self) -> str:
        return "forward" if self.is_forward else "backward"


def told_direction(rules: Rules, inventory: Inventory, forward: bool | None, like: Likeness | None = None) -> Direction:
    """Return the direction in which a map is read.

    forward: as the user says; None: as the names tell. Where these fit both directions, an equation that the user has
    typed is read as it is written. Raises MapError if names fit neither direction, or both those of a file.
    """
    if forward is not None:
        return Direction(forward)
    unmet = {direction: _unmet(rules, inventory, direction, like) for direction in (Direction(True), Direction(False))}
    fitting = [direction for direction, found in unmet.items() if found is None]
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
    forwards, backwards = (found.why(direction, inventory) for direction, found in unmet.items() if found is not None)
    has_like = like is not None
    raise MapError(
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


class _Unmet(NamedTuple):
    """Why a direction does not fit. rule: an equation that applies nowhere, though it must; None: none applies."""

    rule: EquationRule | None

    def why(self, direction: Direction, inventory: Inventory) -> str:
        """Return it in words: these take long to find among many names."""
        if self.rule is None:
            return "no equation applies"
        source, _ = direction.sides(self.rule)
        return f"{self.rule.where}: {what_is_missing(source, self.rule, inventory)}"


def _unmet(rules: Rules, inventory: Inventory, direction: Direction, like: Likeness | None) -> _Unmet | None:
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
