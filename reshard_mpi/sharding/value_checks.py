"""Check plain values from JSON and TOML, within limits (`table`, `integer`).

what: how the error calls the value. where: the file and the place in it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from reshard_mpi.errors import StrategyError

MAX_FILE_BYTES = 256 << 20  # a merged strategy of 64 stages with 10,000 parameters each is about half of this
MAX_SPEC_BYTES = 1 << 19  # people write specs; a larger one is a slip
MAX_RANKS = 1 << 24
MAX_STAGES = 1 << 10
# One operator or parameter of a protobuf strategy: some hundred bytes, unless a dimension is cut into uneven slices.
MAX_ITEM_BYTES = 1 << 20
MAX_SLICES = 1 << 14
MAX_INPUTS = 1 << 10  # of an operator
# What a file may take when it is parsed, in all and for each of its bytes: real ones take four to six times their size,
# one that is nothing but brackets takes forty times its own.
MAX_PARSED_BYTES = 40 << 20
MAX_PARSED_TIMES = 10
MAX_NAME_LENGTH = 4096  # as in every format, and a little more for the stage in a merged file
MAX_RULES = 1 << 10
# Of all patterns together: a pattern is compiled when it is used.
MAX_PATTERNS_LENGTH = 1 << 17
MAX_AXES = 64
MAX_DIMENSIONS = 64
# The factors of a nested map are joined by trying the groupings, whose number grows as two to this power.
MAX_EXPANDED_DIMENSIONS = 16
MAX_LENGTH = (1 << 63) - 1  # of a tensor dimension, as in every format


def wrong(what: str, expected: str, got: Any, where: str, remedy: str = "") -> StrategyError:
    """Return the error for a value of the wrong type or size."""
    return StrategyError(
        f"{what} has the wrong type or value", expected=expected, got=shown(got), where=where, remedy=remedy
    )


def shown(value: Any) -> str:
    """Return a short text of any value."""
    if value is None:
        return "nothing"
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a whole number of thousands of digits, or lists in lists in lists
        text = "too large to show"
    return f"{type(value).__name__} {text[:80]}{'...' if len(text) > 80 else ''}"


def integer(value: Any, what: str, low: int, high: int, where: str) -> int:
    """Return a whole number from `low` to `high`; True and 1.0 are none."""
    if type(value) is not int or not low <= value <= high:
        raise wrong(what, f"a whole number from {low} to {high}", value, where)
    return value


def integers(value: Any, what: str, low: int, high: int, where: str) -> tuple[int, ...]:
    """Return a list of whole numbers from `low` to `high` as a tuple."""
    if not isinstance(value, list):
        raise wrong(what, "a list of whole numbers", value, where)
    for number in value:  # spelt out: a file may hold a hundred thousand of these lists
        if type(number) is not int or not low <= number <= high:
            raise wrong(what, f"whole numbers from {low} to {high}", number, where)
    return tuple(value)


def array(value: Any, what: str, where: str, limit: int = 1 << 31) -> list[Any]:
    """Return a list of at most `limit` values."""
    if not isinstance(value, list) or len(value) > limit:
        raise wrong(what, f"a list of at most {limit} values", value, where)
    return value


def rules(value: Any, what: str, where: str) -> list[Any]:
    """Return a list of rules that is not too long to be tried one by one on every name."""
    return array(value, what, where, MAX_RULES)


def patterns(globs: Iterable[str], where: str) -> None:
    """Raise StrategyError for patterns that would take too long to compile."""
    length = sum(map(len, globs))
    if length > MAX_PATTERNS_LENGTH:
        raise StrategyError(
            "the patterns of the rules are too long together",
            expected=f"{MAX_PATTERNS_LENGTH} characters at most",
            got=str(length),
            where=where,
        )


def parsed_size(parsed_bytes: int, file_bytes: int, where: str) -> None:
    """Raise StrategyError for a file whose values would take far more memory than a strategy."""
    if parsed_bytes > max(MAX_PARSED_BYTES, MAX_PARSED_TIMES * file_bytes):
        raise StrategyError(
            "the file would take too much memory",
            expected=f"what a strategy takes: {MAX_PARSED_TIMES} times its size",
            got=f"{parsed_bytes} bytes or more, for {file_bytes} bytes",
            where=where,
        )


def table(value: Any, what: str, where: str) -> dict[str, Any]:
    """Return an object of JSON, a table of TOML."""
    if not isinstance(value, dict):
        raise wrong(what, "names with values", value, where)
    return value


def text(value: Any, what: str, where: str) -> str:
    """Return a string that can be written as UTF-8, is not empty and not longer than a name."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_LENGTH or not _is_unicode(value):
        raise wrong(what, f"text in UTF-8, 1 to {MAX_NAME_LENGTH} characters", value, where)
    return value


def _is_unicode(value: str) -> bool:
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
        return False
    return True


def known_keys(value: dict[str, Any], allowed: Collection[str], what: str, where: str) -> None:
    """Raise StrategyError for an unknown key: most likely a slip that would change the result."""
    for key in value:
        if key not in allowed:
            raise StrategyError(
                f"{what} has an unknown key", expected="one of " + ", ".join(allowed), got=key[:80], where=where
            )
