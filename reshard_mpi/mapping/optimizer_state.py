"""Carry optimizer state along with its parameter (`followed`).

`moments.w`, `adam_m.w`, `optimizer.state.w.exp_avg` and `optimizer.state.w.step` belong to `w`: one of the words around
the name is one that optimizers use. `encoder.w` is another parameter. Where an equation takes parameters, it takes
their state as well: what is before and behind the parameter's name stays.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.mapping.box_pairs import Geometry, TargetShape, TermTensor
from reshard_mpi.mapping.direction import Direction, Inventory, TemplateShapes
from reshard_mpi.mapping.equations import NamePattern
from reshard_mpi.mapping.matching import Match, whole_pair
from reshard_mpi.mapping.rules import EquationRule, Rules
from reshard_mpi.mapping.tensor_kinds import COUNTS, MODULE_WORDS, OF_MODEL, PART, STATE_KEY, STATE_WORDS, parts_of

_MAX_NAMED = 5


class NameAffixes(NamedTuple):
    """The text before and behind a parameter's name in its state's name."""

    before: str
    behind: str

    @property
    def is_count(self) -> bool:
        """Whether the affixes belong to a count of steps."""
        return not COUNTS.isdisjoint((*parts_of(self.before), *parts_of(self.behind)))

    @classmethod
    def of(cls, pattern: NamePattern) -> NameAffixes:
        """Return the affixes of the only capture in a name."""
        return cls(*pattern.literals)

    def around(self, name: str) -> str:
        return f"{self.before}{name}{self.behind}"

    def within(self, name: str) -> str | None:
        """Return the text between the affixes in a name; None if the name does not have them."""
        if not (name.startswith(self.before) and name.endswith(self.behind)):
            return None
        return name[len(self.before) : len(name) - len(self.behind)] or None


def is_state(name: str, rules: Rules, inventory: Inventory, direction: Direction) -> bool:
    """Tell whether a tensor is state that `rules.states` speak of; equations of parameters do not take it."""
    return _parted(name, (_source(rule, direction) for rule in rules.states), inventory) is not None


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
        by_affixes.setdefault(_source(rule, direction), []).append(rule)
    families: dict[tuple[int, NameAffixes], set[str]] = {}
    shapes = {name: kind.shape for name, kind in inventory.items()}
    parameters = with_state(shapes)
    parted = {name: _parted(name, by_affixes, shapes) or parted_anywhere(name, shapes) for name in left}
    states = {name: owner for name, owner in parted.items() if owner is not None and name not in parameters}
    # Of a square parameter [8, 8], Shampoo's matrices have its shape by chance; of the others they have not.
    by_chance = {affixes for name, (base, affixes) in states.items() if not _has_shape_of(name, base, shapes)}
    for name, (base, affixes) in states.items():
        if not _has_shape_of(name, base, shapes):
            continue
        if base in match_of:
            if affixes in by_chance and not is_copied(matches[match_of[base]], shapes):
                continue
            families.setdefault((match_of[base], affixes), set()).add(base)
            continue
        chosen = _chosen(by_affixes.get(affixes, ()), (base,), direction, like)
        if chosen is not None:
            yield _of_kept(chosen, name, _target(chosen, direction).around(base), inventory)
    for (number, affixes), bases in families.items():
        match = _having_state(matches[number], bases, affixes)
        chosen = _chosen(by_affixes.get(affixes, ()), tuple(match.targets.values()), direction, like)
        target_affixes = affixes if chosen is None else _target(chosen, direction)
        yield _state(match, affixes, target_affixes, inventory, chosen)


def owners(
    names: Iterable[str],
    shapes: Mapping[str, tuple[int, ...]],
    rules: Rules | None,
    direction: Direction | None,
    told: Mapping[str, str],
    *,
    in_target: bool = False,
) -> dict[str, str]:
    """Return, by name, the parameters that tensors are state of; other tensors are left out.

    Args:
        names: of some of the tensors of the source, or of the target.
        shapes: of all of them.
        told: parameters that optimizers tell, in place of those that names tell.
    """
    side = _target if in_target else _source
    state_rules = [] if rules is None or direction is None else [side(rule, direction) for rule in rules.states]
    parameters = with_state(shapes)
    parted = ((name, _parameter_of(name, state_rules, shapes)) for name in names if name not in parameters)
    found = ((name, _told(name, told, shapes) or owner[0]) for name, owner in parted if owner is not None)
    return {name: owner for name, owner in found if owner != name}


class OwnersInPart(NamedTuple):
    """Parameters of state, by its name, which has the end of the parameter's name behind a word for state."""

    owner_of: Mapping[str, str]
    in_doubt: Mapping[str, str]  # of what may be a module with such a word for its name

    def require_no_doubt(self, gone: Container[str], kept: Iterable[str]) -> None:
        """Raise MapError if a tensor that is kept may be state of one that goes."""
        for name in kept:
            owner = self.in_doubt.get(name)
            if owner in gone and name not in gone:
                raise MapError(
                    f"{owner} is left out, and its name does not tell whether {name} is state of it, or a parameter",
                    expected="a model below a key such as model, and its state beside that",
                    got=f"two tensors of one shape: {owner}, {name}",
                    remedy=f"leave both out (--exclude '{name}', or drop in a map), or take what is to stay by its"
                    " names alone (--include)",
                )


