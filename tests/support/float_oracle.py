"""Floating-point types in whole numbers and fractions: what an element becomes in another type, one at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import NamedTuple

TYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class Form:
    """The bits of a type. has_infinity: if not, only all ones are a NaN, and what is too large becomes the largest."""

    width: int
    exponent_bits: int
    has_infinity: bool = True

    @cached_property
    def mantissa_bits(self) -> int:
        return self.width - 1 - self.exponent_bits

    @cached_property
    def bias(self) -> int:
        return (1 << self.exponent_bits - 1) - 1

    @cached_property
    def sign(self) -> int:
        return 1 << self.width - 1

    @cached_property
    def infinity(self) -> int:
        return (1 << self.exponent_bits) - 1 << self.mantissa_bits

    @cached_property
    def first_nan(self) -> int:
        return self.infinity + 1 if self.has_infinity else self.sign - 1

    @cached_property
    def largest(self) -> int:
        """The largest finite magnitude."""
        return self.infinity - 1 if self.has_infinity else self.sign - 2


FORMS = {
    "float64": Form(64, 11),
    "float32": Form(32, 8),
    "float16": Form(16, 5),
    "bfloat16": Form(16, 8),
    "float8_e4m3fn": Form(8, 4, has_infinity=False),
    "float8_e5m2": Form(8, 5),
}


class Became(NamedTuple):
    """The bits of an element in another type. too_large: whether it is a number that the type has no place for."""

    bits: int
    too_large: bool


def value(magnitude: int, form: Form) -> Fraction:
    """Return the number that a finite magnitude is."""
    exponent, mantissa = divmod(magnitude, 1 << form.mantissa_bits)
    significand = mantissa + ((1 << form.mantissa_bits) if exponent else 0)
    return significand * power_of_two(max(exponent, 1) - form.bias - form.mantissa_bits)


def nearest(number: Fraction, form: Form) -> int:
    """Return the magnitude nearest to a number, as if there were exponents without end; of two, the even one."""
    if not number:
        return 0
    power = math.floor(math.log2(number.numerator) - math.log2(number.denominator))
    power += (power_of_two(power + 1) <= number) - (number < power_of_two(power))
    power = max(power, 1 - form.bias)
    steps = number / power_of_two(power - form.mantissa_bits)
    return (power + form.bias - 1 << form.mantissa_bits) + round(steps)  # which rounds a tie to the even number


@lru_cache(maxsize=1 << 12)
def power_of_two(exponent: int) -> Fraction:
    """Return a power of two."""
    return Fraction(2) ** exponent


@lru_cache(maxsize=1 << 17)
def rounded(magnitude: int, source: str, target: str) -> int:
    """Return the nearest magnitude to a finite one of another type; the same for both signs.

    That is `nearest` of its `value`, in whole numbers alone, of which there are many.
    """
    old, new = FORMS[source], FORMS[target]
    exponent, significand = divmod(magnitude, 1 << old.mantissa_bits)
    significand += (1 << old.mantissa_bits) if exponent else 0
    if not significand:
        return 0
    unit = max(exponent, 1) - old.bias - old.mantissa_bits  # it is `significand` times 2 to the power of this
    power = max(unit + significand.bit_length() - 1, 1 - new.bias)
    missing = power - new.mantissa_bits - unit
    if missing <= 0:
        steps = significand << -missing
    else:
        steps, rest = divmod(significand, 1 << missing)
        half = 1 << missing - 1
        steps += rest > half or (rest == half and steps % 2)
    return (power + new.bias - 1 << new.mantissa_bits) + steps


def became(bits: int, source: str, target: str) -> Became:
    """Return what the bits of an element of type `source` are in type `target`."""
    if source == target:
        return Became(bits, too_large=False)
    if source == "float64" and target != "float32":  # which torch does by way of float32
        wide = became(bits, source, "float32")
        narrow = became(wide.bits, "float32", target)
        return Became(narrow.bits, wide.too_large or narrow.too_large)
    old, new = FORMS[source], FORMS[target]
    magnitude, sign = bits & old.sign - 1, new.sign if bits & old.sign else 0
    if magnitude >= old.first_nan:
        return Became(nan(magnitude, sign, source, target), too_large=False)
    if magnitude > old.largest:
        return Became(sign | (new.infinity if new.has_infinity else new.largest), not new.has_infinity)
    magnitude = rounded(magnitude, source, target)
    if magnitude <= new.largest:
        return Became(sign | magnitude, too_large=False)
    return Became(sign | (new.infinity if new.has_infinity else new.largest), too_large=True)


def nan(magnitude: int, sign: int, source: str, target: str) -> int:
    """Return the bits of a NaN in another type, as torch has them."""
    old, new = FORMS[source], FORMS[target]
    if target == "bfloat16":
        return 0xFFFF if source in ("float32", "float64") else 0x7FC0
    if target.startswith("float8"):
        return sign | 0x7F
    if source == "bfloat16" and target == "float32":
        return sign | magnitude << 16  # the only type whose NaNs are not made quiet
    mantissa = magnitude & (1 << old.mantissa_bits) - 1
    missing = new.mantissa_bits - old.mantissa_bits
    payload = mantissa << missing if missing >= 0 else mantissa >> -missing
    return sign | new.infinity | 1 << new.mantissa_bits - 1 | payload
