"""Where equations apply: which tensors of a checkpoint are those of a side, and what the other side is made of."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.formats.dtypes import DType
from reshard_mpi.mapping.blocks import EquationProblem
from reshard_mpi.mapping.fitting import fitted
from reshard_mpi.mapping.pairs import MAX_PAIRS, Geometry, Place
from reshard_mpi.mapping.rules import EquationRule, Rules
from reshard_mpi.mapping.sizes import SizesProblem, extent
from reshard_mpi.mapping.syntax import Term, axes_of
from reshard_mpi.text import did_you_mean, shortened

_MAX_NAMED = 5


class Kind(NamedTuple):
    """Type and shape of a whole tensor."""

    dtype: DType
    shape: tuple[int, ...]


# The tensors of a checkpoint by name, in its order.
Inventory = Mapping[str, Kind]
# The shapes of the tensors of a checkpoint that the target is to be like, by name.
Likeness = Mapping[str, tuple[int, ...]]
# What the captures that all names share stand for.
Key = tuple[str, ...]


class Match(NamedTuple):
    """One set of tensors that an equation takes.

    sources: their names. targets: the names of what is made of them. equal: tensors that must hold the same as the
    first one, which is taken.
    """

    rule: EquationRule
    sources: Mapping[Place, str]
    targets: Mapping[Place, str]
    geometry: Geometry
    equal: tuple[str, ...] = ()


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


class _Candidates(NamedTuple):
    """The tensors that fit the terms of a side: for each term, by key, the names by the values of other captures.

    misfits: by key, the name of one that is named as those which a term puts together, and does not fit.
    """

    by_term: tuple[Mapping[Key, Mapping[tuple[int, ...], str]], ...]
    misfits: Mapping[Key, str]

    @property
    def all_keys(self) -> list[Key]:
        return list(dict.fromkeys(key for names in self.by_term for key in names))

    def lacking(self, key: Key) -> list[int]:
        """Return the numbers of the terms that no tensor fits with this key."""
        return [number for number, names in enumerate(self.by_term) if key not in names]


def told_direction(rules: Rules, inventory: Inventory, forward: bool | None, like: Likeness | None = None) -> Direction:
    """Return the direction in which a map is read.

    forward: as the user says; None: as the names tell. Raises MapError if they fit neither direction, or both.
    """
    if forward is not None:
        return Direction(forward)
    unmet = {direction: _unmet(rules, inventory, direction, like) for direction in (Direction(True), Direction(False))}
    fitting = [direction for direction, missing in unmet.items() if missing is None]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise MapError(
            "the map can be read in both directions",
            expected="--forward, from left to right, or --reverse",
            got="tensors that fit the left and the right sides of its equations",
            where=rules.where,
        )
    forwards, backwards = unmet.values()
    raise MapError(
        "the map does not fit the checkpoint in either direction",
        expected="tensors for all of its equations, read from left to right or from right to left",
        got=f"forward, {forwards}; backward, {backwards}",
        where=rules.where,
        remedy="mend the names, or say optional = true where an equation need not apply;"
        " --forward and --reverse tell what is wrong with one direction",
    )


def _unmet(rules: Rules, inventory: Inventory, direction: Direction, like: Likeness | None) -> str | None:
    """Return which equation applies nowhere in this direction, though it must, and why; None if there is none.

    An equation whose names are the same on both sides, or that only `like` can tell about, says nothing.
    """
    telling = [rule for rule in rules.equations if not rule.keeps_names and (like or not direction.needs_like(rule))]
    any_applies = all(rule.keeps_names for rule in rules.equations)
    for rule in telling:
        source, target = direction.sides(rule)
        candidates = _candidates(source, rule, inventory)
        applies = any(
            not candidates.lacking(key) and (like is None or _wanted(rule, target, key, like) is not None)
            for key in candidates.all_keys
        )
        any_applies = any_applies or applies
        if not applies and not rule.is_optional:
            return f"{rule.where}: {_what_is_missing(source, rule, inventory)}"
    return None if any_applies else "no equation applies"


def matches(rules: Rules, inventory: Inventory, direction: Direction, like: Likeness | None = None) -> Iterator[Match]:
    """Yield the sets of tensors that equations take: of several equations the first one.

    like: an equation does not apply where it would make tensors that are not in it, by name and shape; None: there is
    no such checkpoint. Raises MapError if tensors are there in part, if shapes do not fit, if an equation that must
    applies nowhere, or if only a checkpoint that the target is to be like could tell whether one applies.
    """
    left = dict(inventory)
    known: dict[object, Geometry] = {}
    shapes_met = boxes = 0
    for rule in rules.equations:
        if like is None and rule.like == "only":
            continue
        source, target = direction.sides(rule)
        candidates = _candidates(source, rule, left)
        applies = False
        for key in candidates.all_keys:
            lacking = candidates.lacking(key)
            if lacking:
                if not rule.is_optional:
                    raise _in_part(rule, source, candidates, key, lacking, inventory)
                continue
            if like is None and direction.needs_like(rule):
                raise _untold(rule, source, target, candidates, key)
            wanted = None if like is None else _wanted(rule, target, key, like)
            if like is not None and wanted is None:
                continue
            match = _match(rule, source, target, key, candidates, inventory, rules, wanted, known)
            if wanted is not None and not _is_as_wanted(match.geometry, wanted):
                continue
            applies = True
            if key in candidates.misfits:
                raise MapError(
                    "some of the tensors that are put together do not fit the equation, and would be left out",
                    expected=", ".join(map(_shown_term, source)),
                    got=f"{(misfit := candidates.misfits[key])} {list(inventory[misfit].shape)}",
                    where=rule.where,
                )
            for name in (*match.sources.values(), *match.equal):
                if name not in left:
                    raise MapError("not one-to-one: an equation takes a tensor twice", got=name, where=rule.where)
                del left[name]
            if len(known) > shapes_met:
                shapes_met = len(known)
                boxes += sum(len(shape.pairs) for shape in match.geometry.targets.values())
            if boxes > MAX_PAIRS:
                raise MapError(
                    f"the map would put tensors together from more than {MAX_PAIRS} boxes of different shapes",
                    where=rule.where,
                    remedy="convert the tensors in several runs (--include), or change fewer of their axes at once",
                )
            yield match
        if not applies and not rule.is_optional:
            raise MapError(
                "an equation applies nowhere",
                expected=f"tensors {', '.join(_shown_term(term) for term in source)}"
                + ("" if like is None else f", which become {', '.join(map(_shown_term, target))} of the target"),
                got=_what_is_missing(source, rule, left or inventory),
                where=rule.where,
                remedy="mend the names, or say optional = true if it need not apply",
            )


def _wanted(rule: EquationRule, target: Sequence[Term], key: Key, like: Likeness) -> tuple[tuple[int, ...], ...] | None:
    """Return the shapes of what an equation makes as they are in `like`; None if one of the tensors is not there.

    Of tensors that a term stands for together, the first one is looked at.
    """
    shared = dict(zip(rule.shared, key))
    shapes = []
    for term in target:
        others = len(term.name.captures) - len(shared)
        shape = like.get(_filled(term, shared, (0,) * others))
        if shape is None or (term.dims is not None and len(term.dims) != len(shape)):
            return None
        shapes.append(shape)
    return tuple(shapes)


def _is_as_wanted(made: Geometry, wanted: Sequence[tuple[int, ...]]) -> bool:
    return all(shape.shape == wanted[place.term] for place, shape in made.targets.items())


def _candidates(side: Sequence[Term], rule: EquationRule, inventory: Inventory) -> _Candidates:
    by_term = []
    misfits: dict[Key, str] = {}
    for term in side:
        names: dict[Key, dict[tuple[int, ...], str]] = {}
        captures = [capture.name for capture in term.name.captures]
        shared = [captures.index(name) for name in rule.shared]
        others = [number for number in range(len(captures)) if number not in shared]
        plain = term.name.text if not captures else None
        for name in (plain,) if plain is not None and plain in inventory else () if plain is not None else inventory:
            values = term.name.match(name)
            if values is None or not _fits(term, inventory[name].shape):
                loose = term.name.match_loosely(name) if others else None
                if loose is not None:
                    misfits.setdefault(tuple(loose[number] for number in shared), name)
                continue
            key = tuple(values[number] for number in shared)
            names.setdefault(key, {})[tuple(int(values[number]) for number in others)] = name
        by_term.append(names)
    return _Candidates(tuple(by_term), misfits)


def _fits(term: Term, shape: tuple[int, ...]) -> bool:
    """Tell whether a shape has the term's number of dimensions, and those lengths that are numbers."""
    if term.dims is None:
        return True
    if len(term.dims) != len(shape):
        return False
    for dim, length in zip(term.dims, shape):
        names = list(axes_of(dim))
        if all(name.isdecimal() for name in names) and extent(dim, {}) != length:
            return False
    return True