def owners_in_part(shapes: Mapping[str, tuple[int, ...]], told: Mapping[str, str]) -> OwnersInPart:
    """Return the parameters of state that has the end of a parameter's name behind a word for state.

    The model may be below a key: `model.w` beside `optimizer.state.w.exp_avg`. Where several end so, none is told.

    Args:
        shapes: of all tensors.
        told: parameters that optimizers tell.
    """
    parameters = [name for name in shapes if not is_named_like_state(name)]
    ends = frozenset(end for name in parameters for end in ends_of(name) if not end.isdecimal())  # torch has numbers
    parted_of: dict[str, tuple[str, NameAffixes]] = {}
    for name in shapes.keys() - {*parameters, *told.values()}:
        parted = parted_anywhere(name, ends)
        if parted is not None and not STATE_WORDS.isdisjoint(parts_of(parted[1].before)[-1:]):
            parted_of[name] = parted
    used = frozenset(end for end, _ in parted_of.values())
    by_end: dict[str, list[str]] = {}
    for name in parameters:
        longest = next((end for end in ends_of(name) if end in used), "")
        by_end.setdefault(longest, []).append(name)
    below_keys = [name for name in parameters if "." in name]
    owner_of: dict[str, str] = {}
    in_doubt: dict[str, str] = {}
    for name, (end, affixes) in parted_of.items():
        owners_by_end, by_optimizer = by_end.get(end, ()), _told(name, told, shapes)
        if len(owners_by_end) != 1 or not _has_shape_of(name, by_optimizer or owners_by_end[0], shapes):
            continue
        begin = owners_by_end[0].removesuffix(end)
        if by_optimizer is not None or _is_beside_model(affixes, begin):
            owner_of[name] = by_optimizer or owners_by_end[0]
        elif all(other.startswith(begin) for other in below_keys):
            in_doubt[name] = owners_by_end[0]
    return OwnersInPart(owner_of, in_doubt)


def _is_beside_model(state: NameAffixes, begin: str) -> bool:
    """Tell whether names of state are an optimizer's, and no module's: `adam_m.w`, or `ema.w` beside `model.w`.

    Args:
        begin: what the parameter's name has before the part that both have.
    """
    words = STATE_WORDS.intersection((*parts_of(state.before), *parts_of(state.behind)))
    first, _, keys = begin.removesuffix(".").partition(".")
    is_beside = not state.before.startswith(f"{first}.") and (keys or first).rpartition(".")[2] in OF_MODEL
    return is_beside or not words <= MODULE_WORDS


def _told(name: str, told: Mapping[str, str], shapes: Container[str]) -> str | None:
    """Return the parameter that an optimizer tells for its state; None if it tells none, or one that is not there."""
    owner = told.get(name)
    return owner if owner in shapes else None


def ends_of(name: str) -> Iterator[str]:
    """Yield the text behind each dot of a name."""
    while "." in name:
        name = name.partition(".")[2]
        yield name


def with_state(names: Collection[str]) -> frozenset[str]:
    """Return the tensors that have state of their own (`optimizer.state.ema.w.exp_avg`), so they are none of others."""
    parameters = set()
    for name in names:
        _, found, rest = f".{name}".partition(f".{STATE_KEY}.")
        while found and rest:
            rest = rest.rpartition(".")[0]
            if rest in names:
                parameters.add(rest)
                break
    return frozenset(parameters)


