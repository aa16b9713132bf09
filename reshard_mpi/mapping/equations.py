"""Parse equations: `a.{l}.q [(g d) h], a.{l}.k [(g d) h] <=> b.{l}.qk [(g (d + d)) h]` (`parse`).

A side is one tensor or several, separated by commas: a name, its dimensions in brackets, and perhaps a type. A
dimension is an axis, a number, a product `(a b)` with the major axis first, a concatenation `(a + b)`, or `(v | m)`,
which is padded with zeros up to a multiple of m. Without brackets a tensor has any shape.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from reshard_mpi.options import ARROW

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
        match = regex.fullmatch(name)
        return None if match is None else match.groups()

    def filled(self, values: Mapping[str, object]) -> str:
        """Return the name for these values of the captures."""
        pieces = [self.literals[0]]
        for capture, literal in zip(self.captures, self.literals[1:]):
            pieces += [str(values[capture.name]), literal]
        return "".join(pieces)

    def __repr__(self) -> str:
        return f"NamePattern({self.text!r})"


# An equation of a few lines; nothing that people write is longer.
MAX_TEXT, MAX_NESTED, MAX_TENSORS, MAX_SUMMANDS = 20_000, 8, 64, 64

_TOKEN = re.compile(r"\s*(?:(?P<word>[A-Za-z_][A-Za-z0-9_]*)|(?P<number>[0-9]+)|(?P<mark>[()+|\]]))")
_NAME = re.compile(r"[^\s\[\],]+")
_TYPE = re.compile(r"\s*:\s*([A-Za-z0-9_]+)")
_MAX_DIGITS = 18


class SyntaxProblem(Exception):
    """An error in an equation, and its character position."""

    def __init__(self, problem: str, position: int) -> None:
        super().__init__(problem)
        self.problem = problem
        self.position = position


class Axis(NamedTuple):
    """An axis by its name; a number stands for an axis of that length."""

    name: str


class Sum(NamedTuple):
    """Blocks that lie one behind the other."""

    summands: tuple[Product, ...]


class Padded(NamedTuple):
    """A product with zeros behind it, up to a multiple of `multiple`: an axis or a number."""

    product: Product
    multiple: str


Factor = Axis | Sum | Padded
# The factors of a dimension, the major one first.
Product = tuple[Factor, ...]


class Term(NamedTuple):
    """One tensor of a side. dims: None: any shape. type_name: what follows the colon; None: there is none."""

    name: NamePattern
    dims: tuple[Product, ...] | None
    type_name: str | None

    @property
    def blocks(self) -> int:
        """How many blocks it consists of: the number of its summands."""
        return max((len(part.summands) for part in sums_of(self)), default=1)


class Equation(NamedTuple):
    """Two sides that hold the same elements: both sides' blocks correspond, in order."""

    text: str
    left: tuple[Term, ...]
    right: tuple[Term, ...]


def parse(text: str) -> Equation:
    """Read an equation. Raises SyntaxProblem where it is none."""
    if len(text) > MAX_TEXT:
        raise SyntaxProblem(f"the equation is longer than {MAX_TEXT} characters", MAX_TEXT)
    reader = _EquationReader(text)
    left = reader.side()
    if not reader.takes(ARROW):
        raise SyntaxProblem(f"'{ARROW}' or ',' is expected", reader.position)
    right = reader.side()
    if reader.position < len(text):
        raise SyntaxProblem("',' or the end of the equation is expected", reader.position)
    return Equation(text, left, right)


def axes_of(product: Product) -> Iterator[str]:
    """Yield the names of the axes and numbers of a product, in order, and not the multiples of padding."""
    for factor in product:
        if isinstance(factor, Axis):
            yield factor.name
        elif isinstance(factor, Padded):
            yield from axes_of(factor.product)
        else:
            for summand in factor.summands:
                yield from axes_of(summand)


def sums_of(term: Term) -> Iterator[Sum]:
    """Yield the concatenations in a tensor's dimensions, the outer before the inner."""

    def within(product: Product) -> Iterator[Sum]:
        for factor in product:
            if isinstance(factor, Padded):
                yield from within(factor.product)
            elif isinstance(factor, Sum):
                yield factor
                for summand in factor.summands:
                    yield from within(summand)

    for dim in term.dims or ():
        yield from within(dim)