def _match(
    rule: EquationRule,
    source: Sequence[Term],
    target: Sequence[Term],
    key: Key,
    candidates: _Candidates,
    inventory: Inventory,
    rules: Rules,
    wanted: tuple[tuple[int, ...], ...] | None,
    known: dict[object, Geometry],
) -> Match:
    held = [names[key] for names in candidates.by_term]
    counts = _counts(rule, source, held)
    shapes = []
    for term, names in zip(source, held):
        of_term = {inventory[name].shape for name in names.values()}
        if len(of_term) > 1:
            raise MapError(
                f"tensors that {term.name.text} stands for have different shapes",
                got=", ".join(f"{name} {list(inventory[name].shape)}" for name in list(names.values())[:_MAX_NAMED]),
                where=rule.where,
            )
        shapes.append(of_term.pop())
    cached = (id(rule), tuple(shapes), tuple(counts.items()), wanted)
    made = known.get(cached)
    if made is None:
        try:
            made = known[cached] = fitted(rule, source, target, shapes, rules.axes, counts, wanted)
        except (SizesProblem, EquationProblem) as error:
            first = [next(iter(names.values())) for names in held]
            raise MapError(
                "an equation does not fit the shapes of its tensors",
                expected=", ".join(_shown_term(term) for term in source),
                got=f"{', '.join(f'{name} {list(shape)}' for name, shape in zip(first, shapes))}: {error}",
                where=rule.where,
                remedy="give the model's configuration, by which [axes] says how long they are (--config config.json)"
                if rules.lacks_config
                else "",
            ) from None
    sources = {Place(number, values): name for number, names in enumerate(held) for values, name in names.items()}
    shared = dict(zip(rule.shared, key))
    equal: tuple[str, ...] = ()
    if rule.copies and len(source) > 1:
        equal = tuple(name for place, name in sources.items() if place.term > 0)
        sources = {place: name for place, name in sources.items() if place.term == 0}
    targets = {place: _filled(target[place.term], shared, place.values) for place in made.targets}
    return Match(rule, sources, targets, made, equal)


