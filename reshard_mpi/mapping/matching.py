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
    geometries: _Geometries = {}
    shapes_met = boxes = 0
    for rule in rules.equations:
        if like is None and rule.like == "only":
            continue
        equation = _DirectedRule(rule, *direction.sides(rule), rules, inventory)
        applies = False
        contradiction: MapError | None = None
        candidates = candidates_of(equation.source, rule, left)
        for key in candidates.all_keys:
            lacking = candidates.lacking(key)
            if lacking:
                if not rule.is_optional:
                    raise equation.in_part(candidates, key, lacking)
                continue
            if like is None and direction.needs_like(rule):
                raise equation.untold(candidates, key)
            wanted = None if like is None else wanted_shapes(rule, equation.target, key, like)
            if like is not None and wanted is None:
                continue
            held = [names[key] for names in candidates.by_term]
            match = equation.match(key, held, wanted, geometries)
            if wanted is not None and not _is_as_wanted(match.geometry, wanted):
                contradiction = contradiction or equation.contradiction(key, held, wanted, match)
                continue
            applies = True
            if key in candidates.misfits:
                raise equation.misfit(candidates.misfits[key])
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
        if contradiction is not None:
            raise contradiction
        if not applies and not rule.is_optional:
            raise equation.applies_nowhere(left or inventory, has_like=like is not None)


# Tensors that one term of an equation stands for: their names, by the values of the axes that names stand for.
_Held = Mapping[tuple[int, ...], str]
# Solved equations, with the axes that have their usual lengths, by what they depend on.
_Geometries = dict[object, tuple[Geometry, tuple[str, ...]]]


