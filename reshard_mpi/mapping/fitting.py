"""How long the axes of an equation are where it applies, and which boxes are which there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from reshard_mpi.mapping.pairs import Geometry, Pair, Place, TargetShape, geometry
from reshard_mpi.mapping.rules import EquationRule
from reshard_mpi.mapping.sizes import Dimension, Sizes, SizesProblem, UntoldLength, names_in, solved
from reshard_mpi.mapping.syntax import Term
from reshard_mpi.sharding.box import Box


def fitted(
    rule: EquationRule,
    source: Sequence[Term],
    target: Sequence[Term],
    shapes: Sequence[tuple[int, ...]],
    axes: Mapping[str, int],
    counts: Mapping[str, int],
    wanted: Sequence[tuple[int, ...]] | None,
) -> Geometry:
    """Return what the equation comes to for these shapes of its source's terms.

    axes: the lengths that the map gives. counts: those of the axes that names stand for. Raises SizesProblem or
    EquationProblem.
    """
    if source[0].dims is None:
        numbers = range(len(target))
        wholes = [shapes[0] if rule.copies else shapes[number] for number in numbers]
        origins = [0 if rule.copies else number for number in numbers]
        return Geometry(
            {
                Place(number, ()): TargetShape(shape, (whole_pair(Place(origin, ()), shape),), ())
                for number, shape, origin in zip(numbers, wholes, origins)
            },
            {},
        )
    dimensions = _dimensions(source, shapes)
    for axis, length in counts.items():
        if axes.get(axis, length) != length:
            raise SizesProblem(f"there are {length} tensors for {axis!r}, not {axes[axis]}")
    sizes = _solved_with(dimensions, [] if wanted is None else _dimensions(target, wanted), {**axes, **counts})
    unknown = [name for term in target for dim in term.dims or () for name in names_in(dim) if name not in sizes]
    if unknown and wanted is not None:
        sizes = solved(_dimensions(target, wanted), sizes)
    elif unknown:
        raise UntoldLength(f"nothing tells how long {unknown[0]!r} is")
    if rule.copies:
        return geometry(source[:1], target, sizes, copies=len(target) > 1)
    return geometry(source, target, sizes)


def _solved_with(dimensions: Sequence[Dimension], others: Sequence[Dimension], known: Sizes) -> Sizes:
    """Return the lengths of all axes of the dimensions; `others` are looked at only where these do not tell them.

    Raises SizesProblem for what is wrong with the dimensions.
    """
    try:
        return solved(dimensions, known)
    except SizesProblem:
        if others:
            with suppress(SizesProblem):
                return solved([*dimensions, *others], known)
        raise


def _dimensions(side: Sequence[Term], shapes: Sequence[tuple[int, ...]]) -> list[Dimension]:
    return [
        Dimension(dim, length, f"dimension {number} of {term.name.text}")
        for term, shape in zip(side, shapes)
        for number, (dim, length) in enumerate(zip(term.dims or (), shape))
    ]


def whole_pair(place: Place, shape: tuple[int, ...]) -> Pair:
    """Return the pair that takes a tensor as it is."""
    return Pair(place, Box.whole(shape), Box.whole(shape), None)