def _filled(term: Term, shared: Mapping[str, str], values: tuple[int, ...]) -> str:
    others = [capture.name for capture in term.name.captures if capture.name not in shared]
    return term.name.filled({**shared, **dict(zip(others, values))})


def _counts(
    rule: EquationRule, source: Sequence[Term], held: Sequence[Mapping[tuple[int, ...], str]]
) -> dict[str, int]:
    """Return the lengths of the axes that names stand for. Raises MapError unless they go from 0 on without a gap."""
    counts: dict[str, int] = {}
    for term, names in zip(source, held):
        others = [capture.name for capture in term.name.captures if capture.name not in rule.shared]
        lengths = [1 + max(values[number] for values in names) for number in range(len(others))]
        if prod(lengths) != len(names):
            raise MapError(
                f"some of the tensors that {term.name.text} stands for are not there",
                expected=f"{' and '.join(f'{axis} from 0 to {length - 1}' for axis, length in zip(others, lengths))}",
                got=f"{len(names)} of {prod(lengths)}: {', '.join(list(names.values())[:_MAX_NAMED])} ...",
                where=rule.where,
            )
        for axis, length in zip(others, lengths):
            if counts.setdefault(axis, length) != length:
                raise MapError(
                    f"there are not as many tensors of one name as of another for {axis!r}",
                    expected=f"{counts[axis]} tensors {term.name.text}",
                    got=str(length),
                    where=rule.where,
                )
    return counts