def pads_of(product: Product) -> Iterator[Padded]:
    """Yield the padded factors of a product, the outer before the inner."""
    for factor in product:
        if isinstance(factor, Padded):
            yield factor
            yield from pads_of(factor.product)
        elif isinstance(factor, Sum):
            for summand in factor.summands:
                yield from pads_of(summand)


class _EquationReader:
    """Reads an equation from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.position = self._after_space(0)

    def side(self) -> tuple[Term, ...]:
        terms = [self._term()]
        while self.takes(","):
            terms.append(self._term())
            if len(terms) > MAX_TENSORS:
                raise SyntaxProblem(f"a side has more than {MAX_TENSORS} tensors", self.position)
        return tuple(terms)

    def takes(self, mark: str) -> bool:
        """Go over `mark` if it comes next."""
        if not self._text.startswith(mark, self.position):
            return False
        self.position = self._after_space(self.position + len(mark))
        return True

    def _term(self) -> Term:
        match = _NAME.match(self._text, self.position)
        if match is None or match.group().startswith(ARROW):
            raise SyntaxProblem("the name of a tensor is expected", self.position)
        try:
            name = NamePattern(match.group())
        except PatternProblem as error:
            raise SyntaxProblem(str(error), self.position) from None
        self.position = self._after_space(match.end())
        dims = None
        if self.takes("["):
            dims = self._dims()
        match = _TYPE.match(self._text, self.position)
        if match is not None:
            self.position = self._after_space(match.end())
        return Term(name, dims, match.group(1) if match is not None else None)

    def _dims(self) -> tuple[Product, ...]:
        dims = list[Product]()
        while True:
            start = self.position
            mark, value = self._token("an axis, '(' or ']'")
            if value == "]":
                return tuple(dims)
            if mark != "mark":
                dims.append((Axis(value),))
            elif value == "(":
                dims.append(self._group(1))
            else:
                raise SyntaxProblem("an axis, '(' or ']' is expected", start)

    def _group(self, nested: int) -> Product:
        """Read what follows an opening parenthesis."""
        if nested > MAX_NESTED:
            raise SyntaxProblem(f"parentheses are nested more than {MAX_NESTED} deep", self.position)
        summands = [self._product(nested)]
        while True:
            start = self.position
            _, value = self._token("'+', '|' or ')'")
            if value == ")":
                return summands[0] if len(summands) == 1 else (Sum(tuple(summands)),)
            if value == "+":
                summands.append(self._product(nested))
                if len(summands) > MAX_SUMMANDS:
                    raise SyntaxProblem(f"a concatenation has more than {MAX_SUMMANDS} parts", self.position)
            elif value == "|" and len(summands) == 1:
                kind, multiple = self._token("an axis or a number")
                end = self.position
                if kind == "mark" or self._token("')'")[1] != ")":
                    raise SyntaxProblem("an axis or a number, and then ')', are expected", end)
                return (Padded(summands[0], multiple),)
            else:
                raise SyntaxProblem("'+' or ')' is expected", start)

    def _product(self, nested: int) -> Product:
        factors = list[Factor]()
        while True:
            start = self.position
            kind, value = self._token("an axis, '(' or ')'")
            if kind != "mark":
                factors.append(Axis(value))
            elif value == "(":
                factors.extend(self._group(nested + 1))
            elif value == "]":
                raise SyntaxProblem("')' is expected before ']'", start)
            else:
                self.position = start
                if not factors:
                    raise SyntaxProblem("an axis or a number is expected", start)
                return tuple(factors)

    def _token(self, expected: str) -> tuple[str, str]:
        """Return the kind and the text of what comes next."""
        match = _TOKEN.match(self._text, self.position)
        if match is None or match.lastgroup is None:
            raise SyntaxProblem(f"{expected} is expected", self.position)
        value = match.group(match.lastgroup)
        if match.lastgroup == "number" and value[0] == "0" and value != "0":
            raise SyntaxProblem("a number without leading zeros is expected", match.start(match.lastgroup))
        if match.lastgroup == "number" and len(value) > _MAX_DIGITS:
            raise SyntaxProblem(f"a number of at most {_MAX_DIGITS} digits is expected", match.start(match.lastgroup))
        self.position = self._after_space(match.end())
        return match.lastgroup, value

    def _after_space(self, position: int) -> int:
        while position < len(self._text) and self._text[position].isspace():
            position += 1
        return position