def owned_by(name: str, owner_of: Mapping[str, str]) -> Iterator[str]:
    """Yield the parameter that a tensor is state of, and so on where that is state itself."""
    while name in owner_of:
        name = owner_of[name]
        yield name


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


def _parameter_of(
    name: str, all_affixes: Iterable[NameAffixes], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[str, NameAffixes] | None:
    """Return the parameter that owns a state tensor, and the affixes of the name; None if it is no state.

    Args:
        all_affixes: what maps have around names of parameters in those of their state.
    """
    parted = _parted(name, all_affixes, shapes) or parted_anywhere(name, shapes)
    return parted if parted is not None and _has_shape_of(name, parted[0], shapes) else None


def _has_shape_of(name: str, parameter: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Tell whether a tensor has a shape that state of a parameter has: the parameter's, or one element."""
    return shapes[name] == shapes[parameter] or prod(shapes[name]) == 1


def is_copied(match: Match, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Tell whether tensors that an equation makes are its source as it is, under other names."""
    wholes = [whole_pair(place, shapes[name]) for place, name in match.sources.items()]
    return all(
        [pair._replace(order=None) for pair in made.pairs] == wholes
        and not made.zeros
        and all(pair.order in (None, tuple(range(len(made.shape)))) for pair in made.pairs)
        for made in match.geometry.targets.values()
    )


def _parted(name: str, all_affixes: Iterable[NameAffixes], inventory: Container[str]) -> tuple[str, NameAffixes] | None:
    """Return the parameter that owns a state tensor and the affixes of the name, if that is known."""
    for affixes in all_affixes:
        base = affixes.within(name)
        if base is not None and base in inventory:
            return base, affixes
    return None


def parted_anywhere(name: str, inventory: Container[str]) -> tuple[str, NameAffixes] | None:
    """Find the longest name among `inventory` inside a state tensor's name: `optim.exp_avg.fc.w` gives (`fc.w`, its
    affixes).

    Names behind `state.` come first: `optim.state.w.exp_avg` is of `w`, even if there is a parameter `state.w`.
    """
    spans = [part.span() for part in PART.finditer(name)]
    parts = parts_of(name)
    found: tuple[str, NameAffixes] | None = None
    for length in range(len(parts) - 1, 0, -1):
        for start in range(len(parts) - length + 1 - is_behind_parameter(parts, length)):
            first, last = spans[start][0], spans[start + length - 1][1]
            if name[first:last] in inventory and not STATE_WORDS.isdisjoint((*parts[:start], *parts[start + length :])):
                parted = name[first:last], NameAffixes(name[:first], name[last:])
                if start > 0 and parts[start - 1] == STATE_KEY:
                    return parted
                found = found or parted
    return found


def is_behind_parameter(parts: Sequence[str], length: int) -> bool:
    """Tell whether `length` parts at the end of a name are a key of state behind its parameter: `state.w.step`.

    A parameter may be called `step` as well.
    """
    return length == 1 and parts[-1] in STATE_WORDS and STATE_KEY in parts[:-2]


def is_named_as_state(name: str, base: str) -> bool:
    """Tell whether a name is a parameter's name behind words that include an optimizer's."""
    before = name.removesuffix(f".{base}")
    return before != name and not STATE_WORDS.isdisjoint(parts_of(before))


def _source(rule: EquationRule, direction: Direction) -> NameAffixes:
    (source,), _ = direction.sides(rule)
    return NameAffixes.of(source.name)


def _target(rule: EquationRule, direction: Direction) -> NameAffixes:
    _, (target,) = direction.sides(rule)
    return NameAffixes.of(target.name)


def _chosen(
    rules: Sequence[EquationRule], targets: Sequence[str], direction: Direction, like: TemplateShapes | None
) -> EquationRule | None:
    """Return the first rule that makes state that the target is to have.

    Args:
        targets: the names of the parameters that it is made for.
    """
    for rule in rules:
        if like is None or all(_target(rule, direction).around(name) in like for name in targets):
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


def is_named_like_state(name: str) -> bool:
    """Tell whether a part of a tensor's name is a word that optimizers use for their state."""
    return not STATE_WORDS.isdisjoint(parts_of(name))