def _untold(
    rule: EquationRule, source: Sequence[Term], target: Sequence[Term], candidates: _Candidates, key: Key
) -> MapError:
    shared = dict(zip(rule.shared, key))
    names = [next(iter(names[key].values())) for names in candidates.by_term]
    return MapError(
        "names and shapes do not tell what becomes of a tensor",
        expected=f"a checkpoint that the target is to be like, which has {_listed(target, shared)} or has not",
        got=", ".join(names),
        where=rule.where,
        remedy="give one, such as the target's network saved as it was made (--like CHECKPOINT)",
    )


def _what_is_missing(side: Sequence[Term], rule: EquationRule, inventory: Inventory) -> str:
    """Return in words which tensors of a side are not there, and which of the others are; else what is there."""
    candidates = _candidates(side, rule, inventory)
    key = min(candidates.all_keys, key=lambda key: len(candidates.lacking(key)), default=None)
    shared = {} if key is None else dict(zip(rule.shared, key))
    lacking = range(len(side)) if key is None else candidates.lacking(key)
    if not lacking:
        return f"these tensors are there: {_shown(inventory)}"
    missing = [_filled_in_part(side[number], shared) for number in lacking]
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


def _listed(side: Sequence[Term], shared: Mapping[str, str]) -> str:
    return ", ".join(_filled_in_part(term, shared) for term in side)


def _in_part(
    rule: EquationRule,
    source: Sequence[Term],
    candidates: _Candidates,
    key: Key,
    lacking: Collection[int],
    inventory: Inventory,
) -> MapError:
    shared = dict(zip(rule.shared, key))
    missing = [_filled_in_part(source[number], shared) for number in lacking]
    there = [next(iter(names[key].values())) for names in candidates.by_term if key in names]
    other = next((name for name in missing if name in inventory), None)
    shape = f" ({other} has the shape {list(inventory[other].shape)})" if other is not None else ""
    return MapError(
        "an equation applies in part: some of its tensors are there, and others not",
        expected=", ".join(_shown_term(term) for term in source),
        got=f"{', '.join(there)} without {', '.join(missing)}{shape or did_you_mean(missing[0], inventory)}",
        where=rule.where,
        remedy="mend the equation, or say optional = true if it applies only where all are there",
    )


def _filled_in_part(term: Term, shared: Mapping[str, str]) -> str:
    others = {capture.name: f"{{{capture.name}}}" for capture in term.name.captures}
    return term.name.filled(others | dict(shared))


def _shown_term(term: Term) -> str:
    if term.dims is None:
        return term.name.text
    return f"{term.name.text} of {len(term.dims)} {'dimension' if len(term.dims) == 1 else 'dimensions'}"


def _shown(inventory: Inventory) -> str:
    names = [f"{name} {list(kind.shape)}" for name, kind in list(inventory.items())[:_MAX_NAMED]]
    return ", ".join(names) + (" ..." if len(inventory) > _MAX_NAMED else "") if names else "no tensors"
