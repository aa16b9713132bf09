"""Memory of a process that reads objects: bounded, and no more than the governor has granted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import write_ranks
from support.command_line import measure_apart
from support.object_servers import Bucket, upload

from reshard_mpi.text import MIB

pytestmark = pytest.mark.slow

WAYS = {"rows": (0, []), "columns": (1, []), "rows in another type": (0, ["--to", "torch", "--dtype", "bf16"])}


@pytest.mark.parametrize("way", WAYS)
def test_peak(seaweedfs: Bucket, tmp_path: Path, way: str) -> None:
    dim, options = WAYS[way]
    draw = np.random.default_rng(0)
    write_ranks({0: {f"w{number}": draw.random((1024, 2048), np.float32) for number in range(24)}}, tmp_path / "src")
    upload(tmp_path / "src", seaweedfs / "src")
    (tmp_path / "cut.toml").write_text(f'mesh = {{ d = 4 }}\n[[parameter]]\nmatch = "*"\nsplit = {{ {dim} = ["d"] }}\n')
    report = tmp_path / "report.json"
    words = [tmp_path / "out", "--dst-strategy", tmp_path / "cut.toml", "--jobs", "1", "--report", report, *options]
    measured = measure_apart("transform", seaweedfs / "src", *words)
    assert measured.code == 0, measured.err
    leased_bytes = max(target["leased_bytes"] for target in json.loads(report.read_text())["targets"])
    assert measured.peak_rss_bytes <= min(leased_bytes, 128 * MIB)
