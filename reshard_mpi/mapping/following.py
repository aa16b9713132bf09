"""State that belongs to a parameter: tensors with the parameter's name in theirs, and its shape or a single element.

`moments.w`, `adam_m.w`, `optimizer.state.w.exp_avg` and `optimizer.state.w.step` belong to `w`. Where an equation takes
parameters, it takes their state as well: what is before and behind the parameter's name stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.mapping.matching import Inventory, Match, whole_pair
from reshard_mpi.mapping.pairs import Geometry, TargetShape

_MAX_NAMED = 5


class Affixes(NamedTuple):
    """What is before and behind a parameter's name in that of its state."""

    before: str
    behind: str

    def around(self, name: str) -> str:
        return f"{self.before}{name}{self.behind}"


def followed(matches: Sequence[Match], left: Mapping[str, None], inventory: Inventory) -> Iterator[Match]:
    """Yield the state that follows the parameters of `matches`.

    left: the names of tensors that no equation has taken. Raises MapError if some of the parameters that are put
    together have a state that others lack.
    """
    match_of = {
        name: number for number, match in enumerate(matches) for name in (*match.sources.values(), *match.equal)
    }
    families: dict[tuple[int, Affixes], set[str]] = {}
    for name in left:
        base = _base(name, match_of)
        if base is None:
            continue
        before, _, behind = name.partition(base)
        is_alike = inventory[name].shape == inventory[base].shape
        if is_alike or prod(inventory[name].shape) == 1:
            families.setdefault((match_of[base], Affixes(before, behind)), set()).add(base)
    for (number, affixes), bases in families.items():
        match = matches[number]
        needed = [*match.sources.values(), *match.equal]
        lacking = [name for name in needed if name not in bases]
        if lacking:
            raise MapError(
                "some of the parameters that are put together have a state that others have not",
                expected=", ".join(map(affixes.around, needed[:_MAX_NAMED])),
                got=f"not there, or of another shape: {', '.join(map(affixes.around, lacking[:_MAX_NAMED]))}",
                where=match.rule.where,
            )
        yield _state(match, affixes, inventory)


def _base(name: str, known: Mapping[str, int]) -> str | None:
    """Return the longest of the `known` names that is a part of `name`, between dots; None if none is."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        for start in range(len(parts) - length + 1):
            candidate = ".".join(parts[start : start + length])
            if candidate in known:
                return candidate
    return None


def _state(match: Match, affixes: Affixes, inventory: Inventory) -> Match:
    """Return how the state of the tensors of a match follows them."""
    sources = {place: affixes.around(name) for place, name in match.sources.items()}
    targets = {place: affixes.around(name) for place, name in match.targets.items()}
    equal = tuple(map(affixes.around, match.equal))
    if all(inventory[sources[place]].shape == inventory[name].shape for place, name in match.sources.items()):
        return Match(match.rule, sources, targets, match.geometry, equal)
    # A number of each parameter, such as its step: all must have the same.
    (first, name), *others = sources.items()
    shape = inventory[name].shape
    whole = TargetShape(shape, (whole_pair(first, shape),), ())
    return Match(
        match.rule,
        {first: name},
        targets,
        Geometry(dict.fromkeys(targets, whole), {}),
        (*(other for _, other in others), *equal),
    )
