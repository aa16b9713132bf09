"""The picture in README.md is what the program draws today."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command_line import done
from support.module_tree import PACKAGE


def test_the_picture_of_the_readme_is_drawn_by_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done("demo", "try")
    monkeypatch.chdir(tmp_path / "try")
    strategies = ("--src-strategy", "src_strategy.ckpt", "--dst-strategy", "dst_strategy.ckpt")
    done("plan", "src", "out", *strategies, "--tensor", "layer1.weight", "--plot", "plan.svg")
    assert Path("plan.svg").read_text() == (PACKAGE / "guide" / "plan.svg").read_text()
