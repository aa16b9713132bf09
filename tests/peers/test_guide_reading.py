"""What the guide shows of reading without converting, with dask, torch, transformers and MindSpore themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.command_line import done
from support.pages import GUIDE, block_run_by

import reshard_mpi

PAGE = (GUIDE / "reading.md").read_text()


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    """The folder that the page begins in."""
    done("demo", tmp_path / "try")
    return tmp_path / "try"


def run(test: str, folder: Path, *launcher: str) -> str:
    """Run the page's block for a test as a program in a folder; return what it prints."""
    program = folder / "program.py"
    program.write_text(block_run_by(PAGE, test))
    command = [*(launcher or (sys.executable,)), str(program)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.torch
def test_dask(demo: Path) -> None:
    pytest.importorskip("dask.array")
    with reshard_mpi.open(demo / "src", src_strategy=demo / "src_strategy.ckpt") as checkpoint:
        norm = np.linalg.norm(checkpoint["layer1.weight"][...])
    assert float(run("test_dask", demo)) == pytest.approx(norm, rel=1e-5)
