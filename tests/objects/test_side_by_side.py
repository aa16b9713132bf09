"""Targets of short parts of the same objects are written side by side, as many as memory allows, each for itself."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import write_ranks
from support.command_line import done, run_here
from support.conversions import shards
from support.examples import few
from support.local_objects import LocalObjects, served

from reshard_mpi.runs import target_plans, target_writer
from reshard_mpi.text import MIB

RANKS = 4
COLUMNS = 'mesh = { d = 4 }\n[[parameter]]\nmatch = "*"\nsplit = { 1 = ["d"] }\n'


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalObjects]:
    draw = np.random.default_rng(0)
    tensors = {f"w{number}": draw.random((1024, 1024), np.float32) for number in range(4)}
    write_ranks({0: tensors}, tmp_path / "src", "safetensors")
    (tmp_path / "columns.toml").write_text(COLUMNS)
    done("transform", tmp_path / "src", tmp_path / "local", "--dst-strategy", tmp_path / "columns.toml")
    with served(tmp_path) as local:
        yield local


def words(local: LocalObjects, *options: str) -> list[str]:
    return [local / "src", str(local.folder / "dst"), "--dst-strategy", str(local.folder / "columns.toml"), *options]


@pytest.mark.parametrize("step", few(1, [0, 1, 3]))
def test_a_target_that_fails_leaves_the_others_alone(
    local: LocalObjects, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Before it has written anything, or when all have written a part; a later run makes it."""
    fill = target_writer.write_shard

    def spoiled(target: Any, **by_name: Any) -> Generator[float, None, Any]:
        steps = fill(target, **by_name)
        for _ in range(step if target.plan.target_rank == 2 else 0):
            yield next(steps)
        if target.plan.target_rank == 2:
            raise OSError(5, "a disk", "target 2")
        return (yield from steps)

    with monkeypatch.context() as patch:
        patch.setattr(target_writer, "write_shard", spoiled)
        finished = run_here("transform", *words(local))
    assert finished.code == 4 and "target 2" in finished.err, finished
    written = shards(local.folder / "dst")
    expected = shards(local.folder / "local")
    assert {name: content for name, content in expected.items() if content is not None and "rank_2" not in name} == {
        name: content for name, content in written.items() if content is not None
    }
    done("transform", *words(local, "--resume"))
    assert shards(local.folder / "dst") == expected


def test_a_signal_ends_all(local: LocalObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing half-written stays under any name, and the same command goes on."""
    fill = target_writer.write_shard

    def stopped(target: Any, **by_name: Any) -> Generator[float, None, Any]:
        steps = fill(target, **by_name)
        yield next(steps)
        if target.plan.target_rank == 1:
            raise KeyboardInterrupt
        return (yield from steps)

    with monkeypatch.context() as patch:
        patch.setattr(target_writer, "write_shard", stopped)
        assert run_here("transform", *words(local)).code == 130
    assert not list((local.folder / "dst").glob("rank_*/*"))
    done("transform", *words(local, "--resume"))
    assert shards(local.folder / "dst") == shards(local.folder / "local")


@pytest.mark.parametrize("most", few(1, [3, 1, 8]))
def test_so_many_at_a_time(local: LocalObjects, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """All rows are read as often as there are groups."""
    monkeypatch.setattr(target_plans, "_MOST_SIDE_BY_SIDE", most)
    done("transform", *words(local))
    groups = -(-RANKS // most)
    assert groups * 16 * MIB <= 1.01 * local.read_bytes <= groups * 1.03 * 16 * MIB
    assert shards(local.folder / "dst") == shards(local.folder / "local")


@pytest.mark.slow
def test_as_many_as_memory_allows(local: LocalObjects, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The memory of all is reserved at once; with room for one of them they follow one another."""

    def leased(*options: str) -> set[int]:
        local.forget()
        report = tmp_path / "report.json"
        done("transform", *words(local, "--overwrite", "--report", str(report), *options))
        return {target["leased_bytes"] for target in json.loads(report.read_text())["targets"]}

    (all_bytes,) = leased()
    with monkeypatch.context() as patch:
        patch.setattr(target_plans, "_MOST_SIDE_BY_SIDE", 1)
        (one_bytes,) = leased()
    assert one_bytes + 3 * 2 * MIB < all_bytes < one_bytes + 32 * MIB
    assert leased("--memory", str(one_bytes + MIB)) == {one_bytes}
    assert local.read_bytes >= 3.9 * 16 * MIB
    assert shards(local.folder / "dst") == shards(local.folder / "local")
