"""How long axes are: what shapes say of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard_mpi.mapping.syntax import Axis, Factor, Padded, Product, Sum, axes_of, pads_of

Sizes = Mapping[str, int]


class SizesProblem(ValueError):
    """Shapes contradict an equation, or do not tell how long an axis is."""


class UntoldLength(SizesProblem):
    """Neither shapes nor [axes] tell how long an axis of the target is."""


class Dimension(NamedTuple):
    """A dimension of a tensor: what an equation says of it, and its length. where: in words, which it is."""

    product: Product
    length: int
    where: str


def length_of(axis: str, sizes: Sizes) -> int:
    """Return the length of an axis or a number."""
    return int(axis) if axis.isdecimal() else sizes[axis]


def extent(product: Product, sizes: Sizes) -> int:
    """Return how long a dimension is. sizes: of all its axes."""
    return math.prod(_factor_extent(factor, sizes) for factor in product)


def _factor_extent(factor: Factor, sizes: Sizes) -> int:
    if isinstance(factor, Axis):
        return length_of(factor.name, sizes)
    if isinstance(factor, Sum):
        return sum(extent(summand, sizes) for summand in factor.summands)
    return padded_extent(extent(factor.product, sizes), factor, sizes)


def padded_extent(length: int, padded: Padded, sizes: Sizes) -> int:
    """Return the length of a padded factor. length: of what is padded. Raises SizesProblem if its multiple is 0."""
    multiple = length_of(padded.multiple, sizes)
    if multiple < 1:
        raise SizesProblem(f"nothing is padded up to a multiple of {multiple}")
    return -(-length // multiple) * multiple


def solved(dimensions: Sequence[Dimension], known: Sizes) -> dict[str, int]:
    """Return the length of every axis of the dimensions.

    known: those that are known, which may be of other axes too. Raises SizesProblem if the dimensions contradict each
    other or do not tell an axis.
    """
    sizes = {**known, **dict(_multiples(dimensions, known))}
    waiting = list(dimensions)
    while waiting:
        undetermined = []
        for dimension in waiting:
            unknown = {name for name in names_in(dimension.product) if name not in sizes}
            if not unknown:
                _require_length(dimension, sizes)
            elif len(unknown) == 1 and unknown.isdisjoint(_padded_names(dimension.product)):
                sizes |= {name: _root(dimension, name, sizes) for name in unknown}
            else:
                undetermined.append(dimension)
        if len(undetermined) == len(waiting):
            raise _untold(waiting, sizes)
        waiting = undetermined
    return sizes


def _untold(dimensions: Sequence[Dimension], sizes: Sizes) -> SizesProblem:
    for dimension in dimensions:
        for name in _padded_names(dimension.product):
            if name not in sizes:
                problem = f"how much of {dimension.where} is padding cannot be told: give {name!r} in [axes]"
                return SizesProblem(problem)
    dimension = dimensions[0]
    unknown_names = [name for name in dict.fromkeys(names_in(dimension.product)) if name not in sizes]
    return SizesProblem(
        f"the length {dimension.length} of {dimension.where} does not tell how long"
        f" {' and '.join(map(repr, unknown_names))} are: give one of them in [axes]"
    )


def _multiples(dimensions: Sequence[Dimension], known: Sizes) -> Iterator[tuple[str, int]]:
    """Yield the multiples that dimensions are padded up to, where these are padding and what is padded is known.

    The dimension itself is a multiple that explains its length.
    """
    for dimension in dimensions:
        if len(dimension.product) != 1 or not isinstance(padded := dimension.product[0], Padded):
            continue
        is_known = all(name.isdecimal() or name in known for name in axes_of(padded.product))
        if is_known and not padded.multiple.isdecimal() and padded.multiple not in known:
            yield padded.multiple, dimension.length


def names_in(product: Product) -> Iterator[str]:
    """Yield the names of all axes, multiples of padding included, and no numbers."""
    yield from (name for name in axes_of(product) if not name.isdecimal())
    yield from (padded.multiple for padded in pads_of(product) if not padded.multiple.isdecimal())


def _padded_names(product: Product) -> Iterator[str]:
    """Yield the names of the axes that are padded, and of the multiples that they are padded up to."""
    for padded in pads_of(product):
        yield from (name for name in axes_of(padded.product) if not name.isdecimal())
        if not padded.multiple.isdecimal():
            yield padded.multiple


def _require_length(dimension: Dimension, sizes: Sizes) -> None:
    length = extent(dimension.product, sizes)
    if length != dimension.length:
        shown = ", ".join(f"{name} = {sizes[name]}" for name in dict.fromkeys(names_in(dimension.product)))
        raise SizesProblem(
            f"{dimension.where} is {dimension.length} long, not {length}" + (f" ({shown})" if shown else "")
        )


def _root(dimension: Dimension, name: str, sizes: Sizes) -> int:
    """Return the length of an axis, the only unknown one of a dimension: its extent is linear in it."""
    none, one = (extent(dimension.product, {**sizes, name: length}) for length in (0, 1))
    slope = one - none
    length, rest = divmod(dimension.length - none, slope) if slope else (0, 1)
    if rest or length < 0:
        shown = "".join(
            f", {other} = {sizes[other]}" for other in dict.fromkeys(names_in(dimension.product)) if other in sizes
        )
        raise SizesProblem(f"no length of {name!r} makes {dimension.where} {dimension.length} long{shown}")
    return length