class _DirectedRule(NamedTuple):
    """An equation of a map, read from its source side to its target side, and the tensors that there are."""

    rule: EquationRule
    source: Sequence[Term]
    target: Sequence[Term]
    rules: Rules
    inventory: Inventory

    def match(
        self,
        key: Key,
        held: Sequence[_Held],
        wanted: tuple[tuple[int, ...], ...] | None,
        geometries: _Geometries,
    ) -> Match:
        """Return what becomes of some tensors. Raises MapError if the equation does not fit them.

        Args:
            key: the values of the captures that all terms share.
            held: the tensors of each term.
            wanted: the shapes of what the target is to have; None: as they come out.
        """
        rule, source, inventory = self.rule, self.source, self.inventory
        counts = self._counts(held)
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
                geometries[cached] = self._fitted_with_usual(shapes, counts, wanted)
            except (SizesProblem, EquationProblem) as error:
                first = [next(iter(names.values())) for names in held]
                raise MapError(
                    "an equation does not fit the shapes of its tensors",
                    expected=", ".join(map(shown_term, source)),
                    got=f"{', '.join(f'{name} {list(shape)}' for name, shape in zip(first, shapes))}: {error}",
                    where=rule.where,
                    remedy=self._remedy(error),
                ) from None
        fitted_geometry, usual = geometries[cached]
        sources = {
            TermTensor(number, values): name for number, names in enumerate(held) for values, name in names.items()
        }
        shared = dict(zip(rule.shared, key))
        equal: tuple[str, ...] = ()
        if rule.copies and len(source) > 1:
            equal = tuple(name for place, name in sources.items() if place.term > 0)
            sources = {place: name for place, name in sources.items() if place.term == 0}
        targets = {place: filled(self.target[place.term], shared, place.values) for place in fitted_geometry.targets}
        return Match(rule, sources, targets, fitted_geometry, equal, usual)

    def contradiction(
        self, key: Key, held: Sequence[_Held], wanted: tuple[tuple[int, ...], ...], made: Match
    ) -> MapError | None:
        """Return an error if nothing but lengths given by the user makes other shapes than the target is to have."""
        rules = self.rules
        if not self.rule.axes & rules.from_user:
            return None
        axes = {axis: length for axis, length in rules.axes.items() if axis not in rules.from_user}
        try:
            other = self._replace(rules=rules._replace(axes=axes)).match(key, held, wanted, {})
        except MapError:
            return None
        return self._unlike(made, other) if _is_as_wanted(other.geometry, wanted) else None

    def _fitted_with_usual(
        self,
        shapes: Sequence[tuple[int, ...]],
        counts: Mapping[str, int],
        wanted: Sequence[tuple[int, ...]] | None,
    ) -> tuple[Geometry, tuple[str, ...]]:
        """Do what `_fitted` does, and give axes that nothing tells their usual lengths, one after another.

        Returns these axes too.
        """
        rules = self.rules
        usual: tuple[str, ...] = ()
        while True:
            axes = {**rules.axes, **{axis: rules.usual[axis].length for axis in usual}}
            try:
                return self._fitted(shapes, axes, counts, wanted), usual
            except UntoldLength as error:
                further = next((axis for axis in error.axes if axis in rules.usual and axis not in usual), None)
                if further is None:
                    raise
                usual = (*usual, further)

    def _fitted(
        self,
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
        rule, source, target = self.rule, self.source, self.target
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

    def _counts(self, held: Sequence[_Held]) -> dict[str, int]:
        """Return how long axes are that names stand for. Raises MapError unless they go from 0 on without a gap."""
        counts: dict[str, int] = {}
        for term, names in zip(self.source, held):
            others = [capture.name for capture in term.name.captures if capture.name not in self.rule.shared]
            lengths = [1 + max(values[number] for values in names) for number in range(len(others))]
            if prod(lengths) != len(names):
                raise MapError(
                    f"some of the tensors that {term.name.text} stands for are not there",
                    expected=" and ".join(f"{axis} from 0 to {length - 1}" for axis, length in zip(others, lengths)),
                    got=f"{len(names)} of {prod(lengths)}: {', '.join(list(names.values())[:MAX_NAMED])} ...",
                    where=self.rule.where,
                )
            for axis, length in zip(others, lengths):
                if counts.setdefault(axis, length) != length:
                    raise MapError(
                        f"there are not as many tensors of one name as of another for {axis!r}",
                        expected=f"{counts[axis]} tensors {term.name.text}",
                        got=str(length),
                        where=self.rule.where,
                    )
        return counts

    def _remedy(self, error: Exception) -> str:
        given = self._given()
        if given and isinstance(error, SizesProblem) and not isinstance(error, UntoldLength):
            return f"correct or leave out {given}, or what the shapes contradict besides"
        if self.rules.lacks_config:
            return "give the model's configuration, by which [axes] says how long they are (--config FILE.json)"
        if isinstance(error, UntoldLength):
            return (
                "give a checkpoint that the target is to be like (--like CHECKPOINT), or its length: in [axes] of the"
                f" map, or --axis {error.axes[0]}=LENGTH"
            )
        return ""

    def _given(self) -> str:
        """Return the lengths of the axes that the user gives, as on the command line."""
        rules = self.rules
        return " ".join(f"--axis {axis}={rules.axes[axis]}" for axis in sorted(self.rule.axes & rules.from_user))

    def in_part(self, candidates: Candidates, key: Key, lacking: Collection[int]) -> MapError:
        inventory, shared = self.inventory, dict(zip(self.rule.shared, key))
        missing = [filled_in_part(self.source[number], shared) for number in lacking]
        there = [next(iter(names[key].values())) for names in candidates.by_term if key in names]
        other = next((name for name in missing if name in inventory), None)
        shape = f" ({other} has the shape {list(inventory[other].shape)})" if other is not None else ""
        return MapError(
            "an equation applies in part: some of its tensors are there, and others not",
            expected=", ".join(map(shown_term, self.source)),
            got=f"{', '.join(there)} without {', '.join(missing)}{shape or did_you_mean(missing[0], inventory)}",
            where=self.rule.where,
            remedy="mend the equation, or say optional = true if it applies only where all are there",
        )

    def untold(self, candidates: Candidates, key: Key) -> MapError:
        shared = dict(zip(self.rule.shared, key))
        names = [next(iter(names[key].values())) for names in candidates.by_term]
        in_part = ", ".join(filled_in_part(term, shared) for term in self.target)
        return MapError(
            "names and shapes do not tell what becomes of a tensor",
            expected=f"a checkpoint that the target is to be like, which has {in_part} or has not",
            got=", ".join(names),
            where=self.rule.where,
            remedy="give one, such as the target's network saved as it was made (--like CHECKPOINT)",
        )

    def misfit(self, name: str) -> MapError:
        return MapError(
            "some of the tensors that are put together do not fit the equation, and would be left out",
            expected=", ".join(map(shown_term, self.source)),
            got=f"{name} {list(self.inventory[name].shape)}",
            where=self.rule.where,
        )

    def applies_nowhere(self, inventory: Inventory, *, has_like: bool) -> MapError:
        """Return the error. inventory: the tensors that no equation has taken."""
        as_like = f", which become {', '.join(map(shown_term, self.target))} of the target" if has_like else ""
        return UnfitMapError(
            "an equation applies nowhere",
            expected=f"tensors {', '.join(map(shown_term, self.source))}{as_like}",
            got=what_is_missing(self.source, self.rule, inventory),
            where=self.rule.where,
            remedy="mend the names, or say optional = true if it need not apply",
        )

    def _unlike(self, made: Match, wanted: Match) -> MapError:
        """Return the error for lengths given by the user that make other shapes than the target's checkpoint has."""
        given = self._given()
        shapes = [
            ", ".join(f"{each.targets[place]} {list(shape.shape)}" for place, shape in each.geometry.targets.items())
            for each in (wanted, made)
        ]
        return MapError(
            f"{given} contradicts the checkpoint that the target is to be like",
            expected=shapes[0][:_MAX_SHOWN],
            got=shapes[1][:_MAX_SHOWN],
            where=self.rule.where,
            remedy=f"correct or leave out {given}",
        )


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


def _is_as_wanted(fitted: Geometry, wanted: Sequence[tuple[int, ...]]) -> bool:
    return all(shape.shape == wanted[place.term] for place, shape in fitted.targets.items())


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
