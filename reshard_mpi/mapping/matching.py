"""Find the tensors that an equation applies to (`matches`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.mapping.axis_sizes import Dimension, Sizes, SizesProblem, UntoldLength, names_in, solved
from reshard_mpi.mapping.box_pairs import (
    MAX_PAIRS,
    Assembly,
    EquationProblem,
    Geometry,
    TermTensor,
    geometry,
)
from reshard_mpi.mapping.direction import (
    MAX_NAMED,
    Candidates,
    Direction,
    Inventory,
    Key,
    TemplateShapes,
    UnfitMapError,
    candidates_of,
    filled,
    filled_in_part,
    shown_term,
    wanted_shapes,
    what_is_missing,
)
from reshard_mpi.mapping.equations import Term, pads_of
from reshard_mpi.mapping.rules import EquationRule, Rules
from reshard_mpi.text import did_you_mean, shortened

_MAX_SHOWN = 1_000  # characters


def fitted(
    rule: EquationRule,
    source: Sequence[Term],
    target: Sequence[Term],
    shapes: Sequence[tuple[int, ...]],
    axes: Mapping[str, int],
    counts: Mapping[str, int],
    wanted: Sequence[tuple[int, ...]] | None,
) -> Geometry:
    """Solve the equation for these shapes of its source's terms.

    Args:
        axes: the lengths that the map gives.
        counts: those of the axes that names stand for.

    Raises SizesProblem or EquationProblem.
    """
    if source[0].dims is None:
        origins = [0 if rule.copies else number for number in range(len(target))]
        wholes = (Assembly.whole(TermTensor(origin, ()), shapes[origin]) for origin in origins)
        return Geometry({TermTensor(number, ()): whole for number, whole in enumerate(wholes)}, {})
    dimensions = _dimensions(source, shapes)
    for axis, length in counts.items():
        if axes.get(axis, length) != length:
            raise SizesProblem(f"there are {length} tensors for {axis!r}, not {axes[axis]}")
    sizes = _solved_with(dimensions, [] if wanted is None else _dimensions(target, wanted), {**axes, **counts})
    unknown = [name for term in target for dim in term.dims or () for name in names_in(dim) if name not in sizes]
    if unknown and wanted is not None:
        sizes = solved(_dimensions(target, wanted), sizes)
    elif unknown:
        raise UntoldLength(f"nothing tells how long {unknown[0]!r} is", unknown)
    if rule.copies:
        return geometry(source[:1], target, sizes, copies=len(target) > 1)
    return geometry(source, target, sizes)


def _solved_with(dimensions: Sequence[Dimension], others: Sequence[Dimension], given: Sizes) -> Sizes:
    """Return the lengths of all axes of the dimensions; `others` are looked at only where these do not tell them.

    Raises SizesProblem for what is wrong with the dimensions.
    """
    try:
        return solved(dimensions, given)
    except SizesProblem:
        if others:
            with suppress(SizesProblem):
                return solved([*dimensions, *others], given)
        raise


def _dimensions(side: Sequence[Term], shapes: Sequence[tuple[int, ...]]) -> list[Dimension]:
    return [
        Dimension(dim, length, f"dimension {number} of {term.name.text}")
        for term, shape in zip(side, shapes)
        for number, (dim, length) in enumerate(zip(term.dims or (), shape))
    ]


class Match(NamedTuple):
    """One set of tensors that an equation takes."""

    rule: EquationRule
    sources: Mapping[TermTensor, str]  # their names
    targets: Mapping[TermTensor, str]  # the names of what is made of them
    geometry: Geometry
    equal: tuple[str, ...] = ()  # tensors that must hold the same as the first one, which is taken
    usual: tuple[str, ...] = ()  # the axes whose length nothing but the map's usual one tells

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors that are taken."""
        return (*self.sources.values(), *self.equal)


