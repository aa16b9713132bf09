"""The toy formats in the table of formats, as an author would put them there."""

from __future__ import annotations

import pytest

from reshard_mpi import formats


@pytest.fixture
def in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enter both toy formats in the table of formats, for one test."""
    monkeypatch.setitem(formats._MODULES, "toy", ("support.toy_format", (".toy",), ()))
    monkeypatch.setitem(formats._MODULES, "toys", ("support.toy_folder", (".toypart",), ("toys.index.json",)))
    monkeypatch.setattr(formats, "NAMES", tuple(formats._MODULES))
    monkeypatch.setattr(formats, "SUFFIXES", (*formats.SUFFIXES, ".toy", ".toypart"))
