"""Runs that convert elements: several processes fill a target, verify it, and tell together what was too large."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from support.cases import Side
from support.checkpoints import as_read, read_shard
from support.conversions import transform_apart, write_conversion
from support.oracle import RawLayout

from reshard_mpi.processes.host import ONE_THREAD

# Makes every plan one that converts all numbers to float16.
CONVERTING = """
from reshard_mpi.formats.dtypes import BY_NAME, FLOATS
from reshard_mpi.planning.made_tensors import converted
from reshard_mpi.planning.rank_plan import PlannedTensors
from reshard_mpi.runs import scheduling as division
from reshard_mpi.runs.planner import Planner

division.CUT_BYTES = 16
plan_as_stored = Planner.plan
half = BY_NAME["float16"]

def as_half(group):
    if group.kind.dtype not in FLOATS:
        return group
    routes = tuple(route._replace(tensors=converted(route.tensors, half)) for route in group.routes)
    return group._replace(kind=group.kind._replace(dtype=half), routes=routes)

def plan(self, target_rank, **options):
    made = plan_as_stored(self, target_rank, **options)
    groups = [as_half(group) for group in made.tensors.groups]
    return made._replace(tensors=PlannedTensors(groups, made.tensors.group_of))

Planner.plan = plan
"""


def converting(folder: Path) -> dict[str, str]:
    """Return the environment in which every process of a run converts, and small files are filled by several."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(CONVERTING)
    path = os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", "")]).rstrip(":")
    return {"PYTHONPATH": path, **ONE_THREAD}


def side(ranks: int, rows: int) -> Side:
    """Return ranks that hold the rows of both tensors in so many parts, and all of them the counter."""
    axes = {"w": (0, -1) if rows > 1 else (-1, -1), "b": (0,) if rows > 1 else (-1,), "step": ()}
    return Side(ranks, 1, {name: RawLayout((ranks,), map_) for name, map_ in axes.items()})


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("kind", ["ckpt", "hdf5"])
def test_targets_are_converted_verified_and_told(tmp_path: Path, kind: str, jobs: int) -> None:
    draw = np.random.default_rng(8)
    tensors = {
        "w": draw.standard_normal((64, 48)).astype(np.float32),
        "b": np.array([1.0, 65520.0, -np.inf, 2.0], np.float32),
        "step": np.array(7, np.int32),
    }
    tensors["w"].flat[draw.choice(tensors["w"].size, 1000, replace=False)] *= 1e8
    with np.errstate(over="ignore"):
        expected = {**tensors, **{name: tensors[name].astype(np.float16) for name in ("w", "b")}}
    too_large = {"w": int(np.isinf(expected["w"]).sum()), "b": 1}
    c = write_conversion(tmp_path, kind, side(2, 2), side(1, 1), tensors)
    report = tmp_path / "report.json"
    options = ("--verify", "--jobs", str(jobs), "--report", str(report))
    finished = transform_apart(c, *options, env=converting(tmp_path), check=True)
    told = [line for line in finished.err.splitlines() if line.startswith("warning")]
    assert sorted(told) == [
        "warning: 1 element of 'b' is too large for float16 and became infinite",
        f"warning: {too_large['w']} elements of 'w' are too large for float16 and became infinite",
    ]
    assert read_shard(c.written(0)) == as_read(expected)
    (facts,) = json.loads(report.read_text())["targets"]
    assert {overflow["tensor"]: overflow["elements"] for overflow in facts["overflows"]} == too_large
    assert facts["processes"] == jobs
    assert facts["needed_bytes"] == sum(array.nbytes for array in tensors.values())
    assert 0 <= facts["requested_bytes"] - facts["needed_bytes"] <= 4 * (jobs - 1)
    assert facts["written_bytes"] == sum(array.nbytes for array in expected.values())
