"""Compute axis lengths: solved from shapes (`solved`), and by `[axes]` of a map (`with_axes`, `evaluated`)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.mapping.equations import Axis, Factor, Padded, Product, Sum, axes_of, pads_of
from reshard_mpi.text import did_you_mean

if TYPE_CHECKING:
    from reshard_mpi.mapping.rules import Rules

Sizes = Mapping[str, int]
# The key by which a configuration says how many tensor-parallel ranks there are, as Megatron calls it.
_TENSOR_PARALLEL = "tensor_model_parallel_size"
MAX_AXIS = 1 << 62


class SizesProblem(ValueError):
    """Shapes contradict an equation, or do not tell how long an axis is."""


class UntoldLength(SizesProblem):
    """Neither shapes nor [axes] tell how long some axes are."""

    def __init__(self, problem: str, axes: Sequence[str]) -> None:
        super().__init__(problem)
        self.axes = axes


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
    """Return the length of a padded factor. length: the unpadded length. Raises SizesProblem if its multiple is 0."""
    multiple = length_of(padded.multiple, sizes)
    if multiple < 1:
        raise SizesProblem(f"nothing is padded up to a multiple of {multiple}")
    return -(-length // multiple) * multiple


def solved(dimensions: Sequence[Dimension], given: Sizes) -> dict[str, int]:
    """Return the length of every axis of the dimensions.

    Args:
        given: those that are known, which may be of other axes too.

    Raises SizesProblem if the dimensions contradict each other or do not tell an axis.
    """
    sizes = {**given, **dict(_multiples(dimensions, given))}
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


def _untold(dimensions: Sequence[Dimension], sizes: Sizes) -> UntoldLength:
    unknown = [
        [name for name in dict.fromkeys(names_in(dimension.product)) if name not in sizes] for dimension in dimensions
    ]
    axes = list(dict.fromkeys(name for names in unknown for name in names))
    for dimension in dimensions:
        for name in _padded_names(dimension.product):
            if name not in sizes:
                problem = f"how much of {dimension.where} is padding cannot be told: give {name!r} in [axes]"
                return UntoldLength(f"{problem} or by --axis {name}=LENGTH", axes)
    dimension = dimensions[0]
    return UntoldLength(
        f"the length {dimension.length} of {dimension.where} does not tell how long"
        f" {' and '.join(map(repr, unknown[0]))} are: give one of them in [axes] or by --axis NAME=LENGTH",
        axes,
    )


def _multiples(dimensions: Sequence[Dimension], given: Sizes) -> Iterator[tuple[str, int]]:
    """Yield the multiples of padded dimensions, for paddings whose unpadded length is known.

    The dimension itself is a multiple that explains its length.
    """
    for dimension in dimensions:
        if len(dimension.product) != 1 or not isinstance(padded := dimension.product[0], Padded):
            continue
        is_known = all(name.isdecimal() or name in given for name in axes_of(padded.product))
        if is_known and not padded.multiple.isdecimal() and padded.multiple not in given:
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


_TOKEN = re.compile(r"\s*(?:(?P<number>[0-9]+)|(?P<key>[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*)|(?P<mark>[-+*/()]))")
_MAX_TEXT, _MAX_NESTED, _MAX_VALUE = 1_000, 32, 1 << 62


class ExpressionProblem(ValueError):
    """An error in an expression, and its remedy."""

    def __init__(self, problem: str, remedy: str = "correct the expression") -> None:
        super().__init__(problem)
        self.remedy = remedy


class KeyNeeded(ExpressionProblem):
    """An expression has a key that the model's configuration has not, or has with no value."""


class ConfigurationNeeded(KeyNeeded):
    """An expression has a key of the model's configuration, and there is none."""


def evaluated(text: str, config: Mapping[str, object] | None) -> int:
    """Return the value of an expression.

    Args:
        config: a model's configuration; a dotted key is looked up in tables within it.

    Raises ExpressionProblem if a key is not there or is no integer, or if a division leaves a rest; ConfigurationNeeded
    if there is a key and no configuration.
    """
    if len(text) > _MAX_TEXT:
        raise ExpressionProblem(f"it is longer than {_MAX_TEXT} characters")
    reader = _ExpressionReader(text, config)
    value = reader.sum(0)
    if reader.peek() is not None:
        raise ExpressionProblem(f"unexpected {reader.peek()!r}")
    return value


