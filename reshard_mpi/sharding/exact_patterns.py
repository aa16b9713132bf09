"""Patterns that match exactly some names and no others: names that differ in digits are put together."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator

from reshard_mpi.text import natural_key

_DIGIT = re.compile("[0-9]")
_SPECIAL = re.compile(r"[*?[]")
# Names that differ in more digits than layers, experts and the like have are listed one by one.
_MAX_DIGITS = 24
_LEAST_RANGE = 3


def exact_patterns(names: Iterable[str]) -> list[str]:
    """Return patterns (see `patterns`): each of the names matches exactly one of them, and no other name any.

    They are in the natural order of names.
    """
    alike: dict[str, list[str]] = {}
    for name in sorted(names, key=natural_key):
        alike.setdefault(_DIGIT.sub("0", name), []).append(name)
    return [pattern for group in alike.values() for pattern in _of_alike(group)]


def _of_alike(names: list[str]) -> Iterator[str]:
    """Yield the patterns of names that differ from each other in nothing but digits."""
    places = [match.start() for match in _DIGIT.finditer(names[0])]
    differing = [place for place in places if any(name[place] != names[0][place] for name in names)]
    if not 0 < len(differing) <= _MAX_DIGITS:
        yield from map(_literal, dict.fromkeys(names))
        return
    texts = frozenset("".join(name[place] for place in differing) for name in names)
    for classes in _products(texts):
        begin, parts = 0, []
        for place, digits in zip(differing, classes):
            parts += [_literal(names[0][begin:place]), _one_of(digits)]
            begin = place + 1
        yield "".join([*parts, _literal(names[0][begin:])])


def _products(texts: frozenset[str]) -> list[tuple[str, ...]]:
    """Return products of sets of digits, one for each place, which together are exactly `texts` of one length."""
    if texts == {""}:
        return [()]
    rests: dict[str, set[str]] = {}
    for text in texts:
        rests.setdefault(text[0], set()).add(text[1:])
    digits_of: dict[frozenset[str], list[str]] = {}
    for digit in sorted(rests):
        digits_of.setdefault(frozenset(rests[digit]), []).append(digit)
    return [("".join(digits), *rest) for texts, digits in digits_of.items() for rest in _products(texts)]


def _one_of(digits: Collection[str]) -> str:
    """Return the pattern of one of the digits, which are ascending."""
    if len(digits) == 1:
        return "".join(digits)
    runs: list[list[str]] = []
    for digit in digits:
        if runs and int(digit) == int(runs[-1][-1]) + 1:
            runs[-1].append(digit)
        else:
            runs.append([digit])
    texts = (f"{run[0]}-{run[-1]}" if len(run) >= _LEAST_RANGE else "".join(run) for run in runs)
    return f"[{''.join(texts)}]"


def _literal(text: str) -> str:
    """Return the pattern that matches `text` alone."""
    return _SPECIAL.sub(r"[\g<0>]", text)
