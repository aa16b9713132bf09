"""What the guide shows of MindSpore itself: that its strategy file is asked for in these words."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.pages import GUIDE, block_run_by

# MindSpore's settings belong to a process, so the block is run in one of its own, and asked what became of it.
_ASK = 'print(mindspore.get_auto_parallel_context("strategy_ckpt_config"))'


@pytest.mark.mindspore
def test_the_strategy_is_asked_for() -> None:
    program = block_run_by((GUIDE / "strategies.md").read_text(), "test_the_strategy_is_asked_for")
    command = [sys.executable, "-c", f"{program}\n{_ASK}"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    assert "'save_file': 'strategies/src_strategy_0.ckpt'" in finished.stdout
