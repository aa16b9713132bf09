"""Names of tensors with captures: `model.layers.{l}.mlp.experts.{e}.w1.weight`.

`{x}` is a decimal integer without leading zeros, `{x*}` any text of one character or more, dots included.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

_CAPTURE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)(\*?)\}")
_MAX_CAPTURES = 8
_MAX_INTEGER_DIGITS = 9


class PatternProblem(ValueError):
    """A name that is no pattern."""


class Capture(NamedTuple):
    """A placeholder of a name. is_text: whether it stands for any text; else for an integer."""

    name: str
    is_text: bool


class NamePattern:
    """A name with captures. text: as it was written. captures: in the order of the name."""

    __slots__ = ("_begin", "_end", "_loose", "_regex", "captures", "literals", "text")

    def __init__(self, text: str) -> None:
        """Raises PatternProblem if the captures of a name cannot be told from each other."""
        parts = _CAPTURE.split(text)
        self.text = text
        self.literals = tuple(parts[::3])
        self.captures = tuple(Capture(name, star == "*") for name, star in zip(parts[1::3], parts[2::3]))
        names = [capture.name for capture in self.captures]
        if any(mark in literal for literal in self.literals for mark in "{}"):
            raise PatternProblem(f"{text!r} has a brace that belongs to no capture like {{l}} or {{p*}}")
        if len(names) > _MAX_CAPTURES or len(set(names)) != len(names):
            raise PatternProblem(f"{text!r} has a capture twice, or more than {_MAX_CAPTURES}")
        if sum(capture.is_text for capture in self.captures) > 1:
            raise PatternProblem(f"{text!r} has more than one capture of any text")
        after_integers = (
            literal for capture, literal in zip(self.captures, self.literals[1:]) if not capture.is_text and literal
        )
        if any(literal[0].isdigit() for literal in after_integers):
            raise PatternProblem(f"{text!r} has a digit behind the capture of an integer")
        if any(not literal for literal in self.literals[1:-1]):
            raise PatternProblem(f"{text!r} has captures with nothing between them")
        pieces = [re.escape(self.literals[0])]
        for capture, literal in zip(self.captures, self.literals[1:]):
            pieces.append("(.+)" if capture.is_text else f"(0|[1-9][0-9]{{0,{_MAX_INTEGER_DIGITS - 1}}})")
            pieces.append(re.escape(literal))
        self._regex = re.compile("".join(pieces), re.DOTALL)
        loose = ("([0-9]+)" if piece.startswith("(0|") else piece for piece in pieces)
        self._loose = re.compile("".join(loose), re.DOTALL)
        self._begin, self._end = self.literals[0], self.literals[-1]

    @property
    def is_any(self) -> bool:
        """Whether it matches every name, as `{p*}` does."""
        return [capture.is_text for capture in self.captures] == [True] and not any(self.literals)

    def match(self, name: str) -> tuple[str, ...] | None:
        """Return the texts that the captures stand for in a name; None if it does not match."""
        return self._matched(self._regex, name)

    def match_loosely(self, name: str) -> tuple[str, ...] | None:
        """Return what `match` does, but let integers be of any digits."""
        return self._matched(self._loose, name)

    def _matched(self, regex: re.Pattern[str], name: str) -> tuple[str, ...] | None:
        if not (name.startswith(self._begin) and name.endswith(self._end)):
            return None
        found = regex.fullmatch(name)
        return None if found is None else found.groups()

    def filled(self, values: Mapping[str, object]) -> str:
        """Return the name for these values of the captures."""
        pieces = [self.literals[0]]
        for capture, literal in zip(self.captures, self.literals[1:]):
            pieces += [str(values[capture.name]), literal]
        return "".join(pieces)

    def __repr__(self) -> str:
        return f"NamePattern({self.text!r})"