class _ExpressionReader:
    def __init__(self, text: str, config: Mapping[str, object] | None) -> None:
        self._config = config
        self._values: dict[str, int] = {}  # of the keys that have been read
        self._tokens: list[tuple[str, str]] = []
        position = 0
        while text[position:].strip():
            match = _TOKEN.match(text, position)
            if match is None or match.lastgroup is None:
                raise ExpressionProblem(f"unexpected {text[position:].strip()[:20]!r}")
            self._tokens.append((match.lastgroup, match.group(match.lastgroup)))
            position = match.end()
        self._next = 0

    def peek(self) -> str | None:
        return self._tokens[self._next][1] if self._next < len(self._tokens) else None

    def sum(self, nested: int) -> int:
        value = self._product(nested)
        while (mark := self.peek()) in ("+", "-"):
            self._next += 1
            other = self._product(nested)
            value = _bounded(value + other if mark == "+" else value - other)
        return value

    def _product(self, nested: int) -> int:
        value = self._factor(nested)
        while (mark := self.peek()) in ("*", "/"):
            self._next += 1
            other = self._factor(nested)
            if mark == "*":
                value = _bounded(value * other)
            elif other == 0 or value % other:
                keys = ", ".join(f"{key} = {number}" for key, number in self._values.items())
                raise ExpressionProblem(
                    f"{value} / {other}, which is no integer" + (f" ({keys})" if keys else ""),
                    "correct these keys in the file that --config names" if keys else "correct the expression",
                )
            else:
                value //= other
        return value

    def _factor(self, nested: int) -> int:
        if self._next == len(self._tokens):
            raise ExpressionProblem("it ends where a number or a key is expected")
        kind, text = self._tokens[self._next]
        self._next += 1
        if kind == "number":
            return _bounded(int(text) if len(text) < 20 else _MAX_VALUE + 1)
        if kind == "key":
            return self._configured(text)
        if text == "(" and nested < _MAX_NESTED:
            value = self.sum(nested + 1)
            if self.peek() != ")":
                raise ExpressionProblem("')' is missing")
            self._next += 1
            return value
        raise ExpressionProblem(f"unexpected {text!r}")

    def _configured(self, key: str) -> int:
        if self._config is None:
            raise ConfigurationNeeded(f"{key!r} is a key of the model's configuration, and none is given")
        value: object = self._config
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                keys = [str(name) for name in value] if isinstance(value, Mapping) else []
                raise KeyNeeded(
                    f"no key {key!r} in the configuration{did_you_mean(part, keys)}",
                    f"add {key!r} with its number to the file that --config names, or write a number in [axes]",
                )
            value = value[part]
        if isinstance(value, bool) or not isinstance(value, int):
            raise (ExpressionProblem if value is not None else KeyNeeded)(
                f"{key!r} of the configuration, which is no integer: {str(value)[:40]!r}",
                f"set {key!r} to an integer in the file that --config names",
            )
        self._values[key] = _bounded(value)
        return self._values[key]


def _bounded(value: int) -> int:
    if abs(value) > _MAX_VALUE:
        raise ExpressionProblem("a number is too large")
    return value


class UsualLength(NamedTuple):
    """The length of an axis where nothing else tells it. otherwise: by which keys a configuration would tell it."""

    length: int
    otherwise: str


def with_axes(rules: Rules, table: Mapping[str, Any], config: Mapping[str, object] | None, where: str) -> Rules:
    """Return rules with the lengths in [axes] of those axes that have none yet.

    Without a configuration, computed ones are left out.
    """
    used = rules.all_axes
    for name, value in table.items():
        if name not in used:
            raise MapError(
                f"[axes] has {name!r}, which no equation has",
                expected=", ".join(sorted(used)[:20]) or "no axes",
                where=where,
                remedy="mend the name, or remove it",
            )
        choices = choices_of(value)
        if _TENSOR_PARALLEL in choices:
            rules = rules._replace(cuts_by_rank=True)
        if name not in rules.axes and name not in rules.usual:
            rules = with_axis(rules, name, choices, config, where)
    return rules


def choices_of(value: object) -> list[object]:
    return value if isinstance(value, list) and value else [value]


def with_axis(
    rules: Rules, name: str, choices: Sequence[object], config: Mapping[str, object] | None, where: str
) -> Rules:
    """Return rules with the length of an axis: the first of `choices` whose keys the configuration has.

    A number behind others is the length where nothing else tells it.
    """
    first: KeyNeeded | None = None
    for value in choices:
        if not isinstance(value, str):
            length = _checked_length(name, value, where)
            if value is choices[0]:
                return rules._replace(axes={**rules.axes, name: length})
            otherwise = ", or ".join(text for text in choices if isinstance(text, str))
            return rules._replace(usual={**rules.usual, name: UsualLength(length, otherwise)})
        try:
            length = _checked_length(name, evaluated(value, config), where)
        except KeyNeeded as error:
            first = first or error
        except ExpressionProblem as error:
            raise _not_computed(name, value, error, where) from None
        else:
            return rules._replace(axes={**rules.axes, name: length})
    assert first is not None
    if isinstance(first, ConfigurationNeeded):
        return rules._replace(lacks_config=True)
    raise _not_computed(name, " or ".join(map(str, choices)), first, where)


def _checked_length(name: str, value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < MAX_AXIS:
        raise MapError(
            f"{name!r} in [axes] is no length", expected="a positive integer", got=str(value)[:60], where=where
        )
    return value


def _not_computed(name: str, text: str, error: ExpressionProblem, where: str) -> MapError:
    return MapError(
        f"the length of {name!r} cannot be computed",
        expected=f"an integer from {text!r}",
        got=str(error),
        where=where,
        remedy=error.remedy,
    )


def tensor_parallel_of(config: Mapping[str, object] | None) -> int | None:
    """Return how many tensor-parallel ranks a configuration says there are; None if it says nothing."""
    value = None if config is None else config.get(_TENSOR_PARALLEL)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
