"""How many examples of a property are drawn where that is not the usual number."""

from __future__ import annotations

from hypothesis import settings

# As many as the profile draws for the quick part of the suite (`conftest.py`).
QUICK = 20


def many(count: int) -> settings:
    """Return the settings of a property that needs many examples to be sure of; the quick part draws a few."""
    return settings(max_examples=QUICK if settings().max_examples == QUICK else count)
