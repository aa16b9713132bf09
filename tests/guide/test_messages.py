"""The listing of the words of all errors is up to date."""

from __future__ import annotations

from support import messages


def test_messages_are_those_of_the_listing() -> None:
    """It shows all words of a change at once; other tests look for the facts: names, ranks, paths, numbers."""
    assert messages.LISTING.read_text() == messages.listing(), "python tests/support/messages.py writes it"
