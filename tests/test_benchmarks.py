"""Every benchmark runs, at toy size: what it prints is not judged here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from processes import run_command

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("kind", ["ckpt", "hdf5"])
def test_conversion(kind: str, tmp_path: Path) -> None:
    arguments = ["conversion", "--megabytes", "1", "--pairs", "1", "--format", kind, "--folder", tmp_path]
    finished = run_command([sys.executable, "-m", "benchmarks", *arguments], cwd=ROOT, check=True)
    assert "ratio" in finished.stdout
    assert not list(tmp_path.iterdir())
