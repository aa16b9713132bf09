"""Numbers that one framework keeps in tensors, and another in settings of its optimizer or once for each parameter.

`count` is how many steps were taken: torch has it beside each parameter's state, MindSpore once. `number` is a tensor
on the right that holds a setting of the optimizer on the left, or its power by the count. `caution` is what people are
told where a setting makes both sides do different things.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.formats.dtypes import BY_NAME, DType
from reshard_mpi.mapping.entries import flag_of, name_of, require_known, text_of
from reshard_mpi.mapping.names import NamePattern

_CODES = {"int32": "i", "int64": "q", "float32": "f", "float64": "d"}
# Frameworks multiply in single precision at every step.
_MOST_OFF = 1e-3


class Count(NamedTuple):
    """How many steps were taken.

    each: on the left, a tensor of each parameter, beside that of the name `beside`. total: on the right, one tensor.
    """

    each: NamePattern
    beside: NamePattern
    each_type: DType
    total: str
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


def setting(settings: Mapping[str, Any], key: str) -> Any:
    """Return a setting of an optimizer by its dotted key, as `betas.0`; None if there is none."""
    value: Any = settings
    for part in key.split("."):
        if isinstance(value, Mapping) and isinstance(value.get("tuple"), list):
            value = value["tuple"]
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value


def packed(value: float, dtype: DType, name: str, where: str, *, is_count: bool = False) -> bytes:
    """Return the bytes of a number. Raises MapError if the type cannot hold it; a count must not be rounded either."""
    code = _CODES[dtype.name]
    try:
        if code in "iq" and value != int(value):
            raise ValueError("no integer")
        content = struct.pack(f"={code}", int(value) if code in "iq" else value)
        if is_count and struct.unpack(f"={code}", content)[0] != value:
            raise ValueError("it would be rounded")
        return content
    except (ValueError, OverflowError, struct.error) as error:
        raise MapError(f"{name} cannot be {value!r} in {dtype.name}", got=str(error), where=where) from None


def unpacked(content: bytes, dtype: DType, name: str, where: str) -> float:
    """Return the number that a tensor of one element holds. Raises MapError if its type is not known here."""
    code = _CODES.get(dtype.name)
    if code is None:
        raise MapError(f"{name} is no number of a known type", expected=", ".join(_CODES), got=str(dtype), where=where)
    value: float = struct.unpack(f"={code}", content)[0]
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
    """Raise MapError if a number is not what the settings of the target would make it after so many steps."""
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
        if isinstance(value, bool | int | float) and value:
            yield rule.text


def count_of(table: Mapping[str, Any], where: str) -> Count:
    """Read what a map says of a count. Raises MapError."""
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
    """Read what a map says of a number. Raises MapError."""
    is_power = flag_of(table, "power", where)
    require_known(table, ("name", "of", "power", "type"), where)
    name, of = text_of(table, "name", where), text_of(table, "of", where)
    return Number(name, of, is_power, _type(table, "type", where), where)


def caution_of(table: Mapping[str, Any], where: str) -> Caution:
    """Read what a map says of a setting that makes a difference. Raises MapError."""
    require_known(table, ("of", "text"), where)
    return Caution(text_of(table, "of", where), text_of(table, "text", where), where)


def _type(table: Mapping[str, Any], key: str, where: str) -> DType:
    name = table.get(key, "float32")
    if name not in _CODES:
        raise MapError(f"{key} is unknown", expected=", ".join(_CODES), got=repr(name)[:60], where=where)
    return BY_NAME[name]