def matches(
    rules: Rules, inventory: Inventory, direction: Direction, like: TemplateShapes | None = None
) -> Iterator[Match]:
    """Yield the sets of tensors that equations take: of several equations the first one.

    Args:
        like: an equation does not apply where it would make tensors that are not in it, by name and shape; None: there
            is no such checkpoint.

    Raises MapError if tensors are there in part, if shapes do not fit, if an equation that must applies nowhere, or if
    only a checkpoint that the target is to be like could tell whether one applies.
    """
    left = dict(inventory)
    geometries: dict[object, tuple[Geometry, tuple[str, ...]]] = {}
    shapes_met = boxes = 0
    for rule in rules.equations:
        if like is None and rule.like == "only":
            continue
        source, target = direction.sides(rule)
        candidates = candidates_of(source, rule, left)
        applies = False
        contradicted: list[MapError] = []
        for key in candidates.all_keys:
            lacking = candidates.lacking(key)
            if lacking:
                if not rule.is_optional:
                    raise _in_part(rule, source, candidates, key, lacking, inventory)
                continue
            if like is None and direction.needs_like(rule):
                raise _untold(rule, source, target, candidates, key)
            wanted = None if like is None else wanted_shapes(rule, target, key, like)
            if like is not None and wanted is None:
                continue
            match = _match(rule, source, target, key, candidates, inventory, rules, wanted, geometries)
            if wanted is not None and not _is_as_wanted(match.geometry, wanted):
                if rule.axes & rules.from_user:
                    without = rules._replace(axes={k: v for k, v in rules.axes.items() if k not in rules.from_user})
                    with suppress(MapError):
                        other = _match(rule, source, target, key, candidates, inventory, without, wanted, {})
                        if _is_as_wanted(other.geometry, wanted):
                            contradicted.append(_unlike(rule, rules, match, other))
                continue
            applies = True
            if key in candidates.misfits:
                raise _misfit(rule, source, candidates.misfits[key], inventory)
            for name in match.names:
                if name not in left:
                    raise MapError("not one-to-one: an equation takes a tensor twice", got=name, where=rule.where)
                del left[name]
            if len(geometries) > shapes_met:
                shapes_met = len(geometries)
                boxes += sum(len(shape.pairs) for shape in match.geometry.targets.values())
            if boxes > MAX_PAIRS:
                raise MapError(
                    f"the map would put tensors together from more than {MAX_PAIRS} boxes of different shapes",
                    where=rule.where,
                    remedy="convert the tensors in several runs (--include), or change fewer of their axes at once",
                )
            yield match
        if contradicted:
            raise contradicted[0]
        if not applies and not rule.is_optional:
            as_like = "" if like is None else f", which become {', '.join(map(shown_term, target))} of the target"
            raise _applies_nowhere(rule, source, as_like, left or inventory)


def _misfit(rule: EquationRule, source: Sequence[Term], name: str, inventory: Inventory) -> MapError:
    return MapError(
        "some of the tensors that are put together do not fit the equation, and would be left out",
        expected=", ".join(map(shown_term, source)),
        got=f"{name} {list(inventory[name].shape)}",
        where=rule.where,
    )


def _applies_nowhere(rule: EquationRule, source: Sequence[Term], as_like: str, inventory: Inventory) -> MapError:
    return UnfitMapError(
        "an equation applies nowhere",
        expected=f"tensors {', '.join(map(shown_term, source))}{as_like}",
        got=what_is_missing(source, rule, inventory),
        where=rule.where,
        remedy="mend the names, or say optional = true if it need not apply",
    )


def _unlike(rule: EquationRule, rules: Rules, made: Match, wanted: Match) -> MapError:
    """Return the error for lengths given by the user that make other shapes than the target's checkpoint has."""
    given = _given(rule, rules)
    shapes = [
        ", ".join(f"{each.targets[place]} {list(shape.shape)}" for place, shape in each.geometry.targets.items())
        for each in (wanted, made)
    ]
    return MapError(
        f"{given} contradicts the checkpoint that the target is to be like",
        expected=shapes[0][:_MAX_SHOWN],
        got=shapes[1][:_MAX_SHOWN],
        where=rule.where,
        remedy=f"correct or leave out {given}",
    )


def _given(rule: EquationRule, rules: Rules) -> str:
    """Return the lengths of an equation's axes that the user gives, as on the command line."""
    return " ".join(f"--axis {axis}={rules.axes[axis]}" for axis in sorted(rule.axes & rules.from_user))


def _is_as_wanted(fitted: Geometry, wanted: Sequence[tuple[int, ...]]) -> bool:
    return all(shape.shape == wanted[place.term] for place, shape in fitted.targets.items())


def _match(
    rule: EquationRule,
    source: Sequence[Term],
    target: Sequence[Term],
    key: Key,
    candidates: Candidates,
    inventory: Inventory,
    rules: Rules,
    wanted: tuple[tuple[int, ...], ...] | None,
    geometries: dict[object, tuple[Geometry, tuple[str, ...]]],
) -> Match:
    held = [names[key] for names in candidates.by_term]
    counts = _counts(rule, source, held)
    shapes = []
    for term, names in zip(source, held):
        of_term = {inventory[name].shape for name in names.values()}
        if len(of_term) > 1:
            raise MapError(
                f"tensors that {term.name.text} stands for have different shapes",
                got=", ".join(f"{name} {list(inventory[name].shape)}" for name in list(names.values())[:MAX_NAMED]),
                where=rule.where,
            )
        shapes.append(of_term.pop())
    cached = (id(rule), tuple(shapes), tuple(counts.items()), wanted)
    if cached not in geometries:
        try:
            geometries[cached] = _fitted_with_usual(rule, source, target, shapes, rules, counts, wanted)
        except (SizesProblem, EquationProblem) as error:
            first = [next(iter(names.values())) for names in held]
            raise MapError(
                "an equation does not fit the shapes of its tensors",
                expected=", ".join(map(shown_term, source)),
                got=f"{', '.join(f'{name} {list(shape)}' for name, shape in zip(first, shapes))}: {error}",
                where=rule.where,
                remedy=_remedy(error, rule, rules),
            ) from None
    fitted_geometry, usual = geometries[cached]
    sources = {TermTensor(number, values): name for number, names in enumerate(held) for values, name in names.items()}
    shared = dict(zip(rule.shared, key))
    equal: tuple[str, ...] = ()
    if rule.copies and len(source) > 1:
        equal = tuple(name for place, name in sources.items() if place.term > 0)
        sources = {place: name for place, name in sources.items() if place.term == 0}
    targets = {place: filled(target[place.term], shared, place.values) for place in fitted_geometry.targets}
    return Match(rule, sources, targets, fitted_geometry, equal, usual)


