"""What tests of processes share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for leases that no other test shares."""
    monkeypatch.setenv("RESHARD_MPI_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"
