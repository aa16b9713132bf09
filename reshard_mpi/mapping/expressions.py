"""Numbers of [axes]: integers, or expressions over integers and keys of a model's configuration, `+ - * /` and ()."""

from __future__ import annotations

import re
from collections.abc import Mapping

from reshard_mpi.text import did_you_mean

_TOKEN = re.compile(r"\s*(?:(?P<number>[0-9]+)|(?P<key>[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*)|(?P<mark>[-+*/()]))")
_MAX_TEXT, _MAX_NESTED, _MAX_VALUE = 1_000, 32, 1 << 62


class ExpressionProblem(ValueError):
    """What is wrong with an expression, and what to do."""

    def __init__(self, problem: str, remedy: str = "correct the expression") -> None:
        super().__init__(problem)
        self.remedy = remedy


class ConfigurationNeeded(ExpressionProblem):
    """An expression has a key of the model's configuration, and there is none."""


def evaluated(text: str, config: Mapping[str, object] | None) -> int:
    """Return the value of an expression.

    config: a model's configuration; a dotted key is looked up in tables within it. Raises ExpressionProblem if a key is
    not there or is no integer, or if a division leaves a rest; ConfigurationNeeded if there is a key and no
    configuration.
    """
    if len(text) > _MAX_TEXT:
        raise ExpressionProblem(f"it is longer than {_MAX_TEXT} characters")
    reader = _Reader(text, config)
    value = reader.sum(0)
    if reader.peek() is not None:
        raise ExpressionProblem(f"unexpected {reader.peek()!r}")
    return value


class _Reader:
    def __init__(self, text: str, config: Mapping[str, object] | None) -> None:
        self._config = config
        self._values: dict[str, int] = {}  # of the keys that have been read
        self._tokens: list[tuple[str, str]] = []
        position = 0
        while text[position:].strip():
            found = _TOKEN.match(text, position)
            if found is None or found.lastgroup is None:
                raise ExpressionProblem(f"unexpected {text[position:].strip()[:20]!r}")
            self._tokens.append((found.lastgroup, found.group(found.lastgroup)))
            position = found.end()
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
                keys = ", ".join(f"{key} = {known}" for key, known in self._values.items())
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
                known = [str(name) for name in value] if isinstance(value, Mapping) else []
                raise ExpressionProblem(
                    f"no key {key!r} in the configuration{did_you_mean(part, known)}",
                    f"add {key!r} with its number to the file that --config names, or write a number in [axes]",
                )
            value = value[part]
        if isinstance(value, bool) or not isinstance(value, int):
            raise ExpressionProblem(
                f"{key!r} of the configuration, which is no integer: {str(value)[:40]!r}",
                f"set {key!r} to an integer in the file that --config names",
            )
        self._values[key] = _bounded(value)
        return self._values[key]


def _bounded(value: int) -> int:
    if abs(value) > _MAX_VALUE:
        raise ExpressionProblem("a number is too large")
    return value
