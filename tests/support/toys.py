"""The toy formats in the table of formats, as an author would put them there."""

from __future__ import annotations

import pytest

from reshard_mpi import formats


@pytest.fixture
def in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enter both toy formats in the table of formats, for one test."""
    monkeypatch.setitem(formats._FORMS, "toy", formats._Form("support.toy_format", (".toy",)))
    folder = formats._Form("support.toy_folder", (".toypart",), ("toys.index.json",))
    monkeypatch.setitem(formats._FORMS, "toys", folder)
    monkeypatch.setattr(formats, "NAMES", tuple(formats._FORMS))
    monkeypatch.setattr(formats, "TARGETS", (*formats.TARGETS, "toy", "toys"))
    monkeypatch.setattr(formats, "SUFFIXES", (*formats.SUFFIXES, ".toy", ".toypart"))
