"""Define the rules of a map file, read entries of it, and check their values (`Rules`).

`count` is how many steps were taken: torch has it beside each parameter's state, MindSpore once. `number` is a tensor
on the right that holds a setting of the optimizer on the left, or its power by the count. `caution` is what people are
told where a setting makes both sides do different things.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.formats.dtypes import BY_NAME, DType, encode_number, numbers
from reshard_mpi.mapping.axis_sizes import MAX_AXIS, UsualLength, names_in
from reshard_mpi.mapping.equations import Equation, NamePattern, PatternProblem


def require_known(table: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    """Raise MapError for a key that is none of `keys`."""
    unknown = [key for key in table if key not in keys]
    if unknown:
        raise MapError("an entry of the map has an unknown key", expected=", ".join(keys), got=unknown[0], where=where)


def text_of(table: Mapping[str, Any], key: str, where: str) -> str:
    """Return a text that is not empty."""
    value = table.get(key)
    if not isinstance(value, str) or not value:
        raise MapError(f"{key} is no text", got=repr(value)[:60], where=where)
    return value


def flag_of(table: Mapping[str, Any], key: str, where: str) -> bool:
    """Return whether something is said to be so; False if nothing is said."""
    value = table.get(key, False)
    if not isinstance(value, bool):
        raise MapError(f"{key} is wrong", expected="true or false", got=repr(value)[:60], where=where)
    return value


def name_of(table: Mapping[str, Any], key: str, where: str) -> NamePattern:
    """Return the name of a tensor, with its captures."""
    try:
        return NamePattern(text_of(table, key, where))
    except PatternProblem as error:
        raise MapError("a name is wrong", got=str(error), where=where) from None


_SIDES = ("left", "right")
_MAX_DIMENSIONS = 32
_SCALAR_TYPES = ("int32", "int64", "float32", "float64")
# Frameworks multiply in single precision at every step.
_MOST_OFF = 1e-3


class Count(NamedTuple):
    """How many steps were taken."""

    each: NamePattern  # on the left, a tensor of each parameter, beside the tensor named `beside`
    beside: NamePattern
    each_type: DType
    total: str  # on the right, one tensor
    total_type: DType
    where: str


class Number(NamedTuple):
    """A tensor of one element on the right that holds a setting of the left. is_power: to the power of the count."""

    name: str
    of: str
    is_power: bool
    dtype: DType
    where: str


class Caution(NamedTuple):
    """What people are told where a setting of the left is true, or a number that is not 0. of: the setting."""

    of: str
    text: str
    where: str


class Unlike(NamedTuple):
    """A setting that is not the same for all parameters of an optimizer."""

    values: tuple[Any, ...]


def setting(settings: Mapping[str, Any], key: str) -> Any:
    """Return a setting of an optimizer by its dotted key, as `betas.0`; None if there is none."""
    value: Any = settings
    for part in key.split("."):
        if isinstance(value, Unlike):
            return value
        if isinstance(value, Mapping) and isinstance(value.get("tuple"), list):
            value = value["tuple"]
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value


def count_element(value: float, dtype: DType, name: str, where: str) -> bytes:
    """Return the bytes of a count, which must not be rounded. Raises MapError if the type cannot hold it."""
    content = element_of(value, dtype, name, where)
    if numbers(content, dtype)[0] != value:
        raise _cannot_hold(value, dtype, name, where, "it would be rounded")
    return content


def element_value(content: bytes, dtype: DType, name: str, where: str) -> float:
    """Return the number that a tensor of one element holds. Raises MapError if its type is not known here."""
    if dtype.name not in _SCALAR_TYPES:
        raise MapError(
            f"{name} is no number of a known type", expected=", ".join(_SCALAR_TYPES), got=str(dtype), where=where
        )
    value: float = numbers(content, dtype)[0]
    if float(value) != value and value == value:
        raise MapError(f"{name} is too large to reckon with", expected="2^53 at most", got=str(value), where=where)
    return float(value)


def worth(number: Number, settings: Mapping[str, Any], steps: float | None) -> float | None:
    """Return the value of a number; None if the setting is not there, or how many steps were taken is not known.

    Raises MapError if there is no such number.
    """
    value = setting(settings, number.of)
    if isinstance(value, bool) or not isinstance(value, int | float) or (number.is_power and steps is None):
        return None
    try:
        result = float(value) ** steps if number.is_power and steps is not None else float(value)
        if isinstance(result, complex):
            raise ValueError("a negative number to the power of a fraction")
        return result
    except (ValueError, ArithmeticError) as error:
        raise MapError(
            f"{number.name} cannot be made of a setting of the optimizer",
            expected="a number that floating point can hold",
            got=f"{number.of}: {error}",
            where=number.where,
            remedy="leave the optimizer's state out (--exclude)",
        ) from None


def require_power(number: Number, settings: Mapping[str, Any], steps: float | None, held: float, name: str) -> None:
    """Raise MapError if a number is not the power that the target's settings give after this number of steps."""
    value = worth(number, settings, steps)
    if value is not None and not math.isclose(value, held, rel_tol=_MOST_OFF, abs_tol=1e-30):
        raise MapError(
            f"{name} does not belong to the settings of the target",
            expected=f"{value:.6g}, which is {number.of} to the power of {steps:g}",
            got=f"{held:.6g}",
            where=number.where,
            remedy="give a checkpoint of the target (--like) with the settings that the source was trained with",
        )


