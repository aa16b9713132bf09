"""Carry optimizer state along with its parameter (`followed`).

Where an equation takes parameters, it takes their state as well: what is before and behind the parameter's name stays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod

from reshard_mpi.errors import MapError
from reshard_mpi.mapping.box_pairs import Geometry, TargetShape, TermTensor
from reshard_mpi.mapping.direction import Direction, Inventory, TemplateShapes
from reshard_mpi.mapping.matching import Match, whole_pair
from reshard_mpi.mapping.rules import EquationRule, Rules
from reshard_mpi.mapping.state_owners import (
    NameAffixes,
    has_shape_of,
    parted_anywhere,
    parted_by,
    source_affixes,
    target_affixes,
    with_state,
)

_MAX_NAMED = 5


def followed(
    rules: Rules,
    matches: Sequence[Match],
    left: Mapping[str, None],
    inventory: Inventory,
    direction: Direction,
    like: TemplateShapes | None,
) -> Iterator[Match]:
    """Yield the state that follows parameters: parameters in `matches`, and for `rules.states` unmapped ones too.

    Args:
        left: the names of tensors that no equation has taken.
        like: decides which of `rules.states` applies.

    Raises MapError if some of the parameters that are put together have a state that others lack.
    """
    match_of = {
        name: number for number, match in enumerate(matches) for name in (*match.sources.values(), *match.equal)
    }
    by_affixes: dict[NameAffixes, list[EquationRule]] = {}
    for rule in rules.states:
        by_affixes.setdefault(source_affixes(rule, direction), []).append(rule)
    families: dict[tuple[int, NameAffixes], set[str]] = {}
    shapes = {name: kind.shape for name, kind in inventory.items()}
    parameters = with_state(shapes)
    parted = {name: parted_by(name, by_affixes, shapes) or parted_anywhere(name, shapes) for name in left}
    states = {name: owner for name, owner in parted.items() if owner is not None and name not in parameters}
    # Of a square parameter [8, 8], Shampoo's matrices have its shape by chance; of the others they have not.
    by_chance = {affixes for name, (base, affixes) in states.items() if not has_shape_of(name, base, shapes)}
    # Of a column [4, 1], Adafactor's sums over columns have its shape by chance: beside sums over rows, [1, 1].
    with_sums = {base for name, (base, _) in states.items() if _is_sum(shapes[name], shapes[base])}
    by_chance |= {affixes for base, affixes in states.values() if base in with_sums and not affixes.has_word_beside}
    for name, (base, affixes) in states.items():
        if not has_shape_of(name, base, shapes):
            continue
        if base in match_of:
            if affixes in by_chance and not is_copied(matches[match_of[base]], shapes):
                continue
            families.setdefault((match_of[base], affixes), set()).add(base)
            continue
        chosen = _chosen(by_affixes.get(affixes, ()), (base,), direction, like)
        if chosen is not None:
            yield _of_kept(chosen, name, target_affixes(chosen, direction).around(base), inventory)
    for (number, affixes), bases in families.items():
        match = _having_state(matches[number], bases, affixes)
        chosen = _chosen(by_affixes.get(affixes, ()), tuple(match.targets.values()), direction, like)
        new_affixes = affixes if chosen is None else target_affixes(chosen, direction)
        yield _state(match, affixes, new_affixes, inventory, chosen)


def _having_state(match: Match, bases: Collection[str], affixes: NameAffixes) -> Match:
    """Return the part of a match that has a state: a BatchNorm's running figures have none, weight and bias may have.

    Of tensors that are equal, the others need none: torch has one state of tied weights.

    Args:
        bases: the names of the parameters that have it.
        affixes: what is around them in those of the state.

    Raises MapError if some of the parameters that a tensor is made of have it, and others have not.
    """
    having = [name for name in (*match.sources.values(), *match.equal) if name in bases]
    if len(match.sources) == 1 and match.equal:
        return match._replace(sources=dict.fromkeys(match.sources, having[0]), equal=tuple(having[1:]))
    targets = {}
    for place, target in match.targets.items():
        parts = dict.fromkeys(match.sources[pair.source] for pair in match.geometry.targets[place].pairs)
        needed = [*parts, *match.equal]
        lacking = [name for name in needed if name not in bases]
        if not lacking:
            targets[place] = target
        elif len(lacking) < len(needed):
            raise MapError(
                "some of the parameters that are put together have a state that others have not",
                expected=", ".join(map(affixes.around, needed[:_MAX_NAMED])),
                got=f"not there, or of another shape: {', '.join(map(affixes.around, lacking[:_MAX_NAMED]))}",
                where=match.rule.where,
            )
    return match._replace(
        sources={place: name for place, name in match.sources.items() if name in bases},
        targets=targets,
        geometry=match.geometry._replace(targets={place: match.geometry.targets[place] for place in targets}),
    )


def _is_sum(shape: tuple[int, ...], of_parameter: tuple[int, ...]) -> bool:
    """Tell whether state has the shape of sums over some axes of its parameter, which has two axes or more."""
    is_alike = len(shape) == len(of_parameter) > 1 and all(size in (1, own) for size, own in zip(shape, of_parameter))
    return is_alike and shape != of_parameter


def is_copied(match: Match, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Tell whether tensors that an equation makes are its source as it is, under other names."""
    wholes = [whole_pair(place, shapes[name]) for place, name in match.sources.items()]
    return all(
        [pair._replace(order=None) for pair in made.pairs] == wholes
        and not made.zeros
        and all(pair.order in (None, tuple(range(len(made.shape)))) for pair in made.pairs)
        for made in match.geometry.targets.values()
    )


def _chosen(
    rules: Sequence[EquationRule], targets: Sequence[str], direction: Direction, like: TemplateShapes | None
) -> EquationRule | None:
    """Return the first rule that makes state that the target is to have.

    Args:
        targets: the names of the parameters that it is made for.
    """
    for rule in rules:
        if like is None or all(target_affixes(rule, direction).around(name) in like for name in targets):
            return rule
    return None


def _of_kept(rule: EquationRule, name: str, target: str, inventory: Inventory) -> Match:
    """Return how the state of a parameter that no equation takes gets another name."""
    place, shape = TermTensor(0, ()), inventory[name].shape
    whole = TargetShape(shape, (whole_pair(place, shape),), ())
    return Match(rule, {place: name}, {place: target}, Geometry({place: whole}, {}))


def _state(
    match: Match,
    affixes: NameAffixes,
    target_affixes: NameAffixes,
    inventory: Inventory,
    state_rule: EquationRule | None,
) -> Match:
    """Return how the state of the tensors of a match follows them. state_rule: the one that gives it other affixes."""
    rule = match.rule if state_rule is None else match.rule._replace(warning=state_rule.warning)
    sources = {place: affixes.around(name) for place, name in match.sources.items()}
    targets = {place: target_affixes.around(name) for place, name in match.targets.items()}
    equal = tuple(map(affixes.around, match.equal))
    shapes_alike = all(
        inventory[sources[place]].shape == inventory[name].shape for place, name in match.sources.items()
    )
    if shapes_alike and not (affixes.is_count and prod(inventory[next(iter(sources.values()))].shape) == 1):
        return Match(rule, sources, targets, match.geometry, equal)
    # A number of each parameter, such as its step: all must have the same.
    (first, name), *others = sources.items()
    shape = inventory[name].shape
    whole = TargetShape(shape, (whole_pair(first, shape),), ())
    return Match(
        rule,
        {first: name},
        targets,
        Geometry(dict.fromkeys(targets, whole), {}),
        (*(other for _, other in others), *equal),
    )