def _fitted_with_usual(
    rule: EquationRule,
    source: Sequence[Term],
    target: Sequence[Term],
    shapes: Sequence[tuple[int, ...]],
    rules: Rules,
    counts: Mapping[str, int],
    wanted: Sequence[tuple[int, ...]] | None,
) -> tuple[Geometry, tuple[str, ...]]:
    """Do what `fitted` does, and give axes that nothing tells their usual lengths, one after another.

    Returns these axes too.
    """
    usual: tuple[str, ...] = ()
    while True:
        axes = {**rules.axes, **{axis: rules.usual[axis].length for axis in usual}}
        try:
            return fitted(rule, source, target, shapes, axes, counts, wanted), usual
        except UntoldLength as error:
            further = next((axis for axis in error.axes if axis in rules.usual and axis not in usual), None)
            if further is None:
                raise
            usual = (*usual, further)


def usual_notes(matches: Iterable[Match], rules: Rules) -> Iterator[str]:
    """Yield a note on each axis that has its usual length, since nothing tells another."""
    named: dict[str, list[str]] = {}
    for match in matches:
        for axis in match.usual:
            named.setdefault(axis, []).extend(match.targets.values())
    for axis, names in named.items():
        length, keys = rules.usual[axis]
        terms = (term for rule in rules.equations for term in (*rule.equation.left, *rule.equation.right))
        is_multiple = any(axis == pad.multiple for term in terms for dim in term.dims or () for pad in pads_of(dim))
        if is_multiple and length == 1:
            what = f"not padded, since nothing tells the multiple {axis!r}"
        else:
            what = f"made with {axis} = {length}, since nothing tells another length"
        other = f" or, in the file of --config, {keys}" if keys else ""
        yield f"{what} (--axis {axis}=LENGTH{other}): {shortened(names)}"


def _remedy(error: Exception, rule: EquationRule, rules: Rules) -> str:
    given = _given(rule, rules)
    if given and isinstance(error, SizesProblem) and not isinstance(error, UntoldLength):
        return f"correct or leave out {given}, or what the shapes contradict besides"
    if rules.lacks_config:
        return "give the model's configuration, by which [axes] says how long they are (--config FILE.json)"
    if isinstance(error, UntoldLength):
        return (
            "give a checkpoint that the target is to be like (--like CHECKPOINT), or its length: in [axes] of the map,"
            f" or --axis {error.axes[0]}=LENGTH"
        )
    return ""


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
                got=f"{len(names)} of {prod(lengths)}: {', '.join(list(names.values())[:MAX_NAMED])} ...",
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
    rule: EquationRule, source: Sequence[Term], target: Sequence[Term], candidates: Candidates, key: Key
) -> MapError:
    shared = dict(zip(rule.shared, key))
    names = [next(iter(names[key].values())) for names in candidates.by_term]
    in_part = ", ".join(filled_in_part(term, shared) for term in target)
    return MapError(
        "names and shapes do not tell what becomes of a tensor",
        expected=f"a checkpoint that the target is to be like, which has {in_part} or has not",
        got=", ".join(names),
        where=rule.where,
        remedy="give one, such as the target's network saved as it was made (--like CHECKPOINT)",
    )


def _in_part(
    rule: EquationRule,
    source: Sequence[Term],
    candidates: Candidates,
    key: Key,
    lacking: Collection[int],
    inventory: Inventory,
) -> MapError:
    shared = dict(zip(rule.shared, key))
    missing = [filled_in_part(source[number], shared) for number in lacking]
    there = [next(iter(names[key].values())) for names in candidates.by_term if key in names]
    other = next((name for name in missing if name in inventory), None)
    shape = f" ({other} has the shape {list(inventory[other].shape)})" if other is not None else ""
    return MapError(
        "an equation applies in part: some of its tensors are there, and others not",
        expected=", ".join(map(shown_term, source)),
        got=f"{', '.join(there)} without {', '.join(missing)}{shape or did_you_mean(missing[0], inventory)}",
        where=rule.where,
        remedy="mend the equation, or say optional = true if it applies only where all are there",
    )
