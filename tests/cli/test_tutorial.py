"""Scripts of the tutorial's first story under real launchers: the network of MindSpore's guide, and its pipeline."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from support.cases import Side
from support.checkpoints import Arrays, as_read, expected_rank, read_shard, write_shard, write_shards, write_strategy
from support.launch import MPI, by_one_mpi, mpirun_command
from support.oracle import RawLayout
from support.processes import Finished, run_command

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parents[2] / "launch" / "tutorial" / "1_eight_to_four"

SHAPES = {
    "layer1.weight": (784, 512),
    "layer1.bias": (512,),
    "layer2.weight": (512, 512),
    "layer2.bias": (512,),
    "layer3.weight": (512, 10),
    "layer3.bias": (10,),
}


def test_by_rank(mpi: MPI, tmp_path: Path) -> None:
    """Into folders that are there, of two ranks, and that are not; then over what is there."""
    for rank in (0, 3):
        (tmp_path / "dst" / f"rank_{rank}").mkdir(parents=True)
    make_by_rank(tmp_path)
    for _ in range(2):
        finished = start(mpi, 4, "transform_by_rank.py", *by_rank_arguments(tmp_path))
        assert finished.code == 0, finished
        check_written(eight_to_four()[1], network(), tmp_path / "dst")


@by_one_mpi
def test_by_rank_with_too_many_ranks(mpi: MPI, tmp_path: Path) -> None:
    """A rank the target does not have says so; its launcher may stop the others for it."""
    make_by_rank(tmp_path)
    finished = start(mpi, 5, "transform_by_rank.py", *by_rank_arguments(tmp_path))
    assert finished.code != 0, finished
    assert "rank 4: target rank out of range\n  expected: 0 to 3\n  got: 4\n" in finished.err, finished
    assert "Traceback" not in finished.err, finished


@by_one_mpi
def test_pipeline(mpi: MPI, tmp_path: Path) -> None:
    """By fewer ranks than there are targets; below, by as many."""
    source, target = pipeline_to_four()
    arguments = make_pipeline(source, target, tmp_path)
    finished = start(mpi, 3, "transform_pipeline.py", *arguments)
    assert finished.code == 0, finished
    check_written(target, pipeline_tensors(), tmp_path / "dst")


@by_one_mpi
def test_pipeline_weights_only(mpi: MPI, tmp_path: Path) -> None:
    source, target = pipeline_to_four()
    weights = Side(4, 1, {name: target.layouts[name] for name in SHAPES})
    arguments = make_pipeline(source, weights, tmp_path)
    finished = start(mpi, 4, "transform_pipeline.py", *arguments, "--weights-only")
    assert finished.code == 0, finished
    check_written(weights, {name: pipeline_tensors()[name] for name in SHAPES}, tmp_path / "dst")


@by_one_mpi
def test_pipeline_by_the_command_line(mpi: MPI, tmp_path: Path) -> None:
    """Neither merging nor a script is needed: a folder of strategies is merged by itself."""
    source, target = pipeline_to_four()
    weights = Side(4, 1, {name: target.layouts[name] for name in SHAPES})
    src, dst, src_strategy, dst_strategy = make_pipeline(source, weights, tmp_path)
    command = [sys.executable, "-m", "reshard_mpi", "transform", src, dst, "--unlisted", "drop"]
    options = ["--src-strategy", src_strategy, "--dst-strategy", dst_strategy]
    run_command(mpirun_command(mpi, 4, [*command, *options]), check=True)
    check_written(weights, {name: pipeline_tensors()[name] for name in SHAPES}, tmp_path / "dst")


@by_one_mpi
def test_pipeline_with_a_stage_missing(mpi: MPI, tmp_path: Path) -> None:
    arguments = make_pipeline(*pipeline_to_four(), tmp_path)
    for path in (tmp_path / "src_strategy").glob("strategy_rank[0-3].ckpt"):
        path.unlink()
    finished = start(mpi, 2, "transform_pipeline.py", *arguments)
    assert finished.code != 0, finished
    assert finished.err.count("a pipeline stage is missing from the strategy") == 1, finished
    assert "Traceback" not in finished.err, finished
    assert not (tmp_path / "dst").exists()


def eight_to_four() -> tuple[Side, Side]:
    """8 ranks, layer1's MatMul cut ((2,1),(1,2)), to 4: layer1 ((1,4),(4,1)), optimizer cut.

    Layer3 is cut ((2,2),(2,1)) on both. As MindSpore compiles it, the 8 ranks' slices go by the mesh's middle axis.
    """
    source = {name: RawLayout((8,), (-1,) * len(shape)) for name, shape in SHAPES.items()}
    source["layer1.weight"] = RawLayout((2, 2, 2), (-1, 1))
    source["layer3.weight"] = RawLayout((2, 2, 2), (1, -1))
    target = {
        "layer1.weight": RawLayout((4,), (0, -1)),
        "layer1.bias": RawLayout((4,), (-1,), 4),
        "layer2.weight": RawLayout((4,), (-1, -1), -1),
        "layer2.bias": RawLayout((4,), (-1,), 4),
        "layer3.weight": RawLayout((2, 2), (0, -1), 2),
        "layer3.bias": RawLayout((4,), (-1,)),
    }
    return Side(8, 1, with_momentum(source)), Side(4, 1, with_momentum(target))


def pipeline_to_four() -> tuple[Side, Side]:
    """8 ranks, layer3 in a stage of its own, optimizer sharding; to 4 ranks, one stage. Step counters on every rank."""
    source = {
        "layer1.weight": RawLayout((2, 2), (-1, 0), 2),
        "layer1.bias": RawLayout((2, 2), (0,), 2),
        "layer2.weight": RawLayout((2, 2), (0, -1), -1),
        "layer2.bias": RawLayout((4,), (-1,), 4),
        "layer3.weight": RawLayout((2, 2), (-1, -1), 2, stages=(1,)),
        "layer3.bias": RawLayout((4,), (-1,), stages=(1,)),
    }
    counters = dict.fromkeys(("learning_rate", "global_step"), RawLayout((4,), (), stages=(0, 1)))
    one_stage = dict.fromkeys(counters, RawLayout((4,), ()))
    return (
        Side(8, 2, {**with_momentum(source), **counters}, frozenset(counters)),
        Side(4, 1, {**eight_to_four()[1].layouts, **one_stage}, frozenset(counters)),
    )


def with_momentum(layouts: dict[str, RawLayout]) -> dict[str, RawLayout]:
    return layouts | {f"moments.{name}": layout for name, layout in layouts.items()}


def network() -> Arrays:
    random = np.random.default_rng(5)
    names = [*SHAPES, *(f"moments.{name}" for name in SHAPES)]
    return {name: random.standard_normal(SHAPES[name.removeprefix("moments.")], np.float32) for name in names}


def pipeline_tensors() -> Arrays:
    return {**network(), "learning_rate": np.array(0.01, np.float32), "global_step": np.array(5625, np.int32)}


def make_by_rank(folder: Path) -> None:
    source, target = eight_to_four()
    write_shards(source, network(), folder / "src", "ckpt")
    for side, name in ((source, "src_strategy"), (target, "dst_strategy")):
        write_strategy(side, folder / name).rename(folder / f"{name}.ckpt")


def by_rank_arguments(folder: Path) -> list[str]:
    return [str(folder / name) for name in ("src", "dst", "src_strategy.ckpt", "dst_strategy.ckpt")]


def make_pipeline(source: Side, target: Side, folder: Path) -> list[str]:
    """Lay out a training run: shards named by step, the graph beside them, a strategy file a rank; return arguments."""
    for rank in range(source.world_size):
        at = folder / "src" / f"rank_{rank}"
        at.mkdir(parents=True)
        write_shard(expected_rank(source, pipeline_tensors(), rank), at / "checkpoint-3_1875.ckpt")
        (at / "checkpoint-graph.meta").write_bytes(b"\x0a\x05graph\x12\x03net")
    stages = sorted(write_strategy(source, folder / "by_stage").iterdir())
    (folder / "src_strategy").mkdir()
    for rank in range(source.world_size):
        copy = folder / "src_strategy" / f"strategy_rank{rank}.ckpt"
        copy.write_bytes(stages[rank // source.stage_size].read_bytes())
    write_strategy(target, folder / "dst_strategy").rename(folder / "dst_strategy.ckpt")
    return [str(folder / name) for name in ("src", "dst", "src_strategy", "dst_strategy.ckpt")]


def start(mpi: MPI, ranks: int, script: str, *arguments: str) -> Finished:
    return run_command(mpirun_command(mpi, ranks, [sys.executable, str(SCRIPTS / script), *arguments]))


def check_written(target: Side, tensors: Arrays, folder: Path) -> None:
    """Compare every shard with the oracle, and see that nothing else was written."""
    for rank in range(target.world_size):
        written = read_shard(folder / f"rank_{rank}" / f"checkpoint_{rank}.ckpt")
        assert written == as_read(expected_rank(target, tensors, rank))
    assert names(folder) == {f"rank_{rank}/checkpoint_{rank}.ckpt" for rank in range(target.world_size)}


def names(folder: Path, hidden: Iterable[str] = (".reshard_mpi", "reshard.json")) -> set[str]:
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in files if path.parts[0] not in hidden}
