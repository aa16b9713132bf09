"""A strategy of a million ranks: what is asked of some of them costs as much as it does of few."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import write_shard
from support.command_line import done, measure_apart, refused
from support.examples import few

from reshard_mpi.runs.open_run import MAX_TARGETS
from reshard_mpi.text import MIB

SPEC = """
mesh = { dp = 1024, tp = 1024 }
[[parameter]]
match = "w*"
split = { 0 = ["tp"] }
"""


@pytest.fixture
def conversion(tmp_path: Path) -> list[str]:
    (tmp_path / "src").mkdir()
    write_shard({f"w{number}": np.zeros((1024, 1), np.float32) for number in range(4)}, tmp_path / "src" / "net.ckpt")
    (tmp_path / "spec.toml").write_text(SPEC)
    return [str(tmp_path / "src"), str(tmp_path / "dst"), "--dst-strategy", str(tmp_path / "spec.toml")]


@pytest.mark.parametrize(
    ("some", "ranks"),
    [
        (["--rank", "0", "--rank", "1048575"], [0, (1 << 20) - 1]),
        (["--part", "5/300000"], [5, 300_005, 600_005, 900_005]),
        (["--part", "7/2000000"], [7]),
        (["--part", "1048577/2000000"], []),
    ],
)
def test_some_of_a_million_targets(
    monkeypatch: pytest.MonkeyPatch, conversion: list[str], some: list[str], ranks: list[int]
) -> None:
    from reshard_mpi.runs import open_run

    looked_at: list[Path] = []
    monkeypatch.setattr(open_run, "refuse_overlap", lambda files, target, paths: looked_at.extend(paths))
    finished = done("plan", *conversion, *some, "--json")
    assert [target["rank"] for target in json.loads(finished.out)["targets"]] == ranks
    assert len(looked_at) == len(ranks)


@pytest.mark.slow
def test_in_little_memory(conversion: list[str]) -> None:
    finished = measure_apart("plan", *conversion, "--rank", "0")
    assert finished.code == 0 and finished.peak_rss_bytes < 100 * MIB


@pytest.mark.parametrize("part", few(1, [[], ["--part", "1/3"]]))
def test_too_many_targets_for_one_run(conversion: list[str], part: list[str]) -> None:
    for command in ("plan", "transform"):
        said = refused(command, *conversion, *part, code=2)
        assert "there are too many targets for one run" in said
        assert f"at most {MAX_TARGETS}" in said and "16 parts or more (--part I/N)" in said
