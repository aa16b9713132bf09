"""How many examples the suite and its quick part look at, of a property or of the cases of a test."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

# As many as the profiles draw of a property (`conftest.py`): in the quick part, in the suite, and in a long search.
QUICK, WHOLE, DEEP = 3, 50, 1000


def many(count: int) -> settings:
    """Return the settings of a property of which the suite draws so many examples, the quick part a few."""
    drawn = settings().max_examples
    return settings(max_examples=QUICK if drawn == QUICK else count * drawn // WHOLE)


def one_at_a_time(*choices: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return cases that vary one thing at a time: all others have their first value.

    For things that do not depend on each other: n + m runs show what n x m do.
    """
    first = [next(iter(values)) for values in choices]
    others = [(*first[:at], value, *first[at + 1 :]) for at, values in enumerate(choices) for value in [*values][1:]]
    return [tuple(first), *others]


def few(count: int, cases: Iterable[Any]) -> list[Any]:
    """Return the cases of a test, a plain tuple of values each; the quick part runs the first `count` of them."""
    return [case if number < count else _slow(case) for number, case in enumerate(cases)]


def few_cases(count: int, names: str | tuple[str, ...], cases: Iterable[Any]) -> pytest.MarkDecorator:
    """Run a test with these cases: `parametrize` with `few` of them in the quick part."""
    return pytest.mark.parametrize(names, few(count, cases))


def _slow(case: Any) -> Any:
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, id=case.id, marks=(*case.marks, pytest.mark.slow))
    return pytest.param(*(case if type(case) is tuple else (case,)), marks=pytest.mark.slow)
