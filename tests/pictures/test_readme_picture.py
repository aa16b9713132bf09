"""The picture in README.md is what the program draws today."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command_line import Capture, run_here
from support.module_tree import PACKAGE


def test_the_picture_of_the_readme_is_drawn_by_the_program(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_here(capsys, "demo", "try").code == 0
    monkeypatch.chdir(tmp_path / "try")
    strategies = ("--src-strategy", "src_strategy.ckpt", "--dst-strategy", "dst_strategy.ckpt")
    done = run_here(capsys, "plan", "src", "out", *strategies, "--tensor", "layer1.weight", "--plot", "plan.svg")
    assert done.code == 0, done
    assert Path("plan.svg").read_text() == (PACKAGE / "guide" / "plan.svg").read_text()