def cautions(rules: Sequence[Caution], settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield what people are told of an optimizer with these settings."""
    for rule in rules:
        value = setting(settings, rule.of)
        if any(
            isinstance(each, bool | int | float) and each
            for each in (value.values if isinstance(value, Unlike) else [value])
        ):
            yield rule.text


def count_of(table: Mapping[str, Any], where: str) -> Count:
    """Read a count rule. Raises MapError."""
    each, beside, total = names = [name_of(table, key, where) for key in ("each", "beside", "total")]
    if each.captures != beside.captures or [capture.is_text for capture in each.captures] != [True] or total.captures:
        raise MapError(
            "count is wrong",
            expected="one capture like {p*} in each and beside, and none in total",
            got=", ".join(name.text for name in names),
            where=where,
        )
    each_type, total_type = (_type(table, key, where) for key in ("each_type", "total_type"))
    require_known(table, ("each", "beside", "each_type", "total", "total_type"), where)
    return Count(each, beside, each_type, total.text, total_type, where)


def number_of(table: Mapping[str, Any], where: str) -> Number:
    """Read a number rule. Raises MapError."""
    is_power = flag_of(table, "power", where)
    require_known(table, ("name", "of", "power", "type"), where)
    name, of = text_of(table, "name", where), text_of(table, "of", where)
    return Number(name, of, is_power, _type(table, "type", where), where)


def caution_of(table: Mapping[str, Any], where: str) -> Caution:
    """Read a caution: a setting that changes results. Raises MapError."""
    require_known(table, ("of", "text"), where)
    return Caution(text_of(table, "of", where), text_of(table, "text", where), where)


def _type(table: Mapping[str, Any], key: str, where: str) -> DType:
    name = table.get(key, "float32")
    if name not in _SCALAR_TYPES:
        raise MapError(f"{key} is unknown", expected=", ".join(_SCALAR_TYPES), got=repr(name)[:60], where=where)
    return BY_NAME[name]


# The names of types in equations and options, and the types' own names.
TYPES = {
    "fp64": BY_NAME["float64"],
    "fp32": BY_NAME["float32"],
    "fp16": BY_NAME["float16"],
    "bf16": BY_NAME["bfloat16"],
    "fp8_e4m3": BY_NAME["float8_e4m3fn"],
    "fp8_e5m2": BY_NAME["float8_e5m2"],
}


class EquationRule(NamedTuple):
    """An equation that tensors are taken through."""

    equation: Equation
    shared: tuple[str, ...]  # the captures in all its names
    is_optional: bool  # whether it may apply nowhere, or where only some of its tensors are there
    copies: bool  # whether the one tensor of one side is each of those on the other
    drops_pads: bool  # whether padding that is not zero is thrown away
    where: str  # its place in the file
    # what it is without a checkpoint that the target is to be like: "only": it does not apply then; "needed": where it
    # could apply, nothing tells whether it does; "forward": as "needed" if it is read forward, and backward as without
    # this
    like: str | None = None
    warning: str = ""  # what people are told where it applies

    @property
    def axes(self) -> frozenset[str]:
        """The names of all axes in its dimensions."""
        terms = (*self.equation.left, *self.equation.right)
        return frozenset(axis for term in terms for dim in term.dims or () for axis in names_in(dim))

    @property
    def keeps_names(self) -> bool:
        """Whether the tensors have the same names on both sides."""
        left, right = ([term.name.text for term in side] for side in (self.equation.left, self.equation.right))
        return left == right


class Drop(NamedTuple):
    """Tensors of one side that are left out."""

    glob: str
    side: str
    is_optional: bool  # whether they need not be made up on the way back
    where: str
    are_zeros: bool = False  # whether they may hold only zeros


class Fill(NamedTuple):
    """A tensor of one side that is made up: all elements are `element`."""

    name: NamePattern
    beside: NamePattern | None  # makes one for each tensor of that name, whose captures the name may have
    # shape, dtype: None: as the tensor beside it
    shape: tuple[int, ...] | None
    dtype: DType | None
    value: int | float
    side: str
    where: str
    needs_like: bool = False  # it is made up only if the checkpoint that the target is to be like has it
    is_optional: bool = False  # whether there may be nothing that it is beside

    def element(self, dtype: DType) -> bytes:
        """Return the bytes of an element. Raises MapError if the type cannot hold the value."""
        return element_of(self.value, dtype, self.name.text, self.where)


def element_of(value: int | float, dtype: DType, name: str, where: str) -> bytes:
    """Return the bytes of an element that is made up. Raises MapError if the type cannot hold the value."""
    try:
        return encode_number(value, dtype)
    except ValueError as error:
        raise _cannot_hold(value, dtype, name, where, str(error)) from None


def _cannot_hold(value: float, dtype: DType, name: str, where: str, why: str) -> MapError:
    return MapError(
        f"{name} cannot be made up of {value} in {dtype.name}",
        expected="a value that the type can hold",
        got=why,
        where=where,
        remedy="give another value, or another type",
    )


def drop_of(entry: Mapping[str, Any], where: str) -> Drop:
    """Read an entry that leaves tensors out. Raises MapError."""
    require_known(entry, ("drop", "side", "optional", "zeros"), where)
    glob, side = text_of(entry, "drop", where), _side(entry, "left", where)
    return Drop(glob, side, flag_of(entry, "optional", where), where, flag_of(entry, "zeros", where))


def fill_of(entry: Mapping[str, Any], where: str) -> Fill:
    """Read an entry that makes a tensor up. Raises MapError."""
    require_known(entry, ("fill", "side", "like", "optional"), where)
    if entry.get("like") not in (None, "only"):
        raise MapError("like is wrong", expected="'only', or nothing", got=repr(entry["like"])[:60], where=where)
    fill = entry["fill"]
    if not isinstance(fill, dict):
        raise MapError(
            "fill is no table", expected="{ name, value, shape, type, beside }", got=str(fill)[:60], where=where
        )
    require_known(fill, ("name", "value", "shape", "type", "beside"), where)
    name = name_of(fill, "name", where)
    beside = name_of(fill, "beside", where) if "beside" in fill else None
    if not set(name.captures) <= set(beside.captures if beside is not None else ()):
        raise MapError(
            "the name of what is made up has captures that the tensor beside it has not", got=name.text, where=where
        )
    value = fill.get("value", 0)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MapError("value is no number", got=repr(value)[:60], where=where)
    shape = fill.get("shape")
    if shape is not None and not (
        isinstance(shape, list)
        and len(shape) <= _MAX_DIMENSIONS
        and all(isinstance(length, int) and not isinstance(length, bool) and 0 <= length < MAX_AXIS for length in shape)
    ):
        raise MapError("shape is no list of lengths", got=repr(shape)[:60], where=where)
    type_name = fill.get("type")
    dtype = None
    if type_name is not None:
        dtype = (TYPES | BY_NAME).get(type_name) if isinstance(type_name, str) else None
        if dtype is None:
            raise MapError(
                "type is unknown", expected=", ".join((*TYPES, *BY_NAME)), got=repr(type_name)[:60], where=where
            )
    if beside is None and (shape is None or dtype is None):
        raise MapError("what is made up beside nothing needs a shape and a type", got=name.text, where=where)
    side, lengths = _side(entry, "right", where), None if shape is None else tuple(shape)
    return Fill(name, beside, lengths, dtype, value, side, where, "like" in entry, flag_of(entry, "optional", where))


def _side(table: Mapping[str, Any], usual: str, where: str) -> str:
    value = table.get("side", usual)
    if value not in _SIDES:
        raise MapError("side is wrong", expected="'left' or 'right'", got=repr(value)[:60], where=where)
    return str(value)


class Rules(NamedTuple):
    """The rules of a map file."""

    equations: tuple[EquationRule, ...]
    drops: tuple[Drop, ...]
    fills: tuple[Fill, ...]
    axes: Mapping[str, int]  # the lengths that it gives, or the user does
    where: str  # the file
    # lengths of axes that neither shapes nor a configuration tell
    usual: Mapping[str, UsualLength] = {}
    from_user: frozenset[str] = frozenset()  # the axes whose lengths the user gives
    in_names: frozenset[str] = frozenset()  # axes whose lengths stand in names
    lacks_config: bool = False  # whether it gives others by the configuration of the model, and there is none
    # equations of what stands before and behind a parameter's name in the name of its state
    states: tuple[EquationRule, ...] = ()
    counts: tuple[Count, ...] = ()
    numbers: tuple[Number, ...] = ()
    cautions: tuple[Caution, ...] = ()
    is_typed: bool = False  # whether it is no file but an equation that the user has typed
    # how many tensor-parallel ranks the configuration says there are; None: it says nothing
    tensor_parallel: int | None = None
    cuts_by_rank: bool = False  # whether an axis has that length, so that tensors have a part for each of these ranks

    @property
    def all_axes(self) -> frozenset[str]:
        """The names of the axes of all equations, in shapes or in names."""
        return self.in_names.union(axis for rule in self.equations for axis in rule.axes)
