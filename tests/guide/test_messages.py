"""The listing of the words of all errors is up to date."""

from __future__ import annotations

import pytest
from support import messages

# The package is parsed once: in one of the processes that run tests.
pytestmark = pytest.mark.xdist_group("syntax trees")


def test_messages_are_those_of_the_listing() -> None:
    """It shows all words of a change at once; other tests look for the facts: names, ranks, paths, numbers."""
    assert messages.LISTING.read_text() == messages.listing(), "python tests/support/messages.py writes it"
